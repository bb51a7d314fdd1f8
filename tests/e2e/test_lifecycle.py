# SPDX-License-Identifier: Apache-2.0
"""Requests that are pushed out, come back, go away or fail leave nothing behind."""

from __future__ import annotations

import pytest

from keyformer_vllm.config import KeyformerConfig
from tests.e2e.conftest import POLICY
from tests.engine import Engine, random_prompt
from tests.hf_reference import HFReference, epochs_of, oracle_request
from tests.invariants import assert_idle

KIND = "llama-4-2"
COMPACT = POLICY | {"positions": "compact"}
SMALL_POOL = {"num_blocks": 33, "max_model_len": 1000, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine(KIND, **SMALL_POOL)


def count_preemptions(engine: Engine) -> list[str]:
    """A list that receives the id of every request preempted from now on."""
    scheduler, preempted = engine.scheduler, []
    preempt = scheduler._preempt_request

    def recording(request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = recording
    return preempted


@pytest.mark.parametrize(
    ("kind", "policy"),
    [(KIND, POLICY), ("bloom", COMPACT)],
    ids=["original", "compact"],
)
def test_preempted_requests_start_afresh(start_engine, tiny_model, kind, policy):
    """A16: a request that already evicted is pushed out by one that grows, comes back
    and evicts again; the same result each time.

    What it computes after it resumed equals a forward pass under full attention up
    to there and the oracle's evictions from there on. Catches evicted-block counts,
    scores, places or other side data that survive the preemption.
    """
    engine = start_engine(kind, policy, **SMALL_POOL)
    reference = HFReference(tiny_model(kind), policy.get("positions", "original"))
    preempted = count_preemptions(engine)
    budget = {"kv_budget": 0.8}
    rounds = []
    for _ in range(3):
        preempted.clear()
        growing = engine.add(
            random_prompt(400, 1), max_tokens=300, kv={"kv_policy": "full"}
        )
        request = engine.add(random_prompt(450, 2), max_tokens=280, kv=budget)
        engine.run()
        assert preempted == [request.engine_id]
        assert (len(growing.tokens), len(request.tokens)) == (300, 280)
        rounds.append((growing.tokens, request.tokens, engine.kept_sets(request)))
        assert_idle(engine, [growing.engine_id, request.engine_id])
    assert rounds[0] == rounds[1] == rounds[2]
    before, after = epochs = epochs_of(engine.trace_of(request), len(request.prompt))
    assert before.kept and after.kept
    expected = reference.masked_logprobs(request.prompt, request.tokens, epochs)
    assert expected.argmax(-1).tolist() == request.tokens
    config = KeyformerConfig.from_mapping(policy).with_request(budget)
    for epoch in epochs:
        asked = oracle_request(
            config,
            len(request.prompt),
            280,
            interval=engine.block_size,
            num_prefill_tokens=epoch.num_prefill_tokens,
        )
        known = request.tokens[: epoch.num_tokens + 1 - len(request.prompt)]
        wrong = reference.follow(request.prompt, known, asked, epoch.kept)
        assert all(entry.gap <= 1e-5 for entry in wrong), wrong


def test_warm_answers_equal_cold_ones(engine):
    """A13, A15: with eviction no block keeps a hash, so no later prompt can match
    what is no longer there; 20 rounds under pressure."""
    prompt = random_prompt(600, 12)
    cold = engine.add(prompt, max_tokens=30)
    engine.run()
    for number in range(20):
        pressure = engine.add(random_prompt(350, number), max_tokens=20)
        warm = engine.add(prompt, max_tokens=30)
        longer = engine.add([*prompt[:300], *random_prompt(40, 13)], max_tokens=4)
        while engine.busy:
            engine.step()
            assert all(block.block_hash is None for block in engine.block_pool.blocks)
        assert warm.tokens == cold.tokens
        assert pressure.finished and longer.finished
    engine.step()
    assert_idle(engine)


def test_aborted_in_every_phase(engine):
    """A35: while it waits, in its prompt, in the step that evicts, after it."""
    for steps in range(0, 8):
        requests = [engine.add(random_prompt(500, i), max_tokens=60) for i in range(3)]
        for _ in range(steps):
            engine.step()
        for request in requests:
            engine.abort(request)
        engine.step()
        assert_idle(engine, [request.engine_id for request in requests])


def test_evicted_requests_reset_in_mid_stream(engine):
    """A02: every host path that shortens a running request (here the reset of the
    prefix cache with running requests) leaves counts that agree."""
    request = engine.add(random_prompt(200, 6), max_tokens=90)
    while not any("kept" in line for line in engine.trace_of(request)):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.blocks_of(request.engine_id) == 0
    engine.run()
    epochs = epochs_of(engine.trace_of(request), 200)
    assert len(epochs) == 2 and epochs[1].kept
    first = next(
        line
        for line in engine.trace_of(request)
        if line["positions"][0] == 0 and line["step"] > 0
    )
    assert first["evicted_tokens"] == 0
    assert len(request.tokens) == 90
    assert_idle(engine, [request.engine_id])


def test_a_failing_eviction_is_not_passed_over(start_engine):
    """A42: blocks are freed already when survivors move; to go on after a failure
    there would mix requests up. The error reaches whoever runs the engine."""
    engine = start_engine(KIND)
    engine.add(random_prompt(200, 2), max_tokens=20)

    def fail(*_: object) -> None:
        raise RuntimeError("no room to move")

    engine.worker.keyformer._evict = fail
    with pytest.raises(RuntimeError, match="no room to move"):
        engine.run()
