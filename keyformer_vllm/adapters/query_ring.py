# SPDX-License-Identifier: Apache-2.0
"""Queries that wait to be scored until their request evicts.

Scores are only summed, and nothing is evicted between two block boundaries. So the
query of a step that computes one token can wait, and at the boundary one call scores
all that wait: keys are read once per ``block_size`` steps. The sums are the same to
the bit, because rows are added in the same order (``ops.score_keys``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from keyformer_vllm.adapters.request_table import RequestTable

REMEDY = "lower --max-num-seqs or use --kv-score-mode fused"
"""What to do where the ring does not fit."""


@dataclass(frozen=True)
class RingShape:
    """Size of the ring: a row of queries for each request that may run.

    Args:
        num_layers: attention layers of this rank.
        num_rows: requests that run at once (``max_num_seqs``).
        depth: queries that may wait per request (the block size).
        num_query_heads: query heads of this rank.
        head_size: width of a head.
        dtype: of the queries.
    """

    num_layers: int
    num_rows: int
    depth: int
    num_query_heads: int
    head_size: int
    dtype: torch.dtype

    @classmethod
    def of_layers(cls, vllm_config: Any, layers: dict[str, Any]) -> RingShape:
        """The ring of a worker.

        Args:
            vllm_config: vLLM's configuration.
            layers: the loaded model's attention layers, all of one shape.
        """
        layer = next(iter(layers.values()))
        return cls.planned(vllm_config, len(layers), layer.num_heads, layer.head_size)

    @classmethod
    def of_model(cls, vllm_config: Any) -> RingShape:
        """The ring that each worker will have, before there is one."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        return cls.planned(
            vllm_config,
            model.get_num_layers(parallel),
            model.get_num_attention_heads(parallel),
            model.get_head_size(),
        )

    @classmethod
    def planned(
        cls, vllm_config: Any, num_layers: int, num_query_heads: int, head_size: int
    ) -> RingShape:
        return cls(
            num_layers=num_layers,
            num_rows=vllm_config.scheduler_config.max_num_seqs,
            depth=vllm_config.cache_config.block_size,
            num_query_heads=num_query_heads,
            head_size=head_size,
            dtype=vllm_config.model_config.dtype,
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the ring, in bytes."""
        num_queries = self.num_layers * (self.num_rows * self.depth + 1)
        query_size = self.num_query_heads * self.head_size
        return num_queries * query_size * int(self.dtype.itemsize)

    def problem(self, available: int) -> str | None:
        """Why the ring leaves nothing of the memory for the cache; None if it does.

        Args:
            available: bytes that vLLM plans for the KV cache.
        """
        if self.num_bytes < available:
            return None
        return (
            f"the query ring of max_num_seqs={self.num_rows} requests takes "
            f"{self.num_bytes / 2**20:.1f} MiB of the KV cache's "
            f"{available / 2**20:.1f} MiB"
        )


@dataclass
class RingWrite:
    """Where the queries of one step go; the same for all layers.

    Args:
        source: int64 ``[num_queries]``, tokens of the step that are to wait; None
            when they are all of its tokens.
        destination: int64 ``[num_queries]``, places in :meth:`QueryRing.layer`.
    """

    source: torch.Tensor | None
    destination: torch.Tensor

    def store(self, query: torch.Tensor, ring: torch.Tensor) -> None:
        """Copy one layer's queries.

        Args:
            query: ``[num_tokens, num_query_heads, head_size]``, after RoPE.
            ring: the layer's part of the ring. Mutated.
        """
        if self.source is not None:
            query = query.index_select(0, self.source)
        ring.index_copy_(0, self.destination, query)


class QueryRing:
    """Waiting queries of all layers, ``block_size`` of them for each request.

    A request holds a row of the ring while any query of it waits. The queries of one
    request are consecutive positions. Which row, how many wait and where they end
    stands in the request table: ``ring_row``, ``num_waiting`` and ``waiting_end``.

    Args:
        shape: fixes the memory, which is allocated here and never again.
        table: the worker's record of requests.
        device: where the queries wait.
    """

    def __init__(
        self,
        shape: RingShape,
        table: RequestTable,
        device: torch.device | str = "cpu",
    ) -> None:
        self.depth = shape.depth
        self._table = table
        self._free = list(range(shape.num_rows))
        # [num_layers, num_rows * depth + 1, num_query_heads, head_size]
        self._queries = torch.empty(
            (
                shape.num_layers,
                shape.num_rows * shape.depth + 1,
                shape.num_query_heads,
                shape.head_size,
            ),
            dtype=shape.dtype,
            device=device,
        )
        self._source = torch.empty(shape.num_rows, dtype=torch.int64)
        self._destination = torch.empty(shape.num_rows, dtype=torch.int64)

    @property
    def padding(self) -> int:
        """The last place: of queries that are to be written but not to wait."""
        last: int = self._queries.shape[1] - 1
        return last

    @property
    def num_free(self) -> int:
        """Rows that no request holds."""
        return len(self._free)

    def layer(self, index: int) -> torch.Tensor:
        """One layer's queries, ``[num_places, num_query_heads, head_size]``."""
        return self._queries[index]

    def append(
        self,
        rows: np.ndarray[Any, Any],
        tokens: np.ndarray[Any, Any],
        positions: np.ndarray[Any, Any],
        num_tokens: int,
    ) -> RingWrite:
        """Make room for one more query of each request.

        Args:
            rows: int64 ``[num_queries]``, the requests' rows of the table; at most
                ``depth - 1`` queries of each wait already.
            tokens: ``[num_queries]``, their tokens of the step.
            positions: ``[num_queries]``, logical.
            num_tokens: tokens of the step.

        Returns:
            What the layers have to copy; its tensors are reused by the next call.
        """
        count = len(rows)
        destination = self._destination[:count]
        destination.numpy()[:] = self.reserve(rows, positions)
        if count == num_tokens:
            return RingWrite(None, destination)
        source = self._source[:count]
        source.numpy()[:] = tokens
        return RingWrite(source, destination)

    def reserve(
        self, rows: np.ndarray[Any, Any], positions: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """As :meth:`append`, but returns the places, int64 ``[num_queries]``."""
        table = self._table
        waiting = table.column("num_waiting")
        ring_row, end = table.column("ring_row"), table.column("waiting_end")
        before = waiting[rows]
        new = rows[before == 0]
        # Rows belong to running requests, so there is one for each of them.
        assert len(new) <= len(self._free), (len(new), len(self._free))
        ring_row[new] = [self._free.pop() for _ in range(len(new))]
        assert (before < self.depth).all(), before.max()
        assert ((before == 0) | (end[rows] == positions)).all(), (rows, positions)
        waiting[rows] = before + 1
        end[rows] = positions + 1
        places: np.ndarray[Any, Any] = ring_row[rows] * self.depth + before
        return places

    def drain(
        self, rows: np.ndarray[Any, Any]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Hand out what waits, oldest first, and give the rows of the ring back.

        Args:
            rows: int64 ``[num_reqs]``, rows of the table.

        Returns:
            Places in :meth:`layer`, int64 ``[num_queries]``, to be read before the
            next :meth:`append`; and how many belong to each request, ``[num_reqs]``.
        """
        counts = self._table.column("num_waiting")[rows]
        firsts = self._table.column("ring_row")[rows] * self.depth
        before = np.cumsum(counts) - counts
        places = np.repeat(firsts - before, counts) + np.arange(counts.sum())
        self.release(rows)
        return places, counts

    def release(self, rows: np.ndarray[Any, Any]) -> None:
        """Drop what waits for requests that finish or are preempted.

        Args:
            rows: int64 ``[num_reqs]``, rows of the table; none twice.
        """
        waiting = self._table.column("num_waiting")
        held = rows[waiting[rows] > 0]
        self._free.extend(self._table.column("ring_row")[held].tolist())
        waiting[held] = 0
