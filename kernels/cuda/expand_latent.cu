// From latent KV (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434) to keys and values of single heads, for
// attention over long chunks of prompts: tiles' contents as plain rows, which a matrix product makes keys and values
// of, and those to images of a pool in which every query head has a key head of its own. These are in 16 bits, whatever
// contents are kept in.
#include "tile.cuh"

// A block for a tile: `out` is [tiles · 16][CONTENT].
template <class T, class KV, int CONTENT, int ROTATED>
__global__ void __launch_bounds__(128)
gather_latent(const unsigned char* __restrict__ pool, const int* __restrict__ tiles, T* __restrict__ out, float unit) {
  using Tile = LatentTile<T, KV, CONTENT, ROTATED>;
  using Content = typename Tile::Content;
  const unsigned char* image = pool + (int64_t)tiles[blockIdx.x] * Tile::BYTES;
  for (int i = threadIdx.x; i < TILE * Content::CHUNKS; i += blockDim.x) {
    const int row = i / Content::CHUNKS, chunk = i % Content::CHUNKS;
    T* to = out + ((int64_t)blockIdx.x * TILE + row) * CONTENT + chunk * Content::PER_CHUNK;
    const uint4 from = *reinterpret_cast<const uint4*>(image + Content::at(row, chunk));
    if constexpr (sizeof(KV) == 1) {
      const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const uint32_t low = half2_of_e4m3x2(uint16_t(words[w])), high = half2_of_e4m3x2(uint16_t(words[w] >> 16));
        auto two = [&](uint32_t halves) {
          return pack2<T>(half_value(uint16_t(halves)) * unit, half_value(uint16_t(halves >> 16)) * unit);
        };
        *reinterpret_cast<uint2*>(to + 4 * w) = {two(low), two(high)};
      }
    } else {
      *reinterpret_cast<uint4*>(to) = from;
    }
  }
}

// A block for a tile and a head. `keys` are [heads][tiles · 16][kept], `values` [heads][tiles · 16][mixed], multiples of
// 8. A head's key is its own numbers, then those that are rotated, which all heads share; keys and values end in zeros.
template <class T, class KV, int CONTENT, int ROTATED, int D>
__global__ void __launch_bounds__(128)
expand_latent(const unsigned char* __restrict__ pool, const int* __restrict__ tiles, const T* __restrict__ keys,
              const T* __restrict__ values, unsigned char* __restrict__ out, int kept, int mixed) {
  using Tile = LatentTile<T, KV, CONTENT, ROTATED>;
  using Expanded = Image<T, D>;
  constexpr int CHUNKS = D / 8;
  const int tile = blockIdx.x, head = blockIdx.y;
  const unsigned char* shared_keys = pool + (int64_t)tiles[tile] * Tile::BYTES + Tile::Content::BYTES;
  unsigned char* image = out + ((int64_t)tile * gridDim.y + head) * Pool<T, D>::TILE_BYTES;
  const int64_t row0 = ((int64_t)head * gridDim.x + tile) * TILE;
  for (int i = threadIdx.x; i < TILE * CHUNKS; i += blockDim.x) {
    const int row = i / CHUNKS, chunk = i % CHUNKS, d = chunk * 8;
    uint4 key = {0, 0, 0, 0}, value = {0, 0, 0, 0};
    if (d < kept) key = *reinterpret_cast<const uint4*>(keys + (row0 + row) * kept + d);
    else if (d < kept + ROTATED)
      key = *reinterpret_cast<const uint4*>(shared_keys + Tile::Rotated::at(row, (d - kept) / 8));
    if (d < mixed) value = *reinterpret_cast<const uint4*>(values + (row0 + row) * mixed + d);
    *reinterpret_cast<uint4*>(image + Expanded::at(row, chunk)) = key;
    *reinterpret_cast<uint4*>(image + Expanded::BYTES + Expanded::at(row, chunk)) = value;
  }
}
