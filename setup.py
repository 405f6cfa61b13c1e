"""Beside pyproject.toml, which says all else: a wheel carries the step library if it is built where a compiler is.

Without one the wheel is pure, and the native executor's first start builds the library (or `cpu` serves). A checkout
that is installed in place keeps its library in the user's cache, since its sources change.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("kernels/cpu")


def _builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("octavo_kernels_cpu_build", KERNELS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class WithLibrary(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether its wheel is for one kind of machine."""
        builder = _builder()
        try:
            builder.find_compiler()
        except builder.BuildError as error:
            sys.stderr.write(f"the wheel comes without the native executor's library: {error}\n")
            return False
        return "editable_wheel" not in self.commands


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode or not self.distribution.has_ext_modules():
            return
        folder = Path(self.build_lib) / "octavo" / KERNELS
        for old in folder.glob("cpu-*.so"):
            old.unlink()
        _builder().library(folder)


class BdistWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Any Python, but one kind of machine if the library is in it."""
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(distclass=WithLibrary, cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
