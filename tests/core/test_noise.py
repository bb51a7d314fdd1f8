# SPDX-License-Identifier: Apache-2.0
"""The generator against a second implementation, its distribution and independence."""

import math
import struct

import pytest
import torch

from keyformer_vllm.core import noise

KEY = noise.request_noise_key(0, 0)


def _float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def _plain_mix32(x: int) -> int:
    x &= 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    return x ^ (x >> 16)


def _plain_bits(key: int, layer: int, head: int, query: int, position: int) -> int:
    """The 23 bits of one draw in plain Python integers."""
    low, high = key % 2**32, (key % 2**64) >> 32
    h1 = _plain_mix32(low ^ 0x243F6A88)
    h1 = _plain_mix32(h1 + layer)
    h1 = _plain_mix32(h1 ^ head)
    a = _plain_mix32(h1 + query)
    h2 = _plain_mix32(high ^ 0x85A308D3)
    h2 = _plain_mix32(h2 ^ layer)
    h2 = _plain_mix32(h2 + head)
    b = _plain_mix32(h2 ^ query)
    x = (a + position * 0x9E3779B9) % 2**32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    x ^= b
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    return (x ^ (x >> 16)) >> 9


def _plain_minus_ln(x: float) -> float:
    """minus_ln_fixed in Python doubles, each result rounded to fp32.

    A sum, product or quotient of two fp32 numbers, computed in fp64 and then rounded to
    fp32, equals the fp32 operation (fp64 carries more than twice its bits).
    """
    (bits,) = struct.unpack("<i", struct.pack("<f", x))
    exponent = (bits - 0x3F3504F3) >> 23
    (m,) = struct.unpack("<f", struct.pack("<i", bits - (exponent << 23)))
    s = 1.0 - m
    z = _float32(s * s)
    n = _float32(_float32(s * -21.302780151367188) + 30.424699783325195)
    n = _float32(_float32(n + z) * s)
    d = _float32(_float32(s * -36.514904022216797) + 30.424699783325195)
    d = _float32(d + _float32(z * 9.115800857543945))
    minus_ln2 = _float32(-math.log(2.0))
    return _float32(_float32(n + _float32(_float32(exponent * minus_ln2) * d)) / d)


def _ks_statistic(sample: torch.Tensor, cdf: torch.Tensor) -> float:
    """Kolmogorov-Smirnov distance of a sample from the cdf evaluated at it."""
    cdf = cdf.double().flatten().sort().values
    n = cdf.numel()
    assert n == sample.numel()
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return max((steps[1:] - cdf).max().item(), (cdf - steps[:-1]).max().item())


def _draws(num_rows: int, num_keys: int, **kwargs: int) -> torch.Tensor:
    coordinates = {"noise_key": KEY, "layer": 3, "query_head": 5} | kwargs
    rows = noise.row_keys(query_position=torch.arange(num_rows)[:, None], **coordinates)
    return noise.gumbel(rows, torch.arange(num_keys))


# (seed, request seed, layer, query head, query position, key position),
# noise key, 23 bits, fp32 bits of E and of g. Any change here changes every
# result that users have seen, and must be made in C++ and CUDA at once.
GOLDEN = [
    ((0, 0, 0, 0, 0, 0), 0xA706DD2F4D197E6F, 0x4CE53F, 0x3F027405, 0x3F2C95F1),
    ((1, 2, 3, 4, 5, 6), 0xBCD9DBB49673066B, 0x464C46, 0x3F196AE9, 0x3F031354),
    ((0, 0, 29, 8, 8191, 17), 0xA706DD2F4D197E6F, 0x755A8C, 0x3DB1D7F8, 0x401C65D1),
    (
        (-1, 2**63, 127, 63, 131071, 131071),
        0xF7F1454E6A8A1FA6,
        0x131D1D,
        0x3FF36864,
        0xBF248881,
    ),
    (
        (42, 7, 1, 0, 2**31 - 1, 2**31 - 2),
        0x16062D6C1339E500,
        0x261502,
        0x3F9B2C35,
        0xBE4520EA,
    ),
]


@pytest.mark.parametrize("coordinates, key, bits, e_bits, g_bits", GOLDEN)
def test_golden_values(coordinates, key, bits, e_bits, g_bits):
    seed, request_seed, layer, head, query, position = coordinates
    assert noise.request_noise_key(seed, request_seed) % 2**64 == key
    rows = noise.row_keys(key - 2**64 if key >> 63 else key, layer, head, query)
    assert noise.uniform_bits(rows, position).item() == bits
    e = noise.exponential(rows, position)
    g = noise.gumbel(rows, position)
    assert e.view(torch.int32).item() % 2**32 == e_bits
    assert g.view(torch.int32).item() % 2**32 == g_bits


def test_bits_equal_plain_integers():
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        key, layer, head, query, position = (
            int(torch.randint(0, 2**limit, (), generator=generator))
            for limit in (62, 8, 7, 20, 20)
        )
        key = key * 4 - 2**63 + 1
        rows = noise.row_keys(key, layer, head, query)
        expected = _plain_bits(key, layer, head, query, position)
        assert noise.uniform_bits(rows, position).item() == expected


def test_noise_equals_plain_fp32():
    rows = noise.row_keys(KEY, 2, 1, torch.arange(8)[:, None])
    bits = noise.uniform_bits(rows, torch.arange(64))
    g = noise.gumbel(rows, torch.arange(64))
    for r, value in zip(bits.flatten().tolist(), g.flatten().tolist(), strict=True):
        assert _plain_minus_ln(_plain_minus_ln((2 * r + 1) * 2.0**-24)) == value


