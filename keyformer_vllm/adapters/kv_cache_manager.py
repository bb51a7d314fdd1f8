# SPDX-License-Identifier: Apache-2.0
"""Block manager that gives a request's leading blocks back while it runs."""

from __future__ import annotations

from keyformer_vllm.adapters import compat


class KeyformerManager(compat.FullAttentionManager):  # type: ignore[misc]
    """Full-attention manager with a null prefix of evicted blocks.

    The list of a request's blocks keeps its logical length; evicted blocks at
    its front are replaced by vLLM's null block, exactly as its sliding-window
    manager does (``vllm/v1/core/single_type_kv_cache_manager.py``). So counts of
    blocks and tokens stay logical everywhere else.
    """

    def evict_prefix(self, request_id: str, first: int, last: int) -> list[int]:
        """Return logical blocks ``[first, last)`` of a request to the pool.

        Args:
            request_id: a request that holds blocks.
            first: first logical block to free; all before it are null already.
            last: end of the range, exclusive.

        Returns:
            Ids of the physical blocks that held the request until now, from
            logical block ``first`` to its last one.
        """
        blocks = self.req_to_blocks[request_id]
        assert 0 <= first < last < len(blocks), (first, last, len(blocks))
        assert first == 0 or blocks[first - 1].is_null, (request_id, first)
        for block in blocks[first:]:
            # A shared or hashed block must never be rewritten by compaction.
            assert block.ref_cnt == 1 and block.block_hash is None, block
        held = [block.block_id for block in blocks[first:]]
        self._remove_blocks_in_range(request_id, first, last)
        assert blocks[last - 1].is_null and not blocks[last].is_null
        return held
