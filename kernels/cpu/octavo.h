// The C interface of the native step library. Plain C types only, so that ctypes can call it; owned by `oct_*_free`.
//
// A model is a flat program of fused operations over named row buffers. A step runs the whole program once over a
// token-flat batch: every token has an id, a position and a sequence, every sequence a table of KV blocks. Decode,
// chunked prefill and any mix of them are the same call.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define OCT_API extern "C" __attribute__((visibility("default")))

// How a matrix is packed: blocks of 16 rows, within them column after column, so that one vector holds 16 rows.
enum OctKind : int32_t {
    OCT_F32 = 0,
    OCT_F16 = 1,
    OCT_BF16 = 2,
    OCT_W4 = 3,  // the quantised ones: see formats.h
    OCT_W8 = 4,
    OCT_W5 = 5,
    OCT_K4 = 6,
    OCT_K5 = 7,
    OCT_K6 = 8,
    OCT_I8 = 9,  // of a KV pool only: 8-bit numbers, an fp32 scale for each 32 dimensions of a head and token
};

// How rows come to `oct_matrix_fill`, numbered as GGUF numbers them.
enum OctSource : int32_t {
    OCT_SRC_F32 = 0,
    OCT_SRC_F16 = 1,
    OCT_SRC_Q4_0 = 2,
    OCT_SRC_Q4_1 = 3,
    OCT_SRC_Q5_0 = 6,
    OCT_SRC_Q5_1 = 7,
    OCT_SRC_Q8_0 = 8,
    OCT_SRC_Q4_K = 12,
    OCT_SRC_Q5_K = 13,
    OCT_SRC_Q6_K = 14,
    OCT_SRC_BF16 = 30,
};

struct OctMatrix {
    int32_t kind, rows, cols;
    int32_t blocks;       // of 16 rows; the last one is filled up with zeros
    uint64_t block_bytes;
    uint8_t* data;
};

enum OctOpKind : int32_t {
    OCT_EMBED = 0,       // out = scale · row `id` of matrix; OCT_ADD: out += its row `position`
    OCT_LINEAR = 1,      // out (mode) matrix · norm(in) + bias; norm and bias may be absent
    OCT_ATTEND = 2,      // norm heads, rotate, write KV, attend: in holds q, k, v side by side, out the mixed heads.
                         // Over latents: in holds the absorbed queries, `queries` has what of them rotates at the end
                         // of each `width`, `keys` the latent (normed by k_norm) and the key that rotates
    OCT_HEAD = 3,        // logits of the rows that sample: matrix · norm(in) + bias
    OCT_NORMED = 4,      // out = norm(in); OCT_ADD: out += that
    // A mixture of experts. A token of which `used` experts are the best has as many slots: rows of the buffers that
    // RISE and FALL write. Matrices are `experts` in a row, all of one shape.
    OCT_ROUTE = 5,  // in: a logit for each expert; their softmax weighs those used (OCT_ADD: made to sum to 1), times scale.
                    // With `sigmoid`, their sigmoids do, to which `bias` is added where experts are chosen
    OCT_RISE = 6,   // out, by slot: its expert's matrix (mode) · norm(in of its token)
    OCT_FALL = 7,   // out, by slot: its expert's matrix · in of the slot
    OCT_BLEND = 8,  // out += the slots of a token, by their weights
    // Each of `heads` matrices in a row, all of one shape, on its own part of a row: head h reads columns from h · width
    // on and writes its results from h · (whole vectors of its rows) on.
    OCT_HEADS = 9,
    // After a LINEAR of which it has in, norm, out, mode and wide: what adapters add to it. Where the product is to be
    // activated (wide > 0) and the step has adapters, LINEAR has left it in `wide` as it was, and this activates it.
    OCT_ADAPT = 10,
    OCT_BOUND = 11,  // in place: numbers of a row beyond ±cap become that
};
// ACT: the activation of the product. GATED: blocks of gate and up rows alternate; act(gate) · up.
enum OctMode : int32_t { OCT_STORE = 0, OCT_ADD = 1, OCT_GATED = 2, OCT_ACT = 3 };
enum OctAct : int32_t { OCT_SILU = 0, OCT_GELU_TANH = 1, OCT_GELU = 2, OCT_RELU = 3 };
enum OctNorm : int32_t { OCT_RMS = 0, OCT_LAYER = 1 };
// How a product is computed: as generated tokens are in fast mode, with fp32 activations, as a prompt's tokens are.
enum OctHow : int32_t { OCT_FAST = 0, OCT_EXACT = 1, OCT_PROMPT = 2 };

