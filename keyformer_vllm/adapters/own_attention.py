# SPDX-License-Identifier: Apache-2.0
"""Rows that our own kernel attends, beside those left to vLLM's.

Our kernel reads K and V once for output and scores, and takes an ALiBi bias from
stored positions; vLLM's would take it from the place in the cache. Which kernel a row
gets depends on its request alone, never on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from keyformer_vllm.adapters.score_batch import ScoreBatch


@dataclass
class OwnAttention:
    """Requests of a step that our kernel attends, one token each.

    Args:
        batch: these requests; rows with a temperature of 0 attend without scoring.
        front_blocks: int32 ``[num_reqs]``, leading blocks with tokens that an audit
            takes for evicted; None: no audit.
        tokens: int64, their tokens of the step; None when they are all of it, and
            vLLM's kernel has nothing to do.
        rest: int64, the other tokens, where vLLM's kernel is to see these alone.
    """

    batch: ScoreBatch
    front_blocks: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    rest: torch.Tensor | None = None


def without_requests(
    common: Any, gone: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]
) -> tuple[Any, torch.Tensor]:
    """The part of a batch that is left to vLLM's kernel.

    Args:
        common: vLLM's ``CommonAttentionMetadata``.
        gone: bool ``[num_reqs]``, requests to take out; some, but not all.
        lengths: ``[num_reqs]`` tokens of the step.

    Returns:
        Metadata of the other requests as if they were the batch, and their tokens in
        the whole batch, int64.
    """
    kept = ~gone
    requests = torch.from_numpy(np.flatnonzero(kept))
    tokens = torch.from_numpy(np.flatnonzero(np.repeat(kept, lengths)))
    starts = np.zeros(len(requests) + 1, np.int32)
    np.cumsum(lengths[kept], out=starts[1:])
    query_start_loc = torch.from_numpy(starts)
    seq_lens = common.seq_lens[requests]
    rest = common.replace(
        num_reqs=len(requests),
        num_actual_tokens=len(tokens),
        max_query_len=int(lengths[kept].max()),
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=common.block_table_tensor[requests],
        slot_mapping=common.slot_mapping[tokens],
        positions=common.positions[tokens],
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )
    return rest, tokens
