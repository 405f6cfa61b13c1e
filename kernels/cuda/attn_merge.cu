// Brings together what parts of a context gave for the same query rows: fp32 results with base-2 log-sum-exps.
#include "tile.cuh"

// One warp for a row. ROWS is how many packed rows a part has, `shared_rows` how many one of shared keys. Parts are
// summed in the order of their keys, whoever computed them: a row's sum is the same bits with and without sharing.
template <class T, int D, int ROWS>
__global__ void __launch_bounds__(128, 8)  // without the 8, ptxas saves registers and spills
attn_merge(const Merge* __restrict__ merges, const int* __restrict__ count, const int* __restrict__ token_of,
           const float* __restrict__ part_out, const float* __restrict__ part_lse,
           const float* __restrict__ shared_out, const float* __restrict__ shared_lse, int shared_rows,
           const float* __restrict__ sinks, T* __restrict__ out, int heads, int kv_heads) {
  if (count && (int)blockIdx.x >= *count) return;
  const Merge merge = merges[blockIdx.x];
  const int head = blockIdx.y, group = heads / kv_heads, lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < ROWS && merge.row + r < merge.row_end; r += 4) {
    const int parts = merge.shared_parts + merge.parts;
    auto own = [&](int i) { return ((int64_t)(merge.part + i - merge.shared_parts) * kv_heads + head) * ROWS + r; };
    auto theirs = [&](int i) {
      return ((int64_t)(merge.shared_part + i) * kv_heads + head) * shared_rows + merge.shift + r;
    };
    auto lse = [&](int i) { return i < merge.shared_parts ? shared_lse[theirs(i)] : part_lse[own(i)]; };
    float most = minus_infinity();
    for (int i = lane; i < parts; i += 32) most = fmaxf(most, lse(i));
    most = warp_max(most);
    float base = most == minus_infinity() ? 0.f : most, total = 0.f, sum[(D + 31) / 32] = {};
    for (int i = 0; i < parts; i++) {
      const float* from = i < merge.shared_parts ? shared_out + theirs(i) * D : part_out + own(i) * D;
      float share = exp2_fast(lse(i) - base);
      total += share;
#pragma unroll
      for (int k = 0; k < (D + 31) / 32; k++)
        if (k * 32 + lane < D) sum[k] += share * from[k * 32 + lane];
    }
    int row = merge.row + r;
    total = with_sink(total, base, sinks, head * group + row % group);
    T* to = out + ((int64_t)token_of[merge.tokens + row / group] * heads + head * group + row % group) * D;
#pragma unroll
    for (int k = 0; k < (D + 31) / 32; k++)
      if (k * 32 + lane < D) to[k * 32 + lane] = Number<T>::of(total > 0.f ? sum[k] / total : 0.f);
  }
}
