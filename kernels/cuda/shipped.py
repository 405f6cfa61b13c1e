"""Which instances exist: every kernel for every type, head size and feature that a model may ask for on an arch.

A release can bring them compiled; a check compiles them all. Knows no compiler and no device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from octavo.kernels.cuda.instances import (
    ACTIVATIONS,
    COPY_BLOCKS,
    DECODE_ROWS,
    PLAN_THREADS,
    PREFILL_ROWS,
    ROW_THREADS,
    SAMPLE_SHARED,
    SAMPLE_THREADS,
    SPEC_VERIFY,
    WGMMA_ROWS,
    Heads,
    append_instance,
    append_latent_instance,
    attention_instance,
    expand_latent_instance,
    gate_instance,
    gather_latent_instance,
    latent_instance,
    logits_instance,
    merge_instance,
    norm_instance,
    plan_instance,
    reject_instance,
    sample_instance,
    wgmma_serves,
)
from octavo.kernels.cuda.pool import LatentLayout, PoolLayout
from octavo.kernels.cuda.sources import Instance

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100")
HEAD_SIZES = (64, 80, 96, 128, 256)
LATENT = (512, 64)
"""What a token's latent KV is made of in models with multi-head latent attention: content, rotated."""
EXPANDED = 192
"""Their head size where latents are expanded, values padded to it."""

_SHARED_KB = {80: 163, 86: 99, 87: 163, 88: 99, 89: 99, 120: 99, 121: 99}
_B16, _H16, _FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


class Shipped(NamedTuple):
    instance: Instance
    threads: int
    shared: int = 0
    """Bytes of dynamic shared memory that a block is launched with."""


def capability(arch: str) -> int:
    """80 of sm_80, 90 of sm_90a."""
    return int(arch.removeprefix("sm_").rstrip("af"))


def shared_limit(arch: str) -> int:
    """Bytes of shared memory that a block may have."""
    return _SHARED_KB.get(capability(arch), 227) * 1024


def rows_on(arch: str, heads: Heads) -> tuple[int, ...]:
    """Packed rows of the works that attention over these heads has kernels for on this arch."""
    wgmma = arch == "sm_90a" and wgmma_serves(heads)
    return (DECODE_ROWS, PREFILL_ROWS, WGMMA_ROWS) if wgmma else (DECODE_ROWS, PREFILL_ROWS)


def shipped(arch: str) -> list[Shipped]:
    """Everything that runs on this arch, without repetition."""
    found = [*_attention(arch), *_rows()]
    found += [
        Shipped(*plan_instance(PLAN_THREADS)),
        Shipped(COPY_BLOCKS, 256),
        *(Shipped(sample_instance(SAMPLE_THREADS, whole=w), SAMPLE_THREADS, SAMPLE_SHARED) for w in (False, True)),
        Shipped(SPEC_VERIFY, 32),
        Shipped(*reject_instance(SAMPLE_THREADS)),
    ]
    return list(dict.fromkeys(found))


def _attention(arch: str) -> list[Shipped]:
    bulk, limit = capability(arch) >= 90, shared_limit(arch)
    found: list[Shipped] = []
    for dtype, kv in ((_B16, _B16), (_B16, _FP8), (_H16, _H16)):
        for size in HEAD_SIZES:
            if kv.itemsize == 1 and size % 32:
                continue
            heads = Heads(8, dtype, PoolLayout(1, 16, 2, size, kv), 1.0)
            for rows in rows_on(arch, heads):
                for biased in (False, True) if dtype == kv == _B16 else (False,):
                    made = attention_instance(heads, rows, biased=biased, bulk=bulk, shared_limit=limit)
                    found.append(Shipped(*made))
                found.append(Shipped(merge_instance(dtype, size, rows), 128))
            found += [Shipped(append_instance(heads, interleaved=interleaved), 128) for interleaved in (False, True)]
    expanded = Heads(8, _B16, PoolLayout(1, 16, 8, EXPANDED, _B16), 1.0)
    found += [
        Shipped(*attention_instance(expanded, rows_on(arch, expanded)[-1], bulk=bulk, shared_limit=limit)),
        Shipped(merge_instance(_B16, EXPANDED, rows_on(arch, expanded)[-1]), 128),
        Shipped(merge_instance(_B16, LATENT[0], DECODE_ROWS), 128),
    ]
    for layout in (LatentLayout(1, 16, *LATENT, _B16, fp8) for fp8 in (False, True)):
        found += [
            Shipped(gather_latent_instance(layout), 128),
            Shipped(expand_latent_instance(layout, EXPANDED), 128),
            *(Shipped(*latent_instance(layout, trees=trees, shared_limit=limit)) for trees in (False, True)),
            Shipped(append_latent_instance(layout), 128),
        ]
    return found


def _rows() -> list[Shipped]:
    found = []
    for dtype in (_B16, _H16):
        found.append(Shipped(*norm_instance(dtype, ROW_THREADS)))
        found += [Shipped(gate_instance(dtype, activation), 256) for activation in ACTIVATIONS]
    return found + [Shipped(logits_instance(dtype, SAMPLE_THREADS), SAMPLE_THREADS) for dtype in (_B16, torch.float32)]
