"""One choice of a request on its way out: tokens come in, deliverable ids and text come out.

Where things are, as indices into the choice's output:

    0 ………… delivered ………… released ………… received
                                    └─ held: an unfinished character, or what may become a stop string

Pure. Knows nothing of clients or schedulers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.messages import TextLogprob, TokenLogprob
from octavo.core.pace import Pace
from octavo.core.tokenizer.detokenize import CONTEXT, Detokenizer
from octavo.core.tokenizer.stops import Released, StopFilter, StopStrings
from octavo.core.tokenizer.vocabulary import Vocabulary

LEAST_LOGPROB = -9999.0


class Output(NamedTuple):
    """Ids from output index `start` on, exactly their text, and an entry per id if log-probabilities were asked for."""

    start: int
    ids: list[int]
    text: str
    logprobs: list[TextLogprob] | None


class Choice:
    """A choice that continues `prompt` and what was `delivered` of it before."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        delivered: Sequence[int],
        stops: StopStrings,
        *,
        skip_special_tokens: bool,
        logprobs: bool,
        ends: Sequence[int] = (),
        min_tokens: int = 0,
        received_ns: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        before = [*prompt[-CONTEXT:], *delivered[-CONTEXT:]]
        self._detokenizer = Detokenizer(vocabulary, before, skip_special_tokens, ends)
        self._stops = StopFilter(stops)
        self._min_tokens = min_tokens
        """No stop string begins before this output."""
        self._ids: list[int] = []
        self._text = ""
        self._logprobs: list[TextLogprob] | None = [] if logprobs else None
        """For all tokens from `_collected` on, held ones too."""
        self._collected = len(delivered)
        self.received = len(delivered)
        """How many tokens have come, from the start of the output: the index of the next one."""
        self.cached = 0
        """Prompt tokens that came from the prefix tree, as the scheduler last said."""
        self.drafted = self.accepted = 0
        """Guesses that were verified, and those of them that were right."""
        self.pace = None if delivered else Pace(received_ns)
        """Of its rows; None if others delivered some of them."""

    def take(self, index: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None] = ()) -> bool:
        """Take tokens that start at output `index` (not beyond `received`; what is known already is skipped).

        True when a stop string is complete: its last token is the last one received, and nothing after it counts."""
        for i in range(self.received - index, len(tokens)):
            token = tokens[i]
            self.received += 1
            if self._logprobs is not None:
                found = logprobs[i] if i < len(logprobs) else None
                known = found or TokenLogprob(token, LEAST_LOGPROB, [], [])
                self._logprobs.append(self._vocabulary.spelled(known))
            if (piece := self._detokenizer.feed(token)) is None:
                continue
            early = self.received <= self._min_tokens
            if self._add(Released(piece.ids, piece.text) if early else self._stops.push(piece)):
                return True
        return False

    def flush(self) -> bool:
        """The choice has ended: let go of all that is held. True when that text turns out to complete a stop string."""
        if (piece := self._detokenizer.flush()) is not None and self._add(self._stops.push(piece)):
            return True
        self._add(self._stops.flush())
        return False

    def collect(self) -> Output:
        """What was released since the last time; its ids may be empty."""
        n = len(self._ids)
        logprobs = None
        if self._logprobs is not None:
            logprobs, self._logprobs = self._logprobs[:n], self._logprobs[n:]
        output = Output(self._collected, self._ids, self._text, logprobs)
        self._collected += n
        self._ids, self._text = [], ""
        return output

    def _add(self, released: Released) -> bool:
        self._ids += released.ids
        self._text += released.text
        return released.stopped
