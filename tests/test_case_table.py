# SPDX-License-Identifier: Apache-2.0
"""The table of reported cases names tests that exist, and leaves no case out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROWS = dict(
    re.findall(
        r"^\| (A\d\d) \|[^|]*\| (.*) \|$",
        (TESTS / "e2e" / "README.md").read_text(encoding="utf-8"),
        re.M,
    )
)


def test_every_case_has_a_row():
    assert list(ROWS) == [f"A{number:02}" for number in range(1, 51)]


@pytest.mark.parametrize("case", ROWS)
def test_named_tests_exist(case):
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", ROWS[case])
    assert named or ROWS[case].startswith("no "), "neither a test nor a reason"
    for file, name in named:
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        functions = {
            node.name for node in tree.body if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{file} has no {name}"
