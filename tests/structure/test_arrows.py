"""Imports run one way: what may know what, read from the source of every module."""

from __future__ import annotations

import ast
import re

import pytest

from tests.structure.tree import ROOT, Module, modules, owner

CONTRACT = "octavo.policies.contract"

# What each folder may import of ours. A name stands for itself and everything below it.
ALLOWED = {
    "kernels": ("octavo.kernels",),
    "policies": ("octavo.policies",),
    "core": ("octavo.core", CONTRACT),
    "executors": ("octavo.executors", "octavo.core", CONTRACT, "octavo.kernels"),
    "plugins": ("octavo.plugins", "octavo.core", "octavo.policies"),
}

# The parts of the kernel that an executor has nothing to do with: it chooses no work and answers no client.
BEYOND_EXECUTORS = tuple(
    f"octavo.core.{part}" for part in ("scheduler", "kv", "tokenizer", "client", "supervisor", "cli")
)

DEVICE = ("torch", "cupy", "cuda", "triton")

# Cores decide; their shells talk. A core is a function of its messages: same messages, same answers. That is
# strict for what a replay repeats; a tokenizer also finds its vocabulary on disk and tells templates the date.
REPLAYED = tuple(f"octavo.core.{part}" for part in ("scheduler", "kv", "messages", "machine", "trace.catalogue"))
PURE = (*REPLAYED, "octavo.core.tokenizer")
SHELLS = ("actor",)
TALKING = ("zmq", "anyio", "structlog", "asyncio", "socket")
WORLD = ("threading", "multiprocessing", "subprocess", "logging", "time", "random", "secrets", "datetime", "os")

BY_ENTRY_POINT = re.compile(
    r"octavo\.(executors|plugins|policies\.(batching|chunking|preemption|eviction|speculation))\b"
)


def below(name: str, parents: tuple[str, ...]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def in_folder(*folders: str) -> list[Module]:
    return [module for module in modules().values() if module.path.relative_to(ROOT).parts[0] in folders]


def cores(names: tuple[str, ...]) -> list[Module]:
    return [one for one in modules().values() if below(one.name, names) and one.name.rpartition(".")[2] not in SHELLS]


def test_the_tree_is_read() -> None:
    """Guards the tests below: they see the modules that they speak of."""
    assert {"octavo", "octavo.core.messages", CONTRACT, "octavo.executors.base", "octavo.plugins"} <= modules().keys()
    assert cores(REPLAYED)
    assert cores(("octavo.core.tokenizer",))
    assert any(one.target == "octavo.core.messages.Role" for one in modules()["octavo.core.machine"].imports())


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_it_may_know(folder: str) -> None:
    wrong = [
        f"{module.where}:{one.line}: {folder}/ may not import {one.target}"
        for module in in_folder(folder)
        for one in module.imports()
        if one.target.split(".")[0] == "octavo"
        and not below(one.target, ALLOWED[folder])
        # `octavo` itself is core/_root: it offers what core has.
        and not (folder == "core" and one.target == "octavo")
    ]
    assert not wrong, "\n".join(wrong)


def test_every_import_of_ours_exists() -> None:
    wrong = [
        f"{module.where}:{one.line}: there is no {one.target}"
        for module in modules().values()
        for one in module.imports()
        if one.target.startswith("octavo.") and (found := owner(one.target)) is not None and found.name == "octavo"
    ]
    assert not wrong, "\n".join(wrong)


def test_executors_know_nothing_of_scheduling_or_clients() -> None:
    wrong = [
        f"{module.where}:{one.line}: an executor may not import {one.target}"
        for module in in_folder("executors")
        for one in module.imports()
        if below(one.target, BEYOND_EXECUTORS)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_executors_and_kernels_import_torch() -> None:
    wrong = [
        f"{module.where}:{one.line}: {one.target} belongs under executors/ or kernels/"
        for module in in_folder("core", "policies", "plugins")
        for one in module.imports()
        if below(one.target, DEVICE)
    ]
    assert not wrong, "\n".join(wrong)


def test_parts_that_entry_points_name_are_named_nowhere_else() -> None:
    """Neither by an import nor as the text of a module's name: swapping one is a matter of configuration."""
    wrong = []
    for module in in_folder("core", "policies", "kernels", "executors", "plugins"):
        home = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
        foreign = [(one.line, one.target) for one in module.imports()]
        foreign += [
            (node.lineno, node.value)
            for node in ast.walk(module.tree())
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.:]+", node.value)
        ]
        for line, name in foreign:
            named = BY_ENTRY_POINT.match(name)
            if named and not below(home, (named.group(),)):
                wrong.append(f"{module.where}:{line}: {name} is reached by its entry point, not by name")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("names", "banned"), [(PURE, one) for one in (*TALKING, *DEVICE)] + [(REPLAYED, one) for one in WORLD]
)
def test_pure_cores_do_not_touch_the_world(names: tuple[str, ...], banned: str) -> None:
    """Nor does anything of ours that they import, however far away."""
    wrong = []
    for start in cores(names):
        seen = {start.name}
        paths = [[start]]
        while paths:
            path = paths.pop()
            for one in path[-1].imports():
                if one.typing_only:
                    continue
                if below(one.target, (banned,)):
                    via = " -> ".join(step.name for step in path)
                    wrong.append(f"{path[-1].where}:{one.line}: imports {banned}, reached from the pure {via}")
                target = owner(one.target)
                # The package `octavo` loads what it offers on demand; importing it imports nothing.
                if target and target.name not in seen and target.name != "octavo":
                    seen.add(target.name)
                    paths.append([*path, target])
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is_for() -> None:
    wrong = [
        f"{module.where}:1: no module docstring"
        for module in modules().values()
        if not ast.get_docstring(module.tree())
    ]
    assert not wrong, "\n".join(wrong)
