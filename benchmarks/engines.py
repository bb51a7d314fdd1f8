# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks that run engines share: arms, prompts, engines.

Imports neither torch nor vLLM before an engine is opened.
"""

from __future__ import annotations

import json
import random
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

_CPU_CACHE_BYTES = 2**30
_GPU_CACHE_BYTES = 16 * 2**30
"""Asked for only because vLLM would else ask for most of the machine's memory, and
measure it while other engines start; the pool gets the number of blocks that it is told
to have. On a GPU the queries that wait to be scored are taken off it."""


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
            Only a CPU leaves torch.compile out unless asked for it.
    """
    from vllm import LLM
    from vllm.platforms import current_platform

    given: dict[str, Any] = {
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    if current_platform.is_cpu():
        given["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
        given["enforce_eager"] = True
    else:
        given["kv_cache_memory_bytes"] = _GPU_CACHE_BYTES
        # Several engines share the GPU: that much has to be free at the start.
        given["gpu_memory_utilization"] = 0.05
    if policy is not None:
        given["additional_config"] = {ADDITIONAL_CONFIG_KEY: policy}
    given |= settings
    llm = LLM(model=str(model), num_gpu_blocks_override=num_blocks, **given)
    return llm.llm_engine


def scheduler_of(engine: Any) -> Any:
    """The scheduler of an engine that lives in this process."""
    return engine.engine_core.engine_core.scheduler
