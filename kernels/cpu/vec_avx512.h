// Sixteen lanes on AVX-512 with VNNI: one register.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace {

constexpr int MOST_ROWS = 16;   // rows in a tile of a product
constexpr int MOST_SUMS = 24;   // vectors of running sums that fit beside what else a loop needs

typedef __m512 F;
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
inline F set(float a) { return _mm512_set1_ps(a); }
inline F zero() { return _mm512_setzero_ps(); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F most(F a, F b) { return _mm512_max_ps(a, b); }
inline F magnitude(F a) { return _mm512_abs_ps(a); }
inline F nearest(F a) { return _mm512_roundscale_ps(a, 0); }
inline F power_of_two(F n) { return _mm512_scalef_ps(_mm512_set1_ps(1.f), n); }
inline float sum(F a) { return _mm512_reduce_add_ps(a); }
inline float greatest(F a) { return _mm512_reduce_max_ps(a); }
inline F keep_first(F a, int n, F other) { return _mm512_mask_mov_ps(other, __mmask16((1u << n) - 1), a); }
inline uint32_t lanes_equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline bool any_above(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
inline F load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline F load_i8(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline F load_u8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline void store_i8(int8_t* p, F a) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}

inline void store_i32(int32_t* p, F a) { _mm512_storeu_si512(p, _mm512_cvtps_epi32(a)); }

// Lane i of the result is made of all lanes of a[i]: halves of two vectors are laid side by side, four times.
template <class Join>
inline F across(const F* a, Join join) {
    F b[8], c[4], d[2];
    const auto pd = [](F x) { return _mm512_castps_pd(x); };
    const auto ps = [](__m512d x) { return _mm512_castpd_ps(x); };
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) b[i] = join(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        c[i] = join(ps(_mm512_unpacklo_pd(pd(b[2 * i]), pd(b[2 * i + 1]))), ps(_mm512_unpackhi_pd(pd(b[2 * i]), pd(b[2 * i + 1]))));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        d[i] = join(_mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0x88), _mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0xDD));
    return join(_mm512_shuffle_f32x4(d[0], d[1], 0x88), _mm512_shuffle_f32x4(d[0], d[1], 0xDD));
}
inline F greatest_each(const F* a) { return across(a, most); }
inline F sum_each(const F* a) { return across(a, add); }

// A group of 32 columns by 16 rows: part[j] has columns 4j .. 4j+3 of each row, as unsigned bytes in its lane.
struct Bytes {
    __m512i part[8];
};
inline void load_w4(const uint8_t* q, Bytes& w) {
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i both = _mm512_loadu_si512(q + 64 * j);
        w.part[j] = _mm512_and_si512(both, low);
        w.part[j + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
}
inline void load_w8(const uint8_t* q, Bytes& w) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) w.part[j] = _mm512_loadu_si512(q + 64 * j);
}
inline __m512i four(const int8_t* x) {
    int32_t v;
    __builtin_memcpy(&v, x, 4);
    return _mm512_set1_epi32(v);
}
template <int BY>
inline __m512i shifted(__m512i a) {  // left by BY, or right where BY is negative
    if (BY > 0) return _mm512_slli_epi16(a, BY > 0 ? BY : 0);
    if (BY < 0) return _mm512_srli_epi16(a, BY < 0 ? -BY : 0);
    return a;
}
template <int J>
inline void raise_one(__m512i high, Bytes& w) {
    w.part[J] = _mm512_or_si512(w.part[J], _mm512_and_si512(shifted<4 - J>(high), _mm512_set1_epi8(16)));
}
template <int J>
inline void raise_two(__m512i high, Bytes& w) {
    w.part[J] = _mm512_or_si512(w.part[J], _mm512_and_si512(shifted<4 - 2 * (J % 4)>(high), _mm512_set1_epi8(48)));
}
// The fifth bit of the numbers of piece j is bit j of `high`; the fifth and sixth are bits 2 (j % 4) of half j / 4.
inline void raise_one(const uint8_t* p, Bytes& w) {
    const __m512i high = _mm512_loadu_si512(p);
    raise_one<0>(high, w), raise_one<1>(high, w), raise_one<2>(high, w), raise_one<3>(high, w);
    raise_one<4>(high, w), raise_one<5>(high, w), raise_one<6>(high, w), raise_one<7>(high, w);
}
inline void raise_two(const uint8_t* p, Bytes& w) {
    const __m512i first = _mm512_loadu_si512(p), second = _mm512_loadu_si512(p + 64);
    raise_two<0>(first, w), raise_two<1>(first, w), raise_two<2>(first, w), raise_two<3>(first, w);
    raise_two<4>(second, w), raise_two<5>(second, w), raise_two<6>(second, w), raise_two<7>(second, w);
}
// Sums of N rows, side by side, over pieces FROM .. TO - 1; they begin at what stands at `start`.
template <int N, int FROM, int TO>
inline void dots(const Bytes& w, const int8_t* x, const int32_t* start, F* out) {
    __m512i a[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) a[i] = start ? _mm512_set1_epi32(start[i]) : _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = FROM; j < TO; j++)
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) a[i] = _mm512_dpbusd_epi32(a[i], w.part[j], four(x + 32 * i + 4 * j));
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) out[i] = _mm512_cvtepi32_ps(a[i]);
}
template <int N>
inline void dots_w4(const Bytes& w, const int8_t* x, F* out) { dots<N, 0, 8>(w, x, nullptr, out); }
template <int N>
inline void dots_w5(const Bytes& w, const int8_t* x, F* out) { dots<N, 0, 8>(w, x, nullptr, out); }
// Bytes are stored with 128 added, of which `excess` takes away what it adds.
template <int N>
inline void dots_w8(const Bytes& w, const int8_t* x, const int32_t* excess, F* out) { dots<N, 0, 8>(w, x, excess, out); }
// One half of the columns: pieces 4 half .. 4 half + 3 of numbers below 64; the sums begin at `start`.
template <int HALF, int N>
inline void dots_half(const Bytes& w, const int8_t* x, const int32_t* start, F* out) {
    dots<N, 4 * HALF, 4 * HALF + 4>(w, x, start, out);
}
inline F byte_of(const Bytes& w, int column) {
    __m512i part = _mm512_srl_epi32(w.part[column / 4], _mm_cvtsi32_si128(8 * (column % 4)));
    return _mm512_cvtepi32_ps(_mm512_and_si512(part, _mm512_set1_epi32(255)));
}

}  // namespace
