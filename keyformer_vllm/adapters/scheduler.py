# SPDX-License-Identifier: Apache-2.0
"""Scheduler that decides, from integers alone, how much each request evicts.

It sits in front of vLLM's own scheduler (``vllm/v1/core/sched/scheduler.py``):
before each step it frees the blocks that running requests no longer need, so
that the very same step can hand them to others, and attaches to the step's
output the plan by which workers compact the survivors first.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.accounting import REPORT_KEY, Accounting
from keyformer_vllm.adapters.kernels import kernels_in_use
from keyformer_vllm.adapters.kv_cache_manager import BlockCopies, KeyformerManager
from keyformer_vllm.adapters.kv_cache_spec import KeyformerSpec
from keyformer_vllm.adapters.plan import (
    PLAN_ATTRIBUTE,
    EvictionEntry,
    RequestParams,
    StepPlan,
)
from keyformer_vllm.adapters.query_ring import RingShape
from keyformer_vllm.adapters.requests import resolve_request
from keyformer_vllm.adapters.score_mode import score_mode_in_use
from keyformer_vllm.config import (
    KeyformerConfig,
    config_from_additional,
    wants_report,
)
from keyformer_vllm.core.capacity import estimate_capacity
from keyformer_vllm.core.policies import get_policy
from keyformer_vllm.core.retention import Eviction, Retention
from keyformer_vllm.ops.layout import PLACE_BYTES_PER_SLOT

logger = compat.plugin_logger(__name__)


def make_scheduler(**kwargs: Any) -> Any:
    """The scheduler for ``--scheduler-cls``: ours over the one vLLM would choose.

    Args:
        kwargs: what vLLM passes to a scheduler class; handed through.
    """
    vllm_config = kwargs["vllm_config"]
    is_async = vllm_config.scheduler_config.async_scheduling
    return (KeyformerAsyncScheduler if is_async else KeyformerScheduler)(**kwargs)


class KeyformerSchedulerMixin:
    """Evicts before each step; everything else is the scheduler beneath it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = config_from_additional(self.vllm_config.additional_config)  # type: ignore[attr-defined]
        if config is None:
            raise RuntimeError("this scheduler needs a KV policy; none is configured")
        self.kv_config: KeyformerConfig = config
        managers = compat.kv_cache_managers(self)
        # An import error of a plugin is only logged by vLLM; so is a spec that
        # lost its manager. Neither may turn into silently full attention.
        if len(managers) != 1 or type(managers[0]) is not KeyformerManager:
            raise RuntimeError(
                "a KV policy needs one KV cache group under KeyformerManager, "
                f"vLLM made {[type(manager).__name__ for manager in managers]}"
            )
        self.kv_manager: KeyformerManager = managers[0]
        self.retentions: dict[str, Retention] = {}
        self.kv_manager.evicting = self.retentions
        self.request_params: dict[str, RequestParams] = {}
        self.evicted_blocks: dict[str, int] = {}
        self.accounting = Accounting(self.kv_manager.block_size, config.audit)
        logger.info(describe_policy(config, self.vllm_config, self.kv_cache_config))  # type: ignore[attr-defined]

    def add_request(self, request: Any) -> None:
        # First what can raise: a request refused here must not stay in a queue.
        config, retention, params = resolve_request(
            self.kv_config, request, self.kv_manager.block_size
        )
        super().add_request(request)  # type: ignore[misc]
        if params.tracked:
            self.retentions[request.request_id] = retention
        self.request_params[request.request_id] = params
        reported = wants_report(request.sampling_params.extra_args)
        self.accounting.arrived(request.request_id, config, reported)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        evictions, cache_copies = self._evict_due_requests()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        # A request preempted in this very step lost all its blocks: nothing of
        # it is left to compact.
        for request_id in output.preempted_req_ids or ():
            if evictions.pop(request_id, None) is not None:
                self.accounting.dropped()
        self.accounting.evicted(evictions)
        new_requests = {
            new.req_id: self.request_params[new.req_id]
            for new in output.scheduled_new_reqs
        }
        hit_copies, hits = self.kv_manager.take_hits()
        plan = StepPlan(new_requests, cache_copies, evictions, hit_copies, hits)
        setattr(output, PLAN_ATTRIBUTE, plan)
        return output

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any
    ) -> Any:
        self.accounting.counts.merge(compat.take_step_counts(model_runner_output))
        if self.kv_config.audit:
            self.accounting.audited(compat.take_audit(model_runner_output))
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if self.accounting.reported:
            self._report_running(outputs)
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None:
            logical = sum(r.num_computed_tokens for r in self.running)  # type: ignore[attr-defined]
            evicted = 0
            if not self.kv_config.audit:
                evicted = sum(self.evicted_blocks.values()) * self.kv_manager.block_size
            counts = self.accounting.counts
            counts.add("logical_tokens", logical)
            counts.add("resident_tokens", logical - evicted)
            compat.attach_step_counts(stats, counts.take())
        return stats

    def _evict_due_requests(self) -> tuple[dict[str, EvictionEntry], BlockCopies]:
        """Free blocks of every request past its budget by a block or more.

        Under an audit all of it is worked out and no block is freed.

        Returns:
            The evictions, and the copies that come before them.
        """
        due: dict[str, Eviction] = {}
        for request in self.running:  # type: ignore[attr-defined]
            retention = self.retentions.get(request.request_id)
            # Prompt attention is full. The flag also covers a request that was
            # preempted and computes its prompt and answer anew.
            if retention is None or request.is_prefill_chunk:
                continue
            first = self.evicted_blocks.get(request.request_id, 0)
            eviction = retention.eviction(request.num_computed_tokens, first)
            if eviction is not None:
                due[request.request_id] = eviction
        # An audit exchanges tokens with blocks that an eviction would give back.
        copies = self.kv_manager.uncache(
            {
                request_id: (
                    self.evicted_blocks.get(request_id, 0)
                    if self.kv_config.audit
                    else eviction.evicted_blocks
                )
                for request_id, eviction in due.items()
            }
        )
        evictions: dict[str, EvictionEntry] = {}
        for request_id, eviction in due.items():
            first = self.evicted_blocks.get(request_id, 0)
            cached: list[int] = []
            if self.kv_config.audit:
                held = self.kv_manager.keep_prefix(request_id, first)
            else:
                held, cached = self.kv_manager.evict_prefix(
                    request_id, first, eviction.evicted_blocks
                )
            self.evicted_blocks[request_id] = eviction.evicted_blocks
            evictions[request_id] = EvictionEntry(held, eviction, cached)
        return evictions, copies

    def _get_local_prefix_cache_hit(self, request: Any) -> Any:
        """vLLM's hit, as far as its blocks can be had and its scores can wait."""
        blocks, num_tokens, *others = super()._get_local_prefix_cache_hit(request)  # type: ignore[misc]
        (found,) = blocks.blocks
        block_size = self.kv_manager.block_size
        usable = self.kv_manager.usable_hit(request.request_id, found)
        params = self.request_params[request.request_id]
        if params.scores:
            # Skipped queries score nothing. The last ones, which tell most about the
            # answer, are computed: those that were asked for, else a block of them.
            first_scored = params.first_scored or params.num_prompt_tokens - block_size
            usable = min(usable, max(0, first_scored) // block_size)
        if usable < len(found):
            num_tokens = usable * block_size
            blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, num_tokens)  # type: ignore[attr-defined]
        return blocks, num_tokens, *others

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        self.evicted_blocks.pop(request.request_id, None)
        self.accounting.restarted(request.request_id)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        params, *others = super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
        request_id = request.request_id
        evicted_blocks = self.evicted_blocks.get(request_id, 0)
        report = self.accounting.finished(request, evicted_blocks)
        if report is not None:
            params = {**(params or {}), REPORT_KEY: report}
        self.retentions.pop(request_id, None)
        self.request_params.pop(request_id, None)
        self.evicted_blocks.pop(request_id, None)
        return params, *others

    def _report_running(self, outputs: Any) -> None:
        """Put reports on the outputs of running requests that asked for one.

        A stop string is found in the front end: which output is the last one is not
        known here.
        """
        for batch in outputs.values():
            for output in batch.outputs:
                request_id = output.request_id
                if request_id in self.accounting.reported:
                    request = self.requests[request_id]  # type: ignore[attr-defined]
                    evicted_blocks = self.evicted_blocks.get(request_id, 0)
                    report = self.accounting.report(request, evicted_blocks)
                    output.kv_transfer_params = {REPORT_KEY: report}


