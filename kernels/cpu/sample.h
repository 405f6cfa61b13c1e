// A token drawn from a row of logits with all that a request may ask, and what the model itself says of a token. The
// rules, their order and the tie rule (the lowest id) are those of executors/sampling.py; scores are its float64 numbers.
//
// No step sorts the vocabulary. A bound in the floats of the logits first says which ids can matter at all, found with
// whole vectors; what is left, a few hundred as a rule, is worked on one by one:
//
//     top-k   the k-th greatest of the maxima of 64 ids each is no more than the k-th greatest logit
//     top-p   ids of at least some share of the whole weight have the nucleus among them if they weigh p together: tried
//             with shares of (1 - p) / 64 and less, under 1 / n of 1 - p it is certain
//     min-p   is a bound already
//     typical the ids of a share as for top-p have with them all that are as near to the mean score as the least of them
//
// Ids whose logits a request changes (penalties, bias) are taken out of the row and kept apart, in float64. Where float
// rounding can differ from the reference: the sum of all weights, and sums of weights in order, may differ in the last
// bits of float64 (some 1e-15 of the whole), so a nucleus whose weight reaches p that nearly may end one id elsewhere.
#pragma once
#include <algorithm>
#include <limits>

#include "draw.h"

namespace {

constexpr int AT_ONCE = 64;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct Pick {  // `weight` is e^score
    double score, weight;
    int32_t id;
};

bool before(const Pick& a, const Pick& b) { return a.score > b.score || (a.score == b.score && a.id < b.id); }

inline double product_and(double a, double b, double c) {
#ifdef __FMA__
    return __builtin_fma(a, b, c);
#else
    return a * b + c;
#endif
}

// e^d in place, d in [-700, 0]: within 2 ulp.
void exponentials(double* d) {
    static const double terms[] = {1. / 6227020800, 1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320,
                                   1. / 5040,       1. / 720,       1. / 120,      1. / 24,      1. / 6,      0.5, 1., 1.};
    double turns[AT_ONCE], rest[AT_ONCE], power[AT_ONCE];
    int64_t bits[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) turns[i] = d[i] * 1.4426950408889634 + 6755399441055744.;
    memcpy(bits, turns, sizeof bits);
    for (int i = 0; i < AT_ONCE; i++) {
        const double whole = turns[i] - 6755399441055744.;
        rest[i] = (d[i] - whole * 0.693147180369123816490) - whole * 1.90821492927058770002e-10;
        bits[i] = int64_t(uint64_t(bits[i] + 1023) << 52);
    }
    memcpy(power, bits, sizeof power);
    for (int i = 0; i < AT_ONCE; i++) {
        double p = terms[0];
        for (int t = 1; t < 14; t++) p = product_and(p, rest[i], terms[t]);
        d[i] = p * power[i];
    }
}

// Of all ids, e^((x - top) / temperature) summed up; and the same times the exponent.
struct Moments {
    double weight, scores;
};

Moments moments_of(const float* x, int n, double top, double temperature) {
    double sums[8] = {}, scores[8] = {}, d[AT_ONCE], power[AT_ONCE];
    const double inverse = 1 / temperature;
    for (int at = 0; at < n; at += AT_ONCE) {
        const int here = n - at < AT_ONCE ? n - at : AT_ONCE;
        if (here < AT_ONCE)
            for (int i = 0; i < AT_ONCE; i++) d[i] = -700;
        for (int i = 0; i < here; i++) {
            const double far = (double(x[at + i]) - top) * inverse;
            d[i] = far > -700 ? far : -700;
        }
        memcpy(power, d, sizeof power);
        exponentials(power);
        for (int i = 0; i < AT_ONCE; i += 8)
            for (int j = 0; j < 8; j++) sums[j] += power[i + j], scores[j] += power[i + j] * d[i + j];
    }
    const auto total = [](const double* s) { return ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7])); };
    return {total(sums), total(scores)};
}

// A row of logits: floats for the many, and float64 for those that the request has changed, which are NEVER in the floats.
struct Row {
    const float* x;
    int n;
    const std::vector<Pick>* changed;  // their scores are logits yet
    double top;

    double score(double logit, double temperature) const {
        const double s = (logit - top) / temperature;
        return s > -1e300 ? s : -1e300;
    }
};

