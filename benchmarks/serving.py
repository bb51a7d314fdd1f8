# SPDX-License-Identifier: Apache-2.0
"""The parts of bench_serving.sh that read and write: arms, metrics, results."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import common
from common import UsageError
from engines import parse_arm, parse_assignment
from served_arm import STOCK

from keyformer_vllm.demo.model import default_model_dir
from keyformer_vllm.demo.server import find_free_port

_SAMPLE_SECONDS = 0.25
_POLL_SECONDS = 0.5
_LOG_LINES = 30


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("model", help="print the default model folder")
    commands.add_parser("port", help="print a free port")
    check = commands.add_parser("check", help="refuse arms and files that cannot be")
    flags = commands.add_parser("flags", help="print the server's flags, one a line")
    flags.add_argument("arm")
    wait = commands.add_parser("wait", help="wait until a server answers")
    wait.add_argument("url")
    wait.add_argument("server", type=int, help="its process id")
    wait.add_argument("timeout", type=float, help="seconds")
    wait.add_argument("log", type=Path)
    drive = commands.add_parser("drive", help="run a client and watch the server")
    drive.add_argument("url")
    drive.add_argument("arm")
    drive.add_argument("folder", type=Path)
    drive.add_argument("name", help="of this run, ROUND-INDEX")
    drive.add_argument("client", nargs="+", help="its command")
    report = commands.add_parser("report", help="sum up all runs")
    report.add_argument("folder", type=Path)
    report.add_argument("rounds", type=int)
    report.add_argument("--settings", nargs="*", default=[], metavar="NAME=VALUE")
    for command in (check, report):
        command.add_argument("arms", nargs="+")
        common.add_result_options(command)
    return parser


def server_flags(arm: str) -> list[str]:
    """What `vllm serve` is told for an arm, spelled as in bench_decode.py.

    Raises:
        UsageError: for an arm that no server would take.
    """
    settings = None if arm == STOCK else parse_arm(arm)
    return [
        f"--kv-{name.replace('_', '-')}={value}"
        for name, value in (settings or {}).items()
    ]


def check(args: argparse.Namespace) -> None:
    """Find mistakes before the first server is up.

    Raises:
        UsageError: naming the arm or the file.
    """
    common.check_result_options(args)
    for arm in args.arms:
        server_flags(arm)
    if len(set(args.arms)) < len(args.arms):
        raise UsageError("an arm is named twice")


def wait_for_server(url: str, server: int, timeout: float, log: Path) -> None:
    """Return when `/health` answers.

    Raises:
        UsageError: with the end of the log, if the server ends or takes too long.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not _is_running(server):
            raise UsageError(f"the server ended\n{_tail(log)}")
        with contextlib.suppress(OSError):
            _get(f"{url}/health")
            return
        time.sleep(_POLL_SECONDS)
    raise UsageError(f"the server did not answer in {timeout:.0f} s\n{_tail(log)}")


def drive(args: argparse.Namespace) -> None:
    """Run the client; note what the server's metrics said meanwhile.

    Raises:
        UsageError: with the end of its output, if the client fails.
    """
    log = args.folder / f"client-{args.name}.log"
    running: list[float] = []
    with log.open("wb") as output:
        client = subprocess.Popen(
            args.client, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        while client.poll() is None:
            running.append(read_metric(_metrics(args.url), "vllm:num_requests_running"))
            time.sleep(_SAMPLE_SECONDS)
    if client.returncode:
        raise UsageError(f"the client ended with {client.returncode}\n{_tail(log)}")
    result = common.read_result(args.folder / f"client-{args.name}.json")
    found = {
        "arm": args.arm,
        "client": result,
        "peak_running": int(max(running)),
        "preemptions": int(
            read_metric(_metrics(args.url), "vllm:num_preemptions_total")
        ),
    }
    path = args.folder / f"run-{args.name}.json"
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")


def read_metric(text: str, name: str) -> float:
    """The sum of a Prometheus metric over its labels.

    Raises:
        UsageError: if it is not there; 0 would hide a change of its name.
    """
    found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.M)
    if not found:
        raise UsageError(f"the server has no metric {name}")
    return sum(map(float, found))


