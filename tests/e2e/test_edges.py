# SPDX-License-Identifier: Apache-2.0
"""Awkward lengths, budgets, chunks and block sizes, in an engine of its own.

Cases: A01, A03, A04, A06, A16, A17, A18, A19, A20, A24, A25, A28 of public reports on
eviction.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.engine import Engine, Request, random_prompt
from tests.invariants import assert_idle

BLOCK_SIZE = 32
BUDGETS = (0.01, 0.1, 0.5, 0.99, 1.0)
SHORT_PROMPTS = (*range(1, 11), 31, 32, 33)
EDGE_PROMPTS = (31, 32, 33, 63, 64, 65, 127, 128, 129)
CHUNK = 128
CHUNKED_PROMPTS = (
    CHUNK - 1,
    CHUNK,
    CHUNK + 1,
    2 * CHUNK,
    2 * CHUNK + 1,
    5 * CHUNK + 7,
)


@pytest.fixture(scope="module")
def engine(start_engine):
    """Its budgets may go down to a single token."""
    return start_engine(
        "llama-4-2",
        {"policy": "keyformer", "budget": 0.5, "min_tokens": 1},
        max_num_batched_tokens=CHUNK,
        max_num_seqs=128,
    )


@pytest.fixture(scope="module")
def stock(start_engine):
    return start_engine(
        "llama-4-2", None, max_num_batched_tokens=CHUNK, max_num_seqs=128
    )


def kept_sizes(line: dict[str, Any]) -> set[int]:
    return {len(kept) for layer in line["kept"] for kept in layer}


def check_trace(engine: Engine, request: Request, k: int) -> int:
    """Every step is where it belongs, and eviction keeps from k to k + block - 1.

    Returns:
        How many evictions there were.
    """
    prompt = len(request.prompt)
    computed = evicted = evictions = 0
    for line in engine.trace_of(request):
        first, last = line["positions"]
        assert first == computed
        assert line["phase"] == ("prefill" if first < prompt else "decode")
        computed = last
        if "kept" in line:
            evictions += 1
            assert line["phase"] == "decode" and line["k"] == k
            (size,) = kept_sizes(line)
            assert max(1, k) <= size < k + engine.block_size
            # The newest key is in everybody's window: its query is the next one.
            for kept in (kept for layer in line["kept"] for kept in layer):
                assert kept[-1] == first - 1 and len(set(kept)) == size
            evicted += line["freed_blocks"]
        assert line["evicted_blocks"] == evicted
        assert line["physical"] == last - evicted * engine.block_size
        assert line["blocks_held"] == -(-line["physical"] // engine.block_size)
        if line["phase"] == "decode":
            assert line["physical"] <= max(k + engine.block_size, 1)
    assert computed == prompt + len(request.tokens) - 1
    return evictions


def assert_finite(request: Request) -> None:
    assert request.logprobs and len(request.logprobs) == len(request.tokens)
    for position in request.logprobs:
        assert all(math.isfinite(value) for value in position.values())


def test_no_budget_empties_a_short_cache(engine, stock):
    """A24: k is rounded down, but never to nothing; 1.0 is stock vLLM."""
    prompts = {length: random_prompt(length, 1) for length in SHORT_PROMPTS}
    requests = {
        (budget, length): engine.add(
            prompt, max_tokens=75, kv={"kv_budget": budget}, logprobs=3
        )
        for budget in BUDGETS
        for length, prompt in prompts.items()
    }
    engine.run()
    expected = stock.generate(list(prompts.values()), max_tokens=75, logprobs=3)
    for (budget, length), request in requests.items():
        assert_finite(request)
        if budget == 1.0:
            assert check_trace(engine, request, 2048) == 0
        else:
            k = max(1, math.floor(budget * length))
            assert check_trace(engine, request, k) >= 2
    for length, request in zip(prompts, expected, strict=True):
        assert requests[1.0, length].tokens == request.tokens
        for budget in BUDGETS:
            # A18: until its first eviction a request is served as by stock vLLM.
            first = min(engine.kept_sets(requests[budget, length]), default=None)
            same = None if first is None else first - length + 1
            assert requests[budget, length].tokens[:same] == request.tokens[:same]


def test_edge_lengths_first_repeated_and_after_preemption(engine):
    """A04: a length of whole blocks never leaves nothing to compute; and A16."""

    def serve(throw_back: bool) -> list[tuple[list[int], int]]:
        requests = [
            engine.add(random_prompt(length, 2), max_tokens=40, kv={"kv_budget": 0.3})
            for length in EDGE_PROMPTS
        ]
        if throw_back:
            for _ in range(12):
                engine.step()
            assert any(engine.scheduler.evicted_blocks.values())
            reset = engine.scheduler.reset_prefix_cache
            assert reset(reset_running_requests=True)
            assert not engine.scheduler.evicted_blocks
        engine.run()
        assert_idle(engine, [request.engine_id for request in requests])
        return [(request.tokens, len(request.tokens)) for request in requests]

    first = serve(throw_back=False)
    assert [count for _, count in first] == [40] * len(EDGE_PROMPTS)
    assert serve(throw_back=False) == first
    again = serve(throw_back=True)
    # Another epoch computes the answer so far as if it were prompt, so that tokens
    # may differ from there; it is the same each time.
    assert [count for _, count in again] == [40] * len(EDGE_PROMPTS)
    assert serve(throw_back=True) == again


def test_prompts_longer_than_a_chunk(engine):
    """A18, A19: the last chunk may be a single token; nothing is evicted before."""
    for length in CHUNKED_PROMPTS:
        (request,) = engine.generate([random_prompt(length, 3)], max_tokens=70)
        assert check_trace(engine, request, length // 2) >= 2
        prefill = [x for x in engine.trace_of(request) if x["phase"] == "prefill"]
        assert len(prefill) == -(-length // CHUNK)
        assert len(engine.trace_of(request)) == len(prefill) + 69


def test_kept_sets_do_not_depend_on_chunks(engine, start_engine):
    """A19, and the issue's "same under another chunk size"."""
    whole = start_engine(
        "llama-4-2", {"policy": "keyformer", "budget": 0.5, "min_tokens": 1}
    )
    for length in (2 * CHUNK + 1, 5 * CHUNK + 7):
        prompt = random_prompt(length, 3)
        (cut,) = engine.generate([prompt], max_tokens=40)
        (one,) = whole.generate([prompt], max_tokens=40)
        assert cut.tokens == one.tokens
        assert engine.kept_sets(cut) == whole.kept_sets(one) != {}


