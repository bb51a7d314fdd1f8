# SPDX-License-Identifier: Apache-2.0
"""score_keys against fp64, and its invariances to the bit."""

import dataclasses
from math import sqrt

import pytest
import torch

from keyformer_vllm import ops
from keyformer_vllm.core import noise
from keyformer_vllm.ops import cpu
from tests.helpers import (
    HALF_IMPLS,
    MATHS,
    ROW_IMPLS,
    BatchSpec,
    PagedBatch,
    dense_scores,
    make_batch,
    suited_to_score,
)
from tests.implementations import CPU_ISAS, GPU, use_impl

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def awkward_lens(block_size: int) -> tuple[tuple[int, int], ...]:
    """Lengths around a block; whole prompts, chunks, one decode row, an empty one."""
    return (
        (1, 1),
        (block_size - 1, block_size - 1),
        (block_size, 7),
        (50, 0),
        (block_size + 1, 1),
        (113, 40),
    )


SPECS = [
    BatchSpec(dtype, layout, heads[0], heads[1], head_size, bs, awkward_lens(bs))
    for dtype, layout, heads, head_size, bs in [
        (fp32, "vec", (4, 4), 32, 32),
        (fp32, "vec", (8, 2), 64, 64),
        (fp32, "vec16", (5, 1), 80, 32),
        (fp32, "vec", (9, 3), 96, 128),
        (fp32, "vec16", (4, 4), 112, 64),
        (fp32, "vec", (8, 2), 128, 32),
        (fp32, "vec", (5, 1), 256, 32),
        (bf16, "vec", (9, 3), 64, 32),
        (bf16, "vec16", (8, 2), 80, 128),
        (bf16, "vec", (5, 1), 128, 64),
        (bf16, "vec", (4, 4), 256, 32),
        (bf16, "amx", (9, 3), 64, 32),
        (bf16, "amx", (4, 4), 32, 64),
        (bf16, "amx", (8, 2), 96, 128),
        (bf16, "amx", (5, 1), 128, 32),
        (bf16, "amx", (4, 4), 256, 64),
        (fp16, "vec", (8, 2), 32, 64),
        (fp16, "vec16", (9, 3), 112, 32),
        (fp16, "vec", (4, 4), 64, 128),
        (fp16, "vec", (5, 1), 96, 32),
        (bf16, "nhd", (8, 2), 128, 16),
        (fp16, "hnd", (9, 3), 80, 16),
        (bf16, "hnd", (71, 1), 64, 16),
    ]
]


def run(
    batch: PagedBatch,
    impl: str,
    tau: torch.Tensor,
    noise_keys: torch.Tensor,
    soft_cap: float = 0.0,
    **overrides: torch.Tensor,  # and the optional arguments
) -> None:
    tensors = {
        "query": batch.query,
        "block_table": batch.block_table,
        "kv_lens": batch.kv_lens,
        "query_start_loc": batch.query_start_loc,
        "query_positions": batch.query_positions,
    }
    tensors.update(overrides)
    ops.score_keys(
        kv_cache=batch.kv_cache[0],
        score=batch.score[0],
        position=batch.position[0],
        tau=tau,
        noise_keys=noise_keys,
        layer_index=3,
        first_query_head=10,
        scale=batch.spec.head_size**-0.5,
        soft_cap=soft_cap,
        layout=batch.spec.layout,
        impl=impl,
        **tensors,
    )


def is_close(got: torch.Tensor, want: torch.Tensor, impl: str) -> bool:
    """Whether shares agree up to their rounding, for a handful of rows."""
    if impl in HALF_IMPLS:  # a small weight has as many digits as its tile's largest
        return torch.allclose(got.double(), want.double(), rtol=2**-11, atol=2**-24)
    return torch.allclose(got.double(), want.double(), rtol=1e-5, atol=1e-7)


def scores_of(batch: PagedBatch) -> list[torch.Tensor]:
    return [batch.side(batch.score, r)[0].clone() for r in range(len(batch.spec.lens))]


