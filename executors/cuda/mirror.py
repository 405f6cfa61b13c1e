"""Arrays that exist twice: on the host, where a step writes them, and on the device, where kernels read them.

All of them lie in one run of bytes, pinned where that is a thing, so that a step's inputs cross over in one copy. The
host may write again once the device was waited for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGN = 256
_TORCH = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
}


class Mirror:
    """`shapes` are dtype and shape by name. Zeroed on the host; the device has what was sent last."""

    def __init__(self, device: torch.device, shapes: dict[str, tuple[npt.DTypeLike, tuple[int, ...]]]) -> None:
        places, end = {}, 0
        for name, (dtype, shape) in shapes.items():
            size = np.dtype(dtype).itemsize * int(np.prod(shape))
            places[name] = (end, end + size)
            end += -(-size // _ALIGN) * _ALIGN
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        self.host: dict[str, npt.NDArray[Any]] = {}
        self.device: dict[str, Tensor] = {}
        for name, (dtype, shape) in shapes.items():
            start, stop = places[name]
            self.host[name] = self._host[start:stop].numpy().view(dtype).reshape(shape)
            self.device[name] = self._device[start:stop].view(_TORCH[np.dtype(dtype)]).view(shape)

    def send(self) -> None:
        """Everything to the device, in the order of torch's current stream."""
        self._device.copy_(self._host, non_blocking=True)


def mirrored(device: torch.device, arrays: dict[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    """These arrays on the device, brought there in one copy."""
    mirror = Mirror(device, {name: (array.dtype, array.shape) for name, array in arrays.items()})
    for name, array in arrays.items():
        mirror.host[name][...] = array
    mirror.send()
    return mirror.device
