# SPDX-License-Identifier: Apache-2.0
"""score_keys in Triton: two sweeps over the same products, which so are never stored.

`_sum_rows_kernel` finds the maximum and the sum of each row, `_sum_columns_kernel` adds
the weights of each key row after row, in an order that does not depend on chunks. A
tile holds whole rows: the query heads of a KV head lie side by side.
"""

import torch
import triton
import triton.language as tl

from keyformer_vllm.ops.triton.checks import check_rows, check_side, slot_place
from keyformer_vllm.ops.triton.noise import NO_FUSION
from keyformer_vllm.ops.triton.score_tile import (
    load_keys,
    load_vectors,
    noisy_logits,
    request_of_tile,
)

_KEYS = 64  # of a tile
_VECTORS = 32  # of a tile, unless one row has more query heads


def score_keys(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    score: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_positions: torch.Tensor,
    tau: torch.Tensor,
    noise_keys: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    place: torch.Tensor | None,
    sinks: torch.Tensor | None,
    layer_index: int,
    first_query_head: int,
    scale: float,
    soft_cap: float,
    layout: str,
) -> None:
    check_rows(kv_cache, layout)
    check_side(kv_cache.shape[:-1], score=score, position=position, place=place)
    biased = position if place is None else place
    _, num_kv_heads, block_size, width = kv_cache.shape
    num_tokens, num_query_heads, head_size = query.shape
    if query.dtype != kv_cache.dtype or head_size * 2 != width or query.stride(2) != 1:
        raise ValueError(
            f"query: must be {kv_cache.dtype} with contiguous heads of {width // 2}, "
            f"got {query.dtype} of shape {tuple(query.shape)}"
        )
    if num_query_heads % num_kv_heads != 0:
        raise ValueError(
            f"query: {num_query_heads} query heads do not divide among "
            f"{num_kv_heads} KV heads"
        )
    num_reqs = len(kv_lens)
    if num_reqs == 0 or num_tokens == 0:
        return
    group = num_query_heads // num_kv_heads
    rows = max(1, _VECTORS // group)
    # The rows that score, and the tiles of each request; nothing waits for the device.
    scored = tau > 0
    tokens = torch.argsort(~scored, stable=True).to(torch.int32)
    ranks = torch.zeros(num_tokens + 1, dtype=torch.int32, device=tau.device)
    ranks[1:] = scored.cumsum(0)
    first_scored = ranks[query_start_loc.long()]
    num_scored = first_scored.diff()
    row_tiles = _tiles_before(num_scored, rows)
    last = tokens[(first_scored[1:].long() - 1).clamp(min=0)]
    num_keys = torch.where(
        num_scored > 0, kv_lens - query_start_loc[1:] + last + 1, 0
    )  # that the last scored row of a request sees
    key_tiles = _tiles_before(num_keys, _KEYS)
    sums = torch.empty(
        (2, num_tokens, num_query_heads), dtype=torch.float32, device=tau.device
    )
    arguments = (
        query,
        kv_cache,
        position,
        biased,
        block_table,
        kv_lens,
        query_start_loc,
        query_positions,
        tau,
        noise_keys,
        alibi_slopes,
        sinks,
        tokens,
        first_scored,
        sums[0],
        sums[1],
        *query.stride()[:2],
        *kv_cache.stride()[:3],
        *position.stride()[:2],
        *biased.stride()[:2],
        block_table.stride(0),
        num_reqs,
        layer_index,
        first_query_head,
        scale,
        soft_cap,
    )
    shape = {
        "NUM_QUERY_HEADS": num_query_heads,
        "GROUP": group,
        "ROWS": rows,
        "VECTORS": max(16, triton.next_power_of_2(rows * group)),
        "KEYS": _KEYS,
        "HEAD_SIZE": head_size,
        "PADDED_HEAD_SIZE": triton.next_power_of_2(head_size),
        "BLOCK_SIZE": block_size,
        "PADDED_REQS": triton.next_power_of_2(num_reqs),
        "HAS_ALIBI": alibi_slopes is not None,
        "HAS_PLACES": place is not None,
        "HAS_SINKS": sinks is not None,
        "HAS_SOFT_CAP": soft_cap > 0,
    }
    # Upper bounds: the device alone knows how many rows score and keys they see.
    max_row_tiles = num_tokens // rows + num_reqs
    max_key_tiles = num_reqs * triton.cdiv(block_table.shape[1] * block_size, _KEYS)
    _sum_rows_kernel[(max_row_tiles, num_kv_heads)](
        row_tiles, *arguments, **shape, **NO_FUSION
    )
    _sum_columns_kernel[(max_key_tiles, num_kv_heads)](
        score, *score.stride()[:2], key_tiles, *arguments, **shape, **NO_FUSION
    )


def _tiles_before(counts: torch.Tensor, size: int) -> torch.Tensor:
    """[num_reqs + 1] int32: tiles before each request, and of all."""
    tiles = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    tiles[1:] = ((counts + size - 1) // size).cumsum(0)
    return tiles


@triton.jit
def _sum_rows_kernel(
    tiles_ptr,  # [num_reqs + 1] int32 tiles of rows before each request
    query_ptr,  # [num_tokens, NUM_QUERY_HEADS, HEAD_SIZE]
    kv_cache_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, 2 * HEAD_SIZE]
    position_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE] int32
    place_ptr,  # the same; the positions where there are no places
    block_table_ptr,  # [num_reqs, max_blocks] int32
    kv_lens_ptr,  # [num_reqs] int32
    query_start_loc_ptr,  # [num_reqs + 1] int32
    query_positions_ptr,  # [num_tokens] int64
    tau_ptr,  # [num_tokens] float32
    noise_keys_ptr,  # [num_reqs] int64
    alibi_slopes_ptr,  # [NUM_QUERY_HEADS] float32
    sinks_ptr,  # [NUM_QUERY_HEADS] float32
    tokens_ptr,  # [num_tokens] int32, those that score first, ascending
    first_scored_ptr,  # [num_reqs + 1] int32 into them
    maxima_ptr,  # [num_tokens, NUM_QUERY_HEADS] float32 scratch
    sums_ptr,
    query_token_stride,
    query_head_stride,
    kv_block_stride,
    kv_head_stride,
    kv_token_stride,
    position_block_stride,
    position_head_stride,
    place_block_stride,
    place_head_stride,
    block_table_stride,
    num_reqs,
    layer_index,
    first_query_head,
    scale,
    soft_cap,
    NUM_QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    VECTORS: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_REQS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    if tile >= tl.load(tiles_ptr + num_reqs):
        return
    request = request_of_tile(tiles_ptr, num_reqs, tile, PADDED_REQS)
    first = tl.load(first_scored_ptr + request)
    end = tl.load(first_scored_ptr + request + 1)
    hidden = tl.load(kv_lens_ptr + request) - tl.load(query_start_loc_ptr + request + 1)
    noise_key = tl.load(noise_keys_ptr + request)
    block_table_ptr += request.to(tl.int64) * block_table_stride
    kv_cache_ptr += head * kv_head_stride
    position_ptr += head * position_head_stride
    place_ptr += head * place_head_stride

    vector = tl.arange(0, VECTORS)
    row = first + (tile - tl.load(tiles_ptr + request)) * ROWS + vector // GROUP
    is_vector = (vector < ROWS * GROUP) & (row < end)
    query_head = head * GROUP + vector % GROUP
    token = tl.load(tokens_ptr + row, mask=is_vector, other=0)
    visible = tl.where(is_vector, hidden + token + 1, 0)
    query, query_position, tau = load_vectors(
        query_ptr,
        query_positions_ptr,
        tau_ptr,
        token,
        query_head,
        is_vector,
        query_token_stride,
        query_head_stride,
        HEAD_SIZE,
        PADDED_HEAD_SIZE,
    )

    maximum = tl.full([VECTORS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([VECTORS], dtype=tl.float32)
    num_keys = tl.max(visible, 0)
    for start in range(0, num_keys, KEYS):
        slot = start + tl.arange(0, KEYS)
        key, key_position, key_place = load_keys(
            kv_cache_ptr,
            position_ptr,
            place_ptr,
            block_table_ptr,
            slot,
            slot < num_keys,
            kv_block_stride,
            kv_token_stride,
            position_block_stride,
            place_block_stride,
            HEAD_SIZE,
            PADDED_HEAD_SIZE,
            BLOCK_SIZE,
            HAS_ALIBI,
        )
        logits = noisy_logits(
            query,
            key,
            key_position,
            key_place,
            query_position,
            visible - 1 if HAS_PLACES else query_position,
            query_head,
            tau,
            noise_key,
            alibi_slopes_ptr,
            layer_index,
            first_query_head,
            scale,
            soft_cap,
            HAS_ALIBI,
            HAS_SOFT_CAP,
        )
        logits = tl.where(slot[None, :] < visible[:, None], logits, float("-inf"))
        raised = tl.maximum(maximum, tl.max(logits, 1))
        # A row of which nothing was seen has no maximum, and no weight to rescale.
        base = tl.where(raised == float("-inf"), 0.0, raised)
        weights = tl.exp(logits - base[:, None])
        total = total * tl.exp(maximum - base) + tl.sum(weights, 1)
        maximum = raised
    if HAS_SINKS:
        # A sink is one more key, without noise.
        sink = tl.load(sinks_ptr + query_head) / tau
        raised = tl.maximum(maximum, sink)
        base = tl.where(raised == float("-inf"), 0.0, raised)
        total = total * tl.exp(maximum - base) + tl.exp(sink - base)
        maximum = raised
    place = row.to(tl.int64) * NUM_QUERY_HEADS + query_head
    tl.store(maxima_ptr + place, maximum, mask=is_vector)
    tl.store(sums_ptr + place, total, mask=is_vector)


@triton.jit
def _sum_columns_kernel(
    score_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE] float32
    score_block_stride,
    score_head_stride,
    tiles_ptr,  # [num_reqs + 1] int32 tiles of keys before each request
    query_ptr,  # from here on as in _sum_rows_kernel
    kv_cache_ptr,
    position_ptr,
    place_ptr,
    block_table_ptr,
    kv_lens_ptr,
    query_start_loc_ptr,
    query_positions_ptr,
    tau_ptr,
    noise_keys_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    tokens_ptr,
    first_scored_ptr,
    maxima_ptr,
    sums_ptr,
    query_token_stride,
    query_head_stride,
    kv_block_stride,
    kv_head_stride,
    kv_token_stride,
    position_block_stride,
    position_head_stride,
    place_block_stride,
    place_head_stride,
    block_table_stride,
    num_reqs,
    layer_index,
    first_query_head,
    scale,
    soft_cap,
    NUM_QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    VECTORS: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_REQS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    if tile >= tl.load(tiles_ptr + num_reqs):
        return
    request = request_of_tile(tiles_ptr, num_reqs, tile, PADDED_REQS)
    first = tl.load(first_scored_ptr + request)
    end = tl.load(first_scored_ptr + request + 1)
    hidden = tl.load(kv_lens_ptr + request) - tl.load(query_start_loc_ptr + request + 1)
    noise_key = tl.load(noise_keys_ptr + request)
    block_table_ptr += request.to(tl.int64) * block_table_stride
    kv_cache_ptr += head * kv_head_stride
    position_ptr += head * position_head_stride
    place_ptr += head * place_head_stride
    score_ptr += head * score_head_stride

    num_keys = hidden + tl.load(tokens_ptr + end - 1) + 1
    key_start = (tile - tl.load(tiles_ptr + request)) * KEYS
    slot = key_start + tl.arange(0, KEYS)
    exists = slot < num_keys
    key, key_position, key_place = load_keys(
        kv_cache_ptr,
        position_ptr,
        place_ptr,
        block_table_ptr,
        slot,
        exists,
        kv_block_stride,
        kv_token_stride,
        position_block_stride,
        place_block_stride,
        HEAD_SIZE,
        PADDED_HEAD_SIZE,
        BLOCK_SIZE,
        HAS_ALIBI,
    )
    block, offset = slot_place(block_table_ptr, slot, exists, BLOCK_SIZE)
    score_at = score_ptr + block * score_block_stride + offset
    total = tl.load(score_at, mask=exists, other=0.0)
    share = tl.zeros([KEYS], dtype=tl.float32)

    vector = tl.arange(0, VECTORS)
    query_head = head * GROUP + vector % GROUP
    for tile_first in range(first, end, ROWS):
        row = tile_first + vector // GROUP
        is_vector = (vector < ROWS * GROUP) & (row < end)
        token = tl.load(tokens_ptr + row, mask=is_vector, other=0)
        visible = tl.where(is_vector, hidden + token + 1, 0)
        if tl.max(visible, 0) > key_start:
            query, query_position, tau = load_vectors(
                query_ptr,
                query_positions_ptr,
                tau_ptr,
                token,
                query_head,
                is_vector,
                query_token_stride,
                query_head_stride,
                HEAD_SIZE,
                PADDED_HEAD_SIZE,
            )
            logits = noisy_logits(
                query,
                key,
                key_position,
                key_place,
                query_position,
                visible - 1 if HAS_PLACES else query_position,
                query_head,
                tau,
                noise_key,
                alibi_slopes_ptr,
                layer_index,
                first_query_head,
                scale,
                soft_cap,
                HAS_ALIBI,
                HAS_SOFT_CAP,
            )
            place = row.to(tl.int64) * NUM_QUERY_HEADS + query_head
            maximum = tl.load(maxima_ptr + place, mask=is_vector, other=0.0)
            sums = tl.load(sums_ptr + place, mask=is_vector, other=1.0)
            weights = tl.exp(logits - maximum[:, None])
            shares = tl.div_rn(weights, tl.broadcast_to(sums[:, None], [VECTORS, KEYS]))
            shares = tl.where(slot[None, :] < visible[:, None], shares, 0.0)
            # Row after row: a sum over all but one vector of zeros picks that one.
            for v in range(0, ROWS * GROUP):
                own = tl.sum(tl.where((vector == v)[:, None], shares, 0.0), 0)
                share = tl.where(v % GROUP == 0, own, share + own)
                total = tl.where(v % GROUP == GROUP - 1, total + share, total)
    tl.store(score_at, total, mask=exists)
