# SPDX-License-Identifier: Apache-2.0
"""What both sweeps of score_keys do with a tile of rows and keys."""

import triton
import triton.language as tl

from keyformer_vllm.ops.triton.checks import slot_place
from keyformer_vllm.ops.triton.noise import draw_gumbel, make_row_key


@triton.jit
def request_of_tile(tiles_ptr, num_reqs, tile, PADDED_REQS: tl.constexpr):
    """The last request that begins at or before the tile."""
    request = tl.arange(0, PADDED_REQS)
    before = tl.load(tiles_ptr + request, mask=request < num_reqs, other=0x7FFFFFFF)
    return tl.sum((before <= tile).to(tl.int32), 0) - 1


@triton.jit
def load_keys(
    kv_cache_ptr,
    position_ptr,
    place_ptr,
    block_table_ptr,  # of the request
    slot,
    exists,
    kv_block_stride,
    kv_token_stride,
    position_block_stride,
    place_block_stride,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """Keys [PADDED_HEAD_SIZE, KEYS] of a KV head, zeros where none is.

    And what noise and bias are functions of.
    """
    block, token = slot_place(block_table_ptr, slot, exists, BLOCK_SIZE)
    row = block * kv_block_stride + token.to(tl.int64) * kv_token_stride
    d = tl.arange(0, PADDED_HEAD_SIZE)
    mask = exists[None, :] & (d < HEAD_SIZE)[:, None]
    key = tl.load(kv_cache_ptr + row[None, :] + d[:, None], mask=mask, other=0.0)
    at = block * position_block_stride + token
    position = tl.load(position_ptr + at, mask=exists, other=0)
    place = position
    if HAS_ALIBI:
        at = block * place_block_stride + token
        place = tl.load(place_ptr + at, mask=exists, other=0)
    return key, position, place


@triton.jit
def noisy_logits(
    query,  # [VECTORS, PADDED_HEAD_SIZE]
    key,  # [PADDED_HEAD_SIZE, KEYS]
    key_position,  # [KEYS]
    key_place,  # [KEYS] what the bias is a function of
    query_position,  # [VECTORS] int64
    query_place,  # [VECTORS]
    query_head,  # [VECTORS]
    tau,  # [VECTORS]
    noise_key,
    alibi_slopes_ptr,
    layer_index,
    first_query_head,
    scale,
    soft_cap,
    HAS_ALIBI: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    x = tl.dot(query, key, input_precision="ieee") * scale
    if HAS_SOFT_CAP:
        decay = tl.exp(-2.0 * tl.abs(x / soft_cap))
        magnitude = soft_cap * ((1.0 - decay) / (1.0 + decay))
        x = tl.where(x < 0, -magnitude, magnitude)
    if HAS_ALIBI:
        slope = tl.load(alibi_slopes_ptr + query_head)
        distance = key_place[None, :] - query_place.to(tl.int32)[:, None]
        x = x + slope[:, None] * distance.to(tl.float32)
    if noise_key != 0:
        zero = tl.zeros([1], dtype=tl.int64)
        row_a, row_b = make_row_key(
            zero + noise_key,
            zero + layer_index,
            first_query_head + query_head,
            query_position,
        )
        x = x + draw_gumbel(row_a[:, None], row_b[:, None], key_position[None, :])
    return x / tau[:, None]


@triton.jit
def load_vectors(
    query_ptr,
    query_positions_ptr,
    tau_ptr,
    token,  # [VECTORS] of each (row, query head)
    query_head,  # [VECTORS]
    is_vector,  # [VECTORS]
    query_token_stride,
    query_head_stride,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
):
    """Query [VECTORS, PADDED_HEAD_SIZE], position and temperature of each vector."""
    tau = tl.load(tau_ptr + token, mask=is_vector, other=1.0)
    position = tl.load(query_positions_ptr + token, mask=is_vector, other=0)
    d = tl.arange(0, PADDED_HEAD_SIZE)
    at = token.to(tl.int64) * query_token_stride + query_head * query_head_stride
    mask = is_vector[:, None] & (d < HEAD_SIZE)[None, :]
    query = tl.load(query_ptr + at[:, None] + d[None, :], mask=mask, other=0.0)
    return query, position, tau
