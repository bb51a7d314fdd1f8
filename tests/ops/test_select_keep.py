# SPDX-License-Identifier: Apache-2.0
"""select_keep against a plain sort, and the properties every kept set has."""

import math
from dataclasses import replace

import pytest
import torch

from keyformer_vllm import ops
from keyformer_vllm.core import noise
from tests.helpers import BatchSpec, PagedBatch, make_batch

NUM_REQS = 6
SPEC = BatchSpec(
    num_query_heads=3,
    num_kv_heads=3,
    head_size=32,
    num_layers=2,
    lens=((1, 0), (31, 0), (32, 0), (33, 0), (113, 0), (1023, 0)),
)
NUM_EVICT = torch.tensor([0, 0, 5, 16, 64, 512]).int()
NUM_SINKS = torch.tensor([0, 4, 4, 0, 4, 4]).int()


def random_scores(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(shape, generator=generator)
    if kind == "ties":
        return (scores * 3).floor()
    if kind == "nan":
        special = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0])
        return special[torch.randint(0, 6, shape, generator=generator)]
    return scores


def scored_batch(kind: str, spec: BatchSpec = SPEC) -> PagedBatch:
    batch = make_batch(spec, seed=1)
    generator = torch.Generator().manual_seed(2)
    for request, (kv_len, _) in enumerate(spec.lens):
        shape = (spec.num_layers, spec.num_kv_heads, kv_len)
        batch.set_side(batch.score, request, random_scores(kind, shape, request))
        # Positions 3 apart, in no order: what earlier evictions leave behind.
        order = [torch.randperm(kv_len, generator=generator) * 3 for _ in range(6)]
        batch.set_side(batch.position, request, torch.stack(order).view(shape))
    return batch


