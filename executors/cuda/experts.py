"""A mixture of experts on a device: a router, and the MLPs of the best experts of each token.

Tokens are put in the order of their experts, so that each layer is two grouped products, whatever goes where: nothing
is read back to the host, and a step can be recorded, where torch has a kernel for them (see `reads_back`). How many
tokens an expert gets then decides how sums are cut. The exact form lets all experts compute all tokens and takes what
counts: a token's numbers are its own, at the price of the others' work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.executors.cuda.linear import Linear
from octavo.executors.loading.spec import Experts

Gated = Callable[[Tensor], Tensor]
"""[rows, gate | up] to [rows, inner]."""


def reads_back(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's grouped product has no kernel there: then it brings to the host where groups end, for which it
    waits, and multiplies one by one."""
    if device.type != "cuda":
        return False
    return dtype != torch.bfloat16 or torch.cuda.get_device_capability(device)[0] not in (9, 10)


class Mixture:
    """`gate_up` and `down` are the experts' weights as a checkpoint has them, [out, in] each. `correction`, fp32
    [experts], belongs to those that are chosen by sigmoids."""

    def __init__(
        self,
        experts: Experts,
        router: Linear,
        correction: Tensor | None,
        gate_up: list[Tensor],
        down: list[Tensor],
        gated: Gated,
        *,
        exact: bool,
    ) -> None:
        self._experts, self._router, self._gated = experts, router, gated
        self._correction = correction
        pairs = zip(gate_up, down, strict=True)
        self._alone = [(Linear(up, None, True), Linear(d, None, True)) for up, d in pairs] if exact else []
        self._grouped = None if exact else (_stacked(gate_up), _stacked(down))

    def __call__(self, x: Tensor) -> Tensor:
        """[n, hidden] to [n, hidden]."""
        experts = self._experts
        logits = self._router(x).float()
        sigmoid = self._correction is not None
        chances = logits.sigmoid() if sigmoid else logits.softmax(dim=-1)
        rank = chances if self._correction is None else chances + self._correction
        if experts.groups:
            each = rank.view(len(x), experts.groups, -1)
            best = each.topk(2, dim=-1).values.sum(dim=-1) if sigmoid else each.amax(dim=-1)
            looked_at = torch.zeros_like(best, dtype=torch.bool)
            looked_at.scatter_(1, best.topk(experts.groups_used, dim=-1).indices, value=True)
            rank = rank.masked_fill(~looked_at.repeat_interleave(experts.count // experts.groups, dim=-1), -torch.inf)
        chosen = rank.topk(experts.used, dim=-1).indices
        weights = chances.gather(-1, chosen)
        if experts.normed:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights * experts.scale
        if self._grouped is None:
            return self._all(x, weights, chosen)
        return self._chosen(x, weights, chosen, *self._grouped)

    def _all(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        total = torch.zeros_like(x, dtype=torch.float32)
        for e, (gate_up, down) in enumerate(self._alone):
            mine = chosen == e
            weight = (weights * mine).sum(dim=-1, keepdim=True)
            given = down(self._gated(gate_up(x))).float()
            total = torch.where(mine.any(dim=-1, keepdim=True), total + weight * given, total)
        return total.to(x.dtype)

    def _chosen(self, x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        used = self._experts.used
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = (flat.unsqueeze(1) == torch.arange(self._experts.count, device=x.device)).sum(dim=0)
        ends = counts.cumsum(0).to(torch.int32)
        inner = self._gated(F.grouped_mm(x[order // used], gate_up, offs=ends))
        given = torch.empty(len(flat), x.shape[1], dtype=x.dtype, device=x.device)
        given[order] = F.grouped_mm(inner, down, offs=ends)
        mixed: Tensor = (given.view(len(x), used, -1).float() * weights.unsqueeze(-1)).sum(dim=1)
        return mixed.to(x.dtype)


def _stacked(weights: list[Tensor]) -> Tensor:
    """[experts, in, out], as grouped products take them."""
    return torch.stack(weights).transpose(1, 2)
