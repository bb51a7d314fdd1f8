# SPDX-License-Identifier: Apache-2.0
"""Markers, environment and fixtures that every test shares."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Before anything imports torch or vLLM. Two OpenMP threads on a small shared machine
# can be slower than one, and one engine with 1 GiB of cache holds every test here.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips, with a reason, the tests whose hardware is not here."""
    needed = {
        name
        for item in items
        for name in ("gpu", "amx")
        if item.get_closest_marker(name)
    }
    missing = {name: _HARDWARE[name]() for name in needed}
    for item in items:
        for name, reason in missing.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def _explain_missing_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no NVIDIA GPU here"


def _explain_missing_amx() -> str | None:
    import torch

    return None if torch.cpu._is_amx_tile_supported() else "this CPU has no AMX tiles"


_HARDWARE: dict[str, Callable[[], str | None]] = {
    "gpu": _explain_missing_gpu,
    "amx": _explain_missing_amx,
}


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct in bfloat16."""
    from keyformer_vllm.demo.model import default_model_dir, is_converted

    folder = default_model_dir()
    if not is_converted(folder):
        pytest.skip(f"no model in {folder}; run `make setup`")
    return folder


@pytest.fixture(scope="session")
def xsum() -> Path:
    """File of XSum articles, one JSON object a line with `document` and `summary`."""
    named = os.environ.get("KEYFORMER_XSUM")
    path = Path(named) if named else ROOT.parent / "shared" / "data" / "xsum.jsonl"
    if not path.is_file():
        pytest.skip(f"no articles in {path}; set KEYFORMER_XSUM to a file of them")
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """From a kind in `tests/models.py` to its folder; each is written once."""
    from tests.models import write_model

    root = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = write_model(kind, root / kind)
        return made[kind]

    return get
