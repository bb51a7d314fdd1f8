# SPDX-License-Identifier: Apache-2.0
"""How long does each operator take, beside vLLM's attention on the same cache?

Groups of calls are timed in turns, with a plain copy among them, so that a machine
that changes speed does so for all. `ratio` is the median time over that of the call
it is compared with; a ring serves as many decode steps as it has rows, and its time is
divided by them. The check runs each operator and its reference on a small cache, and
fails if they differ.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bars
import common
from common import UsageError

if TYPE_CHECKING:
    from op_cases import Batch, Case

GROUPS = ("decode", "prefill", "eviction", "check")
COPY = "copy"
SIZES = {
    "block_size": "tokens in a block",
    "requests": "that decode",
    "kv_len": "tokens each holds",
    "prompt_len": "tokens in the prefill group",
    "copy_mib": "size of the copied buffer",
}
DEVICES = {
    "cpu": {
        "block_size": 32,
        "requests": 8,
        "kv_len": 2048,
        "prompt_len": 2048,
        "copy_mib": 128,
    },
    "cuda": {
        "block_size": 16,
        "requests": 64,
        "kv_len": 4096,
        "prompt_len": 4096,
        "copy_mib": 2048,
    },
}
"""Sizes that a device is measured with unless told otherwise."""

SCORE_TOLERANCE = 1e-3
"""Of scores that add up to one per query head and row; a wrong one is far off."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape",
        choices=("smollm2", "8b"),
        help="heads and head size of SmolLM2-135M, or of an 8B model (default: the "
        "first, on a GPU the second)",
    )
    for name in ("query-heads", "kv-heads", "head-size", "layers"):
        parser.add_argument(f"--{name}", type=int, help="instead of the shape's")
    parser.add_argument("--dtype", default="bfloat16", help="of the cache")
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="cuda: timed by events, nothing in the L2, beside FlashAttention",
    )
    parser.add_argument(
        "--impl", choices=("cuda", "triton"), default="cuda", help="on a GPU"
    )
    parser.add_argument(
        "--groups",
        nargs="+",
        choices=GROUPS,
        help="what to time (default: all; the check is of the CPU's operators only)",
    )
    for name, text in SIZES.items():
        here, there = (DEVICES[device][name] for device in ("cpu", "cuda"))
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            help=f"{text} (default: {here}, {there} on a GPU)",
        )
    parser.add_argument(
        "--evict-requests", type=int, default=32, help="that evict in the same step"
    )
    parser.add_argument(
        "--budget-tokens", type=int, default=1024, help="tokens an eviction leaves"
    )
    parser.add_argument("--repeats", type=int, default=7)
    common.add_result_options(parser)
    return parser


def apply_device(args: argparse.Namespace) -> None:
    """Fill in what the options left open. Mutates `args`.

    Raises:
        UsageError: for a check on a GPU, where the operator tests are the check.
    """
    on_gpu = args.device == "cuda"
    if args.groups is None:
        args.groups = [name for name in GROUPS if not (on_gpu and name == "check")]
    elif on_gpu and "check" in args.groups:
        raise UsageError("--groups check is of the CPU's operators only")
    args.shape = args.shape or ("8b" if on_gpu else "smollm2")
    for name, size in DEVICES[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, size)


