# SPDX-License-Identifier: Apache-2.0
"""compact_kv in Triton: survivors of the freed front fill the holes behind it.

One program per (request, KV head), a launch per layer. Survivors and holes pair up by
rank: their slots are first written down in the order of their ranks.
"""

import torch
import triton
import triton.language as tl

from keyformer_vllm.ops.triton.checks import (
    CHECKED,
    check_rows,
    check_side,
    slot_place,
)

_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def compact_kv(
    kv_cache: torch.Tensor,
    score: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    num_evict: torch.Tensor,
    keep: torch.Tensor,
    layout: str,
) -> None:
    check_rows(kv_cache, layout)
    check_side(kv_cache.shape[:-1], score=score, position=position)
    num_layers, num_reqs, num_kv_heads, max_kv_len = keep.shape
    if keep.dtype != torch.bool or not keep.is_contiguous():
        raise ValueError(f"keep: must be contiguous bool, got {keep.dtype}")
    if max_kv_len == 0 or num_reqs == 0:
        return
    rows = kv_cache.view(_INT_OF_SIZE[kv_cache.element_size()])
    width = rows.shape[-1]
    # Slots by rank; no more can move than half of what there is.
    num_pairs = max_kv_len // 2 + 1
    slots = torch.empty(
        (2, num_reqs, num_kv_heads, num_pairs), dtype=torch.int32, device=keep.device
    )
    for layer in range(num_layers):
        _compact_kernel[(num_reqs, num_kv_heads)](
            rows[layer],
            score[layer],
            position[layer],
            block_table,
            kv_lens,
            num_evict,
            keep[layer],
            slots[0],
            slots[1],
            *rows.stride()[1:4],
            *score.stride()[1:3],
            *position.stride()[1:3],
            block_table.stride(0),
            max_kv_len,
            num_pairs,
            BLOCK_SIZE=kv_cache.shape[3],
            WIDTH=width,
            PADDED_WIDTH=triton.next_power_of_2(width),
            SLOTS=256,
            PAIRS=16,
            **CHECKED,
        )


@triton.jit
def _list_slots(
    flags_ptr,  # [max_kv_len] of the problem
    begin,
    end,
    WANTED: tl.constexpr,
    slots_ptr,  # [num_pairs], written in ascending order
    num_pairs,
    SLOTS: tl.constexpr,
):
    """Write down the slots in [begin, end) whose flag is WANTED; how many there are."""
    found = 0
    for start in range(begin, end, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        flag = tl.load(flags_ptr + slot, mask=slot < end, other=0) != 0
        match = (slot < end) & (flag == WANTED)
        rank = found + tl.cumsum(match.to(tl.int32), 0) - 1
        tl.store(slots_ptr + rank, slot, mask=match & (rank < num_pairs))
        found += tl.sum(match.to(tl.int32), 0)
    return found


@triton.jit
def _compact_kernel(
    rows_ptr,  # [num_blocks, num_kv_heads, block_size, WIDTH] K | V
    score_ptr,  # [num_blocks, num_kv_heads, block_size] float32
    position_ptr,  # the same, int32
    block_table_ptr,  # [num_reqs, max_blocks] int32
    kv_lens_ptr,  # [num_reqs] int32
    num_evict_ptr,  # [num_reqs] int32
    keep_ptr,  # [num_reqs, num_kv_heads, max_kv_len] bool
    sources_ptr,  # [num_reqs, num_kv_heads, num_pairs] int32 scratch
    targets_ptr,
    row_block_stride,
    row_head_stride,
    row_token_stride,
    score_block_stride,
    score_head_stride,
    position_block_stride,
    position_head_stride,
    block_table_stride,
    max_kv_len,
    num_pairs,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    front = tl.load(num_evict_ptr + request)
    if front == 0:
        return
    kv_len = tl.load(kv_lens_ptr + request)
    problem = request.to(tl.int64) * tl.num_programs(1) + head
    keep_ptr += problem * max_kv_len
    sources_ptr += problem * num_pairs
    targets_ptr += problem * num_pairs
    block_table_ptr += request.to(tl.int64) * block_table_stride
    num_moves = _list_slots(keep_ptr, 0, front, True, sources_ptr, num_pairs, SLOTS)
    num_holes = _list_slots(
        keep_ptr, front, kv_len, False, targets_ptr, num_pairs, SLOTS
    )
    tl.device_assert(num_moves == num_holes, "keep: wrong number of survivors")
    tl.debug_barrier()  # other threads read the lists
    column = tl.arange(0, PADDED_WIDTH)
    for start in range(0, num_moves, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        moves = pair < num_moves
        source = tl.load(sources_ptr + pair, mask=moves, other=0)
        target = tl.load(targets_ptr + pair, mask=moves, other=0)
        from_block, from_token = slot_place(block_table_ptr, source, moves, BLOCK_SIZE)
        to_block, to_token = slot_place(block_table_ptr, target, moves, BLOCK_SIZE)
        from_row = (
            from_block * row_block_stride
            + head * row_head_stride
            + from_token * row_token_stride
        )
        to_row = (
            to_block * row_block_stride
            + head * row_head_stride
            + to_token * row_token_stride
        )
        mask = moves[:, None] & (column < WIDTH)[None, :]
        row = tl.load(rows_ptr + from_row[:, None] + column[None, :], mask=mask)
        tl.store(rows_ptr + to_row[:, None] + column[None, :], row, mask=mask)
        from_score = from_block * score_block_stride + head * score_head_stride
        to_score = to_block * score_block_stride + head * score_head_stride
        score = tl.load(score_ptr + from_score + from_token, mask=moves)
        tl.store(score_ptr + to_score + to_token, score, mask=moves)
        from_side = from_block * position_block_stride + head * position_head_stride
        to_side = to_block * position_block_stride + head * position_head_stride
        position = tl.load(position_ptr + from_side + from_token, mask=moves)
        tl.store(position_ptr + to_side + to_token, position, mask=moves)
