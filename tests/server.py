# SPDX-License-Identifier: Apache-2.0
"""A real ``vllm serve`` in its own process group, for tests over HTTP."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

_ROOT = Path(__file__).resolve().parent.parent
_START_SECONDS = 300.0
_STOP_SECONDS = 30.0


class Server:
    """A server that answers; see :func:`serve`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.http = httpx.Client(base_url=self.url, timeout=120.0)

    def openai(self) -> Any:
        """An OpenAI client; no retries, so that every answer is the first one."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return self.http.post(path, json=dict(body))

    def metric(self, name: str) -> float:
        """The sum of a Prometheus metric over its labels.

        Raises:
            AssertionError: when no such metric is there; 0 would hide a typo.
        """
        return metric_in(self.http.get("/metrics").text, name)

    def metrics_while_streaming(self, body: Mapping[str, Any]) -> str:
        """What ``/metrics`` answers while one completion of many tokens runs.

        A test process may be held up for as long as an answer takes; then it is asked
        for once more.

        Args:
            body: of a streamed completion; the client leaves after some tokens of it.

        Raises:
            AssertionError: when it was over each time.
        """
        for _ in range(5):
            with self.http.stream("POST", "/v1/completions", json=dict(body)) as answer:
                # Held on to: where it goes, the connection and so the request go.
                lines = answer.iter_lines()
                for _ in range(20):
                    next(lines)
                text = self.http.get("/metrics").text
            self.wait_until_idle()
            if metric_in(text, "vllm:num_requests_running") == 1:
                return text
        raise AssertionError("no answer took long enough to look at the server in it")

    def wait_for(self, condition: Any, seconds: float, what: str) -> None:
        """Poll until a condition holds.

        Raises:
            AssertionError: when it does not hold in time.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            time.sleep(0.1)

    def wait_until_idle(self, seconds: float = 30.0) -> None:
        """Poll until no request runs or waits and no block is held."""
        self.wait_for(
            lambda: (
                self.metric("vllm:num_requests_running") == 0
                and self.metric("vllm:num_requests_waiting") == 0
                and self.metric("vllm:kv_cache_usage_perc") == 0
            ),
            seconds,
            "idle server",
        )


def metric_in(text: str, name: str) -> float:
    """The sum of a metric over its labels, in what ``/metrics`` answered.

    Raises:
        AssertionError: when no such metric is there; 0 would hide a typo.
    """
    values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.M)
    assert values, f"no metric {name}"
    return sum(float(value) for value in values)


@contextmanager
def serve(
    model: Path | str,
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start ``vllm serve MODEL ARGUMENTS``, wait for it, and stop it at the end.

    Args:
        log: file for the server's standard output and error.
        environment: on top of this process's.

    Raises:
        RuntimeError: when it ends or does not answer in time; with its last lines.
    """
    port = free_port()
    process = start_serve(model, [*arguments, "--port", str(port)], log, environment)
    server = Server(process, port, log)
    try:
        _wait_for_health(server)
        yield server
    finally:
        server.http.close()
        stop(process)


def start_serve(
    model: Path | str,
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``vllm serve`` and return at once. End it with :func:`stop`."""
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        # The checkout under test comes before an installed one.
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        **(environment or {}),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    with open(log, "wb") as file:
        return subprocess.Popen(
            [*command, "--host", "127.0.0.1", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes]) -> int:
    """End a server as Ctrl-C does, and whatever it left behind. Returns its status."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for_health(server: Server) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        status = server.process.poll()
        if status is not None or time.monotonic() > deadline:
            tail = server.log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"no server (exit status {status}):\n{tail}")
        try:
            if server.http.get("/health", timeout=5.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.25)