def test_vectorised_draws_equal_single_draws():
    keys = torch.tensor([KEY, noise.request_noise_key(0, 1)])
    layers, heads = torch.tensor([0, 7]), torch.arange(3)
    rows = noise.row_keys(
        keys[:, None, None, None, None],
        layers[:, None, None, None],
        heads[:, None, None],
        torch.tensor([4, 9])[:, None],
    )
    positions = torch.tensor([0, 3, 9])
    block = noise.gumbel(rows, positions)
    assert block.shape == (2, 2, 3, 2, 3)
    single = noise.gumbel(noise.row_keys(int(keys[1]), 7, 2, 9), 3)
    assert torch.equal(block[1, 1, 2, 1, 1], single)
    flipped = noise.gumbel(rows, positions.flip(0)).flip(-1)
    assert torch.equal(block, flipped)


def test_every_draw_is_accurate():
    """All 2**23 uniforms: E and g against fp64, u just below 1 included."""
    u = (2 * torch.arange(2**23).float() + 1) * 2.0**-24
    e = noise.minus_ln_fixed(u)
    exact_e = -u.double().log()
    assert e.min() == 2.0**-24 and e.max() < 16.64
    assert ((e.double() - exact_e) / exact_e).abs().max() < 1e-6
    # A larger u gives a smaller E, except where rounding makes neighbours meet.
    assert ((e[1:] - e[:-1]) / e[:-1]).max() < 2e-7
    g = noise.minus_ln_fixed(e)
    exact_g = -exact_e.log()
    assert -2.82 < g.min() < -2.8 and 16.63 < g.max() < 16.64
    assert ((g.double() - exact_g).abs() / (1 + exact_g.abs())).max() < 1e-6


def test_minus_ln_is_accurate_around_one():
    one = torch.tensor(0x3F800000, dtype=torch.int32)
    x = (one + torch.arange(-5000, 5001, dtype=torch.int32)).view(torch.float32)
    exact = -x.double().log()
    error = (noise.minus_ln_fixed(x).double() - exact).abs()
    assert (error <= 1e-6 * exact.abs()).all()
    assert noise.minus_ln_fixed(torch.tensor([0.5, 2.0])).tolist() == [
        pytest.approx(math.log(2), rel=1e-7),
        pytest.approx(-math.log(2), rel=1e-7),
    ]


def test_minus_ln_refuses_other_dtypes():
    with pytest.raises(AssertionError):
        noise.minus_ln_fixed(torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("request_seed", [0, 1, 2])
def test_kolmogorov_smirnov_against_gumbel(request_seed):
    key = noise.request_noise_key(0, request_seed)
    sample = _draws(400, 500, noise_key=key).double()
    cdf = torch.exp(-torch.exp(-sample))
    # 1.95 / sqrt(n): the 0.1 % critical value.
    assert _ks_statistic(sample, cdf) < 1.95 / math.sqrt(sample.numel())


def test_kolmogorov_smirnov_can_fail():
    sample = _draws(400, 500).double()
    critical = 1.95 / math.sqrt(sample.numel())
    assert _ks_statistic(sample, torch.exp(-torch.exp(-(sample + 0.02)))) > critical
    assert _ks_statistic(sample, torch.exp(-torch.exp(sample))) > critical


def test_one_row_over_many_keys_and_one_key_over_many_rows_are_gumbel():
    key = noise.request_noise_key(5, 11)
    along_keys = _draws(1, 50_000, noise_key=key).double()
    along_rows = _draws(50_000, 1, noise_key=key).double()
    for sample in (along_keys, along_rows):
        distance = _ks_statistic(sample, torch.exp(-torch.exp(-sample)))
        assert distance < 1.95 / math.sqrt(sample.numel())


def test_streams_are_uncorrelated():
    num_rows, num_keys = 200, 500
    base = _draws(num_rows, num_keys)
    others = {
        "next layer": _draws(num_rows, num_keys, layer=4),
        "next head": _draws(num_rows, num_keys, query_head=6),
        "layer and head swapped": _draws(num_rows, num_keys, layer=5, query_head=3),
        "next request": _draws(
            num_rows, num_keys, noise_key=noise.request_noise_key(0, 1)
        ),
        "next server seed": _draws(
            num_rows, num_keys, noise_key=noise.request_noise_key(1, 0)
        ),
        "next query row": base.roll(1, 0),
        "next key": base.roll(1, 1),
        "diagonal": base.roll((1, 1), (0, 1)),
        "antidiagonal": base.roll((1, -1), (0, 1)),
    }
    for name, other in others.items():
        pair = torch.stack([base.flatten(), other.flatten()]).double()
        correlation = torch.corrcoef(pair)[0, 1].item()
        assert abs(correlation) < 4 / math.sqrt(base.numel()), (name, correlation)


def test_rows_are_pairwise_uncorrelated():
    """No two of 400 rows are shifted or equal copies of one another."""
    bits = noise.uniform(
        noise.row_keys(KEY, 0, 0, torch.arange(400)[:, None]), torch.arange(1024)
    )
    correlation = torch.corrcoef(bits.double()) - torch.eye(400, dtype=torch.float64)
    # 5.5 standard deviations: about one such pair in 25 million.
    assert correlation.abs().max() < 5.5 / math.sqrt(1024)


def test_noise_key_is_never_zero_and_distinct():
    keys = [noise.request_noise_key(s, r) for s in range(30) for r in range(100)]
    assert noise.NO_NOISE not in keys and len(set(keys)) == len(keys)
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert noise.request_noise_key(3, -1) == noise.request_noise_key(3, 2**64 - 1)


def test_noise_key_that_would_be_zero_is_moved(monkeypatch):
    monkeypatch.setattr(noise, "_splitmix64", lambda state: 0)
    assert noise.request_noise_key(0, 0) != noise.NO_NOISE
