// From latent KV (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434) to keys and values of single heads, for
// attention over long chunks of prompts: tiles' contents as plain rows, which a matrix product makes keys and values
// of, and those to images of a pool in which every query head has a key head of its own.
#include "tile.cuh"

// A block for a tile: `out` is [tiles · 16][CONTENT].
template <class T, int CONTENT, int ROTATED>
__global__ void __launch_bounds__(128)
gather_latent(const unsigned char* __restrict__ pool, const int* __restrict__ tiles, T* __restrict__ out) {
  using Latent = Image<T, CONTENT + ROTATED>;
  constexpr int CHUNKS = CONTENT / 8;
  const unsigned char* image = pool + (int64_t)tiles[blockIdx.x] * Latent::BYTES;
  for (int i = threadIdx.x; i < TILE * CHUNKS; i += blockDim.x) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    *reinterpret_cast<uint4*>(out + ((int64_t)blockIdx.x * TILE + row) * CONTENT + chunk * 8) =
        *reinterpret_cast<const uint4*>(image + Latent::at(row, chunk));
  }
}

// A block for a tile and a head. `keys` are [heads][tiles · 16][kept], `values` [heads][tiles · 16][mixed], multiples of
// 8. A head's key is its own numbers, then those that are rotated, which all heads share; keys and values end in zeros.
template <class T, int CONTENT, int ROTATED, int D>
__global__ void __launch_bounds__(128)
expand_latent(const unsigned char* __restrict__ pool, const int* __restrict__ tiles, const T* __restrict__ keys,
              const T* __restrict__ values, unsigned char* __restrict__ out, int kept, int mixed) {
  using Latent = Image<T, CONTENT + ROTATED>;
  using Expanded = Image<T, D>;
  constexpr int CHUNKS = D / 8;
  const int tile = blockIdx.x, head = blockIdx.y;
  const unsigned char* shared_keys = pool + (int64_t)tiles[tile] * Latent::BYTES;
  unsigned char* image = out + ((int64_t)tile * gridDim.y + head) * Pool<T, D>::TILE_BYTES;
  const int64_t row0 = ((int64_t)head * gridDim.x + tile) * TILE;
  for (int i = threadIdx.x; i < TILE * CHUNKS; i += blockDim.x) {
    const int row = i / CHUNKS, chunk = i % CHUNKS, d = chunk * 8;
    uint4 key = {0, 0, 0, 0}, value = {0, 0, 0, 0};
    if (d < kept) key = *reinterpret_cast<const uint4*>(keys + (row0 + row) * kept + d);
    else if (d < kept + ROTATED)
      key = *reinterpret_cast<const uint4*>(shared_keys + Latent::at(row, (CONTENT + d - kept) / 8));
    if (d < mixed) value = *reinterpret_cast<const uint4*>(values + (row0 + row) * mixed + d);
    *reinterpret_cast<uint4*>(image + Expanded::at(row, chunk)) = key;
    *reinterpret_cast<uint4*>(image + Expanded::BYTES + Expanded::at(row, chunk)) = value;
  }
}
