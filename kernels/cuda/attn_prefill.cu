// Paged attention for many query rows: WARPS·16 packed rows share each tile of keys and values.
//
// Tensor cores by mma.sync, so any GPU from sm_80 on. TILES tiles make a stage; while one is worked on, the next is on
// its way (bulk copies by one thread on sm_90 and later, cp.async by all before). Keys that no row of the block sees
// are left out by the plan.
#include "tile.cuh"

template <class T, class KV, int D, int WARPS, int TILES, bool BULK, bool BIASED>
__global__ void __launch_bounds__(WARPS * 32, D <= 192 ? 1 : 0)  // without the 1 ptxas spills small heads, with it large
attn_prefill(const T* __restrict__ q, const unsigned char* __restrict__ pool, const int* __restrict__ tables,
             int table_stride, int tiles_per_block, const int* __restrict__ position, const int* __restrict__ token_of,
             const Work* __restrict__ works, const int* __restrict__ count, T* __restrict__ out,
             float* __restrict__ part_out, float* __restrict__ part_lse, const float* __restrict__ sinks,
             const float* __restrict__ slopes, const uint64_t* __restrict__ tree_mask,
             const int* __restrict__ tree_start, int heads, int kv_heads, float scale, float soft_cap,
             float value_scale, int window) {
  if (count && (int)blockIdx.x >= *count) return;  // a plan made on the device, launched with room for more
  using Mine = Rows<T, KV, D, (D <= 128), BIASED>;
  constexpr int TILE_BYTES = Pool<KV, D>::TILE_BYTES, STAGE_BYTES = TILES * TILE_BYTES, ROWS = WARPS * TILE;
  SHARED_MEMORY(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, group = heads / kv_heads;
  unsigned char* query_images = shared + 2 * STAGE_BYTES;
  uint64_t* barriers = reinterpret_cast<uint64_t*>(query_images + WARPS * Mine::Query::BYTES);
  const Work work = works[blockIdx.x];
  const int* table = tables + (int64_t)work.table * table_stride;
  const int tile0 = work.key / TILE, tile_end = (work.key_end + TILE - 1) / TILE;
  const int stages = (tile_end - tile0 + TILES - 1) / TILES;

  auto fetch = [&](int stage) {
    const int first = tile0 + stage * TILES, n = min(TILES, tile_end - first);
    unsigned char* to = shared + stage % 2 * STAGE_BYTES;
    if constexpr (BULK) {
      if (stage < stages && threadIdx.x == 0) {
        barrier_expect(&barriers[stage % 2], n * TILE_BYTES);
        for (int t = 0; t < n; t++)
          bulk_copy(to + t * TILE_BYTES, pool + Pool<KV, D>::at(table, first + t, tiles_per_block, kv_heads, head),
                    TILE_BYTES, &barriers[stage % 2]);
      }
    } else {
      for (int t = 0; t < n; t++) {
        const unsigned char* from = pool + Pool<KV, D>::at(table, first + t, tiles_per_block, kv_heads, head);
        for (int at = threadIdx.x * 16; at < TILE_BYTES; at += WARPS * 512)
          copy_async(to + t * TILE_BYTES + at, from + at);
      }
      copy_commit();
    }
  };
  if constexpr (BULK) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; i++) barrier_init(&barriers[i], 1);
      barrier_publish();
    }
  }
  load_queries<T, typename Mine::M, D>(query_images, ROWS, q, work, token_of, heads, head * group, group);
  fetch(0);
  __syncthreads();
  Mine mine;
  mine.start(query_images + warp * Mine::Query::BYTES, work, work.row + warp * TILE, token_of, position, head * group,
             group, window, {slopes, tree_mask, tree_start});
  mine.load_queries();
  const Scores how = scores_of(scale, soft_cap);
  for (int stage = 0; stage < stages; stage++) {
    fetch(stage + 1);
    if constexpr (BULK) {
      barrier_wait(&barriers[stage % 2], stage / 2 & 1);
    } else {
      copy_wait<1>();
      __syncthreads();
    }
    mine.template take<TILES>(shared + stage % 2 * STAGE_BYTES, work.key + stage * TILES * TILE, work.key_end, how);
    __syncthreads();  // all warps have read the stage before it is filled again
  }
  if constexpr (!BULK) copy_wait<0>();
  mine.finish();
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int r = warp * TILE + lane / 4 + 8 * h, row = work.row + r;
    if (row >= work.row_end) continue;
    float base = mine.most[h] == minus_infinity() ? 0.f : mine.most[h];
    float all = work.part < 0 ? with_sink(mine.total[h], base, sinks, head * group + row % group) : mine.total[h];
    float factor = all > 0.f ? value_scale * reciprocal(all) : 0.f;
    int64_t token = token_of[work.tokens + row / group], part = ((int64_t)work.part * kv_heads + head) * ROWS + r;
    T* to = out + (token * heads + head * group + row % group) * D;
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
      int d = Mine::dimension(i);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float x = mine.out[i][2 * h + e] * factor;
        if (work.part < 0) to[d + e * Mine::STEP] = Number<T>::of(x);
        else part_out[part * D + d + e * Mine::STEP] = x;
      }
    }
    if (work.part >= 0 && lane % 4 == 0)
      part_lse[part] = mine.total[h] > 0.f ? mine.most[h] + log2f(mine.total[h]) : minus_infinity();
  }
}
