# SPDX-License-Identifier: Apache-2.0
"""paged_attention_scored against fp64, against score_keys, and its invariances."""

import dataclasses
from math import sqrt

import pytest
import torch

from keyformer_vllm import ops
from keyformer_vllm.ops.layout import page_bytes, side_views
from tests.helpers import (
    MATHS,
    ROW_IMPLS,
    BatchSpec,
    Math,
    PagedBatch,
    dense_attention,
    dense_scores,
    make_batch,
    suited_to_score,
)
from tests.implementations import CPU_ISAS, EMULATED, GPU, use_impl

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32

RANGE = 512  # keys that the kernels attend at a time, those of a GPU half of it
FULL_MATH = MATHS["noise-tau-cap-alibi-sinks-places"]


@pytest.fixture(
    params=["reference", *(f"cpu-{isa}" for isa in CPU_ISAS), *EMULATED, GPU[0]]
)
def impl(request, monkeypatch):
    """Those that have this operator; there is none in Triton."""
    yield from use_impl(request.param, monkeypatch)


def awkward_lens(block_size: int) -> tuple[tuple[int, int], ...]:
    """Lengths around a block and around a range; one request rests, one has rows."""
    return (
        (1, 1),
        (block_size - 1, 1),
        (block_size, 1),
        (50, 0),
        (block_size + 1, 1),
        (113, 5),
        (RANGE + 3, 2),
        (2 * RANGE, 1),
    )


# Groups of 1, 2, 3, 4, 5 and 9 query heads per KV head.
SPECS = [
    BatchSpec(dtype, layout, heads[0], heads[1], head_size, bs, awkward_lens(bs))
    for dtype, layout, heads, head_size, bs in [
        (fp32, "vec", (4, 4), 32, 32),
        (fp32, "vec", (8, 2), 64, 64),
        (fp32, "vec16", (5, 1), 80, 32),
        (fp32, "vec", (9, 3), 96, 128),
        (fp32, "vec16", (9, 1), 112, 64),
        (fp32, "vec", (4, 2), 256, 96),
        (bf16, "vec", (9, 3), 64, 32),
        (bf16, "vec16", (8, 2), 80, 128),
        (bf16, "vec", (5, 1), 128, 64),
        (bf16, "vec", (2, 2), 256, 96),
        (bf16, "amx", (9, 3), 64, 32),
        (bf16, "amx", (4, 4), 32, 64),
        (bf16, "amx", (8, 2), 96, 128),
        (bf16, "amx", (5, 1), 80, 32),
        (bf16, "amx", (4, 2), 256, 96),
        (fp16, "vec", (8, 2), 32, 64),
        (fp16, "vec16", (9, 3), 112, 32),
        (fp16, "vec", (4, 4), 64, 128),
        (fp16, "vec", (5, 1), 96, 32),
        (bf16, "nhd", (8, 2), 128, 16),
        (fp16, "hnd", (9, 1), 80, 16),
        (bf16, "hnd", (17, 1), 64, 64),
    ]
]


def arguments(batch: PagedBatch, case: Math, **overrides: torch.Tensor) -> dict:
    """What `score_keys` takes, and `paged_attention_scored` besides its output."""
    made = {
        "query": batch.query,
        "kv_cache": batch.kv_cache[0],
        "score": batch.score[0],
        "position": batch.position[0],
        "block_table": batch.block_table,
        "kv_lens": batch.kv_lens,
        "query_start_loc": batch.query_start_loc,
        "query_positions": batch.query_positions,
        "tau": torch.full((len(batch.query),), case.tau),
        "noise_keys": torch.full((len(batch.spec.lens),), case.noise_key),
        "layer_index": 3,
        "first_query_head": 10,
        "scale": batch.spec.head_size**-0.5,
        "soft_cap": case.soft_cap,
        "layout": batch.spec.layout,
    }
    return made | case.optional(batch) | overrides


def run(
    batch: PagedBatch, impl: str, case: Math, **overrides: torch.Tensor
) -> torch.Tensor:
    """Returns the output: [num_tokens, num_query_heads, head_size]."""
    made = arguments(batch, case, **overrides)
    output = made.pop("output", torch.full_like(made["query"], 7.0))
    ops.paged_attention_scored(output, impl=impl, **made)
    return output


