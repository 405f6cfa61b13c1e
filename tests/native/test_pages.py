"""Memory of the native model: taken ahead of steps, and an error where there is none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from signal import SIGABRT

import pytest

from octavo.kernels.cpu import build
from tests.executors.tiny import save_tiny

AHEAD = """
#include "region.h"

#include <cstdio>

using namespace octavo;

int main() {
    constexpr size_t HUGE_PAGE = 2 << 20, LAYER = 5 * HUGE_PAGE + 12288;
    const Region pool(3 * LAYER);
    const auto there = [&](size_t from, size_t to) -> int {
        const uintptr_t first = (uintptr_t(pool.as<uint8_t>()) + from + 4095) / 4096 * 4096;
        const size_t pages = (uintptr_t(pool.as<uint8_t>()) + to - first) / 4096;
        std::vector<unsigned char> each(pages);
        if (mincore(reinterpret_cast<void*>(first), pages * 4096, each.data())) return -1;
        int all = 0;
        for (unsigned char one : each) all += one & 1;
        return all == int(pages);
    };
    if (!pool.populate(3 * LAYER - 1, 3 * LAYER)) return puts("no populate"), 0;
    Ahead ahead(pool, LAYER, 3);
    pool.as<uint8_t>()[7] = 1;
    ahead.take();  // nobody wrote
    printf("%d", there(0, 100000));
    for (size_t layer = 0; layer < 3; layer++) pool.touch(layer * LAYER, HUGE_PAGE / 4);
    ahead.has(HUGE_PAGE / 4);
    int late = 0;
    const auto all = [&](size_t end) {
        return there(0, end) == 1 && there(LAYER, LAYER + end) == 1 && there(2 * LAYER, 2 * LAYER + end) == 1;
    };
    for (size_t end = 1; end < LAYER; end += HUGE_PAGE / 4) {  // a quarter of a page in each layer, step after step
        ahead.wrote(3 * HUGE_PAGE / 4, end);
        ahead.take();
        const size_t next = end + HUGE_PAGE / 4;
        late += !all(next < LAYER ? next : LAYER);
    }
    printf(" %d %d %d", late, all(LAYER), pool.as<uint8_t>()[7]);
}
"""


def test_pages_of_the_pool_are_there_before_a_step_writes_to_them(tmp_path: Path) -> None:
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("needs g++")
    (tmp_path / "main.cpp").write_text(AHEAD)
    flags = ["-std=c++17", f"-I{build.SOURCES}", "-fsanitize=address,undefined"]
    subprocess.run(
        [compiler, *flags, str(tmp_path / "main.cpp"), "-o", str(tmp_path / "ahead")], check=True, timeout=100
    )
    said = subprocess.run([tmp_path / "ahead"], capture_output=True, text=True, check=True, timeout=60).stdout
    if said.startswith("no populate"):
        pytest.skip("this system has no MADV_POPULATE_WRITE")
    assert said.split() == ["0", "0", "1", "1"]


THROWS = """
#include "team.h"

#include <new>

struct Fails : octavo::Job {
    void run(uint32_t, uint32_t chunk, uint32_t, int) override {
        if (chunk == 3) throw std::bad_alloc();
    }
} job;

int main() {
    octavo::Team team(1);
    try {
        team.run(job, {8});
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
"""


def test_a_chunk_without_memory_ends_the_process_and_not_its_step_alone(tmp_path: Path) -> None:
    """Other threads may still be in that step: what they end would count for the next one."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("needs g++")
    (tmp_path / "main.cpp").write_text(THROWS)
    sources = [str(tmp_path / "main.cpp"), str(build.SOURCES / "team.cpp")]
    flags = ["-std=c++17", "-pthread", f"-I{build.SOURCES}"]
    subprocess.run([compiler, *flags, *sources, "-o", str(tmp_path / "throws")], check=True, timeout=100)
    assert subprocess.run([tmp_path / "throws"], capture_output=True, timeout=60, check=False).returncode == -SIGABRT


SHORT = """
import resource, sys

from octavo.core.models.errors import ModelError
from octavo.core.models.locate import locate
from octavo.executors.loading.files import open_checkpoint
from octavo.executors.native.library import Kind, int32s, load
from octavo.executors.native.program import Inputs, Native, Pool, StepError
from octavo.executors.native.weights import Weights

weights = Weights(load(), open_checkpoint(locate(sys.argv[1])), exact=False, wanted="file")
model = Native(weights, Pool(4, 16, Kind.BF16), 2)

def best(count):
    each, none = int32s(range(count)), int32s([])
    first = int32s([0] * count)
    inputs = Inputs(first + 5, first, each, first, int32s(range(count + 1)), each[:1], int32s([-1]), none, none)
    return model.step(inputs).best.tolist()

before = best(1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)
try:
    model.ready(2_000_000)
except ModelError as error:
    print(error)
try:
    best(1_000_000)
except StepError as error:
    print(error)
print(best(1) == before)
"""


def test_where_memory_is_short_a_step_is_refused_and_smaller_ones_go_on(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", SHORT, str(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    ready, refused, same = done.stdout.splitlines()
    assert ready.startswith("steps of 2000000 tokens: the system has no memory for so many tokens")
    assert "no memory" in refused
    assert same == "True"
