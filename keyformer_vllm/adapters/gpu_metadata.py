# SPDX-License-Identifier: Apache-2.0
"""Attention metadata after eviction on a GPU: persistent buffers, no wait.

A FULL graph replays what it captured, so everything that attention and the query ring
read lies in buffers that live as long as the builder. They are filled here, outside of
the graph, from what the host knows: how many blocks each request of the batch gave
back, at which temperature each query scores, and where each is to wait.

In score mode ``fused`` every request that computes one token is attended by our kernel,
whatever its policy: a graph of a decode step holds one kernel for all of its rows, and
which one a request gets must not depend on whether its step fits a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.own_attention import OwnAttention
from keyformer_vllm.adapters.query_ring import RingWrite
from keyformer_vllm.adapters.score_batch import ScoreBatch, query_temperatures
from keyformer_vllm.adapters.step_scoring import batch_to_score, flush_ring

if TYPE_CHECKING:
    from keyformer_vllm.adapters.runtime import WorkerRuntime


@dataclass
class _Queries:
    """What becomes of the step's queries after attention.

    Args:
        scoring: queries that score in this step; None: none does.
        ring_write: queries that wait; None: none does.
        own: rows that our kernel attends; None: none.
        num_step_tokens: tokens that the first two speak of, the first ones of the step.
    """

    scoring: ScoreBatch | None = None
    ring_write: RingWrite | None = None
    own: OwnAttention | None = None
    num_step_tokens: int = 0


@dataclass
class KeyformerFlashMetadata(_Queries, compat.FlashAttentionMetadata):  # type: ignore[misc]
    """vLLM's FlashAttention metadata plus what becomes of the step's queries."""


@dataclass
class KeyformerTritonMetadata(_Queries, compat.TritonAttentionMetadata):  # type: ignore[misc]
    """vLLM's Triton attention metadata plus what becomes of the step's queries."""


@dataclass
class _Step:
    """What the host knows of the batch; padding of a graph left out.

    Args:
        rows: int64 ``[num_reqs]``, rows of the request table.
        lengths: int32 ``[num_reqs]``, tokens of the step.
        first: int64 ``[num_reqs]``, position of each request's first token.
        evicted: int32 ``[num_reqs]``, blocks given back.
    """

    rows: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]
    first: np.ndarray[Any, Any]
    evicted: np.ndarray[Any, Any]

    @property
    def one_token(self) -> np.ndarray[Any, Any]:
        """Requests that compute one token, bool ``[num_reqs]``."""
        alone: np.ndarray[Any, Any] = self.lengths == 1
        return alone

    @property
    def starts(self) -> np.ndarray[Any, Any]:
        """First token of each request in the step, int64 ``[num_reqs]``."""
        starts: np.ndarray[Any, Any] = np.cumsum(self.lengths) - self.lengths
        return starts.astype(np.int64)

    def positions(self) -> np.ndarray[Any, Any]:
        """Logical position of each token, int64 ``[num_tokens]``."""
        offsets = np.repeat(self.first - self.starts, self.lengths)
        positions: np.ndarray[Any, Any] = offsets + np.arange(len(offsets))
        return positions


class GPUMetadataBuilder:
    """Shows a builder of vLLM the physical view of the batch; a base of ours.

    Outside a real step (profiling, warm-up, capture of graphs) nothing was evicted and
    no query waits, but the same buffers are handed on.
    """

    # vLLM would exchange the block table of finished metadata for a logical one.
    supports_update_block_table = False
    metadata_class: type[Any]
    device: torch.device
    vllm_config: Any
    kv_cache_spec: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._runtime: WorkerRuntime | None = None
        config = self.vllm_config
        # Rows of the largest batch, graphs' padding included; one token each.
        self._capacity = max(
            config.scheduler_config.max_num_seqs,
            config.compilation_config.max_cudagraph_capture_size or 0,
        )
        rows = self._capacity
        self._evicted = self._buffer(rows, torch.int32)
        self._seq_lens = self._buffer(rows, torch.int32)
        self._ring_places = self._buffer(rows, torch.int64)
        self._tau = self._buffer(rows, torch.float32)
        self._noise_keys = self._buffer(rows, torch.int64)
        self._one_each = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        self._block_table: torch.Tensor | None = None
        self._source: torch.Tensor | None = None
        self._columns: torch.Tensor | None = None

    @classmethod
    def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> Any:
        """FULL graphs for decode steps only: prompts score outside of graphs."""
        support = super().get_cudagraph_support(*args, **kwargs)  # type: ignore[misc]
        decode_only = compat.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return min(support, decode_only, key=lambda level: level.value)

    def bind(self, runtime: WorkerRuntime) -> None:
        """Connect to the worker's record of requests."""
        self._runtime = runtime

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
    ) -> Any:
        runtime, common = self._runtime, common_attn_metadata
        if runtime is None:  # vLLM measures what graphs take, before there is a cache
            base = super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
            return self.metadata_class(**vars(base))
        step = self._step_of(runtime, common) if runtime.in_step else None
        stock = common = self._to_physical(common, step)
        own = None
        if runtime.score_mode == "fused":
            own, stock = self._share_rows(runtime, common, step)
        base = super().build(common_prefix_len, stock, fast_build)  # type: ignore[misc]
        metadata = self.metadata_class(**vars(base), own=own)
        if step is not None and runtime.table.column("tracked")[step.rows].any():
            num_tokens = int(step.lengths.sum())
            metadata.num_step_tokens = num_tokens
            # Its blocks are handed out and nobody has read them yet. Recycled blocks
            # are not zeroed by vLLM, and a stale score would live on.
            runtime.reset_slots(
                common.slot_mapping[:num_tokens], common.positions[:num_tokens], None
            )
            self._plan_scoring(runtime, common, step, metadata)
        elif runtime.ring is not None and common.max_query_len == 1:
            self._wait_nowhere(runtime, common, metadata)
        return metadata

    def _buffer(self, size: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)

    def _step_of(self, runtime: WorkerRuntime, common: Any) -> _Step:
        request_ids = runtime.batch_request_ids(common)
        table, num_reqs = runtime.table, len(request_ids)
        assert num_reqs <= common.num_reqs, (num_reqs, common.num_reqs)
        rows = table.rows_of(request_ids)
        return _Step(
            rows=rows,
            lengths=np.diff(common.query_start_loc_cpu.numpy()[: num_reqs + 1]),
            first=table.column("num_computed")[rows],
            evicted=table.column("evicted_blocks")[rows],
        )

    def _to_physical(self, common: Any, step: _Step | None) -> Any:
        """Shift block-table rows and shorten lengths by the evicted blocks."""
        logical = common.block_table_tensor
        num_rows, width = logical.shape
        if self._block_table is None:
            size = (self._capacity, width)
            self._block_table = self._buffer(size, logical.dtype)
            self._source = self._buffer(size, torch.int64)
            self._columns = torch.arange(width, device=self.device)
        assert self._source is not None and self._columns is not None
        # Graphs hold the address: a table of another width would not be read by them.
        assert self._block_table.shape[1] == width, (self._block_table.shape, width)
        block_size = self.kv_cache_spec.block_size
        on_host = np.zeros(self._capacity, np.int32)
        changes: dict[str, Any] = {}
        if step is not None:
            num_reqs = len(step.rows)
            on_host[:num_reqs] = step.evicted
            lengths = np.zeros(common.num_reqs, np.int32)
            lengths[:num_reqs] = step.first + step.lengths - step.evicted * block_size
            changes["max_seq_len"] = int(lengths.max())
            changes["seq_lens_cpu_upper_bound"] = torch.from_numpy(lengths)
        compat.fill_from_host(self._evicted, on_host)
        evicted = self._evicted[:num_rows]
        source, shifted = self._source[:num_rows], self._block_table[:num_rows]
        torch.add(self._columns, evicted[:, None], out=source)
        source.clamp_(max=width - 1)
        torch.gather(logical, 1, source, out=shifted)
        seq_lens = self._seq_lens[: len(common.seq_lens)]
        torch.sub(
            common.seq_lens,
            self._evicted[: len(common.seq_lens)],
            alpha=block_size,
            out=seq_lens,
        )
        return common.replace(
            block_table_tensor=shifted,
            seq_lens=seq_lens,
            _num_computed_tokens_cache=None,
            **changes,
        )

    def _share_rows(
        self, runtime: WorkerRuntime, common: Any, step: _Step | None
    ) -> tuple[OwnAttention | None, Any]:
        """Rows that our kernel attends, and the batch as vLLM's kernel is to see it."""
        if common.max_query_len == 1:
            return self._all_rows(runtime, common, step), common
        own = np.zeros(0, np.int64) if step is None else np.flatnonzero(step.one_token)
        if step is None or len(own) == 0:
            return None, common
        requests = runtime.upload(own)
        positions = step.first[own]
        tau, noise_keys = _score_settings(runtime, step.rows[own], positions)
        batch = ScoreBatch(
            block_table=common.block_table_tensor.index_select(0, requests),
            kv_lens=common.seq_lens.index_select(0, requests),
            query_start_loc=self._one_each[: len(own) + 1],
            positions=runtime.upload(positions),
            tau=runtime.upload(tau),
            noise_keys=runtime.upload(noise_keys),
        )
        tokens = runtime.upload(step.starts[own])
        # vLLM's kernel keeps the batch and reads nothing for these: cheaper than to
        # gather queries and outputs of prompts in every layer. It writes zeros, which
        # ours overwrites.
        others = np.ones(len(common.seq_lens), np.int32)
        others[own] = 0
        lengths = common.seq_lens * runtime.upload(others)
        own_rows = OwnAttention(batch, tokens=tokens)
        return own_rows, common.replace(seq_lens=lengths)

    def _all_rows(
        self, runtime: WorkerRuntime, common: Any, step: _Step | None
    ) -> OwnAttention:
        """A step of one token each; graphs capture it with nothing to score."""
        tau = np.zeros(self._capacity, np.float32)
        noise_keys = np.zeros(self._capacity, np.int64)
        if step is not None:
            assert step.one_token.all(), step.lengths
            real = slice(len(step.rows))
            tau[real], noise_keys[real] = _score_settings(
                runtime, step.rows, step.first
            )
        compat.fill_from_host(self._tau, tau)
        compat.fill_from_host(self._noise_keys, noise_keys)
        num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
        batch = ScoreBatch(
            block_table=common.block_table_tensor[:num_reqs],
            kv_lens=common.seq_lens[:num_reqs],
            query_start_loc=common.query_start_loc[: num_reqs + 1],
            positions=common.positions[:num_tokens],
            tau=self._tau[:num_tokens],
            noise_keys=self._noise_keys[:num_reqs],
        )
        return OwnAttention(batch)

    def _plan_scoring(
        self, runtime: WorkerRuntime, common: Any, step: _Step, metadata: Any
    ) -> None:
        """Say which of the step's queries score after attention, and which wait."""
        num_reqs = len(step.rows)
        positions = step.positions()
        common = common.replace(
            block_table_tensor=common.block_table_tensor[:num_reqs],
            seq_lens=common.seq_lens[:num_reqs],
            query_start_loc=common.query_start_loc[: num_reqs + 1],
        )
        elsewhere = runtime.table.column("scores")[step.rows] & step.one_token
        if runtime.ring is not None:
            self._let_wait(runtime, common, step, elsewhere, metadata)
        metadata.scoring = batch_to_score(
            runtime, common, step.rows, step.lengths, positions, elsewhere
        )

    def _let_wait(
        self,
        runtime: WorkerRuntime,
        common: Any,
        step: _Step,
        waits: np.ndarray[Any, Any],
        metadata: Any,
    ) -> None:
        """Give each query that waits its place in the ring."""
        ring = runtime.ring
        assert ring is not None
        kv_lens = common.seq_lens_cpu_upper_bound.numpy()[: len(step.rows)]
        flush_ring(runtime, step.rows, step.lengths, common.block_table_tensor, kv_lens)
        tokens = step.starts[waits]
        places = ring.reserve(step.rows[waits], step.first[waits])
        if common.max_query_len == 1:
            on_host = np.full(self._capacity, ring.padding, np.int64)
            on_host[tokens] = places
            self._write_all(common, metadata, on_host)
        elif len(tokens):
            metadata.ring_write = RingWrite(
                runtime.upload(tokens), runtime.upload(places)
            )

    def _wait_nowhere(self, runtime: WorkerRuntime, common: Any, metadata: Any) -> None:
        """A step of one token each whose queries are nobody's, as graphs capture it."""
        assert runtime.ring is not None
        self._write_all(
            common, metadata, np.full(self._capacity, runtime.ring.padding, np.int64)
        )

    def _write_all(
        self, common: Any, metadata: Any, on_host: np.ndarray[Any, Any]
    ) -> None:
        """Send every token of the step to a place; one shape for graphs to capture."""
        compat.fill_from_host(self._ring_places, on_host)
        num_tokens = common.num_actual_tokens
        metadata.ring_write = RingWrite(None, self._ring_places[:num_tokens])
        metadata.num_step_tokens = num_tokens


def _score_settings(
    runtime: WorkerRuntime,
    rows: np.ndarray[Any, Any],
    positions: np.ndarray[Any, Any],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Temperatures and noise keys of requests that compute one token each."""
    tau = query_temperatures(
        runtime.config, runtime.table, rows, torch.from_numpy(positions)
    )
    return tau.numpy(), runtime.table.column("noise_key")[rows]


class KeyformerFlashMetadataBuilder(
    GPUMetadataBuilder,
    compat.FlashAttentionMetadataBuilder,  # type: ignore[misc]
):
    """FlashAttention's; its schedule is made from the shortened lengths."""

    metadata_class = KeyformerFlashMetadata


class KeyformerTritonMetadataBuilder(
    GPUMetadataBuilder,
    compat.TritonAttentionMetadataBuilder,  # type: ignore[misc]
):
    """Triton attention's."""

    metadata_class = KeyformerTritonMetadata
