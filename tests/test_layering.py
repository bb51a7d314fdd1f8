# SPDX-License-Identifier: Apache-2.0
"""Who may import whom. Rules that a machine checks are the ones that survive.

core  <-  ops  <-  adapters (the only part that knows vLLM)  <-  plugin, cli
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "keyformer_vllm"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def imported_modules(source: str, package: str) -> set[str]:
    """Full names of everything a module imports anywhere, functions included.

    Args:
        source: text of the module.
        package: dotted name of the package it lies in, for relative imports.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from a import b` may import the module a.b.
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def imports_of(path: Path) -> set[str]:
    package = ".".join(path.parent.relative_to(ROOT).parts)
    return imported_modules(path.read_text(), package)


def outside(names: set[str], *allowed: str) -> set[str]:
    """The names that lie in none of the allowed packages."""
    return {
        name
        for name in names
        if not any(name == a or name.startswith(a + ".") for a in allowed)
    }


def part(name: str) -> list[Path]:
    return [path for path in SOURCES if path.relative_to(PACKAGE).parts[0] == name]


def test_the_checker_sees_imports():
    source = (
        "import a.b\nfrom c import d\ndef f():\n from ..e import g; from . import h"
    )
    found = imported_modules(source, "x.y.z")
    assert found == {"a.b", "c.d", "x.y.e.g", "x.y.z.h"}
    assert outside({"torch", "torch.nn", "torchvision"}, "torch") == {"torchvision"}
    assert len(part("core")) >= 7 and len(part("ops")) >= 1


@pytest.mark.parametrize("path", part("core"), ids=lambda path: path.name)
def test_core_imports_torch_and_the_standard_library_only(path):
    allowed = ("torch", "keyformer_vllm.core", *sys.stdlib_module_names)
    assert not outside(imports_of(path), *allowed)


@pytest.mark.parametrize("name", ["capacity", "policies", "retention"])
def test_counts_and_policies_need_no_torch(name):
    imports = imports_of(PACKAGE / "core" / f"{name}.py")
    assert imports and not any(i.split(".")[0] == "torch" for i in imports)


@pytest.mark.parametrize("path", part("ops"), ids=lambda path: path.name)
def test_ops_know_neither_vllm_nor_what_is_above_them(path):
    imports = imports_of(path)
    assert not any(i.split(".")[0] == "vllm" for i in imports)
    own = {i for i in imports if i.split(".")[0] == "keyformer_vllm"}
    below = ("core", "ops", "_C", "_C_cuda")
    assert not outside(own, *(f"keyformer_vllm.{name}" for name in below))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_adapters_import_vllm(path):
    if path in part("adapters"):
        return
    assert not any(i.split(".")[0] == "vllm" for i in imports_of(path))


def test_importing_the_package_pulls_in_neither_torch_nor_vllm():
    """Every vLLM process discovers plugins, also those that never run a model."""
    modules = ["keyformer_vllm", "keyformer_vllm.plugin"]
    modules += ["keyformer_vllm.core.policies", "keyformer_vllm.core.retention"]
    if (PACKAGE / "config.py").exists():
        modules.append("keyformer_vllm.config")
    check = (
        f"import sys, {', '.join(modules)}\n"
        "heavy = {'torch', 'vllm', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_headers_do_not_include_torch():
    """Kernels are plain C++ and CUDA over raw pointers; only bindings know torch."""
    csrc = ROOT / "csrc"
    headers = [*csrc.rglob("*.h"), *csrc.rglob("*.cuh"), *csrc.rglob("*.cu")]
    units = list(csrc.rglob("*.cpp"))
    # The one exception is a part of the bindings.
    assert {path.name for path in csrc.rglob("*.hpp")} == {
        "schemas.hpp",
        "tensor_checks.hpp",
    }
    # Sources without a header would mean that this test looks in the wrong place.
    assert bool(headers) == bool(units), (headers, units)
    torch_include = re.compile(r'#\s*include\s*[<"](torch|ATen|c10|pybind11|Python\.h)')
    for header in headers:
        text = header.read_text()
        assert not torch_include.search(text) and ".hpp" not in text, header
    if units:
        assert any(torch_include.search(unit.read_text()) for unit in units)
