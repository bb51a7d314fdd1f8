# SPDX-License-Identifier: Apache-2.0
"""select_keep in Triton: the rank of the last survivor, bit by bit.

One program per (request, KV head), a launch per layer. A candidate's rank is a number
of 64 bits, smaller is better: its score or the sum over its run, turned into an integer
of the opposite order. Of equal ranks the lower position is the better. The ranks are
written down once and counted in each pass; the passes end as soon as all that share the
bits found so far survive.
"""

import torch
import triton
import triton.language as tl

from keyformer_vllm.ops.triton.checks import CHECKED, check_side, slot_place
from keyformer_vllm.ops.triton.noise import NO_FUSION, draw_uniform, make_row_key

_WINDOW = 4096  # positions whose scores are summed by run at a time


def select_keep(
    score: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    num_evict: torch.Tensor,
    num_sinks: torch.Tensor,
    recent_start: torch.Tensor,
    run_size: torch.Tensor,
    random: torch.Tensor,
    noise_keys: torch.Tensor,
    max_kv_len: int,
    first_layer: int,
    first_kv_head: int,
) -> torch.Tensor:
    check_side(score.shape, score=score, position=position)
    num_layers, _, num_kv_heads, block_size = score.shape
    num_reqs = len(kv_lens)
    size = (num_layers, num_reqs, num_kv_heads, max_kv_len)
    keep = torch.empty(size, dtype=torch.bool, device=score.device)
    if keep.numel() == 0:
        return keep
    shape = (num_reqs, num_kv_heads)
    ranks = torch.empty((*shape, max_kv_len), dtype=torch.int64, device=score.device)
    window = torch.empty((*shape, _WINDOW), dtype=torch.float32, device=score.device)
    for layer in range(num_layers):
        _select_kernel[shape](
            score[layer],
            position[layer],
            block_table,
            kv_lens,
            num_evict,
            num_sinks,
            recent_start,
            run_size,
            random.view(torch.uint8),
            noise_keys,
            keep[layer].view(torch.uint8),
            ranks,
            window,
            *score.stride()[1:3],
            *position.stride()[1:3],
            block_table.stride(0),
            max_kv_len,
            first_layer + layer,
            first_kv_head,
            BLOCK_SIZE=block_size,
            SLOTS=1024,
            WINDOW=_WINDOW,
            **CHECKED,
            **NO_FUSION,
        )
    return keep


@triton.jit
def _rank_of_score(score):
    """float32 to uint64, in its upper half, of the opposite order; NaN last."""
    bits = (score + 0.0).to(tl.uint32, bitcast=True)  # -0 equals +0
    rank = tl.where(bits >> 31 != 0, bits, bits ^ 0x7FFFFFFF)
    rank = tl.where(score != score, 0xFFFFFFFF, rank)
    return rank.to(tl.uint64) << 32


@triton.jit
def _rank_of_sum(total):
    """float64 to uint64 of the opposite order; NaN last."""
    bits = (total + 0.0).to(tl.uint64, bitcast=True)
    rank = tl.where(bits >> 63 != 0, bits, bits ^ 0x7FFFFFFFFFFFFFFF)
    return tl.where(total != total, (bits ^ bits) - 1, rank)


@triton.jit
def _is_candidate(position, exists, num_sinks, recent_start):
    return exists & (position >= num_sinks) & (position < recent_start)


@triton.jit
def _draw(noise_key, layer, kv_head, position):
    """The draw that ranks a token where the policy chooses at random."""
    zero = tl.zeros([1], dtype=tl.int64)
    row_a, row_b = make_row_key(
        zero + noise_key, zero + layer, zero + kv_head, position
    )
    return draw_uniform(row_a, row_b, position)


@triton.jit
def _find_digit(counts, wanted):
    """Digit of the `wanted`-th token; how many come before it and how many have it."""
    digits = tl.arange(0, 256)
    digit = tl.sum((tl.cumsum(counts, 0) < wanted).to(tl.int32), 0)
    before = tl.sum(tl.where(digits < digit, counts, 0), 0)
    return digit, before, tl.sum(tl.where(digits == digit, counts, 0), 0)


