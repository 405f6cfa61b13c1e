"""Tool calls as models write them: JSON, behind a marker or bare.

    hermes, qwen   text <tool_call>{"name": …, "arguments": {…}}</tool_call> text …
    mistral        text [TOOL_CALLS][{"name": …, "arguments": {…}}, …]
    llama3-json    <|python_tag|>?{"name": …, "parameters": {…}}; {…}
    json           the same without marks: an object, a list of them, or several

    START ──▶ TEXT ◀──▶ CALL ──▶ AFTER ──▶ CALL or TEXT

Bare JSON is a call only where the answer begins with it: later in a text it is an example of one. In every form,
something that names no function on offer is text.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, NamedTuple

from octavo.plugins.tools.contract import Call, Content, Form, Parser, Said
from octavo.plugins.tools.scan import JsonEnd, held


class _State(Enum):
    START = "start"
    TEXT = "text"
    CALL = "call"
    AFTER = "after"


class CallParser:
    """Text outside of calls goes through at once; a call is told when it is complete."""

    def __init__(self, form: Form, names: frozenset[str]) -> None:
        self._form = form
        self._names = names
        self._state = _State.START if form.bare else _State.TEXT
        self._text = ""
        """What is not told yet."""
        self._marker = ""
        """In CALL, what stands before `_text` and is text if no call follows."""
        self._end = JsonEnd()

    def feed(self, text: str) -> list[Said]:
        self._text += text
        said: list[Said] = []
        while self._step(said):
            pass
        return said

    def finish(self) -> list[Said]:
        rest = self._marker + self._text
        if self._state is _State.AFTER and self._form.closing.startswith(rest.strip()):
            rest = ""
        self._state, self._marker, self._text = _State.TEXT, "", ""
        return [Content(rest)] if rest else []

    def _step(self, said: list[Said]) -> bool:
        """Go on as far as one state goes; whether the next one may find something in what is left."""
        match self._state:
            case _State.START:
                return self._begin(skip_space=False)
            case _State.TEXT:
                return self._until_opening(said)
            case _State.CALL:
                return self._call(said)
            case _State.AFTER:
                return self._after()

    def _begin(self, *, skip_space: bool) -> bool:
        """A call may stand here; if none does, this is text."""
        text, opening = self._text.lstrip(), self._form.opening
        if not text or (text != opening and opening.startswith(text)):
            return False
        space = len(self._text) - len(text)
        if opening and text.startswith(opening):
            self._enter(space + len(opening))
        elif self._form.bare and text[0] in "{[":
            self._enter(space)
        else:
            self._state = _State.TEXT
            self._text = text if skip_space else self._text
        return True

    def _until_opening(self, said: list[Said]) -> bool:
        opening = self._form.opening
        at = self._text.find(opening) if opening else -1
        n = at if at >= 0 else len(self._text) - held(self._text, opening)
        if n:
            said.append(Content(self._text[:n]))
            self._text = self._text[n:]
        if at >= 0:
            self._enter(len(opening))
        return at >= 0

    def _enter(self, n: int) -> None:
        self._marker, self._text = self._text[:n], self._text[n:]
        self._state, self._end = _State.CALL, JsonEnd()

    def _call(self, said: list[Said]) -> bool:
        """Wait for the end of the JSON that must stand here."""
        text = self._text.lstrip()
        if not text:
            return False
        self._marker, self._text = self._marker + self._text[: len(self._text) - len(text)], text
        end = self._end.find(text) if text[0] in "{[" else "broken"
        if end == "more":
            return False
        n = 0 if end == "broken" else end
        calls = _calls(text[:n], self._names)
        said += calls or [Content(self._marker + text[:n])]
        self._marker, self._text = "", text[n:]
        self._state = _State.AFTER if calls else _State.TEXT
        return True

    def _after(self) -> bool:
        """The closing, and what may stand between two calls, are no text; nor is the space around them."""
        self._text = self._text.lstrip()
        for mark in (self._form.closing, self._form.between):
            if mark and self._text.startswith(mark):
                self._text = self._text[len(mark) :]
                return True
            if self._text and mark.startswith(self._text):
                return False
        return self._begin(skip_space=True)


def _calls(text: str, names: frozenset[str]) -> list[Call]:
    """The calls that `text` is; none if it is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [_one(item, names) for item in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if None not in calls else []


def _one(value: Any, names: frozenset[str]) -> Call | None:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or name not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a character, written as an escape: it stays one
        text = json.dumps(arguments)
    except ValueError:  # a number beyond all numbers
        return None
    return Call(name, text)


class Calls(NamedTuple):
    """The parsers of one form."""

    form: Form

    def __call__(self, names: frozenset[str]) -> Parser:
        return CallParser(self.form, names)


hermes = Calls(Form("<tool_call>", "</tool_call>"))
mistral = Calls(Form("[TOOL_CALLS]"))
llama3_json = Calls(Form("<|python_tag|>", between=";", bare=True))
bare_json = Calls(Form(bare=True))
