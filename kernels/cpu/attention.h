// Attention of a few rows over one segment of the paged keys and values of one key head.
//
// Keys are stored dimension by dimension within a block, values token by token, so that both products run lane by
// lane without sums across lanes:
//
//     [key scales][value scales] K [head_dim][block_size] │ V [block_size][padded_dim]     see `HeadLayout`
//
// A row's weighted sum is that of its segments, put together one after the other (Milakov and Gimelshein, Online
// normalizer calculation for softmax, 2018). Segments and the tiles of 16 positions within them begin at fixed
// positions: a row's bits depend on what it sees and not on blocks, on rows beside it, or on who computes a segment.
#pragma once
#include "rows.h"

namespace {

template <int KIND>
struct Cell;
template <>
struct Cell<OCT_F32> {
    typedef float T;
    static F get(const T* p) { return load(p); }
};
template <>
struct Cell<OCT_BF16> {
    typedef uint16_t T;
    static F get(const T* p) { return load_bf16(p); }
};
template <>
struct Cell<OCT_I8> {
    typedef int8_t T;
    static F get(const T* p) { return load_i8(p); }
};

constexpr float LOWEST = -3.4e38f;

inline int cell_of(const Attention& a, int position) { return position < a.trunk ? position : a.cells[position - a.trunk]; }

inline const uint8_t* head_at(const Attention& a, int cell) {
    return a.pool + size_t(a.table[cell / a.head.block_size]) * a.block_bytes + size_t(a.kv_head) * a.head.bytes;
}

// Memory is asked for what comes so much later: tiles of this segment, after its last keys its first values, after its
// last values the next keys, of the next segment or, as heads of a sequence are taken one after the other, of the next head.
constexpr int POSITIONS_AHEAD = 4 * LANES;

// Keys `at` or, beyond the end, those of the next head; `none` if there are none.
template <int KIND>
inline const typename Cell<KIND>::T* next_keys(const Attention& a, int at, const typename Cell<KIND>::T* none) {
    typedef const typename Cell<KIND>::T T;
    if (at < a.end) return (T*)(head_at(a, cell_of(a, at)) + a.head.keys);
    at += a.from - a.end;
    const bool more = at < a.end && size_t(a.kv_head + 1) * a.head.bytes < a.block_bytes;
    return more ? (T*)(head_at(a, cell_of(a, at)) + a.head.bytes + a.head.keys) : none;
}

// Keys of positions [at, at + 16) and the distance between dimensions, their scales and the distance between groups.
template <int KIND>
struct Keys {
    const typename Cell<KIND>::T* cells;
    const float* scales;
    int step;
};

// Positions from `end` on are of no account.
template <int KIND>
inline Keys<KIND> key_tile(const Attention& a, int at, int end) {
    typedef typename Cell<KIND>::T T;
    const HeadLayout& l = a.head;
    if (l.block_size % LANES == 0 && least(at + LANES, end) <= a.trunk) {
        const uint8_t* head = head_at(a, at);
        return {(const T*)(head + l.keys) + at % l.block_size, (const float*)head + at % l.block_size, l.block_size};
    }
    T* tile = (T*)a.tile;
    float* scales = (float*)(a.tile + size_t(l.head_dim) * LANES * sizeof(float));
    for (int i = 0; i < LANES; i++) {
        const int cell = cell_of(a, at + i < end ? at + i : end - 1), slot = cell % l.block_size;
        const uint8_t* head = head_at(a, cell);
        const T* keys = (const T*)(head + l.keys) + slot;
        for (int d = 0; d < l.head_dim; d++) tile[d * LANES + i] = keys[d * l.block_size];
        if (KIND == OCT_I8)
            for (int g = 0; g * GROUP < l.head_dim; g++) scales[g * LANES + i] = ((const float*)head)[g * l.block_size + slot];
    }
    return {tile, scales, LANES};
}

template <int KIND>
struct Values {
    const typename Cell<KIND>::T* cells;
    const float* scales;
};

template <int KIND>
inline Values<KIND> value_row(const Attention& a, int position) {
    const HeadLayout& l = a.head;
    const int cell = cell_of(a, position), slot = cell % l.block_size;
    const uint8_t* head = head_at(a, cell);
    return {(const typename Cell<KIND>::T*)(head + l.values) + slot * l.padded_dim,
            (const float*)(head + l.value_scales) + slot * ((l.head_dim + GROUP - 1) / GROUP)};
}

template <int KIND, int R>
void scores_of(const Attention& a, const float* q, int from, int end) {
    const int dims = a.head.head_dim;
    for (int at = from; at < end; at += LANES) {
        const Keys<KIND> keys = key_tile<KIND>(a, at, end);
        const int ahead = at + POSITIONS_AHEAD, after = from + (ahead - end + LANES - 1) / LANES * LANES;
        const auto* next = ahead < end   ? (const typename Cell<KIND>::T*)(head_at(a, cell_of(a, ahead)) + a.head.keys)
                           : after < end ? value_row<KIND>(a, after).cells
                                         : keys.cells;
        F s[R];
        for (int r = 0; r < R; r++) s[r] = zero();
        if (KIND == OCT_I8) {
            for (int d = 0; d < dims; d += GROUP) {
                F part[R];
                for (int r = 0; r < R; r++) part[r] = zero();
                for (int i = d; i < least(d + GROUP, dims); i++) {
                    if (i % 4 == 0) __builtin_prefetch(next + i * keys.step);
                    F key = Cell<KIND>::get(keys.cells + i * keys.step);
#pragma GCC unroll 12
                    for (int r = 0; r < R; r++) part[r] = fma(key, set(q[r * dims + i]), part[r]);
                }
                F scale = load(keys.scales + d / GROUP * keys.step);
                for (int r = 0; r < R; r++) s[r] = fma(part[r], scale, s[r]);
            }
        } else {
            for (int d = 0; d < dims; d++) {
                __builtin_prefetch(next + d * keys.step);
                F key = Cell<KIND>::get(keys.cells + d * keys.step);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) s[r] = fma(key, set(q[r * dims + d]), s[r]);
            }
        }
        for (int r = 0; r < R; r++) {
            if (a.cap > 0) s[r] = capped(s[r], a.cap);
            store(a.scores + r * SEGMENT + at % SEGMENT, s[r]);
        }
    }
}

