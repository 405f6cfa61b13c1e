// Products of quantised weights with many rows on tile registers: a group of a block by a panel in one instruction.
//
// A slice of a block is unpacked once to plain bytes, with its scales as floats, and all rows pass by, a panel at a time:
//
//     for 18 groups of 32 columns:    unpacked [group] 512 bytes, as B of a product
//       for a panel of rows:          sums y [16 rows], 16 registers
//         for each group:             y += (factor · scale) · integers; y += second · scaled sum
//                                     weights that are unpacked next are asked for, by the first panel
//                                     integers [16 rows][16] of a group to come, into a ring in the first-level cache
//
// The integers of a group take a processor 16 cycles and their way to the cache 16 more, beside 48 to 80 instructions on
// vectors that make them part of sums. Of those it does two a cycle, but one where tile instructions are under way, as
// measured, be it a `tilezero` in 64: so the scales of each group bound the rate, W4's at 64 cycles.
//
// Numbers of W8 and K6 lose here what their bytes are stored with too much; the integers are the same, the order of each
// output's sum is that of product.h, and so are its bits.
#pragma once
#include <type_traits>

#include "product.h"

namespace {

constexpr int TILED_SLICE = 18;  // groups: all of a row of 576
constexpr int RING = 4;          // groups of integers between those two who make and take them
constexpr int TILED_FROM = 10;   // rows from which this is the faster way
constexpr int TILED_ROWS = 128;  // that pass by at most, panels of the second-level cache; more go in equal parts

struct TiledSlice {
    alignas(64) uint8_t q[TILED_SLICE][8][64];
    alignas(64) float factor[TILED_SLICE][LANES], second[TILED_SLICE][LANES];
};

constexpr int stored_with(int kind) { return kind == OCT_W8 ? 128 : kind == OCT_K6 ? 32 : 0; }

template <int KIND>
__attribute__((noinline)) void unpack_tiles(const uint8_t* data, int groups, int from, int count, TiledSlice& to) {
    const __m512i too_much = _mm512_set1_epi8(char(stored_with(KIND)));
    for (int g = 0; g < count; g++) {
        const Place at = place_of<KIND>(data, groups, from + g);
        prefetch(at.q + AHEAD, group_bytes(KIND));
        Bytes bytes;
        load_numbers<KIND>(at, bytes);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            _mm512_store_si512(to.q[g][j], stored_with(KIND) ? _mm512_sub_epi8(bytes.part[j], too_much) : bytes.part[j]);
        F factor, second = zero();
        load_scales<KIND>(at, factor, second);
        store(to.factor[g], factor);
        store(to.second[g], second);
    }
}

typedef int32_t Integers[LANES][LANES];

inline F from_integers(const int32_t* p) { return _mm512_cvtepi32_ps(_mm512_load_si512(p)); }

// A group's part of the sums of MT rows.
template <int KIND, int MT>
inline void add_group(const Integers* dots, const float* factors, const float* seconds, const float* scale,
                      const float* scaled_sum, F* y) {
    const F factor = load(factors), second = load(seconds);
#pragma GCC unroll 16
    for (int m = 0; m < MT; m++) {
        const F dot = from_integers(dots[0][m]);
        if (KIND == OCT_K6)
            y[m] = fma(set(scale[m]), fma(factor, dot, mul(second, from_integers(dots[1][m]))), y[m]);
        else
            y[m] = fma(mul(factor, set(scale[m])), dot, y[m]);
        if (KIND != OCT_K6 && KIND != OCT_W8) y[m] = fma(second, set(scaled_sum[m]), y[m]);
    }
}

// The integers of a group by a panel, in registers of their own for every other one: 0 or 1, of K6 0, 1 or 6, 7.
template <int KIND, int TURN>
inline void multiply(const int8_t* x, const uint8_t (*q)[64]) {
    if (KIND == OCT_K6) {
        constexpr int C = 6 * TURN;
        tile_load<2>(x, GROUP), tile_load<3>(x + GROUP / 2, GROUP);
        tile_load<4>(q, 64), tile_load<5>(q + 4, 64);
        tile_zero<C>(), tile_zero<C + 1>();
        tile_dot_ss<C, 2, 4>(), tile_dot_ss<C + 1, 3, 5>();
    } else {
        constexpr int A = 2 + TURN, B = 4 + TURN;
        tile_load<A>(x, GROUP);
        tile_load<B>(q, 64);
        tile_zero<TURN>();
        if (KIND == OCT_W8) tile_dot_ss<TURN, A, B>();
        else tile_dot_su<TURN, A, B>();
    }
}

template <int KIND, int TURN>
inline void keep(Integers* dots) {
    tile_store<KIND == OCT_K6 ? 6 * TURN : TURN>(dots[0], 64);
    if (KIND == OCT_K6) tile_store<6 * TURN + 1>(dots[1], 64);
}

// Makes the integers of one group after another, panel after panel; a product is stored while the next one is computed.
template <int KIND>
class Maker {
public:
    static constexpr int PARTS = KIND == OCT_K6 ? 2 : 1;

