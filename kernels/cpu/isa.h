// What each instruction set implements: a table of kernels, compiled from the same sources for every level.
//
// Every kernel treats a row by itself and sums in one fixed order, whatever rows stand beside it: a token's bits do
// not depend on its company. Keep it so: no tile may change the order of one output's sum.
#pragma once
#include "octavo.h"

namespace octavo {

constexpr int GROUP = 32;  // columns that share a scale, of weights and of activations
constexpr int LANES = 16;
constexpr int MOST_SEEING = 12;  // rows that attend at a time

// Rows as the products want them, in panels of 16 so that a tile reads all of its rows near one address. Of each panel:
//
//     floats  x [cols][16]         int8  q [groups][16][32], and by group and row: scale, scale · sum, sum [groups][16]
struct Activations {
    const float* x;
    const int8_t* q;
    const float *scale, *scaled_sum;
    const int32_t* sum;
};

// Where products go. HEAD keeps the best of the blocks it is given, by row.
struct Sink {
    enum Mode { STORE, ADD, GATED, HEAD } mode;
    float* out;
    size_t stride;
    const float* bias;
    int rows;                    // HEAD: the vocabulary
    const int32_t* logit_rows;   // HEAD
    float* best;
    int32_t* best_id;
    float* check;                // stays 0 as long as all are finite
};

// One sequence's keys and values in one layer, and the rows that look at them through one key head.
struct Attention {
    const uint8_t* pool;  // of the layer
    size_t block_bytes, head_bytes;
    const int32_t* table;
    int kv_head, head_dim, padded_dim, block_size, bf16;
    float* scores;  // scratch, [MOST_SEEING][stride]
    size_t stride;
    uint8_t* tile;  // scratch, one tile of keys
};

struct Isa {
    void (*norm)(const float* x, const float* weight, int width, int count, float eps, float* out);
    // Both put a row into its place in a panel, of which they are given the address.
    void (*spread)(const float* x, int n, float* out);
    void (*quantise)(const float* x, int n, int8_t* q, float* scale, float* scaled_sum, int32_t* sum);
    void (*embed)(const OctMatrix&, int row, float* out);
    void (*product)(const OctMatrix&, int from, int to, const Activations&, int rows, bool exact, Sink&);
    // q [rows][head_dim] rotated and scaled; row r sees positions [0, seen[r])
    void (*attend)(const Attention&, const float* q, int rows, const int* seen, float* const* out);
    // Turn pairs (i, i + half) by angles, times `scale`.
    void (*rotate)(const float* x, const float* cosines, const float* sines, int half, float scale, float* out);
    // One token's key (rotated) and value of one head into its block.
    void (*remember)(const float* key, const float* value, int head_dim, int padded_dim, int block_size, int at, bool bf16,
                     uint8_t* head);
    bool (*finite)(const float* x, int n);
};

extern const Isa isa_plain;
#if defined(__x86_64__)
extern const Isa isa_avx2, isa_avx512;
#endif
const Isa& isa_of(int level);

}  // namespace octavo
