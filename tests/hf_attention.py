# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models whose attention is handed in with each call."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(layer, query [num_query_heads, n, head_size], key and value [num_kv_heads, n,
head_size], scale) -> [num_query_heads, n, head_size]"""

_ATTENTION = "keyformer_reference"


def load_as_served(folder: Path | str, attention: str = "eager") -> Any:
    """A Hugging Face model in fp32 that computes what vLLM computes.

    BLOOM differs otherwise: its GELU is the tanh approximation, vLLM's is exact, which
    is up to 1e-3 in a log-probability.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    ).eval()
    for module in model.modules():
        if type(module).__name__ == "BloomMLP":
            module.gelu_impl = torch.nn.GELU()
    return model


class ExchangeableModel:
    """A causal language model in fp32 whose attention can be exchanged.

    Args:
        folder: model folder; Llama, GPT-2, GPT-J or BLOOM.
    """

    def __init__(self, folder: Path | str) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(_ATTENTION, _interface)
        # These have no exchangeable attention; they are patched below.
        config_type = _model_type(folder)
        patched = config_type in ("gptj", "bloom")
        self.folder = folder
        self.model = load_as_served(folder, "eager" if patched else _ATTENTION)
        config = self.model.config
        self.num_layers: int = config.num_hidden_layers
        self.num_query_heads: int = config.num_attention_heads
        self.num_kv_heads: int = getattr(
            config, "num_key_value_heads", config.num_attention_heads
        )
        self.alibi_slopes: torch.Tensor | None = None
        if config_type == "bloom":
            self.alibi_slopes = _bloom_slopes(self.num_query_heads)
        self.attend: Attend | None = None
        for module in self.model.modules():
            if hasattr(module, "layer_idx"):
                module.exchangeable = self
            if type(module).__name__ == "GPTJAttention":
                module._attn = types.MethodType(_gptj_attention, module)
            if type(module).__name__ == "BloomAttention":
                module.forward = types.MethodType(_bloom_attention, module)

    def forward(
        self, tokens: Sequence[int], first_position: int, attend: Attend
    ) -> torch.Tensor:
        """Logits float32 [num tokens, vocab_size]; keeps no cache of its own."""
        self.attend = attend
        try:
            positions = torch.arange(first_position, first_position + len(tokens))
            # A model with ALiBi takes no positions: they are in the bias.
            given = (
                {}
                if self.alibi_slopes is not None
                else {"position_ids": positions[None]}
            )
            output = self.model(torch.tensor([list(tokens)]), use_cache=False, **given)
        finally:
            self.attend = None
        logits: torch.Tensor = output.logits[0].float()
        return logits


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    num_queries_per_kv = query.shape[0] // key.shape[0]
    key = key.repeat_interleave(num_queries_per_kv, dim=0)
    value = value.repeat_interleave(num_queries_per_kv, dim=0)
    logits = (query @ key.transpose(-1, -2)) * scale
    if bias is not None:
        logits += bias
    weights = logits.masked_fill_(~mask, -torch.inf).softmax(-1)
    return weights @ value


def alibi_bias(
    slopes: torch.Tensor | None, mask: torch.Tensor, compact: bool = False
) -> torch.Tensor | None:
    """[num_query_heads, n, n]: slope * (position of the key - that of the query).

    Args:
        mask: bool [num_query_heads, n, n], keys that each query sees, itself included.
        compact: number the keys that a query sees 0..m-1, itself m-1.
    """
    if slopes is None:
        return None
    if compact:
        place = mask.cumsum(-1) - 1
        distance = place - place.diagonal(dim1=-2, dim2=-1)[..., None]
    else:
        position = torch.arange(mask.shape[-1])
        distance = position - position[:, None]
    return slopes[:, None, None] * distance


def _interface(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of transformers: batch of one, query [1, heads, n, size]."""
    attend = module.exchangeable.attend
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = attend(module.layer_idx, query[0], key[0], value[0], scale)
    return output.transpose(0, 1)[None], None


def _gptj_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
) -> tuple[torch.Tensor, None]:
    attend = module.exchangeable.attend
    scale = 1.0 / float(module.scale_attn)
    return attend(module.layer_idx, query[0], key[0], value[0], scale)[None], None


def _bloom_attention(
    module: Any, hidden_states: torch.Tensor, residual: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    heads = module._reshape(module.query_key_value(hidden_states))
    query, key, value = (x[0] for x in heads)
    attend = module.exchangeable.attend
    output = attend(module.layer_idx, query, key, value, module.inv_norm_factor)
    output = output.transpose(0, 1).flatten(1)[None]
    return residual + module.dense(output), None


def _bloom_slopes(num_heads: int) -> torch.Tensor:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    bias = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)
    return bias[:, 0, 1]  # of position 1, which is the slope itself


def _model_type(folder: Path | str) -> str:
    with open(Path(folder) / "config.json", encoding="utf-8") as file:
        model_type: str = json.load(file)["model_type"]
    return model_type
