// Writes tokens into a pool of latent KV (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434): the content is
// normalised, the part that carries position is rotated, and both are one row that all heads share.
//
// One warp for a token. A slot below 0 marks a token that is padding.
#include "tile.cuh"

template <class T, int CONTENT, int ROTATED>
__global__ void __launch_bounds__(128)
append_latent(const T* __restrict__ latent, const int* __restrict__ position, const int64_t* __restrict__ slot,
              const float* __restrict__ angles,  // [position][ROTATED]: half of it cosines, half sines
              const T* __restrict__ norm, unsigned char* __restrict__ pool, int tokens, int interleaved, float eps) {
  constexpr int D = CONTENT + ROTATED, HALF = ROTATED / 2;
  const int lane = threadIdx.x % 32;
  const int64_t token = (int64_t)blockIdx.x * 4 + threadIdx.x / 32;
  if (token >= tokens || slot[token] < 0) return;
  const T* from = latent + token * D;
  float squares = 0.f;
  for (int d = lane; d < CONTENT; d += 32) squares += value_of(from[d]) * value_of(from[d]);
  const float inverse = rsqrtf(warp_sum(squares) / CONTENT + eps);
  unsigned char* tile = pool + slot[token] / TILE * Image<T, D>::BYTES;
  const int row = slot[token] % TILE;
  auto put = [&](int d, float x) { *reinterpret_cast<T*>(tile + Image<T, D>::element(row, d)) = Number<T>::of(x); };
  for (int d = lane; d < CONTENT; d += 32) put(d, value_of(from[d]) * inverse * value_of(norm[d]));
  const float* turn = angles + (int64_t)position[token] * ROTATED;
  for (int pair = lane; pair < HALF; pair += 32) {
    const int one = interleaved ? 2 * pair : pair, two = interleaved ? one + 1 : pair + HALF;
    const float a = value_of(from[CONTENT + one]), b = value_of(from[CONTENT + two]);
    put(CONTENT + one, a * turn[pair] - b * turn[HALF + pair]);
    put(CONTENT + two, b * turn[pair] + a * turn[HALF + pair]);
  }
}
