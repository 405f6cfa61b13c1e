// Sixteen lanes on NEON with dot products of bytes (Armv8.2 and its extension dotprod): four registers.
#pragma once
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

namespace {

constexpr int MOST_ROWS = 4;
constexpr int MOST_SUMS = 6;

struct F {
    float32x4_t v[4];
};
template <class Op>
inline F each(Op op) {
    return {{op(0), op(1), op(2), op(3)}};
}
inline F load(const float* p) {
    return each([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, F a) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
}
inline F set(float a) {
    return each([&](int) { return vdupq_n_f32(a); });
}
inline F zero() { return set(0.f); }
inline F add(F a, F b) {
    return each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline F sub(F a, F b) {
    return each([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline F mul(F a, F b) {
    return each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline F div(F a, F b) {
    return each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline F fma(F a, F b, F c) {
    return each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
inline float32x4_t most(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // of NaN, b
inline F most(F a, F b) {
    return each([&](int i) { return most(a.v[i], b.v[i]); });
}
inline F magnitude(F a) {
    return each([&](int i) { return vabsq_f32(a.v[i]); });
}
inline F nearest(F a) {
    return each([&](int i) { return vrndnq_f32(a.v[i]); });
}
inline F power_of_two(F n) {
    return each([&](int i) {
        return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23));
    });
}
inline float sum(F a) {
    const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float greatest(F a) { return vmaxvq_f32(most(most(a.v[0], a.v[1]), most(a.v[2], a.v[3]))); }
inline F keep_first(F a, int n, F other) {
    const int32x4_t lane = {0, 1, 2, 3};
    return each([&](int i) { return vbslq_f32(vcltq_s32(lane, vdupq_n_s32(n - 4 * i)), a.v[i], other.v[i]); });
}
inline uint32_t lanes_equal(F a, F b) {
    const uint32x4_t bit = {1, 2, 4, 8};
    uint32_t mask = 0;
    for (int i = 0; i < 4; i++) mask |= vaddvq_u32(vandq_u32(vceqq_f32(a.v[i], b.v[i]), bit)) << (4 * i);
    return mask;
}
inline bool any_above(F a, F b) {
    uint32x4_t any = vdupq_n_u32(0);
    for (int i = 0; i < 4; i++) any = vorrq_u32(any, vcgtq_f32(a.v[i], b.v[i]));
    return vmaxvq_u32(any) != 0;
}
inline F load_bf16(const uint16_t* p) {
    return each([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
inline F load_f16(const uint16_t* p) {
    return each([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline F load_i8(const int8_t* p) {
    const int8x16_t b = vld1q_s8(p);
    const int16x8_t half[2] = {vmovl_s8(vget_low_s8(b)), vmovl_s8(vget_high_s8(b))};
    return each([&](int i) {
        const int16x8_t h = half[i / 2];
        return vcvtq_f32_s32(vmovl_s16(i % 2 ? vget_high_s16(h) : vget_low_s16(h)));
    });
}
inline F load_u8(const uint8_t* p) {
    const uint8x16_t b = vld1q_u8(p);
    const uint16x8_t half[2] = {vmovl_u8(vget_low_u8(b)), vmovl_u8(vget_high_u8(b))};
    return each([&](int i) {
        const uint16x8_t h = half[i / 2];
        return vcvtq_f32_u32(vmovl_u16(i % 2 ? vget_high_u16(h) : vget_low_u16(h)));
    });
}
inline void store_i8(int8_t* p, F a) {
    int16x4_t words[4];
    for (int i = 0; i < 4; i++) words[i] = vqmovn_s32(vcvtnq_s32_f32(a.v[i]));
    vst1_s8(p, vqmovn_s16(vcombine_s16(words[0], words[1])));
    vst1_s8(p + 8, vqmovn_s16(vcombine_s16(words[2], words[3])));
}
inline void store_i32(int32_t* p, F a) {
    for (int i = 0; i < 4; i++) vst1q_s32(p + 4 * i, vcvtnq_s32_f32(a.v[i]));
}
// Lane i of the result is made of all lanes of a[i].
inline F greatest_each(const F* a) {
    float out[16];
    for (int i = 0; i < 16; i++) out[i] = greatest(a[i]);
    return load(out);
}
inline F sum_each(const F* a) {
    float out[16];
    for (int i = 0; i < 16; i++) out[i] = sum(a[i]);
    return load(out);
}

// A group of 32 columns by 16 rows: q[j][r] has columns 4j .. 4j+3 of rows 4r .. 4r+3, as unsigned bytes.
struct Bytes {
    uint8x16_t q[8][4];
};
inline void load_w4(const uint8_t* q, Bytes& w) {
    for (int j = 0; j < 4; j++)
        for (int r = 0; r < 4; r++) {
            const uint8x16_t both = vld1q_u8(q + 64 * j + 16 * r);
            w.q[j][r] = vandq_u8(both, vdupq_n_u8(15));
            w.q[j + 4][r] = vshrq_n_u8(both, 4);
        }
}
inline void load_w8(const uint8_t* q, Bytes& w) {
    for (int j = 0; j < 8; j++)
        for (int r = 0; r < 4; r++) w.q[j][r] = vld1q_u8(q + 64 * j + 16 * r);
}
inline void raise(uint8x16_t high, int by, uint8_t bits, uint8x16_t& into) {  // left by `by`, or right if it is negative
    into = vorrq_u8(into, vandq_u8(vshlq_u8(high, vdupq_n_s8(int8_t(by))), vdupq_n_u8(bits)));
}
// The fifth bit of the numbers of piece j is bit j of `high`; the fifth and sixth are bits 2 (j % 4) of half j / 4.
inline void raise_one(const uint8_t* high, Bytes& w) {
    for (int r = 0; r < 4; r++)
        for (int j = 0; j < 8; j++) raise(vld1q_u8(high + 16 * r), 4 - j, 16, w.q[j][r]);
}
inline void raise_two(const uint8_t* high, Bytes& w) {
    for (int r = 0; r < 4; r++)
        for (int j = 0; j < 8; j++) raise(vld1q_u8(high + 64 * (j / 4) + 16 * r), 4 - 2 * (j % 4), 48, w.q[j][r]);
}
inline int8x16_t four(const int8_t* x) {
    int32_t v;
    memcpy(&v, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(v));
}
// Pieces FROM .. TO by N rows of activations; sums begin at `start`, or at 0. Weights below 128 are signed bytes as they
// are; with FLIP of 128 all are, and nothing is too much.
template <int FROM, int TO, int FLIP, int N>
inline void dots(const Bytes& w, const int8_t* x, const int32_t* start, F* out) {
    int32x4_t a[N][4];
    for (int i = 0; i < N; i++)
        for (int r = 0; r < 4; r++) a[i][r] = vdupq_n_s32(start ? start[i] : 0);
#pragma GCC unroll 8
    for (int j = FROM; j < TO; j++) {
        int8x16_t weights[4];
        for (int r = 0; r < 4; r++) weights[r] = vreinterpretq_s8_u8(veorq_u8(w.q[j][r], vdupq_n_u8(FLIP)));
        for (int i = 0; i < N; i++) {
            const int8x16_t columns = four(x + 32 * i + 4 * j);
            for (int r = 0; r < 4; r++) a[i][r] = vdotq_s32(a[i][r], weights[r], columns);
        }
    }
    for (int i = 0; i < N; i++) out[i] = each([&](int r) { return vcvtq_f32_s32(a[i][r]); });
}
template <int FROM, int TO, int FLIP>
inline F dot(const Bytes& w, const int8_t* x, int32_t start) {
    F out;
    dots<FROM, TO, FLIP, 1>(w, x, &start, &out);
    return out;
}
inline F dot_w4(const Bytes& w, const int8_t* x) { return dot<0, 8, 0>(w, x, 0); }
inline F dot_w5(const Bytes& w, const int8_t* x) { return dot<0, 8, 0>(w, x, 0); }
inline F dot_w8(const Bytes& w, const int8_t* x, int32_t) { return dot<0, 8, 128>(w, x, 0); }
// One half of the columns: pieces 4 half .. 4 half + 3 of numbers below 64; the sum begins at `start`.
template <int HALF>
inline F dot_half(const Bytes& w, const int8_t* x, int32_t start) {
    return dot<4 * HALF, 4 * HALF + 4, 0>(w, x, start);
}
template <int N>
inline void dots_w4(const Bytes& w, const int8_t* x, F* out) {
    dots<0, 8, 0, N>(w, x, nullptr, out);
}
template <int N>
inline void dots_w5(const Bytes& w, const int8_t* x, F* out) {
    dots<0, 8, 0, N>(w, x, nullptr, out);
}
template <int N>
inline void dots_w8(const Bytes& w, const int8_t* x, const int32_t*, F* out) {
    dots<0, 8, 128, N>(w, x, nullptr, out);
}
template <int HALF, int N>
inline void dots_half(const Bytes& w, const int8_t* x, const int32_t* start, F* out) {
    dots<4 * HALF, 4 * HALF + 4, 0, N>(w, x, start, out);
}
inline F byte_of(const Bytes& w, int column) {
    const int32x4_t by = vdupq_n_s32(-8 * (column % 4));
    return each([&](int r) {
        const uint32x4_t lanes = vreinterpretq_u32_u8(w.q[column / 4][r]);
        return vcvtq_f32_u32(vandq_u32(vshlq_u32(lanes, by), vdupq_n_u32(255)));
    });
}

}  // namespace
