"""The step library as Python sees it: kernels/cpu/octavo.h in ctypes, field by field.

`python -m octavo.executors.native.library` builds it if it is not there, and prints where it is.
"""

from __future__ import annotations

import ctypes as c
import sys
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.core.models.cache import cache_folder
from octavo.core.trace.log import log
from octavo.kernels.cpu import build

Int32s: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]


class Kind(IntEnum):
    """How a matrix is packed; F32, BF16 and I8 say how keys and values are kept."""

    F32 = 0
    F16 = 1
    BF16 = 2
    W4 = 3
    W8 = 4
    W5 = 5
    K4 = 6
    K5 = 7
    K6 = 8
    I8 = 9


class OpKind(IntEnum):
    EMBED = 0
    LINEAR = 1
    ATTEND = 2
    HEAD = 3
    NORMED = 4
    ROUTE = 5
    RISE = 6
    FALL = 7
    BLEND = 8
    HEADS = 9
    ADAPT = 10
    BOUND = 11


class Mode(IntEnum):
    """What a linear operation does with its result: `GATED` has blocks of gate and up rows in turn."""

    STORE = 0
    ADD = 1
    GATED = 2
    ACT = 3


class Act(IntEnum):
    SILU = 0
    GELU_TANH = 1
    GELU = 2
    RELU = 3


class Isa(IntEnum):
    PLAIN = 0
    AVX2 = 1
    AVX512 = 2
    AMX = 3
    NEON = 4


class CMatrix(c.Structure):
    _fields_ = (
        ("kind", c.c_int32),
        ("rows", c.c_int32),
        ("cols", c.c_int32),
        ("blocks", c.c_int32),
        ("block_bytes", c.c_uint64),
        ("data", c.c_void_p),
    )


class COp(c.Structure):
    _fields_ = (
        *((name, c.c_int32) for name in ("kind", "mode", "act", "norm_kind", "source", "target", "column", "layer")),
        *(
            (name, c.c_int32)
            for name in (
                "heads",
                "angles",
                "width",
                "experts",
                "used",
                "groups",
                "groups_used",
                "sigmoid",
                "queries",
                "keys",
                "site",
                "wide",
                "window",
            )
        ),
        *((name, c.c_float) for name in ("eps", "scale", "cap")),
        ("matrix", c.POINTER(CMatrix)),
        *((name, c.c_void_p) for name in ("norm", "norm_bias", "bias", "q_norm", "k_norm", "slopes", "order")),
    )


class CPart(c.Structure):
    _fields_ = (
        ("down", c.POINTER(CMatrix)),
        ("up", c.POINTER(CMatrix)),
        ("block", c.c_int32),
        ("step", c.c_int32),
    )


class CAdapter(c.Structure):
    _fields_ = (("first", c.c_void_p), ("parts", c.c_void_p))


class CAngles(c.Structure):
    _fields_ = (("half", c.c_int32), ("data", c.c_void_p))


class CShape(c.Structure):
    _fields_ = tuple(
        (name, c.c_int32)
        for name in (
            "layers",
            "kv_heads",
            "head_dim",
            "blocks",
            "block_size",
            "kv_kind",
            "context",
            "exact",
            "threads",
            "isa",
            "latent",
        )
    )


class CStep(c.Structure):
    _fields_ = (
        *((name, c.c_int32) for name in ("tokens", "samples", "copies", "tables_count")),
        *((name, c.c_int32) for name in ("skip_from", "skip_to", "taps")),
        *(
            (name, c.c_void_p)
            for name in (
                "ids",
                "positions",
                "sequences",
                "paths",
                "path_start",
                "tables",
                "table_start",
                "prompt_ends",
                "sample_rows",
                "logit_rows",
                "copy_source",
                "copy_target",
                "logits",
                "hidden",
                "tap_ops",
                "tapped",
                "best",
                "finite",
                "sample_finite",
            )
        ),
        ("loaded_count", c.c_int32),
        ("adapters", c.c_void_p),
        ("loaded", c.c_void_p),
    )