def unscored_rows(num_tokens: int, tau: float) -> torch.Tensor:
    """[num_tokens] temperatures, some of them of rows that are not scored."""
    made = torch.full((num_tokens,), tau)
    made[2::5] = 0.0
    made[3::5] = -1.0
    return made


@dataclasses.dataclass
class Truth:
    """Results in fp64, and the error of the same maths in fp32."""

    output: torch.Tensor
    output_error: float  # rounded to the dtype of the case
    scores: list[torch.Tensor]
    score_error: float


@pytest.fixture(scope="module")
def truths():
    """From a case to its `Truth`; made once."""
    made: dict[tuple[str, str], Truth] = {}

    def make(batch: PagedBatch, math: str) -> Truth:
        given = arguments(batch, MATHS[math])
        shared = {
            name: given.get(name)
            for name in ("scale", "soft_cap", "alibi_slopes", "place", "sinks")
        }
        rows = {
            name: given[name]
            for name in ("noise_keys", "layer_index", "first_query_head")
        }
        tau = unscored_rows(len(batch.query), MATHS[math].tau)
        (exact, scores), (same, same_scores) = (
            (
                dense_attention(batch, **shared, dtype=dtype),
                dense_scores(batch, tau, **rows, **shared, dtype=dtype),
            )
            for dtype in (torch.float64, torch.float32)
        )
        score_error = max(
            float((s - e).abs().max()) for s, e in zip(same_scores, scores, strict=True)
        )
        error = float((same.to(batch.spec.dtype) - exact).abs().max())
        return Truth(exact, error, scores, score_error)

    def get(batch: PagedBatch, math: str) -> Truth:
        name = str(batch.spec), math
        if name not in made:
            made[name] = make(batch, math)
        return made[name]

    return get


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_results_match_fp64(spec, math, impl, truths, request):
    """Unused slots hold NaN: a leak into a product would show."""
    if "reversed" in request.node.name and MATHS[math] != FULL_MATH:
        pytest.skip("the other order of threads is run with all features only")
    spec = suited_to_score(spec, impl)
    batch = make_batch(spec)
    truth = truths(batch, math)
    before = batch.raw.clone()
    tau = unscored_rows(len(batch.query), MATHS[math].tau)
    got = run(batch, impl, MATHS[math], tau=tau)
    # The floor is half a unit in the last place of the largest output.
    floor = float(truth.output.abs().max()) * torch.finfo(spec.dtype).eps / 2
    error = float((got - truth.output).abs().max())
    assert error <= 2 * truth.output_error + floor, (error, truth.output_error)
    # Elsewhere they are those of score_keys to the bit, see below.
    for index, want in enumerate(truth.scores if impl in ROW_IMPLS else []):
        error = float((batch.side(batch.score, index)[0] - want).abs().max())
        # Four units in the last place for each share that is added: two for the
        # exponential of a GPU, two for products in an order of their own.
        shares = max(1, spec.lens[index][1]) * spec.num_query_heads / spec.num_kv_heads
        floor = 4.0 * sqrt(shares) * float(want.abs().max()) * 2.0**-23
        assert error <= 2 * truth.score_error + floor, (index, error)
    # Nothing but the scores of the requests' own slots has changed.
    for index in range(len(spec.lens)):
        zeros = torch.zeros_like(batch.side(batch.score, index))
        batch.set_side(batch.score, index, zeros)
    assert torch.equal(batch.raw, before)


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_scores_are_those_of_score_keys_to_the_bit(spec, math, cpu_impl):
    """Which tests/ops/test_score_keys.py holds to fp64."""
    spec = suited_to_score(spec, cpu_impl)
    tau = unscored_rows(len(make_batch(spec).query), MATHS[math].tau)
    fused, apart = make_batch(spec), make_batch(spec)
    run(fused, cpu_impl, MATHS[math], tau=tau)
    ops.score_keys(impl=cpu_impl, **arguments(apart, MATHS[math], tau=tau))
    assert torch.equal(fused.raw, apart.raw)


