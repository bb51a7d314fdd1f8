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


@dataclass
class LayerSide:
    """Side data of one layer and what its scores need to know.

    Args:
        layer_index: index of the layer in the whole model, for the noise.
        first_query_head: index of this rank's first query head in the model.
        score: float32 ``[num_blocks, num_kv_heads, block_size]``.
        position: int32, same shape.
        layout: packing of K and V inside a block.
    """

    layer_index: int
    first_query_head: int
    score: torch.Tensor
    position: torch.Tensor
    layout: str


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
    """Attends with vLLM's kernel, then resets and adds scores."""

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
        scoring = attn_metadata.scoring
        if scoring is None:
            return result
        side = self.side
        assert side is not None, "side data was not bound to this layer"
        # Recycled blocks are not zeroed by vLLM, and a stale score would live on
        # in the slot's next owner.
        ops.reset_slots(
            side.score,
            side.position,
            scoring.slot_mapping,
            scoring.positions,
            impl="cpu",
        )
        if scoring.scores:
            ops.score_keys(
                query[: attn_metadata.num_actual_tokens],
                kv_cache,
                side.score,
                side.position,
                scoring.block_table,
                scoring.kv_lens,
                scoring.query_start_loc,
                scoring.positions,
                scoring.tau,
                scoring.noise_keys,
                layer_index=side.layer_index,
                first_query_head=side.first_query_head,
                scale=self.scale,
                soft_cap=self.logits_soft_cap,
                layout=side.layout,
                impl="cpu",
            )
        return result


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
