"""The library under the compiler's sanitizers, in processes of their own: a finding ends them with a report.

The thread sanitizer on the scheduler of chunks runs always. The whole library under all three takes minutes to build:
`pytest tests/native/test_sanitizers.py --sanitizers`, which writes tests/results/sanitizers.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.core.models.cache import cache_folder
from octavo.kernels.cpu import build

CHECKED = ("-O0", "-g1", "-fno-sanitize-recover=all")
SEEN = (*CHECKED, "-DOCTAVO_PLAIN_TILES")
"""Of the whole library: what tile instructions read and write, no sanitizer sees."""
STRESS = """
#include <cstdint>
extern "C" int64_t oct_team_stress(int32_t, int32_t, int32_t, int32_t);
int main() {
    return oct_team_stress(4, 20, 6, 60) == 60 * 6 * 20 * 21 / 2 ? 0 : 3;
}
"""
STEPS = """
#include <cstdint>
#include <cstdio>
#include <vector>
#include "octavo.h"
// Attention over a pool that threads share: chunks of one sequence, decodes of several, long ones split in segments.
int main() {
    const int heads = 4, kv = 2, dim = 32, context = 1024, blocks = 128, width = (heads + 2 * kv) * dim;
    std::vector<float> angles(2 * context * dim / 2, 0.5f);
    OctAngles table{dim / 2, angles.data()};
    OctOp op{};
    op.kind = OCT_ATTEND;
    op.out = 1;
    op.heads = heads;
    op.scale = 0.2f;
    op.window = 700;
    const int32_t widths[] = {width, heads * dim};
    double sums[4] = {};
    for (int turn = 0; turn < 4; turn++) {
        const int threads = turn % 2 ? 5 : 1, kind = turn / 2 ? OCT_BF16 : OCT_I8;
        OctShape shape{1, kv, dim, blocks, 16, kind, context, 0, threads, 3};
        OctModel* model = oct_model_new(&shape, &op, 1, widths, 2, &table, 1);
        for (int round = 0; round < 12; round++) {
            const int sequences = round % 3 == 2 ? 2 : 1, length = round % 3 ? 1 : 90;
            const int start = round % 3 ? 500 : 90 * (round / 3);
            std::vector<int32_t> ids, positions, owners, tables, starts{0};
            for (int s = 0; s < sequences; s++) {
                for (int i = 0; i < length; i++) ids.push_back(0), positions.push_back(start + i), owners.push_back(s);
                for (int b = 0; b < 64; b++) tables.push_back(64 * s + b);
                starts.push_back(int32_t(tables.size()));
            }
            const int n = int(ids.size());
            float* in = oct_buffer(model, 0, n);
            for (int i = 0; i < n * width; i++) in[i] = float((i * 37 + round) % 101) / 50.f - 1.f;
            std::vector<uint8_t> finite(static_cast<size_t>(n));
            OctStep step{};
            step.tokens = n;
            step.tables_count = sequences;
            step.ids = ids.data();
            step.positions = positions.data();
            step.sequences = owners.data();
            step.tables = tables.data();
            step.table_start = starts.data();
            step.finite = finite.data();
            if (oct_step(model, &step)) return 2;
            if (oct_ready(model, n)) return 4;  // while others take pages of the pool
            const float* out = oct_buffer(model, 1, n);
            for (int i = 0; i < n * heads * dim; i++) sums[turn] += double(out[i]);
        }
        oct_model_free(model);
    }
    return sums[0] == sums[1] && sums[2] == sums[3] ? 0 : 3;
}
"""
EXERCISE = """
import sys, tempfile
from pathlib import Path
from octavo.executors.native import library
from tests.native import net, test_drawing as d, test_families as f, test_kernels as t, test_prompts as p
from tests.native import test_tiles as s
loaded = library.load(Path(sys.argv[1]))
net.library = t.library = d.library = p.library = lambda: loaded
for isa in net.levels():
    for name in t.STORED:
        t.test_a_row_has_the_same_bits_in_any_company(isa, name)
        t.test_packing_keeps_every_number_and_puts_rows_where_they_belong(isa, name)
    for heads in ((6, 2, 8), (9, 3, 64)):
        t.test_attention(isa, heads)
    for kind in (library.Kind.F32, library.Kind.BF16, library.Kind.I8):
        t.test_attention_that_is_not_llamas(isa, kind)
        t.test_what_a_block_held_before_is_not_seen(isa, kind)
