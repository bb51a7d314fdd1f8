# SPDX-License-Identifier: Apache-2.0
"""Running the scripts in `benchmarks/`, for their tests."""

import json
import subprocess
import sys
from pathlib import Path

import common

BENCHMARKS = Path(common.__file__).parent
PNG = b"\x89PNG\r\n\x1a\n"


def run_script(name, *arguments):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments],
        cwd=common.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def last_line(stdout):
    return json.loads(stdout.splitlines()[-1])
