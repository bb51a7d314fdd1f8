# SPDX-License-Identifier: Apache-2.0
"""On a GPU eviction keeps its place in the stream, and no decode step waits for it."""

from __future__ import annotations

import warnings

import pytest

from tests.e2e.test_poison import count_poisoned, serve_batch
from tests.engine import Engine, open_engine, random_prompt

POLICY = {"policy": "keyformer", "budget": 0.5, "min_tokens": 16}
SETTINGS = {
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 256 << 20,
    "gpu_memory_utilization": 0.05,
}

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_blocks_that_others_get_at_once_were_read_before(tiny_model, tmp_path):
    """Under asynchronous scheduling the next step is sent off before this one is done.

    The pool is so small that freed blocks are handed out at once. With and without
    poison in them, all requests say and keep the same.
    """
    results = []
    for poisoned in (False, True):
        with open_engine(
            tiny_model("llama-4-2"),
            POLICY | {"poison_freed": poisoned},
            trace=tmp_path / f"{poisoned}.jsonl",
            num_blocks=24,
            async_scheduling=True,
            **SETTINGS,
        ) as engine:
            assert "Async" in type(engine.scheduler).__name__
            requests = serve_batch(engine)
            assert sum(line["freed_blocks"] for line in engine.all_trace()) > 30
            assert (count_poisoned(engine) > 0) is poisoned
            results.append(
                [(r.tokens, r.logprobs, engine.kept_sets(r)) for r in requests]
            )
    assert results[0] == results[1]


def count_waits(engine: Engine) -> tuple[int, int]:
    """Waits of the host for the GPU in decode steps, and how many steps these were."""
    import torch

    for number in range(4):
        engine.add(random_prompt(150, number), max_tokens=100)
    for _ in range(10):  # prompts, and what is done once
        engine.step()
    steps = 0
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(70):
                engine.step()
                steps += 1
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert engine.busy, "these were not decode steps"
    engine.run()
    return sum("synchronizing" in str(one.message) for one in seen), steps


def test_a_wait_would_be_counted():
    import torch

    value = torch.ones(1, device="cuda")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            value.item()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert any("synchronizing" in str(one.message) for one in seen)


def test_decode_steps_wait_no_more_than_stock(tiny_model):
    """Evictions among them. What vLLM itself waits for is not ours to count."""
    waits = {}
    for name, policy in (("stock", None), ("evicting", POLICY)):
        with open_engine(
            tiny_model("llama-4-2"), policy, num_blocks=400, **SETTINGS
        ) as engine:
            waits[name], steps = count_waits(engine)
            assert steps == 70
    assert waits["evicting"] <= waits["stock"]
