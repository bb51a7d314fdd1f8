# SPDX-License-Identifier: Apache-2.0
"""Freed blocks are really free, stay free, and serve others."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import POLICY
from tests.engine import Engine, Request, random_prompt
from tests.invariants import assert_idle, assert_pool_consistent


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine("llama-4-2", num_blocks=200, max_model_len=4096)


def most_blocks(budget: int, block_size: int) -> int:
    return -(-(budget + block_size - 1) // block_size) + 1


@pytest.fixture
def lengths(engine):
    """The length that each attention call of the first layer is given."""
    recorded: list[int] = []
    layers = engine.model_runner.compilation_config.static_forward_context
    impl = next(iter(layers.values())).impl
    forward = impl.forward

    def recording(layer, query, key, value, kv_cache, metadata, *args, **kwargs):
        recorded.append(int(metadata.seq_lens[0]))
        return forward(layer, query, key, value, kv_cache, metadata, *args, **kwargs)

    impl.forward = recording
    yield recorded
    del impl.forward


def serve_watching(
    engine: Engine, request: Request, lengths: list[int]
) -> list[tuple[int, int, int]]:
    """Per step: blocks held and free as the pool has it, and length in the kernel."""
    seen = []
    while engine.busy:
        engine.step()
        if lengths:
            blocks = engine.blocks_of(request.engine_id)
            seen.append((blocks, engine.block_pool.get_num_free_blocks(), lengths[-1]))
    engine.step()
    return seen


@pytest.mark.parametrize(
    ("prompt_length", "budget", "max_tokens"),
    [(100, 64, 1100), (1024, 0.25, 80)],
    ids=["A28-1000-steps", "A10-long-prompt"],
)
def test_blocks_stay_bounded(engine, lengths, prompt_length, budget, max_tokens):
    """Three sources agree at every step: the trace, the manager's block list, and the
    length that the attention kernel is given. Catches a policy that reports a bound
    and does not keep it, blocks that come straight back, and decode that is never
    compressed."""
    total = engine.block_pool.get_num_free_blocks()
    request = engine.add(
        random_prompt(prompt_length, 1), max_tokens=max_tokens, kv={"kv_budget": budget}
    )
    seen = serve_watching(engine, request, lengths)
    lines = engine.trace_of(request)
    assert len(lines) == max_tokens
    # The last step's blocks are back before anybody can look.
    assert len(seen) == max_tokens and seen[-1][0] == 0
    k = budget if isinstance(budget, int) else int(budget * prompt_length)
    bound = most_blocks(k, engine.block_size)
    first = next(i for i, line in enumerate(lines) if line["freed_blocks"])
    for index, line in enumerate(lines):
        assert lengths[index] == line["physical"]
        assert line["physical"] == line["logical"] - line["evicted_tokens"]
        if index + 1 < len(lines):
            held, free, length = seen[index]
            assert held == line["blocks_held"] == -(-length // engine.block_size)
            assert held + free == total
        if index >= first:
            assert line["k"] == k
            assert k <= line["physical"] <= k + engine.block_size
            assert line["blocks_held"] <= bound
    # The last token sampled is never computed; the last one computed evicts nothing.
    logical = prompt_length + max_tokens - 1
    freed = sum(line["freed_blocks"] for line in lines)
    assert (
        freed == (logical - 1 - k) // engine.block_size == lines[-1]["evicted_blocks"]
    )
    assert_idle(engine, [request.engine_id])


def test_freed_blocks_admit_another(start_engine):
    """A10: a pool with room for one full sequence serves two at once, unpreempted."""
    engine = start_engine("llama-4-2", num_blocks=50, max_model_len=1400)
    for budget, together in [(0.25, True), (1.0, False)]:
        first = engine.add(
            random_prompt(1024, 2), max_tokens=200, kv={"kv_budget": budget}
        )
        engine.step()
        second = engine.add(random_prompt(700, 3), max_tokens=5, kv={"kv_budget": 1.0})
        at_once = False
        while engine.busy:
            engine.step()
            assert_pool_consistent(engine)
            at_once |= len(engine.scheduler.running) == 2
        engine.step()
        assert at_once is together
        assert len(first.tokens) == 200 and len(second.tokens) == 5
        assert_idle(engine, [first.engine_id, second.engine_id])


def test_pages_hold_the_same_tokens_as_without_a_policy(start_engine):
    """A22: no page per query head. 8 bytes of side data per slot and KV head are
    all that is added."""
    plain = start_engine("llama-9-3", None)
    evicting = start_engine("llama-9-3", POLICY)
    one, two = (e.manager.kv_cache_spec for e in (plain, evicting))
    assert (one.num_kv_heads, one.block_size) == (two.num_kv_heads, two.block_size)
    side = two.num_kv_heads * two.block_size * 8
    assert one.page_size_bytes + side <= two.page_size_bytes
    assert two.page_size_bytes < one.page_size_bytes + side + 64


def test_scoring_needs_no_square_matrix(start_engine):
    """A50: a 4,000-token prompt in one chunk; rows x keys of one head are 64 MB."""
    peaks = []
    for policy in (None, POLICY):
        engine = start_engine(
            "llama-4-2",
            policy,
            num_blocks=140,
            max_model_len=4096,
            max_num_batched_tokens=4096,
        )
        request = engine.add(random_prompt(4000, 8), max_tokens=1)
        peaks.append(growth_while(engine.run))
        assert request.finished
    assert peaks[1] < peaks[0] + 32 * 2**20, peaks


def growth_while(action) -> int:
    """How far the resident memory rose above where it was, in bytes."""
    before = memory("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM starts from here
    action()
    return memory("VmHWM") - before


def memory(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024