// Less `slope` for each position from a key at [at, at + 16) to the query (ALiBi: Press et al., arXiv 2108.12409).
inline F lean(F scores, int at, int position, float slope) {
    static constexpr float STEPS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return fma(add(set(float(at - position)), load(STEPS)), set(slope), scores);
}

// Weights of positions [first, seen), zeros beside them to whole tiles of [from, end). Gives greatest score and sum.
inline void weigh(float* scores, int from, int end, int first, int seen, float& greatest_score, float& sum_of_weights) {
    scores -= from - from % SEGMENT;
    const auto kept = [&](F s, int at, F other) {
        if (seen - at < LANES) s = keep_first(s, seen > at ? seen - at : 0, other);
        if (first > at) s = keep_first(other, first - at < LANES ? first - at : LANES, s);
        return s;
    };
    F top = set(LOWEST);
    for (int at = from; at < end; at += LANES) top = most(top, kept(load(scores + at), at, set(LOWEST)));
    greatest_score = greatest(top);
    top = set(greatest_score);
    F total = zero();
    for (int at = from; at < end; at += LANES) {
        F weight = kept(exponential(sub(load(scores + at), top)), at, zero());
        total = add(total, weight);
        store(scores + at, weight);
    }
    sum_of_weights = sum(total);
}

