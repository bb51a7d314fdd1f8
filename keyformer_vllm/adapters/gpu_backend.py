# SPDX-License-Identifier: Apache-2.0
"""GPU attention backends with scores: vLLM's kernels, our pages and bookkeeping."""

from __future__ import annotations

from typing import Any

import torch

from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.gpu_metadata import (
    KeyformerFlashMetadataBuilder,
    KeyformerTritonMetadataBuilder,
)
from keyformer_vllm.adapters.kv_cache_spec import KeyformerSpec
from keyformer_vllm.adapters.scoring_impl import ScoringImpl
from keyformer_vllm.config import KeyformerConfig
from keyformer_vllm.ops.layout import check_page, probe_layout


class GPUBackend:
    """What our backends have in common, over one of vLLM's."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return KeyformerSpec.from_full_attention(spec)

    @staticmethod
    def check_pages(
        vllm_config: Any, layers: list[Any], kv_pages: torch.Tensor, has_places: bool
    ) -> str:
        """Order of heads and tokens inside the pages, tried out.

        Args:
            vllm_config: vLLM's configuration.
            layers: the loaded model's attention layers.
            kv_pages: their caches, ``[layers, blocks, kv_heads, block_size, 2 *
                head_size]``.
            has_places: whether slots also carry a place.

        Raises:
            RuntimeError: when the cache is not laid out as expected.
        """
        _, _, num_kv_heads, block_size, width = kv_pages.shape
        layout = "hnd" if kv_pages.stride(2) > kv_pages.stride(3) else "nhd"
        check_page(kv_pages, has_places)
        layer = layers[0]

        def write(
            key: torch.Tensor,
            value: torch.Tensor,
            cache: torch.Tensor,
            slots: torch.Tensor,
        ) -> None:
            layer.impl.do_kv_cache_update(layer, key, value, cache, slots)

        probe_layout(
            write,
            layout=layout,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            head_size=width // 2,
            dtype=kv_pages.dtype,
            device=kv_pages.device,
        )
        return layout


class GPUImpl(ScoringImpl):
    """Attends with vLLM's kernel or ours, then scores queries or lets them wait."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        impl: Any = self  # vLLM's half of the class
        self.refuse_unsupported(
            {
                "a sliding window": tuple(impl.sliding_window) != (-1, -1),
                "attention sinks": impl.sinks is not None,
                "an ALiBi bias": impl.alibi_slopes is not None,
                "a quantised KV cache": impl.kv_cache_dtype.startswith(("fp8", "int")),
                f"{impl.attn_type} attention": impl.attn_type != "decoder",
                "KV sharing": impl.kv_sharing_target_layer_name is not None,
            }
        )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No: our kernel writes the query's type."""
        return False

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
        own = None if attn_metadata is None else attn_metadata.own
        if own is None or own.tokens is not None:
            super().forward(  # type: ignore[misc]
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
        if own is not None:
            self.attend_own(query, output, kv_cache, own)
        if attn_metadata is not None and self.side is not None:
            num_tokens = attn_metadata.num_step_tokens
            self.after_attention(query[:num_tokens], kv_cache, attn_metadata)
        return output


class KeyformerFlashImpl(GPUImpl, compat.FlashAttentionImpl):  # type: ignore[misc]
    """FlashAttention and scores."""


class KeyformerTritonImpl(GPUImpl, compat.TritonAttentionImpl):  # type: ignore[misc]
    """Triton attention and scores."""


class KeyformerFlashBackend(GPUBackend, compat.FlashAttentionBackend):  # type: ignore[misc]
    """vLLM's FlashAttention with side data in its pages."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return KeyformerFlashImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return KeyformerFlashMetadataBuilder


class KeyformerTritonBackend(GPUBackend, compat.TritonAttentionBackend):  # type: ignore[misc]
    """vLLM's Triton attention with side data in its pages."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return KeyformerTritonImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return KeyformerTritonMetadataBuilder


BACKENDS = {"FLASH_ATTN": KeyformerFlashBackend, "TRITON_ATTN": KeyformerTritonBackend}


def backend_for(config: KeyformerConfig) -> Any:
    """The backend that a policy's layers must be on."""
    return BACKENDS[config.attention]


def register_backend(config: KeyformerConfig) -> None:
    """Make vLLM's ``CUSTOM`` the policy's backend in this process. Re-entrant."""
    path = f"{__name__}.{backend_for(config).__qualname__}"
    compat.backend_overrides[compat.AttentionBackendEnum.CUSTOM] = path
    compat.cached_attn_backend.cache_clear()
