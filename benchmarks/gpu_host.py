# SPDX-License-Identifier: Apache-2.0
"""What does this host have of what the GPU measurements need?

Shows a line per thing and fails if one is missing. A thing that only one part needs is
asked for only if that part is to run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import common

PARTS_OF_A_BUILD = ("install",)
PARTS_OF_A_TEST = ("ops-tests", "e2e", "sanitize")
PARTS_WITH_THE_MODEL = ("ample", "tight", "prefill-bound")


class MissingError(Exception):
    """Says what is missing and what to do about it."""


def find_module(name: str, distribution: str | None = None) -> str:
    """Version of an importable module.

    Raises:
        MissingError: if there is none.
    """
    if importlib.util.find_spec(name) is None:
        raise MissingError(f"no module {name}; put its wheel into --wheels")
    try:
        return metadata.version(distribution or name)
    except metadata.PackageNotFoundError:
        return "without metadata"


def find_setuptools() -> str:
    version = find_module("setuptools")
    if int(version.split(".")[0]) < 77:
        raise MissingError(f"setuptools {version} is older than 77; see --wheels")
    return version


def find_program(name: str, *flags: str) -> str:
    """Last line of what a program says of itself.

    Raises:
        MissingError: if it is not on the path.
    """
    path = shutil.which(name)
    if path is None:
        raise MissingError(f"{name} is not on the path")
    done = subprocess.run([path, *flags], capture_output=True, text=True, check=False)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return f"{path}: {lines[-1] if lines else ''}"


def find_nvcc() -> str:
    home = os.environ.get("CUDA_HOME")
    return find_program(str(Path(home) / "bin" / "nvcc") if home else "nvcc", "-V")


def find_python_headers() -> str:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        raise MissingError(f"no {header}")
    return str(header)


def find_torch() -> str:
    found = find_module("torch")
    import torch

    if torch.version.cuda is None:
        raise MissingError(f"torch {found} is a CPU build")
    return f"{found}, CUDA {torch.version.cuda}"


def find_gpu() -> str:
    if importlib.util.find_spec("torch") is None:
        raise MissingError("no torch to look with")
    import torch

    if not torch.cuda.is_available():
        raise MissingError("torch sees no GPU")
    facts = torch.cuda.get_device_properties(0)
    memory = facts.total_memory / 2**30
    return f"{facts.name}, sm_{facts.major}{facts.minor}, {memory:.0f} GiB"


def find_model() -> str:
    named = os.environ.get("LLAMA8B")
    if not named or not (Path(named) / "config.json").is_file():
        raise MissingError(f"LLAMA8B={named or ''} names no model folder")
    return named


CHECKS: dict[str, tuple[Callable[[], str], tuple[str, ...]]] = {
    "GPU": (find_gpu, ()),
    "torch": (find_torch, ()),
    "vLLM": (lambda: find_module("vllm"), ()),
    "tqdm": (lambda: find_module("tqdm"), ()),
    "pip": (lambda: find_module("pip"), PARTS_OF_A_BUILD),
    "setuptools": (find_setuptools, PARTS_OF_A_BUILD),
    "g++": (lambda: find_program("g++", "-dumpversion"), PARTS_OF_A_BUILD),
    "nvcc": (find_nvcc, PARTS_OF_A_BUILD),
    "Python.h": (find_python_headers, PARTS_OF_A_BUILD),
    "pytest": (lambda: find_module("pytest"), PARTS_OF_A_TEST),
    "compute-sanitizer": (
        lambda: find_program("compute-sanitizer", "--version"),
        ("sanitize",),
    ),
    "8B-shaped model": (find_model, PARTS_WITH_THE_MODEL),
}
"""Name to what looks for it, and the parts that need it; none: all do."""


def check_host(parts: set[str]) -> list[dict[str, str | bool]]:
    """A row for each thing that one of `parts` needs."""
    rows: list[dict[str, str | bool]] = []
    for name, (find, needed) in CHECKS.items():
        if needed and not parts.intersection(needed):
            continue
        try:
            found, detail = True, find()
        except MissingError as error:
            found, detail = False, str(error)
        rows.append({"name": name, "found": found, "detail": detail})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="*", default=[], help="that are to run")
    parser.set_defaults(plot=None)
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    rows = check_host(set(args.parts))
    shown = [
        (row["name"], "yes" if row["found"] else "MISSING", row["detail"])
        for row in rows
    ]
    common.say(common.format_table(("what", "found", ""), shown))
    result = {"python": sys.version.split()[0], "checks": rows}
    common.write_result(args, result, draw=lambda *_: None)
    return 0 if all(row["found"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
