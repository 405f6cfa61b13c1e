"""What a parser of a model's text is: text in, in any pieces; what it means out.

A parser serves one choice. Whatever way the same text is cut, what comes out says the same: runs of `Content` (or
`Reasoning`) join to the same strings, and the same calls come in the same order between them. It never raises: text
that is no proper call is content.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias


class Content(NamedTuple):
    """Text for the reader."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote for itself."""

    text: str


class Call(NamedTuple):
    """A whole call: a client cannot take back half of one, and one that was cut off must not look complete."""

    name: str
    arguments: str
    """JSON of an object."""


Said: TypeAlias = Content | Reasoning | Call


class Parser(Protocol):
    """Of one choice."""

    def feed(self, text: str) -> list[Said]:
        """What is certain now that `text` has come."""
        ...

    def finish(self) -> list[Said]:
        """What was held back: the text has ended."""
        ...


class ToolParser(Protocol):
    """Entry point in `octavo.tool_parser`: makes the parser of a choice; `names` are the functions on offer.

    If it has a `form` with an opening and a closing, calls of `strict` functions can be held to their schema."""

    def __call__(self, names: frozenset[str]) -> Parser: ...


class Form(NamedTuple):
    """How a model marks its calls: what stands before, after and between them. `bare`: also without an opening, at
    the beginning of the answer."""

    opening: str = ""
    closing: str = ""
    between: str = ""
    bare: bool = False


class ReasoningParser(Protocol):
    """Entry point in `octavo.reasoning_parser`: makes the parser of a choice."""

    def __call__(self) -> Parser: ...
