# SPDX-License-Identifier: Apache-2.0
"""Queries to be scored in one call, and the temperature of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from keyformer_vllm.adapters.request_table import RequestTable
from keyformer_vllm.config import KeyformerConfig
from keyformer_vllm.core.scoring import is_scored, tau_schedule

_T: TypeAlias = torch.Tensor


@dataclass
class ScoreBatch:
    """What ``score_keys`` needs to know of its queries; the same for all layers.

    Args:
        block_table: int32 ``[num_reqs, max_blocks]``, physical.
        kv_lens: int32 ``[num_reqs]``, physical; tokens in the cache up to and
            including a request's last query.
        query_start_loc: int32 ``[num_reqs + 1]``.
        positions: int64 ``[num_tokens]``, logical.
        tau: float32 ``[num_tokens]``; 0 for queries that do not score.
        noise_keys: int64 ``[num_reqs]``; 0 for no noise.
    """

    block_table: torch.Tensor
    kv_lens: torch.Tensor
    query_start_loc: torch.Tensor
    positions: torch.Tensor
    tau: torch.Tensor
    noise_keys: torch.Tensor

    def arguments(self) -> tuple[_T, _T, _T, _T, _T, _T]:
        """In the order in which the operators take them."""
        return (
            self.block_table,
            self.kv_lens,
            self.query_start_loc,
            self.positions,
            self.tau,
            self.noise_keys,
        )


def narrow_table(
    block_table: torch.Tensor, max_kv_len: int, block_size: int
) -> torch.Tensor:
    """The columns that a batch reads: a GPU sizes launches and scratch by the width.

    Args:
        block_table: int32 ``[num_reqs, max_blocks]``, as wide as the longest request
            that the server takes.
        max_kv_len: tokens of the longest request of the batch, at most.
        block_size: tokens of a block.

    Returns:
        A view of the first columns.
    """
    return block_table[:, : -(-max_kv_len // block_size)]


def query_temperatures(
    config: KeyformerConfig,
    table: RequestTable,
    token_rows: np.ndarray[Any, Any],
    positions: torch.Tensor,
) -> torch.Tensor:
    """Temperature of each query, a function of its request and position alone.

    So a query may be scored in its own step or in a later one.

    Args:
        config: the server's policy.
        table: the worker's record of requests.
        token_rows: int64 ``[num_tokens]``, each query's row of the table.
        positions: int64 ``[num_tokens]``, logical.

    Returns:
        float32 ``[num_tokens]``; 0 where a query does not score.
    """

    def column(name: str) -> torch.Tensor:
        return torch.from_numpy(table.column(name)[token_rows])

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
