# SPDX-License-Identifier: Apache-2.0
"""CPU attention backend with scores: vLLM's kernels, our pages and bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

from keyformer_vllm import ops
from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.kv_cache_spec import KeyformerSpec
from keyformer_vllm.adapters.metadata import KeyformerCPUMetadataBuilder
from keyformer_vllm.adapters.score_batch import ScoreBatch
from keyformer_vllm.config import KeyformerConfig
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
        ring: the layer's waiting queries (``QueryRing.layer``); None: none wait.
        counts: the worker's, for the time that scoring takes.
    """

    layer_index: int
    first_query_head: int
    score: torch.Tensor
    position: torch.Tensor
    place: torch.Tensor | None
    layout: str
    ring: torch.Tensor | None
    counts: StepCounts


class KeyformerCPUBackend(compat.CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's CPU backend with side data in its pages.

    Keeps the name ``CPU_ATTN``: the CPU platform always asks for that one
    (``vllm/platforms/cpu.py``), and layers look it up in vLLM's enum.
    """

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return KeyformerCPUImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return KeyformerCPUMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return KeyformerSpec.from_full_attention(spec)


class CompactPositionsCPUBackend(KeyformerCPUBackend):
    """The same with room for places in the pages."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return KeyformerSpec.from_full_attention(spec, has_places=True)


def backend_for(config: KeyformerConfig) -> type[KeyformerCPUBackend]:
    """The backend that a policy's layers must be on."""
    return (
        CompactPositionsCPUBackend if config.compact_positions else KeyformerCPUBackend
    )


class KeyformerCPUImpl(compat.CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attends with vLLM's kernel, then scores its queries or lets them wait."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        unsupported = {
            "a sliding window": self.sliding_window != -1,
            "attention sinks": self.sinks is not None,
            "a quantised KV cache": self.is_fp8_kv_cache,
            f"{self.attn_type} attention": self.attn_type != "decoder",
            "KV sharing": self.kv_sharing_target_layer_name is not None,
        }
        for what, present in unsupported.items():
            if present:
                raise RuntimeError(
                    f"a KV policy cannot serve this model: a layer uses {what}"
                )
        self.side: LayerSide | None = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if attn_metadata is None or attn_metadata.own is None:
            super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                *args,
                **kwargs,
            )
        else:
            self._attend_apart(
                layer, query, key, value, kv_cache, attn_metadata, output
            )
        if attn_metadata is None:  # warming up
            return output
        query = query[: attn_metadata.num_step_tokens]
        if attn_metadata.ring_write is not None:
            assert self.side is not None and self.side.ring is not None
            attn_metadata.ring_write.store(query, self.side.ring)
        if attn_metadata.scoring is not None:
            self.add_scores(query, kv_cache, attn_metadata.scoring)
        return output

    def _score_settings(self, side: LayerSide) -> dict[str, Any]:
        """What the scoring operators need to know of this layer in every step."""
        return {
            "alibi_slopes": self.alibi_slopes,
            "place": side.place,
            "layer_index": side.layer_index,
            "first_query_head": side.first_query_head,
            "scale": self.scale,
            "soft_cap": self.logits_soft_cap,
            "layout": side.layout,
            "impl": "cpu",
        }

    def _attend_apart(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
    ) -> None:
        """Attend some rows with our kernel and the rest with vLLM's."""
        own = attn_metadata.own
        if own.rest is None:
            num_tokens = attn_metadata.num_step_tokens
            self._attend_scored(
                query[:num_tokens], output[:num_tokens], kv_cache, own.batch
            )
            return
        rest = query.index_select(0, own.rest)
        attended = torch.empty_like(rest)
        super().forward(layer, rest, key, value, kv_cache, attn_metadata, attended)
        output.index_copy_(0, own.rest, attended)
        mine = query.index_select(0, own.tokens)
        attended = torch.empty_like(mine)
        self._attend_scored(mine, attended, kv_cache, own.batch)
        output.index_copy_(0, own.tokens, attended)

    def _attend_scored(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: ScoreBatch,
    ) -> None:
        """Attend and score in one pass over K and V.

        Args:
            query: ``[num_tokens, num_query_heads, head_size]``, after RoPE.
            output: same shape. Mutated.
            kv_cache: the layer's cache, with the keys of the queries in it.
            batch: whose queries these are.
        """
        side = self.side
        assert side is not None, "side data was not bound to this layer"
        ops.paged_attention_scored(
            output,
            query,
            kv_cache,
            side.score,
            side.position,
            *batch.arguments(),
            **self._score_settings(side),
        )

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
            **self._score_settings(side),
        )
        side.counts.add("scoring_seconds", perf_counter_ns() - started)


@contextmanager
def cpu_backend_override(config: KeyformerConfig) -> Iterator[None]:
    """Make layers built inside the block use our backend, and only those.

    The CPU platform ignores ``--attention-backend``, so the registry entry behind
    ``CPU_ATTN`` is exchanged while the model is built and put back afterwards.
    """
    entry = compat.AttentionBackendEnum.CPU_ATTN
    overrides = compat.backend_overrides
    before = overrides.get(entry)
    overrides[entry] = f"{__name__}.{backend_for(config).__qualname__}"
    compat.cached_attn_backend.cache_clear()
    try:
        yield
    finally:
        if before is None:
            overrides.pop(entry)
        else:
            overrides[entry] = before
        compat.cached_attn_backend.cache_clear()
