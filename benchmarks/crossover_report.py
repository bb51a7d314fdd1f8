# SPDX-License-Identifier: Apache-2.0
"""From the rounds of a throughput run to figures, a table and a plot."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import common
from bars import format_bars
from op_clock import EVICTION_OPS
from served_arm import DECODE, PREFILL, Round, ServedArm
from workloads import Point

from keyformer_vllm.core.capacity import Capacity


def describe_arm(
    arm: ServedArm, base: ServedArm, expected: Capacity, point: Point
) -> dict[str, Any]:
    """The figures of an arm over all its rounds."""
    rounds = arm.rounds
    seconds = sum(one.seconds for one in rounds)
    tokens = sum(len(times) for one in rounds for times in one.token_times.values())
    op_seconds = {phase: add_ops(rounds, phase) for phase in (PREFILL, DECODE)}
    ops = {name for spent in op_seconds.values() for name in spent}
    return {
        "name": arm.name,
        **{name: arm.facts[name] for name in ("pool_blocks", "pool_mib", "plugin")},
        "async_scheduling": arm.facts["async_scheduling"],
        "seconds": seconds,
        "output_tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "ratio": compare_rounds(rounds, base.rounds),
        "cpu_seconds": sum(one.cpu_seconds for one in rounds),
        "cpu_ratio": compare_rounds(rounds, base.rounds, "cpu_seconds"),
        "ttft_s": _spread([t[0] for one in rounds for t in one.token_times.values()]),
        "itl_s": _spread([gap for one in rounds for gap in gaps_of(one)]),
        "running": {
            "peak": max(max(one.running) for one in rounds),
            "mean": _mean([n for one in rounds for n in one.running]),
            "steady": _mean([n for one in rounds for n in one.saturated]),
            "expected": min(expected.running, point.requests),
        },
        "preemptions": sum(one.preemptions for one in rounds),
        "evicted_tokens": sum(one.evicted_tokens for one in rounds),
        "freed_blocks": sum(one.freed_blocks for one in rounds),
        "peak_used_blocks": max(one.used_blocks for one in rounds),
        "steps": {
            "prefill": sum(one.prefill_steps for one in rounds),
            "decode": sum(one.steps - one.prefill_steps for one in rounds),
        },
        "step_seconds": {
            "prefill": sum(one.prefill_seconds for one in rounds),
            "decode": sum(one.seconds - one.prefill_seconds for one in rounds),
        },
        "share_percent": {
            name: 100 * sum(s.get(name, 0.0) for s in op_seconds.values()) / seconds
            for name in sorted(ops)
        },
        "op_seconds": op_seconds,
    }


def add_ops(rounds: list[Round], phase: str) -> dict[str, float]:
    """Seconds of each op in the steps of a phase."""
    total: dict[str, float] = {}
    for one in rounds:
        for name, seconds in one.op_seconds.get(phase, {}).items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def compare_rounds(
    rounds: list[Round], base: list[Round], clock: str = "seconds"
) -> dict[str, float]:
    """Throughput against the base: of all time together, and the range of rounds."""
    times = [getattr(one, clock) for one in rounds]
    base_times = [getattr(one, clock) for one in base]
    each = [b / a for a, b in zip(times, base_times, strict=True)]
    return {"total": sum(base_times) / sum(times), "min": min(each), "max": max(each)}


def gaps_of(one: Round) -> list[float]:
    """Seconds between a request's tokens, preemptions included."""
    return [
        after - before
        for times in one.token_times.values()
        for before, after in itertools.pairwise(times)
    ]