// A logit that at least `k` ids reach; NEVER if that is not cheap to say.
float reached_by(const float* x, int n, int k) {
    const int blocks = n / AT_ONCE;
    if (k > blocks) return NEVER;
    static thread_local std::vector<float> most;
    most.resize(size_t(blocks));
    for (int b = 0; b < blocks; b++) most[size_t(b)] = greatest_of(x + b * AT_ONCE, AT_ONCE);
    std::nth_element(most.begin(), most.begin() + (k - 1), most.end(), std::greater<float>());
    return most[size_t(k - 1)];
}

bool any_from(const float* x, float least) {
    int found = 0;
    for (int i = 0; i < AT_ONCE; i++) found |= x[i] >= least;
    return found != 0;
}

// All ids whose logit is not under `least`, and perhaps some that are nearly. Ids in order, then the changed ones.
void gather(const Row& row, double least, double temperature, std::vector<Pick>& picks) {
    picks.clear();
    least -= 1e-6 * (std::fabs(least) + std::fabs(row.top));  // different floats can make the same score
    float bound = least > -3e38 ? float(least) : std::numeric_limits<float>::lowest();
    if (double(bound) > least) bound = std::nextafterf(bound, NEVER);
    for (int at = 0; at < row.n; at += AT_ONCE) {
        const int end = at + AT_ONCE < row.n ? at + AT_ONCE : row.n;
        if (end - at == AT_ONCE && !any_from(row.x + at, bound)) continue;
        for (int i = at; i < end; i++)
            if (row.x[i] >= bound) picks.push_back({row.score(double(row.x[i]), temperature), 0, i});
    }
    for (const Pick& one : *row.changed)
        if (one.score >= least) picks.push_back({row.score(one.score, temperature), 0, one.id});
}

void weigh_picks(std::vector<Pick>& picks) {
    double d[AT_ONCE];
    for (size_t at = 0; at < picks.size(); at += AT_ONCE) {
        const size_t here = std::min<size_t>(picks.size() - at, AT_ONCE);
        for (size_t i = 0; i < AT_ONCE; i++) d[i] = i < here && picks[at + i].score > -700 ? picks[at + i].score : -700;
        exponentials(d);
        for (size_t i = 0; i < here; i++) picks[at + i].weight = picks[at + i].score > -700 ? d[i] : 0;
    }
}

Moments moments_of(const std::vector<Pick>& picks) {
    Moments of{0, 0};
    for (const Pick& one : picks) of.weight += one.weight, of.scores += one.weight > 0 ? one.weight * one.score : 0;
    return of;
}

// The first of `picks`, in order, whose weights reach `target` together; all if they do not. Only those around the place
// where that happens are sorted: weights by distance from the best tell where it is. Picks come in order of their ids.
void keep_nucleus(std::vector<Pick>& picks, double target) {
    constexpr int BINS = 256;
    static thread_local std::vector<Pick> at_last;
    size_t whole = 0;  // picks [0, whole) are in; the nucleus ends in what follows
    double weight = 0;
    while (picks.size() - whole > BINS / 4) {
        double near = picks[whole].score, far = near, bins[BINS] = {};
        for (size_t i = whole; i < picks.size(); i++) {
            near = picks[i].score > near ? picks[i].score : near;
            far = picks[i].score < far ? picks[i].score : far;
        }
        if (near == far) break;
        const double scale = (BINS - 1) / (far - near);
        const auto bin = [&](const Pick& one) { return int((one.score - near) * scale); };
        for (size_t i = whole; i < picks.size(); i++) bins[bin(picks[i])] += picks[i].weight;
        int last = 0;
        while (last < BINS - 1 && weight + bins[last] < target) weight += bins[last++];
        at_last.clear();
        size_t in = whole;
        for (size_t i = whole; i < picks.size(); i++) {
            const int b = bin(picks[i]);
            if (b == last) at_last.push_back(picks[i]);
            if (b < last) picks[in++] = picks[i];
        }
        if (at_last.size() == picks.size() - whole) break;  // of numbers that are none
        whole = in;
        picks.resize(whole);
        picks.insert(picks.end(), at_last.begin(), at_last.end());
    }
    const auto rest = picks.begin() + std::ptrdiff_t(whole);
    if (!std::is_sorted(rest, picks.end(), before)) std::sort(rest, picks.end(), before);
    size_t kept = whole;
    while (kept < picks.size()) {
        weight += picks[kept++].weight;
        if (weight >= target) break;
    }
    picks.resize(kept);
}

