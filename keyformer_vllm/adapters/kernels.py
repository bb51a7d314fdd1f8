# SPDX-License-Identifier: Apache-2.0
"""Which implementation of the operators serves, decided before anything is loaded."""

from __future__ import annotations

from importlib.util import find_spec

from keyformer_vllm.adapters import compat
from keyformer_vllm.config import KeyformerConfig

CUDA_HEAD_SIZES = (64, 80, 96, 128, 256)
"""Head sizes that the CUDA kernels are compiled for (``csrc/cuda/score_keys.cu``)."""

CUDA_DTYPES = ("bfloat16", "float16")
"""Types of K and V that they read."""


def kernels_in_use(config: KeyformerConfig) -> str:
    """The operators' implementation (``ops.IMPLS``) on this platform.

    ``auto`` never means Triton: that is a choice, as it is the slower one.

    Args:
        config: the server's policy.
    """
    if config.reference_kernels:
        return "reference"
    if not compat.on_gpu():
        return "cpu"
    return "cuda" if config.kernels == "auto" else config.kernels


def has_fused_kernel(config: KeyformerConfig) -> bool:
    """Whether the kernels in use attend and score in one pass.

    Args:
        config: the server's policy.
    """
    return kernels_in_use(config) != "triton"


def lacks_kernels(config: KeyformerConfig) -> bool:
    """Whether the kernels asked for are not to be had here.

    Args:
        config: the server's policy.
    """
    if not compat.on_gpu():
        return config.kernels != "auto"
    return (
        kernels_in_use(config) == "cuda" and find_spec("keyformer_vllm._C_cuda") is None
    )
