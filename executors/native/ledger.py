"""What a native model holds, in bytes, by what it is for: for people who plan memory. The KV pool is `Facts`'s own.

A workspace is reserved for the largest step so far and taken from the system where it is written, so these are its
bounds; logits that are drawn from come on top while a step lasts: four bytes for each token of the vocabulary.
"""

from __future__ import annotations

from octavo.executors.native.matrix import LANES
from octavo.executors.native.program import SLOT, SLOT_INNER, WIDE, widths
from octavo.executors.native.weights import Weights


def weights_bytes(weights: Weights) -> int:
    return weights.arena.size + sum(a.nbytes for a in (*weights.vectors.values(), *weights.angles))


def workspace_bytes(weights: Weights, tokens: int) -> int:
    """Rows between operations, and the widest of them as products want it: in fp32, in int8 with four numbers for each
    32, and a prompt's in bf16: all three where a model has products of all kinds. Experts have a row for each token
    that goes through them. Adapters, and what a step with some takes beside, are not counted."""
    spec, width = weights.spec, widths(weights.spec)[:WIDE]
    slots = tokens * spec.experts.used + spec.experts.count * LANES if spec.experts else 0
    between = sum(n * (slots if i in (SLOT_INNER, SLOT) else tokens) for i, n in enumerate(width))
    widest = max(*width, *(matrix.cols for matrix in weights.matrices.values()))
    prepared = max(tokens * widest, slots * spec.hidden)
    return int(4 * between + 7.5 * prepared)
