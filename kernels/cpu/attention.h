// Attention of a few rows over the paged keys and values of one key head.
//
// Keys are stored dimension by dimension within a block, values token by token:
//
//     K [head_dim][block_size]   V [block_size][padded_dim]
//
// so that both products run lane by lane without sums across lanes. Keys are looked at in tiles of 16 positions
// whatever the block size is: a row's numbers do not depend on how its sequence is cut into blocks.
#pragma once
#include "rows.h"

namespace {

template <bool BF16>
struct Cell;
template <>
struct Cell<false> {
    typedef float T;
    static F get(const T* p) { return load(p); }
};
template <>
struct Cell<true> {
    typedef uint16_t T;
    static F get(const T* p) { return load_bf16(p); }
};

template <bool BF16>
inline const typename Cell<BF16>::T* head_of(const Attention& a, int position) {
    const uint8_t* block = a.pool + size_t(a.table[position / a.block_size]) * a.block_bytes;
    return (const typename Cell<BF16>::T*)(block + size_t(a.kv_head) * a.head_bytes);
}

// The keys of positions [at, at + 16), and the distance between dimensions; those from `end` on are of no account.
template <bool BF16>
inline const typename Cell<BF16>::T* key_tile(const Attention& a, int at, int end, int& step) {
    typedef typename Cell<BF16>::T T;
    if (a.block_size % LANES == 0) {
        step = a.block_size;
        return head_of<BF16>(a, at) + at % a.block_size;
    }
    T* tile = (T*)a.tile;
    step = LANES;
    for (int i = 0; i < LANES; i++) {
        const int position = at + i < end ? at + i : end - 1;
        const T* keys = head_of<BF16>(a, position) + position % a.block_size;
        for (int d = 0; d < a.head_dim; d++) tile[d * LANES + i] = keys[d * a.block_size];
    }
    return tile;
}

template <bool BF16>
inline const typename Cell<BF16>::T* value_row(const Attention& a, int position) {
    return head_of<BF16>(a, position) + a.head_dim * a.block_size + position % a.block_size * a.padded_dim;
}

template <bool BF16, int R>
void scores_of(const Attention& a, const float* q, int end) {
    for (int at = 0; at < end; at += LANES) {
        int step;
        const auto* keys = key_tile<BF16>(a, at, end, step);
        const int ahead = at + 4 * LANES;
        const auto* next = ahead < end ? head_of<BF16>(a, ahead) + ahead % a.block_size : keys;
        F s[R];
        for (int r = 0; r < R; r++) s[r] = zero();
        for (int d = 0; d < a.head_dim; d++) {
            __builtin_prefetch(next + d * step);
            F key = Cell<BF16>::get(keys + d * step);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) s[r] = fma(key, set(q[r * a.head_dim + d]), s[r]);
        }
        for (int r = 0; r < R; r++) store(a.scores + r * a.stride + at, s[r]);
    }
}

// Weights of the positions a row sees; zeros from there to `end` and on to its whole tile. Gives 1 / their sum.
inline float weigh(float* scores, int seen, int end) {
    F top = set(-3.4e38f);
    for (int at = 0; at < seen; at += LANES) {
        F s = load(scores + at);
        if (seen - at < LANES) s = keep_first(s, seen - at, set(-3.4e38f));
        top = most(top, s);
    }
    top = set(greatest(top));
    F total = zero();
    for (int at = 0; at < end; at += LANES) {
        F weight = exponential(sub(load(scores + at), top));
        if (seen - at < LANES) weight = keep_first(weight, seen > at ? seen - at : 0, zero());
        total = add(total, weight);
        store(scores + at, weight);
    }
    return 1.f / sum(total);
}