template <int KIND, int R, int ND>
inline void mix(const Attention& a, int dim, int from, int end, float* part) {
    const int padded = a.head.padded_dim, groups = (a.head.head_dim + GROUP - 1) / GROUP;
    const bool aligned = a.head.block_size % LANES == 0;
    F y[R][ND];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < ND; n++) y[r][n] = zero();
    for (int at = from; at < end; at += LANES) {
        const int last = least(at + LANES, end), ahead = at + POSITIONS_AHEAD;
        const bool whole = aligned && last <= a.trunk;
        const Values<KIND> tile = value_row<KIND>(a, at);
        const auto* next = (ahead < end ? value_row<KIND>(a, ahead).cells : next_keys<KIND>(a, ahead, tile.cells)) + dim;
        for (int t = at; t < last; t++) {
            const Values<KIND> row = whole ? Values<KIND>{tile.cells + (t - at) * padded, tile.scales + (t - at) * groups}
                                           : value_row<KIND>(a, t);
            prefetch(next + (whole ? (t - at) * padded : 0), ND * LANES * int(sizeof *row.cells));
            F value[ND];
#pragma GCC unroll 4
            for (int n = 0; n < ND; n++) {
                value[n] = Cell<KIND>::get(row.cells + dim + n * LANES);
                if (KIND == OCT_I8) value[n] = mul(value[n], set(row.scales[(dim + n * LANES) / GROUP]));
            }
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                F weight = set(a.scores[r * SEGMENT + t % SEGMENT]);
#pragma GCC unroll 4
                for (int n = 0; n < ND; n++) y[r][n] = fma(weight, value[n], y[r][n]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < ND; n++) store(part + r * (padded + LANES) + dim + n * LANES, y[r][n]);
}

template <int KIND, int R>
void attend_rows(const Attention& a, const float* q, const int* first, const int* seen, const float* slopes, int segment,
                 float* part) {
    const int padded = a.head.padded_dim, stride = padded + LANES;
    int from = first[0], end = seen[0];
    for (int r = 1; r < R; r++) {
        from = first[r] < from ? first[r] : from;
        end = seen[r] > end ? seen[r] : end;
    }
    from = from / LANES * LANES;
    if (from < segment * SEGMENT) from = segment * SEGMENT;
    end = least(end, (segment + 1) * SEGMENT);
    scores_of<KIND, R>(a, q, from, end);
    for (int r = 0; r < R; r++) {
        float* scores = a.scores + r * SEGMENT;
        for (int at = from; slopes && at < end; at += LANES) {
            float* tile = scores + at % SEGMENT;
            store(tile, lean(load(tile), at, seen[r] - 1, slopes[r]));
        }
        weigh(scores, from, end, first[r], seen[r], part[r * stride + padded], part[r * stride + padded + 1]);
    }
    constexpr int ND = R * 4 <= MOST_SUMS ? 4 : R * 2 <= MOST_SUMS ? 2 : 1;
    int dim = 0;
    for (; dim + ND * LANES <= padded; dim += ND * LANES) mix<KIND, R, ND>(a, dim, from, end, part);
    for (; dim < padded; dim += LANES) mix<KIND, R, 1>(a, dim, from, end, part);
}

template <int KIND>
void attend_all(const Attention& a, const float* q, int rows, const int* first, const int* seen, int segment, float* part) {
    int r = 0;
    auto take = [&](int n) {
        const float* at = q + size_t(r) * a.head.head_dim;
        float* to = part + size_t(r) * (a.head.padded_dim + LANES);
        const int *f = first + r, *s = seen + r;
        const float* slopes = a.slopes ? a.slopes + r : nullptr;
        if (n == 1) attend_rows<KIND, 1>(a, at, f, s, slopes, segment, to);
        if (n == 2) attend_rows<KIND, 2>(a, at, f, s, slopes, segment, to);
        if (n == 3) attend_rows<KIND, 3>(a, at, f, s, slopes, segment, to);
        if (n == 4) attend_rows<KIND, 4>(a, at, f, s, slopes, segment, to);
        if (MOST_SUMS > 6 && n == 6) attend_rows<KIND, (MOST_SUMS > 6 ? 6 : 1)>(a, at, f, s, slopes, segment, to);
        if (MOST_SUMS > 6 && n == 8) attend_rows<KIND, (MOST_SUMS > 6 ? 8 : 1)>(a, at, f, s, slopes, segment, to);
        if (MOST_SUMS > 6 && n == 12) attend_rows<KIND, (MOST_SUMS > 6 ? 12 : 1)>(a, at, f, s, slopes, segment, to);
        r += n;
    };
    while (r < rows) {
        const int left = rows - r;
        if (MOST_SUMS > 6 && left >= 6) take(left >= 12 ? 12 : left >= 8 ? 8 : 6);
        else take(left >= 4 ? 4 : left);
    }
}

void attend(const Attention& a, const float* q, int rows, const int* first, const int* seen, int segment, float* part) {
    if (a.head.kind == OCT_BF16) attend_all<OCT_BF16>(a, q, rows, first, seen, segment, part);
    else if (a.head.kind == OCT_I8) attend_all<OCT_I8>(a, q, rows, first, seen, segment, part);
    else attend_all<OCT_F32>(a, q, rows, first, seen, segment, part);
}

// A part that nothing is seen of has weights of sum 0 and changes no bit.
void merge(const float* part, int padded, int rows, float* into) {
    const int stride = padded + LANES;
    for (int from = 0; from < rows; from += LANES, part += LANES * stride, into += LANES * stride) {
        const int n = least(LANES, rows - from);
        float tops[2][LANES] = {}, sums[2][LANES] = {}, factors[2][LANES];  // there and added; lanes are rows
        for (int r = 0; r < n; r++) {
            tops[0][r] = into[r * stride + padded], sums[0][r] = into[r * stride + padded + 1];
            tops[1][r] = part[r * stride + padded], sums[1][r] = part[r * stride + padded + 1];
        }
        const F top = most(load(tops[1]), load(tops[0]));
        const F ours = exponential(sub(load(tops[0]), top)), theirs = exponential(sub(load(tops[1]), top));
        store(tops[0], top);
        store(sums[0], fma(load(sums[1]), theirs, mul(load(sums[0]), ours)));
        store(factors[0], ours);
        store(factors[1], theirs);
        for (int r = 0; r < n; r++) {
            float* to = into + r * stride;
            const float* of = part + r * stride;
            for (int i = 0; i < padded; i += LANES)
                store(to + i, fma(load(of + i), set(factors[1][r]), mul(load(to + i), set(factors[0][r]))));
            to[padded] = tops[0][r], to[padded + 1] = sums[0][r];
        }
    }
}

void finish(const float* part, int head_dim, int padded, float* out) {
    const F inverse = set(1.f / part[padded + 1]);
    for (int at = 0; at < padded; at += LANES) {
        const F value = mul(load(part + at), inverse);
        if (head_dim - at >= LANES) {
            store(out + at, value);
        } else {
            float all[LANES];
            store(all, value);
            for (int i = at; i < head_dim; i++) out[i] = all[i - at];
        }
    }
}

void rotate(const float* x, const float* cosines, const float* sines, int half, int head_dim, float scale, float* out) {
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        out[i] = (a * cosines[i] - b * sines[i]) * scale;
        out[i + half] = (b * cosines[i] + a * sines[i]) * scale;
    }
    for (int i = 2 * half; i < head_dim; i++) out[i] = x[i] * scale;
}

