"""Reasoning that models write before their answer: `<think>…</think>`.

`think` is for models that write the opening themselves, `think-open` for those whose chat template has written it.
"""

from __future__ import annotations

from octavo.plugins.tools.contract import Content, Parser, Reasoning, Said
from octavo.plugins.tools.scan import held

OPENING, CLOSING = "<think>", "</think>"


class ThinkParser:
    """Only what the answer begins with is reasoning; the white space after it belongs to nobody."""

    def __init__(self, *, inside: bool) -> None:
        self._text = ""
        self._inside = inside
        self._begun = inside
        """Whether reasoning has begun, or can no longer."""
        self._ended = False

    def feed(self, text: str) -> list[Said]:
        self._text += text
        if not self._begun and not self._begin():
            return []
        said: list[Said] = []
        if self._inside:
            at = self._text.find(CLOSING)
            n = at if at >= 0 else len(self._text) - held(self._text, CLOSING)
            if n:
                said.append(Reasoning(self._text[:n]))
            self._text = self._text[n:]
            if at < 0:
                return said
            self._text, self._inside, self._ended = self._text[len(CLOSING) :], False, True
        if self._ended:
            self._text = self._text.lstrip()
            self._ended = not self._text
        if self._text:
            said.append(Content(self._text))
            self._text = ""
        return said

    def finish(self) -> list[Said]:
        rest, self._text = self._text, ""
        if not rest:
            return []
        return [Reasoning(rest) if self._inside else Content(rest)]

    def _begin(self) -> bool:
        """Whether it is known now if the text begins with reasoning."""
        text = self._text.lstrip()
        if OPENING.startswith(text) and text != OPENING:
            return False
        self._begun = True
        if text.startswith(OPENING):
            self._inside, self._text = True, text[len(OPENING) :]
        return True


def think() -> Parser:
    return ThinkParser(inside=False)


def think_open() -> Parser:
    return ThinkParser(inside=True)
