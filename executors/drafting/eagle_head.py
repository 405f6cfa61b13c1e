"""An EAGLE head: one decoder layer that goes on from the target's features to the next one, and its KV.

Two kinds, told apart by their tensors, in the layouts that the papers' authors publish (`config.json` as of a Llama of
one layer, and a state dict):

- EAGLE-1 (Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", ICML 2024), of EAGLE-2 too.
  A feature is the target's last hidden state. `fc` takes (embedding, feature) to the input of `layers.0`, which has no
  norm before its attention; what it gives is the next feature, for the target's own head.
- EAGLE-3 (Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
  2025). `fc` fuses the inputs of three of the target's layers to a feature; `midlayer` attends with (normed embedding,
  normed feature) and adds to the feature; `norm` and `lm_head` give logits of a vocabulary of its own, whose token i is
  the target's i + `d2t[i]`.

Token p goes with the feature of position p - 1, so cell p of a sequence holds that pair's KV and depends on the same
tokens as the target's. Cell 0 has none: here the text begins with cell 1. Knows no drafts and no residents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.core.models.errors import ModelError
from octavo.executors.cpu.layout import PoolShape, attention, pieces_of, writes
from octavo.executors.cpu.llama import KvPool, rotate
from octavo.executors.drafting.head_file import config_of, tensors_of
from octavo.executors.loading.rope import Rope, frequencies
from octavo.executors.residents import Span
from octavo.kernels.attention import paged_attention

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
FILES = ("model.safetensors", "pytorch_model.bin")
_TILES = (1, 2, 4, 8, 16, 64)
_PROJECTIONS = tuple(f"self_attn.{x}_proj" for x in "qkvo") + tuple(f"mlp.{x}_proj" for x in ("gate", "up", "down"))


@dataclass(frozen=True, slots=True)
class HeadSpec:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float


class EagleHead:
    """`tensors` by the published names, without the layer's prefix for what is in it."""

    def __init__(self, spec: HeadSpec, tensors: dict[str, Tensor]) -> None:
        self.spec = spec
        self.tensors = tensors
        self.third = "hidden_norm.weight" in tensors
        """Whether it is of the third kind."""
        self.ids: Tensor | None = None
        """The target's tokens by number of its own ones, if it has some."""
        if "d2t" in tensors:
            self.ids = torch.arange(len(tensors["d2t"]), device=self.device) + tensors["d2t"].long()

    @property
    def token_bytes(self) -> int:
        """Of KV and of a feature."""
        return 4 * (2 * self.spec.kv_heads * self.spec.head_dim + self.spec.hidden)

    def to(self, device: str) -> EagleHead:
        return EagleHead(self.spec, {name: tensor.to(device) for name, tensor in self.tensors.items()})

    @property
    def device(self) -> torch.device:
        return self.tensors["fc.weight"].device

    def pool(self, blocks: int, block_size: int) -> KvPool:
        return KvPool(PoolShape(blocks, block_size, self.spec.kv_heads, self.spec.head_dim), 1, self.device)

    def feature(self, told: Tensor) -> Tensor:
        """From what the target tells, [n, hidden] or three times as wide, to features [n, hidden]."""
        return F.linear(told, self.tensors["fc.weight"], self.tensors.get("fc.bias")) if self.third else told

    def next(self, spans: Sequence[Span], embeddings: Tensor, features: Tensor, pool: KvPool) -> Tensor:
        """Write the spans' KV, from cell 1 on, and give each token's own feature: [tokens, hidden]. `features` are of
        the positions before theirs."""
        pieces = [
            piece._replace(start=piece.start - 1, slots=piece.slots[1:]) for piece in pieces_of(spans, pool.shape)
        ]
        gathers, order = attention(pieces, len(features), _TILES, pool.shape)
        gathers, order = [gather.to(self.device) for gather in gathers], order.to(self.device)
        positions = torch.tensor([p - 1 for span in spans for p in span.positions], device=self.device)

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            new = torch.cat((keys, values), dim=1).transpose(0, 1).reshape(-1, self.spec.head_dim)
            pool.layers[0].index_copy_(0, writes(spans, pool.shape).to(self.device), new)
            queries = queries * self.spec.head_dim**-0.5
            return paged_attention(queries, pool.layers[0], gathers, order, self.spec.kv_heads)

        return self.layer(embeddings, features, positions, attend)

    def layer(self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The layer around whatever attends: `attend(queries, keys, values)`, each [n, heads, head_dim], gives
        [n, heads · head_dim]."""
        if self.third:
            x, side = (
                features,
                torch.cat((self._normed(embeddings, "input_layernorm"), self._normed(features, "hidden_norm")), dim=-1),
            )
        else:
            pair = torch.cat((embeddings, features), dim=-1)
            x = side = F.linear(pair, self.tensors["fc.weight"], self.tensors.get("fc.bias"))
            if "input_layernorm.weight" in self.tensors:
                side = self._normed(x, "input_layernorm")
        spec = self.spec
        rate = torch.from_numpy(frequencies(Rope(spec.theta), spec.head_dim)).to(positions.device)
        turns = positions[:, None].float() * rate
        cos, sin = turns.cos().unsqueeze(1), turns.sin().unsqueeze(1)
        q, k, v = (self._linear(side, f"self_attn.{name}_proj").view(len(x), -1, spec.head_dim) for name in "qkv")
        x = x + self._linear(attend(rotate(q, cos, sin), rotate(k, cos, sin), v), "self_attn.o_proj")
        normed = self._normed(x, "post_attention_layernorm")
        gated = F.silu(self._linear(normed, "mlp.gate_proj")) * self._linear(normed, "mlp.up_proj")
        return x + self._linear(gated, "mlp.down_proj")

    def said(self, features: Tensor) -> Tensor | None:
        """Logits of its own vocabulary (see `ids`); None if it leaves them to the target's head."""
        if not self.third:
            return None
        normed = self._normed(features, "norm")
        return F.linear(normed, self.tensors["lm_head.weight"])

    def _normed(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors[f"{name}.weight"]
        return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, self.spec.eps)  # training may have x in bf16

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))


