"""From a step's logits to what its sequences say: draws on the device, verifies guesses, reads the answer once.

Draws are launched when the step begins, what came of them is read when it ends. Guesses under the rule `rejection`, or
that a grammar has to follow, are judged on the host then, by the rules that all executors share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.core.grammar import GrammarError
from octavo.core.messages import Sampling
from octavo.executors.cuda.drawing import Drawer, Row
from octavo.executors.cuda.mirror import mirrored, picked
from octavo.executors.drafting.tree import ancestors, depth, path
from octavo.executors.drafting.verification import Rule, verify
from octavo.executors.frame import Asked, not_finite
from octavo.executors.grammars import Matchers
from octavo.executors.outcome import Outcome
from octavo.executors.sampling import Context, logprob, penalised
from octavo.kernels.cuda.launch import Kernels


@dataclass(frozen=True, slots=True, eq=False)
class Saying:
    """A step's draws, under way. Rows of `logits` are those of the asked, one after the other, from `rows` on by the
    row that they asked for.

    `numbers` int32 on the device: what is said, `firsts[i]` on by each of `drawn`, and behind it how much by each, if
    anything was guessed."""

    logits: Tensor
    rows: dict[int, int]
    drawn: list[Asked]
    firsts: list[int]
    numbers: Tensor
    guessed: bool
    failures: dict[int, str]
    kept: Tensor
    """Rows of those who want log-probabilities, by `wanting`: the logits are good until the next step only."""
    wanting: dict[int, int]


class Speaker:
    def __init__(self, kernels: Kernels, vocab_size: int, matchers: Matchers, rule: Rule) -> None:
        self._kernels, self._drawer = kernels, Drawer(vocab_size)
        self._matchers, self._rule = matchers, rule

    def begin(self, asked: list[Asked], logits: Tensor) -> Saying:
        """`logits` [n, vocabulary] are of all rows of those who ask."""
        drawn: list[Asked] = []
        draws: list[Row] = []
        failures: dict[int, str] = {}
        rows: dict[int, int] = {}
        kept: list[int] = []
        wanting: dict[int, int] = {}
        at = 0
        for one in asked:
            rows[one.row] = at
            if one.run.resident.sampling.logprobs >= 0:
                wanting[one.row] = len(kept)
                kept += range(at, at + len(one.rows))
            at += len(one.rows)
            if self._needs_host(one):
                continue
            try:
                draws += self._rows(one)
                drawn.append(one)
            except GrammarError as error:
                failures[one.row] = str(error)
        firsts = np.cumsum([0, *(len(one.rows) for one in drawn)]).astype(np.int32)
        tokens = torch.empty(0, dtype=torch.int32, device=logits.device)
        guessed = int(firsts[-1]) > len(drawn)
        if drawn:
            places = [rows[one.row] + i for one in drawn for i in range(len(one.rows))]
            tokens = self.draw(draws, picked(logits, places))
            if guessed:
                tokens = self._verified(drawn, firsts, tokens)
        return Saying(
            logits, rows, drawn, firsts[:-1].tolist(), tokens, guessed, failures, picked(logits, kept).clone(), wanting
        )

    def end(self, saying: Saying, numbers: list[int], heard: list[Asked]) -> list[Outcome]:
        """What comes of each of those; `numbers` are the saying's. A row that is not finite ends the tokens before it;
        when it is the run's own, the run fails."""
        said: dict[int, list[int]] = {}
        counts = numbers[len(numbers) - len(saying.drawn) :] if saying.guessed else [1] * len(saying.drawn)
        for one, first, count in zip(saying.drawn, saying.firsts, counts, strict=True):
            said[one.row] = numbers[first : first + count]
        outcomes = [
            Outcome(why)
            if (why := saying.failures.get(one.row)) is not None
            else _outcome(one, said[one.row])
            if one.row in said
            else self._judged(one, saying)
            for one in heard
        ]
        return self._explained(saying, heard, outcomes)

    def draw(self, rows: list[Row], logits: Tensor) -> Tensor:
        """A token for each row, on the device; -1 where logits are not finite."""
        made = self._drawer.drawing(rows)
        at = mirrored(
            logits.device,
            {
                "draws": made.draws.view(np.uint8).reshape(len(rows), -1),
                "counts": made.counts,
                "allowed": made.allowed,
                "ids": made.bias_ids,
                "values": made.bias_values,
            },
        )
        scores = self._kernels.scores(
            logits, at["draws"], counts=at["counts"], allowed=at["allowed"], bias=(at["ids"], at["values"])
        )
        return self._kernels.sample(scores, at["draws"])

    def _needs_host(self, one: Asked) -> bool:
        sampling = one.run.resident.sampling
        rejects = self._rule == "rejection" and sampling.temperature > 0
        return len(one.draft.tokens) > 0 and (rejects or sampling.grammar is not None)

    def _rows(self, one: Asked) -> list[Row]:
        resident, draft = one.run.resident, one.draft
        mask = self._matchers.mask(resident)
        if draft.parents is None:
            guesses = tuple(draft.tokens)
            return [Row(resident, guesses[:n], mask) for n in range(len(guesses) + 1)]
        return [
            Row(resident, tuple(draft.tokens[node] for node in ancestors(draft, i - 1)), mask)
            for i in range(len(draft.tokens) + 1)
        ]

    def _verified(self, drawn: list[Asked], firsts: np.ndarray, tokens: Tensor) -> Tensor:
        """As many of their drawn tokens as their guesses allow, and how many."""
        guesses: list[int] = []
        parents: list[int] = []
        for one in drawn:
            guesses += (-1, *one.draft.tokens)
            nodes = one.draft.parents
            parents += range(-1, len(one.draft.tokens)) if nodes is None else (-1, *(node + 1 for node in nodes))
        at = mirrored(
            tokens.device,
            {
                "firsts": firsts,
                "guesses": np.array(guesses, dtype=np.int32),
                "parents": np.array(parents, dtype=np.int32),
            },
        )
        said, _, counts = self._kernels.verify(at["firsts"], at["guesses"], at["parents"], tokens)
        return torch.cat((said, counts))

    def _judged(self, one: Asked, saying: Saying) -> Outcome:
        resident, first = one.run.resident, saying.rows[one.row]
        rows = saying.logits[first : first + len(one.rows)].cpu().numpy()
        sound = np.isfinite(rows.max(-1)) & np.isfinite(rows.min(-1))
        rows = rows if sound.all() else rows[: int(sound.argmin())]
        if not len(rows):
            return _outcome(one, [-1])
        context = Context(resident.sampling, resident.choice, resident.prompt_len, resident.tokens)
        try:
            new = verify(rows, one.draft, context, self._rule, partial(self._matchers.mask, resident))
        except GrammarError as error:
            return Outcome(str(error))
        return _outcome(one, new)

    def _explained(self, saying: Saying, heard: list[Asked], outcomes: list[Outcome]) -> list[Outcome]:
        """With log-probabilities for those that want them."""
        if not saying.wanting:
            return outcomes
        kept = saying.kept.cpu().numpy()
        made: list[Outcome] = []
        for one, outcome in zip(heard, outcomes, strict=True):
            if outcome.tokens and (first := saying.wanting.get(one.row)) is not None:
                said = zip((-1, *path(one.draft, outcome.tokens)), outcome.tokens, strict=True)
                wanted = one.run.resident.sampling.logprobs
                entries = tuple(logprob(kept[first + node + 1], token, wanted) for node, token in said)
                outcome = outcome._replace(logprobs=entries)
            made.append(outcome)
        return made


def reads_tokens(sampling: Sampling) -> bool:
    """Whether a draw depends on which tokens were said before, and not only on how many."""
    return penalised(sampling) or sampling.grammar is not None or any(len(word) > 1 for word in sampling.banned)


def _outcome(one: Asked, tokens: list[int]) -> Outcome:
    sound = [token for token in tokens if token >= 0]
    if not sound:
        return Outcome(not_finite(one.run.end - 1))
    return Outcome(None, tuple(sound), (None,) * len(sound), drafted=len(one.draft.tokens), depth=depth(one.draft))
