// What each instruction set implements: a table of kernels, compiled from the same sources for every level.
//
// Every kernel treats a row by itself and sums in one fixed order, whatever rows stand beside it: a token's bits do
// not depend on its company. Keep it so: no tile may change the order of one output's sum.
#pragma once
#include "octavo.h"

namespace octavo {

constexpr int GROUP = 32;  // columns that share a scale, of weights and of activations
constexpr int LANES = 16;
// Rows that attend at a time: through vectors, through tiles, and through tiles over bytes, made bf16 once for them all.
constexpr int VECTOR_SEEING = 12, TILES_SEEING = 48, MOST_SEEING = 144;

constexpr int SEGMENT = 256;     // positions that attention sums up before it turns to the next ones

// Rows as the products want them, in panels of 16 so that a tile reads all of its rows near one address. Of each panel:
//
//     floats  x [cols][16]         int8  q [groups][16][32], and by group and row [groups][16]:
//                                        scale, scale · sum, excess, low
//     bf16    half [groups][16][32]
//
// `excess` is -128 · sum and `low` -32 · the sum of the first 16 columns: what weights that are stored with 128, or 32,
// added to them would add too much.
struct Activations {
    float* x;
    int8_t* q;
    float *scale, *scaled_sum;
    int32_t *excess, *low;
    uint16_t* half;  // of prompts' rows

    // Those from `row` on, the first of a panel.
    Activations from(size_t row, int cols) const {
        const size_t at = row * size_t(cols), group = row * size_t(cols / GROUP);
        return {x + at, q + at, scale + group, scaled_sum + group, excess + group, low + group, half + at};
    }
};

// Where products go. HEAD keeps the best of the blocks it is given, by row.
struct Sink {
    enum Mode { STORE, ADD, GATED, ACT, HEAD } mode;
    int act;
    float* out;
    size_t stride;
    const float* bias;
    float cap;                   // HEAD
    int rows;                    // HEAD: the vocabulary
    const int32_t* logit_rows;   // HEAD
    float* best;
    int32_t* best_id;
    float* check;                // stays 0 as long as all are finite
    const int32_t* rows_of = nullptr;  // row i goes to row rows_of[i] of `out`; null: to row i

    size_t row(int i) const { return size_t(rows_of ? rows_of[i] : i); }
};

// How a head's keys and values lie in a block, and where its parts begin. With `pair` 2, two dimensions of a key lie side by
// side, and two tokens' values.
struct HeadLayout {
    int kind;  // OCT_F32, OCT_BF16 or OCT_I8
    int head_dim, padded_dim, block_size;
    size_t keys, values, value_scales, bytes;  // key scales come first
    bool tiles;  // attention_tiles.h reads it
    int pair;

    // Which cell of the keys, of the values, is dimension `d` of a token.
    size_t key(int slot, int d) const { return size_t((d / pair * block_size + slot) * pair + d % pair); }
    size_t value(int slot, int d) const { return size_t((slot / pair * padded_dim + d) * pair + slot % pair); }
};

// One sequence's keys and values in one layer, and the rows that look at them through one key head.
struct Attention {
    HeadLayout head;
    const uint8_t* pool;  // of the layer
    size_t block_bytes;
    const int32_t* table;
    int trunk;             // positions below it are at the cell of that number, position p from it on at
    const int32_t* cells;  // cells[p - trunk]
    int kv_head;
    int from, end;   // positions that any of the rows sees, in whole tiles: where reading goes on
    float cap;
    const float* slopes;  // by row: what a score loses for each position from key to query; null: nothing
    float* scores;      // scratch, of VECTOR_SEEING rows, or of a tile of them
    uint8_t* tile;      // scratch, one tile of keys and its scales; for tile registers a segment's keys and values
    uint16_t* queries;  // scratch, of MOST_SEEING rows
    int latent;     // see latent.h
};

struct Isa {
    void (*norm)(int kind, const float* x, const float* weight, const float* bias, int width, int count, float eps,
                 float* out);
    void (*add_rows)(const float* x, int n, float* out);
    // Both make a panel of `n` rows: its columns [from, to), its groups [from, to).
    void (*spread)(const float* const* rows, int n, int from, int to, const Activations& panel);
    void (*quantise)(const float* const* rows, int n, int from, int to, const Activations& panel);
    void (*embed)(const OctMatrix&, int row, float scale, bool added, float* spare, float* out);
    void (*product)(const OctMatrix&, int from, int to, const Activations&, int rows, bool exact, Sink&);
    // q [rows][head_dim] rotated and scaled; row r sees positions [first[r], seen[r]). Of those in one segment, gives
    // [rows][padded_dim + 16]: the sum of the values by their weights, the greatest score, the sum of the weights.
    void (*attend)(const Attention&, const float* q, int rows, const int* first, const int* seen, int segment, float* part);
    void (*merge)(const float* part, int padded_dim, int rows, float* into);  // a later segment's into the earlier ones'
    void (*finish)(const float* part, int head_dim, int padded_dim, float* out);
    // Turn pairs (i, i + half) by angles, times `scale`; what is beyond them is only scaled.
    void (*rotate)(const float* x, const float* cosines, const float* sines, int half, int head_dim, float scale, float* out);
    // One token's key (rotated) and value of one head into its block.
    void (*remember)(const float* key, const float* value, const HeadLayout&, int at, uint8_t* head);
    bool (*finite)(const float* x, int n);
    // The same over latents: q [rows][padded_dim], and a token's cell into its block.
    void (*attend_latent)(const Attention&, const float* q, int rows, const int* first, const int* seen, int segment,
                          float* part);
    void (*remember_latent)(const float* cell, const HeadLayout&, int at, uint8_t* block);
    int64_t (*byte_products)(int rounds);  // operations done: see `oct_byte_rate`
    int32_t (*sample)(const OctDraw&, int32_t vocabulary);
    void (*likely)(OctLikely&, int32_t vocabulary);
    void (*activate)(int act, bool gated, const float* x, int n, float* out);
    bool tiles = false;  // keys and values but fp32 ones go through tile registers; bf16 ones are laid out for that
    // Rows of prompts, if the level computes them in a way of their own: a panel's columns [from, to), and products.
    void (*halve)(const float* const* rows, int n, int from, int to, const Activations& panel) = nullptr;
    void (*prompt_product)(const OctMatrix&, int from, int to, const Activations&, int rows, Sink&) = nullptr;
};

// What AMX has of its own, and may be run only where the system lets this process have tile registers. The rest of that
// level is AVX-512's, and a row's bits are, but of attention over bf16 and bytes.
struct Tiled {
    decltype(Isa::product) product;
    decltype(Isa::byte_products) byte_products;
    decltype(Isa::attend) attend;
    decltype(Isa::remember) remember;
    decltype(Isa::halve) halve;
    decltype(Isa::prompt_product) prompt_product;
};

extern const Isa isa_plain;
#if defined(__x86_64__)
extern const Isa isa_avx2, isa_avx512;
extern const Tiled tiled_amx;
#elif defined(__aarch64__)
extern const Isa isa_neon;
#endif
const Isa& isa_of(int level);

}  // namespace octavo
