// Writes tokens into a pool of latent KV (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434): the content is
// normalised, the part that carries position is rotated, and both are one row that all heads share. Contents may be kept
// in fp8, in units in which none is greater than 448 if they are normed with ones; what is rotated is not.
//
// One warp for a token. A slot below 0 marks a token that is padding.
#include "tile.cuh"

template <class T, class KV, int CONTENT, int ROTATED>
__global__ void __launch_bounds__(128)
append_latent(const T* __restrict__ latent, const int* __restrict__ position, const int64_t* __restrict__ slot,
              const float* __restrict__ angles,  // [position][ROTATED]: half of it cosines, half sines
              const T* __restrict__ norm, unsigned char* __restrict__ pool, int tokens, int interleaved, float eps,
              float per_unit) {
  using Tile = LatentTile<T, KV, CONTENT, ROTATED>;
  constexpr int D = CONTENT + ROTATED, HALF = ROTATED / 2;
  const int lane = threadIdx.x % 32;
  const int64_t token = (int64_t)blockIdx.x * 4 + threadIdx.x / 32;
  if (token >= tokens || slot[token] < 0) return;
  const T* from = latent + token * D;
  float squares = 0.f;
  for (int d = lane; d < CONTENT; d += 32) squares += value_of(from[d]) * value_of(from[d]);
  const float inverse = rsqrtf(warp_sum(squares) / CONTENT + eps);
  unsigned char* content = pool + slot[token] / TILE * Tile::BYTES;
  unsigned char* rotated = content + Tile::Content::BYTES;
  const int row = slot[token] % TILE;
  for (int d = lane; d < CONTENT; d += 32) {
    float y = value_of(from[d]) * inverse * value_of(norm[d]);
    if constexpr (sizeof(KV) == 1) y *= per_unit;
    *reinterpret_cast<KV*>(content + Tile::Content::element(row, d)) = Number<KV>::of(y);
  }
  auto put = [&](int d, float x) { *reinterpret_cast<T*>(rotated + Tile::Rotated::element(row, d)) = Number<T>::of(x); };
  const float* turn = angles + (int64_t)position[token] * ROTATED;
  for (int pair = lane; pair < HALF; pair += 32) {
    const int one = interleaved ? 2 * pair : pair, two = interleaved ? one + 1 : pair + HALF;
    const float a = value_of(from[CONTENT + one]), b = value_of(from[CONTENT + two]);
    put(one, a * turn[pair] - b * turn[HALF + pair]);
    put(two, b * turn[pair] + a * turn[HALF + pair]);
  }
}
