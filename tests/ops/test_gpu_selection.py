# SPDX-License-Identifier: Apache-2.0
"""What .ci/gpu_ops.sh runs on a GPU: every operator, and nothing passes without one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = (
    "compact_kv",
    "paged_attention_scored",
    "renumber_slots",
    "reset_slots",
    "score_keys",
    "select_keep",
)
# `make test` exports the Python that environments are made with.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHON"}


@pytest.mark.parametrize(("mode", "at_most"), [("", 10**6), ("sanitize", 150)])
def test_selection_reaches_every_operator(mode, at_most, tmp_path):
    """The script with a Python that sees a GPU, but only lists the tests."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && exit 0\n'
        f'exec {sys.executable} "$@" --collect-only\n'
    )
    sanitizer = tmp_path / "bin" / "compute-sanitizer"
    sanitizer.write_text(
        '#!/bin/sh\n[ "$2" = memcheck ] || exit 0\nshift 6\nexec "$@"\n'
    )
    for path in (python, sanitizer):
        path.chmod(0o755)
    search = f"{python.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [".ci/gpu_ops.sh", *([mode] if mode else [])],
        cwd=ROOT,
        env={**ENVIRONMENT, "VENV": str(tmp_path), "PATH": search},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    listed = set(re.findall(r"^tests/ops/test_\S+", done.stdout, re.MULTILINE))
    files = {Path(name.split("::")[0]).stem for name in listed}
    assert {f"test_{name}" for name in OPERATORS} <= files
    assert all("cuda" in name or "triton" in name or not mode for name in listed)
    assert len(listed) <= at_most


def test_without_a_gpu_it_fails():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = subprocess.run(
        [".ci/gpu_ops.sh"],
        cwd=ROOT,
        env={**ENVIRONMENT, "VENV": str(Path(sys.executable).parent.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "gpu_ops: torch sees no GPU here\n"
