// Attention over bf16 keys and values, or bytes with scales, on tile registers.
//
// Sixteen rows look at sixteen positions at a time: scores = Q Kᵀ, sums = W V, queries and weights rounded to bf16, sums in
// fp32. A product wants what it sums over in pairs, so keys are kept two dimensions side by side and values two tokens
// (`HeadLayout::pair`):
//
//     K [head_dim / 2][block_size][2] │ V [block_size / 2][padded_dim][2]
//
// A tile of a block is read as it lies; one of bytes is made bf16 when the first rows come to it. One that is a branch of a
// tree, or of blocks that are no whole tiles, is put together first, as are values that end before their tile does: what
// lies there may be no number. A row of a product depends on its own row of queries or weights alone, and what it does not
// see has weight 0: it has the same bits when it is decoded, alone, and in any company.
#pragma once
#include "attention.h"
#include "vec_amx.h"

namespace {

constexpr int PITCH = SEGMENT + LANES;  // floats from one row of scores to the next, which must not share cache sets

// Tile registers. Scores and sums: up to four side by side.
enum { SUMS = 0, MORE_QUERIES = 3, QUERIES = 4, WEIGHTS = 5, KEYS = 6, VALUES = 7 };

// Where a tile's pairs begin, and how many bytes its rows are apart.
struct Pairs {
    const uint16_t* cells;
    size_t step;
};

// Whether the positions of [at, at + 16) that are before `end` lie side by side, in order.
inline bool in_order(const Attention& a, int at, int end) {
    return (a.head.pair == 2 || a.head.kind == OCT_I8) && a.head.block_size % LANES == 0 && least(at + LANES, end) <= a.trunk;
}

// Keys of positions [at, at + 16), those from `end` on of no account; dimensions beyond the head's, to `padded`, are 0.
// `tile` has room for what must be put together.
inline Pairs keys_of(const Attention& a, int at, int end, int padded, uint16_t* tile) {
    const HeadLayout& l = a.head;
    if (in_order(a, at, end)) {
        const uint16_t* keys = (const uint16_t*)(head_at(a, at) + l.keys) + at % l.block_size * 2;
        if (padded == l.head_dim) return {keys, size_t(l.block_size) * 4};
        for (int d = 0; d < padded; d += 2)
            store((float*)(tile + d * LANES), d < l.head_dim ? load((const float*)(keys + d * l.block_size)) : zero());
        return {tile, LANES * 4};
    }
    memset(tile, 0, size_t(padded) * LANES * 2);
    for (int i = 0; i < least(LANES, end - at); i++) {
        const int cell = cell_of(a, at + i);
        const uint16_t* keys = (const uint16_t*)(head_at(a, cell) + l.keys);
        for (int d = 0; d < l.head_dim; d++) tile[(d / 2 * LANES + i) * 2 + d % 2] = keys[l.key(cell % l.block_size, d)];
    }
    return {tile, LANES * 4};
}

// Values of positions [at, at + 16), zeros from `end` on.
inline Pairs values_of(const Attention& a, int at, int end, uint16_t* tile) {
    const HeadLayout& l = a.head;
    const size_t row = size_t(l.padded_dim) * 2;
    if (in_order(a, at, end)) {
        const uint16_t* values = (const uint16_t*)(head_at(a, at) + l.values) + size_t(at % l.block_size / 2) * row;
        if (at + LANES <= end) return {values, row * 2};
        for (int t = 0; t < LANES; t += 2) {
            const uint32_t kept = at + t + 1 < end ? 0xffffffffu : at + t < end ? 0xffffu : 0;
            for (int d = 0; d < l.padded_dim; d += LANES) {
                const size_t i = size_t(t / 2) * row + size_t(2 * d);
                _mm512_storeu_si512(tile + i, _mm512_and_si512(_mm512_loadu_si512(values + i), _mm512_set1_epi32(int(kept))));
            }
        }
        return {tile, row * 2};
    }
    memset(tile, 0, row * LANES);
    for (int i = 0; i < least(LANES, end - at); i++) {
        const int cell = cell_of(a, at + i);
        const uint16_t* values = (const uint16_t*)(head_at(a, cell) + l.values);
        for (int d = 0; d < l.head_dim; d++)
            tile[size_t(i / 2) * row + size_t(2 * d + i % 2)] = values[l.value(cell % l.block_size, d)];
    }
    return {tile, row * 2};
}

// Both as bf16, side by side; nearest, ties up.
inline void store_pairs(uint16_t* p, F even, F odd) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
    const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
    _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaau, low, high));
}

