"""Which instance of a kernel a model's shapes ask for, with its threads and its shared memory.

Knows shapes and limits, no tensors of a step and no device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.kernels.cuda.pool import TILE, LatentLayout, PoolLayout
from octavo.kernels.cuda.sources import Instance

NAMES = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "e4m3",
}
DECODE_ROWS, PREFILL_ROWS, WGMMA_ROWS = TILE, 4 * TILE, 8 * TILE
"""Packed rows in a work of each attention kernel."""
ROW_THREADS, SAMPLE_THREADS, PLAN_THREADS = 256, 512, 256
"""Of a block, in kernels that give one to a row of numbers, to a row of logits, to a plan."""
SAMPLE_SHARED = 256 * (8 + 4) + 32 * (16 + 8) + 3 * 8 + 16 + 2 * 4
"""Of struct Shared in sample.cu."""
ACTIVATIONS = {"silu": "Silu", "gelu": "Gelu", "gelu_tanh": "GeluTanh"}


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's attention: `dtype` is that of queries and results, `layout` says the pool's.

    `sinks` and `slopes` are fp32 [heads]: logits of keys without values, and what ALiBi takes off a score for each
    token between query and key."""

    heads: int
    dtype: torch.dtype
    layout: PoolLayout
    scale: float
    soft_cap: float = 0.0
    window: int = 0
    key_scale: float = 1.0
    value_scale: float = 1.0
    sinks: Tensor | None = field(default=None, compare=False)
    slopes: Tensor | None = field(default=None, compare=False)

    @property
    def group(self) -> int:
        return self.heads // self.layout.kv_heads


def decode_shared(head_dim: int, kv_bytes: int, warps: int, stages: int) -> int:
    tile = 2 * TILE * head_dim * kv_bytes
    ring = warps * stages * (tile + 8) + TILE * head_dim * 2
    return max(ring, warps * TILE * (head_dim * 4 + 8))


def prefill_shared(head_dim: int, kv_bytes: int, warps: int, tiles: int) -> int:
    return 2 * tiles * 2 * TILE * head_dim * kv_bytes + warps * TILE * head_dim * 2 + 16


def wgmma_shared(head_dim: int, tokens: int, stages: int) -> int:
    return (WGMMA_ROWS + stages * 2 * tokens) * head_dim * 2 + 4 * stages * 8


def wgmma_serves(heads: Heads) -> bool:
    """Is there a kernel with wgmma for these heads, on a device that has it?"""
    layout = heads.layout
    return layout.head_dim >= 64 and layout.head_dim % 64 in (0, 16, 32) and layout.dtype == heads.dtype


def attention_instance(
    heads: Heads, rows: int, *, biased: bool = False, bulk: bool, shared_limit: int
) -> tuple[Instance, int, int]:
    """The kernel for works of `rows` rows, its threads and its shared memory: the deepest buffers that fit. `biased`
    kernels know ALiBi and trees."""
    size, kv = heads.layout.head_dim, heads.layout.dtype
    if rows == WGMMA_ROWS:
        return _wgmma_instance(heads, biased=biased, shared_limit=shared_limit)
    decode = rows == DECODE_ROWS
    # A stage of 4 tiles of 256 numbers leaves too few registers.
    prefills = ((4, 4), (4, 2), (4, 1)) if size <= 192 else ((4, 2), (4, 1))
    for warps, depth in ((4, 3), (4, 2), (2, 3), (2, 2)) if decode else prefills:
        shared = (decode_shared if decode else prefill_shared)(size, kv.itemsize, warps, depth)
        if shared <= shared_limit:
            kind = "attn_decode" if decode else "attn_prefill"
            how = f"{size},{warps},{depth},{_flag(bulk)},{_flag(biased)}"
            return Instance(f"{kind}.cu", f"{kind}<{NAMES[heads.dtype]},{NAMES[kv]},{how}>"), warps * 32, shared
    raise ValueError(f"attention over heads of {size} needs more than the {shared_limit} bytes of shared memory here")


