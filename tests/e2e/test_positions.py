# SPDX-License-Identifier: Apache-2.0
"""Positions and slots stay logical, whatever was evicted."""

from __future__ import annotations

import itertools

import pytest

from keyformer_vllm.adapters import compat
from tests.e2e.conftest import POLICY
from tests.engine import open_engine, random_prompt
from tests.hf_reference import HFReference, epochs_of

KIND = "llama-4-2"


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine(KIND, num_blocks=140, max_num_batched_tokens=160)


@pytest.fixture(scope="module")
def reference(tiny_model):
    return HFReference(tiny_model(KIND))


def test_places_lie_in_the_memory_planned_for_the_cache(tiny_model, monkeypatch):
    """In the pages, which vLLM counts; catches memory beside its accounting, and
    pages that grow for those who did not ask for places."""
    given = 8 * 2**20
    monkeypatch.setattr(
        compat.CPUWorker, "determine_available_memory", lambda self: given
    )
    pages = {}
    for positions in ("original", "compact"):
        policy = POLICY | {"positions": positions}
        with open_engine(tiny_model("bloom"), policy, max_model_len=512) as engine:
            runtime = engine.worker.keyformer
            pages[positions] = runtime.kv_pages.stride(1) * 4
            block = pages[positions] * len(runtime.impls)
            assert given - block < engine.block_pool.num_gpu_blocks * block <= given
    # Four KV heads, 32 slots of 4 bytes.
    assert pages["compact"] - pages["original"] == 4 * 32 * 4


@pytest.mark.parametrize("length", range(100, 141, 4))
def test_slots_and_positions(engine, reference, length):
    """A03, A05, A06: prompts that leave every kind of partial block. Positions run on
    without gap or repeat, also around an eviction; the token written in the step of
    an eviction is the newest in every head; slots are new ones each time."""
    slots, positions, recording = [], [], engine.model_runner
    original = recording.execute_model

    def execute(scheduler_output, *args):
        result = original(scheduler_output, *args)
        count = scheduler_output.total_num_scheduled_tokens
        table = recording.input_batch.block_table[0]
        slots.append(table.slot_mapping.np[:count].tolist() if count else [])
        positions.append(recording.positions[:count].tolist())
        return result

    recording.execute_model = execute
    try:
        request = engine.add(random_prompt(length, 3), max_tokens=80, logprobs=-1)
        engine.run()
    finally:
        recording.execute_model = original
    lines = engine.trace_of(request)
    computed = list(itertools.chain.from_iterable(positions))
    assert computed == list(range(length + 80 - 1))
    traced = [list(range(*line["positions"])) for line in lines]
    assert traced == [step for step in positions if step]
    written = list(itertools.chain.from_iterable(slots))
    for number, slot in enumerate(written):
        assert slot % engine.block_size == number % engine.block_size
    events = [(i, line) for i, line in enumerate(lines) if "kept" in line]
    assert len(events) >= 3
    for _, line in events:
        newest = line["positions"][0] - 1
        assert all(head[-1] == newest for layer in line["kept"] for head in layer)
    masked = reference.masked_logprobs(
        request.prompt, request.tokens, epochs_of(lines, length)
    )
    for offset in (0, 1, 59):
        row = lines[events[0][0] + offset]["positions"][0] - length + 1
        got = request.logprobs[row]
        assert max(abs(float(masked[row, t]) - p) for t, p in got.items()) < 1e-4
