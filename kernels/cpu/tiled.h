// Products of quantised weights with many rows on tile registers.
#pragma once
#include "wide.h"

namespace {

void tiled_product(const OctMatrix& w, int from, int to, const Activations& a, int rows, bool exact, Sink& sink) {
    isa_avx512.product(w, from, to, a, rows, exact, sink);
}

// Two tiles by two, of full width.
int64_t tiled_byte_products(int rounds) {
    alignas(64) uint8_t numbers[16 * 64] = {};
    const TileShape whole = {16, 64};
    Tiles tiles({whole, whole, whole, whole, whole, whole, whole, whole});
    tile_load<4>(numbers, 64), tile_load<5>(numbers, 64), tile_load<6>(numbers, 64), tile_load<7>(numbers, 64);
    for (int i = 0; i < rounds; i++) {
        tile_dot_su<0, 4, 6>(), tile_dot_su<1, 4, 7>();
        tile_dot_su<2, 5, 6>(), tile_dot_su<3, 5, 7>();
    }
    return int64_t(rounds) * 4 * LANES * LANES * 64 * 2;
}

}  // namespace
