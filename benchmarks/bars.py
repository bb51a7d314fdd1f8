# SPDX-License-Identifier: Apache-2.0
"""What the measurements on a GPU have to reach, and whether a result does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import common
from op_clock import EVICTION_WORK

MET, MISSED, NOT_MEASURED = "met", "MISSED", "not measured"


@dataclass(frozen=True)
class Bar:
    """One of them.

    Args:
        source: the preset, or the benchmark, that measures it.
        subject: the arm, or the operator.
        figure: one of `FIGURES`.
        bound: at most this, or at least, as the figure says.
    """

    source: str
    subject: str
    figure: str
    bound: float


def _throughput(arm: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    return arm["tokens_per_s"] / base["tokens_per_s"]


def _running(arm: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    return arm["running"]["peak"] / base["running"]["peak"]


def _decode_step(arm: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    mine, theirs = (
        one["step_seconds"]["decode"] / one["steps"]["decode"] for one in (arm, base)
    )
    return mine / theirs


def _eviction(arm: Mapping[str, Any], _: Mapping[str, Any]) -> float:
    spent = arm["op_seconds"]["decode"]
    work = sum(spent.get(name, 0.0) for name in EVICTION_WORK)
    return work / arm["step_seconds"]["decode"]


def _prompt_scores(arm: Mapping[str, Any], _: Mapping[str, Any]) -> float:
    return arm["op_seconds"]["prefill"]["score_keys"] / arm["step_seconds"]["prefill"]


def _share_of_copy(row: Mapping[str, Any], _: Mapping[str, Any]) -> float:
    share: float = row["share_of_copy"]
    return share


def _against_attention(row: Mapping[str, Any], _: Mapping[str, Any]) -> float:
    ratio: float = row["ratio"]["median"]
    return ratio


Figure = Callable[[Mapping[str, Any], Mapping[str, Any]], float]

FIGURES: dict[str, tuple[str, Figure]] = {
    "tok/s against the first arm": (">=", _throughput),
    "peak of running requests against the first arm": (">=", _running),
    "decode step against the first arm": ("<=", _decode_step),
    "eviction work, share of the decode steps": ("<=", _eviction),
    "scores of prompts, share of the prefill steps": ("<=", _prompt_scores),
    "share of the bandwidth of a copy": (">=", _share_of_copy),
    "against vLLM's attention": ("<=", _against_attention),
}
"""Name to the direction of its bound, and how to get it from an arm and the first one,
or from a row of the operators."""

_FUSED = "paged_attention_scored, 64 x 4096"

BARS = (
    Bar("gpu-ample", "keyformer:1.0", "tok/s against the first arm", 0.99),
    Bar("gpu-ample", "keyformer:0.5", "decode step against the first arm", 0.85),
    Bar("gpu-ample", "keyformer:0.5", "eviction work, share of the decode steps", 0.03),
    Bar("gpu-tight", "keyformer:0.5", "tok/s against the first arm", 1.7),
    Bar(
        *("gpu-tight", "keyformer:0.5"),
        *("peak of running requests against the first arm", 2.5),
    ),
    Bar("gpu-tight", "keyformer:0.25", "tok/s against the first arm", 2.1),
    Bar(
        *("gpu-tight", "keyformer:0.25"),
        *("peak of running requests against the first arm", 3.5),
    ),
    Bar(
        *("gpu-prefill-bound", "keyformer:0.5"),
        *("scores of prompts, share of the prefill steps", 0.2),
    ),
    Bar("bench_ops", _FUSED, "share of the bandwidth of a copy", 0.8),
    Bar("bench_ops", _FUSED, "against vLLM's attention", 1.1),
)


def judge_arms(preset: str, arms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars of a preset, held to the arms of one point."""
    return _judge(preset, {arm["name"]: arm for arm in arms}, arms[0])


def judge_ops(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars of the operators, held to the rows of bench_ops."""
    shown = {f"{r['name']}, {r['requests']} x {r['kv_len']}": r for r in rows}
    return _judge("bench_ops", shown, {})


def not_measured(source: str) -> list[dict[str, Any]]:
    """The bars of something that left no result."""
    return _judge(source, {}, {})


def format_bars(rows: list[dict[str, Any]]) -> str:
    columns = ("source", "subject", "figure", "bound", "measured", "")
    return common.format_table(
        columns,
        [
            (
                *(row[name] for name in ("source", "subject", "figure")),
                f"{row['direction']} {row['bound']:g}",
                row["measured"],
                row["verdict"],
            )
            for row in rows
        ],
    )


def _judge(
    source: str, subjects: Mapping[str, dict[str, Any]], base: Mapping[str, Any]
) -> list[dict[str, Any]]:
    rows = []
    for bar in BARS:
        if bar.source != source:
            continue
        direction, figure = FIGURES[bar.figure]
        row = {**vars(bar), "direction": direction, "measured": None}
        row["verdict"] = NOT_MEASURED
        if bar.subject in subjects:
            row["measured"] = value = figure(subjects[bar.subject], base)
            met = value >= bar.bound if direction == ">=" else value <= bar.bound
            row["verdict"] = MET if met else MISSED
        rows.append(row)
    return rows
