# SPDX-License-Identifier: Apache-2.0
"""Attention metadata after eviction: shifted block tables and physical lengths.

The one place where logical becomes physical. A request whose ``E`` leading
blocks are gone is shown to attention with its block-table row shifted left by
``E`` and its length shortened by ``E * block_size``. Nothing else changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.own_attention import OwnAttention, without_requests
from keyformer_vllm.adapters.query_ring import RingWrite
from keyformer_vllm.adapters.score_batch import ScoreBatch, query_temperatures
from keyformer_vllm.adapters.step_scoring import batch_to_score, flush_ring

if TYPE_CHECKING:
    from keyformer_vllm.adapters.runtime import WorkerRuntime


@dataclass
class KeyformerCPUMetadata(compat.CPUAttentionMetadata):  # type: ignore[misc]
    """vLLM's CPU metadata plus what becomes of the step's queries.

    Args:
        scoring: queries that score in this step; None: none does.
        ring_write: queries that wait; None: none does.
        own: rows that our kernel attends; None: none. vLLM's part of the metadata then
            covers the other rows only.
        num_step_tokens: all tokens of the step, padding not counted.
    """

    scoring: ScoreBatch | None = None
    ring_write: RingWrite | None = None
    own: OwnAttention | None = None
    num_step_tokens: int = 0


class KeyformerCPUMetadataBuilder(compat.CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Builds vLLM's own CPU metadata over the physical view of the batch.

    Until :meth:`bind` and outside a real step (profiling, warm-up) it is vLLM's
    builder unchanged. See ``vllm/v1/attention/backends/cpu_attn.py``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._runtime: WorkerRuntime | None = None
        self._columns: torch.Tensor | None = None
        self._block_table: torch.Tensor | None = None

    def bind(self, runtime: WorkerRuntime) -> None:
        """Connect to the worker's record of requests."""
        self._runtime = runtime

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
    ) -> Any:
        runtime = self._runtime
        if runtime is None or not runtime.in_step:
            base = super().build(common_prefix_len, common_attn_metadata, fast_build)
            return KeyformerCPUMetadata(**vars(base))
        table = runtime.table
        common = common_attn_metadata
        request_ids = runtime.batch_request_ids(common)
        assert len(request_ids) == common.num_reqs, (
            len(request_ids),
            common.num_reqs,
        )
        rows = table.rows_of(request_ids)
        evicted = table.column("evicted_blocks")[rows]
        # An audit leaves all tokens where attention finds them.
        if runtime.audit is None and evicted.any():
            common = self._to_physical(common, torch.from_numpy(evicted))
        if runtime.rank_check is not None:
            lengths_read = dict(zip(request_ids, common.seq_lens.tolist(), strict=True))
            runtime.rank_check.compare("tokens that attention reads", lengths_read)
        lengths = np.diff(common.query_start_loc_cpu.numpy())
        own = _own_requests(runtime, rows, lengths)
        stock, rest = common, None
        if own.any() and not own.all():
            stock, rest = without_requests(common, own, lengths)
        base = super().build(common_prefix_len, stock, fast_build)
        metadata = KeyformerCPUMetadata(
            **vars(base), num_step_tokens=common.num_actual_tokens
        )
        if table.column("tracked")[rows].any():
            _reset_slots(common, runtime, evicted, lengths)
            self._plan_scoring(common, runtime, rows, lengths, own, metadata)
        if own.any():
            metadata.own = _own_attention(common, runtime, rows, own, rest)
            if runtime.audit is not None:
                runtime.audit.plan(request_ids, np.flatnonzero(own), evicted)
        return metadata

    def _to_physical(self, common: Any, evicted: torch.Tensor) -> Any:
        """Shift block-table rows and shorten lengths by the evicted blocks."""
        logical = common.block_table_tensor
        num_reqs, width = logical.shape
        if self._block_table is None or self._block_table.shape[1] != width:
            capacity = self.vllm_config.scheduler_config.max_num_seqs
            self._block_table = torch.zeros((capacity, width), dtype=logical.dtype)
            self._columns = torch.arange(width)
        assert self._columns is not None
        shifted = self._block_table[:num_reqs]
        source = (self._columns + evicted[:, None]).clamp_(max=width - 1)
        torch.gather(logical, 1, source, out=shifted)
        gone = evicted * self.block_size
        seq_lens = common.seq_lens - gone
        return common.replace(
            block_table_tensor=shifted,
            seq_lens=seq_lens,
            max_seq_len=int(seq_lens.max()),
            seq_lens_cpu_upper_bound=seq_lens,
            _num_computed_tokens_cache=None,
        )

    def _plan_scoring(
        self,
        common: Any,
        runtime: WorkerRuntime,
        rows: np.ndarray[Any, Any],
        lengths: np.ndarray[Any, Any],
        own: np.ndarray[Any, Any],
        metadata: KeyformerCPUMetadata,
    ) -> None:
        """Say which of the step's queries score beside attention, and which wait."""
        num_tokens = common.num_actual_tokens
        positions = common.positions[:num_tokens].numpy()
        scores = runtime.table.column("scores")[rows]
        # Requests whose queries score elsewhere: in our own attention kernel, or later.
        elsewhere = own & (runtime.score_mode == "fused")
        if runtime.ring is not None:
            elsewhere = scores & (lengths == 1)
            kv_lens = common.seq_lens.numpy()
            flush_ring(runtime, rows, lengths, common.block_table_tensor, kv_lens)
            if elsewhere.any():
                tokens = common.query_start_loc_cpu.numpy()[:-1][elsewhere]
                metadata.ring_write = runtime.ring.append(
                    rows[elsewhere], tokens, positions[tokens], num_tokens
                )
        metadata.scoring = batch_to_score(
            runtime, common, rows, lengths, positions, elsewhere
        )


