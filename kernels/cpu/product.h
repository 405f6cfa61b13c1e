// Matrix products over packed blocks, tile by tile, and what is done with their results.
//
// A tile is NB blocks of 16 weight rows by MT rows of activations. Each output is one lane of one running sum over
// the columns in order, so tile shapes are free to be what is fastest.
#pragma once
#include "rows.h"

namespace {

template <int MT>
__attribute__((noinline)) void emit(Sink& sink, int first, int block, const F* v) {
    const size_t column = size_t(block) * LANES;
    const F bias = sink.bias ? load(sink.bias + column) : zero();
    if (sink.mode == Sink::HEAD) {
        const int real = sink.rows - int(column);
        for (int m = first; m < first + MT; m++) {
            F value = v[m - first];
            if (real < LANES) value = keep_first(value, real, zero());
            store(sink.check + m * LANES, fma(value, zero(), load(sink.check + m * LANES)));
            if (int row = sink.logit_rows[m]; row >= 0) {
                float* out = sink.out + size_t(row) * sink.stride + column;
                if (real >= LANES) {
                    store(out, value);
                } else {
                    float all[LANES];
                    store(all, value);
                    for (int i = 0; i < real; i++) out[i] = all[i];
                }
            }
            if (real < LANES) value = keep_first(value, real, set(-3.4e38f));
            if (any_above(value, set(sink.best[m]))) {
                float top = greatest(value);
                sink.best[m] = top;
                sink.best_id[m] = int32_t(column) + __builtin_ctz(lanes_equal(value, set(top)) | 1u << 16);
            }
        }
        return;
    }
    for (int m = 0; m < MT; m++) {
        float* row = sink.out + size_t(first + m) * sink.stride;
        F value = sink.bias ? add(v[m], bias) : v[m];
        if (sink.mode == Sink::STORE) {
            store(row + column, value);
        } else if (sink.mode == Sink::ADD) {
            store(row + column, add(load(row + column), value));
        } else {  // even blocks are gates, the odd one after each what it gates
            float* out = row + size_t(block / 2) * LANES;
            store(out, block % 2 ? mul(silu(load(out)), value) : value);
        }
    }
}

constexpr int AHEAD = 2048;  // bytes: far enough for memory, near enough to be in the block or the next

template <bool FOUR, int MT>
void int8_tile(const OctMatrix& w, int block, const Activations& a, int m0, Sink& sink) {
    const int groups = w.cols / GROUP;
    const uint8_t* q = w.data + size_t(block) * w.block_bytes;
    const uint16_t* d = (const uint16_t*)(q + (FOUR ? 256 : size_t(groups) * W8_GROUP));
    const size_t panel = size_t(m0 / LANES) * LANES, slot = m0 % LANES;
    const int8_t* x = a.q + panel * w.cols + slot * GROUP;
    const float* scale = a.scale + panel * groups + slot;
    const float* scaled_sum = a.scaled_sum + panel * groups + slot;
    const int32_t* total = a.sum + panel * groups + slot;
    F y[MT];
    for (int m = 0; m < MT; m++) y[m] = zero();
    for (int g = 0; g < groups; g++) {
        Bytes bytes;
        if (FOUR) {
            load_w4(q, bytes);
            if (MT <= 4) prefetch(q + AHEAD, W4_GROUP);
        } else {
            load_w8(q, bytes);
            if (MT <= 4) prefetch(q + AHEAD, W8_GROUP);
        }
        const F factor = load_f16(d), offset = FOUR ? load_f16(d + LANES) : zero();
#pragma GCC unroll 16
        for (int m = 0; m < MT; m++) {
            const int8_t* xs = x + m * GROUP;
            const F s = mul(factor, set(scale[m]));
            if (FOUR) {
                y[m] = fma(s, dot_w4(bytes, xs), y[m]);
                y[m] = fma(offset, set(scaled_sum[m]), y[m]);
            } else {
                y[m] = fma(s, dot_w8(bytes, xs, total[m]), y[m]);
            }
        }
        q += FOUR ? W4_GROUP : W8_GROUP;
        d += FOUR ? W4_GROUP / 2 : LANES;
        x += LANES * GROUP;
        scale += LANES;
        scaled_sum += LANES;
        total += LANES;
    }
    emit<MT>(sink, m0, block, y);
}

// The same weights against fp32 activations: each number is what the format says it is.
template <bool FOUR, int MT>
void exact_tile(const OctMatrix& w, int block, const Activations& a, int m0, Sink& sink) {
    const int groups = w.cols / GROUP;
    const uint8_t* q = w.data + size_t(block) * w.block_bytes;
    const uint16_t* d = (const uint16_t*)(q + (FOUR ? 256 : size_t(groups) * W8_GROUP));
    const float* x = a.x + size_t(m0 / LANES) * LANES * w.cols + m0 % LANES;
    F y[MT];
    for (int m = 0; m < MT; m++) y[m] = zero();
    for (int g = 0; g < groups; g++) {
        Bytes bytes;
        if (FOUR) load_w4(q, bytes);
        else load_w8(q, bytes);
        const F factor = load_f16(d), offset = FOUR ? load_f16(d + LANES) : zero();
#pragma GCC unroll 32
        for (int k = 0; k < GROUP; k++) {
            F weight = FOUR ? fma(factor, byte_of(bytes, k), offset) : mul(factor, sub(byte_of(bytes, k), set(128.f)));
#pragma GCC unroll 16
            for (int m = 0; m < MT; m++) y[m] = fma(weight, set(x[(g * GROUP + k) * LANES + m]), y[m]);
        }
        q += FOUR ? W4_GROUP : W8_GROUP;
        d += FOUR ? W4_GROUP / 2 : LANES;
    }
    emit<MT>(sink, m0, block, y);
}

template <int KIND>
inline F column(const uint8_t* block, int k) {
    if (KIND == OCT_F32) return load((const float*)block + k * LANES);
    const uint16_t* halves = (const uint16_t*)block + k * LANES;
    return KIND == OCT_F16 ? load_f16(halves) : load_bf16(halves);
}

template <int KIND, int NB, int MT>
void float_tile(const OctMatrix& w, int block, const Activations& a, int m0, Sink& sink) {
    const uint8_t* data[NB];
    for (int b = 0; b < NB; b++) data[b] = w.data + size_t(block + b) * w.block_bytes;
    const float* x = a.x + size_t(m0 / LANES) * LANES * w.cols + m0 % LANES;
    F y[NB][MT];
    for (int b = 0; b < NB; b++)
        for (int m = 0; m < MT; m++) y[b][m] = zero();
    for (int k = 0; k < w.cols; k++) {
        F weight[NB];
#pragma GCC unroll 4
        for (int b = 0; b < NB; b++) weight[b] = column<KIND>(data[b], k);
#pragma GCC unroll 16
        for (int m = 0; m < MT; m++) {
            F value = set(x[k * LANES + m]);
#pragma GCC unroll 4
            for (int b = 0; b < NB; b++) y[b][m] = fma(weight[b], value, y[b][m]);
        }
    }
    for (int b = 0; b < NB; b++) emit<MT>(sink, m0, block + b, y[b]);
}

// One block over all rows of [m, end), in the largest tiles that fit; `T<MT>::run`.
template <template <int> class T>
inline void sweep(const OctMatrix& w, int block, const Activations& a, int m, int end, Sink& sink) {
    for (; m + MOST_ROWS <= end; m += MOST_ROWS) T<MOST_ROWS>::run(w, block, a, m, sink);
    if (MOST_ROWS > 8 && m + 8 <= end) T<8>::run(w, block, a, m, sink), m += 8;
    if (MOST_ROWS > 4 && m + 4 <= end) T<4>::run(w, block, a, m, sink), m += 4;
    if (m + 2 <= end) T<2>::run(w, block, a, m, sink), m += 2;
    if (m < end) T<1>::run(w, block, a, m, sink);
}

template <int MT> struct Int8W4 { static void run(const OctMatrix& w, int b, const Activations& a, int m, Sink& s) { int8_tile<true, MT>(w, b, a, m, s); } };
template <int MT> struct Int8W8 { static void run(const OctMatrix& w, int b, const Activations& a, int m, Sink& s) { int8_tile<false, MT>(w, b, a, m, s); } };
template <int MT> struct ExactW4 { static void run(const OctMatrix& w, int b, const Activations& a, int m, Sink& s) { exact_tile<true, MT>(w, b, a, m, s); } };
template <int MT> struct ExactW8 { static void run(const OctMatrix& w, int b, const Activations& a, int m, Sink& s) { exact_tile<false, MT>(w, b, a, m, s); } };
template <int KIND> struct Float {
    template <int MT> struct One { static void run(const OctMatrix& w, int b, const Activations& a, int m, Sink& s) { float_tile<KIND, 1, MT>(w, b, a, m, s); } };
};

// A single row has one running sum a block: four blocks at a time hide the latency of its additions.
template <int KIND>
void float_product(const OctMatrix& w, int from, int to, const Activations& a, int m, int end, Sink& sink) {
    int block = from;
    if (end - m <= 2)
        for (; block + 4 <= to; block += 4) {
            if (end - m == 2) float_tile<KIND, 4, 2>(w, block, a, m, sink);
            else float_tile<KIND, 4, 1>(w, block, a, m, sink);
        }
    for (; block < to; block++) sweep<Float<KIND>::template One>(w, block, a, m, end, sink);
}

constexpr int ROWS_AT_ONCE = 96;  // activations that stay in the second-level cache while weights pass by

void product(const OctMatrix& w, int from, int to, const Activations& a, int rows, bool exact, Sink& sink) {
    for (int m = 0; m < rows; m += ROWS_AT_ONCE) {
        const int end = least(rows, m + ROWS_AT_ONCE);
        if (w.kind == OCT_F32) float_product<OCT_F32>(w, from, to, a, m, end, sink);
        else if (w.kind == OCT_F16) float_product<OCT_F16>(w, from, to, a, m, end, sink);
        else if (w.kind == OCT_BF16) float_product<OCT_BF16>(w, from, to, a, m, end, sink);
        else
            for (int block = from; block < to; block++) {
                if (w.kind == OCT_W4 && exact) sweep<ExactW4>(w, block, a, m, end, sink);
                else if (w.kind == OCT_W4) sweep<Int8W4>(w, block, a, m, end, sink);
                else if (exact) sweep<ExactW8>(w, block, a, m, end, sink);
                else sweep<Int8W8>(w, block, a, m, end, sink);
            }
    }
}

}  // namespace
