# SPDX-License-Identifier: Apache-2.0
"""Everything that wants measuring on a GPU, in parts that each have a time limit.

Made for a bare host without a network that has an offline vLLM on its PYTHONPATH. A
part that fails or hangs is noted and the others still run; all of them together stay
within --seconds. Results are JSON files in --output, and a table comes last. The exit
status is 0 only if every part is ok.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bars
import common
from common import ROOT, UsageError
from part_runner import OK, Outcome, Part, adopt_orphans, run_parts, summary

PARTS = {
    "host": ("is what is needed there?", 40),
    "install": ("does it build, and does vLLM find its entry points?", 150),
    "ops-tests": ("do the kernels agree with their references?", 100),
    "bench-ops": ("how fast is each kernel, beside vLLM's attention?", 80),
    "ample": ("room for all: is a decode step shorter?", 210),
    "tight": ("a small pool: more requests, more tokens per second?", 300),
    "prefill-bound": ("long prompts, short answers: what do scores cost?", 300),
    "e2e": ("does the engine attend to what it kept and nothing else?", 420),
    "sanitize": ("does compute-sanitizer find anything in the kernels?", 420),
}
"""Name to the question it answers and its limit in seconds, in the order of running."""

DEFAULT_PARTS = ("host", "install", "ops-tests", "bench-ops", "ample", "tight")
CROSSOVER_PARTS = ("ample", "tight", "prefill-bound")
JUDGED_PARTS = {
    "bench-ops": "bench_ops",
    **{name: f"gpu-{name}" for name in CROSSOVER_PARTS},
}
"""Part to the source of its bars."""

TOTAL_SECONDS = 520.0

_COPY_BACK = """
import pathlib, shutil, sys
site, root = map(pathlib.Path, sys.argv[1:])
built = list((site / 'keyformer_vllm').glob('_C*.so'))
assert any(path.name.startswith('_C_cuda') for path in built), f'built only {built}'
for path in built:
    print(shutil.copy(path, root / 'keyformer_vllm'))
"""
"""Tests import the package of the checkout, so it needs what was built."""

_FIND_ENTRY_POINT = """
from importlib.metadata import entry_points
from keyformer_vllm import ops
(found,) = entry_points(group='vllm.general_plugins', name='keyformer')
print(found, found.load())
ops.require_impl('cuda')
"""


def build_parser() -> argparse.ArgumentParser:
    listed = "\n".join(
        f"  {name:<14} {question} ({seconds} s)"
        for name, (question, seconds) in PARTS.items()
    )
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nparts:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for results and logs"
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        help="folder of wheels to unpack for what the host lacks: pytest, pluggy, "
        "iniconfig, and pip or setuptools if need be",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(DEFAULT_PARTS),
        help=f"default: {' '.join(DEFAULT_PARTS)}",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=TOTAL_SECONDS,
        help="for all parts together (default: %(default)g)",
    )
    parser.add_argument(
        "--cuda-archs",
        default="90a",
        help="architectures to build for (default: %(default)s)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show the commands and run nothing"
    )
    return parser


def make_parts(args: argparse.Namespace) -> list[Part]:
    """The parts asked for, in the order of `PARTS`; paths in `args` are absolute."""
    python, site = sys.executable, str(args.output / "site")
    paths = [site, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "PYTHON": python,
        "PYTHONPATH": os.pathsep.join(paths),
        "KEYFORMER_CUDA_ARCHS": args.cuda_archs,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INDEX": "1",
    }
    pip = [python, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    gpu_ops = str(ROOT / ".ci" / "gpu_ops.sh")

    def script(name: str, part: str, *options: str) -> list[str]:
        output = ["--output", str(result_of(args, part))]
        return [python, str(ROOT / "benchmarks" / name), *output, *options]

    commands: dict[str, list[list[str]]] = {
        "host": [script("gpu_host.py", "host", "--parts", *args.parts)],
        "install": [
            [*pip, "--target", site, "--upgrade", str(ROOT)],
            [python, "-c", _COPY_BACK, site, str(ROOT)],
            [python, "-c", _FIND_ENTRY_POINT],
        ],
        "ops-tests": [[gpu_ops]],
        "bench-ops": [script("bench_ops.py", "bench-ops", "--device", "cuda")],
        "e2e": [[gpu_ops, "engine"]],
        "sanitize": [[gpu_ops, "sanitize"]],
    }
    for name in CROSSOVER_PARTS:
        # Its weights are random, and every arm has a process of its own.
        options = ["--preset", f"gpu-{name}", "--model", os.environ.get("LLAMA8B", "")]
        commands[name] = [script("bench_crossover.py", name, *options)]
    return [
        Part(
            name,
            question,
            seconds,
            commands[name],
            environment,
            result_of(args, name) if "--output" in commands[name][0] else None,
        )
        for name, (question, seconds) in PARTS.items()
        if name in args.parts
    ]


def result_of(args: argparse.Namespace, part: str) -> Path:
    """The JSON file that a part writes."""
    folder: Path = args.output
    return folder / f"{part}.json"


def unpack_wheels(wheels: Path, site: Path) -> list[str]:
    """Unpack wheels into `site`, which needs no pip; their names.

    Raises:
        UsageError: if there is none.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise UsageError(f"--wheels {wheels} holds no wheel")
    for file in files:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(site)
    return [file.name for file in files]