    Maker(const TiledSlice& w, int count, const int8_t* x, size_t panel_bytes, int panels)
        : w_(w), count_(count), all_(panels * count), x_(x), panel_bytes_(panel_bytes) {
        for (int i = 0; i < RING; i++) make();
    }
    void make() {
        if (made_ % 2) step<1>();
        else step<0>();
    }
    // Those of group `number`, counted over all panels; they are there until RING - 1 more are made.
    const Integers* of(int number) const { return ring_ + number % RING * PARTS; }

private:
    template <int TURN>
    void step() {
        if (made_ > all_) return;
        if (made_ < all_) multiply<KIND, TURN>(x_ + group_ * LANES * GROUP, w_.q[group_]);
        if (made_) keep<KIND, 1 - TURN>(ring_ + (made_ - 1) % RING * PARTS);
        made_++;
        if (++group_ == count_) group_ = 0, x_ += panel_bytes_;
    }
    const TiledSlice& w_;
    const int count_, all_;
    const int8_t* x_;
    const size_t panel_bytes_;
    int made_ = 0, group_ = 0;
    alignas(64) Integers ring_[RING * PARTS];
};

// The sums of a panel's first MT rows, which begin where `group` is 0. Meanwhile memory is asked for `share` bytes from
// `next` on with each group: weights that are unpacked next.
template <int KIND, int MT>
inline void sum_panel(Maker<KIND>& maker, int number, const TiledSlice& w, int count, const float* scale,
                      const float* scaled_sum, bool begin, const uint8_t* next, int share, F* y) {
    F sum[MT];
#pragma GCC unroll 16
    for (int m = 0; m < MT; m++) sum[m] = begin ? zero() : y[m];
    for (int g = 0; g < count; g++, scale += LANES, scaled_sum += LANES) {
        for (int i = 0; i < share; i += 64) __builtin_prefetch(next + g * share + i, 0, 2);
        add_group<KIND, MT>(maker.of(number + g), w.factor[g], w.second[g], scale, scaled_sum, sum);
        maker.make();
    }
#pragma GCC unroll 16
    for (int m = 0; m < MT; m++) y[m] = sum[m];
}

// Rows [from, end) by a slice; of a panel that is not full, no more fours of rows than it has.
template <int KIND>
__attribute__((noinline)) void sum_rows(const TiledSlice& w, int count, const Activations& a, int cols, int group, int from,
                                        int end, const uint8_t* next, F* y) {
    const int groups = cols / GROUP, panels = (end - from + LANES - 1) / LANES;
    const size_t first = size_t(from) * size_t(cols) + size_t(group) * LANES * GROUP;
    Maker<KIND> maker(w, count, a.q + first, size_t(LANES) * size_t(cols), panels);
    for (int p = 0; p < panels; p++, y += LANES) {
        const size_t at = size_t(from + p * LANES) * size_t(groups) + size_t(group) * LANES;
        const auto sum = [&](auto rows) {
            sum_panel<KIND, decltype(rows)::value>(maker, p * count, w, count, a.scale + at, a.scaled_sum + at, !group, next,
                                                   p ? 0 : group_bytes(KIND), y);
        };
        const int left = end - from - p * LANES;
        if (left > 12) sum(std::integral_constant<int, 16>());
        else if (left > 8) sum(std::integral_constant<int, 12>());
        else if (left > 4) sum(std::integral_constant<int, 8>());
        else sum(std::integral_constant<int, 4>());
    }
}

// A tile may compute rows of its panel beyond the last.
template <int KIND>
void tiled_kind(const OctMatrix& w, int from, int to, const Activations& a, int rows, Sink& sink) {
    const int most = least(rows, LANES), columns = KIND == OCT_K6 ? GROUP / 2 : GROUP, groups = w.cols / GROUP;
    const TileShape sums = {most, 64}, x = {most, columns}, q = {columns / 4, 64};
    const Tiles tiles({sums, sums, x, x, q, q, sums, sums});
    const bool gated = sink.mode == Sink::GATED;
    TiledSlice slice;
    const int parts = (rows + TILED_ROWS - 1) / TILED_ROWS, each = ((rows + parts - 1) / parts + LANES - 1) / LANES * LANES;
    F y[2][TILED_ROWS];  // of a gate, and of what it gates
    for (int m = 0; m < rows; m += each) {
        const int end = least(rows, m + each);
        for (int block = from; block < to; block++) {
            F* sum = y[gated && block % 2];
            for (int g = 0; g < groups; g += TILED_SLICE) {
                const int count = least(TILED_SLICE, groups - g);
                const uint8_t* data = w.data + size_t(block) * w.block_bytes;
                unpack_tiles<KIND>(data, groups, g, count, slice);
                const uint8_t* next = data + w.block_bytes * size_t(g + count) / size_t(groups);
                sum_rows<KIND>(slice, count, a, w.cols, g, m, end, next, sum);
            }
            if (!gated) emit(sink, m, end - m, block, sum);
            else if (block % 2) emit_gated(sink, m, end - m, block - 1, y[0], y[1]);
        }
    }
}

void tiled_product(const OctMatrix& w, int from, int to, const Activations& a, int rows, bool exact, Sink& sink) {
    if (rows < TILED_FROM || exact || is_float(w.kind)) return isa_avx512.product(w, from, to, a, rows, exact, sink);
    switch (w.kind) {
        case OCT_W4: return tiled_kind<OCT_W4>(w, from, to, a, rows, sink);
        case OCT_W5: return tiled_kind<OCT_W5>(w, from, to, a, rows, sink);
        case OCT_W8: return tiled_kind<OCT_W8>(w, from, to, a, rows, sink);
        case OCT_K4: return tiled_kind<OCT_K4>(w, from, to, a, rows, sink);
        case OCT_K5: return tiled_kind<OCT_K5>(w, from, to, a, rows, sink);
        default: return tiled_kind<OCT_K6>(w, from, to, a, rows, sink);
    }
}

// Two tiles by two, of full width.
int64_t tiled_byte_products(int rounds) {
    alignas(64) uint8_t numbers[16 * 64] = {};
    const TileShape whole = {16, 64};
    const Tiles tiles({whole, whole, whole, whole, whole, whole, whole, whole});
    tile_load<4>(numbers, 64), tile_load<5>(numbers, 64), tile_load<6>(numbers, 64), tile_load<7>(numbers, 64);
    for (int i = 0; i < rounds; i++) {
        tile_dot_su<0, 4, 6>(), tile_dot_su<1, 4, 7>();
        tile_dot_su<2, 5, 6>(), tile_dot_su<3, 5, 7>();
    }
    return int64_t(rounds) * 4 * LANES * LANES * 64 * 2;
}

}  // namespace
