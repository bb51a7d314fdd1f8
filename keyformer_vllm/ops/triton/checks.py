# SPDX-License-Identifier: Apache-2.0
"""What the Triton launchers check, and where a slot lies."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from keyformer_vllm.ops.layout import row_layout_number

# device_assert counts, as the device's stop; wrapping integers are meant.
CHECKED: dict[str, Any] = {"debug": True, "sanitize_overflow": False}

_SIDE_DTYPE = {"score": torch.float32, "position": torch.int32, "place": torch.int32}


def check_rows(kv_cache: torch.Tensor, layout: str) -> None:
    """Refuse a cache whose tokens are not rows.

    Raises:
        ValueError: naming the argument and its value.
    """
    row_layout_number(layout)
    if kv_cache.stride(-1) != 1:
        raise ValueError(
            "kv_cache: last dimension must be contiguous, its stride is "
            f"{kv_cache.stride(-1)}"
        )


def check_side(size: Sequence[int], **sides: torch.Tensor | None) -> None:
    """Refuse side data that do not belong to the cache.

    Args:
        sides: score, position and place, as far as they are given.

    Raises:
        ValueError: naming the argument and its value.
    """
    for name, tensor in sides.items():
        dtype = _SIDE_DTYPE[name]
        if tensor is None:
            continue
        if tensor.dtype != dtype or tuple(tensor.shape) != tuple(size):
            raise ValueError(
                f"{name}: must be {dtype} of shape {tuple(size)}, got "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: last dimension must be contiguous")


@triton.jit
def slot_place(block_table_ptr, slot, exists, BLOCK_SIZE: tl.constexpr):
    """Block (int64) and token in the block of a request's slots."""
    block = tl.load(block_table_ptr + slot // BLOCK_SIZE, mask=exists, other=0)
    return block.to(tl.int64), slot % BLOCK_SIZE
