# SPDX-License-Identifier: Apache-2.0
"""bench_serving: what it refuses, sums up and leaves behind; one small run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import common
import pytest
import serving

from tests.bench_scripts import BENCHMARKS, PNG, last_line


def run_serving(*options):
    return subprocess.run(
        [str(BENCHMARKS / "bench_serving.sh"), *options],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )


def test_serving_help_names_every_option():
    done = run_serving("--help")
    assert done.returncode == 0 and done.stderr == ""
    text = (BENCHMARKS / "bench_serving.sh").read_text()
    branches = re.findall(r"^  (--[a-z-]+(?: \| --[a-z-]+)*)\)", text, re.M)
    options = {option for branch in branches for option in branch.split(" | ")}
    assert {"--arm", "--pool", "--output", "--plot"} <= options
    shown = set(re.findall(r"^  (--[a-z-]+)", done.stdout, re.M))
    assert shown == options | {"--help"}


@pytest.mark.parametrize(
    "options, named",
    [
        (("--pool", "1"), "--pool 1 is not at least 2"),
        (("--rounds", "none"), "--rounds none is not a number above 0"),
        (("--rounds",), "--rounds: unknown, or its value is missing"),
        (("--colour", "red"), "--colour: unknown"),
        (("--arm", "keyformer:2.5"), "--arm keyformer:2.5"),
        (("--arm", "off", "--arm", "off"), "named twice"),
        (("--output", "/nowhere/at/all.json"), "the folder of /nowhere/at/all.json"),
        (("--model", "/nowhere"), "/nowhere holds no model"),
    ],
)
def test_serving_refuses_before_a_server_starts(options, named):
    done = run_serving(*options)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and named in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_arms_become_flags_of_the_server():
    assert serving.server_flags("off") == serving.server_flags("stock") == []
    arm = "keyformer:0.5:score_mode=fused,min_tokens=64"
    assert serving.server_flags(arm) == [
        *("--kv-policy=keyformer", "--kv-budget=0.5"),
        *("--kv-score-mode=fused", "--kv-min-tokens=64"),
    ]


def test_a_metric_is_summed_and_never_made_up():
    text = '# HELP a b\na{x="1"} 2.0\na{x="2"} 1.0\nab 7\nb_total 3\n'
    assert serving.read_metric(text, "a") == 3
    assert serving.read_metric(text, "b_total") == 3
    with pytest.raises(common.UsageError, match="no metric b"):
        serving.read_metric(text, "b")


def write_runs(folder, **changes):
    """Two rounds of two arms; the second arm is faster by half and by all."""
    for number, base in ((1, 10.0), (2, 20.0)):
        for index, speed in enumerate((base, base * (1 + number / 2))):
            client = {
                "completed": 4,
                "failed": 0,
                "total_input_tokens": 40,
                "total_output_tokens": 80,
                "request_throughput": speed / 20,
                "output_throughput": speed,
                "max_concurrent_requests": 4,
                "median_ttft_ms": 100.0 * number,
                "p90_ttft_ms": 200.0,
                "median_itl_ms": 10.0,
                "p90_itl_ms": 20.0,
            }
            run = {
                "arm": ("off", "keyformer:0.5")[index],
                "client": client | changes,
                "peak_running": number + index,
                "preemptions": 1,
            }
            (folder / f"run-{number}-{index}.json").write_text(json.dumps(run))


def report_args(folder, *options):
    return serving.build_parser().parse_args(
        ["report", str(folder), "2", *options, "--", "off", "keyformer:0.5"]
    )


def test_rounds_of_servers_are_summed_up(tmp_path):
    write_runs(tmp_path)
    args = report_args(tmp_path, "--settings", "requests=4", "max_concurrency=null")
    result = serving.report(args)
    assert result["settings"] == {"requests": 4, "max_concurrency": None}
    off, kept = result["arms"]
    assert off["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    # 15 and 40 against 10 and 20.
    assert kept["tokens_per_s"] == {"median": 27.5, "min": 15.0, "max": 40.0}
    assert kept["ratio"] == {"median": 27.5 / 15, "min": 1.5, "max": 2.0}
    assert kept["ttft_ms"] == {"median": 150.0, "p90": 200.0}
    assert (off["peak_running"], kept["peak_running"]) == (2, 3)
    assert kept["preemptions"] == 2 and kept["completed"] == 8
    serving.draw(result, tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes().startswith(PNG)


def test_failed_requests_are_no_result(tmp_path):
    write_runs(tmp_path, failed=1)
    with pytest.raises(common.UsageError, match="off: 2 requests failed"):
        serving.report(report_args(tmp_path))


@pytest.mark.slow
def test_servers_are_measured_and_stopped(tiny_model, tmp_path):
    done = run_serving(
        *("--model", str(tiny_model("llama-4-2")), "--dtype", "float32"),
        # Seconds of steps: the metrics must be read while requests run, also where the
        # server hands out the first tokens late.
        *("--rounds", "1", "--requests", "8", "--prompt-len", "128"),
        *("--new-tokens", "1408", "--pool", "2", "--logs", str(tmp_path)),
        *("--arm", "stock", "--arm", "keyformer:0.25:min_tokens=32"),
        *("--output", str(tmp_path / "s.json")),
    )
    assert done.returncode == 0, done.stderr
    result = last_line(done.stdout)
    assert result == common.read_result(tmp_path / "s.json")
    assert result["settings"]["num_blocks"] == 2 * 48 + 1
    stock, kept = result["arms"]
    for arm in (stock, kept):
        assert (arm["completed"], arm["output_tokens"]) == (8, 8 * 1408)
        assert 1 <= arm["peak_running"] <= 8
    assert "KV policy keyformer" in (tmp_path / "server-1-1.log").read_text()
    assert "KV policy" not in (tmp_path / "server-1-0.log").read_text()
    for log in tmp_path.glob("server-*.log"):
        assert "Application shutdown complete" in log.read_text()


def processes_about(text):
    """Ids of the processes with this in their command line; zombies have none."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text in (entry / "cmdline").read_bytes().decode(errors="replace"):
                found.append(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_script_leaves_no_server(tiny_model, tmp_path, number):
    # A name that no other process has in its command line.
    model = tmp_path / "model"
    model.symlink_to(tiny_model("llama-4-2"))
    with open(tmp_path / "stderr", "wb") as stderr:
        script = subprocess.Popen(
            [str(BENCHMARKS / "bench_serving.sh"), "--model", str(model)],
            env={**os.environ, "PYTHON": sys.executable},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            # As from a terminal: in the background SIGINT would be ignored for good.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def servers():
        return processes_about(f"serve\0{model}")

    try:
        deadline = time.monotonic() + 120
        while not servers():
            assert script.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        script.send_signal(number)
        assert script.wait(90) == 128 + number
    finally:
        script.kill()
    assert servers() == []
    assert b"round 1 of 2: off" in (tmp_path / "stderr").read_bytes()
