// Kernels on one row: norm, quantisation, embedding, elementwise functions. Included by a level after its vectors.
#pragma once
#include "half.h"
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

// `width` is a multiple of 16, of which `count` numbers are real and the rest zeros.
void norm(const float* x, const float* weight, int width, int count, float eps, float* out) {
    F squares = zero();
    for (int i = 0; i < width; i += LANES) {
        F v = load(x + i);
        squares = fma(v, v, squares);
    }
    F scale = set(1.f / __builtin_sqrtf(sum(squares) / float(count) + eps));
    for (int i = 0; i < width; i += LANES) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
}

void spread(const float* x, int n, float* out) {
    for (int k = 0; k < n; k++) out[k * LANES] = x[k];
}

void quantise(const float* x, int n, int8_t* q, float* scale, float* scaled_sum, int32_t* total) {
    for (int g = 0; g < n / GROUP; g++, q += LANES * GROUP, scale += LANES, scaled_sum += LANES, total += LANES) {
        F a = load(x + g * GROUP), b = load(x + g * GROUP + LANES);
        float top = greatest(most(magnitude(a), magnitude(b)));
        F inverse = set(top > 0 ? 127.f / top : 0.f);
        a = nearest(mul(a, inverse));
        b = nearest(mul(b, inverse));
        store_i8(q, a);
        store_i8(q + LANES, b);
        float whole = sum(add(a, b));
        *scale = top / 127.f;
        *scaled_sum = *scale * whole;
        *total = whole == whole ? int32_t(whole) : 0;
    }
}

bool finite(const float* x, int n) {
    F check = zero();
    for (int i = 0; i < n; i += LANES) check = fma(load(x + i), zero(), check);
    return lanes_equal(check, zero()) == 0xffff;
}

constexpr int W4_GROUP = 320;  // 256 bytes of numbers, 16 d, 16 m
constexpr int W8_GROUP = 512;  // the d of all groups follow the numbers of all groups

void embed(const OctMatrix& w, int row, float* out) {
    const uint8_t* block = w.data + size_t(row / LANES) * w.block_bytes;
    const int r = row % LANES, groups = w.cols / GROUP;
    for (int k = 0; k < w.cols; k++) {
        if (w.kind == OCT_F32) {
            out[k] = ((const float*)block)[k * LANES + r];
        } else if (w.kind == OCT_F16) {
            out[k] = from_f16(((const uint16_t*)block)[k * LANES + r]);
        } else if (w.kind == OCT_BF16) {
            out[k] = from_bf16(((const uint16_t*)block)[k * LANES + r]);
        } else {
            const int g = k / GROUP, quad = k % GROUP / 4;
            if (w.kind == OCT_W4) {
                const uint8_t* q = block + g * W4_GROUP;
                const uint16_t* d = (const uint16_t*)(q + 256);
                uint8_t both = q[64 * (quad % 4) + 4 * r + k % 4];
                out[k] = from_f16(d[r]) * float(quad < 4 ? both & 15 : both >> 4) + from_f16(d[16 + r]);
            } else {
                const uint16_t* d = (const uint16_t*)(block + groups * W8_GROUP) + g * LANES;
                out[k] = from_f16(d[r]) * float(int(block[g * W8_GROUP + 64 * quad + 4 * r + k % 4]) - 128);
            }
        }
    }
    for (int k = w.cols; k % LANES; k++) out[k] = 0;
}

}  // namespace
