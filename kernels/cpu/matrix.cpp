// Packing: rows as a file stores them into blocks of 16 rows, see `OctKind`.
#include "half.h"
#include "isa.h"

using namespace octavo;

namespace {

constexpr size_t W4_GROUP = 320, W8_GROUP = 512;

uint16_t half_at(const uint8_t* p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return h;
}

size_t source_row_bytes(int32_t source, int32_t cols) {
    switch (source) {
        case OCT_SRC_F32: return size_t(cols) * 4;
        case OCT_SRC_F16: case OCT_SRC_BF16: return size_t(cols) * 2;
        case OCT_SRC_Q4_0: return size_t(cols) / GROUP * 18;
        case OCT_SRC_Q4_1: return size_t(cols) / GROUP * 20;
        case OCT_SRC_Q8_0: return size_t(cols) / GROUP * 34;
        default: return 0;
    }
}

bool possible(int32_t kind, int32_t source) {
    switch (kind) {
        case OCT_F32: return source == OCT_SRC_F32 || source == OCT_SRC_F16 || source == OCT_SRC_BF16;
        case OCT_F16: return source == OCT_SRC_F16 || source == OCT_SRC_F32;
        case OCT_BF16: return source == OCT_SRC_BF16 || source == OCT_SRC_F32;
        case OCT_W4: return source == OCT_SRC_Q4_0 || source == OCT_SRC_Q4_1;
        case OCT_W8: return source == OCT_SRC_Q8_0 || source == OCT_SRC_F32;
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

// GGUF keeps columns i and i + 16 of a group in one byte, and so do we.
void fill_w4(const OctMatrix& w, int32_t source, const uint8_t* row, uint8_t* block, int r) {
    const bool offset = source == OCT_SRC_Q4_1;
    for (int g = 0; g < w.cols / GROUP; g++, row += offset ? 20 : 18) {
        uint8_t* q = block + size_t(g) * W4_GROUP;
        uint16_t* d = (uint16_t*)(q + 256);
        d[r] = half_at(row);
        d[16 + r] = offset ? half_at(row + 2) : to_f16(-8 * from_f16(half_at(row)));
        for (int i = 0; i < 16; i++) q[64 * (i / 4) + 4 * r + i % 4] = row[(offset ? 4 : 2) + i];
    }
}

void fill_w8(const OctMatrix& w, int32_t source, const uint8_t* row, uint8_t* block, int r) {
    const int groups = w.cols / GROUP;
    for (int g = 0; g < groups; g++) {
        uint8_t* q = block + size_t(g) * W8_GROUP;
        uint16_t& d = ((uint16_t*)(block + size_t(groups) * W8_GROUP))[g * LANES + r];
        int8_t numbers[GROUP];
        if (source == OCT_SRC_Q8_0) {
            d = half_at(row + size_t(g) * 34);
            memcpy(numbers, row + size_t(g) * 34 + 2, GROUP);
        } else {
            float top = 0;
            for (int k = 0; k < GROUP; k++) {
                const float f = __builtin_fabsf(number(source, row, g * GROUP + k));
                top = f > top ? f : top;
            }
            d = to_f16(top / 127.f);
            const float scale = from_f16(d), inverse = scale > 0 ? 1.f / scale : 0.f;
            for (int k = 0; k < GROUP; k++) {
                const float f = __builtin_nearbyintf(number(source, row, g * GROUP + k) * inverse);
                numbers[k] = int8_t(f > 127 ? 127 : f < -127 ? -127 : f);
            }
        }
        for (int k = 0; k < GROUP; k++) q[64 * (k / 4) + 4 * r + k % 4] = uint8_t(int(numbers[k]) + 128);
    }
}

}  // namespace

OCT_API int32_t oct_matrix_shape(OctMatrix* w, int32_t kind, int32_t rows, int32_t cols) {
    const bool grouped = kind == OCT_W4 || kind == OCT_W8;
    if (kind < OCT_F32 || kind > OCT_W8 || rows < 1 || cols < 1 || (grouped && cols % GROUP)) return -1;
    const size_t groups = size_t(cols) / GROUP;
    w->kind = kind;
    w->rows = rows;
    w->cols = cols;
    w->blocks = (rows + LANES - 1) / LANES;
    w->block_bytes = kind == OCT_W4   ? groups * W4_GROUP
                     : kind == OCT_W8 ? (groups * (W8_GROUP + 32) + 63) / 64 * 64
                                      : size_t(cols) * LANES * (kind == OCT_F32 ? 4 : 2);
    return 0;
}

OCT_API int32_t oct_matrix_fill(const OctMatrix* w, int32_t source_kind, const uint8_t* source, int32_t count,
                                const int32_t* source_rows, const int32_t* target_rows) {
    if (!possible(w->kind, source_kind)) return -1;
    const size_t bytes = source_row_bytes(source_kind, w->cols);
    for (int32_t i = 0; i < count; i++) {
        const uint8_t* row = source + size_t(source_rows[i]) * bytes;
        uint8_t* block = w->data + size_t(target_rows[i] / LANES) * w->block_bytes;
        const int r = target_rows[i] % LANES;
        if (w->kind == OCT_W4) fill_w4(*w, source_kind, row, block, r);
        else if (w->kind == OCT_W8) fill_w8(*w, source_kind, row, block, r);
        else fill_float(*w, source_kind, row, block, r);
    }
    return 0;
}
