# SPDX-License-Identifier: Apache-2.0
"""The kept set against a plain-Python ranking, ties and oddities included."""

import math
import random

import pytest
import torch

from keyformer_vllm.core.noise import request_noise_key
from keyformer_vllm.core.selection import random_rank, select_kept


def plain_kept(score, position, num_keep, num_sinks, recent_start, run_size):
    """The kept positions of one head, from lists and sorted() alone."""
    always = {p for p in position if p < num_sinks or p >= recent_start}
    candidates = {p: s for p, s in zip(position, score, strict=True) if p not in always}
    runs: dict[int, float] = {}
    for p in sorted(candidates):
        runs[p // run_size] = runs.get(p // run_size, 0.0) + candidates[p]

    def rank(p):
        total = runs[p // run_size]
        return (math.isnan(total), 0.0 if math.isnan(total) else -total, p)

    rest = sorted(candidates, key=rank)[: num_keep - len(always)]
    return always | set(rest)


def random_case(rng, coarse):
    """Scattered positions with gaps, as after earlier evictions, in any slot order."""
    kv_len = rng.randint(1, 70)
    position = rng.sample(range(150), kv_len)
    # Multiples of 1/8 sum exactly, and a few levels make many ties.
    score = [rng.randint(0, 3 if coarse else 10_000) / 8 for _ in position]
    num_sinks, recent_start = rng.randint(0, 6), rng.randint(100, 151)
    always = sum(p < num_sinks or p >= recent_start for p in position)
    num_keep = rng.randint(always, kv_len)
    return score, position, num_keep, num_sinks, recent_start


@pytest.mark.parametrize("run_size", [1, 16])
@pytest.mark.parametrize("coarse", [False, True], ids=["spread", "ties"])
def test_equals_plain_ranking(run_size, coarse):
    rng = random.Random(run_size + coarse)
    for _ in range(150):
        score, position, *counts = random_case(rng, coarse)
        keep = select_kept(
            torch.tensor(score), torch.tensor(position), *counts, run_size=run_size
        )
        kept = {p for p, k in zip(position, keep.tolist(), strict=True) if k}
        assert kept == plain_kept(score, position, *counts, run_size)


def test_no_evicted_candidate_beats_a_kept_one():
    generator = torch.Generator().manual_seed(3)
    score = torch.rand(4, 64, generator=generator)
    position = torch.arange(64).expand(4, -1)
    keep = select_kept(score, position, 30, 4, 56)
    assert (keep.sum(-1) == 30).all()
    assert keep[:, :4].all() and keep[:, 56:].all()
    middle, kept = score[:, 4:56], keep[:, 4:56]
    worst_kept = middle.masked_fill(~kept, math.inf).amin(-1)
    best_evicted = middle.masked_fill(kept, -math.inf).amax(-1)
    assert (worst_kept > best_evicted).all()


def test_ties_keep_the_lower_position_whatever_the_slot():
    position = torch.tensor([7, 3, 9, 1, 5])
    keep = select_kept(torch.ones(5), position, 3, 0, 100)
    assert position[keep].sort().values.tolist() == [1, 3, 5]
    signed_zeros = torch.tensor([0.0, -0.0, 0.0, -0.0, 0.0])
    assert torch.equal(select_kept(signed_zeros, position, 3, 0, 100), keep)


def test_leading_dimensions_and_counts_per_row():
    """[layers, requests, KV heads, kv_len] with per-request counts and padding."""
    rng = random.Random(9)
    cases = [[random_case(rng, True) for _ in range(3)] for _ in range(2)]
    width = 75
    score, position = torch.full((2, 3, width), 99.0), torch.zeros(2, 3, width).int()
    valid = torch.zeros(2, 3, width, dtype=torch.bool)
    counts = torch.zeros(3, 2, 3, dtype=torch.int32)
    for i, row in enumerate(cases):
        for j, (s, p, *numbers) in enumerate(row):
            score[i, j, : len(s)] = torch.tensor(s)
            position[i, j, : len(p)] = torch.tensor(p)
            valid[i, j, : len(p)] = True
            counts[:, i, j] = torch.tensor(numbers)
    for run_size in (1, 16):
        keep = select_kept(score, position, *counts, run_size=run_size, valid=valid)
        for i, row in enumerate(cases):
            for j, (s, p, *numbers) in enumerate(row):
                kept = {x for x, k in zip(p, keep[i, j].tolist(), strict=False) if k}
                assert kept == plain_kept(s, p, *numbers, run_size)
                assert not keep[i, j, len(p) :].any()


def test_runs_are_taken_whole_and_the_last_in_part():
    """Positions 0..63: run 2 has the best sum, run 1 is next and fits in part."""
    score = torch.zeros(64)
    score[32:48] = 1.0
    score[16:32] = 0.5
    score[3] = 6.0  # the single best token, in the third-best run
    kept = select_kept(score, torch.arange(64), 20, 0, 64, run_size=16)
    assert kept.nonzero().flatten().tolist() == [*range(16, 20), *range(32, 48)]
    single = select_kept(score, torch.arange(64), 20, 0, 64)
    assert single[3] and not torch.equal(single, kept)


def test_a_run_counts_only_its_candidates():
    """Sinks and recent tokens do not lift the run they lie in."""
    score = torch.zeros(48)
    score[:4] = 100.0
    score[20] = 1.0
    kept = select_kept(score, torch.arange(48), 10, 4, 48, run_size=16)
    assert kept.nonzero().flatten().tolist() == [*range(4), *range(16, 22)]


def test_nan_ranks_below_everything():
    score = torch.tensor([math.nan, -math.inf, 0.0, math.nan, 5.0])
    position = torch.arange(5)
    for num_keep, expected in [
        (1, [4]),
        (2, [2, 4]),
        (3, [1, 2, 4]),
        (4, [0, 1, 2, 4]),
    ]:
        kept = select_kept(score, position, num_keep, 0, 5)
        assert kept.nonzero().flatten().tolist() == expected
    # A NaN spoils its run, and is kept where its position demands it.
    score = torch.ones(48)
    score[5] = math.nan
    kept = select_kept(score, torch.arange(48), 33, 0, 48, run_size=16)
    assert kept.nonzero().flatten().tolist() == [0, *range(16, 48)]
    assert select_kept(score, torch.arange(48), 7, 6, 47)[5]


def test_impossible_counts_are_internal_errors():
    score, position = torch.ones(8), torch.arange(8)
    with pytest.raises(AssertionError, match="exceed"):
        select_kept(score, position, 3, 2, 6)
    with pytest.raises(AssertionError, match="fewer"):
        select_kept(score, position, 9, 0, 8)


def test_inputs_are_not_modified():
    score, position = torch.rand(2, 40), torch.arange(40).expand(2, -1).contiguous()
    before = score.clone(), position.clone()
    select_kept(score, position, 20, 4, 30, run_size=16)
    assert torch.equal(score, before[0]) and torch.equal(position, before[1])


def test_random_rank_depends_on_key_and_position_only():
    key, other = request_noise_key(0, 1), request_noise_key(0, 2)
    heads, position = torch.arange(3)[:, None], torch.arange(500)
    rank = random_rank(key, 4, heads, position)
    assert rank.shape == (3, 500)
    shuffled = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    assert torch.equal(random_rank(key, 4, heads, shuffled), rank[:, shuffled])
    assert torch.equal(random_rank(key, 4, 2, position[7:8]), rank[2, 7:8])
    for changed in (
        random_rank(other, 4, heads, position),
        random_rank(key, 5, heads, position),
        rank.roll(1, 0),
    ):
        pair = torch.stack([rank.flatten(), changed.flatten()]).double()
        assert abs(torch.corrcoef(pair)[0, 1]) < 4 / math.sqrt(1500)
    # Uniform: the mean of 1,500 draws is within 4 standard deviations of 1/2.
    assert abs(rank.mean() - 0.5) < 4 * math.sqrt(1 / 12 / 1500)
