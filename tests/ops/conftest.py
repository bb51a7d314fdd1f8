# SPDX-License-Identifier: Apache-2.0
"""One list of implementations for every operator test."""

from collections.abc import Iterator

import pytest
import torch

from tests.implementations import CPU_ISAS, EMULATED, GPU, use_impl, use_isa


@pytest.fixture(
    params=["reference", *(f"cpu-{isa}" for isa in CPU_ISAS), *EMULATED, *GPU]
)
def impl(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Every implementation, the C++ one on each instruction set this CPU has."""
    yield from use_impl(request.param, monkeypatch)


@pytest.fixture(params=CPU_ISAS)
def cpu_impl(request: pytest.FixtureRequest) -> Iterator[str]:
    """The C++ implementation, on each instruction set."""
    yield from use_isa(request.param)


@pytest.fixture(params=[*(f"cpu-{isa}" for isa in CPU_ISAS), EMULATED[0], GPU[0]])
def kernel_impl(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Implementations whose result may not depend on a chunk or a batch by one bit."""
    yield from use_impl(request.param, monkeypatch)


@pytest.fixture(params=["reference", "cpu", *EMULATED, *GPU])
def any_impl(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Operators that do not depend on the instruction set."""
    yield from use_impl(request.param, monkeypatch)


@pytest.fixture(params=["reference", "cpu", "emulated"])
def raising_impl(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Implementations that raise where the data break a promise.

    A GPU stops there, and the process with it.
    """
    yield from use_impl(request.param, monkeypatch)


@pytest.fixture(params=[1, 4], ids=["1thread", "4threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
