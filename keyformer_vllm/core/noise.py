# SPDX-License-Identifier: Apache-2.0
"""Counter-based noise: every draw is a pure function of what it is drawn for.

A draw is keyed by (noise key of the request, layer, query head, query position,
key position). No generator state exists, so a request's noise depends neither on
the batch it shares nor on chunking, preemption, rank or kernel. The C++ and CUDA
operators reproduce this file bit for bit; `minus_ln_fixed` therefore spells out its
order of fp32 operations, and nothing here may use a fused multiply-add.

Integers are unsigned 32-bit words. They are held in int64 tensors, because torch has
no complete uint32 arithmetic: int64 products wrap, and their low 32 bits are those
of the unsigned product.
"""

from typing import NamedTuple

import torch

NO_NOISE = 0  # noise key of a request that draws none; `request_noise_key` avoids it

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_MIX_MUL_1 = 0x7FEB352D
_MIX_MUL_2 = 0x846CA68B
_GOLDEN32 = 0x9E3779B9
_GOLDEN64 = 0x9E3779B97F4A7C15

# minus_ln_fixed: sqrt(1/2) as fp32 bits, the sign and exponent of an fp32 number, and
# the fraction that stands for -ln(1 - s) / s. A division costs less than the terms of
# a polynomial it saves, and the weight of a key divides by E in any case. All are
# exact fp32 values; both polynomials end in the same one, so that E = s for small s.
_SQRT_HALF_BITS = 0x3F3504F3
_EXPONENT_BITS = 0xFF800000 - (1 << 32)
_LN_BOTH_0 = float.fromhex("0x1.e6cb92p+4")  # +30.4246998
_LN_NUMERATOR_1 = float.fromhex("-0x1.54d830p+4")  # -21.3027802
_LN_DENOMINATOR_1 = float.fromhex("-0x1.241e86p+5")  # -36.5149040
_LN_DENOMINATOR_2 = float.fromhex("0x1.23b4a4p+3")  # +9.1158009
_MINUS_LN2_SCALED = float.fromhex("-0x1.62e430p-24")  # -ln(2) * 2**-23


class RowKeys(NamedTuple):
    """The two words that key one query row of one query head.

    Args:
        a: int64 holding u32, any shape; added to the counter of the key position.
        b: int64 holding u32, same shape; mixed in halfway, so that two rows whose
            `a` differ by a multiple of the counter's step do not share a stream.
    """

    a: torch.Tensor
    b: torch.Tensor


def request_noise_key(seed: int, request_seed: int) -> int:
    """Derive the noise key of a request from the server's and the request's seed.

    For a fixed `seed`, distinct request seeds give distinct keys (splitmix64 is a
    bijection), except that the single one mapping to 0 is moved off it.

    Args:
        seed: any integer, taken modulo 2**64.
        request_seed: any integer, taken modulo 2**64.

    Returns:
        The key as a signed 64-bit integer (fits torch.int64), never `NO_NOISE`.
    """
    key = _splitmix64(_splitmix64(seed & _MASK64) ^ (request_seed & _MASK64))
    if key == NO_NOISE:
        key = _GOLDEN64
    return key - (1 << 64) if key >> 63 else key


def row_keys(
    noise_key: torch.Tensor | int,
    layer: torch.Tensor | int,
    query_head: torch.Tensor | int,
    query_position: torch.Tensor | int,
) -> RowKeys:
    """Key the query rows; all arguments broadcast against each other.

    Args:
        noise_key: int64, from `request_noise_key`.
        layer: index of the layer in the whole model.
        query_head: index of the query head in the whole model, whatever the rank.
        query_position: logical position of the query token.

    Returns:
        `RowKeys` of the broadcast shape (0-d tensors for integers).
    """
    key = _as_int64(noise_key)
    low, high = key & _MASK32, (key >> 32) & _MASK32
    layer, query_head = _as_int64(layer), _as_int64(query_head)
    query_position = _as_int64(query_position)
    a = _mix32(low ^ 0x243F6A88)
    a = _mix32(a + layer)
    a = _mix32(a ^ query_head)
    a = _mix32(a + query_position)
    b = _mix32(high ^ 0x85A308D3)
    b = _mix32(b ^ layer)
    b = _mix32(b + query_head)
    b = _mix32(b ^ query_position)
    return RowKeys(*torch.broadcast_tensors(a, b))


