// LoRA: what rows of a step get beside a product, each from its own adapter. Included by step.cpp.
//
//     out of a token += up · (down · in of that token)        of each part of its adapter at this place of the program
//
// Rows of one adapter go together in panels of up to 16, a panel to a thread, through the same products as all weights: a
// row's sums have one order whatever stands beside it. A step without adapters has no panels, and nothing is done.
#pragma once
#include <vector>

#include "isa.h"

namespace octavo {

struct Panel {
    int adapter, first, count;  // of `Panels::tokens`
};

// The rows that have adapters, those of one together, in their order.
struct Panels {
    std::vector<int> tokens;
    std::vector<Panel> panels;

    void plan(const OctStep& step) {
        tokens.clear();
        panels.clear();
        for (int a = 0; a < step.loaded_count; a++) {
            int free = 0;
            for (int i = 0; i < step.tokens; i++) {
                if (step.adapters[i] != a) continue;
                if (!free) {
                    panels.push_back({a, int(tokens.size()), 0});
                    free = LANES;
                }
                tokens.push_back(i);
                panels.back().count++;
                free--;
            }
        }
    }
};

// A thread's room: the panel's rows, and what is between the two products and after them.
struct AdaptScratch {
    std::vector<float> rows, low, spread_low, high;
};

inline float* room(std::vector<float>& v, size_t n) {
    if (v.size() < n) v.resize(n);
    return v.data();
}

// A row into its place in a panel, whose rows stand side by side, column by column.
inline void put(const float* x, int n, float* out) {
    for (int k = 0; k < n; k++) out[k * LANES] = x[k];
}

inline Sink stored(float* out, size_t stride) {
    Sink sink{};
    sink.mode = Sink::STORE;
    sink.out = out;
    sink.stride = stride;
    return sink;
}

// One part for a panel whose rows are spread in `rows`; `out_of(i)` is where row i's results are added.
template <class OutOf>
void adapt(const Isa& isa, const OctPart& part, float* rows, int count, AdaptScratch& own, const OutOf& out_of) {
    const OctMatrix &down = *part.down, &up = *part.up;
    const size_t rank = size_t(down.blocks) * LANES, wide = size_t(up.blocks) * LANES;
    float* low = room(own.low, LANES * rank);
    Sink sink = stored(low, rank);
    isa.product(down, 0, down.blocks, {rows, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr}, count, true, sink);
    float* between = room(own.spread_low, LANES * size_t(up.cols));
    for (int i = 0; i < count; i++) put(low + size_t(i) * rank, up.cols, between + i);
    float* high = room(own.high, LANES * wide);
    sink = stored(high, wide);
    isa.product(up, 0, up.blocks, {between, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr}, count, true, sink);
    for (int i = 0; i < count; i++)
        for (int b = 0; b < up.blocks; b++)
            isa.add_rows(high + size_t(i) * wide + size_t(b) * LANES, LANES, out_of(i) + (part.block + part.step * b) * LANES);
}

}  // namespace octavo
