// What comes out of a layer's qkv product: normalise heads (optional), rotate queries and keys, write keys and values
// into the pool (quantised where the pool is fp8: beyond ±448 saturated and counted, but what is not finite is NaN), and
// give the queries.
//
// One warp for a head of a token. Rotation is in fp32 and rounds once. A slot below 0 marks a token that is padding.
#include "tile.cuh"

template <class T, class KV, int D, bool INTERLEAVED>
__global__ void __launch_bounds__(128)
append_kv(const T* __restrict__ qkv, const int* __restrict__ position, const int64_t* __restrict__ slot,
          const float* __restrict__ angles,  // [position][rotated]: half of it cosines, half sines
          const T* __restrict__ query_norm, const T* __restrict__ key_norm, T* __restrict__ q,
          unsigned char* __restrict__ pool, int tokens, int heads, int kv_heads, int rotated, float eps,
          float per_key_scale, float per_value_scale, unsigned* __restrict__ saturated) {
  const int all = heads + 2 * kv_heads, lane = threadIdx.x % 32;
  const int64_t id = (int64_t)blockIdx.x * 4 + threadIdx.x / 32;
  const int64_t token = id / all;
  const int head = id % all;
  if (token >= tokens || slot[token] < 0) return;
  const T* from = qkv + id * D;
  const bool is_query = head < heads, is_value = head >= heads + kv_heads;
  const T* norm = is_value ? nullptr : is_query ? query_norm : key_norm;
  const float* turn = angles + (int64_t)position[token] * rotated;
  float inverse = 1.f;
  if (norm) {
    float squares = 0.f;
    for (int d = lane; d < D; d += 32) squares += value_of(from[d]) * value_of(from[d]);
    inverse = rsqrtf(warp_sum(squares) / D + eps);
  }
  auto x = [&](int d) { return norm ? value_of(from[d]) * inverse * value_of(norm[d]) : value_of(from[d]); };
  const int kv_head = is_value ? head - heads - kv_heads : head - heads, half = rotated / 2;
  unsigned char* tile = pool;
  if (!is_query) {
    tile += (slot[token] / TILE * kv_heads + kv_head) * Pool<KV, D>::TILE_BYTES;
    if (is_value) tile += Image<KV, D>::BYTES;
  }
  for (int d = lane; d < D; d += 32) {
    float y = x(d);
    if (!is_value && d < rotated) {
      int pair = INTERLEAVED ? d / 2 : d % half;
      bool second = INTERLEAVED ? d % 2 : d >= half;
      float other = x(INTERLEAVED ? d ^ 1 : second ? d - half : d + half);
      y = second ? y * turn[pair] + other * turn[half + pair] : y * turn[pair] - other * turn[half + pair];
    }
    if (is_query) {
      q[(token * heads + head) * D + d] = Number<T>::of(y);
    } else {
      if constexpr (sizeof(KV) == 1) {
        y *= is_value ? per_value_scale : per_key_scale;
        const unsigned size = bits_of(y) & 0x7FFFFFFF;
        if (size == 0x7F800000) y = float_of(0x7FC00000);  // infinity would become a number: 448
        if (saturated && size > 0x43E00000 && size < 0x7F800000) atomicAdd(saturated, 1u);
      }
      *reinterpret_cast<KV*>(tile + Image<KV, D>::element(slot[token] % TILE, d)) = Number<KV>::of(y);
    }
  }
}
