# SPDX-License-Identifier: Apache-2.0
"""How much a policy changes what a real model says about real articles.

Teacher forcing through the engine: the model first answers with its full cache; then
each policy is made to say the same words while its own first choices are noted. So
all positions count, not only those before the first difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.engine import Engine, Request

INSTRUCTION = "Summarize the following article in two sentences.\n\n"


def article_prompts(
    articles: Path, tokenizer: Any, number: int, max_tokens: int
) -> list[list[int]]:
    """Chat prompts, as token ids, of the first articles that are not too long.

    Args:
        articles: JSON lines with ``document``.
        max_tokens: the longest prompt to take.
    """
    prompts: list[list[int]] = []
    with open(articles, encoding="utf-8") as file:
        for line in file:
            message = {
                "role": "user",
                "content": INSTRUCTION + json.loads(line)["document"],
            }
            text = tokenizer.apply_chat_template(
                [message], add_generation_prompt=True, tokenize=False
            )
            tokens = tokenizer.encode(text, add_special_tokens=False)
            if len(tokens) <= max_tokens:
                prompts.append(tokens)
            if len(prompts) == number:
                return prompts
    raise ValueError(f"{articles} has fewer than {number} articles of that length")


def answer_in_full(
    engine: Engine, prompts: Iterable[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """Greedy answers with nothing evicted, for a server that has a policy."""
    full = {"kv_policy": "full"}
    requests = engine.generate(list(prompts), max_tokens=max_tokens, kv=full)
    return [request.tokens for request in requests]


def add_forced(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> list[Request]:
    """Hand in the prompts under the server's policy, with these answers forced."""
    return [
        engine.add(prompt, forced=answer, logprobs=1)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def replay(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> list[Request]:
    """Serve the prompts under the server's policy, with these answers forced."""
    requests = add_forced(engine, prompts, answers)
    engine.run()
    return requests


def agreements(
    requests: Sequence[Request], answers: Sequence[Sequence[int]]
) -> list[float]:
    """Per article, the share of positions whose first choice is the answer's.

    The first token is left out: it comes from full attention under any policy.
    """
    shares = []
    for request, answer in zip(requests, answers, strict=True):
        assert request.tokens == list(answer), "teacher forcing did not force"
        chosen = [max(entry, key=entry.__getitem__) for entry in request.logprobs]
        same = [a == b for a, b in zip(chosen[1:], answer[1:], strict=True)]
        shares.append(sum(same) / len(same))
    return shares


def agreement(requests: Sequence[Request], answers: Sequence[Sequence[int]]) -> float:
    """Mean of :func:`agreements` over the articles."""
    shares = agreements(requests, answers)
    return sum(shares) / len(shares)
