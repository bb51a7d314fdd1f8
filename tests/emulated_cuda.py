# SPDX-License-Identifier: Apache-2.0
"""The CUDA operators on a CPU: their sources over tests/cuda_emulation.

A module with the functions of `keyformer_vllm.ops.cuda`, for CPU tensors. Tests put it
among the implementations; nothing outside the tests can reach it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import torch

from keyformer_vllm.ops.layout import row_layout_number

ROOT = Path(__file__).resolve().parent.parent
EMULATION = ROOT / "tests" / "cuda_emulation"
OUTPUT = ROOT / "build" / "cuda_emulation"

COMPILE = [
    os.environ.get("CXX", "g++"),
    *("-std=c++17", "-O2", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra"),
    *("-Wno-unknown-pragmas", "-DKEYFORMER_EMULATE_CUDA"),
    # The oldest torch whose stable ABI the bindings need, as in setup.py.
    "-DTORCH_TARGET_VERSION=0x020A000000000000",
    *(f"-I{ROOT / name}" for name in ("csrc", "csrc/cuda")),
    f"-I{EMULATION}",
]


def score_keys(*args: Any) -> None:
    _operators().score_keys(*args[:-1], row_layout_number(args[-1]))


def paged_attention_scored(*args: Any) -> None:
    _operators().paged_attention_scored(*args[:-1], row_layout_number(args[-1]))


def renumber_slots(*args: Any) -> None:
    _operators().renumber_slots(*args)


def reset_slots(*args: Any) -> None:
    _operators().reset_slots(*args)


def select_keep(*args: Any) -> torch.Tensor:
    return _operators().select_keep(*args)


def compact_kv(*args: Any) -> None:
    _operators().compact_kv(*args[:-1], row_layout_number(args[-1]))


def draw_noise(*args: Any) -> torch.Tensor:
    return _operators().draw_noise(*args)


def set_reversed(reversed_order: bool) -> None:
    """Run the threads of a block from the last to the first."""
    _operators().set_reversed(reversed_order)


def build() -> Path:
    """Compile the kernels for the CPU, unless that has been done; the library."""
    torch_root = Path(torch.__file__).parent
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    sources += [ROOT / "csrc/cuda/torch_bindings.cpp", EMULATION / "emulated_order.cpp"]
    read = [*(ROOT / "csrc").rglob("*"), *EMULATION.iterdir(), Path(__file__)]
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(path for path in read if path.is_file()):
        digest.update(path.read_bytes())
    library = OUTPUT / f"{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    # Several test processes may build at once: each on its own, the last one stays.
    folder = OUTPUT / f"build-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    includes = [torch_root / "include", sysconfig.get_paths()["include"]]
    objects = {source: folder / f"{source.name}.o" for source in sources}
    compiling = [
        subprocess.Popen(
            [*COMPILE, *(f"-isystem{path}" for path in includes)]
            + ["-x", "c++", "-c", str(source), "-o", str(target)]
        )
        for source, target in objects.items()
    ]
    assert [process.wait() for process in compiling] == [0] * len(compiling)
    linked = folder / library.name
    libraries = [f"-L{torch_root / 'lib'}", "-ltorch_cpu"]
    subprocess.run(
        [COMPILE[0], "-shared", *map(str, objects.values()), "-o", linked, *libraries],
        check=True,
    )
    linked.replace(library)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    return library


@cache
def _operators() -> Any:
    torch.ops.load_library(str(build()))
    return torch.ops.keyformer_emulated
