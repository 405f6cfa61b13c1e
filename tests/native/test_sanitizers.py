"""The library under the compiler's sanitizers, in processes of their own: a finding ends them with a report."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.core.models.cache import cache_folder
from octavo.kernels.cpu import build

CHECKED = ("-O0", "-g1", "-fno-sanitize-recover=all")
STRESS = """
#include <cstdint>
extern "C" int64_t oct_team_stress(int32_t, int32_t, int32_t, int32_t);
int main() {
    return oct_team_stress(4, 20, 6, 60) == 60 * 6 * 20 * 21 / 2 ? 0 : 3;
}
"""
EXERCISE = """
import sys
from pathlib import Path
from octavo.executors.native import library
from tests.native import net, test_kernels as t
loaded = library.load(Path(sys.argv[1]))
net.library = t.library = lambda: loaded
for isa in (library.Isa.PLAIN, net.levels()[-1]):
    for name in t.STORED:
        t.test_a_row_has_the_same_bits_in_any_company(isa, name)
    for heads in ((6, 2, 8), (9, 3, 64)):
        t.test_attention(isa, heads)
    t.test_attention_that_is_not_llamas(isa, library.Kind.I8)
t.test_a_long_stream_has_the_same_bits_split_over_threads()
t.test_floats_become_groups_when_asked("f16")
t.test_a_step_that_makes_no_sense_is_refused({"tables": [99]}, "table")
assert loaded.oct_team_stress(3, 10, 4, 20) == 20 * 4 * 10 * 11 // 2
print("done")
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=280, check=False
    )  # fmt: skip


def test_no_bad_address_and_no_undefined_behaviour(root: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ and its libasan")
    runtime = run(compiler, "-print-file-name=libasan.so").stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("g++ has no libasan here")
    library = build.library(cache_folder() / "native", (*CHECKED, "-fsanitize=address,undefined"))
    options = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(root)}
    done = run(sys.executable, "-c", EXERCISE, str(library), **options)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-3000:]


def test_threads_of_a_team_do_not_race(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    (tmp_path / "main.cpp").write_text(STRESS)
    sources = [str(tmp_path / "main.cpp"), str(build.SOURCES / "team.cpp")]
    flags = [f"-I{build.SOURCES}", "-std=c++17", "-pthread", "-fsanitize=thread", *CHECKED]
    built = run(compiler, *flags, *sources, "-o", str(tmp_path / "stress"))
    assert built.returncode == 0, built.stderr
    # Addresses are laid out at random in more bits than the sanitizer expects on some kernels: it runs without.
    fixed = [found, "-R"] if (found := shutil.which("setarch")) else []
    done = run(*fixed, str(tmp_path / "stress"))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
