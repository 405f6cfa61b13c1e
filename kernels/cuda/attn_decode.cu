// Paged attention for few query rows: at most 16 (heads of a group times tokens) of a KV head, over a long context.
//
// Bound by memory: each warp streams its own tiles (warp, warp + WARPS, ...) through a private ring of shared memory,
// so the main loop has no barrier of the block. On sm_90 and later (BULK) one lane brings a tile, keys and values at
// once, with one bulk copy; before, the lanes use cp.async. At the end the warps' results are joined.
#include "tile.cuh"

template <class T, class KV, int D, int WARPS, int STAGES, bool BULK, bool BIASED>
__global__ void __launch_bounds__(WARPS * 32, 1)  // without the 1, ptxas saves registers and spills
attn_decode(const T* __restrict__ q, const unsigned char* __restrict__ pool, const int* __restrict__ tables,
            int table_stride, int tiles_per_block, const int* __restrict__ position, const int* __restrict__ token_of,
            const Work* __restrict__ works, const int* __restrict__ count, T* __restrict__ out,
            float* __restrict__ part_out, float* __restrict__ part_lse, const float* __restrict__ sinks,
            const float* __restrict__ slopes, const uint64_t* __restrict__ tree_mask,
            const int* __restrict__ tree_start, int heads, int kv_heads, float scale, float soft_cap,
            float value_scale, int window) {
  if (count && (int)blockIdx.x >= *count) return;  // a plan made on the device, launched with room for more
  using Mine = Rows<T, KV, D, (D <= 128 || sizeof(KV) == 2), BIASED>;
  constexpr int TILE_BYTES = Pool<KV, D>::TILE_BYTES;
  SHARED_MEMORY(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, group = heads / kv_heads;
  unsigned char* ring = shared + warp * STAGES * TILE_BYTES;
  unsigned char* query_image = shared + WARPS * STAGES * TILE_BYTES;
  uint64_t* barriers = reinterpret_cast<uint64_t*>(query_image + Mine::Query::BYTES) + warp * STAGES;
  const Work work = works[blockIdx.x];
  const int* table = tables + (int64_t)work.table * table_stride;
  const int tile0 = work.key / TILE + warp, tile_end = (work.key_end + TILE - 1) / TILE;
  const int tiles = tile_end > tile0 ? (tile_end - tile0 + WARPS - 1) / WARPS : 0;

  auto fetch = [&](int i) {  // the warp's i-th tile into its slot of the ring
    if (i < tiles) {
      unsigned char* to = ring + i % STAGES * TILE_BYTES;
      const unsigned char* from = pool + Pool<KV, D>::at(table, tile0 + i * WARPS, tiles_per_block, kv_heads, head);
      if constexpr (BULK) {
        if (lane == 0) {
          barrier_expect(&barriers[i % STAGES], TILE_BYTES);
          bulk_copy(to, from, TILE_BYTES, &barriers[i % STAGES]);
        }
      } else {
        for (int at = lane * 16; at < TILE_BYTES; at += 512) copy_async(to + at, from + at);
      }
    }
    if constexpr (!BULK) copy_commit();  // empty groups keep the count right
  };
  if constexpr (BULK) {
    if (lane == 0) {
      for (int i = 0; i < STAGES; i++) barrier_init(&barriers[i], 1);
      barrier_publish();
    }
    __syncwarp();
  }
  for (int i = 0; i < STAGES - 1; i++) fetch(i);

  load_queries<T, typename Mine::M, D>(query_image, TILE, q, work, token_of, heads, head * group, group);
  __syncthreads();
  Mine mine;
  mine.start(query_image, work, work.row, token_of, position, head * group, group, window,
             {slopes, tree_mask, tree_start});
  mine.load_queries();
  const Scores how = scores_of(scale, soft_cap);
  for (int i = 0; i < tiles; i++) {
    fetch(i + STAGES - 1);
    if constexpr (BULK) {
      barrier_wait(&barriers[i % STAGES], i / STAGES & 1);
    } else {
      copy_wait<STAGES - 1>();
      __syncwarp();  // what other lanes brought
    }
    mine.template take<1>(ring + i % STAGES * TILE_BYTES, (tile0 + i * WARPS) * TILE, work.key_end, how);
    __syncwarp();  // all lanes have read the slot before it is filled again
  }
  if constexpr (!BULK) copy_wait<0>();
  mine.finish();

  __syncthreads();  // the rings are free: they take [WARPS][16][D] sums, then maxima and totals
  float* sums = reinterpret_cast<float*>(shared);
  float2* marks = reinterpret_cast<float2*>(sums + WARPS * TILE * D);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int r = warp * TILE + lane / 4 + 8 * h;
    if (lane % 4 == 0) marks[r] = {mine.most[h], mine.total[h]};
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
      float* to = sums + r * D + Mine::dimension(i);
      to[0] = mine.out[i][2 * h];
      to[Mine::STEP] = mine.out[i][2 * h + 1];
    }
  }
  __syncthreads();
  for (int r = warp; r < TILE && work.row + r < work.row_end; r += WARPS) {
    float most = minus_infinity(), total = 0.f, share[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++) most = fmaxf(most, marks[w * TILE + r].x);
    float base = most == minus_infinity() ? 0.f : most;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      share[w] = exp2_fast(marks[w * TILE + r].x - base);
      total += share[w] * marks[w * TILE + r].y;
    }
    int row = work.row + r;
    float all = work.part < 0 ? with_sink(total, base, sinks, head * group + row % group) : total;
    float factor = all > 0.f ? value_scale * reciprocal(all) : 0.f;
    int64_t token = token_of[work.tokens + row / group], part = ((int64_t)work.part * kv_heads + head) * TILE + r;
    for (int d = lane; d < D; d += 32) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += share[w] * sums[(w * TILE + r) * D + d];
      if (work.part < 0) out[(token * heads + head * group + row % group) * D + d] = Number<T>::of(sum * factor);
      else part_out[part * D + d] = sum * factor;
    }
    if (work.part >= 0 && lane == 0) part_lse[part] = total > 0.f ? base + log2f(total) : minus_infinity();
  }
}
