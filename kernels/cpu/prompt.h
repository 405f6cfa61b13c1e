// Products of a prompt's rows on tile registers: activations and weights as bf16, sums in fp32.
//
// Tokens that are read, not written, come in great numbers, and are computed in another way than those that are generated:
// with all of a weight folded into a bf16 there are no scales beside the tiles, which bound tiled.h. A pair of blocks is
// unpacked once, and all rows pass by, 32 at a time:
//
//     for 48 groups of 32 columns:     weights [group][block] 1 KB, each as B of a product, at most 96 KB
//       for 32 rows:                   sums [2 panels][2 blocks], four tile registers
//         for each group:              2 tiles of rows, 2 of weights, 4 products
//
// A row's numbers depend on that row alone and on nothing but columns in order: they are the same in every chunk and
// company. They are not those of product.h, which has int8 activations, or fp32 ones beside bf16 weights: whoever lets a
// token be computed here lets it be so wherever it is computed.
#pragma once
#include "attention_tiles.h"
#include "product.h"

namespace {

constexpr int PROMPT_SLICE = 48;                // groups
constexpr int PROMPT_CACHED = 512 << 10;        // numbers of activations that stay in the second-level cache
constexpr int PROMPT_STEP = 2 * LANES;          // rows
constexpr int PROMPT_LEAST = 96;                // rows that pass by at least, however wide they are
constexpr int PROMPT_HELD = PROMPT_CACHED / (PROMPT_SLICE * GROUP);  // rows of several slices

typedef uint16_t HalfTile[LANES][GROUP];  // of rows: [row][column]; of weights: [column / 2][row of a block][column % 2]

// Panels of bf16: [group][row][column of the group], zeros beyond column `to`; rows beyond `n` are left as they are.
void halve(const float* const* rows, int n, int from, int to, const Activations& panel) {
    for (int k = from; k < (to + GROUP - 1) / GROUP * GROUP; k += LANES) {
        const __mmask16 there = __mmask16(to - k >= LANES ? 0xffff : to > k ? (1u << (to - k)) - 1 : 0);
        for (int r = 0; r < n; r++)
            store_upper(panel.half + (k / GROUP * LANES + r) * GROUP + k % GROUP,
                        rounded(_mm512_maskz_loadu_ps(there, rows[r] + k)));
    }
}

// Two columns as pairs of bf16, rounded to nearest, ties away from zero.
inline __m512i paired(F first, F second) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(first), half), 16);
    const __m512i high = _mm512_add_epi32(_mm512_castps_si512(second), half);
    return _mm512_mask_blend_epi16(0xaaaaaaaau, low, high);
}

template <int KIND>
inline void unpack_half(const uint8_t* data, int groups, int g, HalfTile& to) {
    const Place at = place_of<KIND>(data, groups, g);
    prefetch(at.q + AHEAD, group_bytes(KIND));
    Bytes bytes;
    load_numbers<KIND>(at, bytes);
    F factor, second = zero();
    load_scales<KIND>(at, factor, second);
    const __m512i byte = _mm512_set1_epi32(255);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        F weight[4];
        const F by = KIND == OCT_K6 && j >= 4 ? second : factor;
        const F plus = KIND == OCT_W8 ? mul(factor, set(-128.f)) : KIND == OCT_K6 ? mul(by, set(-32.f)) : second;
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++)
            weight[c] = fma(_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(bytes.part[j], 8 * c), byte)), by, plus);
        _mm512_store_si512(to[2 * j], paired(weight[0], weight[1]));
        _mm512_store_si512(to[2 * j + 1], paired(weight[2], weight[3]));
    }
}

// Floats lie column after column; columns from `cols` on are zeros.
template <int KIND>
inline void unpack_float(const uint8_t* data, int cols, int g, HalfTile& to) {
    const uint16_t* w = (const uint16_t*)data + size_t(g) * GROUP * LANES;
    const auto column = [&](int k) {
        if (g * GROUP + k >= cols) return zero();
        return KIND == OCT_BF16 ? load_bf16(w + k * LANES) : load_f16(w + k * LANES);
    };
    for (int k = 0; k < GROUP; k += 2) _mm512_store_si512(to[k / 2], paired(column(k), column(k + 1)));
}

