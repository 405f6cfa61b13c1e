// Kernels on one row: norm, quantisation, embedding, elementwise functions. Included by a level after its vectors.
#pragma once
#include "formats.h"
#include "isa.h"

namespace {

using namespace octavo;

inline int least(int a, int b) { return a < b ? a : b; }

inline void prefetch(const void* p, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i, 0, 3);
}

// Cephes' exp: within 2 ulp on [-87, 88], clamped outside; a NaN stays one.
inline F exponential(F x) {
    x = most(set(-87.f), x);
    x = sub(zero(), most(set(-88.f), sub(zero(), x)));
    F n = nearest(mul(x, set(1.44269504f)));
    F r = fma(n, set(-0.693359375f), x);
    r = fma(n, set(2.12194440e-4f), r);
    F p = set(1.9875691500e-4f);
    p = fma(p, r, set(1.3981999507e-3f));
    p = fma(p, r, set(8.3334519073e-3f));
    p = fma(p, r, set(4.1665795894e-2f));
    p = fma(p, r, set(1.6666665459e-1f));
    p = fma(p, r, set(0.5f));
    p = fma(p, mul(r, r), add(r, set(1.f)));
    return mul(p, power_of_two(n));
}

inline F silu(F x) { return div(x, add(set(1.f), exponential(sub(zero(), x)))); }

// cap · tanh(x / cap), as 1 - 2 / (e^2x + 1): the error is one of cap's size.
inline F capped(F x, float cap) {
    F e = exponential(mul(x, set(2.f / cap)));
    return mul(set(cap), sub(set(1.f), div(set(2.f), add(e, set(1.f)))));
}

// x Φ(x), or with tanh in place of Φ: Hendrycks and Gimpel, Gaussian Error Linear Units (2016).
inline F gelu_tanh(F x) {
    F u = mul(x, fma(mul(x, x), set(0.0356774081f), set(0.7978845608f)));
    return div(x, add(set(1.f), exponential(mul(u, set(-2.f)))));
}
inline F gelu(F x) {  // erf by Abramowitz and Stegun, 7.1.26: within 1.5e-7
    F z = mul(magnitude(x), set(0.7071067812f));
    F t = div(set(1.f), fma(z, set(0.3275911f), set(1.f)));
    F p = fma(t, set(1.061405429f), set(-1.453152027f));
    p = fma(p, t, set(1.421413741f));
    p = fma(p, t, set(-0.284496736f));
    p = mul(fma(p, t, set(0.254829592f)), t);
    F tail = mul(set(0.5f), mul(p, exponential(sub(zero(), mul(z, z)))));  // of |x|
    return sub(most(x, zero()), mul(magnitude(x), tail));
}

inline F activated(int act, F x) {
    switch (act) {
        case OCT_GELU_TANH: return gelu_tanh(x);
        case OCT_GELU: return gelu(x);
        case OCT_RELU: return most(x, zero());
        default: return silu(x);
    }
}

// `width` is a multiple of 16, of which `count` numbers are real and the rest zeros, of the weights too.
void norm(int kind, const float* x, const float* weight, const float* bias, int width, int count, float eps, float* out) {
    F mean = zero();
    if (kind == OCT_LAYER) {
        for (int i = 0; i < width; i += LANES) mean = add(mean, load(x + i));
        mean = set(sum(mean) / float(count));
    }
    F squares = zero();
    for (int i = 0; i < width; i += LANES) {
        F v = sub(load(x + i), mean);
        if (count - i < LANES) v = keep_first(v, count > i ? count - i : 0, zero());
        squares = fma(v, v, squares);
    }
    F scale = set(1.f / __builtin_sqrtf(sum(squares) / float(count) + eps));
    for (int i = 0; i < width; i += LANES) {
        F v = mul(mul(sub(load(x + i), mean), scale), load(weight + i));
        store(out + i, bias ? add(v, load(bias + i)) : v);
    }
}

void add_rows(const float* x, int n, float* out) {
    for (int i = 0; i < n; i += LANES) store(out + i, add(load(out + i), load(x + i)));
}

void spread(const float* const* rows, int n, int from, int to, const Activations& panel) {
    for (int k = from; k < to; k += LANES)
        for (int r = 0; r < n; r++)
            for (int i = k; i < least(k + LANES, to); i++) panel.x[i * LANES + r] = rows[r][i];
}

