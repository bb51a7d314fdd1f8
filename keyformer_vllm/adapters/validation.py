# SPDX-License-Identifier: Apache-2.0
"""What a KV policy does not go with: one rule, one line, before any engine starts.

A wrong answer is worse than none, so whatever is not known to be right is refused
here. Rules on ``EngineArgs`` come first and cost nothing; rules on the finished
``VllmConfig`` see what vLLM made of the flags, the model and the environment.
Layers are checked once more when the model is loaded (the attention backend).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keyformer_vllm.adapters import compat
from keyformer_vllm.config import KeyformerConfig, KVPolicyError

SCHEDULER = "keyformer_vllm.adapters.scheduler.make_scheduler"
"""What ``--scheduler-cls`` becomes."""

WORKERS = {"cpu": "keyformer_vllm.adapters.worker.KeyformerCPUWorker"}
"""What ``--worker-cls`` becomes, by platform; others are refused."""

BLOCK_SIZE_UNIT = 32
HEAD_SIZES = (32, 256)

_ALIBI_ARCHITECTURES = {"Step1ForCausalLM"}  # not in vLLM's own uses_alibi
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


@dataclass(frozen=True)
class Rule:
    """One thing that cannot be combined with a KV policy.

    Args:
        find: takes the ``EngineArgs`` or ``VllmConfig``; returns the offending
            setting as the user would spell it, or None when there is none.
        reason: why not, in a few words.
        remedy: what to change.
    """

    name: str
    find: Callable[[Any], str | None]
    reason: str
    remedy: str = "drop one of them"


def check_engine_args(config: KeyformerConfig, engine_args: Any) -> None:
    """Refuse what can be told from the flags and the environment alone.

    Raises:
        KVPolicyError: one line for each violated rule.
    """
    problem = compat.version_problem()
    if problem is not None:
        raise KVPolicyError(
            "kv_policy",
            f"--kv-policy {config.policy} is not available: {problem}; install a "
            "vLLM of that range or drop --kv-policy",
        )
    _refuse(config, ENGINE_ARGS_RULES, engine_args)


def check_vllm_config(config: KeyformerConfig, vllm_config: Any) -> None:
    """Refuse what shows only once vLLM has read the model and settled its defaults.

    Raises:
        KVPolicyError: one line for each violated rule.
    """
    _refuse(config, VLLM_CONFIG_RULES, vllm_config)


def _refuse(config: KeyformerConfig, rules: Sequence[Rule], subject: Any) -> None:
    lines = [
        f"--kv-policy {config.policy} cannot be combined with {setting}: "
        f"{rule.reason}; {rule.remedy}"
        for rule in rules
        if (setting := rule.find(subject)) is not None
    ]
    if lines:
        raise KVPolicyError("kv_policy", "\n".join(lines))


def _if(condition: Any, setting: str) -> str | None:
    return setting if condition else None


# --- the flags and the environment ------------------------------------------------


def _other_platform(_: Any) -> str | None:
    platform = compat.current_platform()
    if platform.device_type not in WORKERS:
        return f"the {platform.device_type or 'unknown'} platform"
    architecture = platform.get_cpu_architecture().name
    return _if(architecture != "X86", f"a CPU of architecture {architecture}")


def _speculative_flags(args: Any) -> str | None:
    for name in ("speculative_config", "spec_method", "spec_model", "spec_tokens"):
        if getattr(args, name) is not None:
            return "--" + name.replace("_", "-")
    return None


def _quantised_cache_flag(args: Any) -> str | None:
    return _if(
        args.kv_cache_dtype not in ("auto", "bfloat16", "float16"),
        f"--kv-cache-dtype {args.kv_cache_dtype}",
    )


def _context_parallel(args: Any) -> str | None:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(args, name)
        if size > 1:
            return f"--{name.replace('_', '-')} {size}"
    return None


def _ubatching(args: Any) -> str | None:
    if args.enable_dbo:
        return "--enable-dbo"
    return _if(args.ubatch_size > 1, f"--ubatch-size {args.ubatch_size}")


def _forced_v2_runner(_: Any) -> str | None:
    return _if(compat.vllm_envs.VLLM_USE_V2_MODEL_RUNNER, "VLLM_USE_V2_MODEL_RUNNER=1")


def _other_class(name: str, ours: str) -> Callable[[Any], str | None]:
    def find(args: Any) -> str | None:
        given = getattr(args, name)
        shown = given if isinstance(given, str) else getattr(given, "__name__", given)
        return _if(
            given not in (None, "auto", ours), f"--{name.replace('_', '-')} {shown}"
        )

    return find


def _worker_class(args: Any) -> str | None:
    ours = WORKERS.get(compat.current_platform().device_type, "auto")
    return _other_class("worker_cls", ours)(args)


def _kv_events(config: Any) -> str | None:
    events = config.kv_events_config
    return _if(
        events is not None and events.enable_kv_cache_events, "--kv-events-config"
    )


_SHARED_BLOCKS = "eviction rewrites blocks that prefix caching would share"
_CONNECTOR = "evicted and compacted blocks must not leave the engine as whole prompts"
_OWN_CLASS = "the policy brings its own"
_CPU_V2 = "this release supports model runner V1 on CPU"

ENGINE_ARGS_RULES = (
    Rule(
        "platform",
        _other_platform,
        "this release supports the CPU platform on x86",
        "run it there or drop --kv-policy",
    ),
    Rule(
        "prefix caching",
        lambda args: _if(args.enable_prefix_caching, "--enable-prefix-caching"),
        _SHARED_BLOCKS,
    ),
    Rule(
        "speculative decoding",
        _speculative_flags,
        "rejected draft tokens take back counts that eviction relies on",
    ),
    Rule(
        "KV connector",
        lambda args: _if(args.kv_transfer_config is not None, "--kv-transfer-config"),
        _CONNECTOR,
    ),
    Rule(
        "KV offloading",
        lambda args: _if(
            args.kv_offloading_size is not None,
            f"--kv-offloading-size {args.kv_offloading_size}",
        ),
        _CONNECTOR,
    ),
    Rule("KV events", _kv_events, "events would announce blocks that are rewritten"),
    Rule(
        "quantised KV cache",
        _quantised_cache_flag,
        "scores and moves need unquantised keys and values",
        "use --kv-cache-dtype auto or drop --kv-policy",
    ),
    Rule(
        "context parallel",
        _context_parallel,
        "it spreads one request's tokens over ranks, and each rank would evict others",
    ),
    Rule(
        "KV sharing fast prefill",
        lambda args: _if(args.kv_sharing_fast_prefill, "--kv-sharing-fast-prefill"),
        "prompt queries that are skipped cannot score keys",
    ),
    Rule(
        "ubatching",
        _ubatching,
        "half batches would see half of the eviction plan",
    ),
    Rule(
        "pipeline parallel",
        lambda args: _if(
            args.pipeline_parallel_size > 1,
            f"--pipeline-parallel-size {args.pipeline_parallel_size}",
        ),
        "vLLM's CPU worker fails with pipeline stages",
        "use --tensor-parallel-size instead",
    ),
    Rule(
        "block size",
        lambda args: _if(
            args.block_size is not None and args.block_size % BLOCK_SIZE_UNIT,
            f"--block-size {args.block_size}",
        ),
        "the CPU cache layouts need a multiple of 32",
        "use --block-size 32, 64 or 128",
    ),
    Rule(
        "auxiliary output",
        lambda args: _if(
            args.enable_return_routed_experts, "--enable-return-routed-experts"
        ),
        "it needs prefix caching, which a KV policy turns off",
    ),
    Rule(
        "Rust front end",
        lambda _: _if(
            compat.vllm_envs.VLLM_USE_RUST_FRONTEND, "VLLM_USE_RUST_FRONTEND=1"
        ),
        "it does not check per-request settings",
        "unset VLLM_USE_RUST_FRONTEND or drop --kv-policy",
    ),
    Rule(
        "batch invariance",
        lambda _: _if(compat.vllm_envs.VLLM_BATCH_INVARIANT, "VLLM_BATCH_INVARIANT=1"),
        "the scores have no batch-invariant kernels",
        "unset VLLM_BATCH_INVARIANT or drop --kv-policy",
    ),
    Rule(
        "model runner V2",
        _forced_v2_runner,
        _CPU_V2,
        "unset VLLM_USE_V2_MODEL_RUNNER or drop --kv-policy",
    ),
    Rule("scheduler class", _other_class("scheduler_cls", SCHEDULER), _OWN_CLASS),
    Rule("worker class", _worker_class, _OWN_CLASS),
)


# --- the model and what vLLM settled ----------------------------------------------


def _model(config: Any, trait: str) -> str:
    return f"model {config.model_config.model} ({trait})"


def _is_model(trait: str, test: Callable[[Any], Any]) -> Callable[[Any], str | None]:
    """A rule on ``model_config`` alone."""

    def find(config: Any) -> str | None:
        return _model(config, trait) if test(config.model_config) else None

    return find


def _cache_dtype(config: Any) -> str | None:
    stored = str(config.cache_config.cache_dtype)
    computed = str(config.model_config.dtype).removeprefix("torch.")
    return _if(
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


def _uses_alibi(model_config: Any) -> bool:
    return bool(
        model_config.uses_alibi
        or set(model_config.architectures) & _ALIBI_ARCHITECTURES
    )


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
    return _if(not low <= size <= high, _model(config, f"head size {size}"))


def _replaced_class(config: Any) -> str | None:
    scheduler = config.scheduler_config.scheduler_cls
    if scheduler != SCHEDULER:
        return f"scheduler {scheduler}, put in place of the policy's own"
    worker = config.parallel_config.worker_cls
    return _if(
        worker not in WORKERS.values(),
        f"worker {worker}, put in place of the policy's own",
    )


_OTHER_MODEL = "choose another model or drop --kv-policy"

VLLM_CONFIG_RULES = (
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
        "ALiBi",
        _is_model("ALiBi", _uses_alibi),
        "the bias would follow the place in the cache, not the token's position",
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
        "non-causal",
        lambda config: _if(
            config.attention_config.use_non_causal, "--attention-config.use_non_causal"
        ),
        "scores are taken over causal rows",
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
    Rule(
        "speculative decoding",
        lambda config: _if(
            config.speculative_config is not None, "speculative decoding of the model"
        ),
        "rejected draft tokens take back counts that eviction relies on",
        _OTHER_MODEL,
    ),
    Rule(
        "KV connector",
        lambda config: _if(
            config.kv_transfer_config is not None, "--kv-transfer-config"
        ),
        _CONNECTOR,
    ),
    Rule("KV events", _kv_events, "events would announce blocks that are rewritten"),
    Rule(
        "KV cache dtype",
        _cache_dtype,
        "scores and moves need keys and values of the model's own dtype",
        "use --kv-cache-dtype auto with an unquantised cache, or drop --kv-policy",
    ),
    Rule(
        "prefix caching",
        lambda config: _if(config.cache_config.enable_prefix_caching, "prefix caching"),
        _SHARED_BLOCKS,
    ),
    Rule(
        "block size",
        lambda config: _if(
            config.cache_config.block_size % BLOCK_SIZE_UNIT,
            f"block size {config.cache_config.block_size}",
        ),
        "the CPU cache layouts need a multiple of 32",
        "use --block-size 32, 64 or 128",
    ),
    Rule(
        "model runner V2",
        lambda config: _if(config.use_v2_model_runner, "model runner V2"),
        _CPU_V2,
        "set VLLM_USE_V2_MODEL_RUNNER=0 or drop --kv-policy",
    ),
    Rule("replaced class", _replaced_class, _OWN_CLASS),
)
