"""The source tree as data: every module, its names, and what it imports. Reads files, imports nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("core", "policies", "executors", "kernels", "plugins")


class Import(NamedTuple):
    """One imported name. `target` is as long as the statement tells: `from a.b import c` is `a.b.c`."""

    target: str
    line: int
    typing_only: bool


class Module(NamedTuple):
    name: str
    path: Path

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))

    def tree(self) -> ast.Module:
        return _parse(self.path)

    def imports(self) -> list[Import]:
        return _imports(self)


@cache
def modules() -> dict[str, Module]:
    """Every module by name. The folder core/_root is the package `octavo` itself."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[2:] if parts[:2] == ("core", "_root") else parts
            name = ".".join(("octavo", *parts)).removesuffix(".__init__")
            found[name] = Module(name, path)
    return found


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def _imports(module: Module) -> list[Import]:
    return list(_walk(module, module.tree(), typing_only=False))


def _walk(module: Module, node: ast.AST, *, typing_only: bool) -> Iterator[Import]:
    match node:
        case ast.Import(names=names):
            for alias in names:
                yield Import(alias.name, node.lineno, typing_only)
        case ast.ImportFrom(module=source, names=names, level=level):
            prefix = source or ""
            if level:
                package = module.name.split(".")
                up = level - (module.path.name == "__init__.py")
                prefix = ".".join([*package[: len(package) - up], *([source] if source else [])])
            for alias in names:
                yield Import(f"{prefix}.{alias.name}", node.lineno, typing_only)
        case ast.If(test=test, body=body, orelse=orelse):
            checking = ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
            for statement in body:
                yield from _walk(module, statement, typing_only=typing_only or checking)
            for statement in orelse:
                yield from _walk(module, statement, typing_only=typing_only)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _walk(module, child, typing_only=typing_only)


def owner(target: str) -> Module | None:
    """The module of ours that an import's target lies in."""
    name = target
    while name:
        if name in modules():
            return modules()[name]
        name = name.rpartition(".")[0]
    return None
