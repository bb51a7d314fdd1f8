# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the workers: resolved integers, nothing else.

Counts are decided here once, so that every rank evicts the same number of tokens
without talking; which tokens go is each rank's, layer's and head's own business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from keyformer_vllm.core.retention import Eviction

PLAN_ATTRIBUTE = "keyformer_plan"
"""Attribute of vLLM's ``SchedulerOutput`` that carries the :class:`StepPlan`."""


@dataclass(frozen=True)
class RequestParams:
    """Constants of one request that scoring and selection need.

    Args:
        tracked: whether the request may ever evict; an untracked one is served
            as by stock vLLM and costs nothing.
        scores: whether its queries score the keys they see.
        noise_key: key of its noise stream; 0 for no noise.
        num_prompt_tokens: prompt length, in tokens.
        max_tokens: the most tokens it may generate; the temperature ends there.
        first_scored: position of the first query that scores.
        query_stride: from there to the end of the prompt, every how many queries one
            scores, counted back from the newest.
        uses_tau: whether its temperature follows the schedule; else it is 1.
        run_size: 1 to select tokens, 16 to select whole runs.
        random: whether candidates are ranked at random instead of by score.
    """

    tracked: bool
    scores: bool
    noise_key: int
    num_prompt_tokens: int
    max_tokens: int
    first_scored: int
    query_stride: int
    uses_tau: bool
    run_size: int
    random: bool


@dataclass(frozen=True)
class EvictionEntry:
    """One request's eviction in this step.

    Args:
        block_ids: physical blocks that hold the request before the eviction,
            front first.
        counts: how many tokens go and stay, the same for all layers and heads.
        cached_ids: those of the blocks given back that the prefix cache keeps; what is
            in them stays.
    """

    block_ids: list[int]
    counts: Eviction
    cached_ids: list[int] = field(default_factory=list)


@dataclass
class StepPlan:
    """What one scheduler step asks of the workers, in the order of the fields.

    Copies are of keys and values only, as pairs (source, target) of physical blocks.

    Args:
        new_requests: by request id.
        cache_copies: copies that the prefix cache keeps of what is rewritten next.
        evictions: by request id.
        hit_copies: copies of cached blocks for requests admitted in this step.
        hits: by id of each admitted request that may evict, the physical blocks that
            hold the start of it already; the scores in them are started anew.
    """

    new_requests: dict[str, RequestParams] = field(default_factory=dict)
    cache_copies: list[tuple[int, int]] = field(default_factory=list)
    evictions: dict[str, EvictionEntry] = field(default_factory=dict)
    hit_copies: list[tuple[int, int]] = field(default_factory=list)
    hits: dict[str, list[int]] = field(default_factory=dict)


def plan_of(scheduler_output: Any) -> StepPlan:
    """The plan on a ``SchedulerOutput``.

    Raises:
        RuntimeError: when there is none, that is, when another scheduler made
            it: workers must never guess what was evicted.
    """
    plan = getattr(scheduler_output, PLAN_ATTRIBUTE, None)
    if plan is None:
        raise RuntimeError(
            "a KV policy is on but the scheduler sent no eviction plan; "
            "scheduler_cls must be left to keyformer_vllm"
        )
    assert isinstance(plan, StepPlan), type(plan)
    return plan
