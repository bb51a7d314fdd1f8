# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with ours in front, and a worker without a model behind it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from keyformer_vllm.adapters.compat import attach_audit, take_step_counts
from keyformer_vllm.adapters.plan import plan_of
from keyformer_vllm.metrics import PREFIX, StepCounts
from tests.adapters.fake_worker import FakeWorker

BLOCK_SIZE = 32
TOKEN, STOP_TOKEN = 2, 3
"""What the model samples: always the first, and the other one for those in
:attr:`Harness.stopping`."""


class Harness:
    """One scheduler, one fake worker, and the loop between them."""

    def __init__(self, model: Any, num_blocks: int, **settings: Any) -> None:
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import (
            get_request_block_hasher,
            init_none_hash,
        )
        from vllm.v1.core.single_type_kv_cache_manager import (
            register_all_kvcache_specs,
        )
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        from keyformer_vllm.adapters.kv_cache_spec import KeyformerSpec
        from keyformer_vllm.adapters.scheduler import make_scheduler

        engine = {"max_num_seqs": 8, "max_num_batched_tokens": 256}
        engine |= settings.pop("engine", {})
        caching = settings.pop("caching", False)
        # With vLLM's asynchronous scheduler one step is under way while the next
        # one is scheduled.
        self.steps_in_flight = settings.pop("steps_in_flight", 0)
        policy = {"policy": "keyformer", "budget": 0.5, "min_tokens": 32} | settings
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_model_len=2048,
            enable_prefix_caching=caching,
            async_scheduling=False,
            **engine,
        ).create_engine_config()
        config.additional_config = {"keyformer": policy}
        # The CPU platform turns it off; the scheduler itself needs no device.
        config.scheduler_config.async_scheduling = self.steps_in_flight > 0
        register_all_kvcache_specs(config)
        spec = KeyformerSpec.from_full_attention(
            FullAttentionSpec(
                block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32
            ),
            has_places=policy.get("positions") == "compact",
        )
        group = KVCacheGroupSpec(["layer"], spec)
        config.cache_config.num_gpu_blocks = num_blocks
        self.scheduler = make_scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [group]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        self.audit = policy.get("audit", False)
        self.worker = FakeWorker(BLOCK_SIZE, TOKEN, audit=self.audit)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.num_blocks = num_blocks
        self.block_hasher = None
        if caching:
            init_none_hash(sha256)
            self.block_hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.hashed: dict[bytes, list[Any]] = {}
        """Hash of a block to what full attention would store in it."""
        self.finished: set[str] = set()
        self.stopping: set[str] = set()
        self.counts = StepCounts()
        """Of all steps, as sent to the front end."""
        self.gauges: dict[str, int] = {}
        """As last sent."""
        self.reports: dict[str, Any] = {}
        self.planned: list[Any] = []
        self.measured: dict[str, Any] = {}
        """What workers send of an audit, in every step that a request is part of."""
        self.pending: deque[tuple[Any, list[str], list[list[int]]]] = deque()

    def add(
        self, name: str, prompt: int | Sequence[int], new: int, **extra: Any
    ) -> Any:
        """Hand in a request; a prompt given by its length is the same token again."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(
            max_tokens=new,
            ignore_eos=True,
            stop_token_ids=[STOP_TOKEN],
            extra_args=extra or None,
        )
        tokens = [1] * prompt if isinstance(prompt, int) else list(prompt)
        request = Request(name, tokens, params, None, block_hasher=self.block_hasher)
        self.worker.add(name, tokens)
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        output = self.scheduler.schedule()
        # The worker's queue is in order: it sees a step's plan and blocks exactly
        # when it runs that step, however far the scheduler is ahead.
        self.worker.step(output)
        self.check_rewritten(output)
        self.check_cache()
        self.planned += plan_of(output).evictions.values()
        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        sampled = [
            []
            if request.is_prefill_chunk
            else [STOP_TOKEN if request.request_id in self.stopping else TOKEN]
            for request in requests
        ]
        self.pending.append((output, names, sampled))
        while len(self.pending) > self.steps_in_flight:
            self._update()
        self.check_invariants()
        return output

    def _update(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        output, names, sampled = self.pending.popleft()
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        measured = {n: self.measured[n] for n in names if n in self.measured}
        if measured:
            attach_audit(result, measured)
        results = self.scheduler.update_from_output(output, result)
        for batch in results.values():
            if batch.scheduler_stats is not None:
                sent = take_step_counts(batch.scheduler_stats)
                self.gauges = {
                    name: sent.pop(PREFIX + name)
                    for name in ("resident_tokens", "logical_tokens")
                }
                self.counts.merge(sent)
            for answer in batch.outputs:
                if answer.kv_transfer_params is not None:
                    self.reports[answer.request_id] = answer.kv_transfer_params
                if answer.finish_reason is not None:
                    self.finished.add(answer.request_id)

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_unfinished_requests():
                while self.pending:
                    self._update()
                self.worker.step(self.scheduler.schedule())  # the last departures
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps")

    def blocks_of(self, name: str) -> list[Any]:
        return self.scheduler.kv_manager.req_to_blocks[name]

    def check_invariants(self) -> None:
        """Every block is free or held, who evicts shares none, only the null prefix
        is null."""
        held: Counter[int] = Counter()
        alone: list[int] = []
        for name, blocks in self.scheduler.kv_manager.req_to_blocks.items():
            evicted = self.scheduler.evicted_blocks.get(name, 0)
            if self.audit:
                evicted = 0
            assert [block.is_null for block in blocks] == [
                index < evicted for index in range(len(blocks))
            ], (name, evicted)
            ids = [block.block_id for block in blocks[evicted:]]
            assert len(ids) == len(set(ids))
            held.update(ids)
            if name in self.scheduler.retentions:
                alone += ids
        assert all(held[block] == 1 for block in alone)
        free = self.pool.free_block_queue.get_all_free_blocks()
        assert len(free) == self.pool.free_block_queue.num_free_blocks
        assert len(free) + len(held) == self.num_blocks - 1
        assert not {block.block_id for block in free} & set(held)
        assert all(
            block.ref_cnt == held[block.block_id]
            for block in self.pool.blocks
            if not block.is_null
        )

    def check_rewritten(self, output: Any) -> None:
        """Nobody else holds what was rewritten, and nobody can hit it."""
        for name, entry in plan_of(output).evictions.items():
            freed = 0 if self.audit else entry.counts.num_evict // BLOCK_SIZE
            for index in entry.block_ids[freed:]:
                block = self.pool.blocks[index]
                assert block.ref_cnt == 1 and block.block_hash is None, (name, block)

    def check_cache(self) -> None:
        """Whoever hits a block finds in it what its tokens would give."""
        from vllm.v1.core.kv_cache_utils import get_block_hash

        for name, request in self.scheduler.requests.items():
            for index, block_hash in enumerate(request.block_hashes):
                if block_hash not in self.hashed:
                    ends = index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE
                    self.hashed[block_hash] = self.worker.clean(name, *ends)
        for block in self.pool.blocks:
            if block.block_hash is not None:
                expected = self.hashed[get_block_hash(block.block_hash)]
                assert self.worker.content_of(block.block_id) == expected

    def check_idle(self) -> None:
        self.check_invariants()
        scheduler = self.scheduler
        assert self.pool.get_num_free_blocks() == self.num_blocks - 1
        for table in (
            scheduler.requests,
            scheduler.retentions,
            scheduler.request_params,
            scheduler.evicted_blocks,
            scheduler.kv_manager.req_to_blocks,
            scheduler.accounting.requests,
            scheduler.accounting.reported,
            scheduler.kv_manager.num_cached_block,
            scheduler.kv_manager._exclusive,
            scheduler.kv_manager._rewritten,
        ):
            assert not table
