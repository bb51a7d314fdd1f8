# SPDX-License-Identifier: Apache-2.0
"""Rules that can be told from the flags and the environment alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keyformer_vllm.adapters import compat
from keyformer_vllm.config import config_from_additional

SCHEDULER = "keyformer_vllm.adapters.scheduler.make_scheduler"
"""What ``--scheduler-cls`` becomes."""

WORKERS = {
    "cpu": "keyformer_vllm.adapters.worker.KeyformerCPUWorker",
    "cuda": "keyformer_vllm.adapters.gpu_worker.KeyformerGPUWorker",
}
"""What ``--worker-cls`` becomes, by platform; others are refused."""

CONNECTOR = "evicted and compacted blocks must not leave the engine as whole prompts"
OWN_CLASS = "the policy brings its own"
CPU_V2 = "this release supports model runner V1 on CPU"


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


def setting_if(condition: Any, setting: str) -> str | None:
    """The setting when the condition holds, else None."""
    return setting if condition else None


def platform_name() -> str:
    """vLLM's platform: a key of :data:`WORKERS`, or one that is refused."""
    # Not its device type: that of AMD's GPUs is "cuda" as well.
    name: str = getattr(compat.current_platform(), "device_name", "")
    return name


def on_cpu(find: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """The same, but nothing is found on a GPU."""
    return lambda subject: None if compat.on_gpu() else find(subject)


def odd_block_size(size: int | None) -> bool:
    """Whether no kernel serves blocks of this many tokens; None: vLLM chooses."""
    return size is not None and size % (16 if compat.on_gpu() else 32) != 0


def _other_platform(_: Any) -> str | None:
    name, platform = platform_name(), compat.current_platform()
    if name not in WORKERS:
        return f"the {name or 'unknown'} platform"
    if name == "cuda":
        return None
    architecture = platform.get_cpu_architecture().name
    return setting_if(architecture != "X86", f"a CPU of architecture {architecture}")


def _speculative_flags(args: Any) -> str | None:
    for name in ("speculative_config", "spec_method", "spec_model", "spec_tokens"):
        if getattr(args, name) is not None:
            return "--" + name.replace("_", "-")
    return None


def _quantised_cache_flag(args: Any) -> str | None:
    return setting_if(
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
    return setting_if(args.ubatch_size > 1, f"--ubatch-size {args.ubatch_size}")


def _forced_v2_runner(_: Any) -> str | None:
    return setting_if(
        compat.vllm_envs.VLLM_USE_V2_MODEL_RUNNER, "VLLM_USE_V2_MODEL_RUNNER=1"
    )


def _other_class(name: str, ours: str) -> Callable[[Any], str | None]:
    def find(args: Any) -> str | None:
        given = getattr(args, name)
        shown = given if isinstance(given, str) else getattr(given, "__name__", given)
        return setting_if(
            given not in (None, "auto", ours), f"--{name.replace('_', '-')} {shown}"
        )

    return find


def _audit_of_ranks(args: Any) -> str | None:
    config = config_from_additional(args.additional_config)
    return setting_if(
        config is not None and config.audit and args.tensor_parallel_size > 1,
        f"--kv-audit and --tensor-parallel-size {args.tensor_parallel_size}",
    )


def _worker_class(args: Any) -> str | None:
    ours = WORKERS.get(platform_name(), "auto")
    return _other_class("worker_cls", ours)(args)


def find_kv_events(config: Any) -> str | None:
    """KV events, where they are switched on; a plain mapping until vLLM reads it."""
    events = config.kv_events_config
    name = "enable_kv_cache_events"
    enabled = (
        events.get(name) if isinstance(events, Mapping) else getattr(events, name, None)
    )
    return setting_if(enabled, "--kv-events-config")


ENVIRONMENT_RULES = (
    Rule(
        "Rust front end",
        lambda _: setting_if(
            compat.vllm_envs.VLLM_USE_RUST_FRONTEND, "VLLM_USE_RUST_FRONTEND=1"
        ),
        "it does not check per-request settings",
        "unset VLLM_USE_RUST_FRONTEND or drop --kv-policy",
    ),
    Rule(
        "batch invariance",
        lambda _: setting_if(
            compat.vllm_envs.VLLM_BATCH_INVARIANT, "VLLM_BATCH_INVARIANT=1"
        ),
        "the scores have no batch-invariant kernels",
        "unset VLLM_BATCH_INVARIANT or drop --kv-policy",
    ),
    Rule(
        "model runner V2",
        on_cpu(_forced_v2_runner),
        CPU_V2,
        "unset VLLM_USE_V2_MODEL_RUNNER or drop --kv-policy",
    ),
)

ENGINE_ARGS_RULES = (
    Rule(
        "platform",
        _other_platform,
        "this release supports CPUs of x86 and NVIDIA GPUs",
        "run it there or drop --kv-policy",
    ),
    Rule(
        "speculative decoding",
        _speculative_flags,
        "rejected draft tokens take back counts that eviction relies on",
    ),
    Rule(
        "KV connector",
        lambda args: setting_if(
            args.kv_transfer_config is not None, "--kv-transfer-config"
        ),
        CONNECTOR,
    ),
    Rule(
        "KV offloading",
        lambda args: setting_if(
            args.kv_offloading_size is not None,
            f"--kv-offloading-size {args.kv_offloading_size}",
        ),
        CONNECTOR,
    ),
    Rule(
        "KV events", find_kv_events, "events would announce blocks that are rewritten"
    ),
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
        lambda args: setting_if(
            args.kv_sharing_fast_prefill, "--kv-sharing-fast-prefill"
        ),
        "prompt queries that are skipped cannot score keys",
    ),
    Rule(
        "ubatching",
        _ubatching,
        "half batches would see half of the eviction plan",
    ),
    Rule(
        "pipeline parallel",
        lambda args: setting_if(
            args.pipeline_parallel_size > 1,
            f"--pipeline-parallel-size {args.pipeline_parallel_size}",
        ),
        "vLLM's CPU worker fails with pipeline stages",
        "use --tensor-parallel-size instead",
    ),
    Rule(
        "block size",
        lambda args: setting_if(
            odd_block_size(args.block_size), f"--block-size {args.block_size}"
        ),
        "the CPU cache layouts need a multiple of 32, those of GPUs of 16",
        "use --block-size 32, 64 or 128",
    ),
    Rule(
        "auxiliary output",
        lambda args: setting_if(
            args.enable_return_routed_experts, "--enable-return-routed-experts"
        ),
        "it stores them by cached block, and after an eviction nothing is cached",
    ),
    Rule(
        "audit of several ranks",
        _audit_of_ranks,
        "each rank would measure its own heads only",
    ),
    Rule("scheduler class", _other_class("scheduler_cls", SCHEDULER), OWN_CLASS),
    Rule("worker class", _worker_class, OWN_CLASS),
)
