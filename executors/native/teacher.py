"""A model's logits at every position of a text, with weights and KV stored as one asks: for measuring what that loses.

Entry point `native` of `octavo.teacher`.
"""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np

from octavo.core.models.errors import ModelError
from octavo.core.models.gguf import GgmlType
from octavo.core.models.locate import locate
from octavo.executors.loading.checkpoint import Checkpoint
from octavo.executors.loading.files import open_checkpoint
from octavo.executors.loading.rows import Rows
from octavo.executors.native.library import Floats, Kind, int32s, load
from octavo.executors.native.matrix import Wanted
from octavo.executors.native.program import Inputs, Native, Pool
from octavo.executors.native.weights import Weights
from octavo.executors.threads import default_threads

STORAGES: dict[str, tuple[GgmlType | None, Wanted]] = {
    "file": (None, "file"),
    "bf16": (GgmlType.BF16, "file"),
    "w8": (GgmlType.F32, "w8"),
    "w4": (GgmlType.F32, "w4"),
}
"""By name: what to make of the file's numbers, and how to pack that."""
KV = {"bf16": Kind.BF16, "int8": Kind.I8, "fp32": Kind.F32}
_BLOCK, _TOKENS = 16, 2048
_CHUNK = 256


class Teacher:
    def __init__(self, path: str, weights: str, kv: str, *, exact: bool, prompt: bool = False) -> None:
        if weights not in STORAGES or kv not in KV:
            raise ModelError(
                f"weights {weights!r} and KV {kv!r}: there are weights {', '.join(STORAGES)} and KV {', '.join(KV)}"
            )
        kind, wanted = STORAGES[weights]
        checkpoint = stored(open_checkpoint(locate(path)), kind)
        packed = Weights(load(), checkpoint, exact=exact, wanted=wanted, context=_TOKENS)
        self._native = Native(packed, Pool(_TOKENS // _BLOCK, _BLOCK, KV[kv]), default_threads())
        self._ends = int32s([_TOKENS]) if prompt and self._native.own_prompts else None

    def __call__(self, ids: list[int]) -> Floats:
        """[len(ids), vocab]. At most 2048 ids."""
        if len(ids) > _TOKENS:
            raise ModelError(f"a text of {len(ids)} tokens; at most {_TOKENS} are read")
        table, none = int32s(range(_TOKENS // _BLOCK)), int32s([])
        out: list[Floats] = []
        for at in range(0, len(ids), _CHUNK):
            rows = int32s(range(len(ids[at : at + _CHUNK])))
            places = rows + np.int32(at), np.zeros_like(rows), table, int32s([0, len(table)])
            inputs = Inputs(int32s(ids[at : at + _CHUNK]), *places, rows, rows, none, none, prompt_ends=self._ends)
            out.append(self._native.step(inputs).logits)
        return np.concatenate(out)


def stored(checkpoint: Checkpoint, kind: GgmlType | None) -> Checkpoint:
    """The same model with all its matrices in another format; as it is for None."""
    if kind is None:
        return checkpoint
    matrices = {name: [_as(part, kind) for part in parts] for name, parts in checkpoint.matrices.items()}
    return replace(checkpoint, matrices=matrices)


def _as(part: Rows, kind: GgmlType) -> Rows:
    data = gguf.quants.quantize(part.floats(), gguf.GGMLQuantizationType(int(kind)))
    return part._replace(data=np.ascontiguousarray(data).view(np.uint8).reshape(-1), kind=kind)
