// Packing: rows as a file stores them into blocks of 16 rows, see `OctKind`.
#include <type_traits>

#include "formats.h"
#include "isa.h"

using namespace octavo;

namespace {

uint16_t half_at(const uint8_t* p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return h;
}

struct Source {
    int columns, bytes;  // of one of its units
};

Source source_of(int32_t kind) {
    switch (kind) {
        case OCT_SRC_F32: return {1, 4};
        case OCT_SRC_F16: case OCT_SRC_BF16: return {1, 2};
        case OCT_SRC_Q4_0: return {GROUP, 18};
        case OCT_SRC_Q4_1: return {GROUP, 20};
        case OCT_SRC_Q5_0: return {GROUP, 22};
        case OCT_SRC_Q5_1: return {GROUP, 24};
        case OCT_SRC_Q8_0: return {GROUP, 34};
        case OCT_SRC_Q4_K: return {256, 144};
        case OCT_SRC_Q5_K: return {256, 176};
        case OCT_SRC_Q6_K: return {256, 210};
        default: return {1, 0};
    }
}

bool floats(int32_t source) { return source == OCT_SRC_F32 || source == OCT_SRC_F16 || source == OCT_SRC_BF16; }

bool possible(int32_t kind, int32_t source) {
    switch (kind) {
        case OCT_F32: return floats(source);
        case OCT_F16: return source == OCT_SRC_F16 || source == OCT_SRC_F32;
        case OCT_BF16: return source == OCT_SRC_BF16 || source == OCT_SRC_F32;
        case OCT_W4: return source == OCT_SRC_Q4_0 || source == OCT_SRC_Q4_1 || floats(source);
        case OCT_W5: return source == OCT_SRC_Q5_0 || source == OCT_SRC_Q5_1;
        case OCT_W8: return source == OCT_SRC_Q8_0 || floats(source);
        case OCT_K4: return source == OCT_SRC_Q4_K;
        case OCT_K5: return source == OCT_SRC_Q5_K;
        case OCT_K6: return source == OCT_SRC_Q6_K;
        default: return false;
    }
}

float number(int32_t source, const uint8_t* row, int k) {
    if (source == OCT_SRC_F32) {
        float f;
        memcpy(&f, row + 4 * size_t(k), 4);
        return f;
    }
    const uint16_t h = half_at(row + 2 * size_t(k));
    return source == OCT_SRC_F16 ? from_f16(h) : from_bf16(h);
}

void fill_float(const OctMatrix& w, int32_t source, const uint8_t* row, uint8_t* block, int r) {
    for (int k = 0; k < w.cols; k++) {
        const size_t at = size_t(k) * LANES + size_t(r);
        const float f = number(source, row, k);
        if (w.kind == OCT_F32) ((float*)block)[at] = f;
        else if (w.kind == OCT_F16) ((uint16_t*)block)[at] = source == OCT_SRC_F16 ? half_at(row + 2 * size_t(k)) : to_f16(f);
        else ((uint16_t*)block)[at] = source == OCT_SRC_BF16 ? half_at(row + 2 * size_t(k)) : to_bf16(f);
    }
}

template <int KIND>
void put(const Place& at, int r, const uint8_t* numbers) {
    for (int k = 0; k < GROUP; k++) {
        const int piece = k / 4, byte = 4 * r + k % 4, q = numbers[k];
        if (KIND == OCT_W8) {
            at.q[64 * piece + byte] = uint8_t(q);
            continue;
        }
        at.q[64 * (piece % 4) + byte] |= uint8_t((q & 15) << (piece < 4 ? 0 : 4));
        if (KIND == OCT_W5 || KIND == OCT_K5) at.high[byte] |= uint8_t((q >> 4) << piece);
        if (KIND == OCT_K6) at.high[64 * (piece / 4) + byte] |= uint8_t((q >> 4) << 2 * (piece % 4));
    }
}

// 32-column units of GGUF: columns i and i + 16 share a byte, a fifth bit is one of 32.
void unpack(int32_t source, const uint8_t* p, uint16_t& d, uint16_t& m, uint8_t* numbers) {
    const bool offset = source == OCT_SRC_Q4_1 || source == OCT_SRC_Q5_1, five = source == OCT_SRC_Q5_0 || source == OCT_SRC_Q5_1;
    d = half_at(p);
    m = offset ? half_at(p + 2) : to_f16((five ? -16 : -8) * from_f16(d));
    p += offset ? 4 : 2;
    uint32_t bits = 0;
    if (five) {
        memcpy(&bits, p, 4);
        p += 4;
    }
    for (int i = 0; i < 16; i++) {
        numbers[i] = uint8_t((p[i] & 15) | (bits >> i & 1) << 4);
        numbers[i + 16] = uint8_t(p[i] >> 4 | (bits >> (i + 16) & 1) << 4);
    }
}

// Least-squares line through what the numbers stand for, after a first one from the least to the greatest.
void four_bits(const float* x, uint16_t& d, uint16_t& m, uint8_t* numbers) {
    float low = x[0], high = x[0];
    for (int k = 1; k < GROUP; k++) {
        low = x[k] < low ? x[k] : low;
        high = x[k] > high ? x[k] : high;
    }
    float step = (high - low) / 15.f, offset = low;
    for (int round = 0;; round++) {
        d = to_f16(step);
        m = to_f16(offset);
        const float scale = from_f16(d), start = from_f16(m), inverse = scale > 0 ? 1.f / scale : 0.f;
        float n = 0, nn = 0, nx = 0, sum = 0;
        for (int k = 0; k < GROUP; k++) {
            float q = __builtin_nearbyintf((x[k] - start) * inverse);
            q = q > 15 ? 15 : q > 0 ? q : 0;
            numbers[k] = uint8_t(q);
            n += q;
            nn += q * q;
            nx += q * x[k];
            sum += x[k];
        }
        const float spread = GROUP * nn - n * n;
        if (round == 1 || spread <= 0) return;
        step = (GROUP * nx - n * sum) / spread;
        offset = (sum - step * n) / GROUP;
    }
}

void eight_bits(const float* x, uint16_t& d, uint8_t* numbers) {
    float top = 0;
    for (int k = 0; k < GROUP; k++) top = __builtin_fabsf(x[k]) > top ? __builtin_fabsf(x[k]) : top;
    d = to_f16(top / 127.f);
    const float scale = from_f16(d), inverse = scale > 0 ? 1.f / scale : 0.f;
    for (int k = 0; k < GROUP; k++) {
        const float q = __builtin_nearbyintf(x[k] * inverse);
        numbers[k] = uint8_t(int(q > 127 ? 127 : q > -127 ? q : -127) + 128);
    }
}

template <int KIND>
void fill_groups(const OctMatrix& w, int32_t source, const uint8_t* row, uint8_t* block, int r) {
    const int groups = w.cols / GROUP;
    for (int g = 0; g < groups; g++) {
        const Place at = place_of<KIND>(block, groups, g);
        uint16_t d = 0, m = 0;
        uint8_t numbers[GROUP];
        if (floats(source)) {
            float x[GROUP];
            for (int k = 0; k < GROUP; k++) x[k] = number(source, row, g * GROUP + k);
            if (KIND == OCT_W8) eight_bits(x, d, numbers);
            else four_bits(x, d, m, numbers);
        } else if (KIND == OCT_W8) {
            const uint8_t* unit = row + size_t(g) * 34;
            d = half_at(unit);
            for (int k = 0; k < GROUP; k++) numbers[k] = uint8_t(int(int8_t(unit[2 + k])) + 128);
        } else {
            unpack(source, row + size_t(g) * size_t(source_of(source).bytes), d, m, numbers);
        }
        at.d[r] = d;
        if (KIND != OCT_W8) at.m[r] = m;
        put<KIND>(at, r, numbers);
    }
}

// Q4_K and Q5_K: 256 columns share d and m; each 32 of them have a 6-bit scale and offset, of which the last four
// keep their upper two bits in the first eight bytes.
template <int KIND>
void fill_super(const OctMatrix& w, const uint8_t* row, uint8_t* block, int r) {
    const bool five = KIND == OCT_K5;
    for (int g = 0; g < w.cols / GROUP; g++) {
        const uint8_t *unit = row + size_t(g / 8) * (five ? 176 : 144), *packed = unit + 4, *high = unit + 16;
        const int i = g % 8;
        const uint8_t* q = unit + (five ? 48 : 16) + i / 2 * 32;
        const Place at = place_of<KIND>(block, w.cols / GROUP, g);
        at.d[r] = half_at(unit);
        at.m[r] = half_at(unit + 2);
        at.scales[r] = i < 4 ? packed[i] & 63 : uint8_t((packed[i + 4] & 15) | packed[i - 4] >> 6 << 4);
        at.scales[16 + r] = i < 4 ? packed[i + 4] & 63 : uint8_t(packed[i + 4] >> 4 | packed[i] >> 6 << 4);
        uint8_t numbers[GROUP];
        for (int k = 0; k < GROUP; k++)
            numbers[k] = uint8_t((i % 2 ? q[k] >> 4 : q[k] & 15) | (five ? (high[k] >> i & 1) << 4 : 0));
        put<KIND>(at, r, numbers);
    }
}

// Q6_K: 256 columns share d; each 16 have an 8-bit scale. Halves of 128 columns keep columns l and l + 64 in one byte.
void fill_six(const OctMatrix& w, const uint8_t* row, uint8_t* block, int r) {
    for (int g = 0; g < w.cols / GROUP; g++) {
        const uint8_t* unit = row + size_t(g / 8) * 210;
        const int half = g % 8 / 4, quarter = g % 4;
        const uint8_t *low = unit + 64 * half + 32 * (quarter % 2), *high = unit + 128 + 32 * half;
        const Place at = place_of<OCT_K6>(block, w.cols / GROUP, g);
        at.d[r] = half_at(unit + 208);
        for (int i = 0; i < 2; i++) at.scales[16 * i + r] = unit[192 + 2 * (g % 8) + i];
        uint8_t numbers[GROUP];
        for (int k = 0; k < GROUP; k++)
            numbers[k] = uint8_t((quarter < 2 ? low[k] & 15 : low[k] >> 4) | (high[k] >> 2 * quarter & 3) << 4);
        put<OCT_K6>(at, r, numbers);
    }
}

bool finite_half(uint16_t h) { return (h & 0x7c00) != 0x7c00; }

template <int KIND>
bool finite_scales(const OctMatrix& w, const uint8_t* block, int r) {
    bool all = true;
    for (int g = 0; g < w.cols / GROUP; g++) {
        const Place at = place_of<KIND>(block, w.cols / GROUP, g);
        all = all && finite_half(at.d[r]) && (!at.m || finite_half(at.m[r]));
    }
    return all;
}

bool finite_floats(int32_t source, const uint8_t* row, int cols) {
    float check = 0;
    for (int k = 0; k < cols; k++) check += 0 * number(source, row, k);
    return check == 0;
}

}  // namespace

