# SPDX-License-Identifier: Apache-2.0
"""How long the eviction ops take inside the steps of an engine.

Imports neither torch nor vLLM before it watches.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

EVICTION_WORK = ("reset_slots", "renumber_slots", "select_keep", "compact_kv")
"""What evicting takes, scores aside."""

EVICTION_OPS = ("paged_attention_scored", "score_keys", *EVICTION_WORK)


class OpClock:
    """Adds up the time of every eviction op while it watches, phase by phase.

    On a GPU a call returns before its work is done. There an op's time is that between
    two events around it, and nothing waits before the sum is asked for. What a CUDA
    graph replays passes through no call of ours and is not counted.

    Args:
        phase: says, whenever an op is called, what its time is to be added to.
    """

    def __init__(self, phase: Callable[[], str] = lambda: "") -> None:
        self._phase = phase
        self._seconds: dict[str, dict[str, float]] = {}
        self._events: list[tuple[str, str, Any, Any]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the ops that are called inside the block."""
        from keyformer_vllm import ops

        originals = {name: getattr(ops, name) for name in EVICTION_OPS}
        for name, op in originals.items():
            setattr(ops, name, self._timed(name, op))
        try:
            yield
        finally:
            for name, op in originals.items():
                setattr(ops, name, op)

    def seconds(self) -> dict[str, dict[str, float]]:
        """Phase to name of the op to seconds so far; waits for the GPU."""
        for phase, name, start, end in self._events:
            end.synchronize()
            self._add(phase, name, start.elapsed_time(end) / 1e3)
        self._events.clear()
        return self._seconds

    def _add(self, phase: str, name: str, seconds: float) -> None:
        self._seconds.setdefault(phase, defaultdict(float))[name] += seconds

    def _timed(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(op)
        def call(*args: Any, **kwargs: Any) -> Any:
            phase = self._phase()
            if args[0].is_cuda:
                return self._between_events(phase, name, lambda: op(*args, **kwargs))
            started = time.perf_counter()
            try:
                return op(*args, **kwargs)
            finally:
                self._add(phase, name, time.perf_counter() - started)

        return call

    def _between_events(self, phase: str, name: str, run: Callable[[], Any]) -> Any:
        import torch

        if torch.cuda.is_current_stream_capturing():
            return run()  # captured, not run: there is no time to take
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = run()
        end.record()
        self._events.append((phase, name, start, end))
        return result
