# SPDX-License-Identifier: Apache-2.0
"""What is refused on a GPU, and what ``--attention-backend`` becomes there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.kernels import (
    CUDA_DTYPES,
    CUDA_HEAD_SIZES,
    has_fused_kernel,
    kernels_in_use,
    lacks_kernels,
)
from keyformer_vllm.adapters.rules import Rule, setting_if
from keyformer_vllm.config import (
    ATTENTIONS,
    KeyformerConfig,
    config_from_additional,
)

CUSTOM = "CUSTOM"
"""vLLM's name for a backend from outside, and so for the policy's own."""


def take_attention(engine_args: Any) -> str:
    """Put the policy's backend in the place of the one asked for.

    Args:
        engine_args: vLLM's ``EngineArgs``, already checked; mutated.

    Returns:
        What the policy's backend is built on, one of ``config.ATTENTIONS``.
    """
    asked = _asked_for(engine_args)
    if engine_args.attention_config.backend is None:
        engine_args.attention_backend = CUSTOM
    else:
        engine_args.attention_config.backend = compat.AttentionBackendEnum.CUSTOM
    if asked == CUSTOM:  # here for the second time
        policy = _policy(engine_args)
        assert policy is not None
        return policy.attention
    return asked or ATTENTIONS[0]


def _asked_for(engine_args: Any) -> str | None:
    given = engine_args.attention_backend or engine_args.attention_config.backend
    name = str(getattr(given, "name", given)).upper()
    return None if name in ("NONE", "AUTO") else name


def _policy(subject: Any) -> KeyformerConfig | None:
    return config_from_additional(subject.additional_config)


def _on_gpu(find: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    return lambda subject: find(subject) if compat.on_gpu() else None


def _other_attention(engine_args: Any) -> str | None:
    asked = _asked_for(engine_args)
    return setting_if(
        asked not in (None, CUSTOM, *ATTENTIONS), f"--attention-backend {asked}"
    )


def _score_mode(engine_args: Any) -> str | None:
    policy = _policy(engine_args)
    assert policy is not None
    return setting_if(policy.score_mode == "step", "--kv-score-mode step on a GPU")


def _fused_in_triton(engine_args: Any) -> str | None:
    policy = _policy(engine_args)
    assert policy is not None
    return setting_if(
        policy.score_mode == "fused" and not has_fused_kernel(policy),
        f"--kv-score-mode fused with --kv-kernels {policy.kernels}",
    )


def _audit(engine_args: Any) -> str | None:
    policy = _policy(engine_args)
    assert policy is not None
    return setting_if(policy.audit, "--kv-audit on a GPU")


def _kernels(engine_args: Any) -> str | None:
    policy = _policy(engine_args)
    assert policy is not None
    return setting_if(lacks_kernels(policy), f"--kv-kernels {policy.kernels} here")


def _several_gpus(engine_args: Any) -> str | None:
    for name in ("tensor_parallel_size", "data_parallel_size"):
        size = getattr(engine_args, name)
        if size > 1:
            return f"--{name.replace('_', '-')} {size} on GPUs"
    return None


def _foreign_to_cuda_kernels(config: Any) -> str | None:
    policy, model = _policy(config), config.model_config
    if policy is None or kernels_in_use(policy) != "cuda":
        return None
    dtype = str(model.dtype).removeprefix("torch.")
    head_size = model.get_head_size()
    if head_size not in CUDA_HEAD_SIZES:
        return f"--model {model.model} (head size {head_size})"
    return setting_if(dtype not in CUDA_DTYPES, f"--dtype {dtype}")


GPU_ARGS_RULES = (
    Rule(
        "several GPUs",
        _on_gpu(_several_gpus),
        "this release was tried on one",
        "use one GPU or drop --kv-policy",
    ),
    Rule(
        "attention backend",
        _on_gpu(_other_attention),
        f"its own backend is built on {' or '.join(ATTENTIONS)}",
        "use --attention-backend FLASH_ATTN or TRITON_ATTN",
    ),
    Rule(
        "score mode",
        _on_gpu(_score_mode),
        "decode steps run in CUDA graphs, which cannot score beside attention",
        "use --kv-score-mode fused or deferred, or leave it out",
    ),
    Rule(
        "fused kernel",
        _on_gpu(_fused_in_triton),
        "the kernel that attends and scores exists in CUDA only",
        "use --kv-kernels cuda or --kv-score-mode deferred",
    ),
    Rule(
        "audit",
        _on_gpu(_audit),
        "what it measures comes out of a kernel that only a CPU has",
        "audit on a CPU or leave it out",
    ),
    Rule(
        "kernels",
        _kernels,
        "on a CPU there is nothing to choose, and on a GPU auto and cuda need the "
        "extension keyformer_vllm._C_cuda, which is not built",
        "on a CPU leave it out, on a GPU run `pip install --no-build-isolation .` "
        "where nvcc is, or use --kv-kernels triton",
    ),
)

GPU_OUTCOME_RULES = (
    Rule(
        "CUDA kernels",
        _on_gpu(_foreign_to_cuda_kernels),
        f"the CUDA kernels serve head sizes {', '.join(map(str, CUDA_HEAD_SIZES))} in "
        f"{' and '.join(CUDA_DTYPES)}",
        "use --kv-kernels triton or drop --kv-policy",
    ),
    Rule(
        "ALiBi",
        _on_gpu(
            lambda config: setting_if(
                compat.uses_alibi(config),
                f"--model {config.model_config.model} (ALiBi) on a GPU",
            )
        ),
        "vLLM's kernels take the bias from the place in the cache, not the position",
        "serve it on a CPU or drop --kv-policy",
    ),
)