# Long enough for several ranges, and few enough for threads to share a request.
LONG_SPECS = [
    BatchSpec(bf16, "vec", 9, 3, 64, 32, ((4 * RANGE + 9, 1), (40, 1))),
    BatchSpec(fp32, "vec", 8, 1, 32, 96, ((2 * RANGE + 500, 1), (RANGE, 1), (9, 0))),
    BatchSpec(bf16, "amx", 5, 1, 32, 64, ((3 * RANGE + 1, 1),)),
]


@pytest.mark.parametrize("spec", LONG_SPECS, ids=str)
def test_threads_change_no_bit(spec, cpu_impl):
    results = []
    threads = torch.get_num_threads()
    for num_threads in (1, 4, 3):
        torch.set_num_threads(num_threads)
        batch = make_batch(spec)
        results.append((run(batch, cpu_impl, FULL_MATH), batch.raw))
    torch.set_num_threads(threads)
    for output, raw in results[1:]:
        assert torch.equal(output, results[0][0])
        assert torch.equal(raw, results[0][1])


@pytest.mark.parametrize("spec", LONG_SPECS, ids=str)
def test_neighbours_and_their_number_change_no_bit(spec, kernel_impl, num_threads):
    """One request after the other, rows one by one, or all in one call."""
    if kernel_impl in ROW_IMPLS and num_threads > 1:
        pytest.skip("a GPU has no threads of the CPU")
    if kernel_impl == "triton":
        pytest.skip("there is no paged_attention_scored in Triton")
    spec = suited_to_score(spec, kernel_impl)
    lens = tuple((kv_len, min(3, kv_len)) for kv_len, _ in spec.lens) + spec.lens
    together = make_batch(dataclasses.replace(spec, lens=lens))
    tau = torch.linspace(0.5, 1.5, len(together.query))
    output = run(together, kernel_impl, FULL_MATH, tau=tau)
    alone = make_batch(together.spec)
    for request, (kv_len, num_rows) in enumerate(lens):
        begin = int(alone.query_start_loc[request])
        for r in range(num_rows):
            row = slice(begin + r, begin + r + 1)
            got = run(
                alone,
                kernel_impl,
                FULL_MATH,
                query=alone.query[row],
                block_table=alone.block_table[request : request + 1],
                kv_lens=torch.tensor([kv_len - num_rows + r + 1]).int(),
                query_start_loc=torch.tensor([0, 1]).int(),
                query_positions=alone.query_positions[row],
                tau=tau[row],
                noise_keys=torch.tensor([FULL_MATH.noise_key]),
            )
            assert torch.equal(got, output[row]), (request, r)
    assert torch.equal(alone.raw, together.raw)


def test_scores_accumulate_over_calls(impl):
    batch = make_batch(suited_to_score(BatchSpec(lens=((40, 1),)), impl))
    run(batch, impl, MATHS["noise"])
    once = batch.side(batch.score, 0).clone()
    assert torch.allclose(once.sum(-1), torch.tensor(2.0))
    run(batch, impl, MATHS["noise"])
    assert torch.equal(batch.side(batch.score, 0), once + once)


def test_rows_that_are_not_scored_attend_all_the_same(impl):
    spec = suited_to_score(BatchSpec(lens=((600, 1), (33, 2))), impl)
    scored, unscored = make_batch(spec), make_batch(spec)
    before = unscored.raw.clone()
    output = run(unscored, impl, MATHS["noise"], tau=torch.zeros(3))
    assert torch.equal(output, run(scored, impl, MATHS["noise"]))
    assert torch.equal(unscored.raw, before)
    assert not torch.equal(scored.raw, before)


def test_a_request_without_rows_is_not_looked_at(impl):
    batch = make_batch(suited_to_score(BatchSpec(lens=((40, 0), (50, 1))), impl))
    # Were request 0 read, its block numbers would be refused or crash.
    batch.block_table[0] = 10**6
    run(batch, impl, MATHS["noise"])
    assert torch.allclose(batch.side(batch.score, 1).sum(-1), torch.tensor(2.0))


