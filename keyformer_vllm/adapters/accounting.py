# SPDX-License-Identifier: Apache-2.0
"""Counts of what eviction does, kept by the scheduler; it knows all but the times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keyformer_vllm.adapters.audit import AuditedStep
from keyformer_vllm.adapters.plan import EvictionEntry
from keyformer_vllm.config import KeyformerConfig
from keyformer_vllm.metrics import StepCounts

REPORT_KEY = "kv_report"
"""Key of a finished request's ``kv_transfer_params`` that holds its report."""


@dataclass
class _RequestAccount:
    """One request: may it evict, how often did it since it last started, and ever.

    Under an audit read "would it have"; the steps count from its first one on.
    """

    may_evict: bool
    reported: bool
    evictions: int = 0
    ever_evicted: bool = False
    steps: int = 0
    steps_at_risk: int = 0
    total_mass_lost: float = 0.0
    max_mass_lost: float = 0.0

    def audit(self, evicted_tokens: int) -> dict[str, int | float]:
        """Its part of a report."""
        return {
            "evicted_tokens": evicted_tokens,
            "evictions": self.evictions,
            "steps": self.steps,
            "steps_at_risk": self.steps_at_risk,
            "mass_lost_mean": self.total_mass_lost / max(1, self.steps),
            "mass_lost_max": self.max_mass_lost,
        }


class Accounting:
    """What the requests of one scheduler evicted.

    Args:
        block_size: tokens per KV cache block.
        audit: whether nothing is really evicted.
    """

    def __init__(self, block_size: int, audit: bool) -> None:
        self.counts = StepCounts()
        self.reported: set[str] = set()
        self.requests: dict[str, _RequestAccount] = {}
        self._block_size = block_size
        self._audit = audit

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
            if self._audit:
                self.counts.add("audit_evicted_tokens", num_evict)
                self.counts.add("audit_evictions")
                continue
            self.counts.add("evicted_tokens", num_evict)
            self.counts.add("freed_blocks", num_evict // self._block_size)
            self.counts.add("compactions")

    def audited(self, steps: Mapping[str, AuditedStep]) -> None:
        """Note what an audit measured in a step, by request id."""
        for request_id, step in steps.items():
            account = self.requests.get(request_id)
            if account is None:  # aborted while the step was under way
                continue
            account.steps += 1
            account.steps_at_risk += step.at_risk
            account.total_mass_lost += step.mass_lost
            account.max_mass_lost = max(account.max_mass_lost, step.mass_lost)
            self.counts.observe("audit_mass_lost", step.mass_lost)
            if step.at_risk:
                self.counts.add("audit_steps_at_risk")

    def dropped(self) -> None:
        """Note an eviction that was due in the step that preempted its request."""
        self.counts.add("skipped_evictions", label_value="preempted")

    def restarted(self, request_id: str) -> None:
        """Note a preemption: the request computes everything anew."""
        self.requests[request_id].evictions = 0

    def report(self, request: Any, evicted_blocks: int) -> dict[str, Any]:
        """What a request evicted and holds, as of its last output.

        Args:
            request: vLLM's ``Request``, still accounted for.
            evicted_blocks: its E.
        """
        account = self.requests[request.request_id]
        evicted = evicted_blocks * self._block_size
        computed = _computed_tokens(request)
        if self._audit:
            return {
                "evicted_tokens": 0,
                "resident_tokens": computed,
                "evictions": 0,
                "audit": account.audit(evicted),
            }
        return {
            "evicted_tokens": evicted,
            "resident_tokens": computed - evicted,
            "evictions": account.evictions,
        }

    def finished(self, request: Any, evicted_blocks: int) -> dict[str, Any] | None:
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
