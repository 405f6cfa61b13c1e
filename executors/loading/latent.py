"""Latent attention (MLA: DeepSeek-V2 and V3, arXiv 2405.04434) as a checkpoint has it, turned to how it is computed.

A layer stores one matrix that makes every head's keys and values of a token's latent. Scores need no keys: a query
taken through the transpose of its head's key rows meets the latent itself, and what a head mixes of latents goes
through its value rows afterwards. So the matrix is split into two small ones for each head, `uk` [rank, kept] and `uv`
[values, rank], and nothing but the latent is remembered.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from octavo.core.models.gguf import GgmlType
from octavo.executors.loading.rows import Bytes, Int32s, Rows
from octavo.executors.loading.spec import Latent


def pairs_last(order: Int32s, heads: int, rotated: int) -> Int32s:
    """Rows of heads whose last `rotated` turn in pairs of neighbours: even ones of those first, then odd ones."""
    rows = order.reshape(heads, -1)
    turned = rows[:, -rotated:].reshape(heads, -1, 2).transpose(0, 2, 1).reshape(heads, rotated)
    return np.concatenate([rows[:, :-rotated], turned], axis=1).reshape(-1)


def absorb(matrices: dict[str, list[Rows]], layers: int, heads: int, latent: Latent) -> None:
    """Each layer's `kv_b` becomes `uk` and `uv` of each head, in place. One of another shape is left for the
    checkpoint to find fault with."""
    both = latent.kept + latent.values
    for i in range(layers):
        stacked = matrices.get(f"{i}.kv_b")
        if (
            stacked is None
            or len(stacked) != 1
            or (len(stacked[0].order), stacked[0].cols) != (heads * both, latent.rank)
        ):
            continue
        whole = matrices.pop(f"{i}.kv_b")[0]
        for h in range(heads):
            keys = whole.slice(h * both, h * both + latent.kept)
            order = np.arange(latent.rank, dtype=np.int32)
            matrices[f"{i}.{h}.uk"] = [Rows(partial(_turned, keys), GgmlType.F32, order, latent.kept, keys.origin)]
            matrices[f"{i}.{h}.uv"] = [whole.slice(h * both + latent.kept, (h + 1) * both)]


def _turned(rows: Rows) -> Bytes:
    return np.ascontiguousarray(rows.floats().T).view(np.uint8).reshape(-1)
