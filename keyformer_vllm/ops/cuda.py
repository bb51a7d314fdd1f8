# SPDX-License-Identifier: Apache-2.0
"""Loads the CUDA operators (csrc/cuda). They serve the row layouts of ops/layout.py.

They check shapes, dtypes and strides, never values: reading one would wait for the
device. Where a kernel finds that the data break a promise, it stops the device.
"""

from typing import Any

import torch

from keyformer_vllm.ops import cpu as _schemas  # noqa: F401  # defines the operators
from keyformer_vllm.ops.layout import row_layout_number

try:
    from keyformer_vllm import _C_cuda  # type: ignore[attr-defined]  # noqa: F401
except ImportError as error:
    raise RuntimeError(
        "the CUDA extension keyformer_vllm._C_cuda cannot be loaded "
        f"({error}); build it with `python setup.py build_ext --inplace` in an "
        "environment with nvcc and a CUDA build of torch"
    ) from error


def score_keys(*args: Any) -> None:
    *rest, layout = args
    torch.ops.keyformer.score_keys.default(*rest, row_layout_number(layout))


def paged_attention_scored(*args: Any) -> None:
    *rest, layout = args
    torch.ops.keyformer.paged_attention_scored.default(*rest, row_layout_number(layout))


def renumber_slots(*args: Any) -> None:
    torch.ops.keyformer.renumber_slots.default(*args)


def reset_slots(*args: Any) -> None:
    torch.ops.keyformer.reset_slots.default(*args)


def select_keep(*args: Any) -> torch.Tensor:
    keep: torch.Tensor = torch.ops.keyformer.select_keep.default(*args)
    return keep


def compact_kv(*args: Any) -> None:
    *rest, layout = args
    torch.ops.keyformer.compact_kv.default(*rest, row_layout_number(layout))


def draw_noise(*args: Any) -> torch.Tensor:
    """As `ops.cpu.draw_noise`, all arguments by position, on the GPU."""
    noise: torch.Tensor = torch.ops.keyformer.draw_noise.default(*args)
    return noise
