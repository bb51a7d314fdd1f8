# SPDX-License-Identifier: Apache-2.0
"""paged_attention_audited against fp64, and against what eviction would compute."""

import dataclasses
import itertools

import pytest
import torch

from keyformer_vllm import ops
from keyformer_vllm.ops.layout import ROW_LAYOUTS
from tests.helpers import (
    MATHS,
    BatchSpec,
    Math,
    PagedBatch,
    dense_attention,
    make_batch,
)
from tests.implementations import CPU_ISAS, use_impl
from tests.ops.test_paged_attention_scored import (
    LONG_SPECS,
    RANGE,
    SPECS,
    arguments,
    unscored_rows,
)
from tests.ops.test_paged_attention_scored import run as run_scored

PACKED = [spec for spec in SPECS if spec.layout not in ROW_LAYOUTS]
"""There is none for a GPU yet."""

PLACELESS = [name for name, case in MATHS.items() if not case.place]


@pytest.fixture(params=["reference", *(f"cpu-{isa}" for isa in CPU_ISAS)])
def impl(request, monkeypatch):
    yield from use_impl(request.param, monkeypatch)


def fronts_of(spec: BatchSpec) -> torch.Tensor:
    """[num_reqs] blocks: none, all that may be, and what lies between, in turn."""
    most = [(kv_len - rows) // spec.block_size for kv_len, rows in spec.lens]
    shares = itertools.cycle([lambda n: 0, lambda n: n, lambda n: (n + 1) // 2])
    return torch.tensor(
        [share(n) for share, n in zip(shares, most, strict=False)]
    ).int()


def run(
    batch: PagedBatch,
    impl: str,
    case: Math,
    front_blocks: torch.Tensor,
    **overrides: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and the audit."""
    made = arguments(batch, case, **overrides)
    output = made.pop("output", torch.full_like(made["query"], 7.0))
    audit = made.pop("audit", torch.full((*made["query"].shape[:2], 3), 7.0))
    ops.paged_attention_audited(
        output, audit, front_blocks=front_blocks, impl=impl, **made
    )
    return output, audit


def without_front(batch: PagedBatch, front_blocks: torch.Tensor) -> dict:
    """The arguments that an evicting server would give."""
    table = [
        row.roll(-int(front))
        for row, front in zip(batch.block_table, front_blocks, strict=True)
    ]
    kv_lens = batch.kv_lens - front_blocks * batch.spec.block_size
    return {"block_table": torch.stack(table), "kv_lens": kv_lens}


def exact_audit(
    batch: PagedBatch, case: Math, front_blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 output and audit: attention over other values tells where it went."""

    def attend(change_values) -> torch.Tensor:
        fronts = (front_blocks * batch.spec.block_size).tolist()
        values = [
            change_values(value.double(), (torch.arange(value.shape[1]) < front))
            for value, front in zip(batch.values, fronts, strict=True)
        ]
        given = arguments(batch, case)
        names = ("scale", "soft_cap", "alibi_slopes", "sinks")
        maths = {name: given[name] for name in names if name in given}
        changed = dataclasses.replace(batch, values=values)
        return dense_attention(changed, dtype=torch.float64, **maths)

    def share(chosen) -> torch.Tensor:
        return attend(
            lambda value, front: torch.ones_like(value) * chosen(front)[:, None, None]
        )[..., 0]

    lost = share(lambda front: front)
    # Apart from a sink, which keeps its share; a difference from 1 would cancel.
    kept = 1 - lost if case.sinks else share(lambda front: ~front)
    output = attend(lambda value, front: value)
    rest = attend(lambda value, front: value * ~front[:, None, None])
    change = output - rest / kept[..., None]
    norms = change.square().sum(-1), output.square().sum(-1)
    return output, torch.stack((lost, *norms), dim=-1)


@pytest.mark.parametrize("math", PLACELESS)
@pytest.mark.parametrize("spec", PACKED[::3], ids=str)
def test_output_and_audit_match_fp64(spec, math, impl):
    batch = make_batch(spec)
    fronts = fronts_of(spec)
    assert fronts.max() > 0
    want, want_audit = exact_audit(batch, MATHS[math], fronts)
    tau = unscored_rows(len(batch.query), MATHS[math].tau)
    got, audit = run(batch, impl, MATHS[math], fronts, tau=tau)
    eps = torch.finfo(spec.dtype).eps
    assert torch.allclose(got.double(), want, rtol=eps, atol=2e-5 + eps / 16)
    assert torch.allclose(audit.double(), want_audit, rtol=1e-3, atol=2e-5)
    # The front gets a share exactly where there is one.
    rows = torch.tensor([rows for _, rows in spec.lens])
    assert ((audit[..., 0] > 0).all(-1) == (fronts > 0).repeat_interleave(rows)).all()


@pytest.mark.parametrize("math", PLACELESS)
@pytest.mark.parametrize("spec", [*PACKED[::4], *LONG_SPECS], ids=str)
def test_scores_are_those_of_an_eviction_to_the_bit(spec, math, impl):
    """So an audit ranks as an eviction does, and the front stays as it is."""
    audited, evicted = make_batch(spec), make_batch(spec)
    fronts = fronts_of(spec)
    tau = unscored_rows(len(audited.query), MATHS[math].tau)
    run(audited, impl, MATHS[math], fronts, tau=tau)
    shorter = without_front(evicted, fronts)
    run_scored(evicted, impl, MATHS[math], tau=tau, **shorter)
    assert torch.equal(audited.raw, evicted.raw)


@pytest.mark.parametrize("spec", PACKED[::4], ids=str)
def test_without_a_front_it_is_plain_attention_to_the_bit(spec, impl):
    plain, audited = make_batch(spec), make_batch(spec)
    none = torch.zeros(len(spec.lens)).int()
    output, audit = run(audited, impl, MATHS["noise"], none)
    assert torch.equal(output, run_scored(plain, impl, MATHS["noise"]))
    assert torch.equal(audited.raw, plain.raw)
    assert (audit[..., :2] == 0).all() and (audit[..., 2] > 0).all()


@pytest.mark.parametrize("spec", LONG_SPECS, ids=str)
def test_threads_change_no_bit(spec, cpu_impl):
    results = []
    threads = torch.get_num_threads()
    for num_threads in (1, 4, 3):
        torch.set_num_threads(num_threads)
        batch = make_batch(spec)
        results.append((*run(batch, cpu_impl, MATHS["noise"], fronts_of(spec)), batch))
    torch.set_num_threads(threads)
    for output, audit, batch in results[1:]:
        assert torch.equal(output, results[0][0])
        assert torch.equal(audit, results[0][1])
        assert torch.equal(batch.raw, results[0][2].raw)


@pytest.mark.parametrize("side", ["front", "rest"])
def test_attention_that_lies_on_one_side_only(side, cpu_impl):
    """Logits further apart than exp reaches: all or nothing, and no NaN."""
    spec = BatchSpec(lens=((RANGE + 64, 1),), block_size=32)
    batch = make_batch(spec)
    front = torch.tensor([8]).int()
    in_front = torch.arange(RANGE + 64) < 8 * 32
    batch.set_side(
        batch.position, 0, torch.where(in_front, 0, 1000).expand(1, 2, -1).int()
    )
    slopes = torch.full((4,), 1.0 if side == "rest" else -1.0)
    _, audit = run(batch, cpu_impl, MATHS["plain"], front, alibi_slopes=slopes)
    assert audit.isfinite().all()
    assert (audit[..., 0] == (1.0 if side == "front" else 0.0)).all()
    if side == "rest":
        assert (audit[..., 1] == 0).all()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("front_blocks", {"front_blocks": torch.tensor([-1]).int()}),
        ("front_blocks", {"front_blocks": torch.tensor([4]).int()}),
        ("front_blocks", {"front_blocks": torch.tensor([1, 1]).int()}),
        ("front_blocks", {"front_blocks": torch.tensor([1])}),
        ("audit", {"audit": torch.zeros(2, 4, 2)}),
        ("audit", {"audit": torch.zeros(1, 4, 3)}),
        ("audit", {"audit": torch.zeros(2, 4, 3, dtype=torch.float64)}),
        ("audit", {"audit": torch.zeros(2, 4, 6)[..., ::2]}),
        ("output", {"output": torch.zeros(2, 4, 32)}),
    ],
)
def test_bad_arguments_are_named(name, change):
    """113 tokens, two of them queries: three blocks of 32 may be a front."""
    batch = make_batch(BatchSpec(block_size=32, lens=((113, 2),)))
    change = {"front_blocks": torch.tensor([3]).int()} | change
    with pytest.raises(ValueError, match=f"^{name}:"):
        run(batch, "cpu", MATHS["plain"], **change)