struct OctOp {
    int32_t kind, mode, act, norm_kind;
    int32_t in, out;  // buffers
    int32_t column;   // LINEAR: where in a row of `out` its results begin
    int32_t layer;    // of the KV pool
    int32_t heads;
    int32_t angles;  // which table rotates; -1: none
    int32_t width;   // NORMED, BOUND: of a row; HEADS, and ATTEND over latents: of a head; ADAPT: columns of `in`
    int32_t experts, used;
    int32_t groups, groups_used;  // ROUTE: experts in groups, of which the best ones' are looked at; 0: all are
    int32_t sigmoid;              // ROUTE; groups are then as good as their best two experts, else as their best one
    int32_t queries, keys;        // ATTEND over latents: buffers
    int32_t site;    // ADAPT: its number
    int32_t wide;    // LINEAR, ADAPT: the buffer for a product that waits for its activation; 0: it has none
    int32_t window;  // a token sees so many positions, its own included; 0: all
    float eps, scale;
    float cap;  // of scores or logits x: cap · tanh(x / cap); 0: none. BOUND: the bound
    const OctMatrix* matrix;
    const float *norm, *norm_bias;  // zero-padded to the buffer's width
    const float* bias;              // zero-padded to 16 · blocks
    const float *q_norm, *k_norm;   // of every head, zero-padded to whole vectors; may be absent
    const float* slopes;            // ATTEND, by head: what a score loses for each position between (ALiBi); may be absent
    const int32_t* order;           // LINEAR: column j of the matrix is for number order[j] of the normed input; may be absent
};

// Cosines [context][half], then as many sines: dimensions i and i + half of a head turn, those from 2 half on do not.
struct OctAngles {
    int32_t half;
    const float* data;
};

struct OctShape {
    int32_t layers, kv_heads, head_dim;
    int32_t blocks, block_size;  // of the KV pool
    int32_t kv_kind;             // OCT_F32, OCT_BF16 or OCT_I8
    int32_t context;
    int32_t exact;               // 1: fp32 activations; 0: int8 activations where the weights are quantised
    int32_t threads, isa;
    int32_t latent;  // above 0: one cell of head_dim for all heads, its first `latent` dimensions are keys and values
};

// What a LoRA adapter adds to a product: up · (down · x), block b of it to block (block + step · b) of the row.
struct OctPart {
    const OctMatrix *down, *up;
    int32_t block, step;
};

// Site s has parts [first[s], first[s + 1]).
struct OctAdapter {
    const int32_t* first;
    const OctPart* parts;
};

struct OctStep {
    int32_t tokens, samples, copies, tables_count;  // one table a sequence
    int32_t skip_from, skip_to;                     // operations [from, to) of the program are left out
    int32_t taps;                                   // what so many operations read is shown
    const int32_t *ids, *positions, *sequences;  // by token; the tokens of a sequence stand together, in order
    // Trees, or null. Token i sees its last path_start[i + 1] - path_start[i] positions, its own included, at the cells
    // paths[path_start[i] ..) of its sequence, and writes to the last of them. Without any, all is at the cell of its
    // position. Cell c is in the block of number c / block_size.
    const int32_t *paths, *path_start;
    const int32_t *tables, *table_start;         // sequence s: tables[table_start[s] .. table_start[s + 1])
    // By sequence: where its prompt ends. Tokens before that are a prompt's, and LINEAR operations compute them in the
    // level's own way for such, if it has one (`oct_prompts`). Null: there are none.
    const int32_t* prompt_ends;
    const int32_t *sample_rows, *logit_rows;     // by sample: its token, and its row of `logits` or -1
    const int32_t *copy_source, *copy_target;    // blocks, all read before any is written
    float* logits;                               // [rows][vocabulary]
    float* hidden;                               // [tokens][columns of the head]: normed, as the head sees it; or null
    const int32_t* tap_ops;                      // ascending; each is a LINEAR
    float* tapped;                               // [taps][tokens][columns of its matrix], before any norm
    int32_t* best;                               // by sample: the lowest id of those with the greatest logit
    uint8_t *finite, *sample_finite;             // by token, by sample
    int32_t loaded_count;
    const int32_t* adapters;                     // by token: which of `loaded`, -1 none; null if none is loaded
    const OctAdapter* loaded;
};

// A token to be drawn from a row of finite logits: a request's options and its place in its sequence, see
// executors/sampling.py. What is not asked for is null or 0, or 1 (top_p, typical_p, repetition); ids are in the vocabulary.
struct OctDraw {
    const float* logits;
    const int32_t* ids;  // [position], the sequence so far, if there are penalties
    const int32_t *bias_ids, *allowed, *banned;
    const double* bias;
    const uint8_t* mask;  // [vocabulary], what a grammar allows
    double temperature, top_p, min_p, typical_p, repetition, presence, frequency;
    uint64_t seed;
    uint32_t choice, position;
    int32_t prompt, top_k, biases, allowed_count, banned_count;
    int32_t token;  // the answer
};

