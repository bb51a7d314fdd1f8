# SPDX-License-Identifier: Apache-2.0
"""When a query scores changes nothing: scores and kept sets equal to the bit.

Each workload runs under ``step``, where every query scores in its own step, and under
``deferred``, where those of decode steps wait in the ring. At every eviction the scores
that the selection sees are compared, then what it kept and what was generated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from keyformer_vllm import ops
from keyformer_vllm.config import KVPolicyError
from tests.e2e.conftest import POLICY
from tests.engine import Engine, open_engine, random_prompt
from tests.invariants import assert_idle

KIND = "llama-4-2"
DEFERRED = POLICY | {"score_mode": "deferred"}
COMPACT = {"positions": "compact"}
"""For a model with ALiBi, in place of the other one."""
SCORING = ("keyformer", "h2o", "key-only")

Eviction = tuple[torch.Tensor, torch.Tensor]
"""Position and score of every token held, ``[layers, kv_heads, kv_len]`` each."""


class Recorder:
    """Notes what ``select_keep`` is asked, request by request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.evictions: list[Eviction] = []
        self._select_keep = ops.select_keep
        monkeypatch.setattr(ops, "select_keep", self._record)

    def _record(
        self, score: Any, position: Any, table: Any, lens: Any, *args, **kwargs
    ):
        for blocks, kv_len in zip(table.long(), lens.tolist(), strict=True):
            held = (
                side[:, blocks].transpose(1, 2).flatten(2)[..., :kv_len].clone()
                for side in (position, score)
            )
            self.evictions.append(tuple(held))
        return self._select_keep(score, position, table, lens, *args, **kwargs)


def mixed_policies(engine: Engine) -> list[Any]:
    """Every policy, prompts in chunks, arrivals one by one, two clients that leave.

    The second prompt starts with a chunk of one token, which waits until the next
    chunk; another ends with one.
    """
    policies = (*SCORING, "random", "streaming", "full")
    lengths = [95, 200, 97, 1, 31, 64, 130, 33, 150, 80, 260, 100]
    requests, doomed = [], []
    for number, length in enumerate(lengths):
        kv = {"kv_policy": policies[number % 3 if number < 3 else number % 6]}
        requests.append(
            engine.add(
                random_prompt(length, number),
                max_tokens=40 + 17 * (number % 5),
                kv=kv,
                seed=number or None,
            )
        )
        if number in (4, 9):
            doomed.append(requests.pop())
        for _ in range(0 if number < 2 else 3):
            engine.step()
    for request in doomed:
        for _ in range(9):
            engine.step()
        engine.abort(request)
    engine.run()
    return requests


def long_answers(engine: Engine) -> list[Any]:
    """More tokens between two evictions than the ring holds."""
    return engine.generate(
        [random_prompt(length, length) for length in (10, 40, 100)], max_tokens=260
    )


