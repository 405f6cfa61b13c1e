"""At which level this machine computes, for commands: what the native executor would take. Nothing is built for it.

`python -m octavo.executors.native.level` prints it.
"""

from __future__ import annotations

from octavo.core.models.cache import cache_folder
from octavo.executors.native.library import Isa, load
from octavo.executors.threads import default_threads
from octavo.kernels.cpu import build

NAMES = {Isa.PLAIN: "plain C++", Isa.AVX2: "AVX2", Isa.AVX512: "AVX-512 VNNI", Isa.AMX: "AMX", Isa.NEON: "NEON"}


def level() -> str:
    """Instructions and threads, or why they are not known."""
    try:
        library = load(build.library(cache_folder() / "native", before=_not_now))
    except build.BuildError as error:
        return str(error)
    return f"{NAMES[Isa(library.oct_isa_best())]}, {default_threads()} threads"


def _not_now() -> None:
    raise build.BuildError("its library is not built yet: the first start does it")


if __name__ == "__main__":
    print(level())
