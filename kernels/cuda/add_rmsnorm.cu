// residual += x, out = the norm of residual: one block for a row. Without a residual, the norm of x.
//
// The sum is rounded to T first and the norm is taken of what was kept, in fp32.
#include "prims.cuh"

template <class T, int THREADS>
__global__ void __launch_bounds__(THREADS)
add_rmsnorm(const T* __restrict__ x, T* __restrict__ residual, const T* __restrict__ weight, T* __restrict__ out,
            int width, float eps) {  // width is a multiple of 8
  SHARED_MEMORY(shared);
  float* sums = reinterpret_cast<float*>(shared);
  const int64_t row = (int64_t)blockIdx.x * (width / 8);
  const Eight<T>* from = reinterpret_cast<const Eight<T>*>(x) + row;
  Eight<T>* kept = reinterpret_cast<Eight<T>*>(residual) + row;
  float squares = 0.f;
  for (int i = threadIdx.x; i < width / 8; i += THREADS) {
    Eight<T> v = from[i];
    if (residual) {
      Eight<T> r = kept[i];
#pragma unroll
      for (int e = 0; e < 8; e++) v.of[e] = Number<T>::of(value_of(v.of[e]) + value_of(r.of[e]));
      kept[i] = v;
    }
#pragma unroll
    for (int e = 0; e < 8; e++) squares += value_of(v.of[e]) * value_of(v.of[e]);
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  float total = 0.f;
  for (int i = 0; i < THREADS / 32; i++) total += sums[i];
  const float inverse = rsqrtf(total / width + eps);
  const Eight<T>* scales = reinterpret_cast<const Eight<T>*>(weight);
  Eight<T>* to = reinterpret_cast<Eight<T>*>(out) + row;
  for (int i = threadIdx.x; i < width / 8; i += THREADS) {
    Eight<T> v = residual ? kept[i] : from[i], w = scales[i];
#pragma unroll
    for (int e = 0; e < 8; e++) v.of[e] = Number<T>::of(value_of(v.of[e]) * inverse * value_of(w.of[e]));
    to[i] = v;
  }
}
