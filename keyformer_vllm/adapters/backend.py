# SPDX-License-Identifier: Apache-2.0
"""CPU attention backend with scores: vLLM's kernels, our pages and bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from keyformer_vllm import ops
from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.kv_cache_spec import KeyformerSpec
from keyformer_vllm.adapters.metadata import KeyformerCPUMetadataBuilder
from keyformer_vllm.adapters.own_attention import OwnAttention
from keyformer_vllm.adapters.scoring_impl import ScoringImpl
from keyformer_vllm.config import KeyformerConfig
from keyformer_vllm.ops.layout import LAYOUTS, check_page, probe_layout


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

    @staticmethod
    def check_pages(
        vllm_config: Any, layers: list[Any], kv_pages: torch.Tensor, has_places: bool
    ) -> str:
        """Packing of K and V inside the pages, tried out.

        Args:
            vllm_config: vLLM's configuration.
            layers: the loaded model's attention layers.
            kv_pages: their caches, ``[layers, blocks, kv_heads, block_size, 2 *
                head_size]``.
            has_places: whether slots also carry a place.

        Raises:
            RuntimeError: when the cache is not laid out as expected.
        """
        layout = _layout_of(layers)
        planned = compat.cpu_cache_layout(vllm_config)
        if layout != planned:
            raise RuntimeError(
                f"vLLM packed its cache as {layout!r}, not as the {planned!r} that was "
                "planned with"
            )
        _probe(kv_pages, layout, has_places)
        return layout


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


class KeyformerCPUImpl(ScoringImpl, compat.CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attends with vLLM's kernel, then scores its queries or lets them wait."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refuse_unsupported(
            {
                "a sliding window": self.sliding_window != -1,
                "attention sinks": self.sinks is not None,
                "a quantised KV cache": self.is_fp8_kv_cache,
                f"{self.attn_type} attention": self.attn_type != "decoder",
                "KV sharing": self.kv_sharing_target_layer_name is not None,
            }
        )

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
        num_tokens = attn_metadata.num_step_tokens
        self.after_attention(query[:num_tokens], kv_cache, attn_metadata)
        return output

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
        if own.rest is not None:
            rest = query.index_select(0, own.rest)
            attended = torch.empty_like(rest)
            super().forward(layer, rest, key, value, kv_cache, attn_metadata, attended)
            output.index_copy_(0, own.rest, attended)
        self.attend_own(query, output, kv_cache, own)

    def _attend_scored(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        kv_cache: torch.Tensor,
        own: OwnAttention,
    ) -> None:
        """Also measure what an audit asks for."""
        side = self.side
        if own.front_blocks is not None:
            assert side is not None and side.audit is not None and side.place is None
            settings = self.score_settings(side)
            del settings["place"]
            ops.paged_attention_audited(
                output,
                side.audit[: len(query)],
                query,
                kv_cache,
                side.score,
                side.position,
                *own.batch.arguments(),
                own.front_blocks,
                **settings,
            )
            return
        super()._attend_scored(query, output, kv_cache, own)


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


def _layout_of(layers: list[Any]) -> str:
    layouts = {layer.isa for layer in layers}
    if len(layouts) != 1 or not layouts <= set(LAYOUTS):
        raise RuntimeError(
            f"a KV policy knows the CPU cache layouts {', '.join(LAYOUTS)}; "
            f"vLLM chose {', '.join(sorted(layouts))}"
        )
    layout: str = layouts.pop()
    return layout


def _probe(kv_pages: torch.Tensor, layout: str, has_places: bool) -> None:
    """Write tokens with vLLM's own op and read them back through our views."""
    _, _, num_kv_heads, block_size, width = kv_pages.shape
    head_size = width // 2
    check_page(kv_pages, has_places)

    def write(
        key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        pages = cache.view((cache.shape[0], num_kv_heads, 2 * block_size, head_size))
        key_cache, value_cache = pages.chunk(2, dim=2)
        compat.cpu_ops.cpu_attn_reshape_and_cache(
            key, value, key_cache, value_cache, slots, layout
        )

    probe_layout(
        write,
        layout=layout,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_size=head_size,
        dtype=kv_pages.dtype,
    )
