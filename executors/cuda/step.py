"""A batch as kernels read it: brought to the device in one copy. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.executors.cuda.batch import Batch
from octavo.executors.cuda.mirror import mirrored
from octavo.kernels.cuda.launch import Step


def step_of(
    device: torch.device, batch: Batch, others: Mapping[str, npt.NDArray[np.generic]]
) -> tuple[Step, dict[str, Tensor]]:
    """The batch as a step, and `others`, by name, on the device."""
    arrays: dict[str, npt.NDArray[Any]] = {
        **others, "positions": batch.positions, "slots": batch.slots, "tables": batch.tables,
    }  # fmt: skip
    if batch.tree_mask is not None and batch.tree_start is not None:
        arrays |= {"tree_mask": batch.tree_mask, "tree_start": batch.tree_start}
    at = mirrored(device, arrays)
    order = torch.arange(len(batch.ids), dtype=torch.int32, device=device)
    return Step(at["positions"], at["slots"], order, at["tables"], at.get("tree_mask"), at.get("tree_start")), at
