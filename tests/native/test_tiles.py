"""Tile registers: products on them have the bits of products without, and their plain C++ has the bits of AMX.

The processor's own level is tested where it has one. The sum that AMX gave is kept here, so plain operations are held
to it on any machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from octavo.executors.native.library import Floats, Isa
from octavo.kernels.cpu import build
from tests.native.net import levels, library
from tests.native.test_kernels import FLOATS, STORED, SUPER, packed, product, stored

OPERATIONS = """
#include "vec_amx.h"
#include <stdio.h>
#if !defined(OCTAVO_PLAIN_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif
uint64_t seed = 7, hash = 1469598103934665603u;
uint32_t draw() { return uint32_t((seed = seed * 6364136223846793005u + 1442695040888963407u) >> 33); }
void mix(const void* p, int n) {
    for (int i = 0; i < n; i++) hash = (hash ^ ((const uint8_t*)p)[i]) * 1099511628211u;
}
template <class Dot>
void bytes(const uint8_t* a, const uint8_t* b, Dot dot) {
    int32_t c[256] = {};
    const Tiles tiles({{11, 64}, {11, 32}, {8, 64}});
    tile_load<1>(a, 32), tile_load<2>(b, 64), tile_zero<0>();
    dot(), dot();
    tile_store<0>(c, 64);
    mix(c, sizeof c);
}
int main() {
#if !defined(OCTAVO_PLAIN_TILES)
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return 1;
#endif
    uint8_t a[1024], b[1024];
    for (int round = 0; round < 300; round++) {
        for (int i = 0; i < 1024; i++) a[i] = uint8_t(draw()), b[i] = uint8_t(draw());
        bytes(a, b, tile_dot_ss<0, 1, 2>);
        bytes(a, b, tile_dot_su<0, 1, 2>);
        bytes(a, b, tile_dot_us<0, 1, 2>);
        // Of all sizes, tiny ones and those that overflow too; or near 1.
        uint16_t x[512], y[512];
        const uint32_t least = round % 3 ? 110 : 0, span = round % 3 ? 20 : 255;
        for (uint16_t* half : {x, y})
            for (int i = 0; i < 512; i++) half[i] = uint16_t((draw() & 0x807f) | (least + draw() % span) << 7);
        float c[256];
        for (float& number : c) number = float(int(draw() % 2000) - 1000) / 997.f;
        const Tiles tiles({{16, 64}, {16, 64}, {16, 64}});
        tile_load<0>(c, 64), tile_load<1>(x, 64), tile_load<2>(y, 64);
        tile_dot_bf16<0, 1, 2>();
        tile_store<0>(c, 64);
        for (float& number : c) number = number == number ? number : 1.f;
        mix(c, sizeof c);
    }
    printf("%016llx", (unsigned long long)hash);
}
"""
OF_AMX = "852530cc03735fb4"
TOO_SMALL = """
import ctypes, sys
class Stack(ctypes.Structure):
    _fields_ = (("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))
room = ctypes.create_string_buffer(2048)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, 2048)), None) == 0
print(ctypes.CDLL(sys.argv[1]).oct_isa_best())
"""
QUANTISED = [name for name in STORED if name not in FLOATS]


@pytest.fixture
def tiles() -> Isa:
    if Isa.AMX not in levels():
        pytest.skip("this processor has no AMX, or the system does not let this process use it")
    return Isa.AMX


def rows(count: int, cols: int) -> Floats:
    x = np.random.default_rng(count).normal(size=(count, cols)).astype(np.float32)
    x[::5] *= 1e4
    x[2::7] = 0
    return x


@pytest.mark.parametrize("name", QUANTISED)
def test_products_have_the_bits_of_products_without_tiles(tiles: Isa, name: str) -> None:
    widths = (256, 1280) if name in SUPER else (32, 96, 576, 800)
    for cols in widths:
        for outputs in (5, 16, 50, 83):
            matrix, _arena = packed(*stored(name, outputs, cols))
            for count in (1, 7, 8, 9, 12, 13, 16, 17, 28, 33, 96, 101, 203):
                x = rows(count, cols)
                assert np.array_equal(product(tiles, matrix, x, False), product(Isa.AVX512, matrix, x, False))


@pytest.mark.parametrize("name", QUANTISED)
def test_a_row_that_is_not_finite_stays_alone(tiles: Isa, name: str) -> None:
    cols = 512
    matrix, _arena = packed(*stored(name, 50, cols))
    x = rows(40, cols)
    sound = product(tiles, matrix, x, False)
    x[3, 17], x[21, 500], x[39, 0] = np.nan, np.inf, -np.inf
    y, bad = product(tiles, matrix, x, False), [3, 21, 39]
    assert np.isnan(y[bad]).all()
    assert np.array_equal(np.delete(y, bad, 0), np.delete(sound, bad, 0))


def sums(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """What the tile operations give, compiled with these flags."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("needs g++")
    (folder / "main.cpp").write_text(OPERATIONS)
    command = [compiler, "-std=c++17", "-O2", f"-I{build.SOURCES}", "-include", "initializer_list", *flags]
    subprocess.run([*command, str(folder / "main.cpp"), "-o", str(folder / "main")], check=True, timeout=60)
    return subprocess.run([folder / "main"], capture_output=True, text=True, timeout=60, check=True)


def test_plain_operations_have_the_bits_of_amx(tmp_path: Path) -> None:
    assert sums(tmp_path, "-DOCTAVO_PLAIN_TILES").stdout == OF_AMX


def test_amx_has_them(tiles: Isa, tmp_path: Path) -> None:
    assert sums(tmp_path, *build.AMX).stdout == OF_AMX


def test_a_process_that_may_not_use_tiles_goes_on_without(tiles: Isa) -> None:
    """A signal stack that has no room for a thread's tile registers is a reason for Linux to refuse them."""
    done = subprocess.run(
        [sys.executable, "-c", TOO_SMALL, library()._name], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"{Isa.AVX512.value}\n"
