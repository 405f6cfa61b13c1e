"""Drafter `eagle`: a head that goes on from the target's own features, one after another; a chain, or a tree.

See `eagle_head` for the heads. A tree grows as in EAGLE-2 (Li et al., "EAGLE-2: Faster Inference of Language Models
with Dynamic Draft Trees", 2024): at each depth the likeliest `width` guesses are gone on from, and of all that were
seen the likeliest are proposed.

Features are kept by cell of the executor's blocks, as KV is: so what requests share, and what comes from the cache, has
them too. The head computes nothing until there is something to draft; then it catches up.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from octavo.core.messages import StepBind
from octavo.core.models.errors import ModelError
from octavo.executors.drafting.contract import NO_DRAFT, WHOLE, Draft, Drafter, DrafterOptions, Host, Took, Want
from octavo.executors.drafting.eagle_head import load_head
from octavo.executors.drafting.paged import Written
from octavo.executors.drafting.ranking import ranked
from octavo.executors.drafting.tree import need_trees
from octavo.executors.residents import Resident, Span, slots_of


class Eagle(Drafter):
    class Options(DrafterOptions, frozen=True):
        head: str = ""
        """The folder of the head."""
        width: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
        """Guesses of each depth that are gone on from, and tokens that are guessed after each; 1 is a chain."""
        catch_up: Annotated[int, msgspec.Meta(ge=1)] = 256
        """Most tokens of a step that are computed to catch up; who is further behind gets no guesses in it."""

    features = True

    def __init__(self, host: Host, options: Options) -> None:
        if not options.head:
            raise ModelError("the drafter eagle needs speculation.options.head: the folder of the head")
        if host.target is None or host.claim is None:
            raise ModelError(f"this executor lends no embedding and no head: choose another drafter, or {WHOLE}")
        if options.width > 1:
            need_trees(host, "eagle")
        self._target, facts = host.target, host.facts
        hidden, layers = host.target.width, host.target.layers
        self._head = load_head(Path(options.head), hidden, facts.vocab_size).to(host.device)
        if self._head.third:
            if not host.taps:
                raise ModelError(
                    "an EAGLE-3 head looks into the model, which this executor does not let it do: take an EAGLE-1 or "
                    f"EAGLE-2 head, or {WHOLE}"
                )
            if layers < 3:
                raise ModelError(f"an EAGLE-3 head looks at the inputs of three layers, the model has {layers}")
            self.taps = 2, layers // 2, layers - 3
        host.claim(self._head.token_bytes)
        self._width, self._catch_up = options.width, options.catch_up
        self._vocab_size = facts.vocab_size
        self._rule = host.config.speculation.verification
        self._pool = self._head.pool(facts.places, facts.block_size)
        self._features = torch.zeros(self._pool.shape.slots, hidden, device=host.device)
        """Of each position, at its cell."""
        self._told = Written(facts.places, facts.block_size)
        self._written = Written(facts.places, facts.block_size)

    def took(self, took: Sequence[Took]) -> None:
        told = torch.cat([hidden if inner is None else inner for _, _, hidden, inner in took])
        slots = self._slots([(one.resident.table, one.start, one.start + len(one.hidden)) for one in took])
        self._features[slots] = self._head.feature(told.to(self._features.device, torch.float32))
        for resident, start, hidden, _ in took:
            self._told.wrote(resident, start, resident.tokens[start : start + len(hidden)])

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(wants)
        room = self._catch_up
        ready: list[int] = []
        at: list[int] = []
        spans: list[Span] = []
        for i, (resident, _) in enumerate(wants):
            known = len(resident.tokens)
            if known < 2 or self._told.upto(resident) < known - 1:
                continue
            start = max(1, min(self._written.upto(resident), known - 1))
            left = known - start
            if left <= room or left == 1:
                ready.append(i)
                at.append(len(spans))
                room -= left - 1
            elif room > 0:
                left, room = room, 0
            else:
                continue
            spans.append(Span(resident.tokens[start : start + left], start, resident.table))
            self._wrote(resident, spans[-1])
        if not spans:
            return drafts
        # The target's features of the positions before theirs.
        before = self._features[self._slots([(span.table, span.start - 1, span.end - 1) for span in spans])]
        features = self._next(spans, before)
        lasts = np.cumsum([len(span.ids) for span in spans])[at] - 1
        for i, draft in zip(ready, self._grow([wants[i] for i in ready], features[lasts.tolist()]), strict=True):
            drafts[i] = draft
        return drafts

    def bound(self, bind: StepBind) -> None:
        if len(bind.copy_src):
            source, target = bind.copy_src.tolist(), bind.copy_dst.tolist()
            self._pool.copy_blocks(torch.tensor(source), torch.tensor(target))
            features = self._features.view(-1, self._pool.shape.block_size, self._features.shape[-1])
            features[target] = features[source]
            self._told.copy(source, target)
            self._written.copy(source, target)

    def forget(self) -> None:
        self._told.clear()
        self._written.clear()

    def _wrote(self, resident: Resident, span: Span) -> None:
        if span.start == 1:  # cell 0 has nothing, and lacks nothing
            self._written.wrote(resident, 0, [resident.tokens[0], *span.ids])
        else:
            self._written.wrote(resident, span.start, span.ids)

    def _slots(self, cells: Sequence[tuple[Sequence[int], int, int]]) -> Tensor:
        """Places of features: of a table's cells [first, end), one after the other."""
        size = self._pool.shape.block_size
        slots = [slots_of(table, np.arange(first, end), size) for table, first, end in cells]
        return torch.from_numpy(np.concatenate(slots)).to(self._features.device)

    def _next(self, spans: list[Span], features: Tensor) -> Tensor:
        embeddings = self._target.embed([token for span in spans for token in span.ids])
        return self._head.next(spans, embeddings, features, self._pool)

    def _logits(self, features: Tensor) -> Tensor:
        said = self._head.said(features)
        return self._target.logits(features)[:, : self._vocab_size] if said is None else said

    def _grow(self, wants: list[Want], features: Tensor) -> list[Draft]:
        """From the features of the last tokens [len(wants), hidden]."""
        trees = [_Growth(want) for want in wants]
        branches = [(i, -1) for i in range(len(wants))]
        while branches:
            logits = self._logits(features)
            paths = [trees[i].tokens_of(node) for i, node in branches]
            asked = [(wants[i].resident, path) for (i, _), path in zip(branches, paths, strict=True)]
            best = ranked(logits, self._head.ids, asked, self._width, self._rule, self._vocab_size)
            for row, ((i, node), found) in enumerate(zip(branches, best, strict=True)):
                trees[i].add(node, row, found)
            spans, branches, sources = [], [], []
            for i, tree in enumerate(trees):
                if nodes := tree.go_on(self._width):
                    spans.append(tree.span(nodes))
                    branches += [(i, node) for node in nodes]
                    sources += [tree.nodes[node].row for node in nodes]
            if spans:
                features = self._next(spans, features[sources])
        return [tree.draft() for tree in trees]