def _own_requests(
    runtime: WorkerRuntime,
    rows: np.ndarray[Any, Any],
    lengths: np.ndarray[Any, Any],
) -> np.ndarray[Any, Any]:
    """Requests of the batch that our kernel attends, bool ``[num_reqs]``."""
    table = runtime.table
    own = np.zeros(len(rows), np.bool_)
    if runtime.score_mode == "fused":
        own |= table.column("scores")[rows] & (lengths == 1)
    if runtime.has_alibi or runtime.audit is not None:
        # Nothing was evicted yet: places in the cache are positions, and there is
        # nothing to measure. Afterwards only decode steps come.
        evicted = table.column("evicted_blocks")[rows] > 0
        assert (lengths[evicted] == 1).all(), lengths
        own |= evicted
    return own


def _own_attention(
    common: Any,
    runtime: WorkerRuntime,
    rows: np.ndarray[Any, Any],
    own: np.ndarray[Any, Any],
    rest: torch.Tensor | None,
) -> OwnAttention:
    requests = torch.from_numpy(np.flatnonzero(own))
    tokens = common.query_start_loc_cpu[:-1][requests].long()
    positions = common.positions[tokens]
    rows = rows[own]
    if runtime.score_mode == "fused":
        tau = query_temperatures(runtime.config, runtime.table, rows, positions)
    else:
        tau = torch.zeros(len(rows))
    batch = ScoreBatch(
        block_table=common.block_table_tensor[requests],
        kv_lens=common.seq_lens[requests],
        query_start_loc=torch.arange(len(rows) + 1, dtype=torch.int32),
        positions=positions,
        tau=tau,
        noise_keys=torch.from_numpy(runtime.table.column("noise_key")[rows]),
    )
    front_blocks = None
    if runtime.audit is not None:
        evicted = runtime.table.column("evicted_blocks")[rows]
        front_blocks = torch.from_numpy(evicted)
    return OwnAttention(batch, front_blocks, None if rest is None else tokens, rest)


def _reset_slots(
    common: Any,
    runtime: WorkerRuntime,
    evicted: np.ndarray[Any, Any],
    lengths: np.ndarray[Any, Any],
) -> None:
    """Start the side data of the step's slots.

    Its blocks are handed out and nobody has read them yet. Recycled blocks are not
    zeroed by vLLM, and a stale score would live on.
    """
    num_tokens = common.num_actual_tokens
    positions = common.positions[:num_tokens]
    places = None
    if runtime.place is not None:
        gone = np.repeat(evicted * runtime.block_size, lengths)
        places = positions - torch.from_numpy(gone)
    runtime.reset_slots(common.slot_mapping[:num_tokens], positions, places)