// What the model's own distribution says: log-probabilities of `token` and of the most likely ids, best first, none of
// them under `least`.
struct OctLikely {
    const float* logits;
    int32_t* ids;    // [alternatives], at most the vocabulary
    double* values;  // the same
    double least, logprob;
    int32_t token, alternatives;
};

struct OctModel;

// The best level that this processor has: 0 plain; 1 AVX2, 2 AVX-512 VNNI, 3 AMX beside it, which Linux is asked for (once);
// on Arm 4, NEON with dot products.
OCT_API int32_t oct_isa_best(void);
// Whether a level has a way of its own for products of this kind with a prompt's rows: another sum of roundings, faster
// where rows are many. 1, or 0: a prompt's rows have the bits that all rows have.
OCT_API int32_t oct_prompts(int32_t isa, int32_t kind);
// Fill in all of a matrix but `data`, which takes blocks · block_bytes, aligned to 64, zeroed. 0, or -1: columns go in
// whole groups of 32, those of K4, K5 and K6 in groups of 256.
OCT_API int32_t oct_matrix_shape(OctMatrix*, int32_t kind, int32_t rows, int32_t cols);
// Row source_rows[i] of `source` becomes row target_rows[i]. 0; -1 when this kind cannot be made of that source, -2 when
// a target is outside of the matrix, and nothing is written then; i + 1 when a number of row i, or a scale of it, is not
// finite.
OCT_API int32_t oct_matrix_fill(const OctMatrix*, int32_t source_kind, const uint8_t* source, int32_t count,
                                const int32_t* source_rows, const int32_t* target_rows);
// y[n][16 · blocks] = x[n][cols] Wᵀ on the calling thread; OCT_PROMPT where `oct_prompts` says so.
OCT_API void oct_linear(int32_t isa, const OctMatrix*, const float* x, int32_t n, int32_t how, float* y);
// out[count][cols] = scale · rows `ids` of the matrix, on the calling thread. 0, or -1: an id is outside of the matrix.
OCT_API int32_t oct_embed(int32_t isa, const OctMatrix*, const int32_t* ids, int32_t count, float scale, float* out);
// `widths` of the buffers are multiples of 16. What program and angles point to must outlive the model.
OCT_API OctModel* oct_model_new(const OctShape*, const OctOp*, int32_t ops, const int32_t* widths, int32_t buffers,
                                const OctAngles*, int32_t angles);
// Makes ready for steps of so many tokens: what they write, and the first blocks of KV, is taken from the system now and
// not in the first step. 0, or a code of `oct_error`: there is no memory for that.
OCT_API int32_t oct_ready(OctModel*, int32_t tokens);
// Bytes of KV that a block takes in one layer.
OCT_API uint64_t oct_block_bytes(const OctShape*);
OCT_API void oct_model_free(OctModel*);
// Draw all tokens; report on all. On the model's threads, or on the calling one without a model.
OCT_API void oct_sample(OctModel*, int32_t isa, int32_t vocabulary, OctDraw*, int32_t count);
OCT_API void oct_likely(OctModel*, int32_t isa, int32_t vocabulary, OctLikely*, int32_t count);
OCT_API int32_t oct_step(OctModel*, const OctStep*);  // 0, or a code of `oct_error`; nothing is run then
// Copy the KV of single cells, numbered block · block_size + slot, as if all were read before any is written. 0, or -1:
// a cell is outside of the pool, and nothing is copied.
OCT_API int32_t oct_copy_cells(OctModel*, int32_t count, const int32_t* source, const int32_t* target);
// From now on every step adds to [operation][2] how long it took to prepare each one's rows, and to compute it; null: none.
OCT_API void oct_times(OctModel*, double* seconds);
OCT_API const char* oct_error(int32_t code);
OCT_API float* oct_buffer(OctModel*, int32_t buffer, int32_t tokens);  // room for so many tokens; for tests
// Chunks of a fake job that were run, by all threads: `phases` phases of `chunks` each, `rounds` times. For tests.
OCT_API int64_t oct_team_stress(int32_t threads, int32_t phases, int32_t chunks, int32_t rounds);
// Bytes a second read from a buffer of that size by `threads` threads; the roofline of benchmarks.
OCT_API double oct_read_bandwidth(int32_t threads, uint64_t bytes, int32_t repeats);
// Operations a second, two for each product and sum, of plain byte products from the first-level cache: no scales, nothing
// stored. What a product of bytes could reach; the other roofline.
OCT_API double oct_byte_rate(int32_t isa, int32_t threads, int32_t repeats);
