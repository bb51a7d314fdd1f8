# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: interleaved timing, statistics, tables and results.

Imports neither torch nor vLLM, so that a script can set the environment first.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class UsageError(ValueError):
    """A mistake of whoever called the script; shown as one line."""


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """Options that every benchmark has."""
    parser.add_argument("--output", type=Path, help="also write the JSON result here")
    parser.add_argument("--plot", type=Path, help="draw the result as this PNG file")


def set_environment() -> None:
    """Defaults of a measurement; call it before torch or vLLM is imported.

    On small shared machines a second OpenMP thread often costs more than it gives:
    its barriers spin.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def describe_machine() -> dict[str, Any]:
    """What has to stand beside a published number."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    versions = {}
    for name in ("torch", "vllm"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    gpu: list[str] = []
    if shutil.which("nvidia-smi"):
        gpu = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.splitlines()
    return {
        "cpu": model,
        **({"gpu": gpu[0]} if gpu else {}),
        "cores": len(os.sched_getaffinity(0)),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        "commit": commit or "unknown",
        "date": datetime.date.today().isoformat(),
        **versions,
    }


def time_on_cpu(function: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


class GpuTimer:
    """Seconds that the work of a call takes on a GPU that has nothing of it in its L2.

    Between two events; before the first, the GPU is kept busy, so that all of the
    work is there when it gets to it.
    """

    def __init__(self) -> None:
        import torch

        size = 4 * torch.cuda.get_device_properties(0).L2_cache_size
        self._other = torch.empty(size, dtype=torch.int8, device="cuda")

    def __call__(self, function: Callable[[], object]) -> float:
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self._other.zero_()
        torch.cuda._sleep(4_000_000)  # cycles, about 2 ms
        start.record()
        function()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def measure_interleaved(
    functions: Mapping[str, Callable[[], object]],
    repeats: int,
    description: str,
    time_call: Callable[[Callable[[], object]], float] = time_on_cpu,
) -> dict[str, list[float]]:
    """Time functions in turns (A B C A B C ...), after one warm-up turn.

    Machines that are shared change speed within minutes; taking turns lets every
    function see the same good and bad times.

    Args:
        time_call: calls a function and says how many seconds it took.

    Returns:
        Name to seconds, one per repeat.
    """
    for function in functions.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in show_progress(range(repeats), description):
        for name, function in functions.items():
            seconds[name].append(time_call(function))
    return seconds


def show_progress(items: Sequence[Any], description: str) -> Any:
    """`items` behind a progress bar on stderr; silent where that is no terminal."""
    from tqdm import tqdm

    return tqdm(items, desc=description, file=sys.stderr, disable=None, leave=False)


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest of one arm's rounds."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def compare(values: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Ratio of the medians, with the smallest and largest ratio within one round."""
    rounds = [a / b for a, b in zip(values, base, strict=True)]
    return {
        "median": statistics.median(values) / statistics.median(base),
        "min": min(rounds),
        "max": max(rounds),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = -int(-share * len(ordered) // 1)
    return ordered[min(max(rank, 1), len(ordered)) - 1]


def mean_with_interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and its 95 % interval (Student's t) over independent values, at least 5."""
    mean = statistics.fmean(values)
    free = len(values) - 1
    # The quantile of t from that of the normal distribution (Cornish-Fisher): within
    # 0.3 % from 4 degrees of freedom on, and without a library of statistics.
    z = statistics.NormalDist().inv_cdf(0.975)
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
    half = t * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def round_floats(value: Any, digits: int = 4) -> Any:
    """`value` with every float in it rounded to `digits` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {key: round_floats(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [round_floats(item, digits) for item in value]
    return value


def format_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown, aligned so that it also reads well on a terminal."""
    cells = [[_format_cell(cell) for cell in row] for row in rows]
    widths = [
        max(len(column), *(len(row[index]) for row in cells)) if cells else len(column)
        for index, column in enumerate(columns)
    ]
    lines = [columns, ["-" * width for width in widths], *cells]
    return "\n".join(
        "| "
        + " | ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in lines
    )


def read_result(path: Path) -> dict[str, Any]:
    """A result that `write_result` wrote.

    Raises:
        UsageError: naming the file, if it holds none.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} holds no result: {error}") from None
    if not isinstance(result, dict):
        raise UsageError(f"{path} holds no result")
    return result


def write_result(
    args: argparse.Namespace,
    result: dict[str, Any],
    draw: Callable[[dict[str, Any], Path], None],
) -> None:
    """Print the result as the last line of stdout; write and draw it if asked to."""
    line = json.dumps(round_floats(result))
    if args.output is not None:
        args.output.write_text(line + "\n", encoding="utf-8")
    if args.plot is not None:
        draw(json.loads(line), args.plot)
    print(line, flush=True)


def check_result_options(args: argparse.Namespace) -> None:
    """Find out before hours of work, not after, that nothing can be written.

    Raises:
        UsageError: if a folder or matplotlib is missing.
    """
    for path in (args.output, args.plot):
        if path is not None and not path.resolve().parent.is_dir():
            raise UsageError(f"the folder of {path} does not exist")
    if args.plot is not None:
        load_pyplot()


def load_pyplot() -> Any:
    """matplotlib.pyplot, drawing to files.

    Raises:
        UsageError: if matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise UsageError(
            "--plot needs matplotlib; run `pip install matplotlib` (extra `bench`)"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


@contextmanager
def drawing(
    path: Path, width: float, height: float, num_panels: int = 1
) -> Iterator[tuple[Any, list[Any]]]:
    """A figure that is saved when the block ends.

    Args:
        path: PNG file.
        width, height: in inches.
        num_panels: axes, one below the other.

    Returns:
        The figure and its axes, from top to bottom.
    """
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(
        *(num_panels, 1),
        figsize=(width, height),
        layout="constrained",
        squeeze=False,
    )
    yield figure, list(panels[:, 0])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the script was called with, as JSON values."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in ("output", "plot", "arm")
    }


def run_main(main: Callable[[], None]) -> int:
    """Exit status of a script; what the user got wrong is one line on stderr."""
    try:
        main()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def say(text: str) -> None:
    """A line for whoever watches; stdout is kept for the result."""
    print(text, file=sys.stderr, flush=True)


def _format_cell(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 100 else f"{cell:.0f}"
    return str(cell)
