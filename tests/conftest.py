"""What every test may use. Tests import octavo as anyone does; helpers of a folder are `tests.FOLDER.NAME`."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-runs", default="1000", help="runs of the cores' fuzzer")
    parser.addoption("--fuzz-seed", default="0", help="its first seed")