@pytest.fixture(scope="module")
def truths():
    """fp64 scores of a case and the error of the same maths in fp32; made once."""
    made: dict[tuple[str, str, bool], tuple[list[torch.Tensor], float]] = {}

    def get(
        batch: PagedBatch,
        math: str,
        tau: torch.Tensor,
        keys: torch.Tensor,
        in_halves: bool,
    ):
        # The head sizes and dtypes of a GPU are part of the name.
        name = str(batch.spec), math, in_halves
        if name not in made:
            exact, same = (
                dense_scores(
                    batch,
                    tau,
                    keys,
                    layer_index=3,
                    first_query_head=10,
                    scale=batch.spec.head_size**-0.5,
                    soft_cap=MATHS[math].soft_cap,
                    dtype=dtype,
                    in_halves=in_halves and dtype == torch.float32,
                    **MATHS[math].optional(batch),
                )
                for dtype in (torch.float64, torch.float32)
            )
            error = max(
                float((s - e).abs().max()) for s, e in zip(same, exact, strict=True)
            )
            made[name] = exact, error
        return made[name]

    return get


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_scores_match_fp64(spec, math, impl, truths):
    spec = suited_to_score(spec, impl)
    batch = make_batch(spec)
    case = MATHS[math]
    num_tokens = len(batch.query)
    tau = torch.full((num_tokens,), case.tau)
    tau[3::5] = 0.0  # rows that are not scored
    keys = torch.full((len(spec.lens),), case.noise_key)
    exact, same_error = truths(batch, math, tau, keys, impl in HALF_IMPLS)
    before = batch.raw.clone()
    optional = case.optional(batch)
    run(batch, impl, tau, keys, case.soft_cap, **optional)
    for request, (got, want) in enumerate(zip(scores_of(batch), exact, strict=True)):
        error = float((got - want).abs().max())
        # The floor is half a unit in the last place of the largest score.
        floor = float(want.abs().max()) * 2.0**-24
        if impl in ROW_IMPLS:
            # Tensor cores add products in an order of their own. A share that differs
            # in its last bit can turn the rounding of each addition behind it.
            floor *= sqrt(max(1, spec.lens[request][1]))
        assert error <= 2 * same_error + floor, (request, error, same_error)
    # Nothing but the scores of the requests' own slots has changed.
    for request in range(len(spec.lens)):
        zeros = torch.zeros_like(batch.side(batch.score, request))
        batch.set_side(batch.score, request, zeros)
    assert torch.equal(batch.raw, before)


def test_rows_of_a_long_prompt_sum_to_their_number(impl):
    spec = BatchSpec(lens=((1023, 1023), (1023, 1)), head_size=32)
    spec = suited_to_score(spec, impl)
    batch = make_batch(spec)
    run(batch, impl, torch.ones(1024), torch.tensor([5, 6]))
    prompt, decode = scores_of(batch)
    assert torch.allclose(prompt.sum(-1), torch.tensor(2.0 * 1023), rtol=1e-5)
    assert torch.allclose(decode.sum(-1), torch.tensor(2.0), rtol=1e-5)
    # The last key is seen by the last row only.
    assert float(prompt[:, -1].max()) <= 2.0


def test_scores_accumulate_over_calls(impl):
    batch = make_batch(suited_to_score(BatchSpec(lens=((40, 1),)), impl))
    tau, keys = torch.ones(1), torch.tensor([9])
    run(batch, impl, tau, keys)
    once = scores_of(batch)[0]
    run(batch, impl, tau, keys)
    if impl in HALF_IMPLS:  # head by head, each addition with a rounding of its own
        assert torch.allclose(scores_of(batch)[0], once + once, rtol=1e-6)
    else:
        assert torch.equal(scores_of(batch)[0], once + once)


def test_bias_follows_stored_positions(impl):
    """Equal keys and no noise: a row is the softmax of its bias, wherever keys lie."""
    spec = BatchSpec(num_query_heads=2, num_kv_heads=1, lens=((50, 1),))
    spec = suited_to_score(spec, impl)
    batch = make_batch(spec)
    batch.query.zero_()
    slopes = torch.tensor([0.25, -0.01])
    run(batch, impl, torch.tensor([2.0]), torch.tensor([0]), alibi_slopes=slopes)
    distance = batch.side(batch.position, 0)[0, 0] - batch.query_positions[0]
    bias = slopes[:, None].double() * distance
    expected = torch.softmax(bias / 2.0, dim=-1).sum(0)
    assert is_close(scores_of(batch)[0][0], expected, impl)


