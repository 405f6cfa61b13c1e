"""What one choice of a chat says: its text through the parsers of reasoning and of tool calls. Pure."""

from __future__ import annotations

from typing import NamedTuple

from octavo.plugins.openai.structure import Must
from octavo.plugins.tools.contract import Call, Content, Parser, ReasoningParser, Said, ToolParser


class Manners(NamedTuple):
    """How the served model writes calls and reasoning."""

    tools: ToolParser
    reasoning: ReasoningParser | None = None

    def speech(self, names: frozenset[str], *, one_call: bool = False, must: Must | None = None) -> Speech:
        """For a fresh choice; `names` are the functions that it may call, `must` how it calls if it has to."""
        if must is not None:
            return Speech(None, must.parser(names), one_call)
        return Speech(
            self.reasoning() if self.reasoning is not None else None, self.tools(names) if names else None, one_call
        )


class Speech:
    """Text in, what it means out; with `one_call`, a second call is left out."""

    def __init__(self, reasoning: Parser | None, calls: Parser | None, one_call: bool) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._one_call = one_call
        self.calls = 0

    def feed(self, text: str) -> list[Said]:
        if not text:
            return []
        return self._counted(self._through(self._reasoning.feed(text) if self._reasoning else [Content(text)]))

    def finish(self) -> list[Said]:
        """What was held back."""
        said = self._through(self._reasoning.finish() if self._reasoning else [])
        return self._counted([*said, *(self._calls.finish() if self._calls else [])])

    def _through(self, said: list[Said]) -> list[Said]:
        if self._calls is None:
            return said
        out: list[Said] = []
        for item in said:
            out += self._calls.feed(item.text) if isinstance(item, Content) else [item]
        return out

    def _counted(self, said: list[Said]) -> list[Said]:
        kept: list[Said] = []
        for item in said:
            if isinstance(item, Call):
                if self._one_call and self.calls:
                    continue
                self.calls += 1
            kept.append(item)
        return kept
