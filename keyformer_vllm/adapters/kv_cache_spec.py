# SPDX-License-Identifier: Apache-2.0
"""KV cache spec whose pages carry scores and positions beside K and V."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.kv_cache_manager import KeyformerManager
from keyformer_vllm.ops.layout import page_bytes


@dataclass(frozen=True, kw_only=True)
class KeyformerSpec(compat.FullAttentionSpec):  # type: ignore[misc]
    """Full attention whose page ends in side data: score, position, perhaps place.

    The side data is page padding to vLLM (``page_size_padded``), so its own
    accounting of blocks, memory and concurrency includes it. See
    ``vllm/v1/kv_cache_interface.py``, ``AttentionSpec``.
    """

    @classmethod
    def from_full_attention(cls, spec: Any, has_places: bool = False) -> KeyformerSpec:
        """The spec of a plain full-attention layer, with room for side data.

        Args:
            spec: the layer's ``FullAttentionSpec``.
            has_places: whether slots also carry a place, for compact positions.

        Raises:
            RuntimeError: when the layer is anything but plain full attention.
        """
        if type(spec) is not compat.FullAttentionSpec:
            raise RuntimeError(
                "a KV policy serves full-attention layers only, "
                f"this model has a layer with {type(spec).__name__}"
            )
        plain = {
            name: getattr(spec, name)
            for name in (
                "sliding_window",
                "attention_chunk_size",
                "page_size_padded",
                "num_head_slots",
                "state_content_bytes",
            )
        }
        taken = {name: value for name, value in plain.items() if value is not None}
        if taken or spec.non_causal or spec.head_size != spec.head_size_v:
            raise RuntimeError(
                "a KV policy serves plain causal full-attention layers only, "
                f"this model has a layer with {taken or 'unequal heads or no mask'}"
            )
        values = {f.name: getattr(spec, f.name) for f in fields(spec) if f.init}
        values["page_size_padded"] = page_bytes(
            spec.num_kv_heads,
            spec.block_size,
            spec.head_size,
            spec.dtype.itemsize,
            has_places,
        )
        return cls(**values)


def register_spec() -> None:
    """Tell vLLM which block manager serves :class:`KeyformerSpec`. Re-entrant."""
    # vLLM registers its own specs only while the registry is empty: ours first
    # would leave the built-in ones unknown in worker processes.
    compat.KVCacheSpecRegistry._ensure_registered()
    compat.KVCacheSpecRegistry.register(
        KeyformerSpec,
        manager_class=KeyformerManager,
        uniform_type_base_spec=compat.FullAttentionSpec,
    )


# Unpickling a spec in another process imports this module, so the spec can never
# arrive where its manager is unknown.
register_spec()
