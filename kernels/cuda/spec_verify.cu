// Which guesses of a drafter are right: a block for a sequence. `executors/drafting/verification.py` says the rules.
#include "draw.cuh"

// Coupled: `drawn` has the token that the sampler drew at each node of a drafted tree. Node 0 is the sequence's last
// token; a node's guess is right if it is what was drawn at its parent. Gives the tokens, the nodes that they were drawn
// at, and how many. A chain is a tree in which every node's parent is the one before it. One warp.
__global__ void __launch_bounds__(32)
spec_verify(const int* __restrict__ firsts,  // node 0 of each sequence; one more entry than there are sequences
            const int* __restrict__ guesses, const int* __restrict__ parents,  // from the sequence's node 0 on
            const int* __restrict__ drawn, int* __restrict__ tokens, int* __restrict__ path, int* __restrict__ counts) {
  const int first = firsts[blockIdx.x], nodes = firsts[blockIdx.x + 1] - first, lane = threadIdx.x;
  int node = 0, count = 0;
  while (count < nodes) {
    const int token = drawn[first + node];
    if (lane == 0) tokens[first + count] = token, path[first + count] = node;
    count++;
    int child = nodes;  // the first one that guessed it
    for (int i = node + 1 + lane; i < nodes && token >= 0; i += 32)
      if (parents[first + i] == node && guesses[first + i] == token) child = min(child, i);
#pragma unroll
    for (int k = 16; k; k >>= 1) child = min(child, __shfl_xor_sync(~0u, child, k));
    if (child == nodes) break;
    node = child;
  }
  if (lane == 0) counts[blockIdx.x] = count;
}

// Rejection (Leviathan et al., ICML 2023): a guess drawn from q is taken with probability min(1, p / q), else a token is
// drawn from the positive part of p - q. Rows of p are the target's distributions, one more than there are guesses;
// rows of q those that the guesses were drawn from, null where they were certain.
template <int THREADS>
__global__ void __launch_bounds__(THREADS)
spec_reject(const int* __restrict__ firsts, const int* __restrict__ guesses, const double* __restrict__ p,
            const double* __restrict__ q, const Draw* __restrict__ draws, int* __restrict__ tokens,
            int* __restrict__ counts, int vocabulary) {
  SHARED_MEMORY(shared);
  Candidate* best = reinterpret_cast<Candidate*>(shared);
  const int first = firsts[blockIdx.x], rows = firsts[blockIdx.x + 1] - first;
  const double none = (double)minus_infinity();
  for (int row = first;; row++) {
    const bool guessed = row + 1 < first + rows;
    const int guess = guessed ? guesses[row] : -1;
    const double* target = p + (int64_t)row * vocabulary;
    const double* chances = guessed && q ? q + (int64_t)row * vocabulary : nullptr;
    if (guessed) {
      const double chance = chances ? chances[guess] : 1.0;
      if (uniform(words_of(draws[row], 0, ACCEPT).of[0]) * chance < target[guess]) {
        if (threadIdx.x == 0) tokens[row] = guess;
        continue;
      }
    }
    Candidate drawn = {none, 0x7FFFFFFF};
    for (bool whole = !guessed; drawn.value == none; whole = true) {  // again if p = q but for rounding
      for (int quad = threadIdx.x; quad < (vocabulary + 3) / 4; quad += THREADS) {
        const Words words = words_of(draws[row], quad, guessed ? RESAMPLE : SAMPLE);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int id = 4 * quad + i;
          if (id >= vocabulary || target[id] <= 0) continue;
          const double left = target[id] - (whole ? 0.0 : chances ? chances[id] : id == guess ? 1.0 : 0.0);
          const Candidate one = {left > 0 ? log(left) + gumbel(words.of[i]) : none, id};
          if (left > 0 && better(one, drawn)) drawn = one;
        }
      }
      drawn = best_of_block<THREADS>(best, drawn);
      if (whole) break;
    }
    if (threadIdx.x == 0) {
      tokens[row] = drawn.id;
      counts[blockIdx.x] = row + 1 - first;
    }
    return;
  }
}
