// The KV pool as kernels see it, and attention of one warp over its tiles.
//
// A tile holds 16 tokens of one KV head: first their keys, then their values, each as an image that can be copied to
// shared memory as it is and read by ldmatrix without bank conflicts. An image is cut into panels of 8, 4, 2 or 1
// chunks of 16 bytes (as many 8s as fit, then the rest); in a panel, rows follow one another and a row's chunks are
// exchanged by its number. `pool.py` says the same in Python, and the tests hold the two together.
#pragma once
#include "prims.cuh"

constexpr int TILE = 16;

template <class T, int D> struct Image {
  static constexpr int PER_CHUNK = 16 / sizeof(T), CHUNKS = D / PER_CHUNK, BYTES = TILE * D * (int)sizeof(T);
  static_assert(D % 16 == 0, "a head's size is a multiple of 16");

  // Where a chunk of a row begins, in bytes.
  FN static int at(int row, int chunk) {
    constexpr int FULL = CHUNKS & ~7, FOUR = CHUNKS & 4, TWO = CHUNKS & 2;
    int width = 8, start = chunk & ~7;
    if (CHUNKS != FULL && chunk >= FULL) {
      if (FOUR && chunk < FULL + FOUR) width = 4, start = FULL;
      else if (TWO && chunk < FULL + FOUR + TWO) width = 2, start = FULL + FOUR;
      else width = 1, start = FULL + FOUR + TWO;
    }
    return ((start * TILE) + row * width + ((chunk - start) ^ ((row & 7) * width / 8))) * 16;
  }
  // Where one number is, in bytes.
  FN static int element(int row, int d) { return at(row, d / PER_CHUNK) + d % PER_CHUNK * (int)sizeof(T); }
};

// The pool of a layer: [block][tile of the block][KV head][keys, values]. Offsets need 64 bits.
template <class KV, int D> struct Pool {
  static constexpr int TILE_BYTES = 2 * Image<KV, D>::BYTES;
  FN static int64_t at(const int* table, int tile, int tiles_per_block, int kv_heads, int head) {
    int64_t number = (int64_t)table[tile / tiles_per_block] * tiles_per_block + tile % tiles_per_block;
    return (number * kv_heads + head) * TILE_BYTES;
  }
};

// A tile of latent KV: the contents' image, which may be fp8, then that of what is rotated, which is not.
template <class T, class KV, int CONTENT, int ROTATED> struct LatentTile {
  using Content = Image<KV, CONTENT>;
  using Rotated = Image<T, ROTATED>;
  static constexpr int BYTES = Content::BYTES + Rotated::BYTES;
};

// A part of attention's work: rows [row, row_end) of the packed rows of some query tokens (row = token · G + head of
// the group), against keys [key, key_end) of a block table. `key` is a multiple of 16.
struct Work { int table, tokens, row, row_end, key, key_end, part, unused; };
// Parts [part, part + parts) are about the same rows [row, row_end). Before them come those of keys that these rows'
// sequence shares with others: parts [shared_part, shared_part + shared_parts) of another buffer, in which the rows
// begin `shift` further.
struct Merge { int tokens, row, row_end, part, parts, shared_part, shared_parts, shift; };

template <class T, class KV> struct MmaType { using type = T; };
template <class T> struct MmaType<T, e4m3> { using type = f16; };  // e4m3 is exact in half

// Queries over 16 dimensions, to meet keys in e4m3: a lane is given 4 neighbours of a key, so queries come in that order.
template <class Query> FN void load_query_for_e4m3(uint32_t (&q)[4], const unsigned char* image, int k) {
  const int l = threadIdx.x & 31, row = l / 4, c = l % 4, chunk = 2 * k + c / 2, within = c % 2 * 8;
  uint2 low = *reinterpret_cast<const uint2*>(image + Query::at(row, chunk) + within);
  uint2 high = *reinterpret_cast<const uint2*>(image + Query::at(row + 8, chunk) + within);
  q[0] = low.x, q[1] = high.x, q[2] = low.y, q[3] = high.y;
}

