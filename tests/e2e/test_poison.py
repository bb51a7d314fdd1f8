# SPDX-License-Identifier: Apache-2.0
"""Nothing reads a block that was handed back: what is in it makes no difference.

Case A31 of public reports on eviction. With ``poison_freed`` the worker fills every
block it frees: K with NaN, V with a huge number. Not with NaN: a freed block soon is
another request's last one, and vLLM's attention multiplies the V of slots behind a
request's end with a weight of zero, as one of the tests here shows.
"""

from __future__ import annotations

import math

import pytest

from keyformer_vllm.adapters.runtime import POISON_KEY, POISON_VALUE
from tests.engine import Engine, Request, random_prompt
from tests.invariants import assert_idle

LENGTHS = (97, 160, 211, 64, 130, 140, 33, 180, 250, 70)
KV = (
    {},
    {"kv_policy": "h2o", "kv_budget": 0.3},
    {"kv_policy": "random", "kv_budget": 0.6},
    {"kv_policy": "window"},
    {"kv_policy": "full"},
)


def serve_batch(engine: Engine) -> list[Request]:
    requests = [
        engine.add(
            random_prompt(length, 1),
            max_tokens=80,
            kv=KV[number % len(KV)],
            logprobs=5,
        )
        for number, length in enumerate(LENGTHS)
    ]
    engine.run()
    assert_idle(engine, [request.engine_id for request in requests])
    return requests


@pytest.mark.parametrize("num_blocks", [300, 24], ids=["roomy", "recycling"])
def test_poisoned_blocks_change_nothing(start_engine, num_blocks):
    results = []
    for poisoned in (False, True):
        policy = {"policy": "keyformer", "budget": 0.5, "min_tokens": 16}
        engine = start_engine(
            "llama-4-2",
            policy | {"poison_freed": poisoned},
            num_blocks=num_blocks,
            max_model_len=512,
        )
        requests = serve_batch(engine)
        results.append(
            [
                (request.tokens, request.logprobs, engine.kept_sets(request))
                for request in requests
            ]
        )
        lines = engine.all_trace()
        assert sum(line["freed_blocks"] for line in lines) > 30
        # The switch is on, and does what it says.
        assert (count_poisoned(engine) > 0) is poisoned
    assert results[0] == results[1]


def test_a_poisoned_block_that_is_read_shows(start_engine):
    """The check above could not fail if nobody could see the poison."""
    engine = start_engine("llama-4-2", max_model_len=512)
    prompt = random_prompt(200, 2)
    (clean,) = engine.generate([prompt], max_tokens=40, logprobs=5)
    request = engine.add(prompt, max_tokens=40, logprobs=5)
    for _ in range(20):
        engine.step()
    runtime = engine.worker.keyformer
    blocks = engine.manager.req_to_blocks[request.engine_id]
    held = [block.block_id for block in blocks if not block.is_null]
    runtime.poison_blocks(held[:1])
    engine.run()
    assert request.tokens[:19] == clean.tokens[:19]
    assert request.logprobs != clean.logprobs
    assert request.tokens != clean.tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_vllm_itself_tolerates_in_a_recycled_block(start_engine, dtype):
    """The poison is what stock vLLM is deaf to; NaN in V it would hear by itself."""
    engine = start_engine(
        "llama-4-2",
        None,
        dtype=dtype,
        num_blocks=30,
        max_model_len=512,
    )
    caches = engine.model_runner.kv_caches
    half = engine.block_size // 2

    def serve(key: float, value: float) -> list[tuple[list[int], str]]:
        for cache in caches:
            assert cache.shape[2] == engine.block_size
            cache[:, :, :half] = key
            cache[:, :, half:] = value
        prompts = [random_prompt(length, 1) for length in (97, 64, 1, 33)]
        requests = engine.generate(prompts, max_tokens=20, logprobs=2)
        return [(request.tokens, repr(request.logprobs)) for request in requests]

    clean = serve(0.0, 0.0)
    assert serve(POISON_KEY, POISON_VALUE) == clean
    assert serve(0.0, math.nan) != clean


def count_poisoned(engine: Engine) -> int:
    runtime = engine.worker.keyformer
    keys, values = runtime.kv_pages.flatten(3).chunk(2, dim=-1)
    filled = keys.isnan().all(-1) & (values == POISON_VALUE).all(-1)
    return int(filled.flatten(2).all(dim=2).any(dim=0).sum())
