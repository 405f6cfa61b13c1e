// What warpgroup.cuh offers, alone: products of every kind that the kernels use, and a ring that bulk copies fill.
// What is left out of a FAULTY one, the emulator must see in some order of execution.
#include "warpgroup.cuh"

// scores[64][N] = a[64][128] b[N][128]ᵀ, mixed[64][N] = 2 · a[64][first 64] v[64][N]: by one warpgroup, with panels
// of 64 numbers. `left_out` is 1: the fence of stores, 2: the barrier after it, 3: the begin of products, 4: their wait,
// 5: a warp's products, 6: leaving registers alone that are on their way, 7: the fence after changing one.
template <class T, int N, bool FAULTY>
__global__ void __launch_bounds__(128) probe_products(const T* a, const T* b, const T* v, float* scores,
                                                      float* mixed, int left_out) {
  const int omitted = FAULTY ? left_out : 0;
  SHARED_MEMORY(shared);
  unsigned char *sa = shared, *sb = sa + 2 * 64 * 128, *sv = sb + 2 * N * 128;
  const int thread = threadIdx.x, lane = thread % 32, row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
  auto put = [&](unsigned char* to, const T* from, int rows, int width) {  // [rows][width], a panel behind the other
    for (int i = thread; i < rows * width / 8; i += 128) {
      const int r = i / (width / 8), chunk = i % (width / 8);
      store_async(to + chunk / 8 * rows * 128 + r * 128 + (chunk % 8 ^ r % 8) * 16,
                  *reinterpret_cast<const uint4*>(from + 8 * i));
    }
  };
  put(sa, a, 64, 128);
  put(sb, b, N, 128);
  put(sv, v, 64, N);
  if (omitted != 1) fence_async();
  if (omitted != 2) __syncthreads();

  float s[N / 8][4], m[N / 8][4] = {};
  uint32_t fragment[4];
  if (omitted != 3) products_begin();
  for (int k = 0; k < 8; k++) {
    if (omitted == 5 && thread >= 96 && k == 7) break;
    multiply<T, N>(s, further(descriptor<128>(sa, 1024, 0), k / 4 * 64 * 128 + k % 4 * 32),
                   further(descriptor<128>(sb, 1024, 0), k / 4 * N * 128 + k % 4 * 32), k > 0);
  }
  products_commit();
  if (omitted == 6) s[0][0] = 1.f;
  if (omitted != 4) products_wait<0>();
  products_of(s);
  for (int j = 0; j < N / 8; j++)
    for (int e = 0; e < 4; e++) scores[(row + e / 2 * 8) * N + 8 * j + column + e % 2] = s[j][e];
  products_wait<0>();
  for (int twice = 0; twice < 2; twice++) {
    for (int k = 0; k < 4; k++) {
      if (omitted == 7) products_begin();
      for (int i = 0; i < 4; i++)
        fragment[i] = *reinterpret_cast<const uint32_t*>(a + (row + i % 2 * 8) * 128 + 16 * k + column + i / 2 * 8);
      if (omitted != 7) products_begin();
      multiply_transposed<T, N>(m, fragment, further(descriptor<128>(sv, 1024, 64 * 128), k * 2048), true);
      products_commit();
      products_wait<0>();
      products_of(m);
    }
  }
  for (int j = 0; j < N / 8; j++)
    for (int e = 0; e < 4; e++) mixed[(row + e / 2 * 8) * N + 8 * j + column + e % 2] = m[j][e];
}

// scores[64][64] = a[64][N] b[64][N]ᵀ, mixed[64][N] = p[64][64] v[64][N], with panels of N numbers, 16 or 32.
template <class T, int N>
__global__ void __launch_bounds__(128) probe_tail(const T* a, const T* b, const T* p, const T* v, float* scores,
                                                  float* mixed) {
  constexpr int BYTES = 2 * N;
  SHARED_MEMORY(shared);
  const int thread = threadIdx.x, lane = thread % 32, row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
  const T* from[] = {a, b, v};
  for (int i = thread; i < 3 * 64 * N / 8; i += 128) {
    const int which = i / (64 * N / 8), r = i / (N / 8) % 64, chunk = i % (N / 8);
    store_async(shared + which * 64 * BYTES + r * BYTES + (chunk ^ r % 8 * BYTES / 128) * 16,
                *reinterpret_cast<const uint4*>(from[which] + r * N + 8 * chunk));
  }
  fence_async();
  __syncthreads();
  float s[8][4], m[N / 8][4] = {};
  uint32_t fragment[4][4];
  for (int k = 0; k < 4; k++)
    for (int i = 0; i < 4; i++)
      fragment[k][i] = *reinterpret_cast<const uint32_t*>(p + (row + i % 2 * 8) * 64 + 16 * k + column + i / 2 * 8);
  products_begin();
  for (int k = 0; k < N / 16; k++)
    multiply<T, 64>(s, further(descriptor<BYTES>(shared, 8 * BYTES, 0), k * 32),
                    further(descriptor<BYTES>(shared + 64 * BYTES, 8 * BYTES, 0), k * 32), k > 0);
  for (int k = 0; k < 4; k++)
    multiply_transposed<T, N>(m, fragment[k], further(descriptor<BYTES>(shared + 128 * BYTES, 8 * BYTES, 0), k * 16 * BYTES),
                              true);
  products_commit();
  products_wait<0>();
  products_of(s);
  products_of(m);
  for (int e = 0; e < 4; e++) {
    for (int j = 0; j < 8; j++) scores[(row + e / 2 * 8) * 64 + 8 * j + column + e % 2] = s[j][e];
    for (int j = 0; j < N / 8; j++) mixed[(row + e / 2 * 8) * N + 8 * j + column + e % 2] = m[j][e];
  }
}

// out[256] = the sum over rounds of what is copied, x[rounds][256]: one warpgroup fills two slots, another empties
// them. 1: the copy unit is not told of the barriers, 2: a slot is not waited for, 3: nor is its being free.
template <bool FAULTY>
__global__ void __launch_bounds__(256, 1) probe_ring(const float* x, float* out, int rounds, int left_out) {
  const int omitted = FAULTY ? left_out : 0;
  SHARED_MEMORY(shared);
  float* slots = reinterpret_cast<float*>(shared);
  uint64_t *there = reinterpret_cast<uint64_t*>(slots + 512), *free = there + 2;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) barrier_init(&there[i], 1), barrier_init(&free[i], 4);
    if (omitted != 1) barrier_publish();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_less<24>();
    if (threadIdx.x > 0) return;
    for (int i = 0; i < rounds; i++) {
      if (i >= 2 && omitted != 3) barrier_wait(&free[i % 2], i / 2 - 1 & 1);
      barrier_expect(&there[i % 2], 1024);
      bulk_copy(slots + i % 2 * 256, x + i * 256, 512, &there[i % 2]);
      bulk_copy(slots + i % 2 * 256 + 128, x + i * 256 + 128, 512, &there[i % 2]);
    }
    return;
  }
  registers_more<64>();
  const int at = threadIdx.x - 128;
  float low = 0.f, high = 0.f;
  for (int i = 0; i < rounds; i++) {
    if (omitted != 2) barrier_wait(&there[i % 2], i / 2 & 1);
    low += slots[i % 2 * 256 + at], high += slots[i % 2 * 256 + 255 - at];
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&free[i % 2]);
  }
  barrier_some(1, 128);
  out[at] = low, out[255 - at] = high;
}
