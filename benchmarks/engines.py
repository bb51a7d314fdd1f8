# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks that run engines share: arms, prompts, engines, timed ops.

Imports neither torch nor vLLM before an engine is opened.
"""

from __future__ import annotations

import functools
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import UsageError

from keyformer_vllm.config import (
    ADDITIONAL_CONFIG_KEY,
    KeyformerConfig,
    KVPolicyError,
    parse_budget,
)

ARM_SYNTAX = (
    "off, or POLICY:BUDGET[:SETTING=VALUE,...], for example "
    "keyformer:0.5:score_queries=stride:4"
)

EVICTION_OPS = (
    "paged_attention_scored",
    "score_keys",
    "reset_slots",
    "select_keep",
    "compact_kv",
)

_CACHE_BYTES = 2**30
"""Asked for only because vLLM would else ask for most of the machine's memory; the
pool gets the number of blocks that it is told to have."""


def parse_arm(text: str) -> dict[str, Any] | None:
    """Settings of an arm; None for stock vLLM.

    Raises:
        UsageError: when it is not spelled as the help says, or the server would
            refuse it.
    """
    if text == "off":
        return None
    policy, _, rest = text.partition(":")
    budget, _, settings = rest.partition(":")
    try:
        result: dict[str, Any] = {"policy": policy, "budget": parse_budget(budget)}
    except ValueError:
        raise UsageError(f"--arm {text}: {budget!r} is not a budget") from None
    for setting in filter(None, settings.split(",")):
        result.update([parse_assignment("--arm " + text, setting)])
    try:
        KeyformerConfig.from_mapping(result)
    except KVPolicyError as error:
        raise UsageError(f"--arm {text}: {error}") from None
    return result


def parse_assignment(option: str, text: str) -> tuple[str, Any]:
    """NAME=VALUE, where the value is JSON or else a string.

    Args:
        option: where it stands; for the message.

    Raises:
        UsageError: if there is no name or no equals sign.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{option}: {text!r} is not SETTING=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def random_prompt(seed: int, name: object, length: int, vocab_size: int) -> list[int]:
    """Token ids drawn uniformly; the same for the same arguments."""
    draw = random.Random(f"{seed} {name}")
    return [draw.randrange(3, vocab_size) for _ in range(length)]


def open_engine(
    model: Path | str,
    policy: dict[str, Any] | None,
    *,
    num_blocks: int,
    **settings: Any,
) -> Any:
    """vLLM's synchronous engine; with VLLM_ENABLE_V1_MULTIPROCESSING=0 all of it lives
    in this process.

    Args:
        model: model folder.
        policy: what `parse_arm` returned.
        num_blocks: blocks in the pool, vLLM's null block among them.
        settings: further arguments of `vllm.LLM`; they win over those given here.
    """
    from vllm import LLM

    given: dict[str, Any] = {
        "kv_cache_memory_bytes": _CACHE_BYTES,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
    }
    if policy is not None:
        given["additional_config"] = {ADDITIONAL_CONFIG_KEY: policy}
    given |= settings
    llm = LLM(model=str(model), num_gpu_blocks_override=num_blocks, **given)
    return llm.llm_engine


def scheduler_of(engine: Any) -> Any:
    """The scheduler of an engine that lives in this process."""
    return engine.engine_core.engine_core.scheduler


@contextmanager
def timed_ops(seconds: dict[str, float]) -> Iterator[None]:
    """Adds up the wall time of every eviction op that runs inside the block."""
    from keyformer_vllm import ops

    originals = {name: getattr(ops, name) for name in EVICTION_OPS}

    def timed(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(op)
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return op(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - started

        return call

    for name, op in originals.items():
        setattr(ops, name, timed(name, op))
    try:
        yield
    finally:
        for name, op in originals.items():
            setattr(ops, name, op)