def test_places_change_the_bias_and_leave_the_noise(impl):
    """Equal keys: a row is its bias by place plus its noise by position."""
    spec = BatchSpec(num_query_heads=1, num_kv_heads=1, lens=((50, 1),))
    batch = make_batch(suited_to_score(spec, impl))
    batch.query.zero_()
    slopes = torch.tensor([0.25])
    place = torch.randperm(50)
    batch.set_side(batch.place, 0, place.view(1, 1, 50))
    run(
        batch,
        impl,
        torch.ones(1),
        torch.tensor([8]),
        alibi_slopes=slopes,
        place=batch.place[0],
    )
    rows = noise.row_keys(8, 3, 10, int(batch.query_positions[0]))
    gumbel = noise.gumbel(rows, batch.side(batch.position, 0)[0, 0])
    expected = torch.softmax(0.25 * (place - 49) + gumbel.double(), dim=-1)
    assert is_close(scores_of(batch)[0][0], expected, impl)


def test_places_in_order_are_positions_from_zero_on(cpu_impl):
    """To the bit: what was never evicted is attended as it would be by position."""
    spec = BatchSpec(lens=((113, 40), (65, 1)))
    by_position, by_place = make_batch(spec), make_batch(spec)
    rows = [torch.arange(kv - q, kv) for kv, q in spec.lens]
    tau, keys = torch.full((41,), 1.4), torch.tensor([3, 4])
    optional = {
        "alibi_slopes": torch.tensor([0.3, 0.1, 0.03, 0.01]),
        "query_positions": torch.cat(rows),
    }
    for batch in (by_position, by_place):
        for request, (kv_len, _) in enumerate(spec.lens):
            for side in (batch.position, batch.place):
                batch.set_side(side, request, torch.arange(kv_len).expand(1, 2, -1))
    run(by_position, cpu_impl, tau, keys, **optional)
    run(by_place, cpu_impl, tau, keys, **optional, place=by_place.place[0])
    assert torch.equal(by_position.raw, by_place.raw)


def test_a_sink_takes_its_share_and_no_noise(impl):
    spec = BatchSpec(num_query_heads=2, num_kv_heads=1, lens=((50, 1),))
    spec = suited_to_score(spec, impl)
    tau, sinks = torch.tensor([1.6]), torch.tensor([3.0, -1e4])
    batch = make_batch(spec)
    batch.query.zero_()
    run(batch, impl, tau, torch.tensor([9]), sinks=sinks)
    total = float(scores_of(batch)[0].double().sum())
    positions = batch.side(batch.position, 0)[0, 0]
    rows = noise.row_keys(9, 3, 10, int(batch.query_positions[0]))
    mass = float((noise.gumbel(rows, positions).double() / tau.double()).exp().sum())
    share = mass / (mass + float((sinks[0].double() / tau.double()).exp()))
    # The second head's sink is too small to take anything.
    assert abs(total - (share + 1.0)) < (1e-5 if impl in HALF_IMPLS else 1e-6)


def test_a_sink_above_all_logits_leaves_nothing(impl):
    batch = make_batch(suited_to_score(BatchSpec(lens=((40, 3),)), impl))
    sinks = torch.full((4,), 500.0)
    run(batch, impl, torch.tensor([1.0, 1.0, 2.0]), torch.tensor([4]), sinks=sinks)
    assert (scores_of(batch)[0] == 0).all()


INVARIANCE_SPECS = [
    BatchSpec(fp32, "vec", 8, 2, 64, 32, ((113, 113), (300, 33), (65, 65), (20, 1))),
    BatchSpec(bf16, "amx", 9, 3, 64, 64, ((113, 113), (300, 33), (65, 65), (20, 1))),
]


