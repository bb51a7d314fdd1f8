# SPDX-License-Identifier: Apache-2.0
"""Eviction beside vLLM's prefix cache: hits are right, whoever evicts.

Case A15 of public reports on eviction. Requests that share a beginning are served in
every order; freed blocks are poisoned unless the cache keeps them.
"""

from __future__ import annotations

import pytest

from keyformer_vllm.config import KeyformerConfig
from tests.e2e.conftest import POLICY
from tests.e2e.test_lifecycle import count_preemptions
from tests.e2e.test_masked_reference import check, largest_error, serve_mixed_batch
from tests.engine import Engine, Request, random_prompt
from tests.hf_reference import HFReference, epochs_of, oracle_request
from tests.invariants import assert_idle

KIND = "llama-9-3"
POISONED = POLICY | {"poison_freed": True}
FULL = {"kv_policy": "full"}
PREFIX = random_prompt(170, 40)
"""Five full blocks, and ten tokens more."""


def with_prefix(length: int, seed: int) -> list[int]:
    return [*PREFIX, *random_prompt(length, seed)]


def serve(engine: Engine, prompt: list[int], **params) -> Request:
    (request,) = engine.generate([prompt], **params)
    return request


def fill_cache(engine: Engine) -> None:
    """Put the common beginning there and nothing else."""
    engine.step()  # the last departures
    assert engine.scheduler.reset_prefix_cache()
    assert serve(engine, PREFIX, max_tokens=1, kv=FULL).num_cached_tokens == 0


def check_choices(engine: Engine, reference: HFReference, request: Request, kv=None):
    """What it kept is what the oracle keeps after scoring the same queries."""
    num_prompt_tokens = len(request.prompt)
    num_computed = num_prompt_tokens - request.num_cached_tokens
    asked = KeyformerConfig.from_mapping(
        POLICY | {"score_queries": f"last:{num_computed}"}
    ).with_request(kv)
    wrong = reference.follow(
        request.prompt,
        request.tokens,
        oracle_request(asked, num_prompt_tokens, len(request.tokens), interval=32),
        engine.kept_sets(request),
    )
    assert all(entry.gap <= 1e-5 for entry in wrong), wrong


@pytest.fixture(scope="module", params=["auto", "deferred", "step"])
def engine(start_engine, request):
    policy = POISONED | {"score_mode": request.param}
    return start_engine(KIND, policy, caching=True, max_num_batched_tokens=256)


@pytest.fixture(scope="module")
def stock(start_engine):
    return start_engine(KIND, None, caching=True)


@pytest.fixture(scope="module")
def reference(tiny_model):
    return HFReference(tiny_model(KIND))


def test_the_second_turn_of_a_chat_hits_all_that_the_first_one_asked(engine, reference):
    """Though that one evicted more than half of it."""
    engine.scheduler.reset_prefix_cache()
    prompt = random_prompt(300, 50)
    for turn in range(3):
        request = serve(engine, prompt, max_tokens=70, logprobs=-1)
        assert engine.trace_of(request)[-1]["evicted_blocks"] > 4
        known = [0, 300, 394][turn]
        assert request.num_cached_tokens == known // 32 * 32
        check(engine, reference, request)
        check_choices(engine, reference, request)
        prompt = [*prompt, *request.tokens, *random_prompt(24, 51 + turn)]
    engine.step()
    assert_idle(engine)


