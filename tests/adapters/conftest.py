"""A tiny model with adapters beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the executor's package does, but torch is loaded here first

import pytest

from tests.adapters.made import save_adapter
from tests.executors.tiny import save_tiny


class Made(NamedTuple):
    """`red` and `blue` are of other ranks and on other modules; `twin` has red's content."""

    base: Path
    red: Path
    blue: Path
    twin: Path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_in(tmp_path_factory.mktemp("adapters"))


def made_in(folder: Path, **shape: int) -> Made:
    model = save_tiny(folder / "base", **shape)
    red = save_adapter(folder / "red", model, seed=1, rank_pattern={"q_proj": 7}, alpha_pattern={"down_proj": 3})
    twin = save_adapter(folder / "twin", model, seed=1, rank_pattern={"q_proj": 7}, alpha_pattern={"down_proj": 3})
    blue = save_adapter(folder / "blue", model, seed=2, targets=("q_proj", "v_proj"), r=16, use_rslora=True)
    return Made(folder / "base", red, blue, twin)
