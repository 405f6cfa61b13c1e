// The activation of a product that was stored before it: where adapters add to it first. Included by a level.
#pragma once
#include "rows.h"

namespace {

// Of `n` results; gated: blocks of gates and of what they gate take turns in `x`. The same operations as `emit` has.
void activate(int act, bool gated, const float* x, int n, float* out) {
    for (int i = 0; i < n; i += LANES) {
        if (gated) store(out + i, mul(activated(act, load(x + 2 * i)), load(x + 2 * i + LANES)));
        else store(out + i, activated(act, load(x + i)));
    }
}

}  // namespace
