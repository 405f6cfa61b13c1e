// Copies whole blocks of the pool, within a layer or between two buffers: copy-on-write, and staging for swaps.
//
// The copies of a launch run at once: none may read what another writes.
#include "prims.cuh"

// grid: copies, layers. `from`, `to`: a buffer for each layer. `pairs`: source and target block of each copy.
__global__ void __launch_bounds__(256)
copy_blocks(const uint64_t* __restrict__ from, const uint64_t* __restrict__ to, const int* __restrict__ pairs,
            int64_t block_bytes) {
  const uint4* source = reinterpret_cast<const uint4*>(from[blockIdx.y] + pairs[2 * blockIdx.x] * block_bytes);
  uint4* target = reinterpret_cast<uint4*>(to[blockIdx.y] + pairs[2 * blockIdx.x + 1] * block_bytes);
  for (int64_t i = threadIdx.x; i < block_bytes / 16; i += blockDim.x) target[i] = source[i];
}