def test_others_do_not_notice_that_a_sharer_evicts(engine, stock):
    """Catches a shared block that is rewritten, a hash that survives in a rewritten
    block or gets onto one with tokens computed after an eviction."""
    victim = with_prefix(25, 41)
    expected = serve(stock, victim, max_tokens=60, logprobs=5)
    offsets = (
        -70,
        -30,
        -3,
        0,
        1,
        2,
        20,
        90,
    )  # steps from the evicting one to the victim
    for offset in offsets:
        fill_cache(engine)
        requests = {}
        for step in range(min(0, offset), max(0, offset) + 1):
            if step == 0:
                requests["evicting"] = engine.add(with_prefix(30, 42), max_tokens=80)
            if step == offset:
                requests["victim"] = engine.add(
                    victim, max_tokens=60, kv=FULL, logprobs=5
                )
                # They share among each other as ever.
                requests["twin"] = engine.add(victim, max_tokens=60, kv=FULL)
            engine.step()
        engine.run()
        assert engine.trace_of(requests["evicting"])[-1]["evicted_blocks"] > 2
        for name in ("victim", "twin"):
            assert requests[name].tokens == expected.tokens, (offset, name)
            assert requests[name].num_cached_tokens >= 160
        for one, two in zip(
            requests["victim"].logprobs, expected.logprobs, strict=True
        ):
            assert one == pytest.approx(two, abs=1e-4), offset
        # And whoever comes later finds the beginning as it was.
        later = serve(engine, victim, max_tokens=60, kv=FULL)
        assert later.tokens == expected.tokens and later.num_cached_tokens == 192
        engine.step()
        assert_idle(engine)


def test_two_that_evict_share_a_beginning_and_no_scores(engine, reference):
    """Each gives what it gives alone with the same hits."""
    prompts = [with_prefix(40, 43), with_prefix(70, 44), with_prefix(50, 45)]
    alone = []
    for prompt in prompts:
        fill_cache(engine)
        alone.append(serve(engine, prompt, max_tokens=90, logprobs=-1))
        assert alone[-1].num_cached_tokens == 160
        check(engine, reference, alone[-1])
        check_choices(engine, reference, alone[-1])
    for steps_between in (0, 1, 5):
        fill_cache(engine)
        together = []
        for prompt in prompts:
            together.append(engine.add(prompt, max_tokens=90))
            for _ in range(steps_between):
                engine.step()
        engine.run()
        for one, two in zip(alone, together, strict=True):
            assert two.num_cached_tokens == 160
            assert one.tokens == two.tokens
            assert engine.kept_sets(one) == engine.kept_sets(two) != {}


def test_the_same_prompt_from_many_at_once(engine, reference):
    """What is computed in a step cannot be copied at the head of it: those who come in
    that step compute it themselves, those in the next one hit it."""
    engine.step()
    assert engine.scheduler.reset_prefix_cache()
    prompt = random_prompt(100, 46)
    first = [engine.add(prompt, max_tokens=50, logprobs=-1) for _ in range(2)]
    shared = engine.add([*prompt, 1, 2, 3], max_tokens=50, kv=FULL)
    engine.step()
    second = [engine.add(prompt, max_tokens=50, logprobs=-1) for _ in range(2)]
    engine.run()
    assert [r.num_cached_tokens for r in (*first, shared, *second)] == [0, 0, 0, 64, 64]
    for request in (*first, *second):
        check(engine, reference, request)
        check_choices(engine, reference, request)


def test_scores_of_the_last_queries_do_not_depend_on_hits(start_engine):
    """Those that were asked for are always computed: cold and warm are the same."""
    policy = POISONED | {"score_queries": "last:40"}
    engine = start_engine(KIND, policy, caching=True)
    prompt = random_prompt(250, 47)
    cold, warm = (serve(engine, prompt, max_tokens=60) for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 192)
    assert cold.tokens == warm.tokens
    assert engine.kept_sets(cold) == engine.kept_sets(warm) != {}


@pytest.mark.parametrize("policy", ["streaming", "window", "random"])
def test_a_policy_without_scores_does_not_depend_on_hits(engine, policy):
    prompt = random_prompt(230, 48)
    asked = {"max_tokens": 60, "kv": {"kv_policy": policy}}
    engine.step()
    assert engine.scheduler.reset_prefix_cache()
    cold, warm = (serve(engine, prompt, **asked) for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 224)
    assert cold.tokens == warm.tokens
    assert engine.kept_sets(cold) == engine.kept_sets(warm) != {}


