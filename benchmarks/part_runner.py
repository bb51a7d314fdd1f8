# SPDX-License-Identifier: Apache-2.0
"""Runs the parts of a long script one after the other, each with a limit of its own.

A part that fails or hangs is noted and the others still run. When a part is over,
however it ended, every process that it left behind is killed: on a GPU one of them
would keep its memory. Linux only. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OK, FAILED, TIMED_OUT, NOT_RUN = "ok", "failed", "timed out", "not run"

_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_POLL_SECONDS = 0.1
_END_SECONDS = 5.0
_TAIL_LINES = 12


@dataclass(frozen=True)
class Part:
    """Commands that belong together.

    Args:
        name: short; also names its log.
        question: what it answers.
        seconds: limit of all its commands together.
        commands: run one after the other until one fails.
        environment: variables on top of those of the caller.
        result: JSON file that it writes, if it does.
    """

    name: str
    question: str
    seconds: float
    commands: Sequence[Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    result: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """How a part ended.

    Args:
        status: `ok`, `failed`, `timed out` or `not run`.
        seconds: that it took.
        limit: seconds that it was allowed; less than its own where time ran out.
        reason: one line, empty if all is well.
        tail: last lines of its log, unless all is well.
    """

    name: str
    status: str
    seconds: float = 0.0
    limit: float = 0.0
    reason: str = ""
    tail: tuple[str, ...] = ()


def adopt_orphans() -> None:
    """Make this process the parent of those that its children leave behind.

    Raises:
        OSError: if the kernel refuses; then nobody could find them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def run_parts(
    parts: Sequence[Part], seconds: float, folder: Path, directory: Path
) -> Iterator[Outcome]:
    """Run all parts, within `seconds` in all.

    Args:
        seconds: of all parts together. What begins later gets what is left.
        folder: where the logs go.
        directory: where the commands run.
    """
    end = time.monotonic() + seconds
    for part in parts:
        left = end - time.monotonic()
        if left <= 0:
            reason = f"the {seconds:g} s for all parts were over"
            yield Outcome(part.name, NOT_RUN, reason=reason)
        else:
            yield run_part(part, min(part.seconds, left), folder, directory)


def run_part(part: Part, limit: float, folder: Path, directory: Path) -> Outcome:
    """Run one part; see `run_parts`. Ends all descendants of this process after it."""
    log = folder / f"{part.name}.log"
    started = time.monotonic()
    status, reason = OK, ""
    with log.open("wb") as file:
        for command in part.commands:
            file.write(f"$ {' '.join(command)}\n".encode())
            file.flush()
            try:
                process = subprocess.Popen(
                    command,
                    cwd=directory,
                    env={**os.environ, **part.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                status, reason = FAILED, f"cannot run {command[0]}: {error.strerror}"
                break
            try:
                code = process.wait(max(0.0, started + limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                status, reason = TIMED_OUT, f"killed after {limit:.0f} s"
                break
            finally:
                left_behind = end_descendants()
            if left_behind:
                file.write(f"killed what was left: {left_behind} processes\n".encode())
            if code:
                status, reason = FAILED, f"status {code} of {_name(command)}"
                break
    if status == OK and part.result is not None and not part.result.is_file():
        status, reason = FAILED, f"left no {part.result.name}"
    tail = () if status == OK else _tail(log)
    return Outcome(
        part.name, status, time.monotonic() - started, limit, reason, tuple(tail)
    )


def end_descendants() -> int:
    """Kill every process below this one and wait for it; how many there were.

    They get SIGTERM first, and SIGKILL when it does not help.

    Raises:
        RuntimeError: if one survives that, as one stuck in a driver does.
    """
    found = list(_descendants(os.getpid()))
    for number, seconds in ((signal.SIGTERM, _END_SECONDS), (signal.SIGKILL, 30.0)):
        end = time.monotonic() + seconds
        while alive := list(_descendants(os.getpid())):
            if time.monotonic() > end:
                break
            for pid in alive:
                # Those stopped or started meanwhile are met in the next turn.
                _signal(pid, number)
            _reap()
            time.sleep(_POLL_SECONDS)
        else:
            return len(found)
    raise RuntimeError(f"processes {alive} cannot be killed")


def _descendants(root: int) -> Iterator[int]:
    """Pids below `root` that are not just waiting to be reaped."""
    children: dict[int, list[int]] = {}
    ended = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name of the program is in parentheses and may hold any of these.
            state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone meanwhile
        children.setdefault(int(parent), []).append(int(entry.name))
        if state in "ZX":
            ended.add(int(entry.name))
    open_pids = [root]
    while open_pids:
        for pid in children.get(open_pids.pop(), []):
            open_pids.append(pid)
            if pid not in ended:
                yield pid


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # ended by itself
        os.kill(pid, number)


def _reap() -> None:
    """Collect the ended children, those that were adopted among them."""
    with suppress(ChildProcessError):  # there is none
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _name(command: Sequence[str]) -> str:
    """The script or module of a command, to recognise it by."""
    shown = [word for word in command[1:] if not word.startswith("-")]
    return Path(shown[0] if shown else command[0]).name


def _tail(log: Path) -> list[str]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-_TAIL_LINES:]


def summary(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The outcomes as JSON values."""
    return [vars(one) | {"tail": list(one.tail)} for one in outcomes]
