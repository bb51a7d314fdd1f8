# SPDX-License-Identifier: Apache-2.0
"""Which queries of a step score at once, and which waiting ones can wait no longer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from keyformer_vllm.adapters.score_batch import (
    ScoreBatch,
    narrow_table,
    query_temperatures,
)

if TYPE_CHECKING:
    from keyformer_vllm.adapters.runtime import WorkerRuntime


def flush_ring(
    runtime: WorkerRuntime,
    rows: np.ndarray[Any, Any],
    lengths: np.ndarray[Any, Any],
    block_table: torch.Tensor,
    kv_lens: np.ndarray[Any, Any],
) -> None:
    """Score what can wait no longer, before the queries of this step.

    That is a full row of the ring, and a row whose request computes several tokens
    now: rows of a request are scored in the order of their positions.

    Args:
        runtime: the worker's state, with a ring.
        rows: int64 ``[num_reqs]``, the batch's rows of the table.
        lengths: ``[num_reqs]``, tokens of the step.
        block_table: int32 ``[num_reqs, max_blocks]``, physical, on the device.
        kv_lens: int32 ``[num_reqs]``, physical, this step's tokens included.
    """
    assert runtime.ring is not None
    waiting = runtime.table.column("num_waiting")[rows]
    due = (waiting == runtime.ring.depth) | ((waiting > 0) & (lengths > 1))
    if not due.any():
        return
    chosen = np.flatnonzero(due)
    runtime.score_waiting(
        rows[chosen],
        block_table.index_select(0, runtime.upload(chosen)),
        kv_lens[chosen] - lengths[chosen],
    )


def batch_to_score(
    runtime: WorkerRuntime,
    common: Any,
    rows: np.ndarray[Any, Any],
    lengths: np.ndarray[Any, Any],
    positions: np.ndarray[Any, Any],
    elsewhere: np.ndarray[Any, Any],
) -> ScoreBatch | None:
    """The step's queries that score beside attention; None when none does.

    Args:
        runtime: the worker's state.
        common: vLLM's ``CommonAttentionMetadata``, physical, for these requests.
        rows: int64 ``[num_reqs]``, the batch's rows of the table.
        lengths: ``[num_reqs]``, tokens of the step.
        positions: int64 ``[num_tokens]``, logical.
        elsewhere: bool ``[num_reqs]``, requests whose queries score later or in our
            own attention kernel.
    """
    table = runtime.table
    if not (table.column("scores")[rows] & ~elsewhere).any():
        return None
    on_host = torch.from_numpy(positions)
    tau = query_temperatures(runtime.config, table, np.repeat(rows, lengths), on_host)
    tau.masked_fill_(torch.from_numpy(np.repeat(elsewhere, lengths)), 0.0)
    if not (tau > 0).any():
        return None
    # The cache holds no more tokens of a request than it has positions.
    longest = int(positions.max()) + 1
    return ScoreBatch(
        block_table=narrow_table(
            common.block_table_tensor, longest, runtime.block_size
        ),
        kv_lens=common.seq_lens,
        query_start_loc=common.query_start_loc,
        positions=common.positions[: len(positions)],
        tau=runtime.upload(tau.numpy()),
        noise_keys=runtime.upload(table.column("noise_key")[rows]),
    )