// `n` groups of 32 numbers, at most 16, side by side; lane i of what is given is of group i. Where a number is not finite
// the scale is not a number.
inline void quantise_groups(const float* const* x, int n, int8_t* q, int step, F& scale, F& low, F& whole) {
    F top[LANES], first[LANES], both[LANES];
    for (int i = 0; i < LANES; i++)
        top[i] = i < n ? most(magnitude(load(x[i])), magnitude(load(x[i] + LANES))) : zero();
    const F tops = greatest_each(top);
    float inverse[LANES];
    store(inverse, div(set(127.f), most(tops, set(1e-30f))));
    for (int i = 0; i < n; i++) {
        const F by = set(inverse[i]), a = nearest(mul(load(x[i]), by)), b = nearest(mul(load(x[i] + LANES), by));
        store_i8(q + i * step, a);
        store_i8(q + i * step + LANES, b);
        first[i] = a;
        both[i] = add(a, b);
    }
    for (int i = n; i < LANES; i++) first[i] = both[i] = zero();
    low = sum_each(first);
    whole = sum_each(both);
    scale = fma(whole, zero(), div(tops, set(127.f)));
}

// Lanes are rows where there are many, else groups of one row: a row's numbers are the same.
void quantise(const float* const* rows, int n, int from, int to, const Activations& panel) {
    constexpr int MANY = 3;
    const float* x[LANES];
    F scale, low, whole;
    for (int g = from; n >= MANY && g < to; g++) {
        for (int r = 0; r < n; r++) x[r] = rows[r] + g * GROUP;
        quantise_groups(x, n, panel.q + g * LANES * GROUP, GROUP, scale, low, whole);
        store(panel.scale + g * LANES, scale);
        store(panel.scaled_sum + g * LANES, mul(scale, whole));
        store_i32(panel.excess + g * LANES, mul(whole, set(-128.f)));
        store_i32(panel.low + g * LANES, mul(low, set(-32.f)));
    }
    for (int r = 0; n < MANY && r < n; r++)
        for (int g = from; g < to; g += LANES) {
            const int count = least(LANES, to - g);
            for (int i = 0; i < count; i++) x[i] = rows[r] + (g + i) * GROUP;
            quantise_groups(x, count, panel.q + g * LANES * GROUP + r * GROUP, LANES * GROUP, scale, low, whole);
            float scales[LANES], sums[LANES];
            int32_t excess[LANES], lows[LANES];
            store(scales, scale);
            store(sums, mul(scale, whole));
            store_i32(excess, mul(whole, set(-128.f)));
            store_i32(lows, mul(low, set(-32.f)));
            for (int i = 0; i < count; i++) {
                const int at = (g + i) * LANES + r;
                panel.scale[at] = scales[i], panel.scaled_sum[at] = sums[i];
                panel.excess[at] = excess[i], panel.low[at] = lows[i];
            }
        }
}

bool finite(const float* x, int n) {
    F check = zero();
    for (int i = 0; i < n; i += LANES) check = fma(load(x + i), zero(), check);
    return lanes_equal(check, zero()) == 0xffff;
}

template <int KIND>
void unpack_row(const OctMatrix& w, const uint8_t* block, int r, float* out) {
    const int groups = w.cols / GROUP;
    for (int g = 0; g < groups; g++) {
        const Place at = place_of<KIND>(block, groups, g);
        for (int k = 0; k < GROUP; k++) out[g * GROUP + k] = weight_of<KIND>(at, r, k);
    }
}

// A row of a matrix, times `scale`, in place of what is at `out` or added to it; `spare` holds a row.
void embed(const OctMatrix& w, int row, float scale, bool added, float* spare, float* out) {
    const uint8_t* block = w.data + size_t(row / LANES) * w.block_bytes;
    const int r = row % LANES;
    float* to = added ? spare : out;
    switch (w.kind) {
        case OCT_F32: for (int k = 0; k < w.cols; k++) to[k] = ((const float*)block)[k * LANES + r]; break;
        case OCT_F16: for (int k = 0; k < w.cols; k++) to[k] = from_f16(((const uint16_t*)block)[k * LANES + r]); break;
        case OCT_BF16: for (int k = 0; k < w.cols; k++) to[k] = from_bf16(((const uint16_t*)block)[k * LANES + r]); break;
        case OCT_W4: unpack_row<OCT_W4>(w, block, r, to); break;
        case OCT_W5: unpack_row<OCT_W5>(w, block, r, to); break;
        case OCT_W8: unpack_row<OCT_W8>(w, block, r, to); break;
        case OCT_K4: unpack_row<OCT_K4>(w, block, r, to); break;
        case OCT_K5: unpack_row<OCT_K5>(w, block, r, to); break;
        default: unpack_row<OCT_K6>(w, block, r, to);
    }
    if (scale != 1.f)
        for (int k = 0; k < w.cols; k++) to[k] *= scale;
    if (added)
        for (int k = 0; k < w.cols; k++) out[k] += to[k];
    else
        for (int k = w.cols; k % LANES; k++) out[k] = 0;
}

}  // namespace
