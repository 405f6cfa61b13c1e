"""From a step's logits to what its sequences say: draws on the device, verifies guesses, reads the answer once.

Draws are launched when the step begins, what came of them is read when it ends. Guesses that a grammar has to follow
are judged on the host then, by the rules that all executors share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.core.grammar import GrammarError, Mask
from octavo.core.messages import Sampling, col
from octavo.executors.cuda.drawing import Drawer, Rows
from octavo.executors.cuda.guesses import drawn_from, nodes_of, portions
from octavo.executors.cuda.mirror import Mirrors, mirrored, picked
from octavo.executors.drafting.contract import Draft
from octavo.executors.drafting.tree import ancestors, depth, depths, path
from octavo.executors.drafting.verification import Rule, verify
from octavo.executors.frame import Asked, not_finite
from octavo.executors.grammars import Matchers
from octavo.executors.outcome import Outcome, Outcomes
from octavo.executors.residents import Resident, Run
from octavo.executors.sampling import Context, logprob, penalised
from octavo.kernels.cuda.launch import Kernels

CHANCES = 256
"""Distributions of guesses that are on the device at a time: each is as long as the vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class Saying:
    """A step's draws, under way. Rows of `logits` are those of the asked, one after the other, from `rows[j]` on.

    `numbers` int32 on the device: what is said, `firsts[k]` on by `drawn[k]` of the asked, and behind it how much by
    each, if anything was guessed."""

    logits: Tensor
    rows: Sequence[int]
    drawn: Sequence[int]
    firsts: Sequence[int]
    numbers: Tensor
    guessed: bool
    failures: dict[int, str]
    kept: Tensor
    """Rows of those who want log-probabilities, by `wanting`: the logits are good until the next step only."""
    wanting: dict[int, int]


class Crowd(NamedTuple):
    """The sequences of a step, and who of them (their indices) asks for more than a draw from what is known."""

    residents: list[Resident]
    wanting: list[int]
    """Log-probabilities."""
    grammars: list[int]
    reading: list[int]
    """Draws that depend on which tokens were said before."""

    @classmethod
    def of(cls, residents: list[Resident]) -> Crowd:
        samplings = list(enumerate(resident.sampling for resident in residents))
        return cls(
            residents,
            [i for i, sampling in samplings if sampling.logprobs >= 0],
            [i for i, sampling in samplings if sampling.grammar is not None],
            [i for i, sampling in samplings if reads_tokens(sampling)],
        )