def load_head(folder: Path, hidden: int, vocab_size: int) -> EagleHead:
    """For a target with hidden states of this size and this vocabulary. Raises `ModelError`."""
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None or not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no EAGLE head: there must be config.json and one of {', '.join(FILES)}")
    stored = tensors_of(file)
    tensors = {_plain(name): t if name in ("d2t", "t2d") else t.float() for name, t in stored.items()}
    config = config_of(folder / "config.json")
    try:
        spec, scaled = _spec(config), _scaled(config)
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ModelError(f"config.json of the EAGLE head {folder} lacks a size, or has none there: {error}") from None
    if scaled:
        raise ModelError(f"the EAGLE head {folder} has scaled rotary embedding, which is not served")
    _check(folder, spec, tensors, hidden, vocab_size)
    return EagleHead(spec, tensors)


def _spec(config: dict[str, Any]) -> HeadSpec:
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    return HeadSpec(
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        theta=float(config.get("rope_theta") or 10000.0),
    )


def _scaled(config: dict[str, Any]) -> bool:
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    return bool(scaling.get("rope_type", scaling.get("type")) != "default")


def _plain(name: str) -> str:
    for prefix in ("model.", "layers.0.", "midlayer."):
        name = name.removeprefix(prefix)
    return name


def _check(folder: Path, spec: HeadSpec, tensors: dict[str, Tensor], hidden: int, vocab_size: int) -> None:
    """Raises `ModelError` for a tensor that is missing or of another shape."""
    if spec.hidden != hidden:
        raise ModelError(f"the EAGLE head {folder} is for states of {spec.hidden} numbers, the model's have {hidden}")
    if min(spec.heads, spec.kv_heads) < 1 or spec.heads % spec.kv_heads or spec.head_dim < 2 or spec.head_dim % 2:
        raise ModelError(
            f"the EAGLE head {folder} has {spec.heads} heads of {spec.head_dim} on {spec.kv_heads} for keys"
        )
    if not (spec.theta > 0 and spec.eps >= 0):
        raise ModelError(f"the EAGLE head {folder} has rope_theta {spec.theta} and rms_norm_eps {spec.eps}")
    if "d2t" in tensors and tensors["d2t"].ndim != 1:
        raise ModelError(
            f"d2t of the EAGLE head {folder} is {tuple(tensors['d2t'].shape)}, a number a token was expected"
        )
    third, d = "hidden_norm.weight" in tensors, spec.head_dim
    wide = 2 * hidden if third else hidden
    inner = len(tensors["mlp.gate_proj.weight"]) if "mlp.gate_proj.weight" in tensors else 0
    sizes = (spec.heads * d, wide), (spec.kv_heads * d, wide), (spec.kv_heads * d, wide), (hidden, spec.heads * d)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, (3 if third else 2) * hidden)}
    layer = (*sizes, (inner, hidden), (inner, hidden), (hidden, inner))
    shapes |= {f"{name}.weight": size for name, size in zip(_PROJECTIONS, layer, strict=True)}
    shapes["post_attention_layernorm.weight"] = (hidden,)
    if third:
        said = len(tensors["d2t"]) if "d2t" in tensors else vocab_size
        shapes |= {"lm_head.weight": (said, hidden)}
        shapes |= {f"{name}.weight": (hidden,) for name in ("norm", "hidden_norm", "input_layernorm")}
    for name, shape in shapes.items():
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != shape:
            raise ModelError(f"{name} of the EAGLE head {folder} is {found or 'missing'}; it must be {shape}")
        bias = name.replace(".weight", ".bias")
        if bias in tensors and tuple(tensors[bias].shape) != shape[:1]:
            raise ModelError(
                f"{bias} of the EAGLE head {folder} is {tuple(tensors[bias].shape)}; it must be {shape[:1]}"
            )
    if "d2t" in tensors:
        ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"].long()
        if not bool(((ids >= 0) & (ids < vocab_size)).all()):
            raise ModelError(f"d2t of the EAGLE head {folder} leads to tokens that the model does not have")


def save_head(folder: Path, head: EagleHead) -> None:
    """In the same layout, for those who train some."""
    from safetensors.torch import save_file

    outside = ("fc.weight", "fc.bias", "norm.weight", "lm_head.weight", "d2t", "t2d", "embed_tokens.weight")
    prefix = "midlayer." if head.third else "layers.0."
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name if name in outside else prefix + name: t.contiguous() for name, t in head.tensors.items()}
    save_file(stored, folder / FILES[0])
    spec = head.spec
    about = {
        "architectures": ["LlamaForCausalLMEagle3" if head.third else "LlamaForCausalLMEagle"],
        "hidden_size": spec.hidden,
        "intermediate_size": len(head.tensors["mlp.gate_proj.weight"]),
        "num_hidden_layers": 1,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.eps,
        "rope_theta": spec.theta,
        "draft_vocab_size": 0 if head.ids is None else len(head.ids),
    }
    (folder / "config.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
