# SPDX-License-Identifier: Apache-2.0
"""What was dropped, and when: one JSON line per step and request."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.plan import StepPlan

if TYPE_CHECKING:
    from keyformer_vllm.adapters.runtime import WorkerRuntime


logger = compat.plugin_logger(__name__)


class TraceWriter:
    """Appends to the trace file; it holds counts and positions, never text.

    Where the file cannot be written any more, as on a full disk, one error is logged
    and the trace ends; requests are served on.

    Args:
        path: the file; ranks above 0 add ``.rank<N>`` to its name, data-parallel
            engines above the first ``.engine<N>``.
        rank: the worker's rank.
        engine: index of the data-parallel engine.
    """

    def __init__(self, path: str, rank: int, engine: int) -> None:
        name = path + (f".engine{engine}" if engine else "")
        name += f".rank{rank}" if rank else ""
        self._file = open(name, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self.failed = False
        self._step = 0
        self._budgets: dict[str, int] = {}

    def record(
        self, runtime: WorkerRuntime, scheduler_output: Any, plan: StepPlan
    ) -> None:
        """Write one line for every scheduled request and every eviction.

        Nothing once a write has failed.

        Args:
            runtime: the worker's state, evictions of this step already done.
            scheduler_output: vLLM's ``SchedulerOutput`` of the step.
            plan: the plan it carries.
        """
        if self.failed:
            return
        try:
            self._write_step(runtime, scheduler_output, plan)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.failed = True
        # What is still buffered fails again; the file is closed all the same.
        with contextlib.suppress(OSError):
            self._file.close()
        logger.error(
            "kv_trace: %s cannot be written: %s; the trace ends at step %d, its last "
            "line may be cut, and requests are served without it",
            self._file.name,
            error.strerror,
            self._step,
        )

    def _write_step(
        self, runtime: WorkerRuntime, scheduler_output: Any, plan: StepPlan
    ) -> None:
        computed = dict(_computed_tokens(scheduler_output))
        scheduled = scheduler_output.num_scheduled_tokens
        block_size = runtime.block_size
        preempted = scheduler_output.preempted_req_ids or ()
        for request_id in (*scheduler_output.finished_req_ids, *preempted):
            self._budgets.pop(request_id, None)
        for request_id in dict.fromkeys([*scheduled, *plan.evictions]):
            entry = plan.evictions.get(request_id)
            if entry is not None:
                self._budgets[request_id] = entry.counts.budget_tokens
            evicted = runtime.table.value(request_id, "evicted_blocks")
            num_new = scheduled.get(request_id, 0)
            # A request can evict in a step that then has no room to run it.
            first = computed.get(
                request_id,
                entry.counts.kv_len + evicted * block_size if entry else 0,
            )
            logical = first + num_new
            prompt = runtime.table.value(request_id, "num_prompt_tokens")
            line: dict[str, Any] = {
                "step": self._step,
                "req": request_id,
                "phase": "prefill" if first < prompt or num_new > 1 else "decode",
                "logical": logical,
                "physical": logical - evicted * block_size,
                "positions": [first, logical],
                "blocks_held": -(-logical // block_size) - evicted,
                "evicted_blocks": evicted,
                "evicted_tokens": evicted * block_size,
                "freed_blocks": entry.counts.num_evict // block_size if entry else 0,
                "k": self._budgets.get(request_id),
            }
            if entry is not None:
                line["kept"] = runtime.kept_positions(entry)
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._step += 1


def _computed_tokens(scheduler_output: Any) -> Any:
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = scheduler_output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
