// Products of quantised weights with many rows, where a register holds a vector: tiles of two blocks by eight rows.
//
// A slice of two blocks is unpacked once to plain bytes, 16 rows x 4 columns a register, with its scales as floats, and
// stays in the first-level cache while all rows pass by, eight at a time:
//
//     for 8 groups of 32 columns:          unpacked [group][piece][block] 64 bytes, 8 KB
//       for 8 rows:                        sums y [2 blocks][8 rows], 16 registers
//         for each group, 4 rows:          integers [2][4], 8 registers
//           for each piece of 4 columns:   2 loads of weights, 4 broadcasts of activations, 8 products
//           y += (factor · scale) · integers; y += second · scaled sum
//
// Against tiles of one block by 16 rows, a broadcast serves two products and not one, and unpacking costs nothing. The
// order of each output's sum is that of product.h, and so are its bits.
#pragma once
#include "product.h"

namespace {

constexpr int SLICE = 8;         // groups
constexpr int WIDE_ROWS = 8;     // in a tile
constexpr int WIDE_FROM = 16;    // rows from which this is the faster way

struct Slice {
    alignas(64) uint8_t q[SLICE][8][2][64];
    alignas(64) float factor[SLICE][2][LANES], second[SLICE][2][LANES];
};

template <int KIND>
__attribute__((noinline)) void unpack_slice(const uint8_t* const* data, int blocks, int groups, int from, int count, Slice& to) {
    for (int b = 0; b < blocks; b++)
        for (int g = 0; g < count; g++) {
            const Place at = place_of<KIND>(data[b], groups, from + g);
            prefetch(at.q + AHEAD, group_bytes(KIND));
            Bytes bytes;
            load_numbers<KIND>(at, bytes);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) _mm512_store_si512(to.q[g][j][b], bytes.part[j]);
            F factor, second = zero();
            load_scales<KIND>(at, factor, second);
            store(to.factor[g][b], factor);
            store(to.second[g][b], second);
        }
}

inline __m512i each(const int32_t* x) { return _mm512_set1_epi32(*x); }

// Integers of NB blocks by 4 rows over pieces FROM .. TO - 1, added to what is in `a`.
template <int NB, int FROM, int TO>
inline void wide_dots(const uint8_t (*q)[2][64], const int8_t* x, __m512i (*a)[4]) {
#pragma GCC unroll 8
    for (int j = FROM; j < TO; j++) {
        __m512i weight[NB];
#pragma GCC unroll 2
        for (int b = 0; b < NB; b++) weight[b] = _mm512_load_si512(q[j][b]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m512i value = four(x + 32 * i + 4 * j);
#pragma GCC unroll 2
            for (int b = 0; b < NB; b++) a[b][i] = _mm512_dpbusd_epi32(a[b][i], weight[b], value);
        }
    }
}

// `y` [2][ROWS_AT_ONCE] vectors, of which this tile has rows [m, m + MT).
template <int KIND, int NB, int MT>
void wide_tile(const Slice& w, int count, const Activations& a, int cols, int group, int row, F* y) {
    const int groups = cols / GROUP;
    const size_t panel = size_t(row / LANES) * LANES, slot = size_t(row % LANES);
    size_t at = panel * size_t(groups) + size_t(group) * LANES + slot;
    const int8_t* x = a.q + panel * size_t(cols) + size_t(group) * LANES * GROUP + slot * GROUP;
    F sum[NB][MT];
#pragma GCC unroll 2
    for (int b = 0; b < NB; b++)
#pragma GCC unroll 8
        for (int m = 0; m < MT; m++) sum[b][m] = group ? y[b * ROWS_AT_ONCE + m] : zero();
    for (int g = 0; g < count; g++, at += LANES, x += LANES * GROUP) {
        F factor[NB], second[NB];
#pragma GCC unroll 2
        for (int b = 0; b < NB; b++) factor[b] = load(w.factor[g][b]), second[b] = load(w.second[g][b]);
#pragma GCC unroll 2
        for (int m = 0; m < MT; m += 4) {
            __m512i first[NB][4], last[NB][4];
#pragma GCC unroll 2
            for (int b = 0; b < NB; b++)
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const size_t one = at + size_t(m + i);
                    first[b][i] = KIND == OCT_W8 ? each(a.excess + one) : KIND == OCT_K6 ? each(a.low + one) : _mm512_setzero_si512();
                    if (KIND == OCT_K6) last[b][i] = _mm512_sub_epi32(_mm512_srai_epi32(each(a.excess + one), 2), first[b][i]);
                }
            wide_dots<NB, 0, KIND == OCT_K6 ? 4 : 8>(w.q[g], x + m * GROUP, first);
            if (KIND == OCT_K6) wide_dots<NB, 4, 8>(w.q[g], x + m * GROUP, last);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const F scale = set(a.scale[at + size_t(m + i)]);
#pragma GCC unroll 2
                for (int b = 0; b < NB; b++) {
                    F& s = sum[b][m + i];
                    const F dot = _mm512_cvtepi32_ps(first[b][i]);
                    if (KIND == OCT_K6)
                        s = fma(scale, fma(factor[b], dot, mul(second[b], _mm512_cvtepi32_ps(last[b][i]))), s);
                    else
                        s = fma(mul(factor[b], scale), dot, s);
                    if (KIND != OCT_K6 && KIND != OCT_W8) s = fma(second[b], set(a.scaled_sum[at + size_t(m + i)]), s);
                }
            }
        }
    }