// Sums of up to 32 rows by two blocks over `count` groups, to `y` [block][32 rows]; they begin at what is there where
// `begin` is not set.
inline void sum_prompt(const HalfTile* weights, int count, const uint16_t* x, size_t panel, int rows, bool begin, F* y) {
    const auto at = [&](int block, int row) { return (float*)(y + block * PROMPT_STEP + row); };
    const uint16_t* other = rows > LANES ? x + panel : x;
    if (begin) tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    else tile_load<0>(at(0, 0), 64), tile_load<1>(at(1, 0), 64), tile_load<2>(at(0, LANES), 64), tile_load<3>(at(1, LANES), 64);
    for (int g = 0; g < count; g++) {
        tile_load<4>(x + g * LANES * GROUP, 64), tile_load<6>(weights[2 * g], 64), tile_load<7>(weights[2 * g + 1], 64);
        tile_dot_bf16<0, 4, 6>(), tile_dot_bf16<1, 4, 7>();
        if (rows <= LANES) continue;
        tile_load<5>(other + g * LANES * GROUP, 64);
        tile_dot_bf16<2, 5, 6>(), tile_dot_bf16<3, 5, 7>();
    }
    tile_store<0>(at(0, 0), 64), tile_store<1>(at(1, 0), 64);
    if (rows > LANES) tile_store<2>(at(0, LANES), 64), tile_store<3>(at(1, LANES), 64);
}

// Lines that a step's results go to: they are asked for before its products are computed, and there when these are.
inline void expect(const Sink& sink, int first, int count, int block) {
    const size_t column = size_t(sink.mode == Sink::GATED ? block / 2 : block) * LANES;
    for (int m = first; m < first + count; m++) {
        const float* line = sink.out + sink.row(m) * sink.stride + column;
        __builtin_prefetch(line, 1);
        if (sink.mode != Sink::GATED) __builtin_prefetch(line + LANES, 1);
    }
}

template <int KIND>
void prompt_kind(const OctMatrix& w, int from, int to, const Activations& a, int rows, Sink& sink) {
    const int groups = (w.cols + GROUP - 1) / GROUP, slices = (groups + PROMPT_SLICE - 1) / PROMPT_SLICE;
    const int cached = PROMPT_CACHED / (groups * GROUP) / PROMPT_STEP * PROMPT_STEP;
    const int most = cached > PROMPT_LEAST ? cached : PROMPT_LEAST;
    const size_t panel = size_t(groups) * LANES * GROUP;
    const TileShape whole = {LANES, 64};
    const Tiles tiles({whole, whole, whole, whole, whole, whole, whole, whole});
    alignas(64) HalfTile weights[2 * PROMPT_SLICE];
    F sums[2 * PROMPT_HELD];  // of one slice the first rows are enough
    for (int m0 = 0; m0 < rows; m0 += most)
        for (int block = from; block < to; block += 2) {
            const int end = least(rows, m0 + most), second = least(block + 1, to - 1);
            const uint8_t* data[2] = {w.data + size_t(block) * w.block_bytes, w.data + size_t(second) * w.block_bytes};
            for (int s = 0; s < slices; s++) {
                const int first = s * PROMPT_SLICE, count = least(PROMPT_SLICE, groups - first);
                for (int g = 0; g < count; g++)
                    for (int b = 0; b < 2; b++) {
                        if constexpr (is_float(KIND)) unpack_float<KIND>(data[b], w.cols, first + g, weights[2 * g + b]);
                        else unpack_half<KIND>(data[b], groups, first + g, weights[2 * g + b]);
                    }
                for (int m = m0; m < end; m += PROMPT_STEP) {
                    const int n = least(PROMPT_STEP, end - m);
                    const uint16_t* x = a.half + size_t(m / LANES) * panel + size_t(first) * LANES * GROUP;
                    F* y = sums + (slices > 1 ? 2 * (m - m0) : 0);
                    const bool last = s == slices - 1;
                    if (last) expect(sink, m, n, block);
                    sum_prompt(weights, count, x, panel, n, s == 0, y);
                    if (!last) continue;
                    if (sink.mode == Sink::GATED) {
                        emit_gated(sink, m, n, block, y, y + PROMPT_STEP);
                        continue;
                    }
                    emit(sink, m, n, block, y);
                    if (second > block) emit(sink, m, n, second, y + PROMPT_STEP);
                }
            }
        }
}

void prompt_product(const OctMatrix& w, int from, int to, const Activations& a, int rows, Sink& sink) {
    switch (w.kind) {
        case OCT_F16: return prompt_kind<OCT_F16>(w, from, to, a, rows, sink);
        case OCT_BF16: return prompt_kind<OCT_BF16>(w, from, to, a, rows, sink);
        case OCT_W4: return prompt_kind<OCT_W4>(w, from, to, a, rows, sink);
        case OCT_W5: return prompt_kind<OCT_W5>(w, from, to, a, rows, sink);
        case OCT_W8: return prompt_kind<OCT_W8>(w, from, to, a, rows, sink);
        case OCT_K4: return prompt_kind<OCT_K4>(w, from, to, a, rows, sink);
        case OCT_K5: return prompt_kind<OCT_K5>(w, from, to, a, rows, sink);
        default: return prompt_kind<OCT_K6>(w, from, to, a, rows, sink);
    }
}

}  // namespace
