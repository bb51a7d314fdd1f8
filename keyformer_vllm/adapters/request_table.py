# SPDX-License-Identifier: Apache-2.0
"""Worker-side record of every live request, in flat arrays.

A step looks each request of its batch up once and then works on whole arrays:
no Python runs per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from keyformer_vllm.adapters.plan import RequestParams, StepPlan

_COLUMNS = {
    "tracked": np.bool_,
    "scores": np.bool_,
    "random": np.bool_,
    "uses_tau": np.bool_,
    "run_size": np.int32,
    "evicted_blocks": np.int32,
    # Computed before the step, as the scheduler sees it; set by ``start_step``.
    "num_computed": np.int64,
    "noise_key": np.int64,
    "num_prompt_tokens": np.int64,
    "max_tokens": np.int64,
    "first_scored": np.int64,
    "query_stride": np.int64,
    # Kept by the query ring, which is the worker's own.
    "num_waiting": np.int64,
    "ring_row": np.int64,
    "waiting_end": np.int64,
}


class RequestTable:
    """Constants and evicted blocks of live requests, one row per request."""

    def __init__(self, capacity: int = 64) -> None:
        self._rows: dict[str, int] = {}
        self._free = list(range(capacity))
        self._columns: dict[str, np.ndarray[Any, Any]] = {
            name: np.zeros(capacity, dtype) for name, dtype in _COLUMNS.items()
        }

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """One column for all rows; index it with :meth:`rows_of`."""
        return self._columns[name]

    def value(self, request_id: str, name: str) -> Any:
        """One cell, as a Python value."""
        return self._columns[name][self._rows[request_id]].item()

    def values(self, name: str) -> dict[str, Any]:
        """One column by request id, as Python values."""
        column = self._columns[name]
        return {
            request_id: column[row].item() for request_id, row in self._rows.items()
        }

    def rows_of(self, request_ids: list[str]) -> np.ndarray[Any, Any]:
        """Row numbers of a batch, int64 ``[num_reqs]``.

        Raises:
            KeyError: for a request the scheduler never announced.
        """
        rows = self._rows
        return np.fromiter(
            (rows[request_id] for request_id in request_ids),
            np.int64,
            len(request_ids),
        )

    def known_rows(self, request_ids: Iterable[str]) -> np.ndarray[Any, Any]:
        """Row numbers of those requests that are known, int64."""
        rows = self._rows
        return np.array([rows[i] for i in request_ids if i in rows], np.int64)

    def update(self, scheduler_output: Any, plan: StepPlan) -> None:
        """Apply one step's arrivals, departures, preemptions and evictions.

        Args:
            scheduler_output: vLLM's ``SchedulerOutput`` of the step.
            plan: the plan it carries.
        """
        # Departures first: a client may abort a request and send another one
        # under the same id before the next step.
        for request_id in scheduler_output.finished_req_ids:
            row = self._rows.pop(request_id, None)
            if row is not None:
                self._free.append(row)
        for request_id in scheduler_output.preempted_req_ids or ():
            row = self._rows.get(request_id)
            if row is not None:
                self._columns["evicted_blocks"][row] = 0
        for request_id, params in plan.new_requests.items():
            self._add(request_id, params)
        for request_id, entry in plan.evictions.items():
            row = self._rows[request_id]
            self._columns["evicted_blocks"][row] = entry.counts.evicted_blocks

    def start_step(self, scheduler_output: Any) -> None:
        """Note how many tokens the step's requests have computed before it.

        Args:
            scheduler_output: vLLM's ``SchedulerOutput`` of the step, after
                :meth:`update`.
        """
        computed = self._columns["num_computed"]
        for new in scheduler_output.scheduled_new_reqs:
            computed[self._rows[new.req_id]] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed[self.rows_of(cached.req_ids)] = cached.num_computed_tokens

    def _add(self, request_id: str, params: RequestParams) -> None:
        row = self._rows.get(request_id)
        if row is None:
            if not self._free:
                self._grow()
            row = self._rows[request_id] = self._free.pop()
        columns = self._columns
        for name in _COLUMNS:
            columns[name][row] = getattr(params, name, 0)

    def _grow(self) -> None:
        capacity = len(self._columns["tracked"])
        self._free = list(range(capacity, 2 * capacity))
        for name, column in self._columns.items():
            self._columns[name] = np.concatenate([column, np.zeros_like(column)])
