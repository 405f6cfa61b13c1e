"""EAGLE heads of both kinds: their guesses are those of a plain computation over the whole text, whatever was chunked,
forked, cached, guessed wrong or preempted; and the published layouts are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.core.messages import Sampling
from octavo.core.models.errors import ModelError
from octavo.core.trace.catalogue import RequestPreempted
from octavo.executors.cpu.layout import PoolShape
from octavo.executors.cpu.llama import KvPool, Llama
from octavo.executors.drafting.contract import Draft, Want
from octavo.executors.drafting.eagle import Eagle
from octavo.executors.drafting.eagle_head import EagleHead, HeadSpec, load_head, save_head
from octavo.executors.drafting.ranking import ranked
from octavo.executors.drafting.verification import Rule
from octavo.executors.residents import Resident, Span
from tests.executors.tiny import VOCAB, save_tiny
from tests.speculation.conftest import CpuMaker, NativeMaker
from tests.speculation.replica import Replica, asked

HIDDEN, HEADS, KV_HEADS, INNER = 48, 4, 2, 64
SPEC = HeadSpec(HIDDEN, HEADS, KV_HEADS, HIDDEN // HEADS, 1e-5, 10000.0)
OWN = 60
"""Tokens that a head of the third kind knows."""


def random_head(third: bool, spec: HeadSpec = SPEC, inner: int = INNER) -> EagleHead:
    hidden, kv = spec.hidden, spec.kv_heads * spec.head_dim
    generator = torch.Generator().manual_seed(7)

    def some(*size: int, scale: float = 0.2) -> Tensor:
        return torch.randn(size, generator=generator) * scale

    wide = 2 * hidden if third else hidden
    tensors = {
        "fc.weight": some(hidden, (3 if third else 2) * hidden),
        "self_attn.q_proj.weight": some(spec.heads * spec.head_dim, wide),
        "self_attn.k_proj.weight": some(kv, wide),
        "self_attn.v_proj.weight": some(kv, wide),
        "self_attn.o_proj.weight": some(hidden, spec.heads * spec.head_dim),
        "mlp.gate_proj.weight": some(inner, hidden),
        "mlp.up_proj.weight": some(inner, hidden),
        "mlp.down_proj.weight": some(hidden, inner),
        "post_attention_layernorm.weight": 1 + some(hidden),
    }
    if third:
        ids = torch.randperm(VOCAB, generator=generator)[:OWN].sort().values
        tensors |= {name: 1 + some(hidden) for name in ("hidden_norm.weight", "input_layernorm.weight", "norm.weight")}
        tensors |= {"lm_head.weight": some(OWN, hidden, scale=1.0), "d2t": ids - torch.arange(OWN)}
    else:
        tensors["fc.bias"] = some(hidden)
    return EagleHead(spec, tensors)


class Kind(NamedTuple):
    maker: CpuMaker | NativeMaker
    folder: Path
    head: EagleHead
    llama: Llama
    """The same model."""


@pytest.fixture(
    scope="module",
    params=[(third, native) for native in (False, True) for third in (False, True)],
    ids=["eagle-1", "eagle-3", "eagle-1 native", "eagle-3 native"],
)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    folder = tmp_path_factory.mktemp("eagle")
    save_tiny(folder / "model", num_hidden_layers=4)
    third, native = request.param
    head = random_head(third)
    save_head(folder / "head", head)
    maker = CpuMaker(str(folder / "model"))
    llama = maker().forward
    assert isinstance(llama, Llama)
    return Kind(NativeMaker(str(folder / "model")) if native else maker, folder / "head", head, llama)


class Noted(Eagle):
    """Notes what was known and what was guessed."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.noted: list[tuple[list[int], Draft]] = []
        noted.append(self)

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        drafts = super().draft(wants)
        greedy = [want.resident.sampling.temperature == 0 for want in wants]
        self.noted += [(list(w.resident.tokens), d) for w, d, g in zip(wants, drafts, greedy, strict=True) if g]
        return drafts


noted: list[Noted] = []