def uniform_bits(rows: RowKeys, key_position: torch.Tensor | int) -> torch.Tensor:
    """Draw 23 uniform bits per (row, key position).

    Args:
        rows: keys of the rows; shape broadcasts against `key_position`, so rows
            [num_rows, 1] and key positions [num_keys] give [num_rows, num_keys].
        key_position: logical positions of the keys.

    Returns:
        int64 in [0, 2**23), broadcast shape.
    """
    x = (rows.a + _as_int64(key_position) * _GOLDEN32) & _MASK32
    x = x ^ (x >> 16)
    x = (x * _MIX_MUL_1) & _MASK32
    x = x ^ rows.b
    x = x ^ (x >> 15)
    x = (x * _MIX_MUL_2) & _MASK32
    x = x ^ (x >> 16)
    return x >> 9


def uniform(rows: RowKeys, key_position: torch.Tensor | int) -> torch.Tensor:
    """Draw from the open interval (0, 1): u = (2 r + 1) * 2**-24, exact in fp32.

    Args and shapes: see `uniform_bits`. Returns float32.
    """
    odd = 2 * uniform_bits(rows, key_position) + 1
    return odd.to(torch.float32) * 2.0**-24


def exponential(rows: RowKeys, key_position: torch.Tensor | int) -> torch.Tensor:
    """Draw Exponential(1): E = minus_ln_fixed(u), positive and finite.

    At tau = 1 a noisy row needs no more than this: exp(x + g) = exp(x) / E.
    Args and shapes: see `uniform_bits`. Returns float32 in [2**-24, 16.64].
    """
    return minus_ln_fixed(uniform(rows, key_position))


def gumbel(rows: RowKeys, key_position: torch.Tensor | int) -> torch.Tensor:
    """Draw standard Gumbel noise: g = minus_ln_fixed(E).

    Args and shapes: see `uniform_bits`. Returns float32 in (-2.82, 16.64).
    """
    return minus_ln_fixed(exponential(rows, key_position))


def minus_ln_fixed(x: torch.Tensor) -> torch.Tensor:
    """Compute -ln(x) by a fixed sequence of fp32 operations.

    Every line below is one IEEE operation, rounded to nearest even, in this order.
    `i` and `k` are signed 32-bit integers; N1, D1, D2 are the coefficients above, C0
    the one both polynomials share, L = `_MINUS_LN2_SCALED`. No multiply may be
    contracted with an add (compile C++ with -ffp-contract=off, CUDA with
    __fmul_rn/__fadd_rn).

        i = bits(x)
        k = (i - 0x3F3504F3) & 0xFF800000       the exponent e of x, as e * 2**23
        m = float_from_bits(i - k)              in [sqrt(1/2), sqrt(2))
        s = 1 - m
        f = float(k)                            exact
        z = s * s
        n = s * N1;  n = n + C0;  n = n + z;  n = n * s
        d = s * D1;  d = d + C0;  q = z * D2;  d = d + q
        q = f * L;   q = q * d;   n = n + q
        n / d

    The relative error is below 1e-6 for every draw in (0, 1), also just under 1: there
    e = 0 and s is exact, so nothing cancels.

    Args:
        x: float32, any shape, positive normal numbers.

    Returns:
        float32, same shape.
    """
    assert x.dtype == torch.float32, x.dtype
    i = x.contiguous().view(torch.int32)
    k = (i - _SQRT_HALF_BITS) & _EXPONENT_BITS
    s = 1.0 - (i - k).view(torch.float32)
    f = k.to(torch.float32)
    z = s * s
    n = s * _LN_NUMERATOR_1
    n = n + _LN_BOTH_0
    n = n + z
    n = n * s
    d = s * _LN_DENOMINATOR_1
    d = d + _LN_BOTH_0
    q = z * _LN_DENOMINATOR_2
    d = d + q
    q = f * _MINUS_LN2_SCALED
    q = q * d
    n = n + q
    return n / d


def _mix32(x: torch.Tensor) -> torch.Tensor:
    x = x & _MASK32
    x = x ^ (x >> 16)
    x = (x * _MIX_MUL_1) & _MASK32
    x = x ^ (x >> 15)
    x = (x * _MIX_MUL_2) & _MASK32
    return x ^ (x >> 16)


def _splitmix64(state: int) -> int:
    z = (state + _GOLDEN64) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _as_int64(value: torch.Tensor | int) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(torch.int64)
    return torch.tensor(value, dtype=torch.int64)