// Those of `picks` whose scores are nearest to `mean`, until they weigh `target` together; of equally near ones all.
void keep_typical(std::vector<Pick>& picks, double mean, double target) {
    static thread_local std::vector<Pick> near;
    near = picks;
    for (Pick& one : near) one.score = -std::fabs(one.score - mean);
    keep_nucleus(near, target);
    double far = 0;
    for (const Pick& one : near) far = -one.score > far ? -one.score : far;
    picks.erase(std::remove_if(picks.begin(), picks.end(), [&](const Pick& one) { return std::fabs(one.score - mean) > far; }),
                picks.end());
}

// The greatest of score and noise, `best` so far (-1: none) among them. Few can win, see `draw.h`: of those whose weight
// is known and too little, the noise's logarithms are not taken.
void draw_of(const OctDraw& ask, const std::vector<Pick>& picks, int32_t& best, double& most) {
    uint32_t counters[NOISE_AT_ONCE], words[4 * NOISE_AT_ONCE];
    for (size_t at = 0; at < picks.size(); at += NOISE_AT_ONCE) {
        const size_t here = std::min<size_t>(picks.size() - at, NOISE_AT_ONCE);
        for (size_t i = 0; i < NOISE_AT_ONCE; i++) counters[i] = uint32_t(picks[at + std::min(i, here - 1)].id) / 4;
        philox_at_once(counters, ask.position, ask.choice, 0, ask.seed, words);
        double bar = best < 0 ? 0 : std::exp(-most) * 1.000001;
        for (size_t i = 0; i < here; i++) {
            const Pick& one = picks[at + i];
            const uint32_t word = words[4 * i + size_t(one.id % 4)];
            if (best >= 0 && one.weight > 0 && double(~word) * 0x1p-32 > one.weight * bar) continue;
            const double mine = one.score + gumbel(word);
            if (best >= 0 && (mine < most || (mine == most && one.id > best))) continue;
            best = one.id, most = mine;
            bar = std::exp(-most) * 1.000001;
        }
    }
}

// Takes ids out of the row and into `changed`, with their logits as penalties and bias leave them.
void change(const OctDraw& ask, int n, std::vector<Pick>& changed) {
    static thread_local std::vector<int32_t> place, outputs;  // by id: where it is in `changed`, plus 1; zeros between calls
    place.resize(size_t(n));
    changed.clear();
    const auto take = [&](int32_t id) {
        if (!place[size_t(id)]) {
            changed.push_back({double(ask.logits[id]), 0, id});
            place[size_t(id)] = int32_t(changed.size());
        }
        return size_t(place[size_t(id)]) - 1;
    };
    if (ask.ids) {
        if (ask.repetition != 1)
            for (uint32_t i = 0; i < ask.position; i++) {
                if (uint32_t(ask.ids[i]) >= uint32_t(n)) continue;  // of a sequence that is refused elsewhere
                const size_t known = changed.size(), at = take(ask.ids[i]);
                double& s = changed[at].score;
                if (at == known) s = s > 0 ? s / ask.repetition : s * ask.repetition;
            }
        outputs.assign(changed.size(), 0);
        for (uint32_t i = uint32_t(ask.prompt); i < ask.position; i++) {
            if (uint32_t(ask.ids[i]) >= uint32_t(n)) continue;
            const size_t at = take(ask.ids[i]);
            outputs.resize(changed.size());
            outputs[at]++;
        }
        for (size_t at = 0; at < outputs.size(); at++)
            if (outputs[at]) changed[at].score -= ask.presence + ask.frequency * outputs[at];
    }
    for (int i = 0; i < ask.biases; i++) changed[take(ask.bias_ids[i])].score += ask.bias[i];
    if (ask.allowed_count) {
        static thread_local std::vector<Pick> allowed;
        allowed.clear();
        for (int i = 0; i < ask.allowed_count; i++) {
            const size_t at = take(ask.allowed[i]);
            allowed.push_back(changed[at]);
        }
        for (const Pick& one : changed) place[size_t(one.id)] = 0;
        std::sort(allowed.begin(), allowed.end(), [](const Pick& a, const Pick& b) { return a.id < b.id; });
        allowed.erase(std::unique(allowed.begin(), allowed.end(), [](const Pick& a, const Pick& b) { return a.id == b.id; }),
                      allowed.end());
        changed = allowed;
    } else {
        for (const Pick& one : changed) place[size_t(one.id)] = 0;
    }
}