def _wgmma_instance(heads: Heads, *, biased: bool, shared_limit: int) -> tuple[Instance, int, int]:
    size = heads.layout.head_dim
    if not wgmma_serves(heads):
        raise ValueError(
            "attention with wgmma needs heads of a multiple of 64, or of 16 or 32 more, and KV as queries are"
            f"; these are of {size}, {heads.layout.dtype} for {heads.dtype}"
        )
    tokens = 128 if size <= 128 else 64  # more scores than that leave too few registers beside the results
    for stages in (4, 3, 2):
        if (shared := wgmma_shared(size, tokens, stages)) <= shared_limit:
            how = f"{NAMES[heads.dtype]},{size},{tokens},{stages},{_flag(biased)}"
            return Instance("attn_wgmma.cu", f"attn_wgmma<{how}>"), 384, shared
    raise ValueError(f"attention over heads of {size} needs more than the {shared_limit} bytes of shared memory here")


def latent_instance(layout: LatentLayout, *, trees: bool = False, shared_limit: int) -> tuple[Instance, int, int]:
    """Attention over latent KV: the kernel, its threads and its shared memory."""
    tile, queries = layout.block_bytes // layout.tiles_per_block, TILE * layout.width * 2
    for stages in (2, 1):
        if (shared := 4 * stages * tile + queries + TILE * (4 * TILE + 4) * 4) <= shared_limit:
            return Instance("attn_latent.cu", f"attn_latent<{_latent(layout)},{stages},{_flag(trees)}>"), 128, shared
    raise ValueError(
        f"latent KV of {layout.width} numbers needs more than the {shared_limit} bytes of shared memory here"
    )


def merge_instance(dtype: torch.dtype, size: int, rows: int) -> Instance:
    return Instance("attn_merge.cu", f"attn_merge<{NAMES[dtype]},{size},{rows}>")


def append_instance(heads: Heads, *, interleaved: bool) -> Instance:
    types = f"{NAMES[heads.dtype]},{NAMES[heads.layout.dtype]}"
    return Instance("append_kv.cu", f"append_kv<{types},{heads.layout.head_dim},{_flag(interleaved)}>")


def append_latent_instance(layout: LatentLayout) -> Instance:
    return Instance("append_latent.cu", f"append_latent<{_latent(layout)}>")


def gather_latent_instance(layout: LatentLayout) -> Instance:
    return Instance("expand_latent.cu", f"gather_latent<{_latent(layout)}>")


def expand_latent_instance(layout: LatentLayout, width: int) -> Instance:
    """To keys and values of `width` numbers."""
    return Instance("expand_latent.cu", f"expand_latent<{_latent(layout)},{width}>")


def _latent(layout: LatentLayout) -> str:
    return f"{NAMES[layout.dtype]},{NAMES[layout.content_dtype]},{layout.content},{layout.rotated}"


def norm_instance(dtype: torch.dtype, threads: int) -> tuple[Instance, int, int]:
    return Instance("add_rmsnorm.cu", f"add_rmsnorm<{NAMES[dtype]},{threads}>"), threads, threads // 32 * 4


def gate_instance(dtype: torch.dtype, activation: str) -> Instance:
    return Instance("gate_mul.cu", f"gate_mul<{NAMES[dtype]},{ACTIVATIONS[activation]}>")


def plan_instance(threads: int) -> tuple[Instance, int, int]:
    return Instance("attn_plan.cu", f"attn_plan<{threads}>"), threads, threads // 32 * 12


def logits_instance(dtype: torch.dtype, threads: int) -> Instance:
    return Instance("logits.cu", f"logits<{NAMES[dtype]},{threads}>")


def sample_instance(threads: int, *, whole: bool = False) -> Instance:
    """What draws a token, or with `whole` gives the distribution that it would be drawn from."""
    return Instance("sample.cu", f"sample<{threads},{_flag(whole)}>")


def reject_instance(threads: int) -> tuple[Instance, int, int]:
    return Instance("spec_verify.cu", f"spec_reject<{threads}>"), threads, 32 * (16 + 8) + 65 * 16


COPY_BLOCKS = Instance("copy_blocks.cu", "copy_blocks")
SPEC_VERIFY = Instance("spec_verify.cu", "spec_verify")


def _flag(value: bool) -> str:
    return str(value).lower()