class Speaker:
    def __init__(self, kernels: Kernels, vocab_size: int, matchers: Matchers, rule: Rule) -> None:
        self._kernels, self._drawer = kernels, Drawer(vocab_size)
        self._matchers, self._rule = matchers, rule
        self._draws = Mirrors(kernels.device)
        self._crowd = Crowd.of([])

    def waits(self, asked: Asked) -> bool:
        """Whether a draw needs tokens that the host does not know yet."""
        return any(asked.runs.residents[j].unknown for j in self._known(asked).reading)

    def begin(self, asked: Asked, logits: Tensor) -> Saying:
        """`logits` [n, vocabulary] are of all rows of those who ask."""
        crowd, n = self._known(asked), len(asked.runs)
        failures: dict[int, str] = {}
        masks: dict[int, Mask] = {}
        for j in crowd.grammars:
            if not self._needs_host(asked.runs[j], asked.drafts[j]):
                try:
                    if (mask := self._matchers.mask(asked.runs[j].resident)) is not None:
                        masks[j] = mask
                except GrammarError as error:
                    failures[j] = str(error)
        if asked.guessed:
            return self._guessed(asked, logits, failures, masks)
        drawn: Sequence[int] = range(n)
        draws, positions, scores = crowd.residents, asked.runs.end, logits
        if failures:
            drawn = [j for j in drawn if j not in failures]
            draws, positions, scores = [draws[j] for j in drawn], positions[list(drawn)], picked(logits, list(drawn))
            masks = {k: masks[j] for k, j in enumerate(drawn) if j in masks}
        numbers = self.draw(Rows(draws, positions, {}, masks), scores) if drawn else self._nothing(logits)
        wanting = {j: k for k, j in enumerate(crowd.wanting)}
        kept = picked(logits, crowd.wanting).clone() if wanting else logits[:0]
        return Saying(logits, range(n), drawn, range(len(drawn)), numbers, False, failures, kept, wanting)

    def _guessed(self, asked: Asked, logits: Tensor, failures: dict[int, str], masks: dict[int, Mask]) -> Saying:
        """The same where rows are of guesses, too."""
        sizes = [len(draft.tokens) + 1 for draft in asked.drafts]
        rows = [0, *accumulate(sizes)]
        everyone = [j for j in range(len(sizes)) if j not in failures]
        mine = [j for j in everyone if not self._needs_host(asked.runs[j], asked.drafts[j])]
        rejecting = [j for j in mine if self._rejects(asked.runs[j], asked.drafts[j])]
        coupled = [j for j in mine if not self._rejects(asked.runs[j], asked.drafts[j])] if rejecting else mine
        drawn = coupled + rejecting
        drafts = [asked.drafts[j] for j in drawn]
        positions = [len(asked.runs.residents[j].tokens) + depth for j in drawn for depth in depths(asked.drafts[j])]
        draws = Rows([], col(positions), {}, {})
        for j in drawn:
            self._extend(draws, asked.runs[j].resident, asked.drafts[j], masks.get(j))
        firsts = np.cumsum([0, *(sizes[j] for j in drawn)]).astype(np.int32)
        guessed = int(firsts[-1]) > len(drawn)
        places = [rows[j] + i for j in drawn for i in range(sizes[j])]
        numbers = self.spoken(draws, logits, places, drafts, len(coupled)) if drawn else self._nothing(logits)
        wanting: dict[int, int] = {}
        kept: list[int] = []
        for j in self._known(asked).wanting:
            wanting[j] = len(kept)
            kept += range(rows[j], rows[j] + sizes[j])
        told = firsts[:-1].tolist()
        return Saying(logits, rows, drawn, told, numbers, guessed, failures, picked(logits, kept).clone(), wanting)

    def end(self, saying: Saying, numbers: list[int], asked: Asked, heard: Sequence[int]) -> Outcomes:
        """What comes of those; `numbers` are the saying's. A row that is not finite ends the tokens before it; when it
        is the run's own, the run fails."""
        n, others = len(asked.runs), {}
        if saying.guessed or len(saying.drawn) < n:
            tokens = [0] * n
            counts = numbers[len(numbers) - len(saying.drawn) :] if saying.guessed else [1] * len(saying.drawn)
            said = dict(zip(saying.drawn, zip(saying.firsts, counts, strict=True), strict=True))
            for j in heard:
                if j in said and not asked.drafts[j].tokens:
                    tokens[j] = numbers[said[j][0]]
                elif (why := saying.failures.get(j)) is not None:
                    others[j] = Outcome(why)
                elif j in said:
                    first, count = said[j]
                    others[j] = _outcome(asked.runs[j], asked.drafts[j], numbers[first : first + count])
                else:
                    others[j] = self._judged(asked.runs[j], asked.drafts[j], saying, saying.rows[j])
        else:
            tokens = numbers
        if tokens and min(tokens) < 0:
            lost = (j for j in heard if tokens[j] < 0)
            others |= {j: Outcome(not_finite(asked.runs[j].end - 1)) for j in lost}
        outcomes = Outcomes(tokens, others)
        if saying.wanting:
            self._explain(saying, asked, heard, outcomes)
        return outcomes

    def draw(self, rows: Rows, logits: Tensor) -> Tensor:
        """A token for each row, on the device; -1 where logits are not finite."""
        return self._kernels.sample(*self._scores(rows, logits))

    def spoken(self, rows: Rows, logits: Tensor, places: Sequence[int], drafts: list[Draft], coupled: int) -> Tensor:
        """Tokens of these drafts, whose rows are at `places` of the logits: of the first so many by the rule `coupled`,
        of the others by `rejection`. Behind them, if anything was guessed, how many of each."""
        scores, draws = self._scores(rows, picked(logits, places))
        end = sum(len(draft.tokens) + 1 for draft in drafts[:coupled])
        drawn = self._kernels.sample(scores[:end], draws[:end])
        if len(places) == len(drafts):
            return drawn
        parts = [self._verified(drafts[:coupled], drawn)] if coupled else []
        parts += self._rejected(drafts[coupled:], scores[end:], draws[end:])
        return torch.cat([tokens for tokens, _ in parts] + [counts for _, counts in parts])

    def _scores(self, rows: Rows, logits: Tensor) -> tuple[Tensor, Tensor]:
        """And the draws, on the device."""
        made = self._drawer.drawing(rows)
        at = self._draws.mirrored(
            {
                "draws": made.draws.view(np.uint8).reshape(len(rows.residents), -1),
                "counts": made.counts,
                "allowed": made.allowed,
                "ids": made.bias_ids,
                "values": made.bias_values,
            }
        )
        scores = self._kernels.scores(
            logits, at["draws"], counts=at["counts"], allowed=at["allowed"], bias=(at["ids"], at["values"])
        )
        return scores, at["draws"]

    def _known(self, asked: Asked) -> Crowd:
        """Most steps are of those of the step before."""
        residents = asked.runs.residents
        if residents is not self._crowd.residents and residents != self._crowd.residents:
            self._crowd = Crowd.of(residents)
        return self._crowd

    def _nothing(self, logits: Tensor) -> Tensor:
        return torch.empty(0, dtype=torch.int32, device=logits.device)

    def _needs_host(self, run: Run, draft: Draft) -> bool:
        return len(draft.tokens) > 0 and run.resident.sampling.grammar is not None

    def _rejects(self, run: Run, draft: Draft) -> bool:
        return self._rule == "rejection" and len(draft.tokens) > 0 and run.resident.sampling.temperature > 0

    def _extend(self, draws: Rows, resident: Resident, draft: Draft, mask: Mask | None) -> None:
        """By the rows of a resident and its guesses."""
        for i in range(len(draft.tokens) + 1):
            row = len(draws.residents)
            draws.residents.append(resident)
            if i:
                nodes = range(i) if draft.parents is None else ancestors(draft, i - 1)
                draws.guesses[row] = tuple(draft.tokens[node] for node in nodes)
            if mask is not None:
                draws.masks[row] = mask

    def _verified(self, drafts: list[Draft], drawn: Tensor) -> tuple[Tensor, Tensor]:
        """As many of their drawn tokens as their guesses allow, and how many."""
        at = mirrored(drawn.device, nodes_of(drafts))
        said, _, counts = self._kernels.verify(at["firsts"], at["guesses"], at["parents"], drawn)
        return said, counts

    def _rejected(self, drafts: list[Draft], scores: Tensor, draws: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The same by rejection, for portions of them; in place of the scores."""
        target, found, row = self._kernels.distributions(scores, draws), [], 0
        for portion in portions(drafts, CHANCES):
            rows = slice(row, row + sum(len(draft.tokens) + 1 for draft in portion))
            found.append(self._portion(portion, target[rows], draws[rows]))
            row = rows.stop
        return found

    def _portion(self, drafts: list[Draft], target: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Its distributions are given back at the end, before those of the next come."""
        made, known = nodes_of(drafts), [draft.chances for draft in drafts if draft.chances is not None]
        made["chances"] = np.concatenate(known) if known else np.empty((0, target.shape[1]))
        made["drawn_from"] = drawn_from(drafts)
        at = mirrored(target.device, made)
        how = (at["guesses"], at["parents"], target, at["chances"], at["drawn_from"], draws)
        return self._kernels.reject(at["firsts"], *how)

    def _judged(self, run: Run, draft: Draft, saying: Saying, first: int) -> Outcome:
        resident = run.resident
        rows = saying.logits[first : first + len(draft.tokens) + 1].cpu().numpy()
        sound = np.isfinite(rows.max(-1)) & np.isfinite(rows.min(-1))
        rows = rows if sound.all() else rows[: int(sound.argmin())]
        if not len(rows):
            return Outcome(not_finite(run.end - 1))
        context = Context(resident.sampling, resident.choice, resident.prompt_len, resident.tokens)
        try:
            new = verify(rows, draft, context, self._rule, partial(self._matchers.mask, resident))
        except GrammarError as error:
            return Outcome(str(error))
        return _outcome(run, draft, new)

    def _explain(self, saying: Saying, asked: Asked, heard: Sequence[int], outcomes: Outcomes) -> None:
        """With log-probabilities for those that want them."""
        kept, hears = saying.kept.cpu().numpy(), set(heard)
        for j, first in saying.wanting.items():
            outcome = outcomes.at(j)
            if j in hears and outcome.tokens:
                said = zip((-1, *path(asked.drafts[j], outcome.tokens)), outcome.tokens, strict=True)
                wanted = asked.runs[j].resident.sampling.logprobs
                entries = tuple(logprob(kept[first + node + 1], token, wanted) for node, token in said)
                outcomes.others[j] = outcome._replace(logprobs=entries)


def reads_tokens(sampling: Sampling) -> bool:
    """Whether a draw depends on which tokens were said before, and not only on how many."""
    return penalised(sampling) or sampling.grammar is not None or any(len(word) > 1 for word in sampling.banned)


def _outcome(run: Run, draft: Draft, tokens: list[int]) -> Outcome:
    sound = [token for token in tokens if token >= 0]
    if not sound:
        return Outcome(not_finite(run.end - 1))
    return Outcome(None, tuple(sound), (None,) * len(sound), drafted=len(draft.tokens), depth=depth(draft))
