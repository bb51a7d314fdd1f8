# SPDX-License-Identifier: Apache-2.0
"""Block manager that gives a request's leading blocks back while it runs.

Prefix caching stays on. These rules keep it right:

1. A block of a request that may evict is held by nobody else. So the scores in it are
   that request's own. Of a hit, a cached block that nobody holds is taken as it is; one
   that is held is copied for the newcomer, unless neither of the two ever evicts: such
   requests share blocks as in stock vLLM.
2. What is rewritten is no longer in the cache. Leading blocks that an eviction gives
   back stay there. Those that the request goes on with are copied first, and the copies
   take over their hashes; where no block is free for a copy, the hash is dropped.
3. From its first eviction on nothing more of a request enters the cache: its keys and
   values follow from what it retained, not from its tokens alone. Under an audit they
   follow from its tokens, but no longer lie in their order.

Copies are pairs of block ids that workers carry out at the head of the step, so the
blocks that are filled in this very step cannot be copied yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from keyformer_vllm.adapters import compat

BlockCopies = list[tuple[int, int]]
"""Pairs (source, target) of physical blocks."""


class KeyformerManager(compat.FullAttentionManager):  # type: ignore[misc]
    """Full-attention manager with a null prefix of evicted blocks.

    The list of a request's blocks keeps its logical length; evicted blocks at
    its front are replaced by vLLM's null block, exactly as its sliding-window
    manager does (``vllm/v1/core/single_type_kv_cache_manager.py``). So counts of
    blocks and tokens stay logical everywhere else.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.evicting: Collection[str] = ()
        """Ids of the requests that may evict; the scheduler keeps it."""
        self._exclusive: set[int] = set()  # blocks of these requests
        self._rewritten: set[str] = set()  # requests that evicted, or would have
        self._unfilled: set[int] = set()  # blocks in the cache before their content is
        self._hit_copies: BlockCopies = []
        self._hits: dict[str, list[int]] = {}

    # Hits.

    def usable_hit(self, request_id: str, blocks: Sequence[Any]) -> int:
        """How many leading blocks of a hit the request can have in this step.

        Args:
            request_id: the request that is about to be admitted.
            blocks: vLLM's blocks of the hit, none of them touched yet.
        """
        for index, block in enumerate(blocks):
            if block.block_id in self._unfilled and self._copied(request_id, block):
                return index
        return len(blocks)

    def take_hits(self) -> tuple[BlockCopies, dict[str, list[int]]]:
        """What this step's hits ask of the workers; forgets it.

        Returns:
            Copies, and by id of each admitted request that may evict the physical
            blocks which hold the start of it already.
        """
        taken = self._hit_copies, self._hits
        self._hit_copies, self._hits = [], {}
        return taken

    def new_step_starts(self) -> None:
        super().new_step_starts()
        self._unfilled.clear()

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> int:
        num_blocks: int = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, *args, **kwargs
        )
        return num_blocks + sum(
            self._copied(request_id, block) for block in new_computed_blocks
        )

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[Any], *args: Any
    ) -> None:
        copied = [self._copied(request_id, block) for block in new_computed_blocks]
        super().add_local_computed_blocks(request_id, new_computed_blocks, *args)
        blocks = self.req_to_blocks[request_id]
        # All of the hit is touched by now: none of it can be a target.
        targets = iter(self.block_pool.get_new_blocks(sum(copied)))
        for index, source in enumerate(new_computed_blocks):
            if copied[index]:
                blocks[index] = next(targets)
                self._hit_copies.append((source.block_id, blocks[index].block_id))
                self.block_pool.free_blocks([source])  # others hold it still
        if request_id in self.evicting and blocks:
            self._hits[request_id] = [block.block_id for block in blocks]
            self._exclusive.update(self._hits[request_id])

    def _copied(self, request_id: str, block: Any) -> bool:
        """Whether a request that hits a block gets a copy of it."""
        return block.ref_cnt > 0 and (
            request_id in self.evicting or block.block_id in self._exclusive
        )

    # Blocks that come and go.

    def allocate_new_blocks(self, request_id: str, *args: Any) -> list[Any]:
        blocks: list[Any] = super().allocate_new_blocks(request_id, *args)
        if request_id in self.evicting:
            self._exclusive.update(block.block_id for block in blocks)
        return blocks

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        blocks: list[Any] = super().pop_blocks_for_free(request_id)
        self._rewritten.discard(request_id)
        if request_id in self.evicting:
            self._exclusive.difference_update(block.block_id for block in blocks)
        return blocks

    def cache_blocks(
        self, request: Any, num_tokens: int, *args: Any, **kwargs: Any
    ) -> None:
        request_id = request.request_id
        if request_id in self._rewritten:
            return
        blocks = self.req_to_blocks[request_id]
        first = self.num_cached_block.get(request_id, 0)
        super().cache_blocks(request, num_tokens, *args, **kwargs)
        filled = blocks[first : num_tokens // self.block_size]
        self._unfilled.update(block.block_id for block in filled)

    # Evictions.

    def uncache(self, firsts: Mapping[str, int]) -> BlockCopies:
        """Take blocks that will be rewritten out of the prefix cache.

        To be called for all requests of a step before any of them evicts: a block that
        one gives up must not become a copy before it was read. Copies are free blocks
        afterwards, the last ones that vLLM hands out.

        Args:
            firsts: request id to its first logical block that will be rewritten; all
                behind it will be as well.

        Returns:
            Copies to carry out before the evictions, and even if these are dropped.
        """
        pool = self.block_pool
        sources: list[Any] = []
        targets: list[Any] = []
        for request_id, first in firsts.items():
            blocks = self.req_to_blocks[request_id][first:]
            cached = [block for block in blocks if block.block_hash is not None]
            # A hit needs all blocks before it: the leading ones are worth the most.
            room = min(len(cached), pool.get_num_free_blocks())
            pool.evict_blocks({block.block_id for block in cached[room:]})
            sources += cached[:room]
            targets += pool.get_new_blocks(room)
        for source, target in zip(sources, targets, strict=True):
            pool.move_block_hashes(source, target)
        pool.free_blocks(reversed(targets))
        return [
            (source.block_id, target.block_id)
            for source, target in zip(sources, targets, strict=True)
        ]

    def evict_prefix(
        self, request_id: str, first: int, last: int
    ) -> tuple[list[int], list[int]]:
        """Return logical blocks ``[first, last)`` of a request to the pool.

        Args:
            request_id: a request that holds blocks; those from ``last`` on are not in
                the prefix cache (see :meth:`uncache`).
            first: first logical block to free; all before it are null already.
            last: end of the range, exclusive.

        Returns:
            Ids of the physical blocks that held the request until now, from
            logical block ``first`` to its last one; and of those among them that the
            prefix cache keeps.
        """
        blocks = self.req_to_blocks[request_id]
        assert 0 <= first < last < len(blocks), (first, last, len(blocks))
        assert first == 0 or blocks[first - 1].is_null, (request_id, first)
        assert all(block.block_hash is None for block in blocks[last:]), request_id
        held = self._start_rewriting(request_id, first)
        freed = blocks[first:last]
        self._exclusive.difference_update(block.block_id for block in freed)
        self._remove_blocks_in_range(request_id, first, last)
        assert blocks[last - 1].is_null and not blocks[last].is_null
        return held, [b.block_id for b in freed if b.block_hash is not None]

    def keep_prefix(self, request_id: str, first: int) -> list[int]:
        """What :meth:`evict_prefix` does where nothing is given back: an audit.

        Args:
            request_id: a request that holds blocks; those from ``first`` on are not in
                the prefix cache (see :meth:`uncache`).
            first: first logical block that will be rewritten.

        Returns:
            Ids of the physical blocks from there on.
        """
        blocks = self.req_to_blocks[request_id]
        assert all(block.block_hash is None for block in blocks[first:]), request_id
        return self._start_rewriting(request_id, first)

    def _start_rewriting(self, request_id: str, first: int) -> list[int]:
        blocks = self.req_to_blocks[request_id][first:]
        assert all(block.ref_cnt == 1 for block in blocks), request_id
        self._rewritten.add(request_id)
        return [block.block_id for block in blocks]
