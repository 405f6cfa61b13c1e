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

// Rejection (Leviathan et al., ICML 2023; in trees Miao et al., ASPLOS 2024), nodes laid out as above. Guesses after a
// node are judged one after another: a guess that was drawn from q is taken with probability min(1, p / q), where p is
// the target's distribution at the node, and after one that was not taken the positive part of p - q, normalised. If none
// is taken a token is drawn from what is left, -1 if nothing is. `target` has a row of p for each node, `chances` rows of
// q: `drawn_from` says which was a node's, below 0 if its guess was certain. Up to 64 guesses may come after one node.
namespace {

struct Rejected { int node; double scale; };  // a guess, and what made its p sum to 1

struct Judged {
  Candidate best[32];
  double sums[32];
  Rejected rejected[65];
};

}  // namespace

template <int THREADS>
__global__ void __launch_bounds__(THREADS, 2)
spec_reject(const int* __restrict__ firsts, const int* __restrict__ all_guesses, const int* __restrict__ all_parents,
            const double* __restrict__ target, const double* __restrict__ chances, const int* __restrict__ all_drawn_from,
            const Draw* __restrict__ draws, int* __restrict__ tokens, int* __restrict__ counts, int vocabulary) {
  SHARED_MEMORY(memory);
  Judged& shared = *reinterpret_cast<Judged*>(memory);
  const int first = firsts[blockIdx.x], nodes = firsts[blockIdx.x + 1] - first;
  const int *guesses = all_guesses + first, *parents = all_parents + first, *drawn_from = all_drawn_from + first;
  const double none = (double)minus_infinity();
  if (threadIdx.x == 0) shared.rejected[0].scale = 1.0;
  __syncthreads();

  auto chance = [&](int node, int id) {
    const int row = drawn_from[node];
    return row < 0 ? (id == guesses[node] ? 1.0 : 0.0) : chances[(int64_t)row * vocabulary + id];
  };
  int node = 0, count = 0;
  while (true) {
    const double* p = target + (int64_t)(first + node) * vocabulary;
    // What the first so many rejections leave of it, up to a factor.
    auto left = [&](int id, int rejections) {
      double weight = p[id];
      for (int i = 0; i < rejections && weight > 0; i++)
        weight = fmax(weight * shared.rejected[i].scale - chance(shared.rejected[i].node, id), 0.0);
      return weight;
    };
    int judged = 0, known = 0, taken = 0;  // guesses that were not taken, and those of them that left something
    for (int child = node + 1; child < nodes && !taken; child++) {
      if (parents[child] != node) continue;
      if (judged) {
        double mine = 0;
        for (int id = threadIdx.x; id < vocabulary; id += THREADS) mine += left(id, known + 1);
        const double total = sum_of_block<THREADS>(shared.sums, mine);
        const bool some = total >= 0x1p-1022;  // else p = q but for rounding: the guess goes for nothing
        if (some) known++;
        if (some && threadIdx.x == 0) shared.rejected[known].scale = 1.0 / total;
        __syncthreads();
      }
      const int guess = guesses[child];
      const double lot = uniform(words_of(draws[first + node], judged / 4, ACCEPT).at(judged % 4));
      if (lot * chance(child, guess) < left(guess, known) * shared.rejected[known].scale) taken = child;
      if (!taken && threadIdx.x == 0) shared.rejected[known].node = child;
      __syncthreads();
      judged += !taken;
    }
    if (taken) {
      if (threadIdx.x == 0) tokens[first + count] = guesses[taken];
      const int guess = guesses[taken];
      count++, taken = node + 1;  // from the first one that guessed it, as everywhere
      while (parents[taken] != node || guesses[taken] != guess) taken++;
      node = taken;
      continue;
    }
    Candidate drawn = {none, 0x7FFFFFFF};
    for (int rejections = judged ? known + 1 : 0; drawn.value == none; rejections = known) {
      for (int quad = threadIdx.x; quad < (vocabulary + 3) / 4; quad += THREADS) {
        int those = 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (4 * quad + i < vocabulary && left(4 * quad + i, rejections) > 0) those |= 1 << i;
        if (those)
          drawn = noisiest(drawn, draws[first + node], quad, those, judged ? RESAMPLE : SAMPLE,
                           [&](int id) { return logarithm(left(id, rejections)); });
      }
      drawn = best_of_block<THREADS>(shared.best, drawn);
      if (rejections == known) break;
    }
    if (threadIdx.x == 0) {
      tokens[first + count] = drawn.value == none ? -1 : drawn.id;
      counts[blockIdx.x] = count + 1;
    }
    return;
  }
}