def make_shape(args: argparse.Namespace) -> Any:
    """The preset with what the flags change.

    Raises:
        UsageError: if query heads are no multiple of KV heads.
    """
    import dataclasses

    from op_cases import SHAPES

    flags = {
        "num_query_heads": args.query_heads,
        "num_kv_heads": args.kv_heads,
        "head_size": args.head_size,
        "num_layers": args.layers,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    shape = dataclasses.replace(SHAPES[args.shape], **given)
    if shape.num_query_heads % shape.num_kv_heads:
        raise UsageError(
            f"{shape.num_query_heads} query heads cannot share "
            f"{shape.num_kv_heads} KV heads evenly"
        )
    return shape


def make_copy(mib: int, device: str) -> tuple[Callable[[], object], int]:
    """A copy that no cache holds, and the bytes it reads and writes."""
    import torch

    source = torch.ones(mib * 2**20, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.numel()


def time_group(
    title: str,
    cases: list[Case],
    repeats: int,
    copy: tuple[Callable[[], object], int],
    time_call: Callable[[Callable[[], object]], float] = common.time_on_cpu,
) -> list[dict[str, Any]]:
    """Rows of the result for cases that are measured in turns."""
    functions = {COPY: copy[0], **{case.name: case.run for case in cases}}
    seconds = common.measure_interleaved(functions, repeats, title, time_call)
    copy_rate = copy[1] / common.summarize(seconds[COPY])["median"]
    rows: list[dict[str, Any]] = []
    for case in cases:
        time = common.summarize(seconds[case.name])
        rate = case.num_bytes / time["median"]
        row = {
            "name": case.name,
            "ms": {key: 1e3 * value for key, value in time.items()},
            "mib": case.num_bytes / 2**20,
            "gb_per_s": rate / 1e9,
            "share_of_copy": rate / copy_rate,
            "copy_gb_per_s": copy_rate / 1e9,
            "baseline": case.baseline,
            "steps": case.steps,
            "ratio": None,
        }
        if case.baseline is not None:
            per_step = [value / case.steps for value in seconds[case.name]]
            row["ratio"] = common.compare(per_step, seconds[case.baseline])
        rows.append(row)
    return rows


def check_ops(args: argparse.Namespace, dtype: Any) -> list[dict[str, Any]]:
    """Each operator against its reference on a small cache: error and speed.

    Raises:
        RuntimeError: if one differs; its time would mean nothing.
    """
    import dataclasses

    import torch
    from op_cases import (
        CpuTarget,
        Rows,
        compact_all,
        make_batch,
        reset_all,
        select_all,
        tau_of,
    )

    shape = dataclasses.replace(make_shape(args), num_layers=2)
    size = args.block_size
    start = make_batch(shape, 2, 4 * size + 1, size, dtype, CpuTarget())
    keep = select_all(start, size)()
    slots = start.slots()[: 3 * size]

    def scoring(batch: Batch, impl: str) -> Callable[[], object]:
        tau = tau_of(size, batch.num_reqs, slice(None))
        return Rows(batch, size).score(tau, impl)

    def attending(batch: Batch, impl: str) -> Callable[[], object]:
        rows = Rows(batch, 1)
        run = rows.attend_scored(tau_of(1, batch.num_reqs, slice(None)), impl)
        return lambda: (run(), rows.output)[1]

    makers: dict[str, Callable[[Batch, str], Callable[[], object]]] = {
        "score_keys": scoring,
        "reset_slots": lambda batch, impl: reset_all(batch, slots, impl),
        "select_keep": lambda batch, impl: select_all(batch, size, impl),
        "compact_kv": lambda batch, impl: compact_all(batch, size, keep, impl),
        "paged_attention_scored": attending,
    }
    rows = []
    for name, make in makers.items():
        batches = {impl: start.clone() for impl in ("cpu", "reference")}
        runs = {impl: make(batch, impl) for impl, batch in batches.items()}
        results = {impl: run() for impl, run in runs.items()}
        error = _difference(batches["cpu"], batches["reference"])
        returned = [results[impl] for impl in ("cpu", "reference")]
        if isinstance(returned[0], torch.Tensor):
            got, want = (tensor.float() for tensor in returned)
            scale = 1 if want.dtype == torch.bool else max(1.0, float(want.abs().max()))
            eps = torch.finfo(dtype).eps if name == "paged_attention_scored" else 0
            difference = float((got - want).abs().max())
            if difference > 4 * eps * scale:
                raise RuntimeError(f"{name}: the result is off by {difference:.3g}")
        if error > SCORE_TOLERANCE:
            raise RuntimeError(f"{name}: scores differ by {error:.3g}")
        seconds = common.measure_interleaved(runs, args.repeats, f"check {name}")
        rows.append(
            {
                "name": name,
                "score_error": error,
                "cpu_ms": 1e3 * common.summarize(seconds["cpu"])["median"],
                "reference_ms": 1e3 * common.summarize(seconds["reference"])["median"],
                "speedup": common.compare(seconds["reference"], seconds["cpu"]),
            }
        )
    return rows


def _difference(got: Batch, want: Batch) -> float:
    """Largest difference of two scores.

    Raises:
        RuntimeError: if K, V or positions differ at all.
    """
    import torch

    for name in ("kv_cache", "position"):
        if not torch.equal(getattr(got, name), getattr(want, name)):
            raise RuntimeError(f"{name} differs from the reference")
    return float((got.score - want.score).abs().max())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All groups that were asked for."""
    import torch
    from op_cases import (
        CpuTarget,
        GpuTarget,
        decode_cases,
        eviction_cases,
        make_batch,
        prefill_cases,
    )

    from keyformer_vllm import ops
    from keyformer_vllm.ops.layout import check_layout

    dtype = getattr(torch, args.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"--dtype {args.dtype} is no torch dtype")
    shape = make_shape(args)
    on_gpu = args.device == "cuda"
    target = GpuTarget(args.impl, "cuda") if on_gpu else CpuTarget()
    layout = "nhd" if on_gpu else "vec"
    if on_gpu and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU, and torch sees none")
    try:
        ops.require_impl(target.impl)
        check_layout(layout, dtype.itemsize, args.block_size, shape.head_size)
    except (RuntimeError, ValueError) as error:
        raise UsageError(str(error)) from None
    torch.set_grad_enabled(False)
    copy = make_copy(args.copy_mib, args.device)
    time_call = common.GpuTimer() if on_gpu else common.time_on_cpu
    block_size, budget = args.block_size, args.budget_tokens
    first = args.kv_len - budget
    # name, requests, tokens of each, cases
    groups: list[tuple[str, int, int, Callable[[Batch], list[Case]]]] = [
        ("decode", args.requests, args.kv_len, decode_cases),
        ("prefill", 1, args.prompt_len, prefill_cases),
        (
            "eviction",
            args.evict_requests,
            budget + block_size,
            lambda batch: eviction_cases(batch, block_size, "one block each"),
        ),
    ]
    if first >= block_size:
        first -= first % block_size
        groups.append(
            (
                "eviction",
                args.requests,
                args.kv_len,
                lambda batch: eviction_cases(batch, first, "after the prompt"),
            )
        )
    rows: list[dict[str, Any]] = []
    for group, num_reqs, kv_len, make_cases in groups:
        if group not in args.groups:
            continue
        layers = shape.num_layers
        title = f"{group}: {num_reqs} x {kv_len} tokens x {layers} layers"
        common.say(title)
        batch = make_batch(shape, num_reqs, kv_len, block_size, dtype, target)
        found = time_group(title, make_cases(batch), args.repeats, copy, time_call)
        facts = {"group": group, "requests": num_reqs, "kv_len": kv_len}
        rows += [{**facts, **row} for row in found]
        del batch
        gc.collect()  # the cases' closures still hold the cache
        common.say(format_rows(found))
    checks = []
    if "check" in args.groups:
        checks = check_ops(args, dtype)
        common.say(format_checks(checks))
    judged = bars.judge_ops(rows) if on_gpu else []
    if judged:
        common.say(bars.format_bars(judged))
    return {
        "benchmark": "ops",
        "machine": common.describe_machine(),
        "isa": ops.cpu.active_isa(),
        "settings": common.settings_of(args),
        "shape": vars(shape) | {"layout": target.layout(shape, dtype, block_size)},
        "rows": rows,
        "bars": judged,
        "checks": checks,
    }


def format_rows(rows: list[dict[str, Any]]) -> str:
    columns = ("call", "ms", "MiB", "GB/s", "of copy", "steps", "ratio", "min", "max")
    return common.format_table(
        columns,
        [
            (
                row["name"],
                row["ms"]["median"],
                row["mib"],
                row["gb_per_s"],
                row["share_of_copy"],
                row["steps"],
                *(
                    (None, None, None)
                    if row["ratio"] is None
                    else (row["ratio"][key] for key in ("median", "min", "max"))
                ),
            )
            for row in rows
        ],
    )


def format_checks(checks: list[dict[str, Any]]) -> str:
    columns = ("op", "score error", "cpu ms", "reference ms", "reference / cpu")
    return common.format_table(
        columns,
        [
            (
                check["name"],
                check["score_error"],
                check["cpu_ms"],
                check["reference_ms"],
                check["speedup"]["median"],
            )
            for check in checks
        ],
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Bandwidth of every call, beside what a copy reached at the same time."""
    rows = result["rows"][::-1]
    with common.drawing(path, 9, 1.2 + 0.34 * len(rows)) as (_, (axes,)):
        own = [row["baseline"] is not None for row in rows]
        axes.barh(
            range(len(rows)),
            [row["gb_per_s"] for row in rows],
            color=["tab:blue" if ours else "tab:gray" for ours in own],
        )
        axes.plot(
            [row["copy_gb_per_s"] for row in rows],
            range(len(rows)),
            "k|",
            markersize=14,
            label="copy, in the same run",
        )
        axes.set_yticks(
            range(len(rows)),
            [
                f"{row['group']}, {row['requests']} x {row['kv_len']}: {row['name']}"
                for row in rows
            ],
        )
        axes.set_xlabel("GB/s (bytes that have to move / median time)")
        axes.set_title(f"{result['settings']['shape']}, {result['machine']['cpu']}")
        axes.legend(loc="lower right")


def main() -> None:
    args = build_parser().parse_args()
    apply_device(args)
    common.check_result_options(args)
    common.set_environment()
    common.write_result(args, measure(args), draw)


if __name__ == "__main__":
    sys.exit(common.run_main(main))
