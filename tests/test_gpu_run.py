# SPDX-License-Identifier: Apache-2.0
"""gpu_run: parts that fail, hang or leave children; what it shows and leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import bars
import common
import gpu_host
import gpu_run
import pytest

from tests.bench_scripts import BENCHMARKS

SHELL = BENCHMARKS / "gpu_run.sh"


def run_shell(*options, **environment):
    return subprocess.run(
        [str(SHELL), *options],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def python(code):
    return [sys.executable, "-c", textwrap.dedent(code)]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


HANGS = """
    import pathlib, subprocess, sys, time
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
    child += "print('up', flush=True); time.sleep(600)"
    made = subprocess.Popen(
        [sys.executable, "-c", child], start_new_session=True, stdout=subprocess.PIPE
    )
    made.stdout.readline()
    pathlib.Path(sys.argv[1]).write_text(str(made.pid))
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def fake_run(tmp_path_factory):
    """Fake parts in a process of their own, which adopts what they leave behind."""
    folder = tmp_path_factory.mktemp("parts")
    code = f"""
        import json, pathlib, sys
        sys.path.insert(0, {str(BENCHMARKS)!r})
        from part_runner import Part, adopt_orphans, run_parts, summary
        here, python = pathlib.Path({str(folder)!r}), sys.executable
        hangs = [python, "-c", {textwrap.dedent(HANGS)!r}]
        write = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{{}}')"
        parts = [
            Part("fails", "", 60, [[python, "-c", "print('why'); exit(3)"],
                                   [python, "-c", "print('never')"]]),
            Part("hangs", "", 2, [[*hangs, str(here / "hangs.pid"), "600"]]),
            Part("leaves", "", 60, [[*hangs, str(here / "leaves.pid"), "0"]]),
            Part("missing", "", 60, [["no-such-program"]]),
            Part("forgets", "", 60, [[python, "-c", ""]], result=here / "f.json"),
            Part("works", "", 60, [[python, "-c", write, str(here / "w.json")]],
                 result=here / "w.json"),
            Part("variable", "", 60,
                 [[python, "-c", "import os; exit(int(os.environ['CODE']))"]],
                 {{"CODE": "7"}}),
        ]
        too_long = [
            Part("long", "", 60, [[python, "-c", "import time; time.sleep(600)"]]),
            Part("late", "", 60, [[python, "-c", ""]]),
        ]
        adopt_orphans()
        outcomes = [*run_parts(parts, 60, here, here)]
        outcomes += run_parts(too_long, 1.0, here, here)
        print(json.dumps(summary(outcomes)))
    """
    done = subprocess.run(
        python(code), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    return folder, {one["name"]: one for one in outcomes}


def test_a_part_that_fails_is_noted_and_the_others_run(fake_run):
    _, outcomes = fake_run
    assert {name: one["status"] for name, one in outcomes.items()} == {
        "fails": "failed",
        "hangs": "timed out",
        "leaves": "ok",
        "missing": "failed",
        "forgets": "failed",
        "works": "ok",
        "variable": "failed",
        "long": "timed out",
        "late": "not run",
    }
    assert "status 3" in outcomes["fails"]["reason"]
    assert outcomes["fails"]["tail"][-1] == "why", "the second command is not run"
    assert "no-such-program" in outcomes["missing"]["reason"]
    assert "f.json" in outcomes["forgets"]["reason"]
    assert outcomes["works"]["tail"] == []


@pytest.mark.parametrize("name", ["hangs", "leaves"])
def test_children_in_sessions_of_their_own_are_killed(fake_run, name):
    """They ignore SIGTERM too."""
    folder, outcomes = fake_run
    assert not is_alive(int((folder / f"{name}.pid").read_text()))
    assert outcomes[name]["seconds"] < 30


def test_the_total_limit_holds(fake_run):
    folder, outcomes = fake_run
    long, late = outcomes["long"], outcomes["late"]
    assert (long["status"], late["status"]) == ("timed out", "not run")
    assert long["limit"] <= 1.0
    assert "1 s for all parts" in late["reason"]
    assert not (folder / "late.log").exists()


def test_an_environment_reaches_the_part(fake_run):
    assert "status 7" in fake_run[1]["variable"]["reason"]


# The script


@pytest.mark.parametrize("path", [SHELL, common.ROOT / ".ci" / "gpu_ops.sh"])
def test_scripts_are_executable_and_parse(path):
    assert os.access(path, os.X_OK)
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "set -euo pipefail" in path.read_text()


def test_dry_run_shows_every_command_and_runs_none(tmp_path):
    output = tmp_path / "out"
    options = ("--output", str(output), "--dry-run", "--parts", *gpu_run.PARTS)
    done = run_shell(*options)
    assert done.returncode == 0, done.stderr
    for name, (question, _) in gpu_run.PARTS.items():
        assert f"{name}, " in done.stdout and question in done.stdout
    assert "--no-build-isolation --target" in done.stdout
    assert not output.exists()


def test_the_environment_file_is_read(tmp_path):
    (tmp_path / "env.sh").write_text(
        f"export PYTHONPATH={tmp_path}/vllm${{PYTHONPATH:+:$PYTHONPATH}} X=$UNSET\n"
    )
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "sitecustomize.py").write_text("print('found')\n")
    done = run_shell(
        "--vllm-env", str(tmp_path / "env.sh"), "--output", "o", "--dry-run"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("found\n")


def test_a_missing_environment_file_is_one_line(tmp_path):
    done = run_shell("--vllm-env", str(tmp_path / "none"), "--output", str(tmp_path))
    assert done.returncode == 2 and done.stderr.startswith("error: --vllm-env")


def test_default_parts_fit_into_nine_minutes():
    assert gpu_run.TOTAL_SECONDS < 9 * 60
    assert set(gpu_run.DEFAULT_PARTS) <= set(gpu_run.PARTS)
    args = gpu_run.build_parser().parse_args(["--output", "o"])
    assert args.seconds == gpu_run.TOTAL_SECONDS


def test_wheels_are_unpacked_without_pip(tmp_path):
    with zipfile.ZipFile(tmp_path / "thing-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing.py", "x = 1\n")
    assert gpu_run.unpack_wheels(tmp_path, tmp_path / "site") == [
        "thing-1-py3-none-any.whl"
    ]
    assert (tmp_path / "site" / "thing.py").is_file()
    with pytest.raises(common.UsageError, match="holds no wheel"):
        gpu_run.unpack_wheels(tmp_path / "site", tmp_path)


def test_a_host_without_a_gpu_says_so_and_the_run_fails(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    options = ("--output", str(tmp_path), "--parts", "host", "ops-tests")
    done = run_shell(*options)
    assert done.returncode == 1
    result = common.read_result(tmp_path / "gpu_run.json")
    assert [part["status"] for part in result["parts"]] == ["failed", "failed"]
    checks = common.read_result(tmp_path / "host.json")["checks"]
    found = {row["name"]: row for row in checks}
    assert found["GPU"]["detail"] == "torch sees no GPU"
    assert found["pytest"]["found"] and "nvcc" not in found
    assert "torch sees no GPU here" in "\n".join(result["parts"][1]["tail"])
    parts, judged = done.stdout.split("\n\n")
    assert [line.split("|")[1].strip() for line in parts.splitlines()[2:]] == [
        *("host", "ops-tests")
    ]
    assert judged.count("not measured") == len(bars.BARS)


def test_bars_of_the_parts_that_ran_are_collected(tmp_path):
    args = gpu_run.build_parser().parse_args(["--output", str(tmp_path)])
    (tmp_path / "ample.json").write_text(
        json.dumps({"points": [{"bars": [{"source": "gpu-ample", "verdict": "met"}]}]})
    )
    rows = gpu_run.collect_bars(args)
    found = [row["verdict"] for row in rows if row["source"] == "gpu-ample"]
    assert found == ["met"]
    others = {row["verdict"] for row in rows if row["source"] != "gpu-ample"}
    assert others == {"not measured"}


def test_every_part_that_a_check_names_exists():
    named = {part for _, parts in gpu_host.CHECKS.values() for part in parts}
    assert named <= set(gpu_run.PARTS)
