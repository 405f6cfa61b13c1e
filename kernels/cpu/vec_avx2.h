// Sixteen lanes on AVX2 with FMA and F16C: two registers.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace {

constexpr int MOST_ROWS = 4;
constexpr int MOST_SUMS = 6;

struct F {
    __m256 lo, hi;
};
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline F set(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F sub(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F div(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F most(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F magnitude(F a) {
    const __m256 sign = _mm256_set1_ps(-0.f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline F nearest(F a) { return {_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8)}; }
inline __m256 power_of_two(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F power_of_two(F n) { return {power_of_two(n.lo), power_of_two(n.hi)}; }
inline float sum(F a) {
    __m256 v = _mm256_add_ps(a.lo, a.hi);
    __m128 w = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_add_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_add_ss(w, _mm_shuffle_ps(w, w, 1)));
}
inline float greatest(F a) {
    __m256 v = _mm256_max_ps(a.lo, a.hi);
    __m128 w = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_max_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_max_ss(w, _mm_shuffle_ps(w, w, 1)));
}
inline F keep_first(F a, int n, F other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 lo = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane));
    __m256 hi = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane));
    return {_mm256_blendv_ps(other.lo, a.lo, lo), _mm256_blendv_ps(other.hi, a.hi, hi)};
}
inline uint32_t lanes_equal(F a, F b) {
    uint32_t lo = uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ)));
    return lo | uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ))) << 8;
}
inline bool any_above(F a, F b) {
    __m256 lo = _mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), hi = _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ);
    return _mm256_movemask_ps(_mm256_or_ps(lo, hi)) != 0;
}
inline __m256 half_bf16(const uint16_t* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F load_bf16(const uint16_t* p) { return {half_bf16(p), half_bf16(p + 8)}; }
inline F load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline F load_i8(const int8_t* p) {
    const __m128i b = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(b, 8)))};
}
inline F load_u8(const uint8_t* p) {
    const __m128i b = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(b)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(b, 8)))};
}
inline void store_i8(int8_t* p, F a) {
    __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
    words = _mm256_permute4x64_epi64(words, 0xD8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i*)p, bytes);
}