def test_the_output_may_be_a_slice(impl):
    """Rows and heads of a wider tensor; what lies between them stays."""
    spec = BatchSpec(bf16, "vec", lens=((40, 2), (600, 1)))
    batch = make_batch(suited_to_score(spec, impl))
    want = run(batch, impl, MATHS["plain"])
    wide = torch.full((5, 9, 80), 7.0, dtype=bf16)
    run(batch, impl, MATHS["plain"], output=wide[1:4, ::2][:, :4, :64])
    assert torch.equal(wide[1:4, 0:8:2, :64], want)
    wide[1:4, 0:8:2, :64] = 7.0
    assert (wide == 7.0).all()


def test_nan_in_a_query_reaches_only_its_own_request(impl):
    batch = make_batch(suited_to_score(BatchSpec(lens=((40, 1), (40, 1))), impl))
    batch.query[0] = float("nan")
    output = run(batch, impl, MATHS["noise"])
    assert output[0].isnan().all() and output[1].isfinite().all()
    assert batch.side(batch.score, 0).isnan().all()
    assert batch.side(batch.score, 1).isfinite().all()


def test_rows_of_nobody_stay_as_they_are(impl):
    """As a captured graph has them: rows behind the last request, empty requests."""
    batch = make_batch(suited_to_score(BatchSpec(lens=((300, 1), (17, 1))), impl))
    want = run(batch, impl, MATHS["noise"])
    padded = make_batch(batch.spec)
    query = torch.cat([padded.query, torch.full_like(padded.query, torch.nan)])
    output = run(
        padded,
        impl,
        MATHS["noise"],
        query=query,
        block_table=torch.cat([padded.block_table, padded.block_table + 10**6]),
        kv_lens=torch.cat([padded.kv_lens, torch.zeros(2, dtype=torch.int32)]),
        query_start_loc=torch.tensor([0, 1, 2, 2, 2]).int(),
        query_positions=padded.query_positions.repeat(2),
        tau=torch.ones(4),
        noise_keys=torch.full((4,), MATHS["noise"].noise_key),
    )
    assert torch.equal(output[:2], want)
    assert (output[2:] == 7.0).all()
    assert torch.equal(padded.raw, batch.raw)


@pytest.mark.parametrize("row_impl", [EMULATED[0], GPU[0]])
def test_a_wide_block_table_changes_no_bit(row_impl, monkeypatch):
    """Scratch for so many keys per row that the rows are done in several launches."""
    spec = BatchSpec(bf16, "nhd", 8, 2, 64, 16, ((300, 1), (40, 2), (17, 5)))
    for impl in use_impl(row_impl, monkeypatch):
        narrow, wide = make_batch(spec), make_batch(spec)
        want = run(narrow, impl, FULL_MATH)
        table = torch.zeros(3, 2**17, dtype=torch.int32)
        table[:, : wide.block_table.shape[1]] = wide.block_table
        assert torch.equal(run(wide, impl, FULL_MATH, block_table=table), want)
        assert torch.equal(narrow.raw, wide.raw)


@pytest.mark.parametrize(
    ("name", "block_size", "change"),
    [
        ("kv_lens", 16, {"kv_lens": torch.tensor([10**6]).int()}),
        ("kv_cache", 8, {}),
        ("output", 16, {"output": torch.zeros(1, 4, 64)}),
        ("place", 16, {"place": torch.zeros(7, 2, 16, dtype=torch.int32)}),
    ],
)
def test_bad_arguments_of_a_gpu_are_named(name, block_size, change, monkeypatch):
    spec = BatchSpec(bf16, "nhd", block_size=block_size, lens=((113, 1),))
    for impl in use_impl(EMULATED[0], monkeypatch):
        with pytest.raises(ValueError, match=f"^{name}:"):
            run(make_batch(spec), impl, MATHS["plain"], **change)


