"""Drafter `medusa`: heads on the target's last hidden state, each of which says a token further ahead.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024: each head's
best token, a chain; or the best few of each (`width`), a tree of those beginnings that are likeliest together. Heads
are read from the layout that the paper's authors publish: `config.json` and a state dict of `i.j.linear.{weight,bias}`
(block j of head i: x + SiLU(linear(x))) and `i.j.weight` (to the vocabulary).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from weakref import WeakKeyDictionary

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.core.models.errors import ModelError
from octavo.executors.drafting.contract import NO_DRAFT, Draft, Drafter, DrafterOptions, Host, Took, Want
from octavo.executors.drafting.head_file import tensors_of
from octavo.executors.drafting.tree import likeliest, need_trees
from octavo.executors.residents import Resident

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin")
_BLOCK = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
_OUT = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.weight")


class Head:
    """Residual blocks, then a row of logits."""

    def __init__(self, blocks: Sequence[tuple[Tensor, Tensor]], out: Tensor) -> None:
        self.blocks = blocks
        self.out = out

    def to(self, device: str) -> Head:
        return Head([(weight.to(device), bias.to(device)) for weight, bias in self.blocks], self.out.to(device))

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to [n, vocab]."""
        for weight, bias in self.blocks:
            hidden = hidden + F.silu(F.linear(hidden, weight, bias))
        return F.linear(hidden, self.out)


class Medusa(Drafter):
    class Options(DrafterOptions, frozen=True):
        heads: str = ""
        """The folder of the heads, or their file."""
        width: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
        """Tokens of each head that are guessed; with more than one, guesses are a tree."""

    features = True

    def __init__(self, host: Host, options: Options) -> None:
        if not options.heads:
            raise ModelError("the drafter medusa needs speculation.options.heads: the folder of the heads")
        if options.width > 1:
            need_trees(host, "medusa")
        self._width = options.width
        heads = load_heads(Path(options.heads), host.facts.vocab_size)
        if host.target is not None:
            _check_hidden(heads, host.target.width, options.heads)
        self._heads = [head.to(host.device) for head in heads]
        self._device = host.device
        self._hidden: WeakKeyDictionary[Resident, tuple[int, Tensor]] = WeakKeyDictionary()
        """The last hidden state, and which position it is of."""

    def took(self, took: Sequence[Took]) -> None:
        told = [one for one in took if len(one.hidden)]
        if told:
            lasts = torch.stack([one.hidden[-1] for one in told]).to(self._device, torch.float32)
            for (resident, start, hidden, _), last in zip(told, lasts.unbind(), strict=True):
                self._hidden[resident] = start + len(hidden) - 1, last

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(wants)
        told = {i: known for i, want in enumerate(wants) if (known := self._hidden.get(want.resident)) is not None}
        # The state that gave the last token, not an older one.
        fresh = [i for i, (position, _) in told.items() if position == len(wants[i].resident.tokens) - 2]
        if fresh:
            hidden = torch.stack([told[i][1] for i in fresh])
            deepest = max(wants[i].most for i in fresh)
            best = [head(hidden).log_softmax(-1).topk(self._width) for head in self._heads[:deepest]]
            tokens, chances = [b.indices.tolist() for b in best], [b.values.tolist() for b in best]
            for at, i in enumerate(fresh):
                levels = [list(zip(t[at], c[at], strict=True)) for t, c in zip(tokens, chances, strict=True)]
                drafts[i] = likeliest(levels, wants[i].most)
        return drafts

    def forget(self) -> None:
        self._hidden.clear()


def load_heads(path: Path, vocab_size: int) -> list[Head]:
    """Raises `ModelError` if there are none, or not for this vocabulary."""
    file = path if path.is_file() else next((path / name for name in FILES if (path / name).is_file()), None)
    if file is None:
        raise ModelError(f"{path} has no Medusa heads: there is none of {', '.join(FILES)}")
    tensors = tensors_of(file)
    linears: dict[tuple[int, int], dict[str, Tensor]] = {}
    outs: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if found := _BLOCK.fullmatch(name):
            linears.setdefault((int(found[1]), int(found[2])), {})[found[3]] = tensor.float()
        elif found := _OUT.fullmatch(name):
            outs[int(found[1])] = tensor.float()
        else:
            raise ModelError(f"{file} has a tensor {name}, which is of no Medusa head")
    if sorted(outs) != list(range(len(outs))) or not outs:
        raise ModelError(f"{file} has heads {sorted(outs)}; they must be numbered from 0 on")
    for i, out in outs.items():
        if out.shape[0] != vocab_size:
            raise ModelError(f"head {i} of {file} is for {out.shape[0]} tokens, the model has {vocab_size}")
    blocks = {at: (part["weight"], part["bias"]) for at, part in linears.items() if part.keys() == {"weight", "bias"}}
    if blocks.keys() != linears.keys():
        raise ModelError(f"{file}: block {min(linears.keys() - blocks.keys())} lacks its weight or its bias")
    return [Head([blocks[at] for at in sorted(blocks) if at[0] == i], outs[i]) for i in range(len(outs))]


def _check_hidden(heads: Sequence[Head], hidden: int, path: str) -> None:
    """Raises `ModelError` for heads on states of another size."""
    for i, head in enumerate(heads):
        sizes = {size for weight, _ in head.blocks for size in weight.shape} | {head.out.shape[1]}
        if other := sizes - {hidden}:
            raise ModelError(
                f"head {i} of {path} is for hidden states of {min(other)} numbers, the model's have {hidden}"
            )


def save_heads(folder: Path, heads: Sequence[Head]) -> None:
    """In the same layout, for those who train some."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for i, head in enumerate(heads):
        for j, (weight, bias) in enumerate(head.blocks):
            tensors |= {f"{i}.{j}.linear.weight": weight, f"{i}.{j}.linear.bias": bias}
        tensors[f"{i}.{len(head.blocks)}.weight"] = head.out
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / FILES[0])
    about = {"medusa_num_heads": len(heads), "medusa_num_layers": max((len(head.blocks) for head in heads), default=0)}
    (folder / "config.json").write_text(json.dumps(about), encoding="utf-8")
