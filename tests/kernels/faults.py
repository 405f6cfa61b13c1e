"""Single-line faults in the kernels, each of which the tests' own checks must see.

A fault is (file, text, replacement): the text must occur exactly once, so that a change of the code that makes a fault
meaningless is noticed. `orders` are those of execution in which it is looked for: 0, 1 with bulk copies, 2, 3 without.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    check: str
    """A name in `test_faults.CHECKS`."""
    file: str
    text: str
    fault: str
    orders: tuple[int, ...] = (0, 1)


# ruff: noqa: E501 - a line of the code is quoted whole

DECODE, PREFILL, TILES, SAMPLE = "attn_decode.cu", "attn_prefill.cu", "tile.cuh", "sample.cu"

FAULTS = [
    Fault("a tile is not waited for", "decode", DECODE, "      barrier_wait(&barriers[i % STAGES], i / STAGES & 1);", "", (0, 1)),
    Fault("a barrier's phase never turns", "decode", DECODE, "i / STAGES & 1", "0", (1,)),
    Fault("fewer bytes are announced than come", "decode", DECODE, "barrier_expect(&barriers[i % STAGES], TILE_BYTES)", "barrier_expect(&barriers[i % STAGES], TILE_BYTES / 2)", (0,)),
    Fault("a group too few is waited for", "decode", DECODE, "copy_wait<STAGES - 1>()", "copy_wait<STAGES>()", (2, 3)),
    Fault("lanes do not wait for each other's copies", "decode", DECODE, "      __syncwarp();  // what other lanes brought", "", (2, 3)),
    Fault("the rings are reused too early", "decode", DECODE, "  __syncthreads();  // the rings are free", "  // the rings are free", (2, 3)),
    Fault("a stage is refilled while it is read", "prefill", PREFILL, "    __syncthreads();  // all warps have read", "    // all warps have read", (2, 3)),
    Fault("a prefill sees one key too many", "prefill", TILES, "n <= last[h] && n >=", "n <= last[h] + 1 && n >=", (0,)),
    Fault("a window is one key too wide", "window", TILES, "- window + 1;", "- window;", (0,)),
    Fault("unwritten values are not hidden", "decode", TILES, "if (valid < TILE) {", "if (false) {", (0,)),
    Fault("the sum is not brought to the new maximum", "prefill", TILES, "      total[h] *= shrink;", "", (0,)),
    Fault("a panel's rows are not exchanged", "decode", TILES, "((row & 7) * width / 8)", "0", (0,)),
    Fault("odd and even dimensions of fp8 are swapped", "fp8", TILES, "mma<M>(out[4 * i + 2 * y], a, even[0], even[1]);", "mma<M>(out[4 * i + 2 * y], a, odd[0], odd[1]);", (0,)),
    Fault("parts are merged without their weights", "split", "attn_merge.cu", "float share = exp2_fast(part_lse[part(i)] - base);", "float share = 1.f;", (0,)),
    Fault("values are rotated", "append", "append_kv.cu", "if (!is_value && d < rotated) {", "if (d < rotated) {", (0,)),
    Fault("padding is written", "append", "append_kv.cu", "token >= tokens || slot[token] < 0", "token >= tokens", (0,)),
    Fault("an early sum is read", "norm", "add_rmsnorm.cu", "  __syncthreads();\n", "", (2, 3)),
    Fault("a draw forgets its choice", "sample", "draw.cuh", "(uint32_t)draw.choice", "0u", (0,)),
    Fault("ties go to the last id", "sample", SAMPLE, "a.id < b.id", "a.id > b.id", (0,)),
    Fault("top-k counts wrongly past the first digit", "sample", SAMPLE, "left -= shared.mass[bin--]", "bin--", (0,)),
    Fault("presence counts for the prompt", "sample", "logits.cu", "if (count & 0x3FFFFFFF) x -=", "if (count) x -=", (0,)),
]  # fmt: skip
