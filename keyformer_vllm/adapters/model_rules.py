# SPDX-License-Identifier: Apache-2.0
"""Rules that show only once vLLM has read the model and settled its defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.query_ring import REMEDY, RingShape
from keyformer_vllm.adapters.rules import (
    CONNECTOR,
    CPU_V2,
    OWN_CLASS,
    SCHEDULER,
    WORKERS,
    Rule,
    find_kv_events,
    odd_block_size,
    on_cpu,
    setting_if,
)
from keyformer_vllm.adapters.score_mode import score_mode_in_use
from keyformer_vllm.config import config_from_additional

HEAD_SIZES = (32, 256)

_ALIBI_SQRT_ARCHITECTURES = {"Step1ForCausalLM"}
_PREFIX_LM_ARCHITECTURES = {"HrmTextForCausalLM"}
_SINK_ARCHITECTURES = {"GptOssForCausalLM"}
# Their sinks come with ``layer_types`` unless ``attention_sinks`` says otherwise.
_GRANITE_SINK_ARCHITECTURES = {
    "GraniteForCausalLM",
    "GraniteSWAForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "GraniteMoeSWAForCausalLM",
}
_WINDOW_SETTINGS = (
    "attention_chunk_size",
    "attn_window_size",
    "interleaved_sliding_window",
    "rswa_window",
    "sliding_window_size",
    "sliding_windows",
)


def _model(config: Any, trait: str) -> str:
    return f"--model {config.model_config.model} ({trait})"


def _is_model(trait: str, test: Callable[[Any], Any]) -> Callable[[Any], str | None]:
    """A rule on ``model_config`` alone."""

    def find(config: Any) -> str | None:
        return _model(config, trait) if test(config.model_config) else None

    return find


def _cache_dtype(config: Any) -> str | None:
    stored = str(config.cache_config.cache_dtype)
    computed = str(config.model_config.dtype).removeprefix("torch.")
    return setting_if(
        stored not in ("auto", computed),
        f"--kv-cache-dtype {stored} (model dtype {computed})",
    )


def _window(config: Any) -> str | None:
    text = config.model_config.hf_text_config
    window = config.cache_config.sliding_window
    if window:
        return _model(config, f"sliding_window {window}")
    unusual = set(getattr(text, "layer_types", None) or ()) - {
        "attention",
        "full_attention",
    }
    if config.model_config.is_hybrid:  # its state layers have a line of their own
        unusual &= {"sliding_attention", "chunked_attention"}
    # --disable-sliding-window leaves the layer types and takes the window away.
    if getattr(text, "sliding_window", None) is None:
        unusual -= {"sliding_attention"}
    if unusual:
        return _model(config, f"layers of type {', '.join(sorted(unusual))}")
    for name in _WINDOW_SETTINGS:
        if _is_set(getattr(text, name, None)):
            return _model(config, name)
    return None


def _is_set(value: Any) -> bool:
    """Whether a size, or any size of a list, is in use (vLLM: 0, -1, None are not)."""
    if isinstance(value, (list, tuple)):
        return any(_is_set(item) for item in value)
    return isinstance(value, (int, float)) and value > 0


def _has_sinks(model_config: Any) -> bool:
    text = model_config.hf_text_config
    architectures = set(model_config.architectures)
    if architectures & _SINK_ARCHITECTURES:
        return True
    if architectures & _GRANITE_SINK_ARCHITECTURES:
        has_types = getattr(text, "layer_types", None) is not None
        return bool(getattr(text, "attention_sinks", has_types))
    return any("sink" in name and value for name, value in text.to_dict().items())


def _is_prefix_lm(model_config: Any) -> bool:
    return bool(
        model_config.is_mm_prefix_lm
        or set(model_config.architectures) & _PREFIX_LM_ARCHITECTURES
    )


def _layers_differ(model_config: Any) -> bool:
    overrides = model_config.model_arch_config.per_layer_overrides or ()
    sizes = {"head_size", "total_num_kv_heads", "total_num_attention_heads"}
    return model_config.has_noops or any(sizes & set(layer) for layer in overrides)


def _head_size(config: Any) -> str | None:
    size = config.model_config.get_head_size()
    low, high = HEAD_SIZES
    return setting_if(not low <= size <= high, _model(config, f"head size {size}"))


def _replaced_class(config: Any) -> str | None:
    scheduler = config.scheduler_config.scheduler_cls
    if scheduler != SCHEDULER:
        return f"scheduler {scheduler}, put in place of the policy's own"
    worker = config.parallel_config.worker_cls
    return setting_if(
        worker not in WORKERS.values(),
        f"worker {worker}, put in place of the policy's own",
    )


_OTHER_MODEL = "choose another model or drop --kv-policy"

MODEL_RULES = (
    Rule(
        "pooling",
        _is_model("pooling", lambda model: model.runner_type == "pooling"),
        "a pooling model generates nothing to evict for",
        _OTHER_MODEL,
    ),
    Rule(
        "encoder-decoder",
        _is_model("encoder-decoder", lambda model: model.is_encoder_decoder),
        "cross attention has a cache of its own",
        _OTHER_MODEL,
    ),
    Rule(
        "attention-free or hybrid",
        _is_model(
            "layers with state in place of attention",
            lambda model: (
                model.is_attention_free or model.is_hybrid or model.has_inner_state
            ),
        ),
        "only attention layers can evict",
        _OTHER_MODEL,
    ),
    Rule(
        "diffusion",
        _is_model("diffusion", lambda model: model.is_diffusion),
        "tokens are not generated one after the other",
        _OTHER_MODEL,
    ),
    Rule(
        "MLA",
        _is_model(
            "multi-head latent attention",
            lambda model: model.use_mla or model.is_deepseek_mla,
        ),
        "its cache has no keys and values per head",
        _OTHER_MODEL,
    ),
    Rule(
        "square-root ALiBi",
        _is_model(
            "square-root ALiBi",
            lambda model: set(model.architectures) & _ALIBI_SQRT_ARCHITECTURES,
        ),
        "the kernels know the linear bias only",
        _OTHER_MODEL,
    ),
    Rule(
        "sliding window",
        _window,
        "its window would be taken over compacted slots, not positions",
        "add --disable-sliding-window if the model allows it, or drop --kv-policy",
    ),
    Rule(
        "attention sinks",
        _is_model("attention sinks", _has_sinks),
        "a learned sink takes part in the softmax that scores keys",
        _OTHER_MODEL,
    ),
    Rule(
        "cross-layer KV sharing",
        _is_model(
            "layers that share one KV cache",
            lambda model: _is_set(
                getattr(model.hf_text_config, "num_kv_shared_layers", None)
            ),
        ),
        "each layer evicts its own tokens",
        _OTHER_MODEL,
    ),
    Rule(
        "prefix-LM",
        _is_model("bidirectional attention in the prompt", _is_prefix_lm),
        "scores are taken over causal rows",
        _OTHER_MODEL,
    ),
    Rule(
        "dual chunk attention",
        _is_model(
            "dual chunk attention",
            lambda model: getattr(model.hf_config, "dual_chunk_attention_config", None),
        ),
        "its kernel has its own idea of positions",
        _OTHER_MODEL,
    ),
    Rule(
        "layers that differ",
        _is_model("layers with different numbers of heads", _layers_differ),
        "one eviction plan serves all layers",
        _OTHER_MODEL,
    ),
    Rule(
        "head size",
        _head_size,
        f"the kernels serve head sizes {HEAD_SIZES[0]} to {HEAD_SIZES[1]}",
        _OTHER_MODEL,
    ),
    Rule(
        "streaming sessions",
        _is_model(
            "realtime streaming sessions",
            lambda model: any("Realtime" in name for name in model.architectures),
        ),
        "the cache of a session outlives its prompt",
        _OTHER_MODEL,
    ),
)


def _ring_too_large(config: Any) -> str | None:
    """Where the user sized the cache; else only the worker knows what is left."""
    policy = config_from_additional(config.additional_config)
    available = config.cache_config.kv_cache_memory_bytes
    if policy is None or not available:
        return None
    if score_mode_in_use(policy, config) != "deferred":
        return None
    problem = RingShape.of_model(config).problem(available)
    return setting_if(
        problem, f"--max-num-seqs {config.scheduler_config.max_num_seqs} ({problem})"
    )


def _nothing_to_renumber(config: Any) -> str | None:
    policy = config_from_additional(config.additional_config)
    if policy is None or not policy.compact_positions or compat.uses_alibi(config):
        return None
    return f"--kv-positions compact for {_model(config, 'no ALiBi')}"


OUTCOME_RULES = (
    Rule(
        "non-causal",
        lambda config: setting_if(
            config.attention_config.use_non_causal, "--attention-config.use_non_causal"
        ),
        "scores are taken over causal rows",
    ),
    Rule(
        "speculative decoding",
        lambda config: setting_if(
            config.speculative_config is not None, "speculative decoding of the model"
        ),
        "rejected draft tokens take back counts that eviction relies on",
        _OTHER_MODEL,
    ),
    Rule(
        "KV connector",
        lambda config: setting_if(
            config.kv_transfer_config is not None, "--kv-transfer-config"
        ),
        CONNECTOR,
    ),
    Rule(
        "KV events", find_kv_events, "events would announce blocks that are rewritten"
    ),
    Rule(
        "KV cache dtype",
        _cache_dtype,
        "scores and moves need keys and values of the model's own dtype",
        "use --kv-cache-dtype auto with an unquantised cache, or drop --kv-policy",
    ),
    Rule(
        "block size",
        lambda config: setting_if(
            odd_block_size(config.cache_config.block_size),
            f"block size {config.cache_config.block_size}",
        ),
        "the CPU cache layouts need a multiple of 32, those of GPUs of 16",
        "use --block-size 32, 64 or 128",
    ),
    Rule(
        "model runner V2",
        on_cpu(
            lambda config: setting_if(config.use_v2_model_runner, "model runner V2")
        ),
        CPU_V2,
        "set VLLM_USE_V2_MODEL_RUNNER=0 or drop --kv-policy",
    ),
    Rule("replaced class", _replaced_class, OWN_CLASS),
    Rule(
        "compact positions",
        _nothing_to_renumber,
        "only an ALiBi bias can follow new positions; keys and embeddings keep theirs",
        "use --kv-positions original or a model with ALiBi",
    ),
    Rule("query ring", _ring_too_large, "no memory is left for the cache", REMEDY),
)
