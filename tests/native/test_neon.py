"""The level for Arm processors, built by a cross compiler and run by an emulator of their instructions.

`pytest tests/native/test_neon.py --neon`, with g++ for aarch64 and qemu-user (Debian: `apt install
g++-aarch64-linux-gnu qemu-user`); the library takes a minute or two to build.
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.kernels.cpu import build

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PROBE = """
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include "octavo.h"

// Blocks of a source: random bytes, with halves of about 0.03 where it keeps scales; or floats of two bytes or four.
struct Source {
    const char* name;
    int kind, source, bytes, cols, halves[2], count;
};
constexpr Source SOURCES[] = {
    {"f32", OCT_F32, OCT_SRC_F32, 4, 1, {}, 0},        {"f16", OCT_F16, OCT_SRC_F16, 2, 1, {}, 0},
    {"bf16", OCT_BF16, OCT_SRC_BF16, 2, 1, {}, 0},     {"q4_0", OCT_W4, OCT_SRC_Q4_0, 18, 32, {0}, 1},
    {"q4_1", OCT_W4, OCT_SRC_Q4_1, 20, 32, {0, 2}, 2}, {"q5_0", OCT_W5, OCT_SRC_Q5_0, 22, 32, {0}, 1},
    {"q5_1", OCT_W5, OCT_SRC_Q5_1, 24, 32, {0, 2}, 2}, {"q8_0", OCT_W8, OCT_SRC_Q8_0, 34, 32, {0}, 1},
    {"q4_k", OCT_K4, OCT_SRC_Q4_K, 144, 256, {0, 2}, 2}, {"q5_k", OCT_K5, OCT_SRC_Q5_K, 176, 256, {0, 2}, 2},
    {"q6_k", OCT_K6, OCT_SRC_Q6_K, 210, 256, {208}, 1},
};
constexpr int NEON = 4, ROWS = 53, COLS = 512, TOKENS = 19;

std::vector<uint8_t> rows_of(const Source& s) {
    std::vector<uint8_t> made(size_t(ROWS) * COLS / s.cols * s.bytes);
    for (uint8_t& byte : made) byte = uint8_t(rand() >> 7);
    for (size_t at = 0; at < made.size(); at += s.bytes) {
        const float value = float(rand() % 2001 - 1000) / 1000;
        const uint16_t f16 = uint16_t(0x3000 | (rand() & 0x83ff)), bf16 = uint16_t(0x3e00 | (rand() & 0x81ff));
        const uint16_t scale = 0x27ae;
        if (s.source == OCT_SRC_F32) memcpy(&made[at], &value, 4);
        if (s.source == OCT_SRC_F16) memcpy(&made[at], &f16, 2);
        if (s.source == OCT_SRC_BF16) memcpy(&made[at], &bf16, 2);
        for (int i = 0; i < s.count; i++) memcpy(&made[at + s.halves[i]], &scale, 2);
    }
    return made;
}

float apart(const std::vector<float>& a, const std::vector<float>& b) {
    float most = 0, size = 0;
    for (size_t i = 0; i < a.size(); i++) {
        most = std::fmax(most, std::fabs(a[i] - b[i]));
        size = std::fmax(size, std::fabs(a[i]));
    }
    return most / size;
}

bool products(const Source& s) {
    OctMatrix w{};
    if (oct_matrix_shape(&w, s.kind, ROWS, COLS)) return false;
    const size_t size = size_t(w.blocks) * w.block_bytes;
    w.data = static_cast<uint8_t*>(aligned_alloc(64, (size + 63) / 64 * 64));
    memset(w.data, 0, size);
    std::vector<int32_t> order(ROWS);
    for (int i = 0; i < ROWS; i++) order[size_t(i)] = i;
    if (oct_matrix_fill(&w, s.source, rows_of(s).data(), ROWS, order.data(), order.data())) return false;
    std::vector<float> x(size_t(TOKENS) * COLS);
    for (float& one : x) one = float(rand() % 2001 - 1000) / 700;
    const size_t wide = size_t(w.blocks) * 16;
    for (int exact : {0, 1}) {
        std::vector<float> plain(TOKENS * wide), neon(TOKENS * wide);
        oct_linear(0, &w, x.data(), TOKENS, exact, plain.data());
        oct_linear(NEON, &w, x.data(), TOKENS, exact, neon.data());
        const float error = apart(plain, neon);
        printf("%s%s: %.1e\\n", s.name, exact ? ", exact" : "", double(error));
        if (!(error < 1e-5f)) return false;
        for (int n : {1, 2, 3, 5, 16})
            for (int from = 0; from + n <= TOKENS; from += n) {
                std::vector<float> some(n * wide);
                oct_linear(NEON, &w, x.data() + size_t(from) * COLS, n, exact, some.data());
                // A row's bits are its own.
                if (memcmp(some.data(), neon.data() + from * wide, some.size() * 4)) return false;
            }
    }
    free(w.data);
    return true;
}

