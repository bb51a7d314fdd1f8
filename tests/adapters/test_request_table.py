# SPDX-License-Identifier: Apache-2.0
"""The worker's record of requests: nothing of one life reaches the next (A01, A33)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from keyformer_vllm.adapters.plan import EvictionEntry, RequestParams, StepPlan
from keyformer_vllm.adapters.request_table import RequestTable
from keyformer_vllm.core.retention import Eviction


def _params(**changes) -> RequestParams:
    values = {
        "tracked": True,
        "scores": True,
        "noise_key": 7,
        "num_prompt_tokens": 100,
        "max_tokens": 50,
        "first_scored": 0,
        "query_stride": 1,
        "uses_tau": True,
        "run_size": 1,
        "random": False,
    }
    return RequestParams(**(values | changes))


def _entry(evicted_blocks: int) -> EvictionEntry:
    counts = Eviction(
        num_evict=32,
        evicted_blocks=evicted_blocks,
        kv_len_before=40,
        kv_len=8,
        num_sinks=0,
        recent_start=30,
        budget_tokens=16,
    )
    return EvictionEntry([3, 5], counts)


def _step(table, new=None, evictions=None, finished=(), preempted=()):
    output = SimpleNamespace(
        finished_req_ids=set(finished), preempted_req_ids=set(preempted)
    )
    table.update(output, StepPlan(new_requests=new or {}, evictions=evictions or {}))


def test_a_row_keeps_what_the_scheduler_said():
    table = RequestTable()
    _step(table, new={"a": _params(noise_key=-9, run_size=16), "b": _params()})
    _step(table, evictions={"a": _entry(4)})
    rows = table.rows_of(["b", "a"])
    assert table.column("evicted_blocks")[rows].tolist() == [0, 4]
    assert table.column("noise_key")[rows].tolist() == [7, -9]
    assert table.value("a", "run_size") == 16


def test_preemption_forgets_evictions_but_not_the_request():
    table = RequestTable()
    _step(table, new={"a": _params()}, evictions={"a": _entry(4)})
    _step(table, preempted=["a", "never seen"])
    assert table.value("a", "evicted_blocks") == 0
    assert table.value("a", "num_prompt_tokens") == 100


def test_finished_and_again_under_the_same_id_in_one_step_starts_clean():
    table = RequestTable()
    _step(table, new={"a": _params()}, evictions={"a": _entry(4)})
    _step(table, finished=["a"], new={"a": _params(num_prompt_tokens=5)})
    assert table.value("a", "evicted_blocks") == 0
    assert table.value("a", "num_prompt_tokens") == 5
    assert len(table) == 1


def test_rows_are_reused_and_the_table_grows():
    table = RequestTable(capacity=2)
    for number in range(9):
        _step(table, new={f"r{number}": _params(num_prompt_tokens=number + 1)})
    rows = table.rows_of([f"r{number}" for number in range(9)])
    assert len(set(rows.tolist())) == 9
    assert table.column("num_prompt_tokens")[rows].tolist() == list(range(1, 10))
    capacity = len(table.column("tracked"))
    for number in range(100):
        _step(table, new={f"s{number}": _params()}, finished=[f"s{number - 1}"])
    assert len(table.column("tracked")) == capacity
    assert len(table) == 10


def test_a_request_nobody_announced_is_an_error():
    with pytest.raises(KeyError, match="ghost"):
        RequestTable().rows_of(["ghost"])
    with pytest.raises(KeyError, match="ghost"):
        _step(RequestTable(), evictions={"ghost": _entry(1)})