DRAW = np.dtype(
    [
        *((name, np.uint64) for name in ("logits", "ids", "bias_ids", "allowed", "banned", "bias", "mask")),
        *(
            (name, np.float64)
            for name in ("temperature", "top_p", "min_p", "typical_p", "repetition", "presence", "frequency")
        ),
        ("seed", np.uint64),
        *((name, np.uint32) for name in ("choice", "position")),
        *((name, np.int32) for name in ("prompt", "top_k", "biases", "allowed_count", "banned_count", "token")),
    ]
)  # fmt: skip
"""`OctDraw`; addresses are numbers."""
LIKELY = np.dtype(
    [
        *((name, np.uint64) for name in ("logits", "ids", "values")),
        *((name, np.float64) for name in ("least", "logprob")),
        *((name, np.int32) for name in ("token", "alternatives")),
    ]
)
"""`OctLikely`."""

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "oct_isa_best": (c.c_int32, ()),
    "oct_prompts": (c.c_int32, (c.c_int32, c.c_int32)),
    "oct_matrix_shape": (c.c_int32, (c.POINTER(CMatrix), c.c_int32, c.c_int32, c.c_int32)),
    "oct_matrix_fill": (
        c.c_int32,
        (c.POINTER(CMatrix), c.c_int32, c.c_void_p, c.c_int32, c.c_void_p, c.c_void_p),
    ),
    "oct_linear": (None, (c.c_int32, c.POINTER(CMatrix), c.c_void_p, c.c_int32, c.c_int32, c.c_void_p)),
    "oct_embed": (
        c.c_int32,
        (c.c_int32, c.POINTER(CMatrix), c.c_void_p, c.c_int32, c.c_float, c.c_void_p),
    ),
    "oct_sample": (None, (c.c_void_p, c.c_int32, c.c_int32, c.c_void_p, c.c_int32)),
    "oct_likely": (None, (c.c_void_p, c.c_int32, c.c_int32, c.c_void_p, c.c_int32)),
    "oct_model_new": (
        c.c_void_p,
        (c.POINTER(CShape), c.c_void_p, c.c_int32, c.c_void_p, c.c_int32, c.c_void_p, c.c_int32),
    ),
    "oct_ready": (c.c_int32, (c.c_void_p, c.c_int32)),
    "oct_block_bytes": (c.c_uint64, (c.POINTER(CShape),)),
    "oct_model_free": (None, (c.c_void_p,)),
    "oct_step": (c.c_int32, (c.c_void_p, c.POINTER(CStep))),
    "oct_copy_cells": (c.c_int32, (c.c_void_p, c.c_int32, c.c_void_p, c.c_void_p)),
    "oct_times": (None, (c.c_void_p, c.c_void_p)),
    "oct_error": (c.c_char_p, (c.c_int32,)),
    "oct_buffer": (c.c_void_p, (c.c_void_p, c.c_int32, c.c_int32)),
    "oct_team_stress": (c.c_int64, (c.c_int32, c.c_int32, c.c_int32, c.c_int32)),
    "oct_read_bandwidth": (c.c_double, (c.c_int32, c.c_uint64, c.c_int32)),
    "oct_byte_rate": (c.c_double, (c.c_int32, c.c_int32, c.c_int32)),
}


def load(path: Path | None = None) -> c.CDLL:
    """The library at `path`, else the package's or the one in the user's cache, which is built at first use
    (`build.BuildError`)."""
    library = c.CDLL(str(path or build.library(cache_folder() / "native", before=lambda: log().info(_BUILDING))))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_BUILDING = "building the native executor's library, once: a quarter of a minute on two free cores"


def int32s(values: object) -> Int32s:
    return np.ascontiguousarray(values, dtype=np.int32)


if __name__ == "__main__":
    try:
        print(build.library(cache_folder() / "native", before=lambda: print(f"octavo: {_BUILDING}", file=sys.stderr)))
    except build.BuildError as error:
        sys.exit(f"octavo: {error}")
