# SPDX-License-Identifier: Apache-2.0
"""Prints the requirements of the named extras in pyproject.toml, one a line.

So versions of tools are written once, in pyproject.toml, and can be installed
without building this package first.
"""

import sys
import tomllib
from pathlib import Path


def list_requirements(extras: list[str]) -> list[str]:
    """Requirements of `extras`, without those that name this package itself.

    Raises KeyError for an extra that pyproject.toml does not declare.
    """
    root = Path(__file__).resolve().parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]
    return [
        requirement
        for extra in extras
        for requirement in declared[extra]
        if not requirement.startswith(project["name"])
    ]


if __name__ == "__main__":
    print("\n".join(list_requirements(sys.argv[1:])))