inline uint16_t from_byte(int8_t byte, float scale) {
    const float value = float(byte) * scale;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return uint16_t((bits + 0x8000) >> 16);
}

// The same of bytes, which are put together in `tile`.
inline void put_byte_keys(const Attention& a, int at, int end, int padded, uint16_t* tile) {
    const HeadLayout& l = a.head;
    if (in_order(a, at, end)) {
        const int slot = at % l.block_size;
        const float* scales = (const float*)head_at(a, at) + slot;
        const int8_t* keys = (const int8_t*)(head_at(a, at) + l.keys) + slot;
        const auto of = [&](int d, F scale) { return d < l.head_dim ? mul(load_i8(keys + d * l.block_size), scale) : zero(); };
        for (int group = 0; group < padded; group += GROUP) {
            const F scale = load(scales + group / GROUP * l.block_size);
            for (int d = group; d < group + GROUP; d += 2) store_pairs(tile + d * LANES, of(d, scale), of(d + 1, scale));
        }
        return;
    }
    memset(tile, 0, size_t(padded) * LANES * 2);
    for (int i = 0; i < least(LANES, end - at); i++) {
        const int cell = cell_of(a, at + i), slot = cell % l.block_size;
        const uint8_t* head = head_at(a, cell);
        for (int d = 0; d < l.head_dim; d++)
            tile[(d / 2 * LANES + i) * 2 + d % 2] =
                from_byte(((const int8_t*)(head + l.keys))[l.key(slot, d)], ((const float*)head)[d / GROUP * l.block_size + slot]);
    }
}

inline void put_byte_values(const Attention& a, int at, int end, uint16_t* tile) {
    const HeadLayout& l = a.head;
    const size_t row = size_t(l.padded_dim) * 2;
    if (in_order(a, at, end)) {
        const Values<OCT_I8> first = value_row<OCT_I8>(a, at);
        const int groups = (l.head_dim + GROUP - 1) / GROUP;
        const auto of = [&](int t, int d) {
            if (at + t >= end) return zero();
            return mul(load_i8(first.cells + t * l.padded_dim + d), set(first.scales[t * groups + d / GROUP]));
        };
        for (int t = 0; t < LANES; t += 2)
            for (int d = 0; d < l.padded_dim; d += LANES)
                store_pairs(tile + size_t(t / 2) * row + size_t(2 * d), of(t, d), of(t + 1, d));
        return;
    }
    memset(tile, 0, row * LANES);
    for (int i = 0; i < least(LANES, end - at); i++) {
        const Values<OCT_I8> value = value_row<OCT_I8>(a, at + i);
        for (int d = 0; d < l.head_dim; d++)
            tile[size_t(i / 2) * row + size_t(2 * d + i % 2)] = from_byte(value.cells[d], value.scales[d / GROUP]);
    }
}

// 2^t, within 8e-5, of which bf16 keeps none; a NaN stays one.
inline F power(F t) {
    const F f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF);
    F p = fma(f, set(7.8024334e-02f), set(2.2606776e-01f));
    p = fma(p, f, set(6.9583312e-01f));
    return _mm512_scalef_ps(fma(p, f, set(9.99925280e-01f)), t);
}

// The upper halves of what `half` rounds.
inline void store_upper(uint16_t* p, __m512i half) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(half, 16)));
}

