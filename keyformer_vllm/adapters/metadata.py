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
from keyformer_vllm.core.scoring import is_scored, tau_schedule

if TYPE_CHECKING:
    from keyformer_vllm.adapters.runtime import WorkerRuntime


@dataclass
class ScoringMetadata:
    """What the side data of one step needs, shared by all layers.

    Args:
        block_table: int32 ``[num_reqs, max_blocks]``, physical.
        kv_lens: int32 ``[num_reqs]``, tokens in the cache after this step,
            physical.
        query_start_loc: int32 ``[num_reqs + 1]``.
        positions: int64 ``[num_tokens]``, logical.
        slot_mapping: int64 ``[num_tokens]``.
        tau: float32 ``[num_tokens]``; 0 for queries that do not score.
        noise_keys: int64 ``[num_reqs]``; 0 for no noise.
        scores: whether any query scores.
    """

    block_table: torch.Tensor
    kv_lens: torch.Tensor
    query_start_loc: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    tau: torch.Tensor
    noise_keys: torch.Tensor
    scores: bool


@dataclass
class KeyformerCPUMetadata(compat.CPUAttentionMetadata):  # type: ignore[misc]
    """vLLM's CPU metadata plus ours; ``scoring`` is None when nobody needs it."""

    scoring: ScoringMetadata | None = None


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
        scoring = None
        if table.column("tracked")[rows].any():
            scoring = self._scoring(common, table, rows)
        return KeyformerCPUMetadata(**vars(base), scoring=scoring)

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

    def _scoring(
        self, common: Any, table: Any, rows: np.ndarray[Any, Any]
    ) -> ScoringMetadata:
        num_tokens = common.num_actual_tokens
        starts = common.query_start_loc_cpu.numpy()
        positions = common.positions[:num_tokens]
        token_rows = np.repeat(rows, np.diff(starts))
        tau = self._temperatures(positions, table, token_rows)
        return ScoringMetadata(
            block_table=common.block_table_tensor,
            kv_lens=common.seq_lens,
            query_start_loc=common.query_start_loc,
            positions=positions,
            slot_mapping=common.slot_mapping[:num_tokens],
            tau=tau,
            noise_keys=torch.from_numpy(table.column("noise_key")[rows]),
            scores=bool((tau > 0).any()),
        )

    def _temperatures(
        self, positions: torch.Tensor, table: Any, token_rows: np.ndarray[Any, Any]
    ) -> torch.Tensor:
        """Temperature of each query of the step; 0 where it does not score."""
        assert self._runtime is not None

        def column(name: str) -> torch.Tensor:
            return torch.from_numpy(table.column(name)[token_rows])

        config = self._runtime.config
        num_prompt_tokens = column("num_prompt_tokens")
        tau = tau_schedule(
            positions,
            num_prompt_tokens,
            column("max_tokens"),
            config.tau_init,
            config.tau_end,
        )
        tau.masked_fill_(~column("uses_tau"), 1.0)
        scored = is_scored(positions, num_prompt_tokens, None, column("query_stride"))
        scored &= column("scores") & (positions >= column("first_scored"))
        return tau.masked_fill_(~scored, 0.0)