def under_pressure(engine: Engine) -> list[Any]:
    """Requests that evicted are pushed out, while queries of theirs wait."""
    preempted = []
    preempt = engine.scheduler._preempt_request

    def recording(request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    engine.scheduler._preempt_request = recording
    requests = [
        engine.add(random_prompt(400, 1), max_tokens=250, kv={"kv_policy": "full"}),
        engine.add(random_prompt(450, 2), max_tokens=250, kv={"kv_budget": 0.8}),
        engine.add(random_prompt(120, 3), max_tokens=250, kv={"kv_budget": 0.5}),
    ]
    engine.run()
    del engine.scheduler._preempt_request
    assert any(engine.kept_sets(r) and r.engine_id in preempted for r in requests)
    return requests


Workload = Callable[[Engine], list[Any]]

CASES: dict[str, tuple[Workload, dict[str, Any], dict[str, Any]]] = {
    "policies": (mixed_policies, {}, {"max_num_batched_tokens": 96}),
    "stride": (
        mixed_policies,
        {"score_queries": "stride:5", "select": "block"},
        {"max_num_batched_tokens": 96},
    ),
    "last": (
        mixed_policies,
        {"score_queries": "last:3", "noise": "none"},
        {"max_num_batched_tokens": 96},
    ),
    "growing budget": (long_answers, {"budget_base": "sequence", "budget": 0.7}, {}),
    "late first eviction": (long_answers, {"min_tokens": 200}, {}),
    "preemption": (under_pressure, {}, {"num_blocks": 33, "max_model_len": 1000}),
    "places": (mixed_policies, COMPACT, {"max_num_batched_tokens": 96}),
    "places, growing budget": (
        long_answers,
        COMPACT | {"budget_base": "sequence", "budget": 0.7},
        {},
    ),
}


def play(
    folder: Any,
    trace: Any,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    mode: str,
) -> tuple[list[Eviction], list[Any], list[list[int]]]:
    """Evictions in order, kept sets and tokens of one case under one mode."""
    workload, policy, settings = CASES[case]
    settings = {"num_blocks": 400, **settings}
    with monkeypatch.context() as patch:
        recorder = Recorder(patch)
        with open_engine(
            folder, POLICY | policy | {"score_mode": mode}, trace=trace, **settings
        ) as engine:
            ring = engine.worker.keyformer.ring
            assert (ring is None) == (mode != "deferred")
            requests = workload(engine)
            if ring is not None:
                assert ring.num_free == engine.scheduler.max_num_running_reqs
            assert_idle(engine, [request.engine_id for request in requests])
            kept = [engine.kept_sets(request) for request in requests]
    return recorder.evictions, kept, [request.tokens for request in requests]


@pytest.mark.parametrize("case", CASES)
def test_deferred_equals_step(tiny_model, tmp_path, monkeypatch, case):
    """Catches a query lost, scored twice, with another row's position, temperature or
    keys, or after its keys have moved or were renumbered."""
    compact = COMPACT.items() <= CASES[case][1].items()
    folder = tiny_model("bloom" if compact else KIND)
    evictions, kept, tokens = play(folder, tmp_path / "step", monkeypatch, case, "step")
    assert len(evictions) >= 7
    others, other_kept, other_tokens = play(
        folder, tmp_path / "deferred", monkeypatch, case, "deferred"
    )
    assert len(evictions) == len(others)
    for (position, score), (other_position, other_score) in zip(
        evictions, others, strict=True
    ):
        assert torch.equal(position, other_position)
        assert torch.equal(score, other_score)
    assert kept == other_kept and tokens == other_tokens


@pytest.mark.parametrize("case", ["policies", "growing budget"])
def test_a_flush_that_is_skipped_is_noticed(tiny_model, tmp_path, monkeypatch, case):
    """Catches a comparison that could not tell: here what waits is dropped unscored."""
    from keyformer_vllm.adapters.runtime import WorkerRuntime

    folder = tiny_model(KIND)
    evictions, *_ = play(folder, tmp_path / "step", monkeypatch, case, "step")
    monkeypatch.setattr(
        WorkerRuntime,
        "score_waiting",
        lambda self, rows, *_: self.ring.drain(rows) and None,
    )
    others, *_ = play(folder, tmp_path / "broken", monkeypatch, case, "deferred")
    assert not all(
        torch.equal(one[1], other[1])
        for one, other in zip(evictions, others, strict=False)
        if one[1].shape == other[1].shape
    )


def test_no_query_scores_in_its_own_step_while_all_decode(tiny_model, monkeypatch):
    """One call per layer for each flush, none in between; and the flush of several
    requests is one call."""
    calls = []
    score_keys = ops.score_keys

    def counting(query, *args, **kwargs):
        calls.append(len(query))
        score_keys(query, *args, **kwargs)

    monkeypatch.setattr(ops, "score_keys", counting)
    with open_engine(tiny_model(KIND), DEFERRED, num_blocks=100) as engine:
        for seed in (1, 2, 3):
            engine.add(random_prompt(64, seed), max_tokens=100)
        engine.step()
        num_layers = len(engine.worker.keyformer.impls)
        assert calls == [3 * 64] * num_layers
        calls.clear()
        engine.run()
    # 64 + 32 tokens held by then, and after it every block.
    assert calls == [3 * 32] * (3 * num_layers)


@pytest.mark.parametrize("mode", ["step", "deferred"])
def test_scores_see_the_blocks_of_the_longest_request_only(
    tiny_model, monkeypatch, mode
):
    """Not those of the longest that the server takes: a GPU's scratch is as wide."""
    widths = []
    score_keys = ops.score_keys

    def noting(*args, **kwargs):
        block_table, kv_lens = args[4:6]
        widths.append((block_table.shape[1], -(-int(kv_lens.max()) // 32)))
        score_keys(*args, **kwargs)

    monkeypatch.setattr(ops, "score_keys", noting)
    with open_engine(tiny_model(KIND), POLICY | {"score_mode": mode}) as engine:
        for num_tokens in (64, 100):
            engine.add(random_prompt(num_tokens, 1), max_tokens=60)
        engine.run()
    # By its position: what it has evicted may leave some blocks too many.
    assert {width for width, _ in widths} <= {2, 3, 4, 5}
    assert all(needed <= width for width, needed in widths)


def give(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """What vLLM's worker finds left for the cache."""
    from keyformer_vllm.adapters import compat

    monkeypatch.setattr(
        compat.CPUWorker, "determine_available_memory", lambda self: num_bytes
    )


def test_the_ring_comes_out_of_the_memory_planned_for_the_cache(
    tiny_model, monkeypatch
):
    """Blocks and ring together fill what vLLM plans with; catches memory that is
    allocated beside its accounting."""
    given = 8 * 2**20
    give(monkeypatch, given)
    settings = {"num_blocks": None, "max_model_len": 512, "max_num_seqs": 16}
    pages, rings = {}, {}
    for mode in ("step", "deferred"):
        policy = POLICY | {"score_mode": mode}
        with open_engine(tiny_model(KIND), policy, **settings) as engine:
            runtime = engine.worker.keyformer
            block = runtime.kv_pages.stride(1) * 4 * len(runtime.impls)
            pages[mode] = engine.block_pool.num_gpu_blocks * block
            ring = runtime.ring
            rings[mode] = 0 if ring is None else ring.layer(0).nbytes * 2
    # Two layers; a place for each of 32 queries of 16 requests, and one for padding.
    assert rings == {"step": 0, "deferred": 2 * (16 * 32 + 1) * 4 * 32 * 4}
    for mode, taken in pages.items():
        assert given - block < taken + rings[mode] <= given


def test_a_ring_that_does_not_fit_is_refused_in_one_line(tiny_model, monkeypatch):
    """Where only the worker knows what is left."""
    give(monkeypatch, 2 * 64 * 32 * 4 * 32 * 4)
    with (
        pytest.raises(KVPolicyError) as caught,
        open_engine(tiny_model(KIND), DEFERRED, max_num_seqs=64),
    ):
        pass
    message = str(caught.value)
    assert "max_num_seqs=64" in message and "\n" not in message
    assert "--kv-score-mode fused" in message
    with open_engine(
        tiny_model(KIND), DEFERRED, max_num_seqs=32, max_model_len=512
    ) as engine:
        assert engine.worker.keyformer.ring.num_free == 32