// Add weighted values in e4m3, of keys 0-7 and 8-15: a register holds dimensions d, d + 1 of two keys, which are
// regrouped into even and odd dimensions.
FN void mma_values_e4m3(float (&of_even)[4], float (&of_odd)[4], const uint32_t (&weights)[4], uint32_t first,
                        uint32_t second) {
  uint32_t even[2], odd[2];
#pragma unroll
  for (int x = 0; x < 2; x++) {
    const uint32_t two = x ? second : first;
    const uint32_t one_key = half2_of_e4m3x2(uint16_t(two)), next_key = half2_of_e4m3x2(uint16_t(two >> 16));
    even[x] = (one_key & 0xFFFFu) | next_key << 16;
    odd[x] = one_key >> 16 | (next_key & 0xFFFF0000u);
  }
  mma<f16>(of_even, weights, even[0], even[1]);
  mma<f16>(of_odd, weights, odd[0], odd[1]);
}

// How products become scores in base 2: `factor` times them, or with a `cap` times the tanh of `cap` times them.
struct Scores { float factor, cap; };

FN Scores scores_of(float scale, float soft_cap) {
  return {(soft_cap > 0.f ? soft_cap : scale) * LOG2E, soft_cap > 0.f ? scale * reciprocal(soft_cap) : 0.f};
}

// What a model or a step adds to scores. ALiBi: a slope for each query head, times how far back a key lies. Trees: a
// token that is a node of a drafted tree sees all keys before `tree_start` of its token, and of the 64 from there on
// those of its mask, one position after the other; a window is longer than that. Below 0 it is none. Null pointers are
// nothing of the kind.
struct Bias { const float* slopes; const uint64_t* tree_mask; const int* tree_start; };