@pytest.mark.parametrize(
    ("kind", "changes", "settings"),
    [
        (KIND, {}, {}),
        ("llama-4-2", {"score_mode": "deferred"}, {"eager": False}),
        ("gpt2", {"score_mode": "step"}, {"block_size": 64}),
        ("bloom", {}, {}),
        ("bloom", {"positions": "compact"}, {}),
    ],
    ids=["llama", "compiled", "block 64", "bloom", "compact"],
)
def test_logprobs_equal_the_masked_forward(
    start_engine, tiny_model, kind, changes, settings
):
    """Every policy, all prompts in the cache already."""
    engine = start_engine(
        kind, POISONED | changes, caching=True, max_num_batched_tokens=256, **settings
    )
    reference = HFReference(tiny_model(kind), changes.get("positions", "original"))
    cold = serve_mixed_batch(engine, max_tokens=110)
    warm = serve_mixed_batch(engine, max_tokens=110)
    for request in (*cold, *warm):
        check(engine, reference, request)
    assert sum(request.num_cached_tokens for request in cold) == 0
    assert sum(request.num_cached_tokens > 0 for request in warm) >= 5


@pytest.mark.parametrize("num_blocks", [300, 26], ids=["roomy", "recycling"])
def test_poisoned_blocks_change_nothing(start_engine, num_blocks):
    """Nobody reads a block that went back, unless the cache keeps it."""
    results = []
    for poisoned in (False, True):
        engine = start_engine(
            KIND,
            POLICY | {"poison_freed": poisoned},
            caching=True,
            num_blocks=num_blocks,
            max_model_len=512,
        )
        requests = []
        for number in range(24):
            prompt = with_prefix(20 + 13 * number % 90, number % 7)
            kv = [{}, {"kv_budget": 0.3}, FULL, {"kv_policy": "h2o"}][number % 4]
            requests.append(
                engine.add(prompt, max_tokens=40 + number, kv=kv, logprobs=5)
            )
            for _ in range(number % 5):
                engine.step()
        engine.run()
        assert_idle(engine, [request.engine_id for request in requests])
        results.append(
            [
                (r.tokens, r.logprobs, r.num_cached_tokens, engine.kept_sets(r))
                for r in requests
            ]
        )
    assert results[0] == results[1]
    assert sum(cached > 0 for _, _, cached, _ in results[0]) > 10


def test_a_preempted_request_comes_back_to_its_own_prompt(start_engine, reference):
    """It evicted, is pushed out and hits what it computed before it evicted."""
    small = {"num_blocks": 33, "max_model_len": 1000, "max_num_batched_tokens": 256}
    engine = start_engine(KIND, POISONED, caching=True, **small)
    preempted = count_preemptions(engine)
    growing = engine.add(random_prompt(400, 1), max_tokens=300, kv=FULL)
    request = engine.add(
        random_prompt(450, 2), max_tokens=280, kv={"kv_budget": 0.8}, logprobs=-1
    )
    engine.run()
    assert preempted == [request.engine_id] and len(growing.tokens) == 300
    before, after = epochs = epochs_of(engine.trace_of(request), 450)
    assert before.kept and after.kept
    assert before.num_cached == 0
    masked = reference.masked_logprobs(request.prompt, request.tokens, epochs)
    assert largest_error(masked, request) < 1e-4
    assert_idle(engine, [growing.engine_id, request.engine_id])
    # How much is left of it depends on what the other one took meanwhile.
    assert after.num_cached % 32 == 0 and after.num_cached < 450


def test_a_reset_of_the_cache_in_mid_stream(engine, reference):
    """With running requests: they start over and hit nothing."""
    fill_cache(engine)
    request = engine.add(with_prefix(60, 49), max_tokens=90, logprobs=-1)
    for _ in range(20):
        engine.step()
    assert engine.blocks_of(request.engine_id) > 0
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    before, after = epochs = epochs_of(engine.trace_of(request), len(request.prompt))
    assert (before.num_cached, after.num_cached) == (160, 0)
    masked = reference.masked_logprobs(request.prompt, request.tokens, epochs)
    assert largest_error(masked, request) < 1e-4
