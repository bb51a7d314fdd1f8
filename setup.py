# SPDX-License-Identifier: Apache-2.0
"""Builds the native extension; all metadata lives in pyproject.toml.

One extension, `keyformer_vllm._C`, on PyTorch's and Python's stable ABIs. The code is
compiled for the plain architecture; the scoring kernels are compiled once more per
instruction set and chosen at run time, so one build serves every CPU.
"""

import importlib.util
import platform
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CPU_SOURCES = Path("csrc/cpu")

# Flags of one source file: only these files may contain such instructions.
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [
    *AVX2_FLAGS,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    # False alarms inside g++ 12's own intrinsics header.
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]
FLAGS_OF_SOURCE = {
    "isa_avx2.cpp": AVX2_FLAGS,
    "isa_avx512.cpp": AVX512_FLAGS,
    "isa_avx512bf16.cpp": [*AVX512_FLAGS, "-mavx512bf16"],
}

COMPILE_FLAGS = [
    "-std=c++17",
    "-O3",
    # Noise must equal its Python twin to the bit; fused products are explicit.
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    # Vector types are passed only between inlined functions of one file.
    "-Wno-psabi",
]


class BuildNative(build_ext):
    """Finds torch, adds per-file flags and says plainly what is missing."""

    def build_extension(self, ext: Extension) -> None:
        compiler = getattr(self.compiler, "compiler_cxx", None) or ["c++"]
        if shutil.which(compiler[0]) is None:
            sys.exit(
                f"keyformer-vllm: no C++ compiler ({compiler[0]} is not on the path). "
                "Install g++ 10 or newer, or set CXX, and build again."
            )
        torch_root = find_torch()
        ext.include_dirs.append(str(torch_root / "include"))
        ext.library_dirs.append(str(torch_root / "lib"))
        is_x86 = platform.machine().lower() in ("x86_64", "amd64")
        compile_one = self.compiler._compile

        def compile_with_flags(obj, src, extension, cc_args, extra_postargs, pp_opts):
            flags = FLAGS_OF_SOURCE.get(Path(src).name, []) if is_x86 else []
            compile_one(obj, src, extension, cc_args, extra_postargs + flags, pp_opts)

        self.compiler._compile = compile_with_flags
        try:
            super().build_extension(ext)
        finally:
            self.compiler._compile = compile_one


def find_torch() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        sys.exit(
            "keyformer-vllm: PyTorch is not installed, and the extension is built "
            "against its headers. Install the vLLM to be used first, then build with "
            "--no-build-isolation."
        )
    return Path(found.origin).parent


def cpu_extension() -> Extension:
    return Extension(
        "keyformer_vllm._C",
        sources=sorted(str(p) for p in CPU_SOURCES.glob("*.cpp")),
        depends=[*sorted(str(p) for p in CPU_SOURCES.glob("*.h")), "setup.py"],
        libraries=["torch_cpu"],
        define_macros=[
            ("Py_LIMITED_API", "0x030A0000"),
            # The oldest torch whose stable ABI the bindings need (2.10).
            ("TORCH_TARGET_VERSION", "0x020A000000000000"),
        ],
        extra_compile_args=COMPILE_FLAGS,
        language="c++",
        py_limited_api=True,
    )


setup(
    ext_modules=[cpu_extension()],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