inline void store_i32(int32_t* p, F a) {
    _mm256_storeu_si256((__m256i*)p, _mm256_cvtps_epi32(a.lo));
    _mm256_storeu_si256((__m256i*)(p + 8), _mm256_cvtps_epi32(a.hi));
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

// A group of 32 columns by 16 rows: lo/hi[j] have columns 4j .. 4j+3 of rows 0-7 and 8-15, as unsigned bytes.
struct Bytes {
    __m256i lo[8], hi[8];
};
inline void load_w4(const uint8_t* q, Bytes& w) {
    const __m256i low = _mm256_set1_epi8(15);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m256i a = _mm256_loadu_si256((const __m256i*)(q + 64 * j));
        __m256i b = _mm256_loadu_si256((const __m256i*)(q + 64 * j + 32));
        w.lo[j] = _mm256_and_si256(a, low);
        w.hi[j] = _mm256_and_si256(b, low);
        w.lo[j + 4] = _mm256_and_si256(_mm256_srli_epi16(a, 4), low);
        w.hi[j + 4] = _mm256_and_si256(_mm256_srli_epi16(b, 4), low);
    }
}
inline void load_w8(const uint8_t* q, Bytes& w) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        w.lo[j] = _mm256_loadu_si256((const __m256i*)(q + 64 * j));
        w.hi[j] = _mm256_loadu_si256((const __m256i*)(q + 64 * j + 32));
    }
}
template <int BY>
inline __m256i shifted(__m256i a) {  // left by BY, or right where BY is negative
    if (BY > 0) return _mm256_slli_epi16(a, BY > 0 ? BY : 0);
    if (BY < 0) return _mm256_srli_epi16(a, BY < 0 ? -BY : 0);
    return a;
}
template <int J, int BY>
inline void raise(__m256i lo, __m256i hi, __m256i bits, Bytes& w) {
    w.lo[J] = _mm256_or_si256(w.lo[J], _mm256_and_si256(shifted<BY>(lo), bits));
    w.hi[J] = _mm256_or_si256(w.hi[J], _mm256_and_si256(shifted<BY>(hi), bits));
}
// The fifth bit of the numbers of piece j is bit j of `high`; the fifth and sixth are bits 2 (j % 4) of half j / 4.
inline void raise_one(const uint8_t* high, Bytes& w) {
    const __m256i lo = _mm256_loadu_si256((const __m256i*)high), hi = _mm256_loadu_si256((const __m256i*)(high + 32));
    const __m256i bit = _mm256_set1_epi8(16);
    raise<0, 4>(lo, hi, bit, w), raise<1, 3>(lo, hi, bit, w), raise<2, 2>(lo, hi, bit, w), raise<3, 1>(lo, hi, bit, w);
    raise<4, 0>(lo, hi, bit, w), raise<5, -1>(lo, hi, bit, w), raise<6, -2>(lo, hi, bit, w), raise<7, -3>(lo, hi, bit, w);
}
template <int HALF>
inline void raise_two(const uint8_t* high, Bytes& w) {
    constexpr int J = 4 * HALF;
    const __m256i lo = _mm256_loadu_si256((const __m256i*)high), hi = _mm256_loadu_si256((const __m256i*)(high + 32));
    const __m256i bits = _mm256_set1_epi8(48);
    raise<J, 4>(lo, hi, bits, w), raise<J + 1, 2>(lo, hi, bits, w), raise<J + 2, 0>(lo, hi, bits, w);
    raise<J + 3, -2>(lo, hi, bits, w);
}
inline void raise_two(const uint8_t* high, Bytes& w) {
    raise_two<0>(high, w);
    raise_two<1>(high + 64, w);
}
inline __m256i four(const int8_t* x) {
    int32_t v;
    __builtin_memcpy(&v, x, 4);
    return _mm256_set1_epi32(v);
}
// 15 · 127 · 2 products in each of 8 sums stay below 2^15: they are widened once.
inline __m256i dot_w4(const __m256i* w, const int8_t* x) {
    __m256i a = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) a = _mm256_add_epi16(a, _mm256_maddubs_epi16(w[j], four(x + 4 * j)));
    return _mm256_madd_epi16(a, _mm256_set1_epi16(1));
}
inline F dot_w4(const Bytes& w, const int8_t* x) {
    return {_mm256_cvtepi32_ps(dot_w4(w.lo, x)), _mm256_cvtepi32_ps(dot_w4(w.hi, x))};
}
// Numbers below 64: 63 · 127 · 2 stays below 2^15, two of them do not.
template <int FROM, int TO>
inline __m256i dot_w6(const __m256i* w, const int8_t* x, int32_t start) {
    __m256i a = _mm256_set1_epi32(start);
#pragma GCC unroll 8
    for (int j = FROM; j < TO; j++)
        a = _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_maddubs_epi16(w[j], four(x + 4 * j)), _mm256_set1_epi16(1)));
    return a;
}
inline F dot_w5(const Bytes& w, const int8_t* x) {
    return {_mm256_cvtepi32_ps(dot_w6<0, 8>(w.lo, x, 0)), _mm256_cvtepi32_ps(dot_w6<0, 8>(w.hi, x, 0))};
}
// One half of the columns: pieces 4 half .. 4 half + 3 of numbers below 64; the sum begins at `start`.
template <int HALF>
inline F dot_half(const Bytes& w, const int8_t* x, int32_t start) {
    return {_mm256_cvtepi32_ps(dot_w6<4 * HALF, 4 * HALF + 4>(w.lo, x, start)),
            _mm256_cvtepi32_ps(dot_w6<4 * HALF, 4 * HALF + 4>(w.hi, x, start))};
}
// As signed bytes, |w| · (x with w's sign): 128 · 127 · 2 stays below 2^15, where unsigned bytes would saturate.
inline __m256i dot_w8(const __m256i* w, const int8_t* x) {
    __m256i a = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        __m256i weight = _mm256_xor_si256(w[j], _mm256_set1_epi8(-128));
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weight), _mm256_sign_epi8(four(x + 4 * j), weight));
        a = _mm256_add_epi32(a, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return a;
}
inline F dot_w8(const Bytes& w, const int8_t* x) {
    return {_mm256_cvtepi32_ps(dot_w8(w.lo, x)), _mm256_cvtepi32_ps(dot_w8(w.hi, x))};
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
inline void dots_w8(const Bytes& w, const int8_t* x, const int32_t*, F* out) {
    for (int i = 0; i < N; i++) out[i] = dot_w8(w, x + 32 * i);
}
template <int HALF, int N>
inline void dots_half(const Bytes& w, const int8_t* x, const int32_t* start, F* out) {
    for (int i = 0; i < N; i++) out[i] = dot_half<HALF>(w, x + 32 * i, start[i]);
}
inline __m256 byte_of(__m256i part, int byte) {
    __m256i v = _mm256_srl_epi32(part, _mm_cvtsi32_si128(8 * byte));
    return _mm256_cvtepi32_ps(_mm256_and_si256(v, _mm256_set1_epi32(255)));
}
inline F byte_of(const Bytes& w, int column) {
    return {byte_of(w.lo[column / 4], column % 4), byte_of(w.hi[column / 4], column % 4)};
}

}  // namespace