class _Node(NamedTuple):
    token: int
    parent: int
    score: float
    """Log-probability of it and all before it."""
    row: int
    """Of the features that it was guessed from, at its depth."""
    path: tuple[int, ...]
    """Cells of the guesses up to it that were gone on from."""


class _Growth:
    """A tree in the making: cells of the head's pool, from the end of what is known, go to guesses that are gone on
    from."""

    def __init__(self, want: Want) -> None:
        self._want = want
        self._known = len(want.resident.tokens)
        self._used = 0
        self.nodes: list[_Node] = []
        self._fresh: list[int] = []
        """Nodes of the greatest depth."""
        self._cells: dict[int, int] = {}

    def tokens_of(self, node: int) -> list[int]:
        out: list[int] = []
        while node >= 0:
            out.append(self.nodes[node].token)
            node = self.nodes[node].parent
        return out[::-1]

    def add(self, parent: int, row: int, found: Sequence[tuple[int, float]]) -> None:
        before = self.nodes[parent].score if parent >= 0 else 0.0
        path = (*self.nodes[parent].path, self._cells[parent]) if parent >= 0 else ()
        for token, chance in found:
            self._fresh.append(len(self.nodes))
            self.nodes.append(_Node(token, parent, before + chance, row, path))

    def go_on(self, width: int) -> list[int]:
        """The fresh nodes to go on from: the likeliest, while there are cells."""
        room = max(0, self._want.most - 1 - self._used)
        best = sorted(self._fresh, key=lambda node: -self.nodes[node].score)[: min(width, room)]
        self._fresh = []
        for node in best:
            self._cells[node] = self._known + self._used
            self._used += 1
        return best

    def span(self, nodes: Sequence[int]) -> Span:
        paths = [[*self.nodes[node].path, self._cells[node]] for node in nodes]
        return Span([self.nodes[node].token for node in nodes], self._known, self._want.resident.table, paths)

    def draft(self) -> Draft:
        """The likeliest of all nodes; those before a node are likelier than it, so they are in."""
        order = sorted(range(len(self.nodes)), key=lambda node: -self.nodes[node].score)[: self._want.most]
        place = {node: i for i, node in enumerate(order)} | {-1: -1}
        parents = [place[self.nodes[node].parent] for node in order]
        return Draft([self.nodes[node].token for node in order], None, parents)
