"""Finding things in a text that comes in pieces: a marker, and the end of a JSON value. Pure."""

from __future__ import annotations

from typing import Literal

_CLOSES = {"{": "}", "[": "]"}
_PLAIN = frozenset(' \t\r\n:,+-.0123456789abcdefghijklmnopqrstuvwxyzE"{}[]')
"""What may stand in JSON outside of its strings (the letters: true, false, null, an exponent)."""


def held(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`, which it does not contain."""
    for n in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:n]):
            return n
    return 0


class JsonEnd:
    """Looks for the end of a JSON object or list, character by character: brackets count, but not inside strings."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False
        self._at = 0

    def find(self, text: str) -> int | Literal["more", "broken"]:
        """The index after the value that `text` begins with. `text` is what it was at the last call, and more."""
        while self._at < len(text):
            char = text[self._at]
            self._at += 1
            if self._in_string:
                self._string(char)
            elif char not in _PLAIN:
                return "broken"
            elif char == '"':
                self._in_string = True
            elif char in _CLOSES:
                self._open.append(_CLOSES[char])
            elif char in "}]":
                if not self._open or self._open.pop() != char:
                    return "broken"
                if not self._open:
                    return self._at
        return "more"

    def _string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
