# SPDX-License-Identifier: Apache-2.0
"""Model folders of one `config.json` each, for start-ups that go no further.

Every trait that a KV policy refuses in a model stands here once, beside models that
look alike and are served. vLLM reads such a folder in well under a second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def _llama(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "dtype": "bfloat16",
        **changes,
    }


def _like_llama(name: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return _llama(architectures=[name], model_type=model_type, **changes)


REFUSED_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral-sliding": (
        "sliding window",
        _like_llama("MistralForCausalLM", "mistral", sliding_window=64),
    ),
    "qwen2-sliding": (
        "sliding window",
        _like_llama(
            "Qwen2ForCausalLM",
            "qwen2",
            sliding_window=64,
            use_sliding_window=True,
            max_window_layers=0,
        ),
    ),
    "gemma2": (
        "sliding window",
        _like_llama("Gemma2ForCausalLM", "gemma2", sliding_window=64),
    ),
    "chunked-local": ("sliding window", _llama(attention_chunk_size=64)),
    "interleaved": ("sliding window", _llama(interleaved_sliding_window=[None, 64])),
    "gpt-oss": (
        "attention sinks",
        _like_llama(
            "GptOssForCausalLM", "gpt_oss", num_local_experts=2, sliding_window=64
        ),
    ),
    "granite-sinks": (
        "attention sinks",
        _like_llama(
            "GraniteForCausalLM", "granite", layer_types=["full_attention"] * 2
        ),
    ),
    "parameter-sinks": ("attention sinks", _llama(param_sink_number=4)),
    "deepseek-v2": (
        "MLA",
        _like_llama(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            num_key_value_heads=2,
            kv_lora_rank=32,
            q_lora_rank=None,
            qk_nope_head_dim=32,
            qk_rope_head_dim=32,
            v_head_dim=32,
            n_routed_experts=2,
        ),
    ),
    "whisper": (
        "encoder-decoder",
        {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "vocab_size": 320,
            "d_model": 64,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
        },
    ),
    "mamba": (
        "attention-free or hybrid",
        {
            "architectures": ["MambaForCausalLM"],
            "model_type": "mamba",
            "vocab_size": 320,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 16,
        },
    ),
    "jamba": (
        "attention-free or hybrid",
        _like_llama(
            "JambaForCausalLM",
            "jamba",
            num_experts=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
        ),
    ),
    "bert": (
        "pooling",
        {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 512,
        },
    ),
    "shared-cache": ("cross-layer KV sharing", _llama(num_kv_shared_layers=1)),
    "prefix-lm": ("prefix-LM", _llama(is_mm_prefix_lm=True)),
    "dual-chunk": (
        "dual chunk attention",
        _llama(dual_chunk_attention_config={"chunk_size": 64, "local_size": 32}),
    ),
    "head-size-16": ("head size", _llama(head_dim=16)),
    "head-size-512": ("head size", _llama(head_dim=512)),
}
"""Kind to the name of the rule it violates and its configuration."""

SERVED_MODELS: dict[str, dict[str, Any]] = {
    "llama": _llama(),
    "mistral-full": _like_llama("MistralForCausalLM", "mistral", sliding_window=None),
    "qwen2-window-off": _like_llama(
        "Qwen2ForCausalLM",
        "qwen2",
        sliding_window=64,
        use_sliding_window=False,
        max_window_layers=1,
    ),
    "qwen2-window-beyond": _like_llama(
        "Qwen2ForCausalLM",
        "qwen2",
        sliding_window=64,
        use_sliding_window=True,
        max_window_layers=2,
    ),
    "granite": _like_llama("GraniteForCausalLM", "granite"),
    "falcon": {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "vocab_size": 320,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "alibi": False,
    },
    "falcon-alibi": {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "vocab_size": 320,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "alibi": True,
    },
    "bloom": {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": 320,
        "hidden_size": 64,
        "n_head": 2,
        "n_layer": 2,
        "seq_length": 512,
    },
}
"""Models that resemble a refused one, and are fine."""


def write_config(kind: str, folder: Path) -> Path:
    """Writes the folder of one kind: `config.json` and nothing else."""
    config = SERVED_MODELS.get(kind) or REFUSED_MODELS[kind][1]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
