"""Which test holds which case of the list of other engines' faults: by its name, or by this table."""

from __future__ import annotations

import ast
from pathlib import Path

ALL = {f"h{number:02}" for number in range(1, 49)}

ELSEWHERE: dict[str, str] = {
    "h42": "native/test_families.py::test_a_scaled_rotation_says_how_far_it_reaches",
    "h43": "native/test_families.py::test_a_window_that_is_switched_off_is_no_window",
    "h47": "metrics/test_service.py::test_the_names_are_the_same_in_every_mode",
}
"""Cases whose test has another name."""


def functions(root: Path) -> set[str]:
    """`file::function` of every test."""
    found = set()
    for path in (root / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found.add(f"{path.relative_to(root / 'tests')}::{node.name}")
    return found


def test_every_case_has_a_test(root: Path) -> None:
    tests = functions(root)
    named = {word for test in tests for word in test.partition("::test_")[2].split("_") if word in ALL}
    assert set(ELSEWHERE.values()) <= tests
    assert not named & ELSEWHERE.keys(), "once is enough"
    assert named | ELSEWHERE.keys() == ALL
