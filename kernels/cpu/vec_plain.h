// Sixteen lanes in plain C++, for any processor; compilers make of it what they can.
#pragma once
#include <math.h>
#include <stdint.h>

#include "half.h"

namespace {

constexpr int MOST_ROWS = 4;
constexpr int MOST_SUMS = 6;

typedef float F __attribute__((vector_size(64)));
typedef int32_t Mask __attribute__((vector_size(64)));

template <class Op>
inline F each(Op op) {
    F r;
    for (int i = 0; i < 16; i++) r[i] = op(i);
    return r;
}
inline F load(const float* p) {
    F r;
    memcpy(&r, p, 64);
    return r;
}
inline void store(float* p, F a) { memcpy(p, &a, 64); }
inline F zero() { return F{}; }
inline F set(float a) { return a - zero(); }
inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F div(F a, F b) { return a / b; }
inline F fma(F a, F b, F c) { return a * b + c; }
inline F most(F a, F b) { return a > b ? a : b; }
inline F magnitude(F a) { return (F)((Mask)a & 0x7fffffff); }
inline F nearest(F a) { return each([&](int i) { return nearbyintf(a[i]); }); }
inline F power_of_two(F n) { return (F)((__builtin_convertvector(n, Mask) + 127) << 23); }
inline float sum(F a) {
    float v[16];
    memcpy(v, &a, 64);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) v[i] += v[i + width];
    return v[0];
}
inline float greatest(F a) {
    float m = a[0];
    for (int i = 1; i < 16; i++) m = a[i] > m ? a[i] : m;
    return m;
}
inline F keep_first(F a, int n, F other) { return each([&](int i) { return i < n ? a[i] : other[i]; }); }
inline uint32_t lanes_equal(F a, F b) {
    uint32_t mask = 0;
    for (int i = 0; i < 16; i++) mask |= uint32_t(a[i] == b[i]) << i;
    return mask;
}
inline bool any_above(F a, F b) {
    bool any = false;
    for (int i = 0; i < 16; i++) any |= a[i] > b[i];
    return any;
}
inline F load_bf16(const uint16_t* p) { return each([&](int i) { return from_bf16(p[i]); }); }
inline F load_f16(const uint16_t* p) { return each([&](int i) { return from_f16(p[i]); }); }
inline F load_i8(const int8_t* p) { return each([&](int i) { return float(p[i]); }); }
inline F load_u8(const uint8_t* p) { return each([&](int i) { return float(p[i]); }); }
inline void store_i8(int8_t* p, F a) {
    for (int i = 0; i < 16; i++) p[i] = int8_t(nearbyintf(a[i]));
}

inline void store_i32(int32_t* p, F a) {
    for (int i = 0; i < 16; i++) p[i] = a[i] == a[i] ? int32_t(a[i]) : 0;
}
// Lane i of the result is made of all lanes of a[i].
inline F greatest_each(const F* a) { return each([&](int i) { return greatest(a[i]); }); }
inline F sum_each(const F* a) { return each([&](int i) { return sum(a[i]); }); }

// A group of 32 columns by 16 rows, as unsigned bytes [column / 4][row][column % 4].
struct Bytes {
    uint8_t b[512];
};
inline void load_w4(const uint8_t* q, Bytes& w) {
    for (int i = 0; i < 256; i++) {
        w.b[i] = q[i] & 15;
        w.b[i + 256] = q[i] >> 4;
    }
}
inline void load_w8(const uint8_t* q, Bytes& w) { memcpy(w.b, q, 512); }
// The fifth bit of the numbers of piece j is bit j of `high`; the fifth and sixth are bits 2 (j % 4) of half j / 4.
inline void raise_one(const uint8_t* high, Bytes& w) {
    for (int i = 0; i < 512; i++) w.b[i] |= uint8_t((high[i % 64] >> i / 64 & 1) << 4);
}
inline void raise_two(const uint8_t* high, Bytes& w) {
    for (int i = 0; i < 512; i++) w.b[i] |= uint8_t((high[i / 256 * 64 + i % 64] >> 2 * (i / 64 % 4) & 3) << 4);
}
inline F dot(const Bytes& w, const int8_t* x, int from, int to, int32_t start) {
    return each([&](int i) {
        int32_t a = start;
        for (int j = from; j < to; j++)
            for (int k = 0; k < 4; k++) a += int32_t(w.b[64 * j + 4 * i + k]) * x[4 * j + k];
        return float(a);
    });
}
inline F dot_w4(const Bytes& w, const int8_t* x) { return dot(w, x, 0, 8, 0); }
inline F dot_w5(const Bytes& w, const int8_t* x) { return dot(w, x, 0, 8, 0); }
inline F dot_w8(const Bytes& w, const int8_t* x, int32_t excess) { return dot(w, x, 0, 8, excess); }
// One half of the columns: pieces 4 half .. 4 half + 3 of numbers below 64; the sum begins at `start`.
template <int HALF>
inline F dot_half(const Bytes& w, const int8_t* x, int32_t start) {
    return dot(w, x, 4 * HALF, 4 * HALF + 4, start);
}
// The same for N rows.
template <int N>
inline void dots_w4(const Bytes& w, const int8_t* x, F* out) {
    for (int i = 0; i < N; i++) out[i] = dot_w4(w, x + 32 * i);
}
template <int N>
inline void dots_w5(const Bytes& w, const int8_t* x, F* out) {
    for (int i = 0; i < N; i++) out[i] = dot_w5(w, x + 32 * i);
}
template <int N>
inline void dots_w8(const Bytes& w, const int8_t* x, const int32_t* excess, F* out) {
    for (int i = 0; i < N; i++) out[i] = dot_w8(w, x + 32 * i, excess[i]);
}
template <int HALF, int N>
inline void dots_half(const Bytes& w, const int8_t* x, const int32_t* start, F* out) {
    for (int i = 0; i < N; i++) out[i] = dot_half<HALF>(w, x + 32 * i, start[i]);
}
inline F byte_of(const Bytes& w, int column) {
    return each([&](int i) { return float(w.b[64 * (column / 4) + 4 * i + column % 4]); });
}

}  // namespace
