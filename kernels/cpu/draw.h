// A token drawn from a row of logits: the greatest of score and Gumbel noise, where each id's noise is a function of
// (seed, choice, position, id) alone. The rule and its numbers are those of executors/sampling.py; `sample.h` has what may
// be asked beyond a temperature.
//
// Hardly any id can win, and which ones is cheap to tell. With u an id's uniform number, s its score and B the best
// s - log(-log u) so far, it wins only if -log u < exp(s - B). As -log u >= 1 - u, ids with 1 - u >= exp(s - B) are out,
// for which an exponential that errs upwards will do. What is left, a handful a row, is computed as the rule has it.
#pragma once
#include <cmath>
#include <cstring>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "octavo.h"

namespace {

constexpr int NOISE_AT_ONCE = 64;

// Lanes of 64 bits whose lower halves are multiplied. A compiler left alone takes the product of whole ones, at thrice
// the cost.
#if defined(__AVX512F__)
typedef uint64_t Wide __attribute__((vector_size(64)));
inline Wide times(Wide a, Wide b) { return (Wide)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
typedef uint64_t Wide __attribute__((vector_size(32)));
inline Wide times(Wide a, Wide b) { return (Wide)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
#else
typedef uint64_t Wide __attribute__((vector_size(16)));
inline Wide times(Wide a, Wide b) { return (a & 0xffffffffu) * (b & 0xffffffffu); }
#endif

// Philox4x32-10 (Salmon et al., SC 2011) of the counters (c0[i], c1, c2, c3): words [NOISE_AT_ONCE][4]. What stands in the
// upper halves of lanes is of no account.
void philox_at_once(const uint32_t* c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key, uint32_t* words) {
    constexpr int WIDTH = int(sizeof(Wide) / 8), BESIDE = 4;
    for (int start = 0; start < NOISE_AT_ONCE; start += WIDTH * BESIDE) {
        Wide a[BESIDE], b[BESIDE], c[BESIDE], d[BESIDE];
        for (int n = 0; n < BESIDE; n++) {
            for (int i = 0; i < WIDTH; i++) a[n][i] = c0[start + n * WIDTH + i];
            b[n] = Wide{} + c1, c[n] = Wide{} + c2, d[n] = Wide{} + c3;
        }
        uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
        for (int round = 0; round < 10; round++) {
            for (int n = 0; n < BESIDE; n++) {
                const Wide p = times(a[n], Wide{} + 0xD2511F53u), q = times(c[n], Wide{} + 0xCD9E8D57u);
                a[n] = (q >> 32) ^ b[n] ^ k0;
                c[n] = (p >> 32) ^ d[n] ^ k1;
                b[n] = q;
                d[n] = p;
            }
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        for (int n = 0; n < BESIDE; n++) {
            const Wide low = (a[n] & 0xffffffffu) | b[n] << 32, high = (c[n] & 0xffffffffu) | d[n] << 32;
            for (int i = 0; i < WIDTH; i++) {
                const uint64_t both[2] = {low[i], high[i]};  // the first word is in the first bytes
                memcpy(words + size_t(start + n * WIDTH + i) * 4, both, sizeof both);
            }
        }
    }
}

// Of the counters (i, c1, c2, c3), i < n: words [n][4], up to whole NOISE_AT_ONCE.
void philox(uint32_t n, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key, uint32_t* words) {
    for (uint32_t start = 0; start < n; start += NOISE_AT_ONCE) {
        uint32_t c0[NOISE_AT_ONCE];
        for (uint32_t i = 0; i < NOISE_AT_ONCE; i++) c0[i] = start + i;
        philox_at_once(c0, c1, c2, c3, key, words + size_t(start) * 4);
    }
}

float greatest_of(const float* x, int n) {
    float top[16];
    for (int j = 0; j < 16; j++) top[j] = x[0];
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) top[j] = x[i + j] > top[j] ? x[i + j] : top[j];
    for (; i < n; i++) top[0] = x[i] > top[0] ? x[i] : top[0];
    for (int j = 1; j < 16; j++) top[0] = top[j] > top[0] ? top[j] : top[0];
    return top[0];
}

// Whether any of NOISE_AT_ONCE ids may still win. `slope` and `base` take a logit's distance from the top to the bits of a
// float with that exponent: read as one, they are 2^whole (1 + part) >= 2^(whole + part).
bool any_may_win(const float* x, const uint32_t* word, float top, float slope, float base) {
    int found = 0;
    for (int i = 0; i < NOISE_AT_ONCE; i++) {
        float place = (x[i] - top) * slope + base;
        place = place > 0 ? place : 0;
        place = place > 1.1e9f ? 1.1e9f : place;
        const int32_t bits = int32_t(place);
        float bound;
        memcpy(&bound, &bits, 4);
        found |= float(~word[i]) * 0x1p-32f < bound;
    }
    return found != 0;
}

double gumbel(uint32_t word) { return -std::log(-std::log((double(word) + 0.5) / 4294967296.0)); }

// The noise's counters are (id / 4, position, choice, 0). `best` and `most_yet` come in as what is to be beaten. Logits
// are not above `top`.
void draw_row(const float* logits, int32_t n, double top, double temperature, uint64_t seed, uint32_t choice,
              uint32_t position, int32_t& best, double& most_yet) {
    const uint32_t counters = (uint32_t(n) + 3) / 4, padded = (counters + NOISE_AT_ONCE - 1) / NOISE_AT_ONCE * NOISE_AT_ONCE;
    static thread_local std::vector<uint32_t> words;
    words.resize(size_t(padded) * 4);
    philox(counters, position, choice, 0, seed, words.data());
    const auto value = [&](int i) {
        double score = (double(logits[i]) - top) / temperature;
        if (!(score >= -1e300)) score = -1e300;
        return score + gumbel(words[size_t(i)]);
    };
    const double unit = 8388608.0 / std::log(2.0);  // of an exponent, in the bits of a float
    const bool sift = temperature > 1e-3;           // below, a float would not tell near ones apart, nor hold the slope
    float near_top = float(top);                    // not above it
    if (double(near_top) > top) near_top = std::nextafterf(near_top, -INFINITY);
    for (int at = 0; at < n; at += NOISE_AT_ONCE) {
        // 5e4: a little more than rounding can take away
        const float slope = float(unit / temperature), base = float(1065353216.0 + 5e4 - unit * most_yet);
        if (sift && at + NOISE_AT_ONCE <= n && !any_may_win(logits + at, words.data() + at, near_top, slope, base)) continue;
        for (int i = at; i < n && i < at + NOISE_AT_ONCE; i++) {
            const double mine = value(i);
            if (mine > most_yet || (mine == most_yet && i < best)) best = i, most_yet = mine;
        }
    }
}

}  // namespace