@triton.jit
def _select_kernel(
    score_ptr,  # [num_blocks, num_kv_heads, block_size] float32
    position_ptr,  # the same, int32
    block_table_ptr,  # [num_reqs, max_blocks] int32
    kv_lens_ptr,  # [num_reqs] int32, as the next four
    num_evict_ptr,
    num_sinks_ptr,
    recent_start_ptr,
    run_size_ptr,
    random_ptr,  # [num_reqs] uint8
    noise_keys_ptr,  # [num_reqs] int64
    keep_ptr,  # [num_reqs, num_kv_heads, max_kv_len] uint8
    ranks_ptr,  # [num_reqs, num_kv_heads, max_kv_len] int64 scratch
    window_ptr,  # [num_reqs, num_kv_heads, WINDOW] float32 scratch
    score_block_stride,
    score_head_stride,
    position_block_stride,
    position_head_stride,
    block_table_stride,
    max_kv_len,
    layer,
    first_kv_head,
    BLOCK_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    problem = request.to(tl.int64) * tl.num_programs(1) + head
    keep_ptr += problem * max_kv_len
    ranks_ptr += problem * max_kv_len
    window_ptr += problem * WINDOW
    block_table_ptr += request.to(tl.int64) * block_table_stride
    score_ptr += head * score_head_stride
    position_ptr += head * position_head_stride
    kv_len = tl.load(kv_lens_ptr + request)
    count = kv_len - tl.load(num_evict_ptr + request)
    num_sinks = tl.load(num_sinks_ptr + request)
    recent_start = tl.load(recent_start_ptr + request)
    run_size = tl.load(run_size_ptr + request)
    is_random = tl.load(random_ptr + request) != 0
    noise_key = tl.load(noise_keys_ptr + request)
    kv_head = first_kv_head + head

    # Ranks of single tokens; pinned ones have 0, which is no candidate's.
    num_pinned = 0
    furthest = -1  # position of a candidate
    for start in range(0, kv_len, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        exists = slot < kv_len
        block, token = slot_place(block_table_ptr, slot, exists, BLOCK_SIZE)
        place = block * position_block_stride + token
        position = tl.load(position_ptr + place, mask=exists, other=0)
        place = block * score_block_stride + token
        score = tl.load(score_ptr + place, mask=exists, other=0.0)
        if is_random:
            score = _draw(noise_key, layer, kv_head, position)
        candidate = _is_candidate(position, exists, num_sinks, recent_start)
        rank = tl.where(candidate, _rank_of_score(score), 0)
        tl.store(ranks_ptr + slot, rank.to(tl.int64, bitcast=True), mask=exists)
        num_pinned += tl.sum((exists & ~candidate).to(tl.int32), 0)
        furthest = tl.maximum(furthest, tl.max(tl.where(candidate, position, -1), 0))
    tl.device_assert(
        num_pinned <= count, "num_evict: sinks and recent tokens exceed what may stay"
    )
    tl.debug_barrier()  # from here on other threads read what was written

    lowest_bit = 32
    if run_size > 1:
        lowest_bit = 0
        tl.device_assert(run_size <= WINDOW, "run_size: must be at most 4096")
        window = WINDOW // run_size * run_size
        for first in range(0, furthest + 1, window):
            for start in range(0, WINDOW, SLOTS):
                column = start + tl.arange(0, SLOTS)
                tl.store(window_ptr + column, tl.zeros([SLOTS], dtype=tl.float32))
            tl.debug_barrier()
            for start in range(0, kv_len, SLOTS):
                slot = start + tl.arange(0, SLOTS)
                exists = slot < kv_len
                block, token = slot_place(block_table_ptr, slot, exists, BLOCK_SIZE)
                place = block * position_block_stride + token
                position = tl.load(position_ptr + place, mask=exists, other=0)
                place = block * score_block_stride + token
                score = tl.load(score_ptr + place, mask=exists, other=0.0)
                if is_random:
                    score = _draw(noise_key, layer, kv_head, position)
                inside = _is_candidate(position, exists, num_sinks, recent_start)
                inside &= (position >= first) & (position < first + window)
                tl.store(window_ptr + position - first, score, mask=inside)
            tl.debug_barrier()
            for start in range(0, kv_len, SLOTS):
                slot = start + tl.arange(0, SLOTS)
                exists = slot < kv_len
                block, token = slot_place(block_table_ptr, slot, exists, BLOCK_SIZE)
                place = block * position_block_stride + token
                position = tl.load(position_ptr + place, mask=exists, other=0)
                inside = _is_candidate(position, exists, num_sinks, recent_start)
                inside &= (position >= first) & (position < first + window)
                run = (position - first) // run_size * run_size
                # One by one in ascending position, an absent one as 0.
                total = tl.zeros([SLOTS], dtype=tl.float64)
                for i in range(0, run_size):
                    member = tl.load(window_ptr + run + i, mask=inside, other=0.0)
                    total += member.to(tl.float64)
                rank = _rank_of_sum(total)
                tl.store(ranks_ptr + slot, rank.to(tl.int64, bitcast=True), mask=inside)
            tl.debug_barrier()

    # The rank of the last survivor: of the `equal` tokens that share the bits found so
    # far, `wanted` survive.
    bound = tl.zeros([1], dtype=tl.uint64)
    one = bound + 1
    wanted = count
    equal = kv_len
    bits_left = 64
    while (bits_left > lowest_bit) & (wanted < equal):
        bits_left -= 8
        below = (one << bits_left << 8) - 1
        counts = tl.zeros([256], dtype=tl.int32)
        for start in range(0, kv_len, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            exists = slot < kv_len
            rank = tl.load(ranks_ptr + slot, mask=exists, other=0)
            rank = rank.to(tl.uint64, bitcast=True)
            match = exists & ((rank | below) == (bound | below))
            digit = ((rank >> bits_left) & 255).to(tl.int32)
            counts += tl.histogram(digit, 256, mask=match)
        digit, before, equal = _find_digit(counts, wanted)
        wanted -= before
        bound |= (one * digit) << bits_left
    # 64 are left only where all tokens stay.
    below = (one << tl.minimum(bits_left, 63)) - 1
    bound |= below

    # Of those whose rank is the bound, the `wanted` lowest positions.
    last_position = 0
    bits_left = 32
    all_equal_stay = wanted == equal
    while (bits_left > 0) & (wanted < equal):
        bits_left -= 8
        counts = tl.zeros([256], dtype=tl.int32)
        for start in range(0, kv_len, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            exists = slot < kv_len
            rank = tl.load(ranks_ptr + slot, mask=exists, other=0)
            block, token = slot_place(block_table_ptr, slot, exists, BLOCK_SIZE)
            place = block * position_block_stride + token
            position = tl.load(position_ptr + place, mask=exists, other=0)
            match = exists & ((rank.to(tl.uint64, bitcast=True) | below) == bound)
            match &= (position >> bits_left >> 8) == (last_position >> bits_left >> 8)
            digit = (position >> bits_left) & 255
            counts += tl.histogram(digit, 256, mask=match)
        digit, before, equal = _find_digit(counts, wanted)
        wanted -= before
        last_position |= digit << bits_left
    # All that share the bits found stay.
    if all_equal_stay:
        last_position = 0x7FFFFFFF
    else:
        last_position |= (1 << bits_left) - 1

    for start in range(0, max_kv_len, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        exists = slot < kv_len
        rank = tl.load(ranks_ptr + slot, mask=exists, other=0)
        rank = rank.to(tl.uint64, bitcast=True) | below
        block, token = slot_place(block_table_ptr, slot, exists, BLOCK_SIZE)
        place = block * position_block_stride + token
        position = tl.load(position_ptr + place, mask=exists, other=0)
        kept = (rank < bound) | ((rank == bound) & (position <= last_position))
        kept = exists & ((kept & (count > 0)) | (count == kv_len))
        tl.store(keep_ptr + slot, kept.to(tl.uint8), mask=slot < max_kv_len)
