# SPDX-License-Identifier: Apache-2.0
"""reset_slots and renumber_slots in Triton: the side data of slots."""

import torch
import triton
import triton.language as tl

from keyformer_vllm.ops.triton.checks import CHECKED, check_side, slot_place

_TOKENS = 128  # reset at a time
_SLOTS = 128  # renumbered at a time


def reset_slots(
    score: torch.Tensor,
    position: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    check_side(score.shape, score=score, position=position)
    if slot_mapping.dtype != torch.int64 or positions.dtype != torch.int64:
        raise ValueError(
            "slot_mapping, positions: must be int64, got "
            f"{slot_mapping.dtype} and {positions.dtype}"
        )
    num_layers, _, num_kv_heads, block_size = score.shape
    num_tokens = len(slot_mapping)
    if len(positions) != num_tokens:
        raise ValueError(
            f"positions: must be as many as slot_mapping, {num_tokens}, "
            f"got {len(positions)}"
        )
    if num_tokens == 0:
        return
    _reset_kernel[(triton.cdiv(num_tokens, _TOKENS), num_layers, num_kv_heads)](
        score,
        position,
        slot_mapping,
        positions,
        num_tokens,
        *score.stride()[:3],
        *position.stride()[:3],
        BLOCK_SIZE=block_size,
        TOKENS=_TOKENS,
    )


def renumber_slots(
    place: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
) -> None:
    check_side(place.shape, place=place, position=position)
    num_layers, _, num_kv_heads, block_size = place.shape
    num_reqs, max_blocks = block_table.shape
    num_tiles = triton.cdiv(max_blocks * block_size, _SLOTS)
    if num_reqs == 0 or num_tiles == 0:
        return
    # The request's slots are the fastest: its tiles read the same positions.
    _renumber_kernel[(num_tiles, num_reqs * num_kv_heads, num_layers)](
        place,
        position,
        block_table,
        kv_lens,
        *place.stride()[:3],
        *position.stride()[:3],
        block_table.stride(0),
        num_kv_heads,
        BLOCK_SIZE=block_size,
        SLOTS=_SLOTS,
        **CHECKED,
    )


@triton.jit
def _reset_kernel(
    score_ptr,  # [num_layers, num_blocks, num_kv_heads, BLOCK_SIZE] float32
    position_ptr,  # the same, int32
    slot_mapping_ptr,  # [num_tokens] int64
    positions_ptr,  # [num_tokens] int64
    num_tokens,
    score_layer_stride,
    score_block_stride,
    score_head_stride,
    position_layer_stride,
    position_block_stride,
    position_head_stride,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    layer = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1)
    written = slot >= 0
    value = tl.load(positions_ptr + token, mask=written, other=0).to(tl.int32)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    score_ptr += layer * score_layer_stride + head * score_head_stride
    position_ptr += layer * position_layer_stride + head * position_head_stride
    zero = tl.zeros([TOKENS], dtype=tl.float32)
    tl.store(score_ptr + block * score_block_stride + offset, zero, mask=written)
    tl.store(position_ptr + block * position_block_stride + offset, value, mask=written)


@triton.jit
def _renumber_kernel(
    place_ptr,  # [num_layers, num_blocks, num_kv_heads, BLOCK_SIZE] int32
    position_ptr,  # the same
    block_table_ptr,  # [num_reqs, max_blocks] int32
    kv_lens_ptr,  # [num_reqs] int32
    place_layer_stride,
    place_block_stride,
    place_head_stride,
    position_layer_stride,
    position_block_stride,
    position_head_stride,
    block_table_stride,
    num_kv_heads,
    BLOCK_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    # A tile of slots against all: no table of positions, whose size nobody knows.
    first = tl.program_id(0) * SLOTS
    request = tl.program_id(1) // num_kv_heads
    head = (tl.program_id(1) % num_kv_heads).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    kv_len = tl.load(kv_lens_ptr + request)
    if first >= kv_len:
        return
    block_table_ptr += request.to(tl.int64) * block_table_stride
    place_ptr += layer * place_layer_stride + head * place_head_stride
    position_ptr += layer * position_layer_stride + head * position_head_stride
    slot = first + tl.arange(0, SLOTS)
    exists = slot < kv_len
    block, offset = slot_place(block_table_ptr, slot, exists, BLOCK_SIZE)
    own = tl.load(
        position_ptr + block * position_block_stride + offset, mask=exists, other=0
    )
    lower = tl.zeros([SLOTS], dtype=tl.int32)
    equal = tl.zeros([SLOTS], dtype=tl.int32)
    for start in range(0, kv_len, SLOTS):
        other_slot = start + tl.arange(0, SLOTS)
        is_other = other_slot < kv_len
        from_block, from_offset = slot_place(
            block_table_ptr, other_slot, is_other, BLOCK_SIZE
        )
        at = position_ptr + from_block * position_block_stride + from_offset
        other = tl.load(at, mask=is_other, other=0)
        is_lower = is_other[None, :] & (other[None, :] < own[:, None])
        is_equal = is_other[None, :] & (other[None, :] == own[:, None])
        lower += tl.sum(is_lower.to(tl.int32), 1)
        equal += tl.sum(is_equal.to(tl.int32), 1)
    held_once = (own >= 0) & (equal == 1)
    tl.device_assert(held_once | (slot >= kv_len), "position: negative or held twice")
    tl.store(place_ptr + block * place_block_stride + offset, lower, mask=exists)
