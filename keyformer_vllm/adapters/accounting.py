# SPDX-License-Identifier: Apache-2.0
"""Counts of what eviction does, kept by the scheduler; it knows all but the times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keyformer_vllm.adapters.plan import EvictionEntry
from keyformer_vllm.config import KeyformerConfig
from keyformer_vllm.metrics import StepCounts

REPORT_KEY = "kv_report"
"""Key of a finished request's ``kv_transfer_params`` that holds its report."""


@dataclass
class _RequestAccount:
    """One request: may it evict, how often did it since it last started, and ever."""

    may_evict: bool
    reported: bool
    evictions: int = 0
    ever_evicted: bool = False


class Accounting:
    """What the requests of one scheduler evicted.

    Args:
        block_size: tokens per KV cache block.
    """

    def __init__(self, block_size: int) -> None:
        self.counts = StepCounts()
        self.reported: set[str] = set()
        self.requests: dict[str, _RequestAccount] = {}
        self._block_size = block_size

    def arrived(self, request_id: str, config: KeyformerConfig, reported: bool) -> None:
        """Note a new request.

        Args:
            request_id: of a request not known yet.
            config: its settings.
            reported: whether its answer shall tell what it evicted.
        """
        self.requests[request_id] = _RequestAccount(config.evicts, reported)
        self.counts.add("requests", label_value=config.policy)
        if reported:
            self.reported.add(request_id)

    def evicted(self, evictions: Mapping[str, EvictionEntry]) -> None:
        """Note the evictions that the workers carry out in a step, by request id."""
        for request_id, entry in evictions.items():
            account = self.requests[request_id]
            account.evictions += 1
            account.ever_evicted = True
            num_evict = entry.counts.num_evict
            self.counts.add("evicted_tokens", num_evict)
            self.counts.add("freed_blocks", num_evict // self._block_size)
        if evictions:
            self.counts.add("compactions", len(evictions))

    def dropped(self) -> None:
        """Note an eviction that was due in the step that preempted its request."""
        self.counts.add("skipped_evictions", label_value="preempted")

    def restarted(self, request_id: str) -> None:
        """Note a preemption: the request computes everything anew."""
        self.requests[request_id].evictions = 0

    def report(self, request: Any, evicted_blocks: int) -> dict[str, int]:
        """What a request evicted and holds, as of its last output.

        Args:
            request: vLLM's ``Request``, still accounted for.
            evicted_blocks: its E.
        """
        evicted = evicted_blocks * self._block_size
        return {
            "evicted_tokens": evicted,
            "resident_tokens": _computed_tokens(request) - evicted,
            "evictions": self.requests[request.request_id].evictions,
        }

    def finished(self, request: Any, evicted_blocks: int) -> dict[str, int] | None:
        """Close the account of a request, however it ended.

        Args:
            request: vLLM's ``Request``.
            evicted_blocks: its E.

        Returns:
            Its report, where one was asked for.
        """
        request_id = request.request_id
        account = self.requests[request_id]
        report = self.report(request, evicted_blocks) if account.reported else None
        if not account.ever_evicted:
            if not account.may_evict:
                reason = "opted_out"
            elif _computed_tokens(request) <= request.num_prompt_tokens:
                reason = "prompt"
            else:
                reason = "within_budget"
            self.counts.add("skipped_evictions", label_value=reason)
        del self.requests[request_id]
        self.reported.discard(request_id)
        return report


def _computed_tokens(request: Any) -> int:
    """Tokens in the cache, without those of steps that are still under way."""
    computed: int = request.num_computed_tokens - request.num_in_flight_tokens
    return max(0, computed)
