"""From a step's logits to what its sequences say: draws on the device, verifies guesses, reads the answer once.

Guesses under the rule `rejection`, or that a grammar has to follow, are judged on the host, by the rules that all
executors share.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.core.grammar import GrammarError
from octavo.executors.cuda.drawing import Drawer, Row
from octavo.executors.cuda.mirror import mirrored
from octavo.executors.drafting.contract import Draft
from octavo.executors.drafting.verification import Rule, verify
from octavo.executors.grammars import Matchers
from octavo.executors.outcome import Outcome
from octavo.executors.residents import Run
from octavo.executors.sampling import Context, logprob
from octavo.kernels.cuda.launch import Kernels


class Asked(NamedTuple):
    """A run that samples, with its guesses; the logits of its last token and of each guess are rows from `row` on."""

    run: Run
    draft: Draft
    row: int


class Speaker:
    def __init__(self, kernels: Kernels, vocab_size: int, matchers: Matchers, rule: Rule) -> None:
        self._kernels, self._drawer = kernels, Drawer(vocab_size)
        self._matchers, self._rule = matchers, rule

    def say(self, asked: list[Asked], logits: Tensor) -> list[Outcome]:
        """What comes of each. A row that is not finite ends the tokens before it; when it is the run's own, the run
        fails."""
        outcomes: dict[int, Outcome] = {}
        drawn: list[Asked] = []
        rows: list[Row] = []
        for one in asked:
            if self._needs_host(one):
                outcomes[one.row] = self._judged(one, logits)
                continue
            try:
                rows += self._rows(one)
                drawn.append(one)
            except GrammarError as error:
                outcomes[one.row] = Outcome(str(error))
        if drawn:
            places = [one.row + i for one in drawn for i in range(len(one.draft.tokens) + 1)]
            mine = logits if len(places) == len(logits) else logits[places]
            said = self._verified(drawn, self.draw(rows, mine))
            outcomes |= {one.row: _outcome(one, tokens) for one, tokens in zip(drawn, said, strict=True)}
        self._explain(asked, outcomes, logits)
        return [outcomes[one.row] for one in asked]

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
        resident, guesses = one.run.resident, tuple(one.draft.tokens)
        mask = self._matchers.mask(resident)
        return [Row(resident, guesses[:n], mask) for n in range(len(guesses) + 1)]

    def _verified(self, drawn: list[Asked], tokens: Tensor) -> list[list[int]]:
        """What each says: as many of its drawn tokens as its guesses allow."""
        guessed = np.array([len(one.draft.tokens) for one in drawn], dtype=np.int32)
        if not guessed.any():
            return [[token] for token in tokens.tolist()]
        firsts = np.concatenate(([0], np.cumsum(guessed + 1))).astype(np.int32)
        at = mirrored(
            tokens.device,
            {
                "firsts": firsts,
                "guesses": np.array([t for one in drawn for t in (-1, *one.draft.tokens)], dtype=np.int32),
                "parents": np.concatenate([np.arange(-1, n, dtype=np.int32) for n in guessed]),
            },
        )
        said, _, counts = self._kernels.verify(at["firsts"], at["guesses"], at["parents"], tokens)
        every = torch.cat((said, counts)).tolist()
        return [every[first : first + n] for first, n in zip(firsts.tolist(), every[len(said) :], strict=False)]

    def _judged(self, one: Asked, logits: Tensor) -> Outcome:
        resident = one.run.resident
        rows = logits[one.row : one.row + len(one.draft.tokens) + 1].cpu().numpy()
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

    def _explain(self, asked: list[Asked], outcomes: dict[int, Outcome], logits: Tensor) -> None:
        """Log-probabilities for those that want them: their rows are brought to the host at once."""
        wanting = [one for one in asked if one.run.resident.sampling.logprobs >= 0 and outcomes[one.row].tokens]
        if not wanting:
            return
        places = [one.row + i for one in wanting for i in range(len(outcomes[one.row].tokens))]
        rows = iter(logits[places].cpu().numpy())
        for one in wanting:
            outcome, wanted = outcomes[one.row], one.run.resident.sampling.logprobs
            entries = tuple(logprob(next(rows), token, wanted) for token in outcome.tokens)
            outcomes[one.row] = outcome._replace(logprobs=entries)


def _outcome(one: Asked, tokens: list[int]) -> Outcome:
    sound = [token for token in tokens if token >= 0]
    if not sound:
        return Outcome(f"the model's numbers at position {one.run.end - 1} are not finite")
    return Outcome(None, tuple(sound), (None,) * len(sound), drafted=len(one.draft.tokens))
