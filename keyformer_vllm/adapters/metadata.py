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
from keyformer_vllm.adapters.query_ring import QueryRing, RingWrite
from keyformer_vllm.adapters.score_batch import ScoreBatch, query_temperatures

if TYPE_CHECKING:
    from keyformer_vllm.adapters.runtime import WorkerRuntime


@dataclass
class KeyformerCPUMetadata(compat.CPUAttentionMetadata):  # type: ignore[misc]
    """vLLM's CPU metadata plus what becomes of the step's queries.

    Args:
        scoring: queries that score in this step; None: none does.
        ring_write: queries that wait; None: none does.
    """

    scoring: ScoreBatch | None = None
    ring_write: RingWrite | None = None


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
        request_ids = runtime.batch_request_ids()
        common = common_attn_metadata
        assert len(request_ids) == common.num_reqs, (
            len(request_ids),
            common.num_reqs,
        )
        rows = table.rows_of(request_ids)
        evicted = table.column("evicted_blocks")[rows]
        if evicted.any():
            common = self._to_physical(common, torch.from_numpy(evicted))
        base = super().build(common_prefix_len, common, fast_build)
        metadata = KeyformerCPUMetadata(**vars(base))
        if table.column("tracked")[rows].any():
            self._prepare_side_data(common, runtime, rows, metadata)
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

    def _prepare_side_data(
        self,
        common: Any,
        runtime: WorkerRuntime,
        rows: np.ndarray[Any, Any],
        metadata: KeyformerCPUMetadata,
    ) -> None:
        """Reset the step's slots and say which of its queries score, and when."""
        num_tokens = common.num_actual_tokens
        positions = common.positions[:num_tokens]
        # The step's blocks are handed out and nobody has read them yet. Recycled
        # blocks are not zeroed by vLLM, and a stale score would live on.
        runtime.reset_slots(common.slot_mapping[:num_tokens], positions)
        table = runtime.table
        starts = common.query_start_loc_cpu.numpy()
        lengths = np.diff(starts)
        scores = table.column("scores")[rows]
        waits = np.zeros_like(scores)
        if runtime.ring is not None:
            waits = scores & (lengths == 1)
            self._flush_ring(common, runtime, runtime.ring, rows, lengths)
        if waits.any():
            assert runtime.ring is not None
            tokens = starts[:-1][waits]
            metadata.ring_write = runtime.ring.append(
                rows[waits], tokens, positions.numpy()[tokens], num_tokens
            )
        if not (scores & ~waits).any():
            return
        token_rows = np.repeat(rows, lengths)
        tau = query_temperatures(runtime.config, table, token_rows, positions)
        tau.masked_fill_(torch.from_numpy(np.repeat(waits, lengths)), 0.0)
        if not (tau > 0).any():
            return
        metadata.scoring = ScoreBatch(
            block_table=common.block_table_tensor,
            kv_lens=common.seq_lens,
            query_start_loc=common.query_start_loc,
            positions=positions,
            tau=tau,
            noise_keys=torch.from_numpy(table.column("noise_key")[rows]),
        )

    def _flush_ring(
        self,
        common: Any,
        runtime: WorkerRuntime,
        ring: QueryRing,
        rows: np.ndarray[Any, Any],
        lengths: np.ndarray[Any, Any],
    ) -> None:
        """Score what can wait no longer, before the queries of this step.

        That is a full row of the ring, and a row whose request computes several
        tokens now: rows of a request are scored in the order of their positions.
        """
        waiting = runtime.table.column("num_waiting")[rows]
        due = (waiting == ring.depth) | ((waiting > 0) & (lengths > 1))
        if not due.any():
            return
        before = common.seq_lens.numpy()[due] - lengths[due]
        runtime.score_waiting(
            rows[due],
            common.block_table_tensor[torch.from_numpy(due)],
            torch.from_numpy(before),
        )
