// Logits to scores in fp64, one block for a row: penalties, bias, and what is not allowed. Temperature is the sampler's.
//
// A count is how often a token was put out; bit 30 marks one that the prompt had.
#include "draw.cuh"

template <class T, int THREADS>
__global__ void __launch_bounds__(THREADS)
logits(const T* __restrict__ rows, int64_t stride, const Draw* __restrict__ draws, const int* __restrict__ counts,
       const uint32_t* __restrict__ allowed, const int* __restrict__ bias_id, const double* __restrict__ bias_value,
       double* __restrict__ scores, int vocabulary) {
  const Draw draw = draws[blockIdx.x];
  const T* row = rows + blockIdx.x * stride;
  double* to = scores + (int64_t)blockIdx.x * vocabulary;
  const int* seen = draw.counts < 0 ? nullptr : counts + (int64_t)draw.counts * vocabulary;
  const uint32_t* mask = draw.allowed < 0 ? nullptr : allowed + (int64_t)draw.allowed * ((vocabulary + 31) / 32);
  auto score = [&](int id, double bias) {
    if (mask && !(mask[id / 32] >> id % 32 & 1)) return (double)minus_infinity();
    double x = value_of(row[id]);
    int count = seen ? seen[id] : 0;
    if (count) x = x > 0 ? x / draw.repetition : x * draw.repetition;
    if (count & 0x3FFFFFFF) x -= draw.presence + draw.frequency * (count & 0x3FFFFFFF);
    return x + bias;
  };
  for (int id = threadIdx.x; id < vocabulary; id += THREADS) to[id] = score(id, 0.0);
  __syncthreads();
  for (int i = draw.bias + threadIdx.x; i < draw.bias_end; i += THREADS) to[bias_id[i]] = score(bias_id[i], bias_value[i]);
}
