# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources compile, spill nothing and leave room for enough blocks."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
ARCHS = ("80", "90a")
HEAD_SIZES = (64, 80, 96, 128, 256)

# Registers per thread, by kernel. 128 let 4 blocks of 128 threads weigh tiles on a
# multiprocessor; the tiles of head size 256 leave room for 2 anyway. 168 let the 3
# blocks of 128 threads of attention run for which shared memory has room, up to head
# size 128; one of head size 256.
DTYPES = ("BFloat16", "Float16")
BUDGETS = {
    "select_tokens_kernel": 64,
    "select_runs_kernel": 80,
    "compact_kv_kernel": 64,
    "renumber_slots_kernel": 64,
    "reset_slots_kernel": 40,
    "finish_rows_kernel": 64,
    "draw_noise_kernel": 40,
    "plan_scores_kernel": 64,
    "scale_tiles_kernel": 40,
    "add_columns_kernel": 64,
    **{
        f"weigh_tiles_kernel<{dtype},{size}>": 128 if size <= 128 else 176
        for dtype in DTYPES
        for size in HEAD_SIZES
    },
    **{
        f"attend_ranges_kernel<{dtype},{size}>": 168 if size <= 128 else 255
        for dtype in DTYPES
        for size in HEAD_SIZES
    },
}


class Usage(NamedTuple):
    registers: int
    spills: int


def kernel_name(mangled: str) -> str:
    """`kernel` or `kernel<dtype,head size>` of a mangled entry function."""
    match = re.match(
        r"_ZN9keyformer4cuda\d+([a-z_]+_kernel)(?:INS0_\d+([A-Za-z0-9]+?)ELi(\d+)E)?",
        mangled,
    )
    assert match, mangled
    name, dtype, size = match.groups()
    return f"{name}<{dtype},{size}>" if dtype else name


def read_usage(log: str) -> dict[tuple[str, str], Usage]:
    """From (kernel, architecture) to what the assembler reports."""
    entries = re.split(r"Compiling entry function '", log)[1:]
    usage = {}
    for entry in entries:
        mangled, arch = re.match(r"(\w+)' for 'sm_(\w+)'", entry).groups()
        # Functions called by the kernel follow it: the first numbers are its own.
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        registers = re.search(r"Used (\d+) registers", entry)
        usage[kernel_name(mangled), arch] = Usage(
            int(registers[1]), int(spills[1]) + int(spills[2])
        )
    return usage


def test_the_report_is_read():
    log = (
        "ptxas info    : Compiling entry function "
        "'_ZN9keyformer4cuda18weigh_tiles_kernelINS0_8BFloat16ELi80EEEvNS0_14"
        "ScoreGroupArgsE' for 'sm_90a'\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 94 registers, used 1 barriers\n"
    )
    assert read_usage(log) == {
        ("weigh_tiles_kernel<BFloat16,80>", "90a"): Usage(94, 16)
    }


@pytest.mark.slow  # about a minute of nvcc
def test_kernels_compile_within_their_budget():
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    done = subprocess.run(
        [".ci/compile_cuda.sh"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    usage = read_usage(done.stdout)
    assert set(usage) == {(name, arch) for name in BUDGETS for arch in ARCHS}
    assert {key: used for key, used in usage.items() if used.spills} == {}
    over = {key: u for key, u in usage.items() if u.registers > BUDGETS[key[0]]}
    assert over == {}
