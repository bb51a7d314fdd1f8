# SPDX-License-Identifier: Apache-2.0
"""One list of implementations for every operator test."""

from collections.abc import Iterator

import pytest
import torch

from keyformer_vllm.ops import cpu

CPU_ISAS = [isa for isa in cpu.ISAS if isa != "auto"]


def _use_isa(isa: str) -> Iterator[str]:
    if not cpu.has_isa(isa):
        pytest.skip(f"this CPU has no {isa}")
    cpu.set_isa(isa)
    yield "cpu"
    cpu.set_isa("auto")


@pytest.fixture(params=["reference", *(f"cpu-{isa}" for isa in CPU_ISAS)])
def impl(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every implementation, the C++ one on each instruction set this CPU has."""
    if request.param == "reference":
        yield "reference"
    else:
        yield from _use_isa(request.param.removeprefix("cpu-"))


@pytest.fixture(params=CPU_ISAS)
def cpu_impl(request: pytest.FixtureRequest) -> Iterator[str]:
    """The C++ implementation, on each instruction set."""
    yield from _use_isa(request.param)


@pytest.fixture(params=["reference", "cpu"])
def any_impl(request: pytest.FixtureRequest) -> str:
    """Operators that do not depend on the instruction set."""
    return request.param


@pytest.fixture(params=[1, 4], ids=["1thread", "4threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