double greatest_yet(const float* x, int n, const std::vector<Pick>& changed) {
    double top = n ? double(greatest_of(x, n)) : double(NEVER);
    for (const Pick& one : changed) top = one.score > top ? one.score : top;
    return top;
}

// The lowest id of those with the greatest logit; 0 in a row with NaN, whose draw means nothing.
int32_t first_of(const Row& row) {
    int32_t best = -1;
    const float top = float(row.top);
    for (int at = 0; at < row.n && best < 0; at += AT_ONCE) {
        if (at + AT_ONCE <= row.n && !any_from(row.x + at, top)) continue;
        for (int i = at; i < row.n && i < at + AT_ONCE && best < 0; i++)
            if (double(row.x[i]) == row.top) best = i;
    }
    for (const Pick& one : *row.changed)
        if (one.score == row.top && (one.id < best || best < 0)) best = one.id;
    return best < 0 ? 0 : best;
}

int32_t sample(const OctDraw& ask, int32_t vocabulary) {
    static thread_local std::vector<Pick> changed, picks, unbanned;
    static thread_local std::vector<float> copy;
    const bool shaped = ask.ids || ask.biases || ask.allowed_count || ask.banned_count || ask.mask;
    Row row{ask.logits, vocabulary, &changed, 0};
    changed.clear();
    if (shaped) {
        change(ask, vocabulary, changed);
        const auto forbidden = [&](int32_t id) { return ask.mask && !ask.mask[id]; };
        changed.erase(std::remove_if(changed.begin(), changed.end(), [&](const Pick& one) { return forbidden(one.id); }),
                      changed.end());
        copy.assign(ask.logits, ask.logits + vocabulary);
        row.x = copy.data();
        if (ask.allowed_count) {
            row.n = 0;
        } else {
            if (ask.mask)
                for (int i = 0; i < vocabulary; i++) copy[size_t(i)] = ask.mask[i] ? copy[size_t(i)] : NEVER;
            for (const Pick& one : changed) copy[size_t(one.id)] = NEVER;
        }
        if (ask.banned_count) {
            const auto banned = [&](const Pick& one) {
                return std::find(ask.banned, ask.banned + ask.banned_count, one.id) != ask.banned + ask.banned_count;
            };
            unbanned.clear();
            for (const Pick& one : changed)
                if (!banned(one)) unbanned.push_back(one);
            for (int i = 0; i < ask.banned_count && row.n; i++) copy[size_t(ask.banned[i])] = NEVER;
            if (greatest_yet(row.x, row.n, unbanned) > double(NEVER)) {
                changed = unbanned;
            } else {
                for (int i = 0; i < ask.banned_count && row.n; i++) {
                    const int32_t id = ask.banned[i];
                    const bool apart = std::any_of(changed.begin(), changed.end(), [&](const Pick& p) { return p.id == id; });
                    if (!apart && !forbidden(id)) copy[size_t(id)] = ask.logits[id];
                }
            }
        }
    }
    row.top = greatest_yet(row.x, row.n, changed);
    const double t = ask.temperature;
    if (t == 0) return first_of(row);

    const bool top_k = ask.top_k > 0 && ask.top_k < vocabulary, top_p = ask.top_p < 1, typical = ask.typical_p < 1;
    int32_t best = -1;
    double most = 0;
    if (!typical) draw_of(ask, {{0, 0, first_of(row)}}, best, most);
    if (!top_k && !top_p && !typical && !(ask.min_p > 0)) {
        draw_row(row.x, row.n, row.top, t, ask.seed, ask.choice, ask.position, best, most);
        picks.clear();
        for (const Pick& one : changed) picks.push_back({row.score(one.score, t), 0, one.id});
        draw_of(ask, picks, best, most);
        return best;
    }
    const double all = double(NEVER), near_by = ask.min_p > 0 ? std::log(ask.min_p < 1 ? ask.min_p : 1.) : all;
    const bool bounds = t > 1e-30 && t < 1e6;  // beyond, scores of different logits may be the same
    const bool alone = typical && !top_k && !top_p && !(ask.min_p > 0);
    Moments of{0, 0};
    double least = all, target = 0;
    bool gathered = false;
    if (top_k) {
        least = double(reached_by(row.x, row.n, ask.top_k));
    } else {
        if (top_p || alone) {
            const double p = top_p ? ask.top_p : ask.typical_p;
            if (row.n) of = moments_of(row.x, row.n, row.top, t);
            picks.clear();
            for (const Pick& one : changed) picks.push_back({row.score(one.score, t), 0, one.id});
            weigh_picks(picks);
            const Moments apart = moments_of(picks);
            of.weight += apart.weight, of.scores += apart.scores;
            const double mean = of.scores / of.weight;
            target = p * of.weight;
            // Ids of so much weight at least, if those are enough; hardly ever are they not.
            double share = 1 - p > 1e-9 && bounds ? (1 - p) / 64 : 0;
            for (double weight = 0; share > 0; share = share * vocabulary > 1 - p ? share / 64 : 0) {
                least = std::max(row.top + t * (std::log(share * of.weight) - 1e-3), row.top + t * near_by);
                gather(row, least, t, picks);
                weigh_picks(picks);
                weight = 0;
                const double far = alone ? mean - (least - row.top) / t : -all;
                for (const Pick& one : picks) weight += std::fabs(one.score - mean) <= far ? one.weight : 0;
                if (weight > target * (1 + 1e-12) || least == row.top + t * near_by) break;
            }
            gathered = share > 0;
        }
        least = std::max(all, row.top + t * near_by);
    }
    if (!gathered) gather(row, bounds ? least : all, t, picks);
    if (top_k && size_t(ask.top_k) < picks.size()) {
        std::nth_element(picks.begin(), picks.begin() + (ask.top_k - 1), picks.end(), before);
        picks.resize(size_t(ask.top_k));
    }
    if (top_p) {
        if (!gathered) weigh_picks(picks);
        if (top_k) target = ask.top_p * moments_of(picks).weight;
        keep_nucleus(picks, target);
    }
    if (ask.min_p > 0)
        picks.erase(std::remove_if(picks.begin(), picks.end(), [&](const Pick& one) { return one.score < near_by; }),
                    picks.end());
    if (!top_p && !gathered && (typical || picks.size() > AT_ONCE)) weigh_picks(picks);
    if (typical) {
        if (!alone) of = moments_of(picks);
        keep_typical(picks, of.scores / of.weight, ask.typical_p * of.weight);
    }
    draw_of(ask, picks, best, most);
    return best < 0 ? first_of(row) : best;
}

