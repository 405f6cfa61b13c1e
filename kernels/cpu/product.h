// Matrix products over packed blocks, tile by tile, and what is done with their results.
//
// A tile is NB blocks of 16 weight rows by MT rows of activations. Each output is one lane of one running sum over
// the columns in order, so tile shapes are free to be what is fastest.
#pragma once
#include "rows.h"

namespace {

// Rows [first, first + count) of a block.
__attribute__((noinline)) void emit(Sink& sink, int first, int count, int block, const F* v) {
    const size_t column = size_t(block) * LANES;
    const F bias = sink.bias ? load(sink.bias + column) : zero();
    if (sink.mode == Sink::HEAD) {
        const int real = sink.rows - int(column);
        for (int m = first; m < first + count; m++) {
            F value = v[m - first];
            if (sink.bias) value = add(value, bias);
            if (sink.cap > 0) value = capped(value, sink.cap);
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
    for (int m = 0; m < count; m++) {
        float* row = sink.out + sink.row(first + m) * sink.stride;
        F value = sink.bias ? add(v[m], bias) : v[m];
        if (sink.mode == Sink::STORE) {
            store(row + column, value);
        } else if (sink.mode == Sink::ADD) {
            store(row + column, add(load(row + column), value));
        } else if (sink.mode == Sink::ACT) {
            store(row + column, activated(sink.act, value));
        } else {  // even blocks are gates, the odd one after each what it gates
            float* out = row + size_t(block / 2) * LANES;
            store(out, block % 2 ? mul(activated(sink.act, load(out)), value) : value);
        }
    }
}

// A pair of blocks: gates, and what they gate.
inline void emit_gated(Sink& sink, int first, int count, int block, const F* gates, const F* values) {
    const size_t column = size_t(block) * LANES;
    const F of_gates = sink.bias ? load(sink.bias + column) : zero(), of_values = sink.bias ? load(sink.bias + column + LANES) : zero();
    for (int m = 0; m < count; m++) {
        const F gate = sink.bias ? add(gates[m], of_gates) : gates[m], value = sink.bias ? add(values[m], of_values) : values[m];
        store(sink.out + sink.row(first + m) * sink.stride + column / 2, mul(activated(sink.act, gate), value));
    }
}

constexpr int AHEAD = 2048;  // bytes: far enough for memory, near enough to be in the block or the next

template <int KIND>
inline void load_numbers(const Place& at, Bytes& bytes) {
    if (KIND == OCT_W8) load_w8(at.q, bytes);
    else load_w4(at.q, bytes);
    if (KIND == OCT_W5 || KIND == OCT_K5) raise_one(at.high, bytes);
    if (KIND == OCT_K6) raise_two(at.high, bytes);
}

// What a group's numbers are multiplied by and what is added then; K6 has two factors, for the halves of its columns.
template <int KIND>
inline void load_scales(const Place& at, F& factor, F& second) {
    factor = load_f16(at.d);
    if (KIND == OCT_K6) {
        second = mul(factor, load_i8((const int8_t*)at.scales + LANES));
        factor = mul(factor, load_i8((const int8_t*)at.scales));
    } else if (is_super(KIND)) {
        factor = mul(factor, load_u8(at.scales));
        second = sub(zero(), mul(load_f16(at.m), load_u8(at.scales + LANES)));
    } else if (KIND != OCT_W8) {
        second = load_f16(at.m);
    }
}

template <int KIND, int MT>
void int8_tile(const OctMatrix& w, int block, const Activations& a, int m0, int count, Sink& sink) {
    const int groups = w.cols / GROUP;
    const uint8_t* data = w.data + size_t(block) * w.block_bytes;
    const size_t panel = size_t(m0 / LANES) * LANES, slot = m0 % LANES;
    const int8_t* x = a.q + panel * w.cols + slot * GROUP;
    const float* scale = a.scale + panel * groups + slot;
    const float* scaled_sum = a.scaled_sum + panel * groups + slot;
    const int32_t* excess = a.excess + panel * groups + slot;
    const int32_t* low = a.low + panel * groups + slot;
    constexpr int SIDE = MT < 4 ? MT : MT % 4 ? 3 : 4;  // rows whose sums go on side by side: each waits for itself only
    F y[MT];
    for (int m = 0; m < MT; m++) y[m] = zero();
    for (int g = 0; g < groups; g++) {
        const Place at = place_of<KIND>(data, groups, g);
        Bytes bytes;
        load_numbers<KIND>(at, bytes);
        if (MT <= 8) prefetch(at.q + AHEAD, group_bytes(KIND));
        F factor, second = zero();
        load_scales<KIND>(at, factor, second);
#pragma GCC unroll 16
        for (int m = 0; m < MT; m += SIDE) {
            const int8_t* xs = x + m * GROUP;
            F dot[SIDE], last[SIDE];
            if (KIND == OCT_K6) {
                int32_t starts[2 * SIDE];
                for (int i = 0; i < SIDE; i++) starts[i] = low[m + i], starts[SIDE + i] = excess[m + i] / 4 - low[m + i];
                dots_half<0, SIDE>(bytes, xs, starts, dot);
                dots_half<1, SIDE>(bytes, xs, starts + SIDE, last);
            } else if (KIND == OCT_W8) {
                dots_w8<SIDE>(bytes, xs, excess + m, dot);
            } else if (KIND == OCT_W4 || KIND == OCT_K4) {
                dots_w4<SIDE>(bytes, xs, dot);
            } else {
                dots_w5<SIDE>(bytes, xs, dot);
            }
#pragma GCC unroll 4
            for (int i = 0; i < SIDE; i++) {
                F& sum = y[m + i];
                if (KIND == OCT_K6) dot[i] = fma(factor, dot[i], mul(second, last[i]));
                sum = fma(KIND == OCT_K6 ? set(scale[m + i]) : mul(factor, set(scale[m + i])), dot[i], sum);
                if (KIND != OCT_K6 && KIND != OCT_W8) sum = fma(second, set(scaled_sum[m + i]), sum);
            }
        }
        x += LANES * GROUP;
        scale += LANES;
        scaled_sum += LANES;
        excess += LANES;
        low += LANES;
    }
    emit(sink, m0, count, block, y);
}

// A group's weights as the numbers that they stand for, [column][row].
template <int KIND>
__attribute__((noinline)) void dequantise(const Place& at, float* out) {
    Bytes bytes;
    load_numbers<KIND>(at, bytes);
    F factor, second = zero();
    load_scales<KIND>(at, factor, second);
#pragma GCC unroll 32
    for (int k = 0; k < GROUP; k++) {
        F weight = byte_of(bytes, k);
        if (KIND == OCT_W8) weight = mul(factor, sub(weight, set(128.f)));
        else if (KIND == OCT_K6) weight = mul(k < LANES ? factor : second, sub(weight, set(32.f)));
        else weight = fma(factor, weight, second);
        store(out + k * LANES, weight);
    }
}

// The same weights against fp32 activations.
template <int KIND, int MT>
void exact_tile(const OctMatrix& w, int block, const Activations& a, int m0, int count, Sink& sink) {
    const int groups = w.cols / GROUP;
    const uint8_t* data = w.data + size_t(block) * w.block_bytes;
    const float* x = a.x + size_t(m0 / LANES) * LANES * w.cols + m0 % LANES;
    alignas(64) float weights[GROUP * LANES];
    F y[MT];
    for (int m = 0; m < MT; m++) y[m] = zero();
    for (int g = 0; g < groups; g++, x += GROUP * LANES) {
        dequantise<KIND>(place_of<KIND>(data, groups, g), weights);
        for (int k = 0; k < GROUP; k++) {
            const F weight = load(weights + k * LANES);
#pragma GCC unroll 16
            for (int m = 0; m < MT; m++) y[m] = fma(weight, set(x[k * LANES + m]), y[m]);
        }
    }
    emit(sink, m0, count, block, y);
}

template <int KIND>
inline F column(const uint8_t* block, int k) {
    if (KIND == OCT_F32) return load((const float*)block + k * LANES);
    const uint16_t* halves = (const uint16_t*)block + k * LANES;
    return KIND == OCT_F16 ? load_f16(halves) : load_bf16(halves);
}

template <int KIND, int NB, int MT>
void float_tile(const OctMatrix& w, int block, const Activations& a, int m0, int count, Sink& sink) {
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
    for (int b = 0; b < NB; b++) emit(sink, m0, count, block + b, y[b]);
}

// One block over all rows of [m, end) in tiles; `T<MT>::run`. The last one may compute rows of its panel beyond the end: a
// smaller one and another would unpack all weights twice.
template <template <int> class T>
inline void sweep(const OctMatrix& w, int block, const Activations& a, int m, int end, Sink& sink) {
    constexpr int EIGHT = MOST_ROWS > 8 ? 8 : MOST_ROWS, SIX = MOST_ROWS > 8 ? 6 : MOST_ROWS;
    for (; m + MOST_ROWS - MOST_ROWS / 4 < end; m += MOST_ROWS)
        T<MOST_ROWS>::run(w, block, a, m, least(MOST_ROWS, end - m), sink);
    if (MOST_ROWS > 8 && m + 8 < end) T<EIGHT>::run(w, block, a, m, 8, sink), m += 8;
    const int n = end - m;
    if (n > 6) T<EIGHT>::run(w, block, a, m, n, sink);
    else if (n > 4) T<SIX>::run(w, block, a, m, n, sink);
    else if (n > 2) T<4>::run(w, block, a, m, n, sink);
    else if (n == 2) T<2>::run(w, block, a, m, n, sink);
    else if (n == 1) T<1>::run(w, block, a, m, n, sink);
}

template <int KIND>
struct Int8 {
    template <int MT> struct Tile { static void run(const OctMatrix& w, int b, const Activations& a, int m, int n, Sink& s) { int8_tile<KIND, MT>(w, b, a, m, n, s); } };
};
template <int KIND>
struct Exact {
    template <int MT> struct Tile { static void run(const OctMatrix& w, int b, const Activations& a, int m, int n, Sink& s) { exact_tile<KIND, MT>(w, b, a, m, n, s); } };
};
template <int KIND>
struct Float {
    template <int MT> struct Tile { static void run(const OctMatrix& w, int b, const Activations& a, int m, int n, Sink& s) { float_tile<KIND, 1, MT>(w, b, a, m, n, s); } };
};

template <int KIND>
void group_product(const OctMatrix& w, int from, int to, const Activations& a, int m, int end, bool exact, Sink& sink) {
    for (int block = from; block < to; block++) {
        if (exact) sweep<Exact<KIND>::template Tile>(w, block, a, m, end, sink);
        else sweep<Int8<KIND>::template Tile>(w, block, a, m, end, sink);
    }
}

// A single row has one running sum a block: four blocks at a time hide the latency of its additions.
template <int KIND>
void float_product(const OctMatrix& w, int from, int to, const Activations& a, int m, int end, Sink& sink) {
    int block = from;
    if (end - m <= 2)
        for (; block + 4 <= to; block += 4) {
            if (end - m == 2) float_tile<KIND, 4, 2>(w, block, a, m, 2, sink);
            else float_tile<KIND, 4, 1>(w, block, a, m, 1, sink);
        }
    for (; block < to; block++) sweep<Float<KIND>::template Tile>(w, block, a, m, end, sink);
}

constexpr int ROWS_AT_ONCE = 96;  // activations that stay in the second-level cache while weights pass by

void product(const OctMatrix& w, int from, int to, const Activations& a, int rows, bool exact, Sink& sink) {
    for (int m = 0; m < rows; m += ROWS_AT_ONCE) {
        const int end = least(rows, m + ROWS_AT_ONCE);
        switch (w.kind) {
            case OCT_F32: float_product<OCT_F32>(w, from, to, a, m, end, sink); break;
            case OCT_F16: float_product<OCT_F16>(w, from, to, a, m, end, sink); break;
            case OCT_BF16: float_product<OCT_BF16>(w, from, to, a, m, end, sink); break;
            case OCT_W4: group_product<OCT_W4>(w, from, to, a, m, end, exact, sink); break;
            case OCT_W5: group_product<OCT_W5>(w, from, to, a, m, end, exact, sink); break;
            case OCT_W8: group_product<OCT_W8>(w, from, to, a, m, end, exact, sink); break;
            case OCT_K4: group_product<OCT_K4>(w, from, to, a, m, end, exact, sink); break;
            case OCT_K5: group_product<OCT_K5>(w, from, to, a, m, end, exact, sink); break;
            default: group_product<OCT_K6>(w, from, to, a, m, end, exact, sink);
        }
    }
}

// A group of 16 rows by 4 rows of activations, again and again.
int64_t byte_products(int rounds) {
    alignas(64) uint8_t numbers[256] = {};
    alignas(64) int8_t x[4 * GROUP] = {};
    asm volatile("" ::"r"(numbers), "r"(x) : "memory");
    Bytes bytes;
    load_w4(numbers, bytes);
    F y[4] = {zero(), zero(), zero(), zero()};
    for (int i = 0; i < rounds; i++) {
        F dot[4];
        dots_w4<4>(bytes, x, dot);
        for (int m = 0; m < 4; m++) y[m] = add(y[m], dot[m]);
        asm volatile("" ::: "memory");
    }
    return sum(add(add(y[0], y[1]), add(y[2], y[3]))) == 0 ? int64_t(rounds) * 2 * 4 * LANES * GROUP : 0;
}

}  // namespace
