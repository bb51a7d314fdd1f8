# SPDX-License-Identifier: Apache-2.0
"""Noise in Triton, equal to the bit to core/noise.py.

Every kernel that draws must be launched with `NO_FUSION`: Triton would otherwise
contract a product and a sum into one rounding. The division is `div_rn`, the IEEE one;
Triton's `/` is not.
"""

from typing import Any

import torch
import triton
import triton.language as tl

NO_FUSION: dict[str, Any] = {"enable_fp_fusion": False}

# Of minus_ln_fixed, see core/noise.py.
_LN_BOTH_0 = tl.constexpr(float.fromhex("0x1.e6cb92p+4"))
_LN_NUMERATOR_1 = tl.constexpr(float.fromhex("-0x1.54d830p+4"))
_LN_DENOMINATOR_1 = tl.constexpr(float.fromhex("-0x1.241e86p+5"))
_LN_DENOMINATOR_2 = tl.constexpr(float.fromhex("0x1.23b4a4p+3"))
_MINUS_LN2_SCALED = tl.constexpr(float.fromhex("-0x1.62e430p-24"))
_BELOW_ONE = tl.constexpr(float.fromhex("0x1.fffffep-1"))


@triton.jit
def mix32(x):  # uint32
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def make_row_key(noise_key, layer, query_head, query_position):
    """The two words of a query row; arguments broadcast against each other.

    `noise_key` is int64, the others any integers, taken modulo 2**32.
    """
    low = noise_key.to(tl.uint32)
    high = (noise_key >> 32).to(tl.uint32)
    layer = layer.to(tl.uint32)
    query_head = query_head.to(tl.uint32)
    query_position = query_position.to(tl.uint32)
    a = mix32(low ^ 0x243F6A88)
    a = mix32(a + layer)
    a = mix32(a ^ query_head)
    b = mix32(high ^ 0x85A308D3)
    b = mix32(b ^ layer)
    b = mix32(b + query_head)
    return mix32(a + query_position), mix32(b ^ query_position)


@triton.jit
def draw_uniform(row_a, row_b, key_position):
    """Uniform on (0, 1), exact in fp32; arguments broadcast against each other."""
    x = row_a + key_position.to(tl.uint32) * 0x9E3779B9
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= row_b
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    # The 23 bits as a mantissa give 1 + 2 r / 2**24; the difference is exact.
    one_to_two = ((x >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    return one_to_two - _BELOW_ONE


@triton.jit
def minus_ln_fixed(x):
    """-ln(x), operation by operation as core/noise.py spells it out."""
    bits = x.to(tl.int32, bitcast=True)
    # 0xFF800000 as a signed number: sign and exponent of an fp32 number.
    exponent = (bits - 0x3F3504F3) & -8388608
    s = 1.0 - (bits - exponent).to(tl.float32, bitcast=True)
    z = s * s
    n = s * _LN_NUMERATOR_1
    n = n + _LN_BOTH_0
    n = n + z
    n = n * s
    d = s * _LN_DENOMINATOR_1
    d = d + _LN_BOTH_0
    q = z * _LN_DENOMINATOR_2
    d = d + q
    q = exponent.to(tl.float32) * _MINUS_LN2_SCALED
    q = q * d
    n = n + q
    return tl.div_rn(n, d)


@triton.jit
def draw_gumbel(row_a, row_b, key_position):
    """Standard Gumbel noise."""
    return minus_ln_fixed(minus_ln_fixed(draw_uniform(row_a, row_b, key_position)))


@triton.jit
def _draw_row_kernel(
    positions_ptr,  # [num_keys] int32
    noise_ptr,  # [num_keys] float32
    num_keys,
    noise_key,
    layer,
    query_head,
    query_position,
    GUMBEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = index < num_keys
    positions = tl.load(positions_ptr + index, mask=exists, other=0)
    zero = tl.zeros([1], dtype=tl.int64)
    a, b = make_row_key(
        zero + noise_key, zero + layer, zero + query_head, zero + query_position
    )
    noise = minus_ln_fixed(draw_uniform(a, b, positions))
    if GUMBEL:
        noise = minus_ln_fixed(noise)
    tl.store(noise_ptr + index, noise, mask=exists)


def draw_noise(
    positions: torch.Tensor,
    noise_key: int,
    layer: int,
    query_head: int,
    query_position: int,
    gumbel: bool,
) -> torch.Tensor:
    """As `ops.cpu.draw_noise`, for tests against core.noise."""
    noise = torch.empty(positions.shape, dtype=torch.float32, device=positions.device)
    block = 128
    _draw_row_kernel[(triton.cdiv(len(positions), block),)](
        positions,
        noise,
        len(positions),
        noise_key,
        layer,
        query_head,
        query_position,
        GUMBEL=gumbel,
        BLOCK=block,
        **NO_FUSION,
    )
    return noise
