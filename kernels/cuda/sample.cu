// Scores to a token: greedy, or temperature, top-k, top-p, min-p, typical and a Gumbel-max draw. Or, if WHOLE, to the
// distribution that it would be drawn from, in their place; zeros if no token can be. One block for a row.
//
// Exact and the same in every run: the last token kept is found by radix selection over (score, then lower id first),
// masses are summed in integers of 2^-45 of the most likely token's, and noise belongs to
// (seed, choice, position, id), so neither the launch nor the other rows show in the token.
#include "draw.cuh"

namespace {

// Greater scores have greater keys.
FN uint64_t key_of(double score) {
  uint64_t bits = bits_of(score + 0.0);  // -0 is 0
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}

struct Last { uint64_t key; uint32_t low; };  // the least candidate kept: its score's key, the complement of its id
FN bool keeps(const Last& last, uint64_t key, int id) { return key > last.key || (key == last.key && ~(uint32_t)id >= last.low); }

struct Shared {
  uint64_t mass[256];
  uint32_t count[256];
  Candidate best[32];
  double sums[32];
  uint64_t need, total, depth;
  Last last;
  int found, sick;
};

}  // namespace

template <int THREADS, bool WHOLE>
__global__ void __launch_bounds__(THREADS, 2)
sample(double* __restrict__ all_scores, const Draw* __restrict__ draws, int* __restrict__ tokens, int vocabulary) {
  SHARED_MEMORY(memory);
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Draw& draw = draws[blockIdx.x];
  double* scores = all_scores + (int64_t)blockIdx.x * vocabulary;
  const double none = (double)minus_infinity();

  if (threadIdx.x == 0) shared.sick = 0;
  __syncthreads();
  Candidate top = {none, 0x7FFFFFFF};
  for (int id = threadIdx.x; id < vocabulary; id += THREADS) {
    Candidate one = {scores[id], id};
    if (!(one.value < -none)) shared.sick = 1;  // NaN or infinite
    if (better(one, top)) top = one;
  }
  top = best_of_block<THREADS>(shared.best, top);
  const bool sick = shared.sick || top.value == none;
  if (sick || draw.temperature == 0) {
    if constexpr (WHOLE)
      for (int id = threadIdx.x; id < vocabulary; id += THREADS) scores[id] = !sick && id == top.id ? 1.0 : 0.0;
    else if (threadIdx.x == 0) tokens[blockIdx.x] = sick ? -1 : top.id;
    return;
  }

  auto relative = [&](double score) { return fmax((score - top.value) / draw.temperature, -1e300); };
  auto mass_of = [&](double score) { return (uint64_t)(exp(relative(score)) * 35184372088832.0 + 0.5); };
  Last last = {0, 0};

  // The last one kept if what is kept weighs at least `need`, with as few tokens as can be: those of greatest keys. Of a
  // token that is not in the running `rank` says `none`.
  auto select = [&](auto rank, bool by_mass, uint64_t need) {
    Last prefix = {0, 0};
    for (int digit = 0; digit < 12; digit++) {
      for (int i = threadIdx.x; i < 256; i += THREADS) shared.mass[i] = 0, shared.count[i] = 0;
      __syncthreads();
      const int shift = digit < 8 ? 56 - 8 * digit : 88 - 8 * digit;  // within the key, then within the id
      for (int id = threadIdx.x; id < vocabulary; id += THREADS) {
        const double score = rank(id);
        const uint64_t key = key_of(score);
        const uint32_t low = ~(uint32_t)id;
        if (score == none) continue;
        if (digit < 8 ? digit > 0 && (key ^ prefix.key) >> (shift + 8)
                      : key != prefix.key || (digit > 8 && (low ^ prefix.low) >> (shift + 8))) continue;
        const int bin = digit < 8 ? key >> shift & 255 : low >> shift & 255;
        atomicAdd(&shared.count[bin], 1u);
        atomicAdd(&shared.mass[bin], by_mass ? mass_of(scores[id]) : (uint64_t)1);
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        int bin = 255;
        uint64_t left = need;
        while (bin > 0 && shared.mass[bin] < left) left -= shared.mass[bin--];
        if (digit < 8) prefix.key |= (uint64_t)bin << shift;
        else prefix.low |= (uint32_t)bin << shift;
        shared.last = prefix;
        shared.need = left;
        shared.found = shared.count[bin] == 1 || shared.mass[bin] == left;  // all of the bin is kept
      }
      __syncthreads();
      prefix = shared.last;
      need = shared.need;
      const bool found = shared.found;
      __syncthreads();
      if (found) break;
    }
    return prefix;
  };
  auto share = [&](double p) {
    const double target = ceil(p * (double)shared.total);
    return target < 1.0 ? 1 : (uint64_t)target;
  };
  auto kept = [&](int id) { return keeps(last, key_of(scores[id]), id) ? scores[id] : none; };

  if (draw.top_k > 0 && draw.top_k < vocabulary) last = select(kept, false, draw.top_k);
  if (draw.top_p < 1.0) {
    if (threadIdx.x == 0) shared.total = 0;
    __syncthreads();
    uint64_t mine = 0;
    for (int id = threadIdx.x; id < vocabulary; id += THREADS)
      if (scores[id] != none && keeps(last, key_of(scores[id]), id)) mine += mass_of(scores[id]);
    atomicAdd(&shared.total, mine);
    __syncthreads();
    last = select(kept, true, share(draw.top_p));
  }
  const double least = draw.min_p > 0 ? logarithm(fmin(draw.min_p, 1.0)) : none;

  // Typical: nearest to the mean of scores, which is as far below the best as `depth` says. Of equally near ones all.
  double mean = 0;
  uint64_t nearest = 0;
  auto nearness = [&](int id) {
    const double score = kept(id), value = relative(score);
    return score == none || value < least ? none : -fabs(value - mean);
  };
  if (draw.typical_p < 1.0) {
    if (threadIdx.x == 0) shared.total = 0, shared.depth = 0;
    __syncthreads();
    uint64_t mass = 0, depth = 0;
    for (int id = threadIdx.x; id < vocabulary; id += THREADS) {
      if (nearness(id) == none) continue;
      const double value = relative(scores[id]), weight = exp(value);
      mass += mass_of(scores[id]);
      if (weight > 0) depth += (uint64_t)(weight * -value * 35184372088832.0 + 0.5);
    }
    atomicAdd(&shared.total, mass);
    atomicAdd(&shared.depth, depth);
    __syncthreads();
    mean = -((double)shared.depth / (double)shared.total);
    nearest = select(nearness, true, share(draw.typical_p)).key;
  }

  auto running = [&](int id) { return nearness(id) != none && key_of(nearness(id)) >= nearest; };

  if constexpr (WHOLE) {
    double mine = 0;
    for (int id = threadIdx.x; id < vocabulary; id += THREADS)
      mine += scores[id] = running(id) ? exp(relative(scores[id])) : 0.0;
    const double all = sum_of_block<THREADS>(shared.sums, mine);
    for (int id = threadIdx.x; id < vocabulary; id += THREADS) scores[id] /= all;
  } else {
    Candidate chosen = {none, 0x7FFFFFFF};
    for (int quad = threadIdx.x; quad < (vocabulary + 3) / 4; quad += THREADS) {
      int those = 0;
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (4 * quad + i < vocabulary && running(4 * quad + i)) those |= 1 << i;
      if (those) chosen = noisiest(chosen, draw, quad, those, SAMPLE, [&](int id) { return relative(scores[id]); });
    }
    chosen = best_of_block<THREADS>(shared.best, chosen);
    if (threadIdx.x == 0) tokens[blockIdx.x] = chosen.id;
  }
}
