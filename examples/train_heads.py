"""Train Medusa and EAGLE heads for a model on text that it says itself, in minutes on a CPU, and measure them.

    python examples/train_heads.py FOLDER [--model M] [--kinds medusa eagle eagle3] [--report FILE]

1. The model answers prompts (`octavo.LLM`); FOLDER/text.json keeps what it said. A second run does nothing again.
2. The model reads it again, and its hidden states are kept.
3. Each kind is trained to say what comes next from those states, and saved as FOLDER/KIND, which drafters load:
   `octavo serve --set speculation.drafter=eagle --set speculation.options.head=FOLDER/eagle`.
4. With each the model answers prompts that were not trained on, and counts which guesses were right.

The recipes are the papers' (see executors/drafting), made small: heads learn only the tokens that occur in the text,
and from thousands of tokens, not millions. So what comes out shows that heads work, not how well they can.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from octavo.core.control_link import HEARTBEAT_S
from octavo.core.models.locate import locate
from octavo.core.rundir import read
from octavo.core.supervisor.status import ask
from octavo.executors.drafting.eagle_head import EagleHead, HeadSpec, save_head
from octavo.executors.drafting.medusa import Head, save_heads
from octavo.executors.loading.files import open_checkpoint, plain
from octavo.executors.native.batch import of_spans
from octavo.executors.native.library import Kind, load
from octavo.executors.native.program import Native, Pool
from octavo.executors.native.weights import Weights
from octavo.executors.residents import Span
from octavo.executors.threads import default_threads

TASKS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write a Python function that has to do with {}.",
    "Give me a plan for a week of learning about {}.",
    "Write a letter to a friend about {}.",
    "Describe {} in three sentences, then ask me a question.",
)
TOPICS = (
    "the sea", "bread", "electricity", "dogs", "the moon", "trains", "football", "winter", "money", "music", "bees",
    "paper", "volcanoes", "the heart", "chess", "gardens", "clouds", "bridges", "sleep", "salt", "maps", "horses",
)  # fmt: skip
UNSEEN = ("tea", "mountains", "rain")
ANSWER = 160
"""Tokens of an answer to learn from."""
MEDUSA_HEADS = 3
UNROLLED = 2
"""Steps that an EAGLE head goes on from its own features while it learns (EAGLE-3's training-time test)."""


class Text(NamedTuple):
    """A sequence [n], its last hidden states [n, hidden], and the inputs of three layers [n, 3 · hidden]."""

    ids: Tensor
    hidden: Tensor
    inner: Tensor


class Target(NamedTuple):
    """What heads are trained for: its numbers, the embedding and the head [vocab, hidden]."""

    spec: Any
    embedding: Tensor
    head: Tensor


def say(model: str, file: Path, tokens: int) -> list[list[int]]:
    """Conversations: prompts with the model's answers, greedy and sampled in turn."""
    if file.is_file():
        kept: list[list[int]] = json.loads(file.read_text(encoding="utf-8"))
        return kept[: tokens // ANSWER]
    asked = [task.format(topic) for topic in TOPICS for task in TASKS][: tokens // ANSWER]
    with octavo.LLM(model, kv={"tokens": 16384}) as llm:
        texts = [llm.tokenize([{"role": "user", "content": text}]) for text in asked]
        for first, temperature in ((0, 0.0), (1, 0.7)):
            outputs = llm.generate(texts[first::2], temperature=temperature, seed=1, max_tokens=ANSWER)
            for text, output in zip(texts[first::2], outputs, strict=True):
                text += output.choices[0].ids
    file.write_text(json.dumps(texts), encoding="utf-8")
    return texts


def look(model: str, texts: Sequence[list[int]]) -> tuple[Target, list[Text]]:
    """The model's own states over the texts, as the default executor shows them."""
    checkpoint = open_checkpoint(locate(model))
    loaded = plain(checkpoint)
    spec, vectors = loaded.spec, loaded.weights
    target = Target(spec, vectors["embed"], vectors.get("head.weight", vectors["embed"]))
    layers = 2, spec.layers // 2, spec.layers - 3
    blocks = -(-max(map(len, texts)) // 16)
    weights = Weights(load(), checkpoint, exact=False, context=blocks * 16)
    native = Native(weights, Pool(blocks, 16, Kind.BF16), default_threads())
    out: list[Text] = []
    for ids in texts:
        seen = native.step(of_spans([Span(ids, 0, list(range(blocks)))], samples=False), hidden=True, taps=layers)
        assert seen.hidden is not None
        assert seen.inner is not None
        out.append(Text(torch.tensor(ids), torch.from_numpy(seen.hidden), torch.from_numpy(seen.inner)))
    return target, out


# ── training ─────────────────────────────────────────────────────────────────────────────────────


def train(
    parameters: Sequence[Tensor], texts: Sequence[Text], loss: Callable[[Text], Tensor], passes: int, rate: float
) -> float:
    """AdamW with a rate that falls to zero; the mean loss of the last tenth."""
    optimiser = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    draw = torch.Generator().manual_seed(1)
    batches = [
        [texts[i] for i in order[at : at + 4]]
        for order in (torch.randperm(len(texts), generator=draw).tolist() for _ in range(passes))
        for at in range(0, len(order), 4)
    ]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=len(batches), pct_start=0.1)
    last: list[float] = []
    for batch in batches:
        optimiser.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):  # several times as fast where processors have it
            total = torch.stack([loss(text) for text in batch]).mean()
        total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()
        last = [*last, total.item()][-max(1, len(batches) // 10) :]
    return sum(last) / len(last)


class Words:
    """The tokens that the texts have: what heads learn to say."""

    def __init__(self, texts: Sequence[Text], vocab_size: int) -> None:
        self.ids = torch.tensor(sorted({token for text in texts for token in text.ids.tolist()}))
        self.number = torch.full((vocab_size,), -100)
        self.number[self.ids] = torch.arange(len(self.ids))


def medusa(folder: Path, target: Target, texts: Sequence[Text], words: Words, passes: int, rate: float = 1e-3) -> float:
    """Medusa-1: heads alone, each from the target's head and a residual block that adds nothing at first."""
    size = target.spec.hidden
    blocks = [(torch.zeros(size, size), torch.zeros(size)) for _ in range(MEDUSA_HEADS)]
    outs = [target.head[words.ids].clone() for _ in range(MEDUSA_HEADS)]
    parameters = [p.requires_grad_() for block, out in zip(blocks, outs, strict=True) for p in (*block, out)]

    def loss(text: Text) -> Tensor:
        total = torch.zeros(())
        for i, (block, out) in enumerate(zip(blocks, outs, strict=True)):
            said = Head([block], out)(text.hidden[: -2 - i])
            total = total + 0.8**i * F.cross_entropy(said, words.number[text.ids[2 + i :]])
        return total

    end = train(parameters, texts, loss, passes, rate)
    heads = []
    for (weight, bias), rows in zip(blocks, outs, strict=True):
        out = target.head.clone()
        out[words.ids] = rows.detach()
        heads.append(Head([(weight.detach(), bias.detach())], out))
    save_heads(folder, heads)
    return end


def eagle(
    folder: Path, target: Target, texts: Sequence[Text], words: Words, passes: int, rate: float = 5e-4, *, third: bool
) -> float:
    spec = target.spec
    size, head_dim = spec.hidden, spec.head_dim
    draw = torch.Generator().manual_seed(2)
    wide = (2 if third else 1) * size
    shapes = {
        "fc": (size, (3 if third else 2) * size),
        "self_attn.q_proj": (spec.heads * head_dim, wide),
        "self_attn.k_proj": (spec.kv_heads * head_dim, wide),
        "self_attn.v_proj": (spec.kv_heads * head_dim, wide),
        "self_attn.o_proj": (size, spec.heads * head_dim),
        "mlp.gate_proj": (spec.inner, size),
        "mlp.up_proj": (spec.inner, size),
        "mlp.down_proj": (size, spec.inner),
    }
    tensors = {f"{k}.weight": torch.randn(s, generator=draw) * s[1] ** -0.5 * 0.7 for k, s in shapes.items()}
    norms = ("post_attention_layernorm", *(("input_layernorm", "hidden_norm", "norm") if third else ()))
    tensors |= {f"{name}.weight": torch.ones(size) for name in norms}
    if third:
        tensors["lm_head.weight"] = target.head[words.ids].clone()
    else:  # what is there already: the feature itself
        tensors["fc.weight"] = torch.cat((tensors["fc.weight"][:, :size], torch.eye(size)), dim=1)
        tensors["fc.bias"] = torch.zeros(size)
    rope = spec.rope
    head = EagleHead(HeadSpec(size, spec.heads, spec.kv_heads, head_dim, spec.norm_eps, rope.theta), tensors)
    parameters = [p.requires_grad_() for p in tensors.values()]
    rows = target.head[words.ids]

    def loss(text: Text) -> Tensor:
        features = head.feature(text.inner if third else text.hidden)[:-1]
        embeddings = target.embedding[text.ids[1:]]
        positions, after = torch.arange(len(embeddings)), words.number[text.ids[2:]]
        attend = Unrolled()
        total = torch.zeros(())
        for step in range(UNROLLED):
            features = head.layer(embeddings, features, positions, attend)
            said = head.said(features)
            logits = features @ rows.T if said is None else said
            part = F.cross_entropy(logits[step:-1], after[step:])
            if not third:
                part = part + F.smooth_l1_loss(features[step:], text.hidden[1 + step :])
            total = total + 0.8**step * part
            features = torch.cat((features[:1], features[:-1]))  # of the position before, by the head's own word
        return total

    end = train(parameters, texts, loss, passes, rate)
    head.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    if third:
        known = torch.zeros(spec.vocab_size, dtype=torch.bool)
        known[words.ids] = True
        head.tensors |= {"d2t": words.ids - torch.arange(len(words.ids)), "t2d": known}
    save_head(folder, head)
    return end


class Unrolled:
    """Attention of step s: to the target's features of positions up to t - s, and to the head's own of the s after."""

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group, step = q.shape[1] // k.shape[1], len(self._seen)
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        self._seen.append((k, v))
        q = q * q.shape[-1] ** -0.5
        keys, values = self._seen[0]
        n = len(q)
        scores = torch.einsum("qhd,khd->hqk", q, keys)
        seen = torch.ones(n, n, dtype=torch.bool).tril(-step)
        seen[:, 0] = True  # the first positions of later steps have nothing to see and are not learnt from
        scores = scores.masked_fill(~seen, -torch.inf)
        own = []
        for i, (key, value) in enumerate(self._seen[1:], 1):
            own.append(((q * key.roll(step - i, 0)).sum(-1).T[..., None], value.roll(step - i, 0)))
        weights = torch.cat([scores, *(score for score, _ in own)], dim=-1).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights[..., :n], values)
        for i, (_, value) in enumerate(own):
            mixed = mixed + weights[..., n + i].T[..., None] * value
        return mixed.flatten(1)


# ── measuring ────────────────────────────────────────────────────────────────────────────────────


class Measured(NamedTuple):
    judged: list[int]
    right: list[int]
    drafted: int
    accepted: int

    @property
    def tokens_per_pass(self) -> float:
        return 1 + self.accepted / max(1, self.judged[0])


class Shape(NamedTuple):
    name: str
    width: int
    guesses: int
    temperature: float


SHAPES = (
    Shape("chain of 4, greedy", 1, 4, 0.0),
    Shape("chain of 4, sampled", 1, 4, 0.7),
    Shape("tree of 12, greedy", 3, 12, 0.0),
)


def measure(model: str, kind: str, folder: Path, shape: Shape) -> Measured:
    """Answers to unseen prompts with the heads as drafter; the scheduler's counts."""
    drafter = "medusa" if kind == "medusa" else "eagle"
    options = {"heads" if drafter == "medusa" else "head": str(folder), "width": shape.width}
    settings: dict[str, Any] = {
        "kv": {"tokens": 8192},
        "trace": {"enabled": False},
        "speculation": {"drafter": drafter, "options": options},
        "policies": {"speculation": "fixed", "options": {"speculation": {"tokens": shape.guesses}}},
    }
    asked = [task.format(topic) for topic in UNSEEN for task in TASKS]
    with octavo.LLM(model, **settings) as llm:
        prompts = [llm.tokenize([{"role": "user", "content": text}]) for text in asked]
        outputs = llm.generate(prompts, temperature=shape.temperature, seed=3, max_tokens=40)
        told = sum(output.choices[0].usage.drafted for output in outputs)
        info = read(llm.run_dir)
        assert info is not None
        stats: dict[str, int] = {}
        patience = time.monotonic() + 100 * HEARTBEAT_S
        while not stats or stats["drafted"] < told:  # by place they come with heartbeats
            if time.monotonic() > patience:
                raise TimeoutError(f"the scheduler tells of {stats.get('drafted', 0)} guesses, the answers of {told}")
            time.sleep(HEARTBEAT_S / 4)
            status = ask(info)
            stats = next((dict(a.stats) for a in status.actors if a.role == "scheduler"), {}) if status else {}
    places = range(1, 5)
    return Measured(
        [stats[f"judged_{i}"] for i in places], [stats[f"accepted_{i}"] for i in places],
        stats["drafted"], stats["accepted"],
    )  # fmt: skip


def row_of(kind: str, shape: Shape, m: Measured) -> str:
    places = [f"{right / judged:.2f}" if judged else "-" for right, judged in zip(m.right, m.judged, strict=True)]
    return f"| {kind} | {shape.name} | {' | '.join(places)} | {m.accepted} of {m.drafted} | {m.tokens_per_pass:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="default")
    parser.add_argument(
        "--kinds", nargs="+", choices=("medusa", "eagle", "eagle3"), default=["medusa", "eagle", "eagle3"]
    )
    parser.add_argument(
        "--tokens", type=int, default=len(TOPICS) * len(TASKS) * ANSWER, help="of answers to learn from"
    )
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--report", type=Path, help="write what was measured there, as Markdown")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    texts = say(asked.model, asked.folder / "text.json", asked.tokens)
    print(f"{sum(map(len, texts))} tokens of text after {time.monotonic() - started:.0f} s", flush=True)
    missing = [kind for kind in asked.kinds if not (asked.folder / kind / NOTES).is_file()]
    if missing:
        target, read_ = look(asked.model, texts)
        words = Words(read_, target.spec.vocab_size)
        print(f"states of them after {time.monotonic() - started:.0f} s; {len(words.ids)} different tokens", flush=True)
    for kind in missing:
        begun = time.monotonic()
        if kind == "medusa":
            loss = medusa(asked.folder / kind, target, read_, words, asked.passes)
        else:
            loss = eagle(asked.folder / kind, target, read_, words, asked.passes, third=kind == "eagle3")
        learnt = (
            f"{asked.passes} times {sum(map(len, texts))} tokens, {time.monotonic() - begun:.0f} s, loss {loss:.2f}"
        )
        (asked.folder / kind / NOTES).write_text(json.dumps({"learnt": learnt, "rows": {}}), encoding="utf-8")
        print(f"{kind}: {learnt}", flush=True)
    lines = [*HEADER]
    for kind in asked.kinds:
        notes = json.loads((asked.folder / kind / NOTES).read_text(encoding="utf-8"))
        for shape in SHAPES:
            if shape.name not in notes["rows"]:
                notes["rows"][shape.name] = row_of(kind, shape, measure(asked.model, kind, asked.folder / kind, shape))
                (asked.folder / kind / NOTES).write_text(json.dumps(notes), encoding="utf-8")
            lines.append(notes["rows"][shape.name])
            print(lines[-1], flush=True)
    lines += ["", "What they learnt from, how long that took on a busy machine, and where it ended:", ""]
    for kind in asked.kinds:
        notes = json.loads((asked.folder / kind / NOTES).read_text(encoding="utf-8"))
        lines.append(f"- {kind}: {notes['learnt']}")
    if asked.report:
        asked.report.write_text("\n".join(lines) + "\n", encoding="utf-8")


NOTES = "notes.json"
"""In a head's folder: what it learnt from, and what was measured. A second run does not do again what is there."""
HEADER = (
    "# Heads trained in minutes",
    "",
    "Acceptance of guesses by their place in the draft, on prompts that were not trained on, by the default executor:",
    "of guesses before which all were right, how many were. In a tree a place is right if one of its guesses is; one",
    "that does not reach so far counts as wrong there. A pass gives one token more than guesses were right.",
    "Written by `python examples/train_heads.py FOLDER --report tests/results/heads.md`.",
    "",
    "| head | guesses | 1st | 2nd | 3rd | 4th | right | tokens a pass |",
    "|---|---|---|---|---|---|---|---|",
)

if __name__ == "__main__":
    main()
