"""The tensors of a drafter's head, from a file that somebody else has written. No pickle is run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from octavo.core.models.errors import ModelError

_DAMAGED = (
    OSError, ValueError, RuntimeError, EOFError, LookupError, TypeError, AttributeError, pickle.UnpicklingError,
    SafetensorError,
)  # fmt: skip
"""What readers raise for bytes that are none of theirs."""


def tensors_of(file: Path) -> dict[str, Tensor]:
    """Raises `ModelError` for a file that is damaged, has anything but tensors, or numbers that are not finite."""
    try:
        found: Any = (
            load_file(file)
            if file.suffix == ".safetensors"
            else torch.load(file, map_location="cpu", weights_only=True)
        )
    except _DAMAGED as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{file} cannot be read, fetch it again: {reason}") from None
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise ModelError(f"{file} is no state dict: there must be tensors by name and nothing else")
    for name, tensor in found.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise ModelError(f"{name} of {file} has numbers that are not finite; fetch it again")
    return found


def config_of(file: Path) -> dict[str, Any]:
    """Raises `ModelError`."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{file} is {type(found).__name__} in JSON, an object was expected")
    return found
