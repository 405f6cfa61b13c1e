"""The grammar engines that tests ask the same of; xgrammar is optional, and `./dev setup` installs it."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import pytest

from octavo.core.grammar import GROUP, Engine
from octavo.core.plugins import resolve

NAMES = [
    "llguidance",
    pytest.param("xgrammar", marks=pytest.mark.skipif(find_spec("xgrammar") is None, reason="no xgrammar here")),
]


@cache
def engine(name: str) -> Engine:
    made: Engine = resolve(GROUP, name)()
    return made