OCT_API int32_t oct_matrix_shape(OctMatrix* w, int32_t kind, int32_t rows, int32_t cols) {
    const int whole = kind < OCT_F32 || kind > OCT_K6 ? 0 : is_float(kind) ? 1 : is_super(kind) ? 256 : GROUP;
    if (!whole || rows < 1 || cols < 1 || cols % whole) return -1;
    const size_t groups = size_t(cols) / GROUP;
    w->kind = kind;
    w->rows = rows;
    w->cols = cols;
    w->blocks = (rows + LANES - 1) / LANES;
    w->block_bytes = is_float(kind)   ? size_t(cols) * LANES * (kind == OCT_F32 ? 4 : 2)
                     : is_super(kind) ? groups / GROUPS_IN_SUPER * size_t(super_bytes(kind))
                     : kind == OCT_W8 ? (groups * (512 + 32) + 63) / 64 * 64
                                      : groups * size_t(group_bytes(kind));
    return 0;
}

OCT_API int32_t oct_matrix_fill(const OctMatrix* w, int32_t source_kind, const uint8_t* source, int32_t count,
                                const int32_t* source_rows, const int32_t* target_rows) {
    if (!possible(w->kind, source_kind)) return -1;
    for (int32_t i = 0; i < count; i++)
        if (target_rows[i] < 0 || target_rows[i] >= w->rows) return -2;
    const Source unit = source_of(source_kind);
    const size_t bytes = size_t(w->cols) / size_t(unit.columns) * size_t(unit.bytes);
    for (int32_t i = 0; i < count; i++) {
        const uint8_t* row = source + size_t(source_rows[i]) * bytes;
        uint8_t* block = w->data + size_t(target_rows[i] / LANES) * w->block_bytes;
        const int r = target_rows[i] % LANES;
        const auto groups = [&](auto kind) {
            constexpr int KIND = decltype(kind)::value;
            if constexpr (KIND == OCT_K6) fill_six(*w, row, block, r);
            else if constexpr (is_super(KIND)) fill_super<KIND>(*w, row, block, r);
            else fill_groups<KIND>(*w, source_kind, row, block, r);
            return finite_scales<KIND>(*w, block, r);
        };
        bool finite = !floats(source_kind) || finite_floats(source_kind, row, w->cols);
        if (finite) switch (w->kind) {
            case OCT_W4: finite = groups(std::integral_constant<int, OCT_W4>()); break;
            case OCT_W5: finite = groups(std::integral_constant<int, OCT_W5>()); break;
            case OCT_W8: finite = groups(std::integral_constant<int, OCT_W8>()); break;
            case OCT_K4: finite = groups(std::integral_constant<int, OCT_K4>()); break;
            case OCT_K5: finite = groups(std::integral_constant<int, OCT_K5>()); break;
            case OCT_K6: finite = groups(std::integral_constant<int, OCT_K6>()); break;
            default: fill_float(*w, source_kind, row, block, r);
        }
        if (!finite) return i + 1;
    }
    return 0;
}
