# SPDX-License-Identifier: Apache-2.0
"""The reference itself: without eviction it is the model, with it the oracle."""

from __future__ import annotations

import pytest
import torch

from keyformer_vllm.config import KeyformerConfig
from tests.engine import random_prompt
from tests.hf_attention import load_as_served
from tests.hf_reference import (
    Epoch,
    HFReference,
    epochs_of,
    oracle_request,
)
from tests.models import SERVABLE

pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[*((kind, "original") for kind in SERVABLE), ("bloom", "compact")],
    ids="-".join,
)
def reference(request, tiny_model):
    kind, positions = request.param
    return HFReference(tiny_model(kind), positions)


def test_without_eviction_it_is_the_model(reference):
    """Catches a reference that is wrong on its own, for example a lost scale."""
    plain = load_as_served(reference.folder)
    prompt, tokens = random_prompt(90, 1), random_prompt(10, 2)
    with torch.inference_mode():
        logits = plain(torch.tensor([[*prompt, *tokens]])).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    actual = reference.full_logprobs(prompt, tokens)
    assert torch.allclose(actual, expected, atol=2e-5, rtol=0)


def test_masked_forward_equals_the_oracle_inside_the_model(reference):
    """One forward with masks and one token at a time with real removal agree.

    Catches a mask that starts a row late or early, or that mixes up heads or layers.
    """
    config = KeyformerConfig(
        "keyformer", budget=0.4, min_tokens=8, positions=reference.positions
    )
    prompt = random_prompt(90, 1)
    request = oracle_request(config, len(prompt), 60, interval=16)
    tokens, layers = reference.oracle_run(prompt, 60, request)
    assert len(tokens) == 60
    kept = {
        event.num_tokens: [layer.history[index].position.tolist() for layer in layers]
        for index, event in enumerate(layers[0].history)
    }
    assert len(kept) > 2
    epoch = Epoch(len(prompt), len(prompt) + len(tokens) - 1, kept)
    logprobs = reference.masked_logprobs(prompt, tokens, [epoch])
    best = logprobs.max(-1).values
    chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (best - chosen).max() < 1e-4
    full = reference.full_logprobs(prompt, tokens)
    assert (logprobs - full).abs().max() > 0.1, "eviction must show"
    assert reference.follow(prompt, tokens, request, kept) == []


def test_follow_reports_another_choice(reference):
    """Catches a comparison that always agrees."""
    config = KeyformerConfig("h2o", budget=0.4, min_tokens=8)
    prompt = random_prompt(90, 1)
    request = oracle_request(config, len(prompt), 20, interval=16)
    tokens, layers = reference.oracle_run(prompt, 20, request)
    kept = {
        event.num_tokens: [layer.history[index].position.tolist() for layer in layers]
        for index, event in enumerate(layers[0].history)
    }
    first = min(kept)
    row = kept[first][1][0]
    candidate = next(p for p in row if 4 <= p < 50)
    stranger = next(p for p in range(4, 50) if p not in row)
    row[row.index(candidate)] = stranger
    row.sort()
    kept = {first: kept[first]}
    disagreements = reference.follow(
        prompt, tokens[: first + 2 - len(prompt)], request, kept
    )
    (only,) = disagreements
    assert (only.num_tokens, only.layer, only.kv_head) == (first, 1, 0)
    assert only.num_swapped == 1 and only.gap > 1e-4


def test_epochs_split_at_a_preemption():
    lines = [
        {"positions": [0, 64]},
        {"positions": [64, 100]},
        {"positions": [100, 101], "kept": "first"},
        {"positions": [101, 102]},
        {"positions": [0, 64]},
        {"positions": [64, 103]},
        {"positions": [103, 104], "kept": "second"},
    ]
    first, second = epochs_of(lines, 100)
    assert first == Epoch(100, 102, {100: "first"})
    assert second == Epoch(103, 104, {103: "second"})
    with pytest.raises(AssertionError):
        epochs_of([{"positions": [0, 64]}, {"positions": [65, 100]}], 100)