def select(batch: PagedBatch, impl: str, **overrides: object) -> torch.Tensor:
    kv_lens = batch.kv_lens
    arguments: dict[str, object] = {
        "num_evict": NUM_EVICT,
        "num_sinks": NUM_SINKS,
        "recent_start": (kv_lens * 3 - kv_lens // 5 * 3).int(),
        "run_size": torch.ones(len(kv_lens)).int(),
        "random": torch.zeros(len(kv_lens), dtype=torch.bool),
        "noise_keys": torch.arange(len(kv_lens)) * 1234567,
        "max_kv_len": 1100,
    }
    arguments.update(overrides)
    return ops.select_keep(
        batch.score,
        batch.position,
        batch.block_table,
        kv_lens,
        impl=impl,
        **arguments,
    )


def expected_positions(
    scores: list[float],
    positions: list[int],
    num_keep: int,
    num_sinks: int,
    recent_start: int,
    run_size: int,
) -> set[int]:
    """Positions kept, by sorting Python tuples."""
    if num_keep == len(positions):
        return set(positions)
    score = dict(zip(positions, scores, strict=True))
    pinned = {p for p in positions if p < num_sinks or p >= recent_start}
    rest = sorted(set(positions) - pinned)
    total: dict[int, float] = {}
    for p in rest:
        total[p // run_size] = total.get(p // run_size, 0.0) + score[p]

    def order(p: int) -> tuple[bool, float, int]:
        value = total[p // run_size]
        return math.isnan(value), 0.0 if math.isnan(value) else -value, p

    best = sorted(rest, key=order)[: num_keep - len(pinned)]
    return pinned | set(best)


@pytest.mark.parametrize("run_size", [1, 16])
@pytest.mark.parametrize("kind", ["plain", "ties", "nan", "random"])
def test_kept_positions_equal_a_plain_sort(kind, run_size, any_impl, num_threads):
    batch = scored_batch(kind)
    before = batch.raw.clone()
    is_random = torch.tensor([kind == "random"] * NUM_REQS)
    run_sizes = torch.full((NUM_REQS,), run_size).int()
    keep = select(
        batch,
        any_impl,
        run_size=run_sizes,
        random=is_random,
        first_layer=7,
        first_kv_head=2,
    )
    assert torch.equal(batch.raw, before)
    assert keep.shape == (2, NUM_REQS, 3, 1100) and keep.dtype == torch.bool
    for request, (kv_len, _) in enumerate(SPEC.lens):
        assert not keep[:, request, :, kv_len:].any()
        num_keep = kv_len - int(NUM_EVICT[request])
        for layer in range(2):
            for head in range(3):
                scores = batch.side(batch.score, request)[layer, head]
                positions = batch.side(batch.position, request)[layer, head]
                if kind == "random":
                    key = request * 1234567
                    rows = noise.row_keys(key, 7 + layer, 2 + head, positions)
                    scores = noise.uniform(rows, positions)
                flags = keep[layer, request, head, :kv_len]
                kept = set(positions[flags].tolist())
                assert len(kept) == int(flags.sum()) == num_keep
                assert kept == expected_positions(
                    scores.tolist(),
                    positions.tolist(),
                    num_keep,
                    int(NUM_SINKS[request]),
                    kv_len * 3 - kv_len // 5 * 3,
                    run_size,
                )


@pytest.mark.parametrize("run_size", [1, 7, 16])
def test_a_long_request(run_size, any_impl):
    """Positions that fill several windows of the run kernel, and scores that tie."""
    kv_len = 5000
    spec = replace(SPEC, num_kv_heads=3, num_layers=2, lens=((kv_len, 0),))
    batch = scored_batch("ties", spec)
    keep = select(
        batch,
        any_impl,
        num_evict=torch.tensor([3072]).int(),
        num_sinks=torch.tensor([4]).int(),
        run_size=torch.tensor([run_size]).int(),
        random=torch.zeros(1, dtype=torch.bool),
        max_kv_len=kv_len,
    )
    for layer in range(2):
        for head in range(3):
            positions = batch.side(batch.position, 0)[layer, head]
            kept = set(positions[keep[layer, 0, head]].tolist())
            assert kept == expected_positions(
                batch.side(batch.score, 0)[layer, head].tolist(),
                positions.tolist(),
                kv_len - 3072,
                4,
                kv_len * 3 - kv_len // 5 * 3,
                run_size,
            )


@pytest.mark.parametrize("run_size", [1, 16])
def test_equal_ranks_are_told_apart_by_slot(run_size, raising_impl):
    """A position held twice breaks a promise; still the right number stays."""
    batch = scored_batch("plain")
    batch.score.fill_(1.0)
    batch.position.fill_(5)
    keep = select(
        batch,
        raising_impl,
        num_sinks=torch.zeros(NUM_REQS).int(),
        recent_start=torch.full((NUM_REQS,), 100).int(),
        run_size=torch.full((NUM_REQS,), run_size).int(),
    )
    for request, (kv_len, _) in enumerate(SPEC.lens):
        num_keep = kv_len - int(NUM_EVICT[request])
        assert keep[:, request, :, :num_keep].all()
        assert not keep[:, request, :, num_keep:].any()


def test_random_sets_are_kept_from_one_eviction_to_the_next(any_impl):
    """Who survives a harder eviction had survived the softer one."""
    batch = scored_batch("plain")
    is_random = torch.ones(NUM_REQS, dtype=torch.uint8)
    soft = select(batch, any_impl, random=is_random)
    harder = NUM_EVICT + torch.tensor([0, 0, 0, 0, 16, 256]).int()
    hard = select(batch, any_impl, random=is_random, num_evict=harder)
    assert not (hard & ~soft).any() and (soft & ~hard).any()
    heads = soft[:, 5].flatten(0, 1)
    assert all(not torch.equal(heads[0], other) for other in heads[1:])


def test_a_request_alone_keeps_what_it_keeps_in_a_batch(any_impl):
    batch = scored_batch("ties")
    together = select(batch, any_impl)
    for request in range(NUM_REQS):
        one = slice(request, request + 1)
        alone = ops.select_keep(
            batch.score,
            batch.position,
            batch.block_table[one],
            batch.kv_lens[one],
            NUM_EVICT[one],
            NUM_SINKS[one],
            (batch.kv_lens * 3 - batch.kv_lens // 5 * 3).int()[one],
            torch.ones(1).int(),
            torch.zeros(1, dtype=torch.bool),
            torch.zeros(1, dtype=torch.int64),
            max_kv_len=1100,
            impl=any_impl,
        )
        assert torch.equal(alone[:, 0], together[:, request])


def test_no_request_keeps_nothing(any_impl):
    batch = scored_batch("plain")
    empty = torch.zeros(0, dtype=torch.int32)
    keep = ops.select_keep(
        batch.score,
        batch.position,
        torch.zeros((0, 3), dtype=torch.int32),
        *[empty] * 5,
        torch.zeros(0, dtype=torch.bool),
        torch.zeros(0, dtype=torch.int64),
        max_kv_len=10,
        impl=any_impl,
    )
    assert keep.shape == (2, 0, 3, 10)


def test_too_many_pinned_tokens_raise(raising_impl):
    batch = scored_batch("plain")
    start = torch.zeros(NUM_REQS).int()  # all is recent
    with pytest.raises(ValueError, match="^num_evict: sinks and"):
        select(batch, raising_impl, recent_start=start)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("num_evict", {"num_evict": NUM_EVICT + 10**6}),
        ("num_evict", {"num_evict": NUM_EVICT[:3]}),
        ("num_sinks", {"num_sinks": NUM_SINKS.long()}),
        ("run_size", {"run_size": torch.zeros(NUM_REQS).int()}),
        ("random", {"random": torch.zeros(NUM_REQS)}),
        ("noise_keys", {"noise_keys": torch.zeros(NUM_REQS).int()}),
        ("kv_lens", {"max_kv_len": 1000}),
    ],
)
def test_bad_arguments_are_named(name, change):
    with pytest.raises(ValueError, match=f"^{name}:"):
        select(scored_batch("plain"), "cpu", **change)
