"""The kernels' tests on a GPU as they are: tensors cross over for each call, and come back with what was written."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.cuda.launch import Kernels


class Ferry:
    """Looks like `Kernels` to a test that has its tensors on the CPU."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._kernels, name)
        if not callable(method):
            return method

        def call(*args: Any, **how: Any) -> Any:
            there: dict[int, tuple[Tensor, Tensor]] = {}
            made = method(*self._sent(args, there), **self._sent(how, there))
            for here, moved in there.values():
                here.copy_(moved)
            return _mapped(made, lambda tensor: tensor.cpu())

        return call

    def _sent(self, value: Any, there: dict[int, tuple[Tensor, Tensor]]) -> Any:
        def move(tensor: Tensor) -> Tensor:
            if id(tensor) not in there:
                moved = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._kernels.device
                )
                there[id(tensor)] = (tensor, moved.copy_(tensor))
            return there[id(tensor)][1]

        return _mapped(value, move)


def _mapped(value: Any, move: Any) -> Any:
    """`value` with its tensors moved, whatever they are in."""
    if isinstance(value, Tensor):
        return move(value)
    if isinstance(value, dict):
        return {key: _mapped(one, move) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(one, move) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if any(isinstance(one, Tensor) for one in fields.values()):
            return dataclasses.replace(value, **_mapped(fields, move))
    return value