// What a warp knows of its 16 query rows. A lane holds rows lane / 4 (half 0) and lane / 4 + 8 (half 1).
template <class T, class KV, int D, bool QUERY_IN_REGISTERS, bool BIASED> struct Rows {
  using M = typename MmaType<T, KV>::type;
  using Query = Image<M, D>;
  using Keys = Image<KV, D>;
  static constexpr bool FP8 = sizeof(KV) == 1;
  static_assert(!FP8 || D % 32 == 0, "with fp8 a head's size is a multiple of 32");

  float out[D / 8][4], most[2], total[2];
  int last[2], first[2];  // the keys that a row sees
  float slope[BIASED ? 2 : 1];
  int here[BIASED ? 2 : 1], tree_start[BIASED ? 2 : 1];
  uint64_t tree_mask[BIASED ? 2 : 1];
  uint32_t query[QUERY_IN_REGISTERS ? D / 16 : 1][4];
  const unsigned char* image;

  FN static int lane() { return threadIdx.x & 31; }

  FN void start(const unsigned char* query_image, const Work& work, int row, const int* token_of, const int* position,
                int head0, int group, int window, const Bias& bias) {
    image = query_image;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int r = row + lane() / 4 + 8 * h;
      most[h] = minus_infinity();
      total[h] = 0.f;
      last[h] = r < work.row_end ? min(position[token_of[work.tokens + r / group]], work.key_end - 1) : -1;
      first[h] = 0;
      if (window > 0 && r < work.row_end) first[h] = position[token_of[work.tokens + r / group]] - window + 1;
      if constexpr (BIASED) {
        slope[h] = 0.f, here[h] = 0, tree_start[h] = 0x7FFFFFFF, tree_mask[h] = 0;
        if (r >= work.row_end) continue;
        const int token = token_of[work.tokens + r / group];
        here[h] = position[token];
        if (bias.slopes) slope[h] = bias.slopes[head0 + r % group] * LOG2E;
        if (bias.tree_mask && bias.tree_start[token] >= 0) {
          tree_start[h] = bias.tree_start[token];
          tree_mask[h] = bias.tree_mask[token];
          last[h] = work.key_end - 1;  // keys of a tree lie in the order of its nodes, positions do not
        }
      }
    }
#pragma unroll
    for (int i = 0; i < D / 8; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) out[i][e] = 0.f;
  }

  FN void load_query(uint32_t (&q)[4], int k) {
    if constexpr (FP8) load_query_for_e4m3<Query>(q, image, k);
    else ldmatrix_x4<false>(q, image + Query::at(lane() % 16, 2 * k + lane() / 16));
  }
  FN void load_queries() {
    if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
      for (int k = 0; k < D / 16; k++) load_query(query[k], k);
    }
  }

  // Take in TILES tiles that lie one behind the other in shared memory, the first at key `key`.
  template <int TILES> FN void take(const unsigned char* tiles, int key, int key_end, const Scores& how) {
    float s[2 * TILES][4], shrink[2];
#pragma unroll
    for (int j = 0; j < 2 * TILES; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[j][e] = 0.f;
    multiply_keys<TILES>(s, tiles);
    weigh<TILES>(s, key, how, shrink);
    bring(shrink);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const uint32_t a[4] = {pack2<M>(s[2 * t][0], s[2 * t][1]), pack2<M>(s[2 * t][2], s[2 * t][3]),
                             pack2<M>(s[2 * t + 1][0], s[2 * t + 1][1]), pack2<M>(s[2 * t + 1][2], s[2 * t + 1][3])};
      mix_values(a, tiles + t * 2 * Keys::BYTES + Keys::BYTES, key_end - key - t * TILE);
    }
  }

  // Where a key stands: in its cell, or as many positions after a tree's start as it has nodes before it.
  FN int position_of(int n, int h) const {
    if (n < tree_start[h]) return n;
    return tree_start[h] + set_bits(tree_mask[h] & ((1ull << (n - tree_start[h] & 63)) - 1));
  }

  // Products to weights: scale, cap, hide what a row may not see. `shrink` brings earlier sums to the new maximum.
  template <int TILES> FN void weigh(float (&s)[2 * TILES][4], int key, const Scores& how, float (&shrink)[2]) {
    const int at = key + lane() % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float factor = how.factor, top = minus_infinity();
      if (how.cap > 0.f) {
#pragma unroll
        for (int j = 0; j < 2 * TILES; j++)
#pragma unroll
          for (int e = 0; e < 2; e++) s[j][2 * h + e] = tanhf(s[j][2 * h + e] * how.cap);
      }
      if constexpr (BIASED) {
#pragma unroll
        for (int j = 0; j < 2 * TILES; j++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            s[j][2 * h + e] = s[j][2 * h + e] * factor + slope[h] * (position_of(at + 8 * j + e, h) - here[h]);
        factor = 1.f;
      }
      if (BIASED || key < first[h] || key + TILES * TILE - 1 > last[h]) {
#pragma unroll
        for (int j = 0; j < 2 * TILES; j++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int n = at + 8 * j + e;
            bool seen = n <= last[h] && n >= first[h];
            if constexpr (BIASED) seen = seen && (n < tree_start[h] || (tree_mask[h] >> (n - tree_start[h] & 63) & 1));
            if (!seen) s[j][2 * h + e] = minus_infinity();
          }
      }
#pragma unroll
      for (int j = 0; j < 2 * TILES; j++) top = fmaxf(top, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
      top = fmaxf(most[h], top * factor);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float base = top == minus_infinity() ? 0.f : top;
      shrink[h] = exp2_fast(most[h] - base);
      most[h] = top;
      total[h] *= shrink[h];
#pragma unroll
      for (int j = 0; j < 2 * TILES; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          s[j][2 * h + e] = exp2_fast(s[j][2 * h + e] * factor - base);
          total[h] += s[j][2 * h + e];
        }
    }
  }

  FN void bring(const float (&shrink)[2]) {
#pragma unroll
    for (int i = 0; i < D / 8; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) out[i][e] *= shrink[e / 2];
  }

  // Totals over the lanes that share a row.
  FN void finish() {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      total[h] += __shfl_xor_sync(~0u, total[h], 1);
      total[h] += __shfl_xor_sync(~0u, total[h], 2);
    }
  }

  // The two dimensions that out[i][2h], out[i][2h + 1] belong to: `dimension(i)` and the one `STEP` further.
  static constexpr int STEP = FP8 ? 2 : 1;
  FN static int dimension(int i) {
    int c = lane() % 4;
    if constexpr (FP8) return i / 2 * 16 + 4 * c + i % 2;
    else return i * 8 + 2 * c;
  }

 private:
  template <int TILES> FN void multiply_keys(float (&s)[2 * TILES][4], const unsigned char* tiles) {
    int l = lane(), row = l % 8 + l / 16 * 8, side = l / 8 % 2;
    constexpr int WIDE = FP8 ? 32 : 16;  // dimensions in two chunks
#pragma unroll
    for (int k = 0; k < D / WIDE; k++) {
      uint32_t q[FP8 ? 2 : 1][4];
#pragma unroll
      for (int i = 0; i < WIDE / 16; i++) {
        if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
          for (int e = 0; e < 4; e++) q[i][e] = query[k * (WIDE / 16) + i][e];
        } else {
          load_query(q[i], k * (WIDE / 16) + i);
        }
      }
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        uint32_t b[4];  // keys 0-7 of both chunks, keys 8-15 of both
        ldmatrix_x4<false>(b, tiles + t * 2 * Keys::BYTES + Keys::at(row, 2 * k + side));
        if constexpr (FP8) {
#pragma unroll
          for (int i = 0; i < 4; i++)
            mma<M>(s[2 * t + i / 2], q[i % 2], half2_of_e4m3x2(uint16_t(b[i])), half2_of_e4m3x2(uint16_t(b[i] >> 16)));
        } else {
          mma<M>(s[2 * t], q[0], b[0], b[1]);
          mma<M>(s[2 * t + 1], q[0], b[2], b[3]);
        }
      }
    }
  }

  // `valid` rows of the tile were ever written; what lies beyond may be NaN, which a weight of 0 would not hide.
  FN void mix_values(const uint32_t (&a)[4], const unsigned char* values, int valid) {
    int l = lane(), c = l % 4;
    uint32_t keep[2] = {~0u, ~0u};
    if (valid < TILE) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        keep[i] = (2 * c + 8 * i < valid ? 0xFFFFu : 0u) | (2 * c + 8 * i + 1 < valid ? 0xFFFF0000u : 0u);
    }