// Nearest, ties to even; a NaN stays one.
inline __m512i rounded(F a) {
    const __m512i bits = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_mask_or_epi32(up, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
}

// Weights of N rows as bf16 in place of their scores of [from, end): of positions [first, seen), zeros beside them. Gives
// each row's greatest score and sum, `stride` apart. Rows take turns: alone, one would wait for its own last operation.
template <int N>
inline void weigh_tiles(float* scores, int from, int end, const int* first, const int* seen, float cap, const float* slopes,
                        float* told, int stride) {
    int latest = first[0], earliest = seen[0];  // every row sees all that is between them
    for (int r = 1; r < N; r++) latest = first[r] > latest ? first[r] : latest, earliest = least(seen[r], earliest);
    const auto there = [&](int r, int at) {
        const uint32_t before = first[r] - at >= LANES ? 0 : first[r] > at ? 0xffffu << (first[r] - at) : 0xffffu;
        return __mmask16(before & (seen[r] - at >= LANES ? 0xffffu : seen[r] > at ? (1u << (seen[r] - at)) - 1 : 0));
    };
    const auto rows = [](auto row) {
#pragma GCC unroll 4  // or what a row keeps would be in memory
        for (int r = 0; r < N; r++) row(r);
    };
    const auto each = [&](auto tile) {
        int at = from;
        const auto edge = [&](int r) { tile(r, scores + r * PITCH, at - from, there(r, at)); };
        for (; at < end && at < latest; at += LANES) rows(edge);
        for (; at < end && at + LANES <= earliest; at += LANES)
            rows([&](int r) { tile(r, scores + r * PITCH, at - from, __mmask16(0xffff)); });
        for (; at < end; at += LANES) rows(edge);
    };
    if (cap > 0) each([&](int, float* row, int at, __mmask16) { store(row + at, capped(load(row + at), cap)); });
    if (slopes)
        each([&](int r, float* row, int at, __mmask16) {
            store(row + at, lean(load(row + at), from + at, seen[r] - 1, slopes[r]));
        });
    F top[N], less[N], total[N];
    rows([&](int r) { top[r] = set(LOWEST), total[r] = zero(); });
    each([&](int r, const float* row, int at, __mmask16 kept) {
        top[r] = _mm512_mask_max_ps(top[r], kept, top[r], load(row + at));
    });
    rows([&](int r) {
        told[r * stride] = greatest(top[r]);
        less[r] = set(-1.44269504f * told[r * stride]);
    });
    each([&](int r, float* row, int at, __mmask16 kept) {
        const F weight = _mm512_maskz_mov_ps(kept, power(fma(load(row + at), set(1.44269504f), less[r])));
        total[r] = add(total[r], weight);
        store_upper((uint16_t*)row + at, _mm512_add_epi32(_mm512_castps_si512(weight), _mm512_set1_epi32(0x8000)));
    });
    rows([&](int r) { told[r * stride + 1] = sum(total[r]); });
}

// The tiles of one segment, [from, end), and the lines of memory that are read one after the other: its keys, its values,
// the keys that come next.
struct Segment {
    static constexpr int MOST = SEGMENT / LANES, AHEAD = 4;
    struct Lines {
        const void* at;
        int count;
        size_t step;
    };
    const Attention& a;
    const int padded;
    int from, end, tiles;
    Pairs keys[MOST], values[MOST];
    Lines lines[2 * MOST + AHEAD];
    uint16_t* const room;
    int keys_put = 0, values_put = 0;  // of bytes: how many tiles are bf16

    Segment(const Attention& of, int rows, const int* first, const int* seen, int segment, int width)
        : a(of), padded(width), from(first[0]), end(seen[0]), room((uint16_t*)of.tile) {
        for (int r = 1; r < rows; r++) {
            from = least(from, first[r]);
            end = seen[r] > end ? seen[r] : end;
        }
        from = from / LANES * LANES;
        if (from < segment * SEGMENT) from = segment * SEGMENT;
        end = least(end, (segment + 1) * SEGMENT);
        tiles = tiles_to(end);
        for (int i = 0; i < tiles; i++) {
            const int at = from + i * LANES;
            if (a.head.kind == OCT_I8) {
                keys[i] = {key_room(i), LANES * 4}, values[i] = {value_room(i), size_t(a.head.padded_dim) * 4};
                lines[i] = byte_keys(head_at(a, cell_of(a, at)) + a.head.keys + at % a.head.block_size);
                lines[tiles + i] = {value_row<OCT_I8>(a, at).cells, a.head.padded_dim * LANES / LINE, LINE};
                continue;
            }
            keys[i] = keys_of(a, at, end, padded, key_room(i));
            values[i] = values_of(a, at, end, value_room(i));
            lines[i] = {keys[i].cells, padded / 2, keys[i].step};
            lines[tiles + i] = {values[i].cells, a.head.padded_dim / 2, LINE};
        }
        for (int i = 0; i < AHEAD; i++) {
            const int at = end + i * LANES;
            if (a.head.kind == OCT_I8) {
                lines[2 * tiles + i] = byte_keys(next_keys<OCT_I8>(a, at, nullptr));
            } else {
                const auto* next = next_keys<OCT_BF16>(a, at, nullptr);
                lines[2 * tiles + i] = {next, next ? padded / 2 : 0, size_t(a.head.block_size) * 4};
            }
        }
    }
    int tiles_to(int last) const { return last > from ? (least(last, end) - from + LANES - 1) / LANES : 0; }
    // Of bytes: before anything reads keys or values of tile `i`.
    void put_keys(int i) {
        if (a.head.kind != OCT_I8 || i < keys_put) return;
        put_byte_keys(a, from + i * LANES, end, padded, key_room(i));
        keys_put = i + 1;
    }
    void put_values(int i) {
        if (a.head.kind != OCT_I8 || i < values_put) return;
        put_byte_values(a, from + i * LANES, end, value_room(i));
        values_put = i + 1;
    }
    // While tile `i` of all those is worked on, memory is asked for what comes so much later.
    void ask(int i) const {
        const Lines& next = lines[i + AHEAD];
        for (int n = 0; n < next.count; n++) __builtin_prefetch((const char*)next.at + size_t(n) * next.step);
    }

private:
    static constexpr int LINE = 64;
    uint16_t* key_room(int i) const { return room + size_t(2 * i * padded * LANES); }
    uint16_t* value_room(int i) const { return key_room(i) + padded * LANES; }
    Lines byte_keys(const void* at) const {
        const int size = a.head.block_size;
        return {at, at ? a.head.head_dim * least(size, LINE) / LINE : 0, size_t(size > LINE ? size : LINE)};
    }
};

template <int N>
inline void mix_one(const Pairs& values, int dim) {
    tile_load<VALUES>(values.cells + 2 * (dim + N * LANES), values.step);
    tile_dot_bf16<SUMS + N, WEIGHTS, VALUES>();
}

// N vectors of dimensions from `dim` on, of the first `count` tiles.
template <int N>
inline void mix_tiles(Segment& s, int count, bool ask, const float* weights, int dim, int stride, float* part) {
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (int i = 0; i < count; i++) {
        if (ask) s.ask(s.tiles + i);
        s.put_values(i);
        tile_load<WEIGHTS>((const uint16_t*)weights + i * LANES, PITCH * 4);
        mix_one<0>(s.values[i], dim);
        if (N > 1) mix_one<1>(s.values[i], dim);
        if (N > 2) mix_one<2>(s.values[i], dim);
        if (N > 3) mix_one<3>(s.values[i], dim);
    }
    const size_t step = size_t(stride) * 4;
    tile_store<0>(part + dim, step);
    if (N > 1) tile_store<1>(part + dim + LANES, step);
    if (N > 2) tile_store<2>(part + dim + 2 * LANES, step);
    if (N > 3) tile_store<3>(part + dim + 3 * LANES, step);
}

// At most 16 rows; queries as bf16 of `padded` dimensions. Up to two groups of them stay in registers.
void attend_tile(const Attention& a, Segment& s, const uint16_t* q, int padded, int rows, const int* first,
                 const int* seen, const float* slopes, bool ask, float* part) {
    const int dims = a.head.padded_dim, stride = dims + LANES;
    int last = seen[0];
    for (int r = 1; r < rows; r++) last = seen[r] > last ? seen[r] : last;
    const int count = s.tiles_to(last), end = least(last, s.end);
    const size_t pitch = size_t(padded) * 2;
    const bool held = padded <= 2 * GROUP;
    const auto load_keys = [&](const Pairs& keys, int d) {
        tile_load<KEYS>((const uint8_t*)keys.cells + size_t(d / 2) * keys.step, keys.step);
    };
    tile_load<QUERIES>(q, pitch);
    if (padded > GROUP) tile_load<MORE_QUERIES>(q + GROUP, pitch);
    for (int i = 0; i < count; i++) {
        if (ask) s.ask(i);
        s.put_keys(i);
        tile_zero<SUMS>();
        load_keys(s.keys[i], 0), tile_dot_bf16<SUMS, QUERIES, KEYS>();
        for (int d = GROUP; d < padded; d += GROUP) {
            if (!held) tile_load<MORE_QUERIES>(q + d, pitch);
            load_keys(s.keys[i], d), tile_dot_bf16<SUMS, MORE_QUERIES, KEYS>();
        }
        tile_store<SUMS>(a.scores + i * LANES, PITCH * 4);
    }
    for (int r = 0; r < rows; r += 4) {
        auto* weigh = weigh_tiles<4>;
        if (rows - r < 4) weigh = rows - r == 1 ? weigh_tiles<1> : rows - r == 2 ? weigh_tiles<2> : weigh_tiles<3>;
        weigh(a.scores + r * PITCH, s.from, end, first + r, seen + r, a.cap, slopes ? slopes + r : nullptr,
              part + r * stride + dims, stride);
    }
    int dim = 0;
    for (; dim + 4 * LANES <= dims; dim += 4 * LANES) mix_tiles<4>(s, count, ask && !dim, a.scores, dim, stride, part);
    for (; dim < dims; dim += LANES) mix_tiles<1>(s, count, ask && !dim, a.scores, dim, stride, part);
}

void attend_tiles(const Attention& a, const float* q, int rows, const int* first, const int* seen, int segment, float* part) {
    if (!a.head.tiles) return isa_avx512.attend(a, q, rows, first, seen, segment, part);
    const int dims = a.head.head_dim, padded = (dims + GROUP - 1) / GROUP * GROUP;
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < padded; d += LANES) {
            const int n = dims - d;
            const __mmask16 there = n >= LANES ? 0xffff : n > 0 ? __mmask16((1u << n) - 1) : 0;
            store_upper(a.queries + r * padded + d, rounded(_mm512_maskz_loadu_ps(there, q + r * dims + d)));
        }
    Segment s(a, rows, first, seen, segment, padded);
    for (int r = 0; r < rows; r += LANES) {
        const int n = least(LANES, rows - r);
        const TileShape floats = {n, LANES * 4}, keys = {LANES, LANES * 4}, values = {LANES / 2, LANES * 4};
        const Tiles tiles({floats, floats, floats, floats, {n, GROUP * 2}, {n, LANES * 2}, keys, values});
        attend_tile(a, s, a.queries + r * padded, padded, n, first + r, seen + r,
                    a.slopes ? a.slopes + r : nullptr, r == 0, part + r * (a.head.padded_dim + LANES));
    }
}

