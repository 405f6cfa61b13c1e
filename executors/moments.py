"""What an executor's memory holds, measured at four moments of its life: before it loads, after, warmed up, and under
load. Only measures; `octavo memory` says what it was used for.
"""

from __future__ import annotations

import sys
from typing import Literal, NamedTuple, TypeAlias

from octavo.core.memory import process_memory
from octavo.core.messages import Facts
from octavo.core.trace.catalogue import MemoryMeasured

WARM_STEPS = 16
"""After so many steps an executor has made what it makes once."""
GROWTH = 4
"""Under load, memory is measured again after this many times as many steps."""

Moment: TypeAlias = Literal["before_load", "after_load", "warmed_up", "under_load"]


class DeviceMemory(NamedTuple):
    """Bytes on the device: what tensors hold, and what torch's allocator holds for them."""

    allocated: int
    reserved: int


def device_memory() -> DeviceMemory | None:
    """None without a device that torch uses. Does not import torch: a process that has not is not on a device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return DeviceMemory(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())


def measure(moment: Moment, steps: int, facts: Facts | None, adapters: int = 0) -> MemoryMeasured:
    """As of now; `adapters` are the bytes that LoRA adapters take."""
    host, device = process_memory(), device_memory()
    assert host is not None  # a process finds itself
    return MemoryMeasured(
        moment=moment,
        steps=steps,
        **host._asdict(),
        device_allocated=None if device is None else device.allocated,
        device_reserved=None if device is None else device.reserved,
        block_bytes=0 if facts is None else facts.block_bytes,
        blocks=0 if facts is None else facts.places,
        adapters=adapters,
    )