def test_short_request_after_a_long_one_in_the_same_row(start_engine):
    """A01: ten times over, one row in the batch."""
    engine = start_engine(
        "llama-4-2",
        {"policy": "keyformer", "budget": 0.25, "min_tokens": 16},
        max_num_seqs=1,
        max_model_len=1024,
        num_blocks=40,
    )
    short = random_prompt(40, 4)
    (fresh,) = engine.generate([short], max_tokens=20)
    for turn in range(10):
        (long,) = engine.generate([random_prompt(600, turn)], max_tokens=40)
        assert engine.trace_of(long)[-1]["evicted_blocks"] >= 13
        (request,) = engine.generate([short], max_tokens=20)
        assert request.tokens == fresh.tokens
        line = engine.trace_of(request)[0]
        assert line["evicted_tokens"] == 0 and line["physical"] == line["logical"]
    assert_idle(engine)


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_kept_count_is_k_up_to_a_block_more(start_engine, block_size):
    """A25: a budget counts tokens; blocks only round what is kept, upwards."""
    engine = start_engine(
        "llama-4-2",
        {"policy": "keyformer", "budget": 0.5, "min_tokens": 16},
        block_size=block_size,
        num_blocks=40,
        max_model_len=1024,
    )
    for length, budget, k in ((300, 0.5, 150), (301, 0.25, 75), (500, 100, 100)):
        (request,) = engine.generate(
            [random_prompt(length, 5)], max_tokens=150, kv={"kv_budget": budget}
        )
        assert check_trace(engine, request, k) >= 2
        sizes = {
            min(kept_sizes(line)) for line in engine.trace_of(request) if "kept" in line
        }
        # From the second eviction on a whole block has come in since the one before.
        assert k in sizes


def test_two_requests_that_do_not_fit_together(start_engine):
    """A16: they throw each other back and still finish, alike in every run."""
    engine = start_engine(
        "llama-4-2",
        {"policy": "keyformer", "budget": 0.8, "min_tokens": 16}
        | {"budget_base": "sequence"},
        num_blocks=14,
        max_model_len=400,
    )
    runs = []
    for _ in range(3):
        prompts = [random_prompt(150, 6), random_prompt(150, 7)]
        requests = engine.generate(prompts, max_tokens=200)
        assert [len(request.tokens) for request in requests] == [200, 200]
        starts = [
            sum(line["positions"][0] == 0 for line in engine.trace_of(request))
            for request in requests
        ]
        assert sum(starts) > 2, "nobody was preempted"
        runs.append([request.tokens for request in requests])
        assert_idle(engine, [request.engine_id for request in requests])
    assert runs[0] == runs[1] == runs[2]


def test_long_request_that_only_eviction_lets_run(start_engine):
    """A17: more tokens than the pool holds in all; the small one is served too."""
    engine = start_engine(
        "llama-4-2",
        {"policy": "keyformer", "budget": 0.25, "min_tokens": 16},
        num_blocks=34,
        max_model_len=1024,
    )
    requests = [
        engine.add(random_prompt(length, 8), max_tokens=new)
        for length, new in ((1000, 24), (900, 120), (20, 5), (1000, 24))
    ]
    engine.run(max_steps=2000)
    assert [len(request.tokens) for request in requests] == [24, 120, 5, 24]
    assert_idle(engine)


def test_a_long_answer_to_a_short_prompt_is_bounded(start_engine):
    """A20, A28: block list, trace and what the kernel is told agree, and stay flat."""
    engine = start_engine(
        "llama-4-2",
        {"policy": "keyformer", "budget": 64, "min_tokens": 16},
        num_blocks=40,
        max_model_len=1200,
    )
    request = engine.add(random_prompt(20, 9), max_tokens=1100)
    seen = kernel_lengths(engine)
    most = -(-(64 + BLOCK_SIZE - 1) // BLOCK_SIZE) + 1
    for number in range(1, 1100):
        engine.step()
        held = engine.blocks_of(request.engine_id)
        if number % 50 == 0:
            line = engine.trace_of(request)[-1]
            assert held == line["blocks_held"] == -(-line["physical"] // BLOCK_SIZE)
            assert seen[-1] == line["physical"]
        assert held <= most
    engine.run()
    assert check_trace(engine, request, 64) > 30
    assert_idle(engine)


def kernel_lengths(engine: Engine) -> list[int]:
    """Lengths that vLLM's own metadata builder is given, one per step from now on."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    from keyformer_vllm.adapters import compat

    (builder,) = compat.metadata_builders(engine.model_runner)
    seen: list[int] = []
    ours = builder.build

    def build(*args: Any, **kwargs: Any) -> Any:
        metadata = ours(*args, **kwargs)
        seen.append(int(metadata.seq_lens[0]))
        return metadata

    assert isinstance(builder, CPUAttentionMetadataBuilder)
    builder.build = build
    return seen
