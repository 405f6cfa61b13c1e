// out = silu(gate) · up for rows [gate | up], eight numbers a thread.
#include "prims.cuh"

template <class T>
__global__ void __launch_bounds__(256)
silu_mul(const T* __restrict__ gate_up, T* __restrict__ out, int64_t rows, int width) {  // width is a multiple of 8
  const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x, wide = width / 8;
  if (i >= rows * wide) return;
  const Eight<T>* row = reinterpret_cast<const Eight<T>*>(gate_up) + i / wide * 2 * wide;
  Eight<T> gate = row[i % wide], up = row[wide + i % wide];
#pragma unroll
  for (int e = 0; e < 8; e++) {
    float x = value_of(gate.of[e]);
    gate.of[e] = Number<T>::of(x / (1.f + exp2_fast(-x * LOG2E)) * value_of(up.of[e]));
  }
  reinterpret_cast<Eight<T>*>(out)[i] = gate;
}
