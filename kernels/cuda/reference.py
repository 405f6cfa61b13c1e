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
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    tree: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """q [tokens, Hq, d] over plain kv [2, slots, Hkv, d], in fp64. `sinks` and `slopes` [Hq] as in `Heads`, `tree` are
    the masks and starts of `Step`; `positions` [tokens] are needed for trees only, whose nodes are not in a row."""
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
        position = (n[query.length - query.tokens :] if positions is None else positions[mine]).unsqueeze(1)
        stands = torch.cat((n[: query.length - query.tokens], position.squeeze(1)))
        if slopes is not None:
            scores = scores + slopes.double().view(-1, 1, 1) * (stands - position)
        hidden = n > position
        if tree is not None:
            mask, start = (one[mine].unsqueeze(1) for one in tree)
            within = (n - start).clamp(0, 63)
            hidden = torch.where((start >= 0) & (n >= start), (mask >> within) & 1 == 0, hidden & (start < 0))
        if window:
            hidden |= stands <= position - window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, query.tokens, 1)), dim=-1)
        weights = scores.softmax(-1)[..., : query.length]
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


def gate_mul(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def verify(guesses: list[int], parents: list[int], drawn: list[int]) -> tuple[list[int], list[int]]:
    """Tokens that a drafted tree yields, and the nodes that they were drawn at."""
    node, tokens, path = 0, [drawn[0]], [0]
    while (
        right := [i for i in range(len(drawn)) if parents[i] == node and i > node and guesses[i] == tokens[-1]]
    ) and (tokens[-1] >= 0):
        node = right[0]
        tokens.append(drawn[node])
        path.append(node)
    return tokens, path
