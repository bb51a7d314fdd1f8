# SPDX-License-Identifier: Apache-2.0
"""The Triton operators on the cases of the others, interpreted.

The interpreter must be chosen before anything imports triton, and not for the engines
that other tests start: hence a process of its own. It shows what the kernels compute,
not that they compile for a GPU.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Of the score cases a few: the interpreter takes seconds for each.
SCORE_CASES = (
    "noise_equals or accumulate or nan_in or a_sink or bias or without_scored"
    " or query_rows or (match_fp64 and d80-b16 and (plain or noise-tau-cap))"
    " or (match_fp64 and d128-b16 and noise-tau-cap) or places_change"
)


@pytest.mark.slow  # interpreted
@pytest.mark.parametrize(
    ("file", "cases", "at_least"),
    [
        ("test_compact_kv.py", "triton and not 4threads", 14),
        ("test_select_keep.py", "triton and not 4threads", 14),
        ("test_reset_slots.py", "triton and not 4threads", 4),
        ("test_renumber_slots.py", "triton and not 4threads", 3),
        ("test_score_keys.py", f"triton and not 4threads and ({SCORE_CASES})", 13),
    ],
)
def test_interpreted(file, cases, at_least):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/ops/{file}", "-k", cases, "-p", "no:xdist"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= at_least, done.stdout[-2000:]
