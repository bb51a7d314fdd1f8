# SPDX-License-Identifier: Apache-2.0
"""The operators in Triton, for caches of rows (layouts nhd and hnd).

Twins of the CUDA kernels for where those cannot be built: the same kept sets, moves
and noise, the same order of adding scores, more passes over the side data. With
TRITON_INTERPRET=1 they run on CPU tensors.
"""

from keyformer_vllm.ops.triton.compact_kv import compact_kv
from keyformer_vllm.ops.triton.noise import draw_noise
from keyformer_vllm.ops.triton.score_keys import score_keys
from keyformer_vllm.ops.triton.select_keep import select_keep
from keyformer_vllm.ops.triton.slots import renumber_slots, reset_slots

__all__ = [
    "compact_kv",
    "draw_noise",
    "renumber_slots",
    "reset_slots",
    "score_keys",
    "select_keep",
]
