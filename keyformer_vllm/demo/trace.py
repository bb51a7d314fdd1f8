# SPDX-License-Identifier: Apache-2.0
"""Reads the file that `--kv-trace` writes: one JSON line per step and request."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RequestSummary:
    """What one request held over its life; counts of blocks are vLLM's own.

    Args:
        num_steps: steps that computed tokens of this request.
        logical_tokens: tokens computed at the end, evicted ones included.
        physical_tokens: tokens in the cache at the end, per KV head.
        peak_blocks: most blocks held in any step, the prompt phase included.
        final_blocks: blocks held in the last step.
        evicted_tokens: tokens evicted, per KV head.
        freed_blocks: blocks given back before the request ended.
        budget_tokens: the retained tokens asked for (k); None if nothing was evicted.
    """

    num_steps: int
    logical_tokens: int
    physical_tokens: int
    peak_blocks: int
    final_blocks: int
    evicted_tokens: int
    freed_blocks: int
    budget_tokens: int | None


def read_trace(path: Path) -> list[dict[str, Any]]:
    """All lines of a trace, in order; a last line still being written is left out."""
    lines = []
    for text in path.read_text().splitlines(keepends=True):
        if text.endswith("\n") and text.strip():
            lines.append(json.loads(text))
    return lines


def select_request(
    lines: Iterable[dict[str, Any]], response_id: str
) -> list[dict[str, Any]]:
    """The lines of the request behind an OpenAI response.

    Args:
        lines: a trace.
        response_id: `id` of the response; the engine may append to it.

    Raises:
        LookupError: if the trace has no such request.
    """
    lines = list(lines)
    chosen = [line for line in lines if line["req"].startswith(response_id)]
    if not chosen:
        known = sorted({line["req"] for line in lines})
        raise LookupError(f"the trace has no request {response_id}, only {known}")
    return chosen


def summarize(lines: Iterable[dict[str, Any]]) -> RequestSummary:
    """Sums up the trace lines of one request; there must be at least one."""
    lines = list(lines)
    last = lines[-1]
    return RequestSummary(
        num_steps=len(lines),
        logical_tokens=last["logical"],
        physical_tokens=last["physical"],
        peak_blocks=max(line["blocks_held"] for line in lines),
        final_blocks=last["blocks_held"],
        evicted_tokens=last["evicted_tokens"],
        freed_blocks=sum(line["freed_blocks"] for line in lines),
        budget_tokens=last["k"],
    )
