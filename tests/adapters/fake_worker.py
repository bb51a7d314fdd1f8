# SPDX-License-Identifier: Apache-2.0
"""A worker without a model: it keeps, per slot, who wrote which position there."""

from __future__ import annotations

import random
from typing import Any

from keyformer_vllm.adapters.plan import EvictionEntry, plan_of

Owner = tuple[str, int, int]
"""Request id, how often it was preempted before, and the position written."""


class FakeWorker:
    """Follows vLLM's V1 runner: append-only rows, a plan first, then the writes.

    One KV head, survivors chosen at random within what the plan demands. Every
    rule the real worker relies on is asserted at every step.
    """

    def __init__(self, block_size: int, seed: int = 0) -> None:
        self.block_size = block_size
        self.slots: dict[tuple[int, int], Owner] = {}
        self.rows: dict[str, list[int]] = {}
        self.evicted: dict[str, int] = {}
        self.epoch: dict[str, int] = {}
        self.known: set[str] = set()
        self.num_evictions = 0
        self._random = random.Random(seed)

    def step(self, output: Any) -> None:
        """Execute one ``SchedulerOutput``."""
        plan = plan_of(output)
        for request_id in output.finished_req_ids:
            for table in (self.rows, self.evicted, self.epoch):
                table.pop(request_id, None)
            self.known.discard(request_id)
        for request_id in output.preempted_req_ids or ():
            if request_id in self.known:
                self.rows[request_id] = []
                self.evicted[request_id] = 0
                self.epoch[request_id] += 1
        self.known.update(plan.new_requests)
        assert set(plan.new_requests) == {r.req_id for r in output.scheduled_new_reqs}
        # Before any write: freed blocks may have a new owner in this very step.
        for request_id, entry in plan.evictions.items():
            self._compact(request_id, entry)
        computed = {}
        for new in output.scheduled_new_reqs:
            self.rows[new.req_id] = list(new.block_ids[0])
            self.evicted[new.req_id] = 0
            self.epoch[new.req_id] = 0
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            new_blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                self.rows[request_id] = list(new_blocks[0])
            elif new_blocks is not None:
                self.rows[request_id].extend(new_blocks[0])
            computed[request_id] = cached.num_computed_tokens[index]
        for request_id, count in output.num_scheduled_tokens.items():
            self._write(request_id, computed[request_id], count)
        for request_id, count in output.num_scheduled_tokens.items():
            self._check_readable(request_id, computed[request_id] + count)

    def _compact(self, request_id: str, entry: EvictionEntry) -> None:
        size = self.block_size
        before = self.evicted[request_id]
        counts = entry.counts
        row = self.rows[request_id]
        assert row[before:] == entry.block_ids, "the plan names the blocks of the row"
        places = [
            (entry.block_ids[slot // size], slot % size)
            for slot in range(counts.kv_len_before)
        ]
        owners = [self.slots[place] for place in places]
        epoch = self.epoch[request_id]
        assert all(owner[:2] == (request_id, epoch) for owner in owners)
        assert counts.num_evict == (counts.evicted_blocks - before) * size > 0
        fixed = [
            owner
            for owner in owners
            if owner[2] < counts.num_sinks or owner[2] >= counts.recent_start
        ]
        rest = [owner for owner in owners if owner not in set(fixed)]
        num_free = counts.kv_len_before - counts.num_evict - len(fixed)
        assert 0 <= num_free <= len(rest)
        kept = fixed + self._random.sample(rest, num_free)
        for place, owner in zip(places[counts.num_evict :], kept, strict=True):
            self.slots[place] = owner
        for place in places[: counts.num_evict]:
            del self.slots[place]
        self.evicted[request_id] = counts.evicted_blocks
        self.num_evictions += 1

    def _write(self, request_id: str, first: int, count: int) -> None:
        row = self.rows[request_id]
        for position in range(first, first + count):
            block = row[position // self.block_size]
            assert block != 0, "the null block is never written"
            place = (block, position % self.block_size)
            self.slots[place] = (request_id, self.epoch[request_id], position)

    def _check_readable(self, request_id: str, num_tokens: int) -> None:
        """Attention sees only what this request wrote since it last started."""
        size = self.block_size
        row = self.rows[request_id]
        seen = [
            self.slots[row[slot // size], slot % size]
            for slot in range(self.evicted[request_id] * size, num_tokens)
        ]
        epoch = self.epoch[request_id]
        assert all(owner[:2] == (request_id, epoch) for owner in seen)
        positions = [owner[2] for owner in seen]
        assert len(set(positions)) == len(positions)
        assert max(positions) == num_tokens - 1
