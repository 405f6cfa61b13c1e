// Paged attention for many query rows on sm_90a: 128 packed rows, 64 for each of two warpgroups, share every stage.
//
// The first warpgroup only brings keys and values: a bulk copy for each panel of a tile, gathered from the pool into
// stages of TOKENS tokens whose rows follow one another as wgmma wants them. A stage's keys and values have barriers of
// their own, and go back to the producer as soon as all consumers are done with them. A consumer multiplies its queries
// with the next keys while the values of the last are mixed, and works out weights meanwhile (FlashAttention-3,
// arXiv 2407.08608). Heads of 64 numbers and more, of which 16 or 32 may be beyond a multiple of 64: these are a narrower
// panel, the tail, with products of its own. Values in the same type as queries.
#include "tile.cuh"
#include "warpgroup.cuh"

// Where things lie in shared memory. A stage's keys, or values: panels of 64 numbers, each [TOKENS][128 bytes], then the
// tail, [TOKENS][TAIL bytes].
template <int D, int TOKENS, int STAGES> struct Room {
  static constexpr int CONSUMERS = 2, ROWS = 64, PANELS = D / 64, TAIL = D % 64 * 2;
  static constexpr int PANEL = TOKENS * 128, QUERY_PANEL = ROWS * 128, STAGE = TOKENS * D * 2, QUERIES = ROWS * D * 2;
  static constexpr int KEYS = CONSUMERS * QUERIES, VALUES = KEYS + STAGES * STAGE, BARRIERS = VALUES + STAGES * STAGE;

  // Where a chunk of a row begins, and which it is after the exchange of a row's chunks.
  FN static int at(int row, int chunk, int panel) {
    if (TAIL && chunk >= PANELS * 8) return PANELS * panel + row * TAIL + (chunk - PANELS * 8) * 16;
    return chunk / 8 * panel + row * 128 + chunk % 8 * 16;
  }
  FN static int exchanged(int row, int chunk) { return chunk ^ (TAIL && chunk >= PANELS * 8 ? row % 8 * TAIL / 128 : row % 8); }
};

