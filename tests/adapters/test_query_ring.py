# SPDX-License-Identifier: Apache-2.0
"""Which queries wait where: the ring's bookkeeping, without a model."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from keyformer_vllm.adapters.plan import StepPlan
from keyformer_vllm.adapters.query_ring import QueryRing, RingShape
from keyformer_vllm.adapters.request_table import RequestTable
from tests.adapters.test_request_table import _params

LAYERS, ROWS, DEPTH, HEADS, HEAD_SIZE = 2, 3, 4, 2, 8
SHAPE = RingShape(LAYERS, ROWS, DEPTH, HEADS, HEAD_SIZE, torch.float32)


class Player:
    """A ring, its table, and what must be in them, request by request."""

    def __init__(self) -> None:
        self.table = RequestTable()
        self.ring = QueryRing(SHAPE, self.table)
        self.waiting: dict[str, list[torch.Tensor]] = {}
        self.next_position: dict[str, int] = {}
        self.generator = torch.Generator().manual_seed(0)

    def arrive(self, request_id: str, position: int = 0) -> None:
        output = SimpleNamespace(finished_req_ids=set(), preempted_req_ids=None)
        self.table.update(output, StepPlan({request_id: _params()}))
        self.waiting[request_id] = []
        self.next_position[request_id] = position

    def leave(self, request_id: str) -> None:
        self.ring.release(self.table.known_rows([request_id, "never seen"]))
        output = SimpleNamespace(finished_req_ids={request_id}, preempted_req_ids=None)
        self.table.update(output, StepPlan())
        del self.waiting[request_id], self.next_position[request_id]

    def step(self, request_ids: list[str], others: int = 0) -> None:
        """One step in which these wait, each followed by tokens of others."""
        num_tokens = len(request_ids) * (1 + others)
        shape = (LAYERS, num_tokens, HEADS, HEAD_SIZE)
        query = torch.randn(shape, generator=self.generator)
        tokens = np.arange(len(request_ids)) * (1 + others)
        positions = np.array([self.next_position[i] for i in request_ids])
        rows = self.table.rows_of(request_ids)
        write = self.ring.append(rows, tokens, positions, num_tokens)
        for layer in range(LAYERS):
            write.store(query[layer], self.ring.layer(layer))
        for token, request_id in zip(tokens, request_ids, strict=True):
            self.waiting[request_id].append(query[:, token])
            self.next_position[request_id] += 1

    def drain(self, request_ids: list[str]) -> None:
        """Take out what waits and compare it."""
        places, counts = self.ring.drain(self.table.rows_of(request_ids))
        expected = [self.waiting[request_id] for request_id in request_ids]
        assert counts.tolist() == [len(queries) for queries in expected]
        for layer in range(LAYERS):
            found = self.ring.layer(layer)[places]
            rows = [query[layer] for queries in expected for query in queries]
            assert torch.equal(found, torch.stack(rows))
        for request_id in request_ids:
            self.waiting[request_id] = []

    def check(self) -> None:
        held = sum(bool(queries) for queries in self.waiting.values())
        assert self.ring.num_free == ROWS - held


def test_queries_come_back_in_order_and_by_request():
    player = Player()
    for name in "abc":
        player.arrive(name, position=7)
    player.step(["a", "b"])
    player.step(["b", "c"], others=2)
    player.step(["c", "a", "b"])
    player.check()
    player.drain(["c", "b"])
    player.check()
    player.step(["b", "a"])
    player.drain(["a", "b"])
    player.check()


def test_random_traffic():
    """Rows move from request to request; what left is never seen again."""
    draw = random.Random(3)
    player, number = Player(), 0
    for _ in range(600):
        names = list(player.waiting)
        if len(names) < ROWS and draw.random() < 0.5:
            player.arrive(f"r{number}", position=draw.randrange(100))
            number += 1
        elif names and draw.random() < 0.15:
            player.leave(draw.choice(names))
        names = draw.sample(
            sorted(player.waiting), draw.randint(0, len(player.waiting))
        )
        full = [name for name in names if len(player.waiting[name]) == DEPTH]
        due = full or [n for n in names if player.waiting[n] and draw.random() < 0.1]
        if due:
            player.drain(due)
        if names:
            player.step(names, others=draw.choice([0, 0, 2]))
        player.check()
    assert number > 50


def test_a_row_of_the_ring_never_holds_more_than_its_depth():
    player = Player()
    player.arrive("a")
    for _ in range(DEPTH):
        player.step(["a"])
    with pytest.raises(AssertionError):
        player.step(["a"])


def test_there_is_a_row_for_each_running_request_and_no_more():
    player = Player()
    for name in "abcd":
        player.arrive(name)
    player.step(["a", "b", "c"])
    with pytest.raises(AssertionError):
        player.step(["d"])
    player.leave("b")
    player.step(["d"])
    player.drain(["a", "c", "d"])


def test_a_gap_between_waiting_queries_is_an_error():
    """Their rows are scored as the last ones of the request."""
    player = Player()
    player.arrive("a")
    player.step(["a"])
    player.next_position["a"] += 1
    with pytest.raises(AssertionError):
        player.step(["a"])


def test_same_id_again_finds_nothing_waiting():
    player = Player()
    player.arrive("a", position=5)
    player.step(["a"])
    player.leave("a")
    player.arrive("a")
    player.check()
    player.step(["a"])
    player.drain(["a"])


def test_memory_is_what_the_tensor_takes():
    ring = QueryRing(SHAPE, RequestTable())
    taken = sum(ring.layer(i).numel() * 4 for i in range(LAYERS))
    # One place more, for queries that are written and do not wait.
    queries = LAYERS * (ROWS * DEPTH + 1)
    assert SHAPE.num_bytes == taken == queries * HEADS * HEAD_SIZE * 4
    assert SHAPE.problem(SHAPE.num_bytes + 1) is None
    problem = SHAPE.problem(SHAPE.num_bytes)
    assert problem is not None and f"max_num_seqs={ROWS}" in problem
