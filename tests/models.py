# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, written as folders that vLLM and HF both load.

The weights are large enough for attention to be far from uniform, so that a key which
is wrongly dropped or kept changes the logits; `test_models.py` checks that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB_SIZE = 320
MAX_POSITIONS = 4096
NUM_LAYERS = 2
HEAD_SIZE = 32
BOS, EOS, PAD = 256, 257, 258

SERVABLE = ("llama-4-2", "llama-4-1", "llama-9-3", "gptj", "gpt2", "bloom")
"""Kinds with weights. Grouped heads, partial rotary, learned positions, ALiBi."""

REFUSED = ("mistral-sliding", "bert", "whisper", "deepseek-v2")
"""Kinds without weights, for refusals at start-up (`--load-format dummy`):
a sliding window, pooling, encoder-decoder and MLA."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def write_model(kind: str, folder: Path) -> Path:
    """Writes one model folder: config, tokenizer and, if servable, fp32 weights.

    Args:
        kind: one of `SERVABLE` or `REFUSED`.
        folder: created here; the name becomes the model's.
    """
    folder.mkdir(parents=True)
    config = _CONFIGS[kind]()
    write_tokenizer(folder)
    if kind in SERVABLE:
        _write_weights(config, folder)
    else:
        config.save_pretrained(folder)
    if kind == "whisper":
        _write_feature_extractor(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of single bytes: any text is valid and reversible."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    vocab |= {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        model_max_length=MAX_POSITIONS,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _write_weights(config: Any, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # HF scales some projections down with depth and zeroes biases; a bias that
        # is zero would hide an error in how it is added.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, config.hidden_size**-0.5 * 1.4)
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.1)
        model.save_pretrained(folder)
    finally:
        torch.set_rng_state(state)


def _write_feature_extractor(folder: Path) -> None:
    from transformers import WhisperFeatureExtractor

    WhisperFeatureExtractor(feature_size=16).save_pretrained(folder)


def _common() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def _llama(num_query_heads: int, num_kv_heads: int) -> Callable[[], Any]:
    def build() -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            **_common(),
            hidden_size=num_query_heads * HEAD_SIZE,
            intermediate_size=256,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=num_query_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=HEAD_SIZE,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=False,
            architectures=["LlamaForCausalLM"],
        )

    return build


def _gptj() -> Any:
    from transformers import GPTJConfig

    return GPTJConfig(
        **_common(),
        n_embd=4 * HEAD_SIZE,
        n_head=4,
        n_layer=NUM_LAYERS,
        n_positions=MAX_POSITIONS,
        rotary_dim=HEAD_SIZE // 2,
        tie_word_embeddings=False,
        architectures=["GPTJForCausalLM"],
    )


def _gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        **_common(),
        n_embd=4 * HEAD_SIZE,
        n_head=4,
        n_layer=NUM_LAYERS,
        n_positions=MAX_POSITIONS,
        architectures=["GPT2LMHeadModel"],
    )


def _bloom() -> Any:
    from transformers import BloomConfig

    return BloomConfig(
        **_common(),
        hidden_size=4 * HEAD_SIZE,
        n_head=4,
        n_layer=NUM_LAYERS,
        seq_length=MAX_POSITIONS,
        architectures=["BloomForCausalLM"],
    )


def _mistral_sliding() -> Any:
    from transformers import MistralConfig

    return MistralConfig(
        **_common(),
        hidden_size=4 * HEAD_SIZE,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        sliding_window=128,
        architectures=["MistralForCausalLM"],
    )


def _bert() -> Any:
    from transformers import BertConfig

    return BertConfig(
        **_common(),
        hidden_size=4 * HEAD_SIZE,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        architectures=["BertModel"],
    )


def _whisper() -> Any:
    from transformers import WhisperConfig

    return WhisperConfig(
        **_common(),
        d_model=4 * HEAD_SIZE,
        num_mel_bins=16,
        encoder_layers=NUM_LAYERS,
        decoder_layers=NUM_LAYERS,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        decoder_start_token_id=BOS,
        max_target_positions=448,
        begin_suppress_tokens=None,
        architectures=["WhisperForConditionalGeneration"],
    )


def _deepseek_v2() -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **_common(),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=NUM_LAYERS,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        architectures=["DeepseekV2ForCausalLM"],
    )


_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-4-2": _llama(4, 2),
    "llama-4-1": _llama(4, 1),
    "llama-9-3": _llama(9, 3),
    "gptj": _gptj,
    "gpt2": _gpt2,
    "bloom": _bloom,
    "mistral-sliding": _mistral_sliding,
    "bert": _bert,
    "whisper": _whisper,
    "deepseek-v2": _deepseek_v2,
}