@pytest.mark.parametrize(
    "math",
    [
        "plain",
        "noise",
        "noise-tau-cap-alibi-sinks",
        "noise-tau-cap-alibi-sinks-places",
    ],
)
@pytest.mark.parametrize("spec", INVARIANCE_SPECS, ids=str)
def test_chunks_and_batches_change_no_bit(spec, math, kernel_impl):
    spec = suited_to_score(spec, kernel_impl)
    together = make_batch(spec)
    tau = torch.linspace(1.0, 1.5, len(together.query))
    tau[: spec.lens[0][1]] = 1.0
    keys = torch.full((len(spec.lens),), MATHS[math].noise_key)
    soft_cap = MATHS[math].soft_cap
    optional = MATHS[math].optional(together)
    run(together, kernel_impl, tau, keys, soft_cap, **optional)
    # The emulation takes a while for each call.
    for chunk in (7, 1000) if kernel_impl == "emulated" else (1, 7, 1000):
        alone = make_batch(spec)
        for request, (kv_len, num_rows) in enumerate(spec.lens):
            begin = int(alone.query_start_loc[request])
            for start in range(0, num_rows, chunk):
                stop = min(start + chunk, num_rows)
                rows = slice(begin + start, begin + stop)
                run(
                    alone,
                    kernel_impl,
                    tau[rows],
                    keys[request : request + 1],
                    soft_cap,
                    **optional,
                    query=alone.query[rows],
                    block_table=alone.block_table[request : request + 1],
                    kv_lens=torch.tensor([kv_len - num_rows + stop]).int(),
                    query_start_loc=torch.tensor([0, stop - start]).int(),
                    query_positions=alone.query_positions[rows],
                )
        assert torch.equal(alone.raw, together.raw), chunk


def test_the_width_of_the_block_table_changes_no_bit(kernel_impl):
    """A wide one leaves a GPU room for a single tile of rows at a time in scratch, so
    that rows and requests are spread over many launches."""
    spec = BatchSpec(bf16, "hnd", 3, 1, 64, 16, ((113, 50), (20, 1), (70, 43)))
    spec = suited_to_score(spec, kernel_impl)
    narrow, wide = make_batch(spec), make_batch(spec)
    tau, keys = torch.linspace(1.0, 1.5, len(narrow.query)), torch.tensor([3, 4, 5])
    columns = 2**20 // spec.block_size  # of a context of a million tokens
    table = torch.zeros(len(spec.lens), columns, dtype=torch.int32)
    table[:, : narrow.block_table.shape[1]] = narrow.block_table
    run(narrow, kernel_impl, tau, keys)
    run(wide, kernel_impl, tau, keys, block_table=table)
    assert torch.equal(wide.raw, narrow.raw)


def test_the_query_rows_of_a_gpu_lie_anywhere(impl):
    """Few scored rows far apart, and a group that does not divide a tile of vectors."""
    spec = BatchSpec(bf16, "hnd", 9, 3, 64, 16, ((200, 150), (0, 0), (70, 70)))
    spec = suited_to_score(spec, impl)
    batch = make_batch(spec)
    tau = torch.zeros(220)
    tau[[0, 64, 149, 160, 161, 219]] = torch.tensor([1.0, 1.3, 1.0, 2.0, 1.0, 0.7])
    keys = torch.tensor([5, 6, 0])
    run(batch, impl, tau, keys)
    expected = dense_scores(
        batch,
        tau,
        keys,
        layer_index=3,
        first_query_head=10,
        scale=0.125,
        soft_cap=0.0,
        dtype=torch.float64,
    )
    for got, want in zip(scores_of(batch), expected, strict=True):
        assert is_close(got, want, impl)


def test_tiles_of_a_long_prompt_add_in_order(cpu_impl):
    """Many tiles per KV head, on one thread and on several: no bit changes."""
    spec = BatchSpec(bf16, "vec", 8, 2, 32, 32, ((1023, 1023),))
    results = []
    threads = torch.get_num_threads()
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        batch = make_batch(spec)
        run(batch, cpu_impl, torch.ones(1023), torch.tensor([3]))
        results.append(batch.raw)
    torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])
    one_by_one = make_batch(spec)
    for row in range(1023):
        run(
            one_by_one,
            cpu_impl,
            torch.ones(1),
            torch.tensor([3]),
            query=one_by_one.query[row : row + 1],
            kv_lens=torch.tensor([row + 1]).int(),
            query_start_loc=torch.tensor([0, 1]).int(),
            query_positions=one_by_one.query_positions[row : row + 1],
        )
    assert torch.equal(one_by_one.raw, results[0])


