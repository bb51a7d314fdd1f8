# SPDX-License-Identifier: Apache-2.0
"""Builds the native extension; all metadata lives in pyproject.toml.

Extensions on PyTorch's and Python's stable ABIs. `keyformer_vllm._C` is compiled for
the plain architecture; the scoring kernels are compiled once more per instruction set
and chosen at run time, so one build serves every CPU. `keyformer_vllm._C_cuda` is built
as well where there are nvcc and a CUDA build of torch.

Environment variables:
    KEYFORMER_CUDA_ARCHS  architectures to compile for, default "80;86;89;90a"; any of
                          KNOWN_ARCHS, or empty to leave the CUDA extension out
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CPU_SOURCES = Path("csrc/cpu")
CUDA_SOURCES = Path("csrc/cuda")
# The kernels use bfloat16 tensor cores and asynchronous copies, from 8.0 on. The ones
# with an "a" run on that architecture alone.
KNOWN_ARCHS = (
    *("80", "86", "87", "88", "89", "90", "90a", "100", "100a", "103", "103a"),
    *("110", "110a", "120", "120a", "121", "121a"),
)


def read_archs() -> list[str]:
    """Architectures that KEYFORMER_CUDA_ARCHS names; ends the build at an unknown one.

    nvcc would say so minutes later, in the middle of its output, or, for one that it
    knows and the kernels do not, with errors in their source.
    """
    named = os.environ.get("KEYFORMER_CUDA_ARCHS", "80;86;89;90a")
    archs = [arch for arch in named.split(";") if arch]
    for arch in archs:
        if arch not in KNOWN_ARCHS:
            sys.exit(
                f"keyformer-vllm: KEYFORMER_CUDA_ARCHS={named!r}: no architecture "
                f"{arch!r}; allowed are any of {';'.join(KNOWN_ARCHS)}, or nothing"
            )
    return archs


CUDA_ARCHS = read_archs()

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

    def finalize_options(self) -> None:
        super().finalize_options()
        reason = explain_no_cuda()
        if reason is not None:
            print(f"keyformer-vllm: building for the CPU only, {reason}")
            self.extensions = [e for e in self.extensions if e.name != CUDA_NAME]

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
        if ext.name == CUDA_NAME:
            ext.extra_objects = compile_kernels(Path(self.build_temp))
            ext.library_dirs.append(str(cuda_home() / "lib64"))
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


def cuda_home() -> Path | None:
    """Folder of the CUDA toolkit, None if there is none."""
    named = os.environ.get("CUDA_HOME")
    nvcc = Path(named) / "bin" / "nvcc" if named else shutil.which("nvcc")
    if nvcc is None or not Path(nvcc).exists():
        return None
    # nvcc may be a link or a wrapper elsewhere; it knows where it belongs.
    told = subprocess.run(
        [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True
    )
    for line in told.stderr.splitlines():
        if line.startswith("#$ TOP="):
            return Path(line.removeprefix("#$ TOP=")).resolve()
    return None


def explain_no_cuda() -> str | None:
    """Why the CUDA extension cannot be built here; None if it can."""
    if not CUDA_ARCHS:
        return "KEYFORMER_CUDA_ARCHS is empty"
    if not list((find_torch() / "lib").glob("libtorch_cuda.*")):
        return "torch is a CPU build"
    if cuda_home() is None:
        return "nvcc is not installed (put it on the path or set CUDA_HOME)"
    return None


def compile_kernels(folder: Path) -> list[str]:
    """Compile csrc/cuda/*.cu with nvcc; the object files."""
    folder.mkdir(parents=True, exist_ok=True)
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in CUDA_ARCHS]
    portable = [arch for arch in CUDA_ARCHS if arch.isdigit()]
    if portable:
        # Later GPUs compile this for themselves.
        newest = max(portable, key=int)
        codes.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    nvcc = str(cuda_home() / "bin" / "nvcc")
    flags = ["-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Icsrc"]

    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.stem}.cuda.o")
        command = [nvcc, *flags, f"-I{CUDA_SOURCES}", *codes]
        subprocess.run([*command, "-c", str(source), "-o", target], check=True)
        return target

    # Most of the time goes into score and attention kernels, a file per dtype.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, sorted(CUDA_SOURCES.glob("*.cu"))))


def extension(name: str, folder: Path, **options: object) -> Extension:
    headers = [*Path("csrc").glob("*.hpp"), *CPU_SOURCES.glob("*.h")]
    headers += [path for path in folder.iterdir() if path.suffix != ".cpp"]
    return Extension(
        name,
        sources=sorted(str(path) for path in folder.glob("*.cpp")),
        depends=[*sorted({str(path) for path in headers}), "setup.py"],
        extra_compile_args=COMPILE_FLAGS,
        language="c++",
        py_limited_api=True,
        **options,
    )


STABLE_ABI = [
    ("Py_LIMITED_API", "0x030A0000"),
    # The oldest torch whose stable ABI the bindings need (2.10).
    ("TORCH_TARGET_VERSION", "0x020A000000000000"),
]
CUDA_NAME = "keyformer_vllm._C_cuda"

setup(
    ext_modules=[
        extension(
            "keyformer_vllm._C",
            CPU_SOURCES,
            libraries=["torch_cpu"],
            define_macros=STABLE_ABI,
        ),
        extension(
            CUDA_NAME,
            CUDA_SOURCES,
            # A runtime of its own: the build does not depend on torch's.
            libraries=["torch_cpu", "torch_cuda", "cudart_static", "dl", "rt"],
            define_macros=[*STABLE_ABI, ("USE_CUDA", None)],
        ),
    ],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
