"""The kernels' source files, and one with all that it includes as text: what a compiled kernel depends on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
_INCLUDE = re.compile(r'^#include "(\w+\.\w+)"', re.MULTILINE)


class Instance(NamedTuple):
    """A kernel: the file that it is in, and the C++ expression that names it, template arguments included."""

    file: str
    name: str


def closure(file: str, folder: Path = HERE) -> dict[str, str]:
    """Text of `file` and of everything of ours that it includes, by name."""
    texts: dict[str, str] = {}
    open_ = [file]
    while open_:
        name = open_.pop()
        if name not in texts:
            texts[name] = (folder / name).read_text(encoding="utf-8")
            open_ += _INCLUDE.findall(texts[name])
    return texts
