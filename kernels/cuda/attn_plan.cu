// Cuts a step's attention into work on the device, so that a recorded graph can be replayed for other lengths.
//
// Gives what `plan.py` gives, in the same order: query tokens in row tiles, each against ranges of keys. One block; a
// thread for a query at a time. `split` is how many keys a work has at most: a fixed number, so that a request is cut
// the same in any company, or 0 for the least power of two from 128 on with which all works fill the device just once.
#include "tile.cuh"

constexpr int TREE = 64;  // tokens that may be a drafted tree: all see what the first one sees, as `plan.py` says

struct Queries {
  const int* lengths;  // of each query's context, its own tokens included
  const int* firsts;   // its first token; one more entry than there are queries
  int n, group, rows, least, most, window, step;
};

struct Need {
  int works, merges, parts;
  FN Need operator+(const Need& o) const { return {works + o.works, merges + o.merges, parts + o.parts}; }
};

struct RowTile {
  int row, row_end, key, key_end;
  FN int ranges(int split) const { return (key_end - 1) / split - key / split + 1; }
};

FN int packed_rows(const Queries& q, int i) {
  int packed = (q.firsts[i + 1] - q.firsts[i]) * q.group;
  return packed >= q.least && packed <= q.most ? packed : 0;  // another kernel's
}

FN RowTile tile_of(const Queries& q, int i, int row, int packed) {
  int tokens = q.firsts[i + 1] - q.firsts[i], before = q.lengths[i] - tokens, row_end = min(row + q.rows, packed);
  int token = tokens <= TREE ? 0 : row / q.group, first = q.window > 0 ? max(0, before + token + 1 - q.window) : 0;
  return {row, row_end, first / q.step * q.step, before + (row_end - 1) / q.group + 1};
}

FN Need need_of(const Queries& q, int i, int split) {
  Need need = {0, 0, 0};
  if (i >= q.n) return need;
  for (int row = 0, packed = packed_rows(q, i); row < packed; row += q.rows) {
    int ranges = tile_of(q, i, row, packed).ranges(split);
    need.works += ranges;
    if (ranges > 1) need.merges++, need.parts += ranges;
  }
  return need;
}

FN Need shuffled(const Need& need, int lane) {
  return {__shfl_sync(~0u, need.works, lane), __shfl_sync(~0u, need.merges, lane), __shfl_sync(~0u, need.parts, lane)};
}

// Sums over the threads before this one; `total` over all.
template <int THREADS> FN Need before_of(Need mine, Need* sums, Need& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Need up_to = mine;
#pragma unroll
  for (int k = 1; k < 32; k *= 2) {
    Need other = shuffled(up_to, lane >= k ? lane - k : lane);
    if (lane >= k) up_to = up_to + other;
  }
  __syncthreads();  // earlier sums have been read
  if (lane == 31) sums[warp] = up_to;
  __syncthreads();
  Need before = {up_to.works - mine.works, up_to.merges - mine.merges, up_to.parts - mine.parts};
  total = {0, 0, 0};
  for (int w = 0; w < THREADS / 32; w++) {
    if (w == warp) before = before + total;
    total = total + sums[w];
  }
  return before;
}

// counts: works, merges, parts, and the split that was taken. Works and merges beyond their room are counted, not
// written: whoever reads the counts must look.
template <int THREADS>
__global__ void __launch_bounds__(THREADS)
attn_plan(const int* __restrict__ lengths, const int* __restrict__ firsts, int n, int group, int rows, int least,
          int most, int window, int step, int split, int kv_heads, int fill, Work* __restrict__ works, Merge* __restrict__ merges,
          int* __restrict__ counts, int work_room, int merge_room) {
  SHARED_MEMORY(shared);
  Need* sums = reinterpret_cast<Need*>(shared);
  const Queries q = {lengths, firsts, n, group, rows, least, most, window, step};
  Need total;
  if (split == 0) {
    for (split = 128; split < 1 << 30; split *= 2) {
      Need mine = {0, 0, 0};
      for (int i = threadIdx.x; i < n; i += THREADS) mine = mine + need_of(q, i, split);
      before_of<THREADS>(mine, sums, total);
      if ((int64_t)total.works * kv_heads <= fill || total.parts == 0) break;
    }
  }
  Need done = {0, 0, 0};
  for (int first = 0; first < n; first += THREADS) {
    const int i = first + threadIdx.x;
    Need at = done + before_of<THREADS>(need_of(q, i, split), sums, total);
    done = done + total;
    const int packed = i < n ? packed_rows(q, i) : 0;
    for (int row = 0; row < packed; row += rows) {
      const RowTile tile = tile_of(q, i, row, packed);
      const int ranges = tile.ranges(split);
      for (int r = 0; r < ranges; r++, at.works++) {
        int key = r ? (tile.key / split + r) * split : tile.key, key_end = min((tile.key / split + r + 1) * split, tile.key_end);
        if (at.works < work_room)
          works[at.works] = {i, firsts[i], row, tile.row_end, key, key_end, ranges > 1 ? at.parts + r : -1, 0};
      }
      if (ranges == 1) continue;
      if (at.merges < merge_room) merges[at.merges] = {firsts[i], row, tile.row_end, at.parts, ranges, 0, 0, 0};
      at.merges++;
      at.parts += ranges;
    }
  }
  if (threadIdx.x == 0) counts[0] = done.works, counts[1] = done.merges, counts[2] = done.parts, counts[3] = split;
}
