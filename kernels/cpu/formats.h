// Where the numbers of a packed matrix are: the one place that knows the layouts of `OctKind`.
//
// Floats lie column after column, 16 rows in each. Quantised kinds go in groups of 32 columns; within a group byte
// 4 r + c of the 64-byte piece j belongs to row r and column 4 j + c, or to columns 4 j + c (low half) and
// 4 (j + 4) + c (high half) where numbers have 4 bits. Fifth and sixth bits lie apart, a bit plane of all pieces j in
// the bits of one byte.
//
//     W4  group: q 256 │ d 16 fp16 │ m 16 fp16                          weight = d q + m
//     W5  group: q 256 │ bit four 64 │ d │ m                            weight = d q + m
//     W8  q 512 of every group, then d 16 fp16 of every group           weight = d (q - 128)
//     K4  8 groups: d 32 │ m 32 │ (scale 16, offset 16) · 8 │ q 256 · 8     weight = (d scale) q - m offset
//     K5  the same, each q followed by its bit four 64
//     K6  8 groups: d 32, 32 unused │ (scale of columns 0-15, of 16-31) · 8 │ (q 256 │ bits four and five 128) · 8
//                                                                       weight = (d scale) (q - 32)
#pragma once
#include "half.h"
#include "octavo.h"

namespace {

constexpr int GROUPS_IN_SUPER = 8;

constexpr bool is_float(int kind) { return kind <= OCT_BF16; }
constexpr bool is_super(int kind) { return kind == OCT_K4 || kind == OCT_K5 || kind == OCT_K6; }
constexpr int group_bytes(int kind) {
    return kind == OCT_W4 ? 320 : kind == OCT_W5 ? 384 : kind == OCT_W8 ? 512 : kind == OCT_K4 ? 256 : kind == OCT_K5 ? 320 : 384;
}
constexpr int super_bytes(int kind) { return 320 + GROUPS_IN_SUPER * group_bytes(kind); }

// One group of a block.
struct Place {
    uint8_t* q;
    uint8_t* high;
    uint16_t* d;  // 16 numbers each
    uint16_t* m;
    uint8_t* scales;  // 32 bytes
};

template <int KIND>
inline Place place_of(const uint8_t* data, int groups, int g) {
    uint8_t* block = const_cast<uint8_t*>(data);
    if (KIND == OCT_W8) {
        uint8_t* d = block + size_t(groups) * 512 + size_t(g) * 32;
        return {block + size_t(g) * 512, nullptr, (uint16_t*)d, nullptr, nullptr};
    }
    if (is_super(KIND)) {
        uint8_t* super = block + size_t(g / GROUPS_IN_SUPER) * super_bytes(KIND);
        const int i = g % GROUPS_IN_SUPER;
        uint8_t* q = super + 320 + i * group_bytes(KIND);
        return {q, q + 256, (uint16_t*)super, (uint16_t*)(super + 32), super + 64 + 32 * i};
    }
    uint8_t* q = block + size_t(g) * group_bytes(KIND);
    uint8_t* d = q + group_bytes(KIND) - 64;
    return {q, q + 256, (uint16_t*)d, (uint16_t*)(d + 32), nullptr};
}

// The number that stands at row r, column k of a group, without its scale.
template <int KIND>
inline int number_of(const Place& at, int r, int k) {
    const int piece = k / 4, byte = 4 * r + k % 4;
    if (KIND == OCT_W8) return at.q[64 * piece + byte];
    const int both = at.q[64 * (piece % 4) + byte], low = piece < 4 ? both & 15 : both >> 4;
    if (KIND == OCT_W5 || KIND == OCT_K5) return low | (at.high[byte] >> piece & 1) << 4;
    if (KIND == OCT_K6) return low | (at.high[64 * (piece / 4) + byte] >> 2 * (piece % 4) & 3) << 4;
    return low;
}

template <int KIND>
inline float weight_of(const Place& at, int r, int k) {
    const float q = float(number_of<KIND>(at, r, k)), d = from_f16(at.d[r]);
    if (KIND == OCT_W8) return d * (q - 128.f);
    if (KIND == OCT_K6) return d * float(int8_t(at.scales[k / 16 * 16 + r])) * (q - 32.f);
    if (is_super(KIND)) return d * float(at.scales[r]) * q - from_f16(at.m[r]) * float(at.scales[16 + r]);
    return d * q + from_f16(at.m[r]);
}

}  // namespace