// 90 tokens of a sequence, then one more, over a window.
std::vector<float> attention(int level, int kv_kind, int threads) {
    const int heads = 6, kv = 2, dim = 40, context = 512, width = (heads + 2 * kv) * dim;
    std::vector<float> angles(size_t(context) * dim), mixed;
    for (size_t i = 0; i < angles.size(); i++) angles[i] = float(i % 89) / 89;
    OctAngles table{dim / 2, angles.data()};
    OctOp op{};
    op.kind = OCT_ATTEND, op.out = 1, op.heads = heads, op.scale = 0.2f, op.window = 70, op.cap = 9;
    const int32_t widths[] = {width, heads * dim};
    OctShape shape{1, kv, dim, 32, 16, kv_kind, context, 0, threads, level};
    OctModel* model = oct_model_new(&shape, &op, 1, widths, 2, &table, 1);
    for (int start : {0, 90}) {
        const int n = start ? 1 : 90;
        std::vector<int32_t> ids(n), positions(n), owners(n), tables(32), starts{0, 32};
        for (int i = 0; i < n; i++) positions[size_t(i)] = start + i;
        for (int b = 0; b < 32; b++) tables[size_t(b)] = 31 - b;
        float* in = oct_buffer(model, 0, n);
        for (int i = 0; i < n * width; i++) in[i] = float((i * 37 + start) % 101) / 50.f - 1.f;
        std::vector<uint8_t> finite(n);
        OctStep step{};
        step.tokens = n, step.tables_count = 1, step.ids = ids.data(), step.positions = positions.data();
        step.sequences = owners.data(), step.tables = tables.data(), step.table_start = starts.data();
        step.finite = finite.data();
        if (oct_step(model, &step)) exit(2);
        const float* out = oct_buffer(model, 1, n);
        mixed.insert(mixed.end(), out, out + n * heads * dim);
    }
    oct_model_free(model);
    return mixed;
}

int main() {
    if (oct_isa_best() != NEON) return 4;
    for (const Source& source : SOURCES)
        if (!products(source)) return printf("%s is wrong\\n", source.name), 5;
    for (int kind : {OCT_F32, OCT_BF16, OCT_I8}) {
        const std::vector<float> neon = attention(NEON, kind, 1);
        const float error = apart(attention(0, kind, 1), neon);
        printf("attention, KV %d: %.1e\\n", kind, double(error));
        if (!(error < 1e-4f)) return 6;
        if (memcmp(attention(NEON, kind, 3).data(), neon.data(), neon.size() * 4)) return 7;
    }
}
"""


@pytest.fixture(autouse=True)
def _asked_for(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--neon"):
        pytest.skip("needs --neon")
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")


def test_what_neon_computes_is_what_plain_c_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of every format, attention over every KV: near, since sums are fused; and a row's bits are its own."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    (tmp_path / "probe.cpp").write_text(PROBE)

    def compiled(name: str, flags: tuple[str, ...], source: Path) -> str:
        target = str(tmp_path / f"{name}.o")
        command = [COMPILER, *flags, "-O2", "-I", str(build.SOURCES), "-c", str(source), "-o", target]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        return target

    units = {name: (flags, build.SOURCES / f"{name}.cpp") for name, flags in build.flags().items()}
    units["probe"] = (("-std=c++17", "-pthread"), tmp_path / "probe.cpp")
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda name: compiled(name, *units[name]), units))
    program = str(tmp_path / "probe")
    done = subprocess.run(
        [COMPILER, "-static", "-pthread", *objects, "-o", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    done = subprocess.run([EMULATOR, program], capture_output=True, text=True, timeout=600, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
