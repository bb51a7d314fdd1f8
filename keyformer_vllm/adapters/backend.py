# SPDX-License-Identifier: Apache-2.0
"""CPU attention backend with scores: vLLM's kernels, our pages and bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from keyformer_vllm import ops
from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.kv_cache_spec import KeyformerSpec
from keyformer_vllm.adapters.metadata import KeyformerCPUMetadataBuilder
from keyformer_vllm.adapters.score_batch import ScoreBatch


@dataclass
class LayerSide:
    """Side data of one layer and what its scores need to know.

    Args:
        layer_index: index of the layer in the whole model, for the noise.
        first_query_head: index of this rank's first query head in the model.
        score: float32 ``[num_blocks, num_kv_heads, block_size]``.
        position: int32, same shape.
        layout: packing of K and V inside a block.
        ring: the layer's waiting queries (``QueryRing.layer``); None: none wait.
    """

    layer_index: int
    first_query_head: int
    score: torch.Tensor
    position: torch.Tensor
    layout: str
    ring: torch.Tensor | None


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


class KeyformerCPUImpl(compat.CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attends with vLLM's kernel, then scores its queries or lets them wait."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        unsupported = {
            "ALiBi": self.alibi_slopes is not None,
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
        result = super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
        )
        if attn_metadata is None:
            return result
        if attn_metadata.ring_write is not None:
            assert self.side is not None and self.side.ring is not None
            attn_metadata.ring_write.store(
                query[: attn_metadata.num_actual_tokens], self.side.ring
            )
        if attn_metadata.scoring is not None:
            self.add_scores(
                query[: attn_metadata.num_actual_tokens],
                kv_cache,
                attn_metadata.scoring,
            )
        return result

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
        ops.score_keys(
            query,
            kv_cache,
            side.score,
            side.position,
            batch.block_table,
            batch.kv_lens,
            batch.query_start_loc,
            batch.positions,
            batch.tau,
            batch.noise_keys,
            layer_index=side.layer_index,
            first_query_head=side.first_query_head,
            scale=self.scale,
            soft_cap=self.logits_soft_cap,
            layout=side.layout,
            impl="cpu",
        )


@contextmanager
def cpu_backend_override() -> Iterator[None]:
    """Make layers built inside the block use our backend, and only those.

    The CPU platform ignores ``--attention-backend``, so the registry entry behind
    ``CPU_ATTN`` is exchanged while the model is built and put back afterwards.
    """
    entry = compat.AttentionBackendEnum.CPU_ATTN
    overrides = compat.backend_overrides
    before = overrides.get(entry)
    overrides[entry] = f"{__name__}.{KeyformerCPUBackend.__qualname__}"
    compat.cached_attn_backend.cache_clear()
    try:
        yield
    finally:
        if before is None:
            overrides.pop(entry)
        else:
            overrides[entry] = before
        compat.cached_attn_backend.cache_clear()
