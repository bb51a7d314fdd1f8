# SPDX-License-Identifier: Apache-2.0
"""The implementations that operator tests run.

"emulated" are the CUDA kernels on a CPU, the threads of a block in one order and in the
other; "cuda" are the same on a GPU. "triton" needs a GPU or, set before anything
imports triton, TRITON_INTERPRET=1: test_triton.py runs it so, in a process of its own.
"""

from collections.abc import Iterator

import pytest

from keyformer_vllm import ops
from keyformer_vllm.ops import cpu
from tests import emulated_cuda
from tests.gpu_copies import OnGpu
from tests.helpers import INTERPRETS

CPU_ISAS = [isa for isa in cpu.ISAS if isa != "auto"]
EMULATED = ["emulated", "emulated-reversed"]
GPU = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    "triton" if INTERPRETS else pytest.param("triton", marks=pytest.mark.gpu),
]


def use_isa(isa: str) -> Iterator[str]:
    if not cpu.has_isa(isa):
        pytest.skip(f"this CPU has no {isa}")
    cpu.set_isa(isa)
    yield "cpu"
    cpu.set_isa("auto")


def use_impl(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make an implementation ready and say what `impl` it is."""
    if name.startswith("cpu-"):
        yield from use_isa(name.removeprefix("cpu-"))
    elif name in EMULATED:
        monkeypatch.setitem(ops._loaded, "emulated", emulated_cuda)
        emulated_cuda.set_reversed(name == "emulated-reversed")
        yield "emulated"
        emulated_cuda.set_reversed(False)
    elif name == "cuda" or (name == "triton" and not INTERPRETS):
        monkeypatch.setitem(ops._loaded, name, OnGpu(name))
        yield name
    else:
        yield name
