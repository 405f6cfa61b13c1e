// out = activation(gate) · up for rows [gate | up], eight numbers a thread.
#include "prims.cuh"

struct Silu {
  FN static float gate(float x, float by) { return x / (1.f + exp2_fast(-by * LOG2E)); }
  FN static float of(float x) { return gate(x, x); }
};
struct Gelu {  // by the error function; its complement keeps its digits where x is far below 0
  FN static float of(float x) { return 0.5f * x * erfcf(x * -0.7071067811865476f); }
};
struct GeluTanh {  // (1 + tanh u) / 2 is the logistic function of 2u
  FN static float of(float x) { return Silu::gate(x, 1.5957691216057308f * (x + 0.044715f * x * x * x)); }
};

template <class T, class Activation>
__global__ void __launch_bounds__(256)
gate_mul(const T* __restrict__ gate_up, T* __restrict__ out, int64_t rows, int width) {  // width is a multiple of 8
  const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x, wide = width / 8;
  if (i >= rows * wide) return;
  const Eight<T>* row = reinterpret_cast<const Eight<T>*>(gate_up) + i / wide * 2 * wide;
  Eight<T> gate = row[i % wide], up = row[wide + i % wide];
#pragma unroll
  for (int e = 0; e < 8; e++) gate.of[e] = Number<T>::of(Activation::of(value_of(gate.of[e])) * value_of(up.of[e]));
  reinterpret_cast<Eight<T>*>(out)[i] = gate;
}