class KeyformerScheduler(KeyformerSchedulerMixin, compat.Scheduler):  # type: ignore[misc]
    """Eviction in front of vLLM's synchronous scheduler."""


class KeyformerAsyncScheduler(KeyformerSchedulerMixin, compat.AsyncScheduler):  # type: ignore[misc]
    """Eviction in front of vLLM's asynchronous scheduler."""


def describe_policy(
    config: KeyformerConfig, vllm_config: Any, kv_cache_config: Any
) -> str:
    """One line on what is on, and what it costs and gives.

    Args:
        config: the server's policy.
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's KV cache configuration, one group.
    """
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    assert isinstance(spec, KeyformerSpec), type(spec)
    block_size = spec.block_size
    side = spec.page_size_bytes - spec.unpadded_page_size_bytes
    places = ""
    if config.compact_positions:
        num_bytes = spec.num_kv_heads * block_size * PLACE_BYTES_PER_SLOT
        places = f", {num_bytes} of them for positions compact"
    max_model_len = vllm_config.model_config.max_model_len
    scheduling = vllm_config.scheduler_config
    capacity = estimate_capacity(
        # The longest prompt that leaves room for an answer of an eviction interval.
        config.retention(max(1, max_model_len - block_size), block_size),
        num_new_tokens=min(block_size, max_model_len - 1) + 1,
        num_blocks=kv_cache_config.num_blocks - 1,
        watermark_blocks=int(scheduling.watermark * kv_cache_config.num_blocks),
    )
    running = (
        f"{capacity.running}, {capacity.running_without_eviction} without eviction"
    )
    if config.audit:
        running = (
            f"{capacity.running_without_eviction}, {capacity.running} with eviction"
        )
    elif scheduling.max_num_seqs < capacity.running:
        running += (
            f"; max_num_seqs={scheduling.max_num_seqs} caps it: "
            f"raise it to {capacity.running}"
        )
    kernels = ring = ""
    if compat.on_gpu():
        kernels = f"{kernels_in_use(config)} kernels beside {config.attention}; "
    score_mode = score_mode_in_use(config, vllm_config)
    if score_mode == "deferred":
        shape = RingShape.of_model(vllm_config)
        ring = (
            f"query ring {shape.num_bytes / 2**20:.2f} MiB "
            f"for {shape.num_rows} requests; "
        )
    what = (
        "tokens" if isinstance(config.budget, int) else f"of the {config.budget_base}"
    )
    choice = _describe_choice(config, score_mode)
    audit = " (audit: nothing is evicted)" if config.audit else ""
    return (
        f"KV policy {config.policy}{audit}: budget {config.budget} {what} "
        f"(at least {config.min_tokens} tokens), {choice}; "
        f"block size {block_size}, side data {side} bytes "
        f"per block and layer{places} "
        f"({100 * side / spec.page_size_bytes:.1f} % of a page); "
        f"{kernels}{ring}"
        f"{max_model_len}-token requests running at once: {running}"
    )


def _describe_choice(config: KeyformerConfig, score_mode: str) -> str:
    """What decides who stays; settings that the policy ignores are left out."""
    policy = get_policy(config.policy)
    parts = [f"{config.sinks} sinks"] if policy.uses_sinks else []
    if policy.window is None:
        return ", ".join([*parts, "recent window all the rest"])
    per_mille = policy.window(1000, Fraction(str(config.recent_ratio)))
    share = f"{per_mille / 10:g} % of the budget" if per_mille > 1 else "1 token"
    parts.append(f"recent window {share if per_mille else 'none'}")
    parts.append(f"selecting by {config.select}")
    if policy.scores:
        noise = config.noise if policy.uses_noise else "none"
        parts.append(
            f"noise {noise}, score queries {config.score_queries}, "
            f"score mode {score_mode}"
        )
    return ", ".join(parts)
