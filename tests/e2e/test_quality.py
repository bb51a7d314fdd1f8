# SPDX-License-Identifier: Apache-2.0
"""A wrong sign, a shifted window or a lost score shows in what the model says."""

from __future__ import annotations

import pytest

from tests.quality import agreement, answer_in_full, article_prompts, replay

BUDGET = 0.5
NUM_ARTICLES = 12
NUM_TOKENS = 48


# Random choice as it was measured for the bar: position 0 has to be lucky as well.
ARMS = {
    "keyformer": {"policy": "keyformer"},
    "streaming": {"policy": "streaming"},
    "random": {"policy": "random", "sinks": 0},
}


@pytest.fixture(scope="module")
def top_one(start_engine, smollm2, xsum):
    """Mean top-1 agreement with the full cache, by policy."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = article_prompts(xsum, tokenizer, NUM_ARTICLES, max_tokens=570)
    answers: list[list[int]] = []
    result = {}
    for name, arm in ARMS.items():
        # The shortest prompts have a budget below the default floor.
        policy = arm | {"budget": BUDGET, "min_tokens": 64}
        engine = start_engine(smollm2, policy, forcing=True)
        if not answers:
            answers = answer_in_full(engine, prompts, NUM_TOKENS)
        requests = replay(engine, prompts, answers)
        for request in requests:
            lines = engine.trace_of(request)
            budget = int(BUDGET * len(request.prompt))
            assert lines[-1]["physical"] <= budget + engine.block_size
            assert sum(line["freed_blocks"] for line in lines) > 0
        result[name] = agreement(requests, answers)
    return result


def test_agreement_at_half_the_budget(top_one):
    assert top_one["keyformer"] >= 0.80, top_one


def test_better_than_the_first_and_last_tokens(top_one):
    assert top_one["keyformer"] >= top_one["streaming"] + 0.15, top_one


def test_better_than_chance(top_one):
    assert top_one["keyformer"] >= top_one["random"] + 0.25, top_one