#pragma unroll
    for (int i = 0; i < Keys::CHUNKS / 2; i++) {
      uint32_t b[4];  // keys 0-7 and 8-15 of one chunk, then of the next
      ldmatrix_x4<true>(b, values + Keys::at(l % 16, 2 * i + l / 16));
#pragma unroll
      for (int e = 0; e < 4; e++) b[e] &= keep[e % 2];
      if constexpr (FP8) {
        mma_values_e4m3(out[4 * i], out[4 * i + 1], a, b[0], b[1]);
        mma_values_e4m3(out[4 * i + 2], out[4 * i + 3], a, b[2], b[3]);
      } else {
        mma<M>(out[2 * i], a, b[0], b[1]);
        mma<M>(out[2 * i + 1], a, b[2], b[3]);
      }
    }
  }
};

// What a row's weights sum to with its head's sink: a key without a value, that takes weight only.
FN float with_sink(float total, float most, const float* sinks, int head) {
  return sinks ? total + exp2_fast(sinks[head] * LOG2E - most) : total;
}

// Query rows [row, row + 16·WARPS) to images in shared memory, 16 rows each; rows past the work's end are zero. A head's
// query is the first D of PITCH numbers.
template <class T, class M, int D, int PITCH = D>
FN void load_queries(unsigned char* images, int rows, const T* q, const Work& work, const int* token_of, int heads,
                     int head0, int group) {
  using Query = Image<M, D>;
  constexpr int CHUNKS = D / 8;
  for (int i = threadIdx.x; i < rows * CHUNKS; i += blockDim.x) {
    int r = i / CHUNKS, chunk = i % CHUNKS, row = work.row + r;
    uint4 eight = {0, 0, 0, 0};
    if (row < work.row_end) {
      int64_t token = token_of[work.tokens + row / group];
      eight = *reinterpret_cast<const uint4*>(q + (token * heads + head0 + row % group) * PITCH + chunk * 8);
    }
    if constexpr (!Same<T, M>::value) {
      const T* from = reinterpret_cast<const T*>(&eight);
      uint4 to = {pack2<M>(value_of(from[0]), value_of(from[1])), pack2<M>(value_of(from[2]), value_of(from[3])),
                  pack2<M>(value_of(from[4]), value_of(from[5])), pack2<M>(value_of(from[6]), value_of(from[7]))};
      eight = to;
    }
    *reinterpret_cast<uint4*>(images + r / TILE * Query::BYTES + Query::at(r % TILE, chunk)) = eight;
  }
}