// A group's numbers as bytes, `step` apart, and their scale.
inline float to_bytes(const float* x, int n, int step, int8_t* out) {
    float top = 0;
    for (int i = 0; i < n; i++) top = __builtin_fabsf(x[i]) > top ? __builtin_fabsf(x[i]) : top;
    const float inverse = top > 0 ? 127.f / top : 0.f;
    for (int i = 0; i < n; i++) {
        const float q = __builtin_nearbyintf(x[i] * inverse);
        out[i * step] = int8_t(q == q ? q : 0);
    }
    return top / 127.f;
}

void remember(const float* key, const float* value, const HeadLayout& l, int at, uint8_t* head) {
    const int dims = l.head_dim, size = l.block_size;
    uint8_t *keys = head + l.keys, *values = head + l.values;
    if (l.kind == OCT_BF16) {
        uint16_t *k = (uint16_t*)keys + at, *v = (uint16_t*)values + at * l.padded_dim;
        for (int d = 0; d < dims; d++) k[d * size] = to_bf16(key[d]);
        for (int d = 0; d < dims; d++) v[d] = to_bf16(value[d]);
    } else if (l.kind == OCT_I8) {
        const int groups = (dims + GROUP - 1) / GROUP;
        float *k = (float*)head + at, *v = (float*)(head + l.value_scales) + at * groups;
        for (int g = 0; g < groups; g++) {
            const int d = g * GROUP, n = least(GROUP, dims - d);
            k[g * size] = to_bytes(key + d, n, size, (int8_t*)keys + d * size + at);
            v[g] = to_bytes(value + d, n, 1, (int8_t*)values + at * l.padded_dim + d);
        }
    } else {
        float *k = (float*)keys + at, *v = (float*)values + at * l.padded_dim;
        for (int d = 0; d < dims; d++) k[d * size] = key[d];
        for (int d = 0; d < dims; d++) v[d] = value[d];
    }
}

}  // namespace
