# SPDX-License-Identifier: Apache-2.0
"""Counts: exact, monotone, and never fewer tokens than the budget."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyformer_vllm.core.policies import POLICIES, get_policy
from keyformer_vllm.core.retention import Retention

EVICTING = [name for name, policy in POLICIES.items() if policy.evicts]


def make(policy: str = "keyformer", **kwargs: object) -> Retention:
    arguments = {"num_prompt_tokens": 100, "block_size": 16, "budget": 0.5} | kwargs
    return Retention.resolve(get_policy(policy), **arguments)


retentions = st.builds(
    make,
    policy=st.sampled_from(EVICTING),
    num_prompt_tokens=st.integers(1, 400),
    block_size=st.sampled_from([1, 2, 16, 32, 128]),
    budget=st.one_of(
        st.integers(1, 300),
        st.integers(1, 99).map(lambda percent: percent / 100),
    ),
    min_tokens=st.sampled_from([0, 1, 7, 64, 256]),
    budget_base=st.sampled_from(["prompt", "sequence"]),
    recent_ratio=st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.5, 1.0]),
    sinks=st.sampled_from([0, 1, 4, 500]),
)


@settings(max_examples=60, deadline=None)
@given(retentions)
def test_a_request_from_prompt_to_end(retention):
    """Walk a request step by step as the scheduler does, and check every count."""
    block_size, evicted_blocks = retention.block_size, 0
    previous_recent_start, previous_budget = 0, 0
    first = retention.num_prompt_tokens
    for num_tokens in range(first, first + 160):
        eviction = retention.eviction(num_tokens, evicted_blocks)
        budget = retention.budget_tokens(num_tokens)
        assert previous_budget <= budget
        previous_budget = budget
        if eviction is not None:
            assert eviction.evicted_blocks > evicted_blocks
            assert eviction.num_evict % block_size == 0
            held = num_tokens - evicted_blocks * block_size
            assert eviction.kv_len_before == held
            assert eviction.kv_len == held - eviction.num_evict
            assert budget <= eviction.kv_len <= budget + block_size - 1
            window = num_tokens - eviction.recent_start
            assert window + eviction.num_sinks <= eviction.kv_len
            if retention.policy.name != "key-only":
                assert window >= 1
            # The recent window never reaches back to what may be gone.
            assert eviction.recent_start >= previous_recent_start
            previous_recent_start = eviction.recent_start
            evicted_blocks = eviction.evicted_blocks
        kv_len = num_tokens - evicted_blocks * block_size
        assert kv_len == retention.kv_len(num_tokens)
        assert kv_len >= min(num_tokens, budget)
        assert kv_len <= max(budget + block_size - 1, 1) or num_tokens < budget
        assert evicted_blocks == retention.num_evicted_blocks(num_tokens)
        assert retention.never_evicts(num_tokens) == (evicted_blocks == 0)
        assert kv_len + 1 <= retention.max_kv_len(num_tokens + 1)


@settings(max_examples=60, deadline=None)
@given(retentions, st.integers(0, 200))
def test_evictions_missed_are_made_up_in_one(retention, skipped):
    """A resumed request starts at E = 0 and evicts to the same count at once."""
    num_tokens = retention.num_prompt_tokens + skipped
    eviction = retention.eviction(num_tokens, 0)
    assert (eviction is None) == (retention.num_evicted_blocks(num_tokens) == 0)
    if eviction is not None:
        assert eviction.kv_len == retention.kv_len(num_tokens)
        assert eviction.kv_len_before == num_tokens


@given(st.integers(1, 99), st.integers(1, 5000))
def test_fractions_are_exact(percent, num_prompt_tokens):
    """A budget typed as a decimal keeps exactly its floor, unlike float arithmetic."""
    retention = make(budget=percent / 100, num_prompt_tokens=num_prompt_tokens)
    expected = max(1, percent * num_prompt_tokens // 100)
    assert retention.budget_tokens(num_prompt_tokens) == expected


def test_the_fractions_that_floats_get_wrong():
    assert int(0.29 * 100) == 28  # what must not happen
    assert make(budget=0.29).budget_tokens(100) == 29
    assert make(budget=0.57).budget_tokens(100) == 57
    small = make(budget=1e-05, num_prompt_tokens=1_000_000)
    assert small.budget == Fraction(1, 100_000) and small.budget_tokens(10**6) == 10


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("budget", [0.01, 0.1, 0.5, 0.99, 1.0])
def test_never_keeps_nothing(policy, budget):
    """Case A24: rounding down never empties a cache; 1.0 never evicts."""
    prompts = [*range(1, 11), 31, 32, 33]
    for num_prompt_tokens, block_size in itertools.product(prompts, (1, 32)):
        retention = make(
            policy,
            budget=budget,
            num_prompt_tokens=num_prompt_tokens,
            block_size=block_size,
        )
        evicted_blocks = 0
        for num_tokens in range(num_prompt_tokens, num_prompt_tokens + 100):
            eviction = retention.eviction(num_tokens, evicted_blocks)
            if eviction is None:
                continue
            evicted_blocks = eviction.evicted_blocks
            assert budget != 1.0
            assert eviction.kv_len >= retention.budget_tokens(num_tokens) >= 1
            window = num_tokens - eviction.recent_start
            assert window >= (0 if policy == "key-only" else 1)
        assert (evicted_blocks == 0) == (budget == 1.0)


def test_budget_type_decides():
    assert make(budget=1).budget_tokens(100) == 1
    assert make(budget=1.0).never_evicts(10**9)
    assert make(budget=1.0).max_kv_len(500) == 500
    assert make("full", budget=0.1).never_evicts(10**9)
    assert make(budget=2048).budget_tokens(10**6) == 2048


def test_bases_and_floor():
    assert make(budget=0.5).budget_tokens(150) == 50
    assert make(budget=0.5, budget_base="sequence").budget_tokens(150) == 75
    assert make(budget=0.5, min_tokens=256).budget_tokens(150) == 256
    assert make(budget=0.5, min_tokens=256).never_evicts(256 + 15)
    assert not make(budget=0.5, min_tokens=256).never_evicts(256 + 16)


@pytest.mark.parametrize(
    "policy, num_sinks, window",
    [
        ("keyformer", 4, 10),
        ("random", 4, 10),
        ("h2o", 4, 25),
        ("key-only", 4, 0),
        ("streaming", 4, 48),
        ("window", 0, 52),
    ],
)
def test_parts_of_the_budget(policy, num_sinks, window):
    """k = 50 of 100 prompt tokens, 16 per block: E = 3, so 52 are kept."""
    eviction = make(policy).eviction(100, 0)
    assert (eviction.num_evict, eviction.evicted_blocks) == (48, 3)
    assert (eviction.kv_len_before, eviction.kv_len) == (100, 52)
    assert eviction.num_sinks == num_sinks
    assert 100 - eviction.recent_start == window
    # The next block is given back 14 steps later: (114 - 50) // 16 = 4.
    assert make(policy).eviction(113, 3) is None
    assert make(policy).eviction(114, 3).kv_len == 50


def test_sinks_yield_to_the_window():
    eviction = make(budget=5, recent_ratio=0.6, sinks=4, block_size=1).eviction(100, 0)
    assert (eviction.num_sinks, 100 - eviction.recent_start) == (2, 3)
    eviction = make("streaming", budget=3, sinks=9, block_size=1).eviction(100, 0)
    assert (eviction.num_sinks, 100 - eviction.recent_start) == (2, 1)


def test_nothing_is_evicted_inside_the_prompt():
    retention = make(budget=10)
    assert retention.num_evicted_blocks(99) == 0
    assert retention.num_evicted_blocks(100) == 5


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(1, 299), st.integers(0, 300))
def test_interval_one_retains_exactly_k(num_prompt_tokens, budget, generated):
    num_tokens = num_prompt_tokens + generated
    paper = make(num_prompt_tokens=num_prompt_tokens, budget=budget, block_size=1)
    served = make(num_prompt_tokens=num_prompt_tokens, budget=budget, block_size=32)
    assert paper.kv_len(num_tokens) == min(num_tokens, budget)
    overshoot = served.kv_len(num_tokens) - paper.kv_len(num_tokens)
    assert 0 <= overshoot < 32
    # Kept counts depend on the block size by the overshoot only (case A25).
    assert served.budget_tokens(num_tokens) == paper.budget_tokens(num_tokens)


def test_going_back_is_an_internal_error():
    with pytest.raises(AssertionError):
        make().eviction(100, 4)
