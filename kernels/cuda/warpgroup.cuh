// What four warps can do together on sm_90a: products whose operands lie in shared memory, done aside while the warps
// go on (wgmma), registers handed from one warpgroup to another, barriers of some of a block's threads.
//
// With `prims.cuh` the only file with PTX; each primitive has a host path. Two kinds of memory traffic meet here. What
// a thread stores is seen by other threads after a barrier, but by wgmma only if the storing thread also fences. What a
// bulk copy brings, wgmma sees once its barrier has turned.
#pragma once
#include "prims.cuh"
#if DEVICE && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WARPGROUPS 1
#else
#define WARPGROUPS 0
#endif

constexpr int WARPGROUP = 128;

// ---- order

// 16 bytes to shared memory, for wgmma to read after `fence_async` and a barrier.
FN void store_async(void* to, const uint4& value) {
#if DEVICE
  *reinterpret_cast<uint4*>(to) = value;
#else
  emulator::store_async(to, &value);
#endif
}
// What this thread stored is there for wgmma and for bulk copies.
FN void fence_async() {
#if WARPGROUPS
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#elif !DEVICE
  emulator::fence_async();
#endif
}
// Barrier `id` (1 to 15) of `threads` threads, whole warps.
FN void barrier_some(int id, int threads) {
#if DEVICE
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  emulator::block_barrier(id, threads);
#endif
}
FN void barrier_arrive(uint64_t* barrier) {
#if ARCH >= 900
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(shared_address(barrier))
               : "memory");
#elif !DEVICE
  emulator::barrier_arrive(barrier, 0);
#endif
}

// ---- registers

// From here on each of the warpgroup's threads has this many: fewer at once, more when others have given theirs.
template <int N> FN void registers_less() {
#if WARPGROUPS
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#elif !DEVICE
  emulator::take_registers(N);
#endif
}
template <int N> FN void registers_more() {
#if WARPGROUPS
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#elif !DEVICE
  emulator::take_registers(N);
#endif
}

// ---- matrices in shared memory

// An operand of wgmma: panels whose rows have `BYTES` (32, 64 or 128) and follow one another, their chunks of 16 bytes
// exchanged by the row's number as an Image has them. Eight rows are `rows` bytes before the next eight, a panel
// `panels` bytes before the next (where an operand is as wide as several, that is, transposed).
template <int BYTES> FN uint64_t descriptor(const void* from, int rows, int panels) {
  static_assert(BYTES == 32 || BYTES == 64 || BYTES == 128, "there are three patterns of exchange");
  constexpr uint64_t pattern = BYTES == 128 ? 1 : BYTES == 64 ? 2 : 3;
#if DEVICE
  const uint32_t address = shared_address(from);
#else
  const uint32_t address = emulator::shared_offset(from);
#endif
  return (address & 0x3FFFF) >> 4 | (uint64_t)(panels >> 4) << 16 | (uint64_t)(rows >> 4) << 32 | pattern << 62;
}
// The operand `bytes` further on.
FN uint64_t further(uint64_t operand, int bytes) { return operand + (bytes >> 4); }

// ---- products

// Registers that products read or write are as the warps left them; before the first product after any was touched.
FN void products_begin() {
#if WARPGROUPS
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#elif !DEVICE
  emulator::products_begin();
#endif
}
// All products so far that are in no group are one.
FN void products_commit() {
#if WARPGROUPS
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#elif !DEVICE
  emulator::products_commit();
#endif
}
// Until at most `KEEP` groups are on their way.
template <int KEEP> FN void products_wait() {
#if WARPGROUPS
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(KEEP) : "memory");
#elif !DEVICE
  emulator::products_wait(KEEP);
#endif
}
// After a wait: what the products left in `d` may be read from here on, and no earlier.
template <int N> FN void products_of(float (&d)[N][4]) {
#if DEVICE
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
#endif
}

// The accumulators of a warp's 16 rows of 64: d[j][e] is row lane / 4 + e / 2 · 8, column 8 j + lane % 4 · 2 + e % 2,
// j counted from FROM. With `add` they are added to.
#define TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define FIRST_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FIRST_16 TEN() "%10,%11,%12,%13,%14,%15"
#define FIRST_32 TEN() TEN(1) TEN(2) "%30,%31"
#define FIRST_64 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63"
#define FOUR_OF(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define COLUMNS_16(i) FOUR_OF(i), FOUR_OF(i + 1)
#define COLUMNS_32(i) COLUMNS_16(i), COLUMNS_16(i + 2)
#define COLUMNS_64(i) \
  FOUR_OF(i), FOUR_OF(i + 1), FOUR_OF(i + 2), FOUR_OF(i + 3), FOUR_OF(i + 4), FOUR_OF(i + 5), FOUR_OF(i + 6), FOUR_OF(i + 7)
