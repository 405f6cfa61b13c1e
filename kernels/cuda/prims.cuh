// Types and primitives of the kernels. With `warpgroup.cuh` the only file with PTX; each primitive has a host path, for
// the emulator.
//
// No header of NVIDIA's is needed: number types are ours, of bits, with conversions that round as the device does.
// Where a device lacks an instruction (fp8 before sm_89) it runs the very code that the host path runs.
#pragma once
#if defined(__CUDACC_RTC__)
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;
#define SHARED_MEMORY(name) extern __shared__ __align__(1024) unsigned char name[]
#define DEVICE 1
#define ARCH __CUDA_ARCH__
#else
#include "emulator.h"
#define DEVICE 0
#define ARCH 0
#endif
#define FN __device__ __forceinline__

constexpr float LOG2E = 1.4426950408889634f;

// ---- bits

FN uint32_t bits_of(float x) {
#if DEVICE
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
#endif
}
FN float float_of(uint32_t bits) {
#if DEVICE
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
#endif
}
FN uint64_t bits_of(double x) {
#if DEVICE
  return (uint64_t)__double_as_longlong(x);
#else
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  return bits;
#endif
}
FN double double_of(uint64_t bits) {
#if DEVICE
  return __longlong_as_double((long long)bits);
#else
  double x;
  std::memcpy(&x, &bits, 8);
  return x;
#endif
}
FN uint32_t high_product(uint32_t a, uint32_t b) {
#if DEVICE
  return __umulhi(a, b);
#else
  return uint32_t((uint64_t)a * b >> 32);
#endif
}
FN int set_bits(uint64_t x) {
#if DEVICE
  return __popcll(x);
#else
  return __builtin_popcountll(x);
#endif
}
FN float minus_infinity() { return float_of(0xFF800000u); }

// ---- number types

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };

FN uint16_t half_bits(float x) {
#if DEVICE
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
#else
  uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, a = u & 0x7FFFFFFF;
  if (a > 0x7F800000) return 0x7FFF;
  if (a >= 0x477FF000) return sign | 0x7C00;                                                 // 65520 and up
  if (a < 0x38800000) return sign | uint16_t(bits_of(float_of(a) + 0.5f) - 0x3F000000);      // below 2^-14
  return sign | uint16_t(((a + 0xFFF + (a >> 13 & 1)) >> 13) - (112 << 10));
#endif
}
FN float half_value(uint16_t h) {
#if DEVICE
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
#else
  uint32_t sign = (h & 0x8000u) << 16, a = h & 0x7FFF;
  if (a >= 0x7C00) return float_of(sign | 0x7F800000 | (a & 0x3FF) << 13);
  if (a < 0x400) return float_of(sign | bits_of(float(a) * 0x1p-24f));
  return float_of(sign | ((a << 13) + (112u << 23)));
#endif
}
FN uint16_t brain_bits(float x) {
#if DEVICE
  uint16_t h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
#else
  uint32_t u = bits_of(x);
  if ((u & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
  return uint16_t((u + 0x7FFF + (u >> 16 & 1)) >> 16);
#endif
}
// Nearest, ties to even; beyond ±448 saturates.
FN uint8_t e4m3_bits(float x) {
#if ARCH >= 890
  uint16_t two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.f), "f"(x));
  return (uint8_t)two;
#else
  uint32_t u = bits_of(x), sign = u >> 24 & 0x80, a = u & 0x7FFFFFFF;
  if (a > 0x7F800000) return 0x7F;
  if (a >= 0x43E00000) return sign | 0x7E;                                               // 448 and up
  if (a < 0x3C800000) return sign | (bits_of(float_of(a) + 16384.f) - 0x46800000);       // below 2^-6: steps of 2^-9
  return sign | (((a + 0x7FFFF + (a >> 20 & 1)) >> 20) - (120 << 3));
#endif
}
FN uint32_t multiply_half2(uint32_t a, uint32_t b) {
#if DEVICE
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
#else
  return half_bits(half_value(uint16_t(a)) * half_value(uint16_t(b))) |
         uint32_t(half_bits(half_value(uint16_t(a >> 16)) * half_value(uint16_t(b >> 16)))) << 16;
#endif
}
// Two e4m3 (low byte first) to two halves, exactly.
FN uint32_t half2_of_e4m3x2(uint16_t two) {
#if ARCH >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
  return halves;
#else
  uint32_t spread = (two & 0xFFu) | (uint32_t)(two & 0xFF00u) << 8;
  uint32_t halves = multiply_half2((spread & 0x800080u) << 8 | (spread & 0x7F007Fu) << 7, 0x5C005C00u);  // · 2^8
  if ((spread & 0x7Fu) == 0x7Fu) halves |= 0x7FFFu;  // NaN
  if ((spread & 0x7F0000u) == 0x7F0000u) halves |= 0x7FFF0000u;
  return halves;
#endif
}