t.test_a_long_stream_has_the_same_bits_split_over_threads()
t.test_floats_become_groups_when_asked("f16")
t.test_weights_that_are_not_finite_are_found()
t.test_a_step_that_makes_no_sense_is_refused({"tables": [99]}, "table")
for name in ("gemma2", "gemma3", "gpt2", "phi3, rotated in part", "mixtral", "deepseek_v2", "deepseek_v3"):
    f.test_logits_are_those_of_transformers(name, Path(tempfile.mkdtemp()))
if (tiles := library.Isa.AMX) in net.levels():
    p.test_a_row_that_is_not_finite_stays_alone(tiles)
    for name in ("q4_1", "q6_k"):
        s.test_products_have_the_bits_of_products_without_tiles(tiles, name)
    for name in ("gpt2", "mixtral"):
        p.test_a_prompt_has_the_same_bits_in_any_chunk_and_company(tiles, Path(tempfile.mkdtemp()), name)
for options in d.OPTIONS:
    d.test_what_else_is_asked_changes_the_same(options, 0.7)
    d.test_what_else_is_asked_changes_the_same(options, 0.0)
for where in (0, 5, 96):
    for options in ({}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"typical_p": 0.5}, {"top_k": 9, "top_p": 0.5}):
        d.test_a_draw_from_numbers_that_are_none_is_a_token(where, options)
d.test_guesses_are_context_for_what_comes_after_them()
d.test_log_probabilities_are_the_samplers(20)
assert loaded.oct_team_stress(3, 10, 4, 20) == 20 * 4 * 10 * 11 // 2
print("done")
"""
RESULTS = Path(__file__).parents[1] / "results" / "sanitizers.md"
_said: dict[str, str] = {}

pytestmark = pytest.mark.timeout(2000)


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> Iterator[str]:
    """The compiler, when all of it is asked for; writes what came out."""
    if not request.config.getoption("--sanitizers"):
        pytest.skip("takes minutes: --sanitizers")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ and its libraries of sanitizers")
    yield compiler
    version = run(compiler, "--version").stdout.splitlines()[0]
    rows = "\n".join(f"| {name} | {outcome} |" for name, outcome in _said.items())
    title = "# The step library under sanitizers\n\n`pytest tests/native/test_sanitizers.py --sanitizers`"
    RESULTS.write_text(f"{title}, {version}, flags {' '.join(SEEN)}.\n\n| what | outcome |\n|---|---|\n{rows}\n")


def run(*command: str, timeout: float = 280, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=timeout, check=False
    )  # fmt: skip


def fixed() -> list[str]:
    """Addresses are laid out at random in more bits than the thread sanitizer expects on some kernels: run without."""
    return [found, "-R"] if (found := shutil.which("setarch")) else []


def test_no_bad_address_and_no_undefined_behaviour(asked: str, root: Path) -> None:
    runtime = run(asked, "-print-file-name=libasan.so").stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("g++ has no libasan here")
    library = build.library(cache_folder() / "native", (*SEEN, "-fsanitize=address,undefined"))
    path = os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(root)])
    options = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": path}
    done = run(sys.executable, "-c", EXERCISE, str(library), timeout=1500, **options)
    said = "nothing found" if done.returncode == 0 else f"ended with {done.returncode}"
    _said["address, undefined: formats, attention, models at every level of this machine"] = said
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["done"]), done.stderr[-3000:]


def test_threads_of_a_step_do_not_race(asked: str, tmp_path: Path) -> None:
    (tmp_path / "main.cpp").write_text(STEPS)
    library = build.library(cache_folder() / "native", (*SEEN, "-fsanitize=thread"))
    flags = [f"-I{build.SOURCES}", "-std=c++17", "-pthread", "-fsanitize=thread", *CHECKED]
    built = run(asked, *flags, str(tmp_path / "main.cpp"), str(library), "-o", str(tmp_path / "steps"))
    assert built.returncode == 0, built.stderr
    done = run(*fixed(), str(tmp_path / "steps"), timeout=600)
    said = "nothing found" if done.returncode == 0 else f"ended with {done.returncode}"
    _said["thread: steps of chunks, decodes and split streams on five threads, equal to one thread's"] = said
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_threads_of_a_team_do_not_race(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    (tmp_path / "main.cpp").write_text(STRESS)
    sources = [str(tmp_path / "main.cpp"), str(build.SOURCES / "team.cpp")]
    flags = [f"-I{build.SOURCES}", "-std=c++17", "-pthread", "-fsanitize=thread", *CHECKED]
    built = run(compiler, *flags, *sources, "-o", str(tmp_path / "stress"))
    assert built.returncode == 0, built.stderr
    done = run(*fixed(), str(tmp_path / "stress"))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
