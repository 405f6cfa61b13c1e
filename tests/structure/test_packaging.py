"""What is installed is what is in the tree: packages, wheel, names and entry points."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from octavo.core import plugins
from tests.structure.tree import FOLDERS, ROOT, modules

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ENTRY_POINTS: dict[str, dict[str, str]] = PROJECT["project"]["entry-points"]

# Every module of ours is imported; then no file may stand behind two names, and the folders' own names lead nowhere.
IMPORT_ALL = """
import importlib, importlib.util, pathlib, sys
files = {}
for name in sys.argv[1:]:
    importlib.import_module(name)
for name, module in list(sys.modules.items()):
    if name == "octavo" or name.startswith("octavo."):
        files.setdefault(pathlib.Path(module.__file__).resolve(), []).append(name)
twice = {str(file): names for file, names in files.items() if len(names) > 1}
assert not twice, twice
bare = [name for name in ("core", "policies", "executors", "kernels", "plugins") if importlib.util.find_spec(name)]
assert not bare, f"importable without octavo: {bare}"
for name in ("octavo.core._root", "octavo.core._root.__main__"):
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise AssertionError(f"{name} is importable")
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


COMPILER = """#!/bin/sh
while [ $# -gt 1 ]; do shift; done
echo "what a compiler would write" > "$1"
"""


def run(*command: str, cwd: Path, **environ: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, **environ}
    )
    assert done.returncode == 0, f"{' '.join(command)[:200]}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked() -> list[str]:
    """Files of the repository, those not yet committed too, as paths from its root."""
    listing = run("git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return [name for name in listing.splitlines() if (ROOT / name).is_file()]


def installed_as(name: str) -> str:
    return f"octavo/{name}".replace("octavo/core/_root/", "octavo/")


def test_every_folder_with_code_is_a_listed_package() -> None:
    folders = {file.rpartition("/")[0] for file in tracked() if file.endswith(".py") and file.split("/")[0] in FOLDERS}
    expected = {installed_as(f"{folder}/").rstrip("/").replace("/", ".") for folder in folders}
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(expected)
    without = [folder for folder in folders if not (ROOT / folder / "__init__.py").exists()]
    assert not without, f"no __init__.py in {without}"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist and the wheel made from it, without network, from a copy of the tree: building leaves traces."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    compiler = tmp_path_factory.mktemp("bin") / "c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    words = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source))
    run(*words, cwd=out, CXX=str(compiler))
    return out


def test_the_wheel_is_the_tree_and_the_step_library(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    inside = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    built = {name for name in inside if re.fullmatch(r"octavo/kernels/cpu/cpu-[0-9a-f]+\.so", name)}
    assert len(built) == 1
    assert sorted({*inside} - built) == sorted(
        installed_as(name) for name in tracked() if name.split("/")[0] in FOLDERS
    )
    assert "-py3-none-linux_" in wheel.name


def test_nothing_is_importable_under_two_names_and_torch_stays_with_executors() -> None:
    names = [name for name in modules() if name != "octavo.__main__"]
    run(sys.executable, "-P", "-c", IMPORT_ALL, *names, cwd=ROOT)
    without = [name for name in names if not name.startswith(("octavo.executors", "octavo.kernels"))]
    loaded = run(sys.executable, "-P", "-c", IMPORT_ALL, *without, cwd=ROOT).split()
    assert "octavo" in loaded
    assert not {"torch", "cupy"} & set(loaded)


def test_importing_octavo_is_free() -> None:
    script = "import sys; before = set(sys.modules); import octavo; print(*set(sys.modules) - before)"
    loaded = run(sys.executable, "-P", "-c", script, cwd=ROOT).split()
    assert [name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names] == ["octavo"]


def test_type_checkers_see_the_tree() -> None:
    """.typing/octavo holds one relative link for each folder and for each file of the package itself."""
    links = {link.name: link for link in (ROOT / ".typing/octavo").iterdir()}
    targets = {folder: ROOT / folder for folder in FOLDERS}
    targets |= {file.name: file for file in (ROOT / "core/_root").iterdir() if file.is_file()}
    assert {name: link.resolve() for name, link in links.items()} == targets
    assert all(not link.readlink().is_absolute() for link in links.values())


def test_installed_entry_points_are_those_of_the_project() -> None:
    """If this fails, the project changed after it was installed: run ./dev setup."""
    installed: dict[str, dict[str, str]] = {}
    for point in metadata.distribution("octavo").entry_points:
        if point.group.startswith("octavo."):
            installed.setdefault(point.group, {})[point.name] = point.value
    assert installed == ENTRY_POINTS


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in ENTRY_POINTS.items() for name in names])
def test_every_entry_point_resolves(group: str, name: str) -> None:
    assert callable(plugins.resolve(group, name))


def test_an_unknown_part_is_answered_with_what_is_installed() -> None:
    installed = ", ".join(sorted(ENTRY_POINTS["octavo.executor"]))
    with pytest.raises(
        plugins.PluginError, match=f"no octavo.executor plugin is called 'quantum'; installed: {installed}"
    ):
        plugins.resolve("octavo.executor", "quantum")