FN float value_of(float x) { return x; }
FN float value_of(bf16 x) { return float_of((uint32_t)x.bits << 16); }
FN float value_of(f16 x) { return half_value(x.bits); }
FN float value_of(e4m3 x) { return half_value(uint16_t(half2_of_e4m3x2(x.bits))); }

template <class T> struct Number;
template <> struct Number<float> { FN static float of(float x) { return x; } };
template <> struct Number<bf16> { FN static bf16 of(float x) { return {brain_bits(x)}; } };
template <> struct Number<f16> { FN static f16 of(float x) { return {half_bits(x)}; } };
template <> struct Number<e4m3> { FN static e4m3 of(float x) { return {e4m3_bits(x)}; } };

template <class T> struct alignas(16) Eight { T of[8]; };

template <class A, class B> struct Same { static constexpr bool value = false; };
template <class A> struct Same<A, A> { static constexpr bool value = true; };

// Two neighbours in one register, `low` at the lower address.
template <class T> FN uint32_t pack2(float low, float high) {
  static_assert(sizeof(T) == 2, "16-bit types only");
#if DEVICE
  uint32_t two;
  if constexpr (Same<T, bf16>::value) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
#else
  return Number<T>::of(low).bits | (uint32_t)Number<T>::of(high).bits << 16;
#endif
}

// ---- arithmetic

FN float exp2_fast(float x) {
#if DEVICE
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

FN float reciprocal(float x) {  // a true division may call a routine, for which registers are spilled
#if DEVICE
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.f / x;
#endif
}

// ---- asynchronous copies

#if DEVICE
FN uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
#endif

// 16 bytes from global to shared memory.
FN void copy_async(void* to, const void* from) {
#if DEVICE
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
#else
  emulator::copy_async(to, from, true);
#endif
}
FN void copy_commit() {
#if DEVICE
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  emulator::copy_commit();
#endif
}
// Until at most `KEEP` of this thread's groups are on their way.
template <int KEEP> FN void copy_wait() {
#if DEVICE
  asm volatile("cp.async.wait_group %0;" ::"n"(KEEP) : "memory");
#else
  emulator::copy_wait(KEEP);
#endif
}

// sm_90 and later: one thread copies a run of bytes, a barrier in shared memory counts them in.
FN void barrier_init(uint64_t* barrier, int arrivals) {
#if DEVICE
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#else
  emulator::barrier_init(barrier, arrivals);
#endif
}
// Makes barriers that were just initialised known to the copy unit.
FN void barrier_publish() {
#if ARCH >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#elif !DEVICE
  emulator::barrier_publish();
#endif
}
FN void barrier_expect(uint64_t* barrier, int bytes) {
#if ARCH >= 900
  asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;}" ::"r"(
                   shared_address(barrier)), "r"(bytes) : "memory");
#elif !DEVICE
  emulator::barrier_arrive(barrier, bytes);
#endif
}
FN void barrier_wait(uint64_t* barrier, int parity) {
#if ARCH >= 900
  asm volatile(
      "{.reg .pred done;\n"
      "wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
#elif !DEVICE
  emulator::barrier_wait(barrier, parity);
#endif
}
FN void bulk_copy(void* to, const void* from, int bytes, uint64_t* barrier) {
#if ARCH >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
#elif !DEVICE
  emulator::bulk_copy(to, from, bytes, barrier);
#endif
}

// ---- tensor cores

// Four 8x8 matrices of 16-bit units; lane i gives the address of row i % 8 of matrix i / 8.
template <bool TRANSPOSED> FN void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
#if DEVICE
  if constexpr (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
#else
  emulator::ldmatrix_x4(r, row, TRANSPOSED);
#endif
}

// D[16][8] += A[16][16] B[16][8], T in, fp32 out.
template <class T> FN void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if DEVICE
  if constexpr (Same<T, f16>::value)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  const uint32_t b[2] = {b0, b1};
  emulator::mma_m16n8k16(d, a, b, [](uint16_t bits) { return value_of(T{bits}); });
#endif
}

// ---- reductions over a warp

template <class T> FN T warp_sum(T x) {
#pragma unroll
  for (int k = 16; k; k >>= 1) x += __shfl_xor_sync(~0u, x, k);
  return x;
}
FN float warp_max(float x) {
#pragma unroll
  for (int k = 16; k; k >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, k));
  return x;
}
