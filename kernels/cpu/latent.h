// Attention over latents (MLA: DeepSeek-V2, arXiv 2405.04434): a token keeps one vector for all heads, a compressed part that
// is key and value at once, then a rotated key. Queries come absorbed, in the space of that vector:
//
//     score of a head = q · cell over all dimensions, what it mixes = the cell's first `latent` dimensions
//
// A block is [block_size][dims] cells, fp32 or bf16, dims in whole vectors. Each row's sums go over dimensions in vectors
// and over positions in order, segment by segment, as everywhere: a row's bits are its own.
#pragma once
#include "attention.h"

namespace {

template <int KIND>
inline const typename Cell<KIND>::T* latent_cell(const Attention& a, int position) {
    const HeadLayout& l = a.head;
    const int cell = cell_of(a, position);
    const uint8_t* block = a.pool + size_t(a.table[cell / l.block_size]) * a.block_bytes;
    return (const typename Cell<KIND>::T*)block + size_t(cell % l.block_size) * size_t(l.padded_dim);
}

// Weights of positions [first, seen) of [from, end) in place of their scores, zeros beside them; greatest score and sum.
inline void weigh_latent(float* scores, int from, int end, int first, int seen, float& top, float& total) {
    top = LOWEST, total = 0;
    const int low = first > from ? first : from, high = seen < end ? seen : end;
    for (int t = low; t < high; t++) top = scores[t - from] > top ? scores[t - from] : top;
    for (int t = from; t < end; t += LANES) {
        float exact[LANES];
        for (int i = 0; i < LANES; i++) exact[i] = t + i >= low && t + i < high ? scores[t + i - from] - top : -88.f;
        store(exact, exponential(load(exact)));
        for (int i = 0; i < LANES && t + i < end; i++) {
            const float weight = t + i >= low && t + i < high ? exact[i] : 0.f;
            scores[t + i - from] = weight;
            total += weight;
        }
    }
}

template <int KIND, int R, int ND>
void mix_latent(const Attention& a, int dim, int from, int end, float* part) {
    const int stride = a.head.padded_dim + LANES;
    F y[R][ND];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < ND; n++) y[r][n] = zero();
    for (int t = from; t < end; t++) {
        const auto* cell = latent_cell<KIND>(a, t) + dim;
        F value[ND];
        for (int n = 0; n < ND; n++) value[n] = Cell<KIND>::get(cell + n * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const F weight = set(a.scores[r * SEGMENT + t - from]);
            for (int n = 0; n < ND; n++) y[r][n] = fma(weight, value[n], y[r][n]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < ND; n++) store(part + r * stride + dim + n * LANES, y[r][n]);
}

template <int KIND, int R>
void latent_rows(const Attention& a, const float* q, const int* first, const int* seen, int segment, float* part) {
    const int dims = a.head.padded_dim, stride = dims + LANES;
    int from = first[0], end = seen[0];
    for (int r = 1; r < R; r++) {
        from = first[r] < from ? first[r] : from;
        end = seen[r] > end ? seen[r] : end;
    }
    from = from > segment * SEGMENT ? from : segment * SEGMENT;
    end = least(end, (segment + 1) * SEGMENT);
    for (int t = from; t < end; t++) {
        const auto* cell = latent_cell<KIND>(a, t);
        F s[R];
        for (int r = 0; r < R; r++) s[r] = zero();
        for (int d = 0; d < dims; d += LANES) {
            const F key = Cell<KIND>::get(cell + d);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) s[r] = fma(key, load(q + r * dims + d), s[r]);
        }
        for (int r = 0; r < R; r++) a.scores[r * SEGMENT + t - from] = sum(s[r]);
    }
    for (int r = 0; r < R; r++)
        weigh_latent(a.scores + r * SEGMENT, from, end, first[r], seen[r], part[r * stride + dims], part[r * stride + dims + 1]);
    constexpr int ND = R * 2 <= MOST_SUMS ? 2 : 1;
    int dim = 0;
    for (; dim + ND * LANES <= a.latent; dim += ND * LANES) mix_latent<KIND, R, ND>(a, dim, from, end, part);
    for (; dim < a.latent; dim += LANES) mix_latent<KIND, R, 1>(a, dim, from, end, part);
}

template <int KIND>
void latent_all(const Attention& a, const float* q, int rows, const int* first, const int* seen, int segment, float* part) {
    const int dims = a.head.padded_dim;
    for (int r = 0; r < rows;) {
        const int left = rows - r;
        const float* at = q + size_t(r) * size_t(dims);
        float* to = part + size_t(r) * size_t(dims + LANES);
        if (MOST_SUMS > 6 && left >= 8) {
            latent_rows<KIND, (MOST_SUMS > 6 ? 8 : 4)>(a, at, first + r, seen + r, segment, to);
            r += 8;
        } else if (left >= 4) {
            latent_rows<KIND, 4>(a, at, first + r, seen + r, segment, to);
            r += 4;
        } else {
            latent_rows<KIND, 1>(a, at, first + r, seen + r, segment, to);
            r += 1;
        }
    }
}

void attend_latent(const Attention& a, const float* q, int rows, const int* first, const int* seen, int segment, float* part) {
    if (a.head.kind == OCT_BF16) latent_all<OCT_BF16>(a, q, rows, first, seen, segment, part);
    else latent_all<OCT_F32>(a, q, rows, first, seen, segment, part);
}

// A token's cell, in whole vectors, into its block.
void remember_latent(const float* cell, const HeadLayout& l, int at, uint8_t* block) {
    const size_t start = size_t(at) * size_t(l.padded_dim);
    if (l.kind == OCT_BF16)
        for (int d = 0; d < l.padded_dim; d++) ((uint16_t*)block)[start + size_t(d)] = to_bf16(cell[d]);
    else
        memcpy((float*)block + start, cell, size_t(l.padded_dim) * 4);
}

}  // namespace
