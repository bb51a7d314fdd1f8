# SPDX-License-Identifier: Apache-2.0
"""What a layer of ours does beside attending, whatever kernel attends."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

from keyformer_vllm import ops
from keyformer_vllm.adapters.own_attention import OwnAttention
from keyformer_vllm.adapters.score_batch import ScoreBatch
from keyformer_vllm.metrics import StepCounts


@dataclass
class LayerSide:
    """Side data of one layer and what its scores need to know.

    Args:
        layer_index: index of the layer in the whole model, for the noise.
        first_query_head: index of this rank's first query head in the model.
        score: float32 ``[num_blocks, num_kv_heads, block_size]``.
        position: int32, same shape.
        place: int32, same shape; None: the bias, if any, goes by position.
        layout: packing of K and V inside a block.
        impl: implementation of the operators (``ops.IMPLS``).
        ring: the layer's waiting queries (``QueryRing.layer``); None: none wait.
        audit: where the layer leaves what it measured (``StepAudit.layer``); None: no
            audit.
        counts: the worker's, for the time that scoring takes.
    """

    layer_index: int
    first_query_head: int
    score: torch.Tensor
    position: torch.Tensor
    place: torch.Tensor | None
    layout: str
    impl: str
    ring: torch.Tensor | None
    audit: torch.Tensor | None
    counts: StepCounts


class ScoringImpl:
    """Attends rows of ours, scores other queries or lets them wait; a base."""

    side: LayerSide | None = None

    def refuse_unsupported(self, unsupported: dict[str, bool]) -> None:
        """Stop at a layer that no rule at start-up saw.

        Args:
            unsupported: what a policy cannot serve, and whether this layer has it.

        Raises:
            RuntimeError: naming the first of them.
        """
        for what, present in unsupported.items():
            if present:
                raise RuntimeError(
                    f"a KV policy cannot serve this model: a layer uses {what}"
                )

    def attend_own(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        kv_cache: torch.Tensor,
        own: OwnAttention,
    ) -> None:
        """Attend and score rows of ours in one pass over K and V.

        Args:
            query: ``[num_tokens, num_query_heads, head_size]``, after RoPE; all tokens
                of the step, and padding after them.
            output: same shape. Mutated: our rows.
            kv_cache: the layer's cache, with the keys of the queries in it.
            own: which rows are ours.
        """
        if own.tokens is None:  # no copies, and nothing that a graph could not hold
            num_tokens = len(own.batch.positions)
            self._attend_scored(query[:num_tokens], output[:num_tokens], kv_cache, own)
            return
        mine = query.index_select(0, own.tokens)
        attended = torch.empty_like(mine)
        self._attend_scored(mine, attended, kv_cache, own)
        output.index_copy_(0, own.tokens, attended)

    def _attend_scored(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        kv_cache: torch.Tensor,
        own: OwnAttention,
    ) -> None:
        side = self.side
        assert side is not None, "side data was not bound to this layer"
        ops.paged_attention_scored(
            output,
            query,
            kv_cache,
            side.score,
            side.position,
            *own.batch.arguments(),
            **self.score_settings(side),
        )

    def after_attention(
        self, query: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: Any
    ) -> None:
        """Do with the step's queries what the metadata say.

        Args:
            query: ``[num_tokens, num_query_heads, head_size]``, after RoPE, not padded.
            kv_cache: the layer's cache, with the keys of the queries in it.
            attn_metadata: with ``ring_write`` and ``scoring``.
        """
        if attn_metadata.ring_write is not None:
            assert self.side is not None and self.side.ring is not None
            attn_metadata.ring_write.store(query, self.side.ring)
        if attn_metadata.scoring is not None:
            self.add_scores(query, kv_cache, attn_metadata.scoring)

    def add_scores(
        self, query: torch.Tensor, kv_cache: torch.Tensor, batch: ScoreBatch
    ) -> None:
        """Add the scores of queries to the keys they see, in this layer.

        Args:
            query: ``[num_tokens, num_query_heads, head_size]``, after RoPE.
            kv_cache: the layer's cache, with the keys of the queries in it.
            batch: whose queries these are.
        """
        side = self.side
        assert side is not None, "side data was not bound to this layer"
        started = perf_counter_ns()
        ops.score_keys(
            query,
            kv_cache,
            side.score,
            side.position,
            *batch.arguments(),
            **self.score_settings(side),
        )
        side.counts.add("scoring_seconds", perf_counter_ns() - started)

    def score_settings(self, side: LayerSide) -> dict[str, Any]:
        """What the scoring operators need to know of this layer in every step."""
        impl: Any = self  # vLLM's half of the class has the rest
        return {
            "alibi_slopes": impl.alibi_slopes,
            "place": side.place,
            "layer_index": side.layer_index,
            "first_query_head": side.first_query_head,
            "scale": impl.scale,
            "soft_cap": impl.logits_soft_cap,
            "layout": side.layout,
            "impl": side.impl,
        }
