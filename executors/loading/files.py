"""From wherever `locate` found a model to its weights, whatever the format."""

from __future__ import annotations

from pathlib import Path

from octavo.core.models.errors import ModelError
from octavo.core.models.locate import ModelFiles
from octavo.executors.loading.folder import load_folder
from octavo.executors.loading.gguf import load_gguf
from octavo.executors.loading.spec import Model


def load_model(files: ModelFiles) -> Model:
    """Plain fp32 weights. Raises `ModelError` when there are none, or not of a family that is known."""
    if files.path is None:
        raise ModelError(f'the model {files.model_id!r} has no weights; run it with executor.kind = "ghost"')
    return load_gguf(Path(files.path)) if files.kind == "gguf" else load_folder(Path(files.path))