// A group of a head's numbers, n of them, as bytes, and their scale: what `to_bytes` gives.
inline float bytes_of(const float* x, int n, int8_t* out) {
    F part[2], top = zero();
    for (int i = 0; i < 2; i++) {
        const int left = n - i * LANES;
        const __mmask16 there = left >= LANES ? 0xffff : left > 0 ? __mmask16((1u << left) - 1) : 0;
        part[i] = _mm512_maskz_loadu_ps(there, x + i * LANES);
        top = _mm512_mask_max_ps(top, _mm512_cmp_ps_mask(part[i], part[i], _CMP_ORD_Q), top, magnitude(part[i]));
    }
    const float most = greatest(top), inverse = most > 0 ? 127.f / most : 0.f;
    for (int i = 0; i < 2; i++) store_i8(out + i * LANES, mul(part[i], set(inverse)));
    return most / 127.f;
}

void remember_bytes(const float* key, const float* value, const HeadLayout& l, int at, uint8_t* head) {
    const int size = l.block_size, groups = (l.head_dim + GROUP - 1) / GROUP;
    float *key_scales = (float*)head + at, *value_scales = (float*)(head + l.value_scales) + at * groups;
    int8_t *keys = (int8_t*)(head + l.keys) + at, *values = (int8_t*)(head + l.values) + at * l.padded_dim;
    for (int g = 0, d = 0; g < groups; g++, d += GROUP) {
        const int n = least(GROUP, l.head_dim - d);
        int8_t bytes[GROUP];
        key_scales[g * size] = bytes_of(key + d, n, bytes);
        for (int i = 0; i < n; i++) keys[(d + i) * size] = bytes[i];
        value_scales[g] = bytes_of(value + d, n, bytes);
        memcpy(values + d, bytes, size_t(n));
    }
}

