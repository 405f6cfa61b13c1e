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

struct Words { uint32_t of[4]; };

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

FN double uniform(uint32_t word) { return (word + 0.5) / 4294967296.0; }
FN double gumbel(uint32_t word) { return -log(-log(uniform(word))); }

struct Candidate { double value; int id; };
FN bool better(const Candidate& a, const Candidate& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

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
