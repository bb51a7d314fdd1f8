# SPDX-License-Identifier: Apache-2.0
"""A worker without a model: it keeps, per slot, whose keys and scores are there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from keyformer_vllm.adapters.plan import EvictionEntry, plan_of

Owner = tuple[str, int]
"""Request id, and how often it was preempted before."""
Content = tuple[int | Owner, int]
"""What keys and values follow from, and their position: all tokens up to there, as a
hash; or, once their request evicted, that request alone."""


class FakeWorker:
    """Follows vLLM's V1 runner: append-only rows, a plan first, then the writes.

    One KV head, survivors chosen at random within what the plan demands. Every
    rule the real worker relies on is asserted at every step.

    Args:
        block_size: tokens per block.
        generated: the token that every request generates.
        audit: whether evictions exchange tokens and drop none.
    """

    def __init__(
        self, block_size: int, generated: int, seed: int = 0, audit: bool = False
    ) -> None:
        self.block_size = block_size
        self.generated = generated
        self.audit = audit
        self.slots: dict[tuple[int, int], Content] = {}
        self.scores: dict[tuple[int, int], Owner] = {}
        self.rows: dict[str, list[int]] = {}
        self.evicted: dict[str, int] = {}
        self.epoch: dict[str, int] = {}
        self.known: set[str] = set()
        self.tracked: set[str] = set()
        self.num_evictions = 0
        self.num_copies = {"cache": 0, "hit": 0}
        self.num_adopted = 0
        self._chains: dict[str, list[int]] = {}
        self._evicted_at: dict[str, int] = {}
        self._random = random.Random(seed)

    def add(self, request_id: str, prompt: Sequence[int]) -> None:
        """Hear of a request's prompt, which its keys and values follow from."""
        self._chains[request_id] = []
        for token in prompt:
            self._extend(self._chains[request_id], token)

    def clean(self, request_id: str, first: int, last: int) -> list[Content]:
        """What full attention would store at positions ``[first, last)``."""
        chain = self._chains[request_id]
        while len(chain) < last:
            self._extend(chain, self.generated)
        return [(chain[position], position) for position in range(first, last)]

    def content_of(self, block: int) -> list[Content | None]:
        """What the slots of a block hold."""
        return [self.slots.get((block, i)) for i in range(self.block_size)]

    def step(self, output: Any) -> None:
        """Execute one ``SchedulerOutput``."""
        plan = plan_of(output)
        for request_id in output.finished_req_ids:
            for table in (self.rows, self.evicted, self.epoch, self._evicted_at):
                table.pop(request_id, None)
            self.known.discard(request_id)
            self.tracked.discard(request_id)
        for request_id in output.preempted_req_ids or ():
            if request_id in self.known:
                self.rows[request_id] = []
                self.evicted[request_id] = 0
                self.epoch[request_id] += 1
                self._evicted_at.pop(request_id, None)
        assert set(plan.new_requests) == {r.req_id for r in output.scheduled_new_reqs}
        for request_id, params in plan.new_requests.items():
            self.known.add(request_id)
            self.epoch[request_id] = 0
            self.evicted[request_id] = 0
            if params.tracked:
                self.tracked.add(request_id)
        # Before any write: freed blocks may have a new owner in this very step.
        self._copy(plan.cache_copies, "cache")
        for request_id, entry in plan.evictions.items():
            self._compact(request_id, entry)
        self._copy(plan.hit_copies, "hit")
        for request_id, blocks in plan.hits.items():
            assert request_id in self.tracked
            self.num_adopted += len(blocks)
            for block in blocks:
                for offset in range(self.block_size):
                    self.scores[block, offset] = self._owner(request_id)
        computed = {}
        for new in output.scheduled_new_reqs:
            self.rows[new.req_id] = list(new.block_ids[0])
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

    def _copy(self, pairs: list[tuple[int, int]], kind: str) -> None:
        sources, targets = zip(*pairs, strict=True) if pairs else ((), ())
        assert not set(sources) & set(targets), "a source would be overwritten"
        assert len(set(targets)) == len(targets)
        self.num_copies[kind] += len(pairs)
        for source, target in pairs:
            for offset in range(self.block_size):
                self.slots[target, offset] = self.slots[source, offset]
                self.scores.pop((target, offset), None)

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
        self._check_own(request_id, places)
        contents = [self.slots[place] for place in places]
        assert counts.num_evict == (counts.evicted_blocks - before) * size > 0
        fixed = [
            content
            for content in contents
            if content[1] < counts.num_sinks or content[1] >= counts.recent_start
        ]
        rest = [content for content in contents if content not in set(fixed)]
        num_free = counts.kv_len_before - counts.num_evict - len(fixed)
        assert 0 <= num_free <= len(rest)
        kept = fixed + self._random.sample(rest, num_free)
        for place, content in zip(places[counts.num_evict :], kept, strict=True):
            self.slots[place] = content
        if self.audit:
            assert not entry.cached_ids
            gone = [content for content in rest if content not in set(kept)]
            for place, content in zip(places[: counts.num_evict], gone, strict=True):
                self.slots[place] = content
            self.evicted[request_id] = counts.evicted_blocks
            self.num_evictions += 1
            return
        freed = entry.block_ids[: counts.num_evict // size]
        assert set(entry.cached_ids) <= set(freed)
        for block, offset in places[: counts.num_evict]:
            if block not in entry.cached_ids:
                del self.slots[block, offset]
        self.evicted[request_id] = counts.evicted_blocks
        self._evicted_at.setdefault(request_id, counts.kv_len_before)
        self.num_evictions += 1

    def _write(self, request_id: str, first: int, count: int) -> None:
        row = self.rows[request_id]
        last = first + count
        contents = self.clean(request_id, first, last)
        if self.evicted[request_id] and not self.audit:
            contents = [(self._owner(request_id), p) for p in range(first, last)]
        for content in contents:
            position = content[1]
            block = row[position // self.block_size]
            assert block != 0, "the null block is never written"
            place = (block, position % self.block_size)
            self.slots[place] = content
            self.scores[place] = self._owner(request_id)

    def _check_readable(self, request_id: str, num_tokens: int) -> None:
        """Attention sees what this request computed, or would have."""
        size = self.block_size
        row = self.rows[request_id]
        first = 0 if self.audit else self.evicted[request_id] * size
        places = [(row[slot // size], slot % size) for slot in range(first, num_tokens)]
        seen = [self.slots[place] for place in places]
        clean = self.clean(request_id, 0, num_tokens)
        end = self._evicted_at.get(request_id, num_tokens)
        mine = clean[:end] + [
            (self._owner(request_id), p) for p in range(end, num_tokens)
        ]
        if not self.evicted[request_id]:
            assert seen == mine
        assert set(seen) <= set(mine) and len(set(seen)) == len(seen)
        assert mine[-1] in seen
        assert not self.audit or len(seen) == len(mine)
        if request_id in self.tracked:
            self._check_own(request_id, places)

    def _check_own(self, request_id: str, places: list[tuple[int, int]]) -> None:
        """The scores of these slots are this request's, from since it last started."""
        assert {self.scores[place] for place in places} == {self._owner(request_id)}

    def _owner(self, request_id: str) -> Owner:
        return request_id, self.epoch[request_id]

    @staticmethod
    def _extend(chain: list[int], token: int) -> None:
        chain.append(hash((chain[-1] if chain else 0, token)))
