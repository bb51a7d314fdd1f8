# SPDX-License-Identifier: Apache-2.0
"""Freed blocks become running requests, and eviction comes before preemption."""

from __future__ import annotations

import random

import pytest

from keyformer_vllm.core.capacity import estimate_capacity
from tests.adapters.test_scheduler import BLOCK_SIZE, Harness


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama-4-2")


@pytest.mark.parametrize("steps_in_flight", [0, 1])
@pytest.mark.parametrize(
    ("prompt", "new", "budget", "num_blocks"),
    [
        (1024, 256, 0.5, 321),
        (1024, 256, 0.25, 321),
        (700, 150, 0.3, 201),
        (448, 256, 0.5, 151),
        (1024, 256, 1.0, 321),
    ],
)
def test_running_requests_are_as_many_as_estimated(
    model, prompt, new, budget, num_blocks, steps_in_flight
):
    """Catches freed blocks that admit nobody, and an estimate that promises more than
    the scheduler then runs; within 10 %."""
    h = Harness(
        model,
        num_blocks,
        budget=budget,
        steps_in_flight=steps_in_flight,
        engine={"max_num_seqs": 64, "max_num_batched_tokens": 2048},
    )
    capacity = estimate_capacity(
        h.scheduler.kv_config.retention(prompt, BLOCK_SIZE),
        num_new_tokens=new,
        num_blocks=num_blocks - 1,
    )
    preempt, preempted = h.scheduler._preempt_request, []

    def recording(request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    h.scheduler._preempt_request = recording
    for number in range(3 * capacity.running):
        h.add(f"r{number}", prompt, new)
    running = []
    while h.scheduler.has_unfinished_requests():
        h.step()
        if h.scheduler.waiting:
            running.append(len(h.scheduler.running))
    mean, peak = sum(running) / len(running), max(running)
    if budget < 1:
        assert mean == pytest.approx(capacity.running, rel=0.1)
        assert peak == pytest.approx(capacity.running, rel=0.1)
        assert peak > 1.8 * capacity.running_without_eviction
    else:
        # Stock vLLM admits by the prompt alone, and pays for it.
        assert peak > capacity.running_without_eviction and preempted


@pytest.mark.parametrize("steps_in_flight", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_no_request_is_preempted_for_blocks_that_an_eviction_would_free(
    model, seed, steps_in_flight
):
    """When vLLM preempts, no request past its prompt holds a whole block more than its
    budget needs, itself included; a pool far too small, several hundred steps."""
    draw = random.Random(seed)
    h = Harness(
        model,
        40,
        steps_in_flight=steps_in_flight,
        engine={"max_num_seqs": 16, "max_num_batched_tokens": 192},
    )
    scheduler = h.scheduler
    preempt, moments = scheduler._preempt_request, []

    def checking(victim, *args, **kwargs):
        decoding = 0
        for request in {*scheduler.running, victim}:
            retention = scheduler.retentions.get(request.request_id)
            if retention is None or request.is_prefill_chunk:
                continue
            num_tokens = request.num_computed_tokens
            evicted = scheduler.evicted_blocks.get(request.request_id, 0)
            if retention.num_evicted_blocks(num_tokens) == 0:
                continue
            decoding += 1
            over = (
                num_tokens - evicted * BLOCK_SIZE - retention.budget_tokens(num_tokens)
            )
            assert 0 <= over < BLOCK_SIZE, (request.request_id, over)
            held = sum(not b.is_null for b in h.blocks_of(request.request_id))
            # The step's own token may have a block of its own.
            assert held <= -(-(num_tokens + 1) // BLOCK_SIZE) - evicted
        moments.append(decoding)
        return preempt(victim, *args, **kwargs)

    scheduler._preempt_request = checking
    number = steps = 0
    while steps < 400 or scheduler.has_unfinished_requests():
        if steps < 400 and len(scheduler.requests) < 12 and draw.random() < 0.4:
            budget = draw.choice([0.5, 0.8, 1.0])
            prompt = draw.randrange(20, 300)
            h.add(f"r{number}", prompt, draw.randrange(50, 400), kv_budget=budget)
            number += 1
        h.step()
        steps += 1
        assert steps < 20_000
    assert len(moments) >= 8 and sum(moments) >= 8, moments