class Plain:
    """The whole text at once, with dense attention: what the papers say, and nothing else."""

    def __init__(self, llama: Llama, head: EagleHead) -> None:
        self.llama = llama
        self.head = head

    def features(self, ids: list[int]) -> Tensor:
        spec = self.llama.spec
        shape = PoolShape(len(ids), 1, spec.kv_heads, spec.head_dim)
        layout = self.llama.layout([Span(ids, 0, list(range(len(ids))))], shape)
        taps = dict.fromkeys((2, spec.layers // 2, spec.layers - 3), torch.empty(0))
        hidden = self.llama.hidden(layout, KvPool(shape, spec.layers), taps=taps)
        if not self.head.third:
            return hidden
        return F.linear(torch.cat([taps[2], taps[spec.layers // 2], taps[spec.layers - 3]], dim=-1),
                        self.head.tensors["fc.weight"])  # fmt: skip

    def scores(self, ids: list[int], guesses: list[int]) -> Tensor:
        """Log-probabilities [vocab] of what comes after known ids and guesses."""
        features = self.features(ids)[: len(ids) - 1]
        said = ids[1:]
        out = self._layer(said, features)[-1]
        for token in guesses:
            said, features = [*said, token], torch.cat((features, out[None]))
            out = self._layer(said, features)[-1]
        logits = self.head.said(out[None])
        if logits is None:
            return self.llama.logits(out[None])[0].log_softmax(-1)
        scores = torch.full((VOCAB,), -torch.inf)
        assert self.head.ids is not None
        scores[self.head.ids] = logits[0].log_softmax(-1)
        return scores

    def _layer(self, ids: list[int], features: Tensor) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for x in (k, v))
            return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True).transpose(0, 1).flatten(1)

        return self.head.layer(self.llama.embed(torch.tensor(ids)), features, torch.arange(len(ids)), attend)


@pytest.mark.parametrize(("width", "tokens"), [(1, 2048), (3, 48)])
def test_guesses_are_those_of_the_whole_text(kind: Kind, width: int, tokens: int) -> None:
    """Prompts that share their beginnings, in chunks, choices that fork, and a pool that is too small."""
    prompts = [[(i * 31 + 7) % VOCAB for i in range(22)], [(i * 31 + 7) % VOCAB for i in range(14)], [4], [9, 9, 1] * 4]
    greedy = Sampling(temperature=0.0)
    requests = [asked(i, p, tokens=14, sampling=greedy, n=2 if i == 1 else 1) for i, p in enumerate(prompts)]
    requests.append(asked(9, prompts[0], tokens=9, sampling=Sampling(temperature=0.7, seed=2, repetition=1.2)))
    plain = Replica(kind.maker(), policy="off").run(requests)
    executor = kind.maker(Noted, tokens=tokens, head=str(kind.folder), width=width)
    replica = Replica(executor, options={"tokens": 5}, slots=4, budget=9)
    assert replica.run(requests) == plain
    assert executor._drafting.failures == 0
    assert any(isinstance(event, RequestPreempted) for event in replica.events) == (tokens == 48)
    reference = Plain(kind.llama, kind.head)
    drafts = [(ids, draft) for ids, draft in noted[-1].noted if draft.tokens]
    assert len(drafts) > 0.9 * len(noted[-1].noted)
    with torch.inference_mode():
        for ids, draft in drafts[::3]:
            assert draft.parents is not None
            if width == 1:
                assert draft.parents == list(range(-1, len(draft.tokens) - 1))
            for node in range(len(draft.tokens)):
                if draft.parents.index(draft.parents[node]) == node:  # the likeliest after its parent
                    scores = reference.scores(ids, before(draft, draft.parents[node]))
                    assert float(scores[draft.tokens[node]]) > float(scores.max()) - 1e-3


def before(draft: Draft, node: int) -> list[int]:
    assert draft.parents is not None
    return [] if node < 0 else [*before(draft, draft.parents[node]), draft.tokens[node]]


def test_heads_of_both_layouts_are_read(kind: Kind, tmp_path: Path) -> None:
    loaded = load_head(kind.folder, HIDDEN, VOCAB)
    assert loaded.spec == SPEC
    assert loaded.third == kind.head.third
    assert loaded.tensors.keys() == kind.head.tensors.keys()
    assert all(torch.equal(tensor, kind.head.tensors[name]) for name, tensor in loaded.tensors.items())
    with pytest.raises(ModelError, match="states of 48 numbers, the model's have 64"):
        load_head(kind.folder, 64, VOCAB)
    with pytest.raises(ModelError, match=r"must be config\.json"):
        load_head(tmp_path, HIDDEN, VOCAB)
    short = dict(kind.head.tensors)
    short["self_attn.k_proj.weight"] = short["self_attn.k_proj.weight"][:, :8]
    save_head(tmp_path, EagleHead(SPEC, short))
    with pytest.raises(ModelError, match=r"k_proj.weight .* must be \(24, (48|96)\)"):
        load_head(tmp_path, HIDDEN, VOCAB)
    if kind.head.third:
        with pytest.raises(ModelError, match=r"d2t .* leads to tokens"):
            load_head(kind.folder, HIDDEN, 20)


def test_a_head_of_the_third_kind_needs_three_layers(tiny: CpuMaker, tmp_path: Path) -> None:
    save_head(tmp_path, random_head(True))
    with pytest.raises(ModelError, match="three layers, the model has 2"):
        tiny("eagle", head=str(tmp_path))


def test_memory_of_a_head_is_counted(kind: Kind) -> None:
    assert kind.head.token_bytes == 4 * (2 * KV_HEADS * HIDDEN // HEADS + HIDDEN)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("num_attention_heads", None, "lacks a size"),
        ("num_attention_heads", 0, "lacks a size|no such|heads of"),
        ("num_key_value_heads", 3, "4 heads of 12 on 3 for keys"),
        ("head_dim", 11, "4 heads of 11"),
        ("rope_theta", -1.0, "rope_theta -1"),
        ("rope_scaling", "yarn", "lacks a size"),
    ],
)
def test_sizes_of_a_head_that_cannot_be(tmp_path: Path, key: str, value: object, says: str) -> None:
    save_head(tmp_path, random_head(True))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ModelError, match=says) as error:
        load_head(tmp_path, HIDDEN, VOCAB)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.9}, {"min_p": 0.1}], ids=str
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_head_has_no_guess_where_it_knows_nothing_that_may_come(
    options: dict[str, float], temperature: float, rule: Rule
) -> None:
    sampling = Sampling(temperature=temperature, allowed=(90, 91), **options)  # type: ignore[arg-type]
    resident = Resident(1, [1, 2], 2, 0, sampling)
    logits = torch.randn(1, 60)
    assert ranked(logits, torch.arange(60), [(resident, [])], 4, rule, VOCAB) == [[]]
    assert ranked(logits, torch.arange(60) + 31, [(resident, [])], 1, rule, VOCAB) != [[]]
    logits[0, 3] = torch.nan
    free = Resident(1, [1, 2], 2, 0, Sampling(temperature=temperature, frequency=0.1, **options))  # type: ignore[arg-type]
    assert ranked(logits, torch.arange(60), [(free, [])], 4, rule, VOCAB) == [[]]