@pytest.mark.parametrize("dtype", [bf16, fp16])
def test_the_output_is_rounded_as_torch_rounds(dtype, cpu_impl):
    """With one key the output is its value: normal, subnormal, tied or infinite."""
    batch = make_batch(BatchSpec(dtype, "vec", 2, 1, 64, 32, ((2, 1),)))
    tiny = torch.finfo(dtype).smallest_normal
    values = torch.tensor([1.0, -3.0, tiny, tiny / 4, tiny / 128, 0.0, -0.0, 1e-3])
    values = torch.cat([values, torch.tensor([torch.inf, -torch.inf, torch.nan])])
    first = torch.zeros(64).index_copy(0, torch.arange(11), values).to(dtype)
    # Two equal keys: the mean of the two values, often between two numbers.
    second = first.clone()
    bits = second.view(torch.int16)
    bits[:8] += torch.tensor([1, 3, 1, 1, 1, 1, 0, 3], dtype=torch.int16)
    block = batch.kv_cache[0, int(batch.block_table[0, 0]), 0].flatten()
    block[32 * 64 : 34 * 64] = torch.cat([first, second])
    batch.query.zero_()
    output = run(batch, cpu_impl, MATHS["plain"])
    want = ((first.float() + second.float()) / 2).to(dtype)
    assert torch.equal(output[0, 0].nan_to_num(nan=5.0), want.nan_to_num(nan=5.0))


def test_offsets_beyond_32_bits(impl):
    """A cache of 4.8 GB of which only two blocks are ever touched."""
    heads, bs, size, num_blocks = 8, 128, 128, 9000
    page = page_bytes(heads, bs, size, 2)
    raw = torch.empty(num_blocks * page, dtype=torch.int8)
    assert raw.numel() // 2 > 2**31  # elements, not only bytes
    width = 2 * size
    kv_cache = raw.view(bf16).as_strided(
        (num_blocks, heads, bs, width), (page // 2, bs * width, width, 1)
    )
    score, position = side_views(kv_cache)
    table = torch.tensor([[num_blocks - 1, num_blocks - 2]], dtype=torch.int32)
    used = table[0].long()
    kv_cache[used] = torch.randn(2, heads, bs, width).to(bf16)
    score[used], position[used] = 0.0, 5
    query, output = torch.zeros(2, 1, heads, size, dtype=bf16)
    ops.paged_attention_scored(
        output,
        query,
        kv_cache,
        score,
        position,
        table,
        torch.tensor([2 * bs], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([2 * bs]),
        torch.ones(1),
        torch.tensor([0]),
        layer_index=0,
        first_query_head=0,
        scale=1.0,
        soft_cap=0.0,
        layout="hnd" if impl in ROW_IMPLS else "vec",
        impl=impl,
    )
    assert torch.equal(score[used], torch.full((2, heads, bs), 1 / (2 * bs)))
    value = kv_cache[used][..., size:]
    if impl not in ROW_IMPLS:
        value = kv_cache[used].flatten(2)[:, :, bs * size :].unflatten(2, (bs, size))
    want = value.float().mean((0, 2))
    assert torch.allclose(output[0].float(), want, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("output", {"output": torch.zeros(113, 4, 32)}),
        ("output", {"output": torch.zeros(112, 4, 64)}),
        ("output", {"output": torch.zeros(113, 4, 64, dtype=bf16)}),
        ("output", {"output": torch.zeros(113, 4, 128)[:, :, ::2]}),
        ("kv_lens", {"kv_lens": torch.tensor([1]).int()}),
        ("kv_lens", {"kv_lens": torch.tensor([10**6]).int()}),
        ("block_table", {"block_table": torch.tensor([[0, 99, 0, 0, 0]]).int()}),
        ("query_start_loc", {"query_start_loc": torch.tensor([0, 500]).int()}),
        ("query_start_loc", {"query_start_loc": torch.tensor([-1, 5]).int()}),
        ("query", {"query": torch.zeros(113, 3, 64), "output": torch.zeros(1)}),
        ("tau", {"tau": torch.ones(112)}),
        ("alibi_slopes", {"alibi_slopes": torch.ones(3)}),
        ("place", {"place": torch.zeros(7, 2, 64, dtype=torch.int32)}),
        ("sinks", {"sinks": torch.ones(4, dtype=bf16)}),
    ],
)
def test_bad_arguments_are_named(name, change):
    batch = make_batch(BatchSpec())
    with pytest.raises(ValueError, match=f"^{name}:"):
        run(batch, "cpu", MATHS["plain"], **change)


def test_unknown_layout_is_refused(impl):
    batch = make_batch(BatchSpec())
    with pytest.raises(ValueError, match="layout must be one of .* 'neon'"):
        run(batch, impl, MATHS["plain"], layout="neon")
