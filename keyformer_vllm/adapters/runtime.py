# SPDX-License-Identifier: Apache-2.0
"""What a worker keeps between steps: requests, pages, and how it evicts."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from keyformer_vllm import ops
from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.audit import StepAudit
from keyformer_vllm.adapters.plan import EvictionEntry, StepPlan, plan_of
from keyformer_vllm.adapters.query_ring import QueryRing, RingShape
from keyformer_vllm.adapters.ranks import HeadShare, RankCheck, ReplicaGroup
from keyformer_vllm.adapters.request_table import RequestTable
from keyformer_vllm.adapters.score_batch import (
    ScoreBatch,
    narrow_table,
    query_temperatures,
)
from keyformer_vllm.adapters.score_mode import score_mode_in_use
from keyformer_vllm.adapters.scoring_impl import LayerSide
from keyformer_vllm.adapters.trace import TraceWriter
from keyformer_vllm.config import KeyformerConfig
from keyformer_vllm.metrics import StepCounts
from keyformer_vllm.ops.layout import key_and_value, place_view, side_views

POISON_KEY, POISON_VALUE, POISON_PLACE = float("nan"), 1e4, 2**30
"""What freed blocks hold under ``poison_freed``. V stays finite: a freed block soon
is another request's last one, and vLLM's attention multiplies the V of slots behind a
request's end with a weight of zero, which NaN and infinity would survive (their K it
masks). Unlike NaN, this value cannot show a read whose weight is zero."""


class WorkerRuntime:
    """Eviction state of one worker; lives as long as its KV cache.

    Args:
        config: the server's policy.
        vllm_config: vLLM's configuration, model already loaded.
        model_runner: the worker's model runner, KV cache already bound.
        rank: the worker's rank, for the trace file's name.
        backend: the attention backend that every layer must be on.
        impl: implementation of the operators (``ops.IMPLS``).

    Raises:
        RuntimeError: when the KV cache is not laid out as expected.
    """

    def __init__(
        self,
        config: KeyformerConfig,
        vllm_config: Any,
        model_runner: Any,
        rank: int,
        *,
        backend: Any,
        impl: str,
    ) -> None:
        self.config = config
        self.impl = impl
        self.table = RequestTable()
        self.in_step = False
        self.counts = StepCounts()
        self._model_runner = model_runner
        layers = compat.attention_layers(vllm_config)
        foreign = [
            name
            for name, layer in layers.items()
            if layer.get_attn_backend() is not backend
        ]
        if foreign or not layers:
            raise RuntimeError(
                "a KV policy needs every attention layer on its own backend; "
                f"not on it: {foreign or 'no attention layer found'}"
            )
        self.kv_pages = _stack_layers(list(layers.values()))
        self.block_size = self.kv_pages.shape[3]
        self.score, self.position = side_views(self.kv_pages)
        self.place: torch.Tensor | None = None
        if config.compact_positions:
            self.place = place_view(self.kv_pages)
        self.layout = backend.check_pages(
            vllm_config, list(layers.values()), self.kv_pages, config.compact_positions
        )
        first_impl = next(iter(layers.values())).impl
        tp_group = compat.get_tp_group()
        total_query_heads, total_kv_heads = compat.total_heads(vllm_config)
        self.heads = HeadShare.of_rank(
            tp_group.rank_in_group,
            tp_group.world_size,
            num_query_heads=first_impl.num_heads,
            num_kv_heads=first_impl.num_kv_heads,
            total_query_heads=total_query_heads,
            total_kv_heads=total_kv_heads,
        )
        self.replicas: ReplicaGroup | None = None
        if self.heads.num_replicas > 1:
            self.replicas = ReplicaGroup.create(self.heads.num_replicas)
        self.rank_check: RankCheck | None = None
        if config.check_ranks:
            self.rank_check = RankCheck(tp_group.cpu_group)
        self.first_layer = compat.extract_layer_index(next(iter(layers)))
        self.impls = [layer.impl for layer in layers.values()]
        self.has_alibi = compat.uses_alibi(vllm_config)
        if any((i.alibi_slopes is not None) != self.has_alibi for i in self.impls):
            raise RuntimeError(
                "a KV policy needs an ALiBi bias in every layer or in none, as the "
                "model's configuration says"
            )
        self.score_mode = score_mode_in_use(config, vllm_config)
        self.ring: QueryRing | None = None
        if self.score_mode == "deferred":
            shape = RingShape.of_layers(vllm_config, layers)
            self.ring = QueryRing(shape, self.table, self.kv_pages.device)
        self.audit: StepAudit | None = None
        if config.audit:
            num_rows = vllm_config.scheduler_config.max_num_seqs
            self.audit = StepAudit(
                len(layers), num_rows, first_impl.num_heads, self.kv_pages.device
            )
        for index, (name, layer) in enumerate(layers.items()):
            layer.impl.side = LayerSide(
                layer_index=compat.extract_layer_index(name),
                first_query_head=self.heads.first_query_head,
                score=self.score[index],
                position=self.position[index],
                place=None if self.place is None else self.place[index],
                layout=self.layout,
                impl=impl,
                ring=self.ring.layer(index) if self.ring is not None else None,
                audit=self.audit.layer(index) if self.audit is not None else None,
                counts=self.counts,
            )
        for builder in compat.metadata_builders(model_runner):
            builder.bind(self)
        self.trace: TraceWriter | None = None
        if config.trace is not None:
            engine = vllm_config.parallel_config.data_parallel_index
            self.trace = TraceWriter(config.trace, rank, engine)

    def batch_request_ids(self, common: Any) -> list[str]:
        """Request ids of the batch being run, in row order.

        Args:
            common: vLLM's ``CommonAttentionMetadata`` of the batch.
        """
        return compat.batch_request_ids(self._model_runner, common)

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """A host array on the device of the cache, without waiting for it.

        Args:
            array: not changed afterwards: on a CPU the result may share its memory.
        """
        return compat.to_device(array, self.kv_pages.device)

    def execute_model(
        self, execute: Any, scheduler_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Evict what the plan says, then run the step.

        Args:
            execute: the model runner's own ``execute_model``.
            scheduler_output: vLLM's ``SchedulerOutput`` with our plan on it.
            args: further arguments, handed through.
            kwargs: the same; ``dummy_run`` marks a step that no scheduler made.
        """
        if kwargs.get("dummy_run"):
            return execute(scheduler_output, *args, **kwargs)
        plan = plan_of(scheduler_output)
        if self.ring is not None:
            gone = scheduler_output.finished_req_ids
            gone = gone.union(scheduler_output.preempted_req_ids or ())
            self.ring.release(self.table.known_rows(gone))
        self.table.update(scheduler_output, plan)
        self.table.start_step(scheduler_output)
        # Ordered before this step's writes, and so before any reuse of the freed
        # blocks by another request; and as the plan demands among each other.
        with torch.inference_mode():
            if plan.cache_copies:
                self._copy_blocks(plan.cache_copies)
            if plan.evictions:
                self._evict(plan.evictions)
            if plan.hit_copies:
                self._copy_blocks(plan.hit_copies)
            for block_ids in plan.hits.values():
                self._start_scores(block_ids)
        if self.rank_check is not None:
            self._check_plan(self.rank_check, plan)
        if self.trace is not None:
            self.trace.record(self, scheduler_output, plan)
        if self.audit is not None:
            self.audit.forget()
        self.in_step = True
        try:
            return execute(scheduler_output, *args, **kwargs)
        finally:
            self.in_step = False

    def sample_tokens(self, sample: Any, *args: Any) -> Any:
        """Finish the step and send what was counted in it along with its tokens.

        Args:
            sample: the model runner's own ``sample_tokens``.
            args: its arguments, handed through.
        """
        # Before sampling, which changes logits in place.
        audited = {}
        if self.audit is not None:
            audited = self.audit.take(compat.pending_logits(self._model_runner))
        output = sample(*args)
        compat.attach_step_counts(output, self.counts.take())
        if audited:
            compat.attach_audit(output, audited)
        return output

    def _evict(self, evictions: dict[str, EvictionEntry]) -> None:
        """Select and compact all layers and heads of all due requests."""
        entries = list(evictions.values())
        rows = self.table.rows_of(list(evictions))
        block_table = self.upload(_block_table([e.block_ids for e in entries]))
        counts = np.array(
            [
                (c.kv_len_before, c.num_evict, c.num_sinks, c.recent_start)
                for c in (entry.counts for entry in entries)
            ],
            np.int32,
        ).T.copy()
        self.score_waiting(rows, block_table, counts[0])
        kv_lens, num_evict, num_sinks, recent_start = self.upload(counts).unbind()
        started = perf_counter_ns()
        score, position, choose_from = self.score, self.position, block_table
        if self.replicas is not None:
            score, position, numbers = self.replicas.selection(
                score, position, [entry.block_ids for entry in entries]
            )
            choose_from = self.upload(_block_table(numbers))
        keep = ops.select_keep(
            score,
            position,
            choose_from,
            kv_lens,
            num_evict,
            num_sinks,
            recent_start,
            self.upload(self.table.column("run_size")[rows]),
            self.upload(self.table.column("random")[rows]),
            self.upload(self.table.column("noise_key")[rows]),
            max_kv_len=max(entry.counts.kv_len_before for entry in entries),
            first_layer=self.first_layer,
            first_kv_head=self.heads.first_kv_head,
            impl=self.impl,
        )
        selected = perf_counter_ns()
        # An audit keeps those that would be gone, in the blocks that would be.
        move = ops.compact_kv if self.audit is None else ops.exchange_kv
        move(
            self.kv_pages,
            self.score,
            self.position,
            block_table,
            kv_lens,
            num_evict,
            keep,
            layout=self.layout,
            impl=self.impl,
        )
        if self.place is not None:
            self._renumber(entries)
        self.counts.add("selection_seconds", selected - started)
        self.counts.add("compaction_seconds", perf_counter_ns() - selected)
        if self.config.poison_freed:
            self.poison_blocks(
                block
                for entry in entries
                for block in self._blocks(entry)[0]
                if block not in entry.cached_ids
            )

    def _copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy keys and values of all layers; no source is among the targets."""
        sources, targets = self.upload(np.array(pairs, np.int64).T.copy()).unbind()
        for pages in self.kv_pages:  # one layer at a time keeps what lies between small
            pages.index_copy_(0, targets, pages.index_select(0, sources))

    def _start_scores(self, block_ids: list[int]) -> None:
        """Start the side data of a request whose first tokens were in the cache.

        Who wrote these blocks may not have kept any, and its scores were its own.
        """
        slots = np.array(block_ids, np.int64)[:, None] * self.block_size
        slots = (slots + np.arange(self.block_size)).flatten()
        positions = self.upload(np.arange(len(slots)))
        self.reset_slots(self.upload(slots), positions, positions)

    def _check_plan(self, check: RankCheck, plan: StepPlan) -> None:
        """Assert that all ranks did the same in this step, and in all before."""
        check.compare("the plan of a step", plan)
        check.compare("evicted blocks", self.table.values("evicted_blocks"))
        if self.replicas is not None:
            kept = {
                request_id: self.kept_positions(entry)
                for request_id, entry in plan.evictions.items()
            }
            RankCheck(self.replicas.group).compare("tokens of a shared KV head", kept)

    def _renumber(self, entries: list[EvictionEntry]) -> None:
        """Give the survivors of evictions their places among each other.

        Queries that waited were scored before, under the places they attended with.
        """
        survivors = [self._blocks(entry)[1] for entry in entries]
        ops.renumber_slots(
            self.place,
            self.position,
            self.upload(_block_table(survivors)),
            self.upload(np.array([e.counts.kv_len for e in entries], np.int32)),
            impl=self.impl,
        )

    def score_waiting(
        self,
        rows: np.ndarray[Any, Any],
        block_table: torch.Tensor,
        kv_lens: np.ndarray[Any, Any],
    ) -> None:
        """Score all queries of some requests that wait in the ring, in all layers.

        Args:
            rows: int64 ``[num_reqs]``, rows of the table; none twice.
            block_table: int32 ``[num_reqs, max_blocks]``, physical, on the device.
            kv_lens: int32 ``[num_reqs]``, physical; all tokens computed so far.
        """
        table, ring = self.table, self.ring
        chosen = np.flatnonzero(table.column("num_waiting")[rows])
        if ring is None or not len(chosen):
            return
        if len(chosen) < len(rows):
            block_table = block_table.index_select(0, self.upload(chosen))
            rows, kv_lens = rows[chosen], kv_lens[chosen]
        ends = table.column("waiting_end")[rows]
        places, counts = ring.drain(rows)
        starts = np.concatenate([[0], np.cumsum(counts)])
        positions = np.repeat(ends - starts[1:], counts) + np.arange(starts[-1])
        tau = query_temperatures(
            self.config, table, np.repeat(rows, counts), torch.from_numpy(positions)
        )
        batch = ScoreBatch(
            block_table=narrow_table(block_table, int(kv_lens.max()), self.block_size),
            kv_lens=self.upload(kv_lens),
            query_start_loc=self.upload(starts.astype(np.int32)),
            positions=self.upload(positions),
            tau=self.upload(tau.numpy()),
            noise_keys=self.upload(table.column("noise_key")[rows]),
        )
        waiting = self.upload(places)
        for index, impl in enumerate(self.impls):
            query = ring.layer(index).index_select(0, waiting)
            impl.add_scores(query, self.kv_pages[index], batch)

    def reset_slots(
        self,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor | None,
    ) -> None:
        """Start the side data of the slots that a step is about to write.

        Args:
            slot_mapping: int64 ``[num_tokens]``.
            positions: int64 ``[num_tokens]``, logical.
            places: int64 ``[num_tokens]``, tokens that the request holds before each
                of these; needed only with compact positions.
        """
        ops.reset_slots(
            self.score, self.position, slot_mapping, positions, impl=self.impl
        )
        if self.place is not None:
            assert places is not None
            # The score is new as well; to set it to 0 twice does no harm.
            ops.reset_slots(
                self.score, self.place, slot_mapping, places, impl=self.impl
            )

    def poison_blocks(self, block_ids: Iterable[int]) -> None:
        """Overwrite blocks, so that whoever still reads them shows it.

        Args:
            block_ids: blocks of the pool; K, V and side data are mutated.
        """
        blocks = self.upload(np.array(list(block_ids), np.int64))
        key, value = key_and_value(self.kv_pages, self.layout)
        key.index_fill_(1, blocks, POISON_KEY)
        value.index_fill_(1, blocks, POISON_VALUE)
        self.score.index_fill_(1, blocks, float("nan"))
        self.position.index_fill_(1, blocks, -1)
        if self.place is not None:
            self.place.index_fill_(1, blocks, POISON_PLACE)

    def kept_positions(self, entry: EvictionEntry) -> list[list[list[int]]]:
        """Positions a request retains right after an eviction.

        Args:
            entry: the eviction, already executed.

        Returns:
            Per layer and KV head, sorted positions.
        """
        _, blocks = self._blocks(entry)
        held = self.position[:, blocks]  # [layers, blocks, kv_heads, block_size]
        held = held.transpose(1, 2).flatten(2)[..., : entry.counts.kv_len]
        kept: list[list[list[int]]] = held.sort(dim=-1).values.tolist()
        return kept

    def _blocks(self, entry: EvictionEntry) -> tuple[list[int], list[int]]:
        """Blocks that an eviction frees, and those that hold the survivors."""
        num_freed = entry.counts.num_evict // self.block_size
        return entry.block_ids[:num_freed], entry.block_ids[num_freed:]


def _stack_layers(layers: list[Any]) -> torch.Tensor:
    """One view ``[layers, blocks, kv_heads, block_size, 2 * head_size]`` of all caches.

    vLLM places equal layers at a constant stride in one allocation
    (``vllm/v1/kv_cache_interface.py``, ``KVCacheTensor``).
    """
    caches = [layer.kv_cache for layer in layers]
    first = caches[0]
    item = first.element_size()
    steps = {
        b.data_ptr() - a.data_ptr() for a, b in zip(caches, caches[1:], strict=False)
    }
    same = all(
        c.shape == first.shape
        and c.stride() == first.stride()
        and c.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for c in caches
    )
    if len(steps) > 1 or not same or any(step <= 0 or step % item for step in steps):
        raise RuntimeError(
            "a KV policy needs all layers' KV caches at one stride in one "
            f"allocation; found strides {sorted(steps)}"
        )
    layer_stride = steps.pop() // item if steps else first.stride(0) * first.shape[0]
    return first.as_strided(
        (len(caches), *first.shape),
        (layer_stride, *first.stride()),
        first.storage_offset(),
    )


def _block_table(rows: list[list[int]]) -> np.ndarray[Any, Any]:
    """Rows of blocks as int32 ``[num_reqs, max_blocks]``, filled up with 0."""
    width = max(len(row) for row in rows)
    return np.array([row + [0] * (width - len(row)) for row in rows], np.int32)