#pragma GCC unroll 2
    for (int b = 0; b < NB; b++)
#pragma GCC unroll 8
        for (int m = 0; m < MT; m++) y[b * ROWS_AT_ONCE + m] = sum[b][m];
}

// Blocks [block, block + NB) over rows [from, end); a tile may compute rows of its panel beyond the end.
template <int KIND, int NB>
void wide_blocks(const OctMatrix& w, int block, const Activations& a, int from, int end, Sink& sink) {
    const int groups = w.cols / GROUP;
    const uint8_t* data[2] = {w.data + size_t(block) * w.block_bytes, w.data + size_t(block + NB - 1) * w.block_bytes};
    Slice slice;
    F y[2 * ROWS_AT_ONCE];
    for (int g = 0; g < groups; g += SLICE) {
        const int count = least(SLICE, groups - g);
        unpack_slice<KIND>(data, NB, groups, g, count, slice);
        int m = from;
        for (; m + 4 < end; m += WIDE_ROWS) wide_tile<KIND, NB, WIDE_ROWS>(slice, count, a, w.cols, g, m, y + m - from);
        if (m < end) wide_tile<KIND, NB, 4>(slice, count, a, w.cols, g, m, y + m - from);
    }
    for (int b = 0; b < NB; b++) emit(sink, from, end - from, block + b, y + b * ROWS_AT_ONCE);
}

template <int KIND>
void wide_product(const OctMatrix& w, int from, int to, const Activations& a, int rows, Sink& sink) {
    for (int m = 0; m < rows; m += ROWS_AT_ONCE) {
        const int end = least(rows, m + ROWS_AT_ONCE);
        int block = from;
        for (; block + 2 <= to; block += 2) wide_blocks<KIND, 2>(w, block, a, m, end, sink);
        if (block < to) wide_blocks<KIND, 1>(w, block, a, m, end, sink);
    }
}

void product_of_any(const OctMatrix& w, int from, int to, const Activations& a, int rows, bool exact, Sink& sink) {
    if (rows < WIDE_FROM || exact || is_float(w.kind)) return product(w, from, to, a, rows, exact, sink);
    switch (w.kind) {
        case OCT_W4: return wide_product<OCT_W4>(w, from, to, a, rows, sink);
        case OCT_W5: return wide_product<OCT_W5>(w, from, to, a, rows, sink);
        case OCT_W8: return wide_product<OCT_W8>(w, from, to, a, rows, sink);
        case OCT_K4: return wide_product<OCT_K4>(w, from, to, a, rows, sink);
        case OCT_K5: return wide_product<OCT_K5>(w, from, to, a, rows, sink);
        default: return wide_product<OCT_K6>(w, from, to, a, rows, sink);
    }
}

// Four blocks by six rows, 128 columns.
int64_t wide_byte_products(int rounds) {
    constexpr int PIECES = 32, NB = 4, MT = 6;
    alignas(64) uint8_t weights[PIECES][NB][64] = {};
    alignas(64) int8_t x[MT][4 * PIECES] = {};
    asm volatile("" ::"r"(weights), "r"(x) : "memory");
    __m512i a[NB][MT];  // in registers, as every index is known when this is compiled
#pragma GCC unroll 4
    for (int b = 0; b < NB; b++)
#pragma GCC unroll 6
        for (int m = 0; m < MT; m++) a[b][m] = _mm512_setzero_si512();
    for (int round = 0; round < rounds; round++)
        for (int j = 0; j < PIECES; j++) {
            __m512i weight[NB];
#pragma GCC unroll 4
            for (int b = 0; b < NB; b++) weight[b] = _mm512_load_si512(weights[j][b]);
#pragma GCC unroll 6
            for (int m = 0; m < MT; m++) {
                const __m512i value = four(x[m] + 4 * j);
#pragma GCC unroll 4
                for (int b = 0; b < NB; b++) a[b][m] = _mm512_dpbusd_epi32(a[b][m], weight[b], value);
            }
            asm volatile("" ::: "memory");
        }
    __m512i all = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int b = 0; b < NB; b++)
#pragma GCC unroll 6
        for (int m = 0; m < MT; m++) all = _mm512_or_si512(all, a[b][m]);
    return _mm512_test_epi32_mask(all, all) ? 0 : int64_t(rounds) * PIECES * NB * MT * LANES * 4 * 2;
}

}  // namespace