def report(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of every arm over all rounds; the first arm is the base.

    Raises:
        UsageError: if a run is missing or a request failed.
    """
    runs = [
        [
            common.read_result(args.folder / f"run-{number}-{index}.json")
            for number in range(1, args.rounds + 1)
        ]
        for index in range(len(args.arms))
    ]
    result = {
        "benchmark": "serving",
        "machine": common.describe_machine(),
        "settings": dict(parse_assignment("--settings", s) for s in args.settings),
        "arms": [describe_runs(of_arm, runs[0]) for of_arm in runs],
    }
    common.say(format_arms(result["arms"]))
    return result


def describe_runs(
    runs: list[dict[str, Any]], base: list[dict[str, Any]]
) -> dict[str, Any]:
    """One arm: medians over its rounds, or the largest where it is a peak.

    Raises:
        UsageError: if a request failed: a server that refuses some is fast.
    """

    def of(name: str, runs: list[dict[str, Any]] = runs) -> list[float]:
        return [run["client"][name] for run in runs]

    failed = sum(of("failed"))
    if failed:
        raise UsageError(f"{runs[0]['arm']}: {failed} requests failed; see --logs")
    return {
        "name": runs[0]["arm"],
        "rounds": len(runs),
        "completed": sum(of("completed")),
        "input_tokens": sum(of("total_input_tokens")),
        "output_tokens": sum(of("total_output_tokens")),
        "requests_per_s": common.summarize(of("request_throughput")),
        "tokens_per_s": common.summarize(of("output_throughput")),
        "ratio": common.compare(of("output_throughput"), of("output_throughput", base)),
        "ttft_ms": _latency(of, "ttft"),
        "itl_ms": _latency(of, "itl"),
        "peak_running": max(run["peak_running"] for run in runs),
        "peak_concurrency": max(of("max_concurrent_requests")),
        "preemptions": sum(run["preemptions"] for run in runs),
    }


def format_arms(arms: list[dict[str, Any]]) -> str:
    columns = (
        *("arm", "req/s", "tok/s", "ratio", "min", "max"),
        *("TTFT s", "p90", "ITL ms", "p90", "running", "in flight", "preempted"),
    )
    return common.format_table(
        columns,
        [
            (
                arm["name"],
                *(arm[name]["median"] for name in ("requests_per_s", "tokens_per_s")),
                *(arm["ratio"][name] for name in ("median", "min", "max")),
                *(arm["ttft_ms"][name] / 1e3 for name in ("median", "p90")),
                *(arm["itl_ms"][name] for name in ("median", "p90")),
                *(arm["peak_running"], arm["peak_concurrency"], arm["preemptions"]),
            )
            for arm in arms
        ],
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Output tokens per second of every arm, with the range of its rounds."""
    arms = result["arms"][::-1]
    with common.drawing(path, 8, 1.3 + 0.36 * len(arms)) as (_, (axes,)):
        speeds = [arm["tokens_per_s"] for arm in arms]
        reach = [
            [speed["median"] - speed["min"] for speed in speeds],
            [speed["max"] - speed["median"] for speed in speeds],
        ]
        axes.barh(
            [arm["name"] for arm in arms],
            [speed["median"] for speed in speeds],
            xerr=reach,
            capsize=3,
        )
        axes.set_xlabel("output tokens per second")
        axes.set_title(f"vllm serve, {result['machine']['cpu']}")


def _latency(of: Any, name: str) -> dict[str, float]:
    return {
        "median": common.summarize(of(f"median_{name}_ms"))["median"],
        "p90": common.summarize(of(f"p90_{name}_ms"))["median"],
    }


def _metrics(url: str) -> str:
    text: str = _get(f"{url}/metrics").decode()
    return text


def _get(url: str) -> bytes:
    # A proxy that the environment names has no business with loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30) as answer:
        body: bytes = answer.read()
        return body


def _is_running(process: int) -> bool:
    """Whether it is there and no zombie; it is not our child, so nobody can wait."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX"


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([f"--- {log}", *lines[-_LOG_LINES:]])


def main() -> None:
    args = build_parser().parse_args()
    if args.command == "model":
        print(default_model_dir())
    elif args.command == "port":
        print(find_free_port())
    elif args.command == "check":
        check(args)
    elif args.command == "flags":
        print("\n".join(server_flags(args.arm)))
    elif args.command == "wait":
        wait_for_server(args.url, args.server, args.timeout, args.log)
    elif args.command == "drive":
        drive(args)
    else:
        common.write_result(args, report(args), draw)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(common.run_main(main))
