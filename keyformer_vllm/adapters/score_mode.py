# SPDX-License-Identifier: Apache-2.0
"""When decode queries score on this machine, for this model."""

from __future__ import annotations

from typing import Any

from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.kernels import has_fused_kernel
from keyformer_vllm.config import KeyformerConfig


def score_mode_in_use(config: KeyformerConfig, vllm_config: Any) -> str:
    """The configured score mode, with ``auto`` made concrete.

    The scheduler, the workers and the checks at start-up must agree on it, because
    the query ring exists in one mode only and takes memory that vLLM plans with.

    Args:
        config: the server's policy.
        vllm_config: vLLM's configuration, block size decided.
    """
    if compat.on_gpu():
        if config.score_mode != "auto":
            return config.score_mode
        # The ring costs a decode step more than the scores inside of attention
        # (benchmarks/predict_gpu.py), but only CUDA has that kernel.
        return "fused" if has_fused_kernel(config) else "deferred"
    return config.score_mode_for(
        has_alibi=compat.uses_alibi(vllm_config),
        layout=compat.cpu_cache_layout(vllm_config),
    )
