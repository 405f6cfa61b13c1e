// What sampling kernels are told of a row, and the random numbers that belong to it.
#pragma once
#include "prims.cuh"

// As `sampling.py` packs it.
struct Draw {
  double temperature, top_p, min_p, typical_p, repetition, presence, frequency;
  uint64_t seed;
  int choice, position, top_k;
  int counts;           // row of the table of counts, below 0: no penalties
  int allowed;          // row of the bit masks, below 0: every token is allowed
  int bias, bias_end;   // entries of the bias lists
  int unused;
};

struct Words {
  uint32_t of[4];
  FN uint32_t at(int i) const { return i & 2 ? (i & 1 ? of[3] : of[2]) : (i & 1 ? of[1] : of[0]); }  // stays in registers
};

// Philox4x32-10 (Salmon et al., SC 2011).
FN Words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
#pragma unroll
  for (int i = 0; i < 10; i++) {
    uint32_t high0 = high_product(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    uint32_t high1 = high_product(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// What a draw is for, as `philox.py` numbers it: draws for different purposes are independent.
constexpr uint32_t SAMPLE = 0, ACCEPT = 2, RESAMPLE = 3;

// The words of ids 4 · quad to 4 · quad + 3 for the token at a position.
FN Words words_of(const Draw& draw, uint32_t quad, uint32_t purpose = SAMPLE) {
  return philox(quad, (uint32_t)draw.position, (uint32_t)draw.choice, purpose, draw.seed);
}

// ln x of a positive, finite x to within one unit in the last place. The library's divides, and a division in fp64 may
// call a routine, for which registers are spilled.
//
// x = 2^k (1 + f) with f from √½ - 1 to √2 - 1. With s = f / (2 + f), z = s² and t = 2/3 + 2/5 z + 2/7 z² + …, ln (1 + f)
// = 2 atanh s = 2 s + s z t. As 2 s = f - s f and s f = h - s h for h = f²/2, that is f - h + s (h + z t): all that is
// rounded is small beside f.
FN double logarithm(double x) {
  uint64_t bits = bits_of(x);
  int k = -1023;
  if (bits < 1ull << 52) bits = bits_of(x * 18014398509481984.0), k -= 54;  // subnormal
  k += (int)(bits >> 52);
  bits = (bits & 0x000FFFFFFFFFFFFFull) | 0x3FF0000000000000ull;
  if (bits > 0x3FF6A09E667F3BCDull) bits -= 1ull << 52, k++;  // above √2
  const double f = double_of(bits) - 1.0, divisor = f + 2.0;
  double inverse = reciprocal((float)divisor);
  inverse = fma(fma(-divisor, inverse, 1.0), inverse, inverse);
  inverse = fma(fma(-divisor, inverse, 1.0), inverse, inverse);
  double s = f * inverse;
  s = fma(fma(-s, divisor, f), inverse, s);
  const double z = s * s, h = 0.5 * f * f;
  double t = 2.0 / 23;
#pragma unroll
  for (int n = 21; n >= 3; n -= 2) t = fma(t, z, 2.0 / n);
  return fma(k, 0x1.62e42feep-1, f + fma(s, fma(t, z, h), fma(k, 0x1.a39ef35793c76p-33, -h)));  // ln 2 in two parts
}

FN double uniform(uint32_t word) { return (word + 0.5) / 4294967296.0; }
FN double gumbel(uint32_t word) { return -logarithm(-logarithm(uniform(word))); }

struct Candidate { double value; int id; };
FN bool better(const Candidate& a, const Candidate& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

// The best of `chosen` and of those ids from 4 · quad on that `running` has bits of, each by its value and its own noise.
// One after the other: of four logarithms side by side registers would be spilled.
template <class Value>
FN Candidate noisiest(Candidate chosen, const Draw& draw, int quad, int running, uint32_t purpose, Value value) {
  const Words words = words_of(draw, quad, purpose);
#pragma unroll 1
  for (int i = 0; i < 4; i++) {
    if (!(running >> i & 1)) continue;
    const Candidate one = {value(4 * quad + i) + gumbel(words.at(i)), 4 * quad + i};
    if (better(one, chosen)) chosen = one;
  }
  return chosen;
}

// The best of all threads' candidates, known to all. `best` is shared, an entry a warp.
template <int THREADS> FN Candidate best_of_block(Candidate* best, Candidate mine) {
#pragma unroll
  for (int k = 16; k; k >>= 1) {
    Candidate other = {__shfl_xor_sync(~0u, mine.value, k), __shfl_xor_sync(~0u, mine.id, k)};
    if (better(other, mine)) mine = other;
  }
  __syncthreads();  // an earlier answer has been read
  if (threadIdx.x % 32 == 0) best[threadIdx.x / 32] = mine;
  __syncthreads();
  for (int i = 0; i < THREADS / 32; i++)
    if (better(best[i], mine)) mine = best[i];
  return mine;
}

// The sum over all threads, known to all and the same in every run. `sums` is shared, an entry a warp.
template <int THREADS> FN double sum_of_block(double* sums, double mine) {
#pragma unroll
  for (int k = 16; k; k >>= 1) mine += __shfl_xor_sync(~0u, mine, k);
  __syncthreads();  // an earlier answer has been read
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = mine;
  __syncthreads();
  double total = 0;
  for (int i = 0; i < THREADS / 32; i++) total += sums[i];
  return total;
}
