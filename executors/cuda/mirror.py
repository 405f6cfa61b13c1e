"""Arrays that exist twice: on the host, where a step writes them, and on the device, where kernels read them.

All of them lie in one run of bytes, pinned where that is a thing, so that a step's inputs cross over in one copy.
Nothing here waits for the device but `Reading.wait`: a copy is made when the device comes to it, and until then the
host may not write what it was made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Shape: TypeAlias = tuple[npt.DTypeLike, tuple[int, ...]]
_ALIGN = 256
_TORCH = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
}


class Room:
    """Bytes on the device, and `turns` times on the host, for mirrors of which one is in use at a time."""

    def __init__(self, device: torch.device, nbytes: int, turns: int) -> None:
        self.hosts = torch.zeros(turns, nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.turns, self.turn = turns, 0


class Mirror:
    """`shapes` are dtype and shape by name. The host's side is zero at first, or in a shared room whatever was there;
    the device has what was sent last.

    The host has it `turns` times and writes them in turn: what it sent last but `turns` must have been waited for."""

    def __init__(
        self, device: torch.device, shapes: Mapping[str, Shape], turns: int = 1, room: Room | None = None
    ) -> None:
        size = nbytes(shapes)
        self._room = room or Room(device, size, turns)
        self._target, self._sources = self._room.device[:size], self._room.hosts[:, :size].unbind()
        self._hosts: list[dict[str, npt.NDArray[Any]]] = [{} for _ in self._room.hosts]
        self.device: dict[str, Tensor] = {}
        start = 0
        for name, (dtype, shape) in shapes.items():
            stop = start + np.dtype(dtype).itemsize * int(np.prod(shape))
            for host, turn in zip(self._hosts, self._room.hosts, strict=True):
                host[name] = turn[start:stop].numpy().view(dtype).reshape(shape)
            self.device[name] = self._room.device[start:stop].view(_TORCH[np.dtype(dtype)]).view(shape)
            start += _aligned(stop - start)

    @property
    def host(self) -> dict[str, npt.NDArray[Any]]:
        """To be written for the next `send`."""
        return self._hosts[self._room.turn]

    def send(self) -> None:
        """Everything to the device, in the order of torch's current stream; the host's next turn begins."""
        room = self._room
        self._target.copy_(self._sources[room.turn], non_blocking=True)
        room.turn = (room.turn + 1) % room.turns


def nbytes(shapes: Mapping[str, Shape]) -> int:
    """That a mirror of these takes on each side."""
    return sum(_aligned(np.dtype(dtype).itemsize * int(np.prod(shape))) for dtype, shape in shapes.values())


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class Reading:
    """Numbers on their way from the device to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._event = None
        self._told: list[int] | None = None
        if numbers.device.type == "cuda":
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = numbers.clone()

    @property
    def there(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[int]:
        if self._told is None:
            if self._event is not None:
                self._event.synchronize()
            self._told = self._host.tolist()
        return self._told


def mirrored(device: torch.device, arrays: dict[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    """These arrays on the device, brought there in one copy."""
    mirror = Mirror(device, {name: (array.dtype, array.shape) for name, array in arrays.items()})
    for name, array in arrays.items():
        mirror.host[name][...] = array
    mirror.send()
    return mirror.device


class Mirrors:
    """The same again and again, of arrays that mostly have the shapes of the time before. What was sent last but one
    must have been waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shapes: list[tuple[int, ...]] = []
        self._mirror = Mirror(device, {})

    def mirrored(self, arrays: dict[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
        """As the function; what it gave is good until the next time."""
        if (shapes := [array.shape for array in arrays.values()]) != self._shapes:
            self._shapes = shapes
            kinds = {name: (array.dtype, array.shape) for name, array in arrays.items()}
            self._mirror = Mirror(self._device, kinds, turns=2)
        for name, array in arrays.items():
            self._mirror.host[name][...] = array
        self._mirror.send()
        return self._mirror.device


def picked(rows: Tensor, wanted: Sequence[int]) -> Tensor:
    """These rows of it; itself where that is all of them in their order."""
    if wanted == range(len(rows)) or wanted == list(range(len(rows))):
        return rows
    if not wanted:
        return rows[:0]
    return rows.index_select(0, mirrored(rows.device, {"rows": np.array(wanted, dtype=np.int64)})["rows"])
