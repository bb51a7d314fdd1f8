# SPDX-License-Identifier: Apache-2.0
"""What setup.py refuses before it builds anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KNOWN = "80;86;87;88;89;90;90a;100;100a;103;103a;110;110a;120;120a;121;121a"


def ask_for_name(archs: str | None) -> subprocess.CompletedProcess[str]:
    """Run setup.py for the package's name: it is read as for a build, builds nothing.

    Args:
        archs: KEYFORMER_CUDA_ARCHS; None: not set.
    """
    env = {k: v for k, v in os.environ.items() if k != "KEYFORMER_CUDA_ARCHS"}
    if archs is not None:
        env["KEYFORMER_CUDA_ARCHS"] = archs
    command = [sys.executable, "setup.py", "--name"]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("archs", "unknown"),
    [
        ("75", "75"),  # nvcc knows it, the kernels need more
        ("80;999", "999"),
        ("sm_90a", "sm_90a"),
        ("9.0", "9.0"),
        ("80,90a", "80,90a"),
        ("80; 90a", " 90a"),
        ("90b;80", "90b"),
    ],
)
def test_an_unknown_architecture_is_refused_in_one_line(archs, unknown):
    done = ask_for_name(archs)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert f"KEYFORMER_CUDA_ARCHS={archs!r}" in line
    assert f"no architecture {unknown!r}" in line
    assert f"any of {KNOWN}, or nothing" in line


@pytest.mark.parametrize("archs", [None, "", "90a", "80;90a;", KNOWN])
def test_known_architectures_are_not_refused(archs):
    done = ask_for_name(archs)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "keyformer-vllm"


def test_the_compiler_knows_what_is_allowed(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    if int(re.search(r"release (\d+)\.", version.stdout)[1]) < 13:
        pytest.skip("nvcc is older than some of the architectures")
    source = tmp_path / "empty.cu"
    source.write_text("")
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in KNOWN.split(";")]
    command = [nvcc, *codes, "--dryrun", "-c", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
