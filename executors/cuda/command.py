"""`octavo kernels`: the CUDA kernels of this release: compile them ahead, and what each takes. Needs no GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from octavo.executors.threads import default_threads
from octavo.kernels.cuda.cache import folder
from octavo.kernels.cuda.cubins import Cubin, checked_arch, cubin
from octavo.kernels.cuda.nvrtc import NvrtcError
from octavo.kernels.cuda.shipped import Shipped, shared_limit, shipped

FAILED = 1
command = App(help="Compile the CUDA kernels ahead, and tell what each takes. Needs no GPU.")

Archs = Annotated[list[str], Parameter(name="--arch", negative=(), help="as sm_90a; may be given more than once")]
Names = Annotated[str, Parameter(name="--name", help="only kernels whose name has this in it")]


class Built(NamedTuple):
    arch: str
    kernel: Shipped
    cubin: Cubin


@command.command
def build(
    *,
    arch: Archs,
    name: Names = "",
    out: Annotated[Path | None, Parameter(help="a folder; by default the cache, where executors look")] = None,
) -> int:
    """Compile every kernel that an arch may ask for; what is there already is left."""
    try:
        made = list(_built(arch, name, out))
    except NvrtcError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return FAILED
    size = sum(one.cubin.path.stat().st_size for one in made)
    print(f"{len(made)} kernels for {', '.join(arch)} in {out or folder()}: {size / 2**20:.1f} MB")
    return 0


@command.command(name="list")
def list_(
    *, arch: Archs, name: Names = "", json_: Annotated[bool, Parameter(name="--json", negative=())] = False
) -> int:
    """Registers, spilled bytes and shared memory of every kernel; compiles those that are not there yet."""
    try:
        made = list(_built(arch, name, None))
    except NvrtcError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return FAILED
    rows = [
        {
            "arch": one.arch,
            "kernel": one.kernel.instance.name,
            "registers": one.cubin.figures.registers,
            "spilled": one.cubin.figures.spilled,
            "threads": one.kernel.threads,
            "shared": one.kernel.shared,
        }
        for one in made
    ]
    if json_:
        print(json.dumps(rows, indent=1))
        return 0
    table = Table(box=None, header_style="bold")
    table.add_column("kernel", overflow="fold")
    for title in ("arch", "registers", "spilled", "threads", "shared memory"):
        table.add_column(title, justify="right")
    for row in rows:
        limit = shared_limit(str(row["arch"]))
        shared = f"{row['shared']} of {limit}"
        table.add_row(*(str(row[key]) for key in ("kernel", "arch", "registers", "spilled", "threads")), shared)
    Console().print(table)
    return 0


def _built(archs: list[str], name: str, where: Path | None) -> Iterator[Built]:
    """In the order of the archs. The compiler works outside of Python: as many at a time as there are cores."""
    known = [checked_arch(arch) for arch in archs]
    wanted = [(arch, kernel) for arch in known for kernel in shipped(arch) if name in kernel.instance.name]
    with ThreadPoolExecutor(default_threads()) as pool:
        made = pool.map(lambda one: cubin(one[1].instance, one[0], where=where), wanted)
        for (arch, kernel), one in zip(wanted, made, strict=True):
            yield Built(arch, kernel, one)
