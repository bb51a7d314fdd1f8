# SPDX-License-Identifier: Apache-2.0
"""A49: a real model loses gracefully; there is no cliff just above the budget."""

from __future__ import annotations

import random

import pytest

NAMES = """
Alice Bruno Clara David Elena Frank Greta Henry Irene Jacob Karen Louis Maria Nadia
Oscar Paula Quinn Rosa Simon Tania
"""
NUM_LISTS = 4
NUM_RECORDS = 40


def prompt_and_code(tokenizer, seed: int) -> tuple[list[int], str]:
    """A list of people with codes; asked is the last one, which no policy drops."""
    generator = random.Random(seed)
    records = []
    for number in range(NUM_RECORDS):
        initials = chr(65 + number % 26) + chr(65 + number // 26)
        name = f"{generator.choice(NAMES.split())} {initials}"
        records.append((name, str(generator.randint(1000, 9999))))
    lines = "".join(f"The code of {name} is {code}.\n" for name, code in records)
    name, code = records[-1]
    question = f"\nWhat is the code of {name}? Answer with the code only."
    content = f"Here is a list of people and their codes.\n{lines}{question}"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=False,
    )
    return tokenizer.encode(text, add_special_tokens=False), code


@pytest.fixture(scope="module")
def engine(start_engine, smollm2):
    return start_engine(smollm2, {"policy": "keyformer", "min_tokens": 64})


@pytest.fixture(scope="module")
def answers(engine, smollm2):
    """Share over budget (None: full cache) -> answers that hold the code."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    lists = [prompt_and_code(tokenizer, seed) for seed in range(NUM_LISTS)]
    found = {}
    for over in (None, 0.08, 0.5):
        requests = []
        for prompt, _ in lists:
            # Just over the budget still has to be a block over it, to evict at all.
            kv = {"kv_policy": "full"}
            if over is not None:
                kv = {"kv_budget": int(len(prompt) / (1 + over))}
            requests.append(
                engine.add(
                    prompt, max_tokens=16, kv=kv, detokenize=True, ignore_eos=False
                )
            )
        engine.run()
        for request in requests:
            (completion,) = request.completions
            assert completion.text.strip(), "an empty answer"
            sets = engine.kept_sets(request)
            assert bool(sets) == (over is not None)
            for kept in sets.values():
                assert all(head[0] == 0 for layer in kept for head in layer)
        found[over] = sum(
            code in request.completions[0].text
            for request, (_, code) in zip(requests, lists, strict=True)
        )
    return found


def test_no_cliff_just_above_the_budget(answers):
    """Catches an eviction of the first tokens, the sinks, that all attention needs."""
    assert answers[None] >= NUM_LISTS - 1, "the task is too hard for this model"
    assert answers[0.08] >= 0.8 * answers[None], answers
    assert answers[0.5] >= 0.6 * answers[None], answers
