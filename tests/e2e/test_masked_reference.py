# SPDX-License-Identifier: Apache-2.0
"""The engine attends to what it kept, all of it, and to nothing else.

Per-token log-probabilities of the engine, which evicts, compacts and hands blocks
back, against a Hugging Face forward of the same model in which exactly the traced
evicted (layer, KV head, position) entries are masked.
"""

from __future__ import annotations

import pytest
import torch

from tests.e2e.conftest import POLICY
from tests.engine import Engine, Request, random_prompt
from tests.hf_reference import HFReference, epochs_of
from tests.models import SERVABLE

TOLERANCE = 1e-4

MIXED_BATCH = [
    (97, {}),
    (160, {"kv_policy": "h2o", "kv_budget": 0.3}),
    (211, {"kv_policy": "random", "kv_budget": 0.6}),
    (64, {"kv_policy": "streaming", "kv_budget": 48}),
    (130, {"kv_policy": "key-only", "kv_budget": 0.25}),
    (140, {"kv_policy": "window"}),
    (33, {"kv_budget": 16}),
    (180, {"kv_policy": "full"}),
]
"""Prompt length and ``vllm_xargs``: every policy, awkward lengths, one opt-out."""


def serve_mixed_batch(engine: Engine, max_tokens: int) -> list[Request]:
    requests = [
        engine.add(random_prompt(length, 1), max_tokens=max_tokens, kv=kv, logprobs=-1)
        for length, kv in MIXED_BATCH
    ]
    engine.run()
    return requests


def largest_error(reference: torch.Tensor, request: Request) -> float:
    """Over all returned log-probabilities (all of the vocabulary, or the top ones)."""
    assert len(request.logprobs) == len(request.tokens) == len(reference)
    return max(
        abs(float(reference[row, token]) - logprob)
        for row, position in enumerate(request.logprobs)
        for token, logprob in position.items()
    )


def check(engine: Engine, reference: HFReference, request: Request) -> None:
    lines = engine.trace_of(request)
    epochs = epochs_of(lines, len(request.prompt))
    assert epochs[0].num_cached == request.num_cached_tokens
    masked = reference.masked_logprobs(request.prompt, request.tokens, epochs)
    assert largest_error(masked, request) < TOLERANCE
    evicts = any("kept" in line for line in lines)
    if evicts:
        assert lines[-1]["evicted_tokens"] > 0
        assert sum(line["freed_blocks"] for line in lines) > 0
        full = reference.full_logprobs(request.prompt, request.tokens)
        # Without this, a model in which eviction shows nowhere would pass as well.
        assert largest_error(full, request) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("kind", "block_size", "eager", "score_mode"),
    [
        *((kind, 32, True, "auto") for kind in SERVABLE),
        ("llama-9-3", 128, True, "auto"),
        ("llama-4-2", 32, False, "auto"),
        ("gpt2", 128, False, "auto"),
        # Attended by vLLM's own kernel, with shifted tables.
        ("llama-9-3", 32, True, "deferred"),
        ("llama-4-2", 32, False, "deferred"),
        ("gpt2", 128, True, "step"),
    ],
)
def test_logprobs_equal_the_masked_forward(
    start_engine, tiny_model, kind, block_size, eager, score_mode
):
    """Catches a shifted block table, a wrong length or position, a row that moved to
    the wrong slot or head, a freed block still in use, and a kept token not read."""
    engine = start_engine(
        kind,
        POLICY | {"score_mode": score_mode},
        block_size=block_size,
        eager=eager,
        max_num_batched_tokens=256,
    )
    # Enough for the shortest request to give a block of 128 back.
    requests = serve_mixed_batch(engine, max_tokens=110 if block_size < 128 else 150)
    reference = HFReference(tiny_model(kind))
    for request in requests:
        check(engine, reference, request)
    evicting = [r for r in requests if any("kept" in x for x in engine.trace_of(r))]
    assert len(evicting) == len(MIXED_BATCH) - 1


@pytest.mark.parametrize("score_mode", ["auto", "step", "deferred"])
def test_compact_positions(start_engine, tiny_model, score_mode):
    """With ALiBi what is retained is attended as if it were all there ever was.

    Catches a place taken from the slot, from another head or from before the last
    eviction, and one that came with a recycled block.
    """
    changes = {"positions": "compact", "score_mode": score_mode, "poison_freed": True}
    engine = start_engine("bloom", POLICY | changes, max_num_batched_tokens=256)
    requests = serve_mixed_batch(engine, max_tokens=110)
    reference = HFReference(tiny_model("bloom"), "compact")
    for request in requests:
        check(engine, reference, request)
    # Without this, a model in which positions show nowhere would pass as well.
    first = requests[0]
    epochs = epochs_of(engine.trace_of(first), len(first.prompt))
    reference.positions = "original"
    unchanged = reference.masked_logprobs(first.prompt, first.tokens, epochs)
    assert largest_error(unchanged, first) > 100 * TOLERANCE


def test_real_model(start_engine, smollm2, article_tokens):
    """As above on SmolLM2: 30 layers, 9 query heads on 3 KV heads, head size 64."""
    engine = start_engine(smollm2, POLICY | {"min_tokens": 64})
    prompts = [article_tokens[:350], article_tokens[100:333]]
    requests = engine.generate(prompts, max_tokens=48, logprobs=20)
    reference = HFReference(smollm2)
    for request in requests:
        check(engine, reference, request)
        assert engine.trace_of(request)[-1]["evicted_blocks"] >= 3