template <class T, int D, int TOKENS, int STAGES, bool BIASED>
__global__ void __launch_bounds__(3 * WARPGROUP, 1)
attn_wgmma(const T* __restrict__ q, const unsigned char* __restrict__ pool, const int* __restrict__ tables,
           int table_stride, int tiles_per_block, const int* __restrict__ position, const int* __restrict__ token_of,
           const Work* __restrict__ works, const int* __restrict__ count, T* __restrict__ out,
           float* __restrict__ part_out, float* __restrict__ part_lse, const float* __restrict__ sinks,
           const float* __restrict__ slopes, const uint64_t* __restrict__ tree_mask,
           const int* __restrict__ tree_start, int heads, int kv_heads, float scale, float soft_cap,
           float value_scale, int window) {
  static_assert(D >= 64 && D <= 256 && D % 64 % 16 == 0 && D % 64 <= 32, "wgmma's panels are of 64, 32 or 16 numbers");
  static_assert(TOKENS == 64 || TOKENS == 128, "a stage's products are of 64 or 128 columns");
  using Place = Room<D, TOKENS, STAGES>;
  using Mine = Rows<T, T, D, false, BIASED>;
  constexpr int TILES = TOKENS / TILE, PANELS = Place::PANELS, TAIL = Place::TAIL, PIECE = TILE * 128;
  constexpr int PIECES = PANELS + (TAIL > 0);
  const int works_here = count ? *count : (int)gridDim.x;
  if ((int)blockIdx.x >= works_here) return;  // a plan made on the device, launched with room for more
  SHARED_MEMORY(shared);
  uint64_t* keys_there = reinterpret_cast<uint64_t*>(shared + Place::BARRIERS);
  uint64_t *values_there = keys_there + STAGES, *keys_free = values_there + STAGES, *values_free = keys_free + STAGES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, group = heads / kv_heads;
  const Work work = works[works_here - 1 - blockIdx.x];  // the last rows of a prompt see most: they begin first
  const int tile0 = work.key / TILE, tile_end = (work.key_end + TILE - 1) / TILE;
  const int stages = (tile_end - tile0 + TILES - 1) / TILES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * STAGES; i++) barrier_init(&keys_there[i], 1);
    for (int i = 0; i < 2 * STAGES; i++) barrier_init(&keys_free[i], Place::CONSUMERS * 4);
    barrier_publish();
  }
  __syncthreads();

  if (warp < 4) {  // the producer
    registers_less<40>();
    if (warp > 0) return;
    const int* table = tables + (int64_t)work.table * table_stride;
    for (int stage = 0; stage < stages; stage++) {
      const int slot = stage % STAGES, first = tile0 + stage * TILES, tiles = min(TILES, tile_end - first);
#pragma unroll
      for (int half = 0; half < 2; half++) {  // keys, then values
        uint64_t* there = (half ? values_there : keys_there) + slot;
        if (stage >= STAGES) barrier_wait((half ? values_free : keys_free) + slot, stage / STAGES - 1 & 1);
        if (lane == 0) barrier_expect(there, tiles * Image<T, D>::BYTES);
        __syncwarp();  // bytes are announced before they come
#pragma unroll 1
        for (int i = lane; i < tiles * PIECES; i += 32) {
          const int tile = i / PIECES, panel = i % PIECES, size = panel < PANELS ? PIECE : TILE * TAIL;
          const unsigned char* image = pool + Pool<T, D>::at(table, first + tile, tiles_per_block, kv_heads, head);
          unsigned char* to = shared + (half ? Place::VALUES : Place::KEYS) + slot * Place::STAGE;
          bulk_copy(to + panel * Place::PANEL + tile * size, image + half * Image<T, D>::BYTES + panel * PIECE, size, there);
        }
      }
    }
    return;
  }

  registers_more<232>();
  const int consumer = warp / 4 - 1, thread = threadIdx.x % WARPGROUP;
  unsigned char* queries = shared + consumer * Place::QUERIES;
  const int row0 = work.row + consumer * Place::ROWS;
  for (int i = thread; i < Place::ROWS * D / 8; i += WARPGROUP) {
    const int r = i / (D / 8), chunk = i % (D / 8), row = row0 + r;
    uint4 eight = {0, 0, 0, 0};
    if (row < work.row_end) {
      const int64_t token = token_of[work.tokens + row / group];
      eight = *reinterpret_cast<const uint4*>(q + (token * heads + head * group + row % group) * D + chunk * 8);
    }
    store_async(queries + Place::at(r, Place::exchanged(r, chunk), Place::QUERY_PANEL), eight);
  }
  fence_async();
  barrier_some(1 + consumer, WARPGROUP);

  Mine mine;
  mine.start(nullptr, work, row0 + warp % 4 * TILE, token_of, position, head * group, group, window,
             {slopes, tree_mask, tree_start});
  const Scores how = scores_of(scale, soft_cap);
  float s[TOKENS / 8][4], shrink[2];
  uint32_t weights[TILES][4];

  auto score = [&](int stage) {  // begin to multiply with a stage's keys
    const int slot = stage % STAGES;
    barrier_wait(&keys_there[slot], stage / STAGES & 1);
    const uint64_t a = descriptor<128>(queries, 1024, 0);
    const uint64_t b = descriptor<128>(shared + Place::KEYS + slot * Place::STAGE, 1024, 0);
    products_begin();
#pragma unroll
    for (int k = 0; k < PANELS * 4; k++)
      multiply<T, TOKENS>(s, further(a, k / 4 * Place::QUERY_PANEL + k % 4 * 32),
                          further(b, k / 4 * Place::PANEL + k % 4 * 32), k > 0);
    if constexpr (TAIL > 0) {
      const uint64_t c = descriptor<TAIL>(queries + PANELS * Place::QUERY_PANEL, 8 * TAIL, 0);
      const uint64_t d = descriptor<TAIL>(shared + Place::KEYS + slot * Place::STAGE + PANELS * Place::PANEL, 8 * TAIL, 0);
#pragma unroll
      for (int k = 0; k < TAIL / 32; k++) multiply<T, TOKENS>(s, further(c, k * 32), further(d, k * 32), true);
    }
    products_commit();
  };
  auto mix = [&](int stage) {  // begin to mix a stage's values
    const int slot = stage % STAGES;
    const uint64_t b = descriptor<128>(shared + Place::VALUES + slot * Place::STAGE, 1024, Place::PANEL);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      multiply_transposed<T, D < 128 ? 64 : 128>(mine.out, weights[t], further(b, t * PIECE), true);
      if constexpr (PANELS > 2)
        multiply_transposed<T, PANELS * 64 - 128, 16>(mine.out, weights[t], further(b, t * PIECE + 2 * Place::PANEL), true);
    }
    if constexpr (TAIL > 0) {
      const uint64_t d = descriptor<TAIL>(shared + Place::VALUES + slot * Place::STAGE + PANELS * Place::PANEL, 8 * TAIL, 0);
#pragma unroll
      for (int t = 0; t < TILES; t++)
        multiply_transposed<T, TAIL / 2, PANELS * 8>(mine.out, weights[t], further(d, t * TILE * TAIL), true);
    }
    products_commit();
  };
  auto weigh = [&](int stage) {
    mine.template weigh<TILES>(s, work.key + stage * TOKENS, how, shrink);
  };
  auto pack = [&] {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        weights[t][i] = pack2<T>(s[2 * t + i / 2][i % 2 * 2], s[2 * t + i / 2][i % 2 * 2 + 1]);
  };
  auto give_back = [&](uint64_t* barriers, int stage) {
    if (lane == 0) barrier_arrive(&barriers[stage % STAGES]);
  };

  score(0);
  products_wait<0>();
  products_of(s);
  give_back(keys_free, 0);
  weigh(0);
  pack();
  for (int stage = 1; stage < stages; stage++) {
    score(stage);
    barrier_wait(&values_there[(stage - 1) % STAGES], (stage - 1) / STAGES & 1);
    mix(stage - 1);
    products_wait<1>();
    products_of(s);
    give_back(keys_free, stage);
    weigh(stage);
    products_wait<0>();
    products_of(mine.out);
    give_back(values_free, stage - 1);
    mine.bring(shrink);
    pack();
  }
  const int last = stages - 1, valid = work.key_end - work.key - last * TOKENS;
  barrier_wait(&values_there[last % STAGES], last / STAGES & 1);
  if (valid < TOKENS) {  // values that were never written may be NaN, which a weight of 0 would not hide
    unsigned char* values = shared + Place::VALUES + last % STAGES * Place::STAGE;
    constexpr int CHUNKS = D / 8;
    for (int i = threadIdx.x - WARPGROUP + valid * CHUNKS; i < TOKENS * CHUNKS; i += Place::CONSUMERS * WARPGROUP)
      store_async(values + Place::at(i / CHUNKS, i % CHUNKS, Place::PANEL), {0, 0, 0, 0});
    fence_async();
    barrier_some(3, Place::CONSUMERS * WARPGROUP);
  }
  products_begin();
  mix(last);
  products_wait<0>();
  products_of(mine.out);
  mine.finish();

#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int r = consumer * Place::ROWS + warp % 4 * TILE + lane / 4 + 8 * h, row = work.row + r;
    if (row >= work.row_end) continue;
    const float base = mine.most[h] == minus_infinity() ? 0.f : mine.most[h];
    float all = mine.total[h];
    if (work.part < 0) all = with_sink(all, base, sinks, head * group + row % group);
    const float factor = all > 0.f ? value_scale * reciprocal(all) : 0.f;
    const int64_t token = token_of[work.tokens + row / group];
    const int64_t part = ((int64_t)work.part * kv_heads + head) * (Place::CONSUMERS * Place::ROWS) + r;
    T* to = out + (token * heads + head * group + row % group) * D;
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
      const int d = Mine::dimension(i);
      const float x = mine.out[i][2 * h] * factor, y = mine.out[i][2 * h + 1] * factor;
      if (work.part < 0) *reinterpret_cast<uint32_t*>(to + d) = pack2<T>(x, y);
      else *reinterpret_cast<float2*>(part_out + part * D + d) = {x, y};
    }
    if (work.part >= 0 && lane % 4 == 0)
      part_lse[part] = mine.total[h] > 0.f ? mine.most[h] + log2f(mine.total[h]) : minus_infinity();
  }
}
