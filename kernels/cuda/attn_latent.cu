// Paged attention over latent KV with absorbed queries: all heads share one row of CONTENT + ROTATED numbers a token,
// which is the key; its first CONTENT numbers are the value. Those may be in fp8, for `unit` times as much: then they meet
// queries and weights in halves.
//
// A block has 16 packed rows (token · heads + head). A stage is 4 tiles of 16 tokens: each of the 4 warps scores one
// tile, the scores are exchanged through shared memory, and each warp mixes all 64 tokens' values for its own quarter
// of CONTENT. Every warp keeps the same maxima and totals.
#include "tile.cuh"

// Scores of 16 query rows with a tile's 16 keys, over D dimensions in 16 bits.
template <class T, int D> FN void meet(float (&s)[2][4], const unsigned char* queries, const unsigned char* keys) {
  const int lane = threadIdx.x % 32;
#pragma unroll 4
  for (int k = 0; k < D / 16; k++) {
    uint32_t a[4], b[4];
    ldmatrix_x4<false>(a, queries + Image<T, D>::at(lane % 16, 2 * k + lane / 16));
    ldmatrix_x4<false>(b, keys + Image<T, D>::at(lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
    mma<T>(s[0], a, b[0], b[1]);
    mma<T>(s[1], a, b[2], b[3]);
  }
}

// The same with keys in e4m3.
template <int D> FN void meet_e4m3(float (&s)[2][4], const unsigned char* queries, const unsigned char* keys) {
  const int lane = threadIdx.x % 32;
#pragma unroll 2
  for (int k = 0; k < D / 32; k++) {
    uint32_t b[4];  // keys 0-7 of both chunks, keys 8-15 of both
    ldmatrix_x4<false>(b, keys + Image<e4m3, D>::at(lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint32_t a[4];
      load_query_for_e4m3<Image<f16, D>>(a, queries, 2 * k + i);
      mma<f16>(s[0], a, half2_of_e4m3x2(uint16_t(b[i])), half2_of_e4m3x2(uint16_t(b[i] >> 16)));
      mma<f16>(s[1], a, half2_of_e4m3x2(uint16_t(b[2 + i])), half2_of_e4m3x2(uint16_t(b[2 + i] >> 16)));
    }
  }
}

template <class T, class KV, int CONTENT, int ROTATED, int STAGES, bool TREES>
__global__ void __launch_bounds__(128, 1)  // without the 1 ptxas spills
attn_latent(const T* __restrict__ q, const unsigned char* __restrict__ pool, const int* __restrict__ tables,
            int table_stride, int tiles_per_block, const int* __restrict__ position, const int* __restrict__ token_of,
            const Work* __restrict__ works, const int* __restrict__ count, T* __restrict__ out,
            float* __restrict__ part_out, float* __restrict__ part_lse, const uint64_t* __restrict__ tree_mask,
            const int* __restrict__ tree_start, int heads, float scale, float unit) {
  constexpr bool FP8 = sizeof(KV) == 1;
  constexpr int D = CONTENT + ROTATED, WARPS = 4, MINE = CONTENT / WARPS, KEYS = WARPS * TILE, PITCH = KEYS + 4;
  using M = typename MmaType<T, KV>::type;
  using Tile = LatentTile<T, KV, CONTENT, ROTATED>;
  using Content = typename Tile::Content;
  using Query = Image<M, CONTENT>;
  constexpr int CHUNKS = Content::CHUNKS / WARPS;  // that a warp mixes
  static_assert(CHUNKS % 2 == 0, "a warp mixes whole pairs of chunks");
  if (count && (int)blockIdx.x >= *count) return;
  SHARED_MEMORY(shared);
  unsigned char* query_image = shared + STAGES * WARPS * Tile::BYTES;
  float* scores = reinterpret_cast<float*>(query_image + Query::BYTES + Tile::Rotated::BYTES);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = lane % 4;
  const Work work = works[blockIdx.x];
  const int* table = tables + (int64_t)work.table * table_stride;
  const int tile0 = work.key / TILE, tile_end = (work.key_end + TILE - 1) / TILE;
  const int stages = (tile_end - tile0 + WARPS - 1) / WARPS;

  auto fetch = [&](int stage) {
    const int first = tile0 + stage * WARPS, n = min(WARPS, tile_end - first);
    for (int t = 0; t < n; t++) {
      const int tile = first + t;
      int64_t number = (int64_t)table[tile / tiles_per_block] * tiles_per_block + tile % tiles_per_block;
      unsigned char* to = shared + (stage % STAGES * WARPS + t) * Tile::BYTES;
      for (int at = threadIdx.x * 16; at < Tile::BYTES; at += 2048) copy_async(to + at, pool + number * Tile::BYTES + at);
    }
    copy_commit();
  };
  for (int i = 0; i < STAGES - 1; i++) fetch(i);
  load_queries<T, M, CONTENT, D>(query_image, TILE, q, work, token_of, heads, 0, heads);
  load_queries<T, T, ROTATED, D>(query_image + Query::BYTES, TILE, q + CONTENT, work, token_of, heads, 0, heads);
  int last[2], start[TREES ? 2 : 1];
  uint64_t mask[TREES ? 2 : 1];
  float out_[MINE / 8][4], most[2], total[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int r = work.row + lane / 4 + 8 * h;
    last[h] = r < work.row_end ? min(position[token_of[work.tokens + r / heads]], work.key_end - 1) : -1;
    if constexpr (TREES) {
      start[h] = 0x7FFFFFFF, mask[h] = 0;
      if (r < work.row_end && tree_start[token_of[work.tokens + r / heads]] >= 0) {
        const int token = token_of[work.tokens + r / heads];
        start[h] = tree_start[token], mask[h] = tree_mask[token];
        last[h] = work.key_end - 1;  // keys of a tree lie in the order of its nodes, positions do not
      }
    }
    most[h] = minus_infinity();
    total[h] = 0.f;
  }
#pragma unroll
  for (int i = 0; i < MINE / 8; i++)
#pragma unroll
    for (int e = 0; e < 4; e++) out_[i][e] = 0.f;

  for (int stage = 0; stage < stages; stage++) {
    __syncthreads();  // all warps are done with the slot that is filled now
    fetch(stage + STAGES - 1);
    copy_wait<STAGES - 1>();
    __syncthreads();  // what other threads brought, the queries too
    const unsigned char* tiles = shared + stage % STAGES * WARPS * Tile::BYTES;
    const int key = work.key + stage * KEYS;
    {  // this warp's tile: 16 rows by 16 keys
      float s[2][4] = {};
      if (key + warp * TILE < work.key_end) {
        const unsigned char* tile = tiles + warp * Tile::BYTES;
        if constexpr (FP8) {
          meet_e4m3<CONTENT>(s, query_image, tile);
#pragma unroll
          for (int e = 0; e < 4; e++) s[0][e] *= unit, s[1][e] *= unit;
        } else {
          meet<T, CONTENT>(s, query_image, tile);
        }
        meet<T, ROTATED>(s, query_image + Query::BYTES, tile + Content::BYTES);
      }
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int n = warp * TILE + 8 * j + 2 * c + e;
            bool seen = key + n <= last[h];
            if constexpr (TREES) seen = seen && (key + n < start[h] || (mask[h] >> (key + n - start[h] & 63) & 1));
            scores[(lane / 4 + 8 * h) * PITCH + n] = seen ? s[j][2 * h + e] * scale * LOG2E : minus_infinity();
          }
    }
    __syncthreads();  // all scores are there
    float s[2 * WARPS][4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = most[h];
#pragma unroll
      for (int j = 0; j < 2 * WARPS; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          s[j][2 * h + e] = scores[(lane / 4 + 8 * h) * PITCH + 8 * j + 2 * c + e];
          top = fmaxf(top, s[j][2 * h + e]);
        }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      float base = top == minus_infinity() ? 0.f : top, shrink = exp2_fast(most[h] - base);
      most[h] = top;
      total[h] *= shrink;
#pragma unroll
      for (int i = 0; i < MINE / 8; i++) out_[i][2 * h] *= shrink, out_[i][2 * h + 1] *= shrink;
#pragma unroll
      for (int j = 0; j < 2 * WARPS; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          s[j][2 * h + e] = exp2_fast(s[j][2 * h + e] - base);
          total[h] += s[j][2 * h + e];
        }
    }
#pragma unroll
    for (int t = 0; t < WARPS; t++) {
      const int valid = work.key_end - key - t * TILE;
      if (valid <= 0) break;
      const uint32_t a[4] = {pack2<M>(s[2 * t][0], s[2 * t][1]), pack2<M>(s[2 * t][2], s[2 * t][3]),
                             pack2<M>(s[2 * t + 1][0], s[2 * t + 1][1]), pack2<M>(s[2 * t + 1][2], s[2 * t + 1][3])};
      uint32_t keep[2];  // what lies past the last key was never written: a weight of 0 would not hide a NaN
#pragma unroll
      for (int i = 0; i < 2; i++)
        keep[i] = (2 * c + 8 * i < valid ? 0xFFFFu : 0u) | (2 * c + 8 * i + 1 < valid ? 0xFFFF0000u : 0u);
#pragma unroll
      for (int i = 0; i < CHUNKS / 2; i++) {
        uint32_t b[4];
        ldmatrix_x4<true>(b, tiles + t * Tile::BYTES + Content::at(lane % 16, warp * CHUNKS + 2 * i + lane / 16));
#pragma unroll
        for (int e = 0; e < 4; e++) b[e] &= keep[e % 2];
        if constexpr (FP8) {
          mma_values_e4m3(out_[4 * i], out_[4 * i + 1], a, b[0], b[1]);
          mma_values_e4m3(out_[4 * i + 2], out_[4 * i + 3], a, b[2], b[3]);
        } else {
          mma<M>(out_[2 * i], a, b[0], b[1]);
          mma<M>(out_[2 * i + 1], a, b[2], b[3]);
        }
      }
    }
  }
  copy_wait<0>();
#pragma unroll
  for (int h = 0; h < 2; h++) {
    total[h] += __shfl_xor_sync(~0u, total[h], 1);
    total[h] += __shfl_xor_sync(~0u, total[h], 2);
    int r = lane / 4 + 8 * h, row = work.row + r;
    if (row >= work.row_end) continue;
    float factor = total[h] > 0.f ? reciprocal(total[h]) : 0.f;
    if constexpr (FP8) factor *= unit;
    int64_t token = token_of[work.tokens + row / heads], part = (int64_t)work.part * TILE + r;
#pragma unroll
    for (int i = 0; i < MINE / 8; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int d = warp * MINE + (FP8 ? i / 2 * 16 + 4 * c + i % 2 + 2 * e : 8 * i + 2 * c + e);
        float x = out_[i][2 * h + e] * factor;
        if (work.part < 0) out[(token * heads + row % heads) * CONTENT + d] = Number<T>::of(x);
        else part_out[part * CONTENT + d] = x;
      }
    if (work.part >= 0 && warp == 0 && c == 0)
      part_lse[part] = total[h] > 0.f ? most[h] + log2f(total[h]) : minus_infinity();
  }
}
