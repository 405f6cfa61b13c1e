"""What answers may be written: the contract of grammar engines, entry-point group `octavo.grammar`.

The tokenizer checks a grammar before anything is computed; an executor has a matcher for each residency that asked
for one, made anew from the tokens so far whenever it takes a slot. Neither knows how an engine works.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.core.messages import Grammar

Mask: TypeAlias = npt.NDArray[np.bool_]
"""Per id of the vocabulary, whether it may come next; shape [vocab]."""

GROUP = "octavo.grammar"


class GrammarError(Exception):
    """A grammar that is not valid, or asks for more than can be computed; says where and why."""


class CallKind(msgspec.Struct, frozen=True):
    """One kind of call: JSON of the schema between two texts. `name` is for who reads why it is not served."""

    name: str
    begin: str
    schema: dict[str, Any] | bool
    end: str


class Calls(msgspec.Struct, frozen=True):
    """Text that is free but for calls: the grammar of the kind `calls` is JSON of this. After each `opening` comes one
    of the `kinds`, then `closing`, with at most four spaces or line ends around it."""

    opening: str
    kinds: list[CallKind]
    closing: str


class Matcher(Protocol):
    """Where one answer is in its grammar."""

    def take(self, tokens: list[int]) -> None:
        """The answer goes on with these."""
        ...

    def mask(self) -> Mask:
        """What may come next; once the answer is complete, only what ends it. Raises `GrammarError`."""
        ...


class Grammars(Protocol):
    """An engine for one model's vocabulary."""

    def start(self, grammar: Grammar) -> Matcher:
        """At the beginning of an answer. Raises `GrammarError`."""
        ...


class Engine(Protocol):
    """What the entry point makes, called without arguments."""

    def check(self, grammar: Grammar) -> None:
        """Raises `GrammarError` if it is not served. Takes milliseconds and needs no vocabulary."""
        ...

    def load(self, model: str, vocab_size: int) -> Grammars:
        """For the model at this path (as in `model.path`). Raises `ModelError` if it has no tokenizer."""
        ...
