"""From wherever `locate` found a model to its weights, whatever the format: as stored, or as plain fp32 tensors.

Only the latter needs torch, and only when it is asked for.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from octavo.core.models.errors import ModelError
from octavo.core.models.locate import ModelFiles
from octavo.executors.loading.checkpoint import Checkpoint
from octavo.executors.loading.from_folder import from_folder
from octavo.executors.loading.from_gguf import from_gguf
from octavo.executors.loading.spec import Model, Weights


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Raises `ModelError` when there are no weights, not all of them, or not of a family that is known."""
    if files.path is None:
        raise ModelError(f'the model {files.model_id!r} has no weights; run it with executor.kind = "ghost"')
    return from_gguf(Path(files.path)) if files.kind == "gguf" else from_folder(Path(files.path))


def load_model(files: ModelFiles) -> Model:
    """Plain fp32 weights of a Llama-family model; raises as `open_checkpoint`, and for what goes beyond Llama."""
    return plain(open_checkpoint(files))


def plain(checkpoint: Checkpoint) -> Model:
    """As `in_fp32`; raises `ModelError` for what goes beyond Llama."""
    if beyond := checkpoint.spec.beyond_cpu():
        raise ModelError(f'the model has {beyond}, which this executor does not; run it with executor.kind = "native"')
    return in_fp32(checkpoint)


def in_fp32(checkpoint: Checkpoint) -> Model:
    """Its weights as fp32 tensors, under the names of `spec.Weights`."""
    import torch

    weights: Weights = {name: torch.from_numpy(np.array(vector)) for name, vector in checkpoint.vectors.items()}
    for name, parts in checkpoint.matrices.items():
        tensor = torch.from_numpy(np.concatenate([part.ours() for part in parts]))
        weights[name if name == "embed" else f"{name}.weight"] = tensor
    return Model(checkpoint.spec, weights, checkpoint.digest)