def format_point(point: dict[str, Any]) -> str:
    """The workload, a table of its arms, and what they have to reach."""
    arms = point["arms"]
    ops = [
        name for name in EVICTION_OPS if any(name in a["share_percent"] for a in arms)
    ]
    columns = (
        *(
            "arm",
            "tok/s",
            "ratio",
            "min",
            "max",
            "CPU",
            "TTFT s",
            "p90",
            "ITL ms",
            "p90",
        ),
        *("running", "mean", "steady", "expected", "preempted", "freed"),
        *("prefill s", "decode s", *(f"{name} %" for name in ops)),
    )
    rows = [
        (
            arm["name"],
            arm["tokens_per_s"],
            *(arm["ratio"][name] for name in ("total", "min", "max")),
            arm["cpu_ratio"]["total"],
            *(arm["ttft_s"][name] for name in ("median", "p90")),
            *(1e3 * arm["itl_s"][name] for name in ("median", "p90")),
            *(arm["running"][name] for name in ("peak", "mean", "steady", "expected")),
            arm["preemptions"],
            arm["freed_blocks"],
            *(arm["step_seconds"][name] for name in ("prefill", "decode")),
            *(arm["share_percent"].get(name) for name in ops),
        )
        for arm in arms
    ]
    names = [field.name for field in dataclasses.fields(Point)]
    workload = Point(**{name: point[name] for name in names if name in point})
    shown = f"{workload}\n{common.format_table(columns, rows)}"
    judged = point.get("bars")
    return f"{shown}\n{format_bars(judged)}" if judged else shown


def draw(result: dict[str, Any], path: Path) -> None:
    """Throughput against the first arm over the pool size, a panel per workload."""
    workloads: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for point in result["points"]:
        key = (point["requests"], point["prompt_len"], point["new_tokens"])
        workloads.setdefault(key, []).append(point)
    height = 0.6 + 3.6 * len(workloads)
    with common.drawing(path, 8, height, len(workloads)) as (figure, panels):
        for axes, (key, points) in zip(panels, workloads.items(), strict=True):
            requests, prompt_len, new_tokens = key
            axes.set_title(f"{requests} requests of {prompt_len} + {new_tokens} tokens")
            _draw_workload(axes, sorted(points, key=lambda point: -point["pool"]))
        figure.suptitle(f"{result['settings']['dtype']}, {result['machine']['cpu']}")


def _draw_workload(axes: Any, points: list[dict[str, Any]]) -> None:
    base, *names = [arm["name"] for arm in points[0]["arms"]]
    ratios = {
        name: [
            next(arm["ratio"] for arm in point["arms"] if arm["name"] == name)
            for point in points
        ]
        for name in names
    }
    # Pools stand side by side at equal distances, ample on the left: the tight end,
    # where most happens, would else be squeezed together.
    places = range(len(points))
    for name, found in ratios.items():
        totals = [ratio["total"] for ratio in found]
        reach = [
            [total - ratio["min"] for total, ratio in zip(totals, found, strict=True)],
            [ratio["max"] - total for total, ratio in zip(totals, found, strict=True)],
        ]
        axes.errorbar(places, totals, yerr=reach, marker="o", capsize=3, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    low, high = axes.get_ylim()
    low, high = min(low, 0.9), max(high, 1.1)
    axes.axhspan(low, 1.0, color="tab:red", alpha=0.08)
    axes.text(0.01, 0.02, f"slower than {base}", transform=axes.transAxes, fontsize=8)
    axes.set_ylim(low, high)
    axes.set_xlim(-0.5, len(points) - 0.5)
    axes.set_xticks(places, [_label_pool(point) for point in points])
    axes.set_xlabel("pool in full sequences (requests running in the first arm)")
    axes.set_ylabel(f"output tok/s against {base}")
    axes.grid(axis="y", alpha=0.4)
    if names:
        axes.legend(loc="best", fontsize=8)


def _label_pool(point: dict[str, Any]) -> str:
    return f"{point['pool']} ({point['arms'][0]['running']['mean']:.1f})"


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": common.percentile(values, 0.5),
        "p90": common.percentile(values, 0.9),
    }


def _mean(values: list[int]) -> float | None:
    return sum(values) / len(values) if values else None