// See `OctLikely`.
void likely(OctLikely& ask, int32_t vocabulary) {
    static thread_local std::vector<Pick> none, picks;
    const double top = double(greatest_of(ask.logits, vocabulary));
    const double whole = std::log(moments_of(ask.logits, vocabulary, top, 1).weight);
    const auto value = [&](double logit) {
        const double v = (logit - top) - whole;
        return v > ask.least ? v : ask.least;
    };
    ask.logprob = value(double(ask.logits[ask.token]));
    int wanted = ask.alternatives < vocabulary ? ask.alternatives : vocabulary;
    if (wanted < 1) return;
    none.clear();
    double least = double(reached_by(ask.logits, vocabulary, wanted));
    if (least - top - whole < ask.least + 1) least = double(NEVER);
    least -= 1e-9;  // logits that differ by less can have one log-probability
    gather({ask.logits, vocabulary, &none, top}, least, 1, picks);
    for (Pick& one : picks) one.score = value(double(ask.logits[one.id]));
    wanted = std::min(wanted, int(picks.size()));  // of numbers that are none
    std::partial_sort(picks.begin(), picks.begin() + wanted, picks.end(), before);
    for (int i = 0; i < wanted; i++) ask.ids[i] = picks[size_t(i)].id, ask.values[i] = picks[size_t(i)].score;
}

}  // namespace
