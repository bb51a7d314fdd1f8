# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` process that never outlives the block of code that uses it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

_POLL_SECONDS = 0.2


def find_free_port() -> int:
    """A TCP port on the loopback interface that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server in a process group of its own; use it as a context manager.

    Args:
        command: program and arguments.
        log_path: file that receives the server's stdout and stderr.
        port: port the command was told to listen on.
        env: variables on top of this process's environment.
        grace_seconds: how long the group may take to end after SIGTERM.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        port: int,
        env: dict[str, str] | None = None,
        grace_seconds: float = 15.0,
    ) -> None:
        self.base_url = f"http://127.0.0.1:{port}"
        self.log_path = log_path
        self._command = list(command)
        self._env = {**os.environ, **(env or {})}
        self._grace_seconds = grace_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def group(self) -> int:
        """The process group, which is the first process's id."""
        assert self._process is not None
        return self._process.pid

    def wait_until_ready(self, timeout: float) -> None:
        """Waits until `/health` answers.

        Raises:
            RuntimeError: if the server ends or does not answer within `timeout`
                seconds; the message holds the end of its log.
        """
        assert self._process is not None
        # A proxy that the environment names has no business with loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            status = self._process.poll()
            if status is not None:
                raise RuntimeError(
                    f"the server ended with status {status}\n{self.log_tail()}"
                )
            with (
                contextlib.suppress(OSError),
                opener.open(f"{self.base_url}/health", timeout=5),
            ):
                return
            time.sleep(_POLL_SECONDS)
        raise RuntimeError(
            f"the server did not answer within {timeout:.0f} s\n{self.log_tail()}"
        )

    def log_tail(self, num_lines: int = 40) -> str:
        """The last lines of the log, headed by its path."""
        with contextlib.suppress(OSError):
            lines = self.log_path.read_text(errors="replace").splitlines()
            return "\n".join([f"--- {self.log_path}", *lines[-num_lines:]])
        return f"--- {self.log_path} cannot be read"

    def stop(self) -> None:
        """Ends every process of the group; returns when none is left."""
        if self._process is None:
            return
        with _signals_ignored():
            for number, patience in (
                (signal.SIGTERM, self._grace_seconds),
                (signal.SIGKILL, 10.0),
            ):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.group, number)
                if self._wait_until_gone(patience):
                    break
            self._process.wait()

    def _wait_until_gone(self, patience: float) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + patience
        while True:
            self._process.poll()  # reap our child, or it counts as alive for ever
            if not is_group_alive(self.group):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS / 4)


def is_group_alive(group: int) -> bool:
    """Whether any process of the group still runs; a zombie does not count.

    Grandchildren become children of init when their parent ends. Where init does not
    reap (a bare container), their zombies would keep the group alive for ever.
    """
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name in parentheses may itself hold spaces and parentheses.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        state, _, process_group = fields[:3]
        if int(process_group) == group and state not in "ZX":
            return True
    return False


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Turns signals that end a program into exceptions: context managers unwind.

    SIGINT too: a shell starts background jobs with it ignored, and Python then leaves
    it ignored.
    """

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: leave,
        signal.SIGHUP: leave,
    }
    previous = {
        number: signal.signal(number, handler) for number, handler in handlers.items()
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """A second Ctrl-C while the group is being ended must not leave half of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
