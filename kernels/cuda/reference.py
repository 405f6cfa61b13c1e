"""What the kernels are to compute, in plain torch on plain tensors: no tiles, no images, no parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.cuda.plan import Query


def attention(
    q: Tensor,
    kv: Tensor,
    tables: Tensor,
    queries: list[Query],
    *,
    block_size: int,
    scale: float,
    soft_cap: float = 0.0,
    window: int = 0,
) -> Tensor:
    """q [tokens, Hq, d] over plain kv [2, slots, Hkv, d], in fp64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // kv.shape[2]
    for query in queries:
        n = torch.arange(query.length)
        slots = tables[query.table].long()[n // block_size] * block_size + n % block_size
        keys, values = kv[:, slots].double().repeat_interleave(group, dim=2)
        mine = slice(query.first, query.first + query.tokens)
        scores = torch.einsum("thd,nhd->htn", q[mine].double(), keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = n[query.length - query.tokens :].unsqueeze(1)
        hidden = n > position
        if window:
            hidden |= n <= position - window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[mine] = torch.einsum("htn,nhd->thd", weights, values)
    return out


def rotate(x: Tensor, angles: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotary embedding of x [tokens, heads, d] in fp32 by angles [tokens, rotated]: cosines, then sines."""
    rotated = angles.shape[1]
    cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)
    turned, rest = x[..., :rotated].float(), x[..., rotated:].float()
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return F.silu(gate) * up