def format_parts(outcomes: Sequence[Outcome]) -> str:
    columns = ("part", "status", "s", "limit", "reason")
    rows = [
        (one.name, one.status, one.seconds, one.limit, one.reason) for one in outcomes
    ]
    return common.format_table(columns, rows)


def collect_bars(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What has to be reached, and what the parts that ran say of it."""
    rows: list[dict[str, Any]] = []
    for name, source in JUDGED_PARTS.items():
        path = result_of(args, name)
        result = common.read_result(path) if path.is_file() else {"bars": []}
        # bench_crossover judges point by point.
        parts = result.get("points", [result])
        rows += [row for one in parts for row in one["bars"]] or bars.not_measured(
            source
        )
    return rows


def show_commands(parts: Sequence[Part]) -> None:
    for part in parts:
        print(f"{part.name}, {part.seconds} s: {part.question}")
        for command in part.commands:
            print("  " + shlex.join(command))


def run(args: argparse.Namespace) -> bool:
    """Run the parts; whether all are ok."""
    args.output.mkdir(parents=True, exist_ok=True)
    # What an earlier run left would be taken for this one's.
    for name in PARTS:
        result_of(args, name).unlink(missing_ok=True)
    found: dict[str, Any] = {
        "benchmark": "gpu_run",
        "machine": common.describe_machine(),
        "settings": common.settings_of(args),
        "wheels": [],
        "parts": [],
        "bars": collect_bars(args),
    }
    if args.wheels is not None:
        found["wheels"] = unpack_wheels(args.wheels, args.output / "site")
    adopt_orphans()
    outcomes: list[Outcome] = []
    parts = make_parts(args)
    common.say(f"{len(parts)} parts, at most {args.seconds:g} s")
    for outcome in run_parts(parts, args.seconds, args.output, ROOT):
        outcomes.append(outcome)
        common.say(f"{outcome.name}: {outcome.status} {outcome.reason}")
        for line in outcome.tail:
            common.say(f"    {line}")
        # After every part: whoever ends this script keeps what there is.
        found["parts"] = summary(outcomes)
        found["bars"] = collect_bars(args)
        text = json.dumps(common.round_floats(found))
        (args.output / "gpu_run.json").write_text(text + "\n", encoding="utf-8")
    print(f"{format_parts(outcomes)}\n\n{bars.format_bars(found['bars'])}", flush=True)
    return all(one.status == OK for one in outcomes)


def main() -> int:
    args = build_parser().parse_args()
    args.output = args.output.resolve()
    args.plot = None
    if args.dry_run:
        show_commands(make_parts(args))
        return 0
    return 0 if run(args) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        common.say(f"error: {error}")
        sys.exit(2)
