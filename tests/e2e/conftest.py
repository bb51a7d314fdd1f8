# SPDX-License-Identifier: Apache-2.0
"""Engines for the end-to-end tests, closed at the end of each module."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine import Engine

POLICY = {"policy": "keyformer", "budget": 0.5, "min_tokens": 16}
"""The server's policy in most tests; requests ask for others on top of it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def start_engine(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Callable[[str], Path],
) -> Iterator[Callable[..., Engine]]:
    """Function that starts an engine: kind of tiny model or folder, policy, settings.

    With a policy the engine writes a trace. It lives until the module ends.
    """
    started: list[Engine] = []

    def start(model: str | Path, policy: Any = POLICY, **settings: Any) -> Engine:
        folder = tiny_model(model) if isinstance(model, str) else model
        if policy is not None:
            directory = tmp_path_factory.mktemp("trace")
            settings.setdefault("trace", directory / "trace.jsonl")
        settings.setdefault("num_blocks", 400)
        started.append(Engine(folder, policy, **settings))
        return started[-1]

    yield start
    while started:
        started.pop().close()
    gc.collect()


@pytest.fixture(scope="session")
def article_tokens(smollm2: Path) -> list[int]:
    """The article that ships with the demonstration, as SmolLM2's tokens."""
    from transformers import AutoTokenizer

    from keyformer_vllm import demo

    text = (Path(demo.__file__).parent / "article.txt").read_text(encoding="utf-8")
    tokens: list[int] = AutoTokenizer.from_pretrained(smollm2).encode(text)
    return tokens