void remember_pairs(const float* key, const float* value, const HeadLayout& l, int at, uint8_t* head) {
    if (l.kind == OCT_I8) return remember_bytes(key, value, l, at, head);
    if (l.pair != 2) return isa_avx512.remember(key, value, l, at, head);
    uint32_t* keys = (uint32_t*)(head + l.keys) + at;
    uint16_t* values = (uint16_t*)(head + l.values) + at / 2 * 2 * l.padded_dim;
    for (int d = 0; d < l.head_dim; d += LANES) {
        const int n = least(LANES, l.head_dim - d);
        const __mmask16 there = __mmask16((1u << n) - 1);
        alignas(32) uint16_t halves[LANES];
        store_upper(halves, rounded(_mm512_maskz_loadu_ps(there, key + d)));
        for (int i = 0; i < n / 2; i++) memcpy(keys + (d / 2 + i) * l.block_size, halves + 2 * i, 4);
        // The token's half of every pair: its neighbour's may be being written.
        const __m512i bits = rounded(_mm512_maskz_loadu_ps(there, value + d));
        const __mmask32 pairs = n == LANES ? 0xffffffffu : (1u << 2 * n) - 1;
        if (at % 2) _mm512_mask_storeu_epi16(values + 2 * d, pairs & 0xaaaaaaaau, bits);
        else _mm512_mask_storeu_epi16(values + 2 * d, pairs & 0x55555555u, _mm512_srli_epi32(bits, 16));
    }
}

}  // namespace
