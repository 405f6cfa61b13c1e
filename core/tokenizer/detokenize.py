"""Ids to text, one at a time, as exactly the text that decoding them all at once would give.

A token may be part of a character, and in some vocabularies its text depends on what stands before it. So a
token's text can be late, and comes as a `Piece`: some ids together with all of their text. Between pieces lie
only whole characters; that is why a journal of whole pieces can be resumed anywhere.

Pure. Knows nothing of stop strings or requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tokenizers.decoders import DecodeStream

from octavo.core.tokenizer.vocabulary import Vocabulary

CONTEXT = 8
"""Ids before the first one that are decoded with it; what a decoder looks back on is one or two tokens."""

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""How decoding shows bytes that are no character, or not yet one."""


class Piece(NamedTuple):
    """Ids, and all of their text."""

    ids: list[int]
    text: str


class Detokenizer:
    """Incremental decoding of one choice that continues `before`: its prompt, and what was delivered of it.

    Special tokens give no text when `skip_special_tokens`, nor do `ends`, whatever they are: they end the output."""

    def __init__(
        self, vocabulary: Vocabulary, before: Sequence[int], skip_special_tokens: bool, ends: Iterable[int] = ()
    ) -> None:
        self._vocabulary = vocabulary
        special = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._skipped = special.union(ends) if skip_special_tokens else special
        self._context = self._whole([token for token in before[-CONTEXT:] if token not in special])
        self._stream: DecodeStream | None = None
        """Made when a token's text depends on what stands before it."""
        self._pending: list[int] = []
        """All ids since the last piece."""
        self._fed: list[int] = []
        """Those of them that have text."""

    def feed(self, token: int) -> Piece | None:
        """The piece that `token` completes, if it does."""
        self._pending.append(token)
        if token in self._skipped:
            return None if self._fed else self._piece("")
        self._fed.append(token)
        if len(self._fed) == 1 and (alone := self._vocabulary.alone(token)) is not None:
            self._stream = None  # it does not know of this token
            return self._piece(alone)
        text = self._step(token)
        return None if text is None else self._piece(text)

    def flush(self) -> Piece | None:
        """What is still held, at the end: an unfinished character becomes U+FFFD."""
        if not self._pending:
            return None
        before = self._vocabulary.decode(self._context)
        text = self._vocabulary.decode(self._context + self._fed)
        return self._piece(text[len(before) :] if text.startswith(before) else self._vocabulary.decode(self._fed))

    def _piece(self, text: str) -> Piece:
        piece = Piece(self._pending, text)
        self._context = self._fed or self._context
        self._pending, self._fed = [], []
        return piece

    def _step(self, token: int) -> str | None:
        if self._stream is None:
            self._stream = DecodeStream(ids=self._context)
        try:
            return self._stream.step(self._vocabulary.tokenizer, token)
        except Exception as error:  # the library has no narrower class
            if "prefix" not in str(error).lower():
                raise
        # A decoder with byte fallback took back text that it had given: the bytes after it were no characters. What
        # was given stays, and the ids since then are decoded by themselves.
        text = self._vocabulary.decode(self._fed)
        self._stream = DecodeStream(ids=list(self._fed))
        return text

    def _whole(self, ids: list[int]) -> list[int]:
        """`ids` without an unfinished character at their end: a prompt of ids may stop anywhere."""
        while ids and self._vocabulary.decode(ids).endswith(_UNFINISHED):
            ids = ids[:-1]
        return ids


def continued(vocabulary: Vocabulary, before: Sequence[int], ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text that `ids` add to that of `before`: the same as an output's pieces joined."""
    detokenizer = Detokenizer(vocabulary, before, skip_special_tokens)
    pieces = [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]
    return "".join(piece.text for piece in pieces if piece is not None)