def test_a_request_without_scored_rows_is_not_looked_at(impl):
    spec = suited_to_score(BatchSpec(lens=((40, 3), (50, 5))), impl)
    batch = make_batch(spec)
    # Were request 0 read, its block numbers would be refused or crash.
    batch.block_table[0] = 10**6
    tau = torch.tensor([0.0, 0.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    run(batch, impl, tau, torch.tensor([1, 2]))
    assert torch.allclose(scores_of_request(batch, 1).sum(-1), torch.tensor(2.0 * 5))


def scores_of_request(batch: PagedBatch, request: int) -> torch.Tensor:
    return batch.side(batch.score, request)[0]


def test_nan_in_a_query_reaches_only_its_own_request(impl):
    batch = make_batch(suited_to_score(BatchSpec(lens=((40, 2), (40, 2))), impl))
    batch.query[1] = float("nan")
    run(batch, impl, torch.ones(4), torch.tensor([1, 2]))
    assert scores_of_request(batch, 0).isnan().all()
    assert scores_of_request(batch, 1).isfinite().all()


@pytest.fixture(params=[*CPU_ISAS, "emulated", *GPU])
def draw_noise(request, monkeypatch):
    """Draws of one row, by every compiled implementation."""
    name = request.param if request.param not in CPU_ISAS else f"cpu-{request.param}"
    for impl in use_impl(name, monkeypatch):
        if impl == "cpu":
            yield lambda *args: cpu.draw_noise(*args[:-1], gumbel=args[-1])
        else:
            ops.require_impl(impl)
            yield ops._loaded[impl].draw_noise


@pytest.mark.parametrize("size", [1, 31, 64, 1000])
def test_noise_equals_core_to_the_bit(size, draw_noise):
    generator = torch.Generator().manual_seed(size)
    positions = torch.randint(0, 2**31 - 1, (size,), generator=generator).int()
    for key, layer, head, query_position in [
        (noise.request_noise_key(0, 0), 0, 0, 0),
        (noise.request_noise_key(7, 123), 31, 63, 131071),
        (-(2**63), 5, 2, 2**31 - 1),
        (2**63 - 1, 1, 70, 2**40 + 5),
    ]:
        rows = noise.row_keys(key, layer, head, query_position)
        for gumbel, expected in (
            (True, noise.gumbel(rows, positions)),
            (False, noise.exponential(rows, positions)),
        ):
            drawn = draw_noise(positions, key, layer, head, query_position, gumbel)
            assert torch.equal(drawn.view(torch.int32), expected.view(torch.int32))


def test_noise_depends_on_layer_head_and_request(impl):
    spec = BatchSpec(num_query_heads=1, num_kv_heads=1, lens=((64, 1), (64, 1)))
    spec = suited_to_score(spec, impl)
    batch = make_batch(spec)
    batch.query.zero_()  # equal logits: a row is its noise
    batch.set_side(batch.position, 0, torch.arange(64).view(1, 1, 64))
    batch.set_side(batch.position, 1, torch.arange(64).view(1, 1, 64))
    run(batch, impl, torch.ones(2), torch.tensor([8, 9]))
    first, second = scores_of(batch)
    assert not torch.allclose(first, second)
    rows = noise.row_keys(8, 3, 10, int(batch.query_positions[0]))
    expected = torch.softmax(noise.gumbel(rows, torch.arange(64)), 0)
    assert is_close(first[0], expected, impl)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("kv_lens", {"kv_lens": torch.tensor([1]).int()}),
        ("kv_lens", {"kv_lens": torch.tensor([10**6]).int()}),
        ("block_table", {"block_table": torch.tensor([[0, 99, 0, 0, 0]]).int()}),
        ("query_start_loc", {"query_start_loc": torch.tensor([0, 500]).int()}),
        ("query_start_loc", {"query_start_loc": torch.tensor([0, 113])}),
        ("query", {"query": torch.zeros(113, 4, 32)}),
        ("query", {"query": torch.zeros(113, 4, 64, dtype=bf16)}),
        ("query", {"query": torch.zeros(113, 3, 64)}),
        ("alibi_slopes", {"alibi_slopes": torch.zeros(3)}),
        ("place", {"place": torch.zeros(7, 2, 32)}),
        ("place", {"place": torch.zeros(7, 1, 32, dtype=torch.int32)}),
        ("sinks", {"sinks": torch.zeros(4, dtype=torch.float64)}),
    ],
)
def test_bad_arguments_are_named(name, change):
    batch = make_batch(BatchSpec())
    with pytest.raises(ValueError, match=f"^{name}:"):
        run(batch, "cpu", torch.ones(113), torch.tensor([0]), **change)


def test_unknown_layout_is_refused(impl):
    batch = make_batch(BatchSpec())
    batch.spec = dataclasses.replace(batch.spec, layout="neon")
    with pytest.raises(ValueError, match="layout must be one of .* 'neon'"):
        run(batch, impl, torch.ones(113), torch.tensor([0]))
