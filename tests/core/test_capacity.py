# SPDX-License-Identifier: Apache-2.0
"""The estimate against a pool that is filled request by request."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from keyformer_vllm.core.capacity import Capacity, estimate_capacity
from keyformer_vllm.core.policies import get_policy
from keyformer_vllm.core.retention import Retention


def make(prompt: int, budget: float | int, block_size: int = 32, **more) -> Retention:
    return Retention.resolve(
        get_policy("keyformer"),
        num_prompt_tokens=prompt,
        block_size=block_size,
        budget=budget,
        **more,
    )


def test_the_figures_of_a_case_by_hand():
    """320 blocks, prompts of 64: one more fits as long as 64 are free."""
    at_half = estimate_capacity(make(2048, 0.5), num_new_tokens=512, num_blocks=320)
    assert at_half == Capacity(1024, 64, 33, 80, 1 + (320 - 64) // 33, 4)
    quarter = estimate_capacity(make(2048, 0.25), num_new_tokens=512, num_blocks=320)
    assert (quarter.held_blocks, quarter.running) == (17, 16)
    watermark = estimate_capacity(
        make(2048, 0.25), num_new_tokens=512, num_blocks=320, watermark_blocks=10
    )
    assert watermark.running == 1 + (320 - 64 - 10) // 17 == 15


def test_without_eviction_both_figures_agree():
    for retention in (make(2048, 1.0), make(2048, 0.5, min_tokens=3000)):
        capacity = estimate_capacity(retention, num_new_tokens=512, num_blocks=320)
        assert capacity.held_blocks == capacity.full_blocks == 80
        assert capacity.running == capacity.running_without_eviction == 4


def test_a_pool_too_small_for_one_request_runs_none():
    retention = make(2048, 0.5)
    assert estimate_capacity(retention, num_new_tokens=9, num_blocks=63).running == 0
    assert estimate_capacity(retention, num_new_tokens=9, num_blocks=64).running == 1
    # A short prompt whose answer does not fit.
    short = estimate_capacity(make(32, 0.5), num_new_tokens=900, num_blocks=1)
    assert short.running == short.running_without_eviction == 0


def most_held(retention: Retention, num_new_tokens: int) -> int:
    """The most blocks one request holds after its prompt, step by step."""
    size, most, evicted = retention.block_size, 0, 0
    for n in range(
        retention.num_prompt_tokens, retention.num_prompt_tokens + num_new_tokens - 1
    ):
        evicted = max(evicted, retention.num_evicted_blocks(n))
        most = max(most, -(-(n + 1) // size) - evicted)
    return most


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.integers(1, 400),
    new=st.integers(2, 120),
    budget=st.one_of(st.integers(1, 99).map(lambda p: p / 100), st.integers(1, 300)),
    block_size=st.sampled_from([1, 16, 32]),
    min_tokens=st.sampled_from([0, 64]),
    base=st.sampled_from(["prompt", "sequence"]),
    num_blocks=st.integers(1, 400),
)
def test_what_fits_fits_and_one_more_does_not(
    prompt, new, budget, block_size, min_tokens, base, num_blocks
):
    """Held blocks are never understated, and overstated by one at most; the newest
    request's prompt and the others fit, and with a further one they would not."""
    retention = make(
        prompt, budget, block_size, min_tokens=min_tokens, budget_base=base
    )
    capacity = estimate_capacity(retention, num_new_tokens=new, num_blocks=num_blocks)
    held, running = capacity.held_blocks, capacity.running
    assert most_held(retention, new) <= held <= most_held(retention, new) + 1
    if retention.never_evicts(prompt + new - 2):
        assert running == capacity.running_without_eviction
        return
    mean = Fraction(retention.max_kv_len((2 * prompt + new - 1) // 2), block_size)

    def fits(number: int) -> bool:
        return (
            number - 1
        ) * mean + capacity.prompt_blocks <= num_blocks and number * mean <= num_blocks

    if num_blocks < max(held, capacity.prompt_blocks):
        assert running == 0
    else:
        assert fits(running) and not fits(running + 1)
        # Where all hold the same at all times, they fit whatever their phase.
        if base == "prompt" and mean.denominator == 1 and prompt >= mean * block_size:
            assert running * held <= num_blocks