template <bool BF16, int R, int ND>
inline void mix(const Attention& a, int from, int end, const float* inverse, float* const* out) {
    F y[R][ND];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < ND; n++) y[r][n] = zero();
    for (int at = 0; at < end; at += LANES) {
        const int last = least(at + LANES, end);
        const bool whole = a.block_size % LANES == 0;
        const auto* values = value_row<BF16>(a, at) + from;
        const int ahead = at + 4 * LANES;
        const auto* next = ahead < end ? value_row<BF16>(a, ahead) + from : values;
        for (int t = at; t < last; t++) {
            const auto* v = whole ? values + (t - at) * a.padded_dim : value_row<BF16>(a, t) + from;
            prefetch(next + (whole ? (t - at) * a.padded_dim : 0), ND * LANES * int(sizeof *v));
            F value[ND];
#pragma GCC unroll 4
            for (int n = 0; n < ND; n++) value[n] = Cell<BF16>::get(v + n * LANES);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                F weight = set(a.scores[r * a.stride + t]);
#pragma GCC unroll 4
                for (int n = 0; n < ND; n++) y[r][n] = fma(weight, value[n], y[r][n]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < ND; n++) {
            F value = mul(y[r][n], set(inverse[r]));
            const int at = from + n * LANES;
            if (a.head_dim - at >= LANES) {
                store(out[r] + at, value);
            } else {
                float all[LANES];
                store(all, value);
                for (int i = at; i < a.head_dim; i++) out[r][i] = all[i - at];
            }
        }
}

template <bool BF16, int R>
void attend_rows(const Attention& a, const float* q, const int* seen, float* const* out) {
    int end = 0;
    for (int r = 0; r < R; r++) end = seen[r] > end ? seen[r] : end;
    scores_of<BF16, R>(a, q, end);
    float inverse[R];
    for (int r = 0; r < R; r++) inverse[r] = weigh(a.scores + r * a.stride, seen[r], end);
    constexpr int ND = R * 4 <= MOST_SUMS ? 4 : R * 2 <= MOST_SUMS ? 2 : 1;
    int from = 0;
    for (; from + ND * LANES <= a.padded_dim; from += ND * LANES) mix<BF16, R, ND>(a, from, end, inverse, out);
    for (; from < a.padded_dim; from += LANES) mix<BF16, R, 1>(a, from, end, inverse, out);
}

template <bool BF16>
void attend_all(const Attention& a, const float* q, int rows, const int* seen, float* const* out) {
    int r = 0;
    auto take = [&](int n) {
        const float* at = q + size_t(r) * a.head_dim;
        const int* s = seen + r;
        float* const* o = out + r;
        if (n == 1) attend_rows<BF16, 1>(a, at, s, o);
        if (n == 2) attend_rows<BF16, 2>(a, at, s, o);
        if (n == 3) attend_rows<BF16, 3>(a, at, s, o);
        if (n == 4) attend_rows<BF16, 4>(a, at, s, o);
        if (MOST_SUMS > 6 && n == 6) attend_rows<BF16, (MOST_SUMS > 6 ? 6 : 1)>(a, at, s, o);
        if (MOST_SUMS > 6 && n == 8) attend_rows<BF16, (MOST_SUMS > 6 ? 8 : 1)>(a, at, s, o);
        if (MOST_SUMS > 6 && n == 12) attend_rows<BF16, (MOST_SUMS > 6 ? 12 : 1)>(a, at, s, o);
        r += n;
    };
    while (r < rows) {
        const int left = rows - r;
        if (MOST_SUMS > 6 && left >= 6) take(left >= 12 ? 12 : left >= 8 ? 8 : 6);
        else take(left >= 4 ? 4 : left);
    }
}

void attend(const Attention& a, const float* q, int rows, const int* seen, float* const* out) {
    if (a.bf16) attend_all<true>(a, q, rows, seen, out);
    else attend_all<false>(a, q, rows, seen, out);
}

void rotate(const float* x, const float* cosines, const float* sines, int half, float scale, float* out) {
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        out[i] = (a * cosines[i] - b * sines[i]) * scale;
        out[i + half] = (b * cosines[i] + a * sines[i]) * scale;
    }
}

void remember(const float* key, const float* value, int head_dim, int padded_dim, int block_size, int at, bool bf16,
              uint8_t* head) {
    if (bf16) {
        uint16_t* k = (uint16_t*)head + at;
        uint16_t* v = (uint16_t*)head + head_dim * block_size + at * padded_dim;
        for (int d = 0; d < head_dim; d++) k[d * block_size] = to_bf16(key[d]);
        for (int d = 0; d < head_dim; d++) v[d] = to_bf16(value[d]);
    } else {
        float* k = (float*)head + at;
        float* v = (float*)head + head_dim * block_size + at * padded_dim;
        for (int d = 0; d < head_dim; d++) k[d * block_size] = key[d];
        for (int d = 0; d < head_dim; d++) v[d] = value[d];
    }
}

}  // namespace
