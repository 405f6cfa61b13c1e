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
    parser.addoption("--neon", action="store_true", help="the step library's level for Arm, built and emulated here")
    parser.addoption("--sanitizers", action="store_true", help="the whole step library under them; writes its results")
    parser.addoption(
        "--sim-real", default="", help="compare the simulator with this executor (native, cpu); writes its results"
    )
    parser.addoption(
        "--speculation-all", action="store_true", help="every drafter with every draft length; writes its results"
    )
    parser.addoption(
        "--kernels-all", action="store_true", help="compile every CUDA kernel, plant every fault; writes their results"
    )
    parser.addoption("--kernels-on-gpu", action="store_true", help="kernels' tests on a GPU in place of the emulator")
    parser.addoption(
        "--counted-requests", default="", help="requests of the run that metrics and events are compared on"
    )
    parser.addoption("--http-fuzz", default="0", help="minutes of requests to the gateway that nobody would send")
    parser.addoption(
        "--schemas", default="20", help="JSON schemas that answers are checked against; 1000 takes minutes"
    )
    parser.addoption("--pictures", action="store_true", help="take the pictures of the docs, with Chromium")
    parser.addoption("--browser", default="", help="a Chromium that the chat page is tested in; takes its picture")