#define WGMMA(n, type, registers) \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers "}, "

// D[64][N] (+)= A[64][16] B[16][N]; both from shared memory, A with its rows of k, B with rows of k for each column.
template <class T, int N, int FROM = 0, int SIZE> FN void multiply(float (&d)[SIZE][4], uint64_t a, uint64_t b, bool add) {
  static_assert((N == 64 || N == 128) && FROM + N / 8 <= SIZE, "64 or 128 columns that are there");
#if WARPGROUPS
#define PRODUCT_64(type) \
  asm volatile("{.reg .pred add; setp.ne.b32 add, %34, 0;\n" WGMMA(64, type, FIRST_32) "%32, %33, add, 1, 1, 0, 0;}" \
               : COLUMNS_64(FROM) : "l"(a), "l"(b), "r"((int)add) : "memory")
#define PRODUCT_128(type) \
  asm volatile("{.reg .pred add; setp.ne.b32 add, %66, 0;\n" WGMMA(128, type, FIRST_64) "%64, %65, add, 1, 1, 0, 0;}" \
               : COLUMNS_64(FROM), COLUMNS_64(FROM + 8) : "l"(a), "l"(b), "r"((int)add) : "memory")
  if constexpr (N == 64 && Same<T, f16>::value) PRODUCT_64("f16");
  else if constexpr (N == 64) PRODUCT_64("bf16");
  else if constexpr (Same<T, f16>::value) PRODUCT_128("f16");
  else PRODUCT_128("bf16");
#undef PRODUCT_64
#undef PRODUCT_128
#elif !DEVICE
  emulator::multiply(&d[FROM][0], N, &a, nullptr, b, false, add, [](uint16_t bits) { return value_of(T{bits}); });
#endif
}
// The same with A from registers, as mma has it, and with B's rows those of k: its columns lie side by side.
template <class T, int N, int FROM = 0, int SIZE>
FN void multiply_transposed(float (&d)[SIZE][4], const uint32_t (&a)[4], uint64_t b, bool add) {
  static_assert((N == 16 || N == 32 || N == 64 || N == 128) && FROM + N / 8 <= SIZE, "as many columns as there are");
#if WARPGROUPS
#define PRODUCT_16(type) \
  asm volatile("{.reg .pred add; setp.ne.b32 add, %13, 0;\n" WGMMA(16, type, FIRST_8) "{%8,%9,%10,%11}, %12, add, 1, 1, 1;}" \
               : COLUMNS_16(FROM) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add) : "memory")
#define PRODUCT_32(type) \
  asm volatile("{.reg .pred add; setp.ne.b32 add, %21, 0;\n" WGMMA(32, type, FIRST_16) "{%16,%17,%18,%19}, %20, add, 1, 1, 1;}" \
               : COLUMNS_32(FROM) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add) : "memory")
#define PRODUCT_64(type) \
  asm volatile("{.reg .pred add; setp.ne.b32 add, %37, 0;\n" WGMMA(64, type, FIRST_32) "{%32,%33,%34,%35}, %36, add, 1, 1, 1;}" \
               : COLUMNS_64(FROM) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add) : "memory")
#define PRODUCT_128(type) \
  asm volatile("{.reg .pred add; setp.ne.b32 add, %69, 0;\n" WGMMA(128, type, FIRST_64) "{%64,%65,%66,%67}, %68, add, 1, 1, 1;}" \
               : COLUMNS_64(FROM), COLUMNS_64(FROM + 8) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add) : "memory")
  if constexpr (N == 16 && Same<T, f16>::value) PRODUCT_16("f16");
  else if constexpr (N == 16) PRODUCT_16("bf16");
  else if constexpr (N == 32 && Same<T, f16>::value) PRODUCT_32("f16");
  else if constexpr (N == 32) PRODUCT_32("bf16");
  else if constexpr (N == 64 && Same<T, f16>::value) PRODUCT_64("f16");
  else if constexpr (N == 64) PRODUCT_64("bf16");
  else if constexpr (Same<T, f16>::value) PRODUCT_128("f16");
  else PRODUCT_128("bf16");
#undef PRODUCT_16
#undef PRODUCT_32
#undef PRODUCT_64
#undef PRODUCT_128
#elif !DEVICE
  emulator::multiply(&d[FROM][0], N, nullptr, &a, b, true, add, [](uint16_t bits) { return value_of(T{bits}); });
#endif
}
