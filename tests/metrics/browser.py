"""Headless Chromium for tests and pictures; nothing of it leaves this machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
MORE = "--disable-component-update --disable-sync --hide-scrollbars"


def chromium(profile: Path, url: str, *more: str) -> str:
    """What it prints; skips where it is not installed."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    done = subprocess.run(
        [program, *FLAGS.split(), *MORE.split(), f"--user-data-dir={profile}", *more, url],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout
