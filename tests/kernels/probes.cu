// Primitives alone, so that a test can compare each with what torch or NumPy says of it.
#include "draw.cuh"

__global__ void probe_narrow(const float* x, uint16_t* f16_bits, uint16_t* bf16_bits, uint8_t* fp8_bits, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  f16_bits[i] = Number<f16>::of(x[i]).bits;
  bf16_bits[i] = Number<bf16>::of(x[i]).bits;
  fp8_bits[i] = Number<e4m3>::of(x[i]).bits;
}

__global__ void probe_widen(float* of_f16, float* of_bf16, float* of_fp8) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  of_f16[i] = value_of(f16{(uint16_t)i});
  of_bf16[i] = value_of(bf16{(uint16_t)i});
  if (i < 256) of_fp8[i] = value_of(e4m3{(uint8_t)i});
}

__global__ void probe_noise(const Draw* draw, uint32_t* words, double* noise, int quads) {
  int quad = blockIdx.x * blockDim.x + threadIdx.x;
  if (quad >= quads) return;
  Words made = words_of(*draw, quad);
  for (int i = 0; i < 4; i++) words[4 * quad + i] = made.of[i], noise[4 * quad + i] = gumbel(made.of[i]);
}

__global__ void probe_logarithm(const double* x, double* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = logarithm(x[i]);
}

// out[16][8] = a[16][16] b[8][16]ᵀ, and b's four 8x8 matrices transposed as ldmatrix gives them.
__global__ void probe_mma(const f16* a, const f16* b, float* out, f16* transposed) {
  SHARED_MEMORY(shared);
  f16 *sa = reinterpret_cast<f16*>(shared), *sb = sa + 256;
  int lane = threadIdx.x;
  for (int i = lane; i < 32; i += 32) copy_async(sa + 8 * i, a + 8 * i);
  for (int i = lane; i < 32; i += 32) copy_async(sb + 8 * i, b + 8 * i);
  copy_commit();
  copy_wait<0>();
  __syncwarp();
  uint32_t fa[4], fb[4], ft[4];
  ldmatrix_x4<false>(fa, sa + lane % 16 * 16 + lane / 16 * 8);
  ldmatrix_x4<false>(fb, sb + (lane % 8 + lane / 16 * 8) * 16 + lane / 8 % 2 * 8);
  ldmatrix_x4<true>(ft, sb + lane % 16 * 16 + lane / 16 * 8);
  float d[4] = {0, 0, 0, 0};
  mma<f16>(d, fa, fb[0], fb[1]);
  for (int e = 0; e < 4; e++) out[(lane / 4 + e / 2 * 8) * 8 + lane % 4 * 2 + e % 2] = d[e];
  for (int i = 0; i < 4; i++) reinterpret_cast<uint32_t*>(transposed)[i * 32 + lane] = ft[i];
}

// Faults that the emulator must name.
__global__ void probe_lost_barrier() {
  if (threadIdx.x < 32) __syncthreads();
}
__global__ void probe_race(int* out) {
  SHARED_MEMORY(shared);
  int* numbers = reinterpret_cast<int*>(shared);
  numbers[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = numbers[(threadIdx.x + 32) % 64];  // no barrier between
}
__global__ void probe_early_read(const float* x, float* out) {
  SHARED_MEMORY(shared);
  float* numbers = reinterpret_cast<float*>(shared);
  copy_async(numbers + 4 * threadIdx.x, x + 4 * threadIdx.x);
  copy_commit();
  out[threadIdx.x] = numbers[4 * threadIdx.x];  // not waited for
}
