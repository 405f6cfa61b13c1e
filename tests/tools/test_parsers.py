"""Tool calls and reasoning come out the same however the text is cut, and what is no call is text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.plugins.tools.calls import bare_json, hermes, llama3_json, mistral
from octavo.plugins.tools.contract import Call, Content, Parser, Reasoning, Said, ToolParser
from octavo.plugins.tools.think import think, think_open

NAMES = frozenset({"f", "look_up"})
ARGUMENTS = {"a": 'br{ac}e " \\ ] </tool_call>', "é": "\u00e9", "list": [1, {"x": None}]}
CALL = Call("f", json.dumps(ARGUMENTS, ensure_ascii=False))
AS_JSON = json.dumps({"name": "f", "arguments": ARGUMENTS})
"""With "\\u00e9" escaped, as some models write it."""
SIMPLE = Call("look_up", "{}")


def joined(said: list[Said]) -> list[Said]:
    """Neighbouring runs of text as one."""
    out: list[Said] = []
    for item in said:
        match out[-1:], item:
            case [Content(before)], Content(text):
                out[-1] = Content(before + text)
            case [Reasoning(before)], Reasoning(text):
                out[-1] = Reasoning(before + text)
            case _:
                out.append(item)
    return out


def said(parser: Parser, pieces: list[str]) -> list[Said]:
    return joined([*(item for piece in pieces for item in parser.feed(piece)), *parser.finish()])


def cut(text: str, n: int) -> list[str]:
    return [text[i : i + n] for i in range(0, len(text), n)]


CASES: list[tuple[ToolParser, str, list[Said]]] = [
    (hermes, f"<tool_call>\n{AS_JSON}\n</tool_call>", [CALL]),
    (
        hermes,
        f'Let me see. <tool_call>{AS_JSON}</tool_call>\n<tool_call>{{"name": "look_up"}}</tool_call> ok',
        [Content("Let me see. "), CALL, SIMPLE, Content("ok")],
    ),
    (hermes, "a < b, <tool, <tool_call", [Content("a < b, <tool, <tool_call")]),
    (hermes, '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}', [Call("f", '{"a": "\\ud800"}')]),
    (mistral, f"[TOOL_CALLS] [{AS_JSON}, {AS_JSON}]", [CALL, CALL]),
    (llama3_json, f'<|python_tag|>{AS_JSON}; {{"name": "look_up", "parameters": {{}}}}', [CALL, SIMPLE]),
    (llama3_json, f" {AS_JSON}", [CALL]),
    (bare_json, f"[{AS_JSON}]\n", [CALL]),
    (bare_json, '{"answer": 3} is it', [Content('{"answer": 3} is it')]),
    (bare_json, f"It is {AS_JSON}", [Content(f"It is {AS_JSON}")]),
]


@pytest.mark.parametrize(("make", "text", "expected"), CASES)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 10_000])
def test_h25_calls_are_the_same_at_any_cut(make: ToolParser, text: str, expected: list[Said], n: int) -> None:
    assert said(make(NAMES), cut(text, n)) == expected


@pytest.mark.parametrize("n", [1, 3, 10_000])
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', 0),
        (f'<tool_call>{{"name": "f", "arguments": {{"a": 1}}</tool_call><tool_call>{AS_JSON}</tool_call>', 1),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', 1),
        ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', 0),
        ('<tool_call>{"name": "f", "arguments": "text"}</tool_call>', 0),
        ('<tool_call>{"name": ["f"]}</tool_call>', 0),
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', 0),
        ("<tool_call>no JSON</tool_call> and more", 0),
        ('<tool_call>{"name": "f", "argum', 0),
        ("<tool_call>", 0),
        ("</tool_call>", 0),
    ],
)
def test_h26_broken_calls_are_text_and_nothing_of_it_is_lost(text: str, calls: int, n: int) -> None:
    found = said(hermes(NAMES), cut(text, n))
    assert sum(isinstance(item, Call) for item in found) == calls
    content = "".join(item.text for item in found if isinstance(item, Content))
    if not calls:
        assert content == text
    else:
        assert content
        assert text.startswith(content) or text.endswith(content)


PIECES = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "{", "}", "[", "]", '"', "\\", "x", " ", "\n", ";", ",", AS_JSON, "<",
         "<think>", "</think>", '{"name": "look_up"}', "[TOOL_CALLS]", "<|python_tag|>", "<tool"]
    ),
    max_size=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(PIECES, st.randoms(use_true_random=False))
def test_any_text_at_any_cut_says_the_same_as_whole(pieces: list[str], random: object) -> None:
    text = "".join(pieces)
    at = sorted(random.randrange(len(text) + 1) for _ in range(5))  # type: ignore[attr-defined]
    parts = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    for make in (hermes, mistral, llama3_json, bare_json):
        assert said(make(NAMES), parts) == said(make(NAMES), [text])
    for parser in (think, think_open):
        assert said(parser(), parts) == said(parser(), [text])


@pytest.mark.parametrize("n", [1, 2, 10_000])
def test_reasoning_comes_before_the_answer(n: int) -> None:
    assert said(think(), cut("<think>why</think>\n\nso", n)) == [Reasoning("why"), Content("so")]
    assert said(think(), cut("no <think> here", n)) == [Content("no <think> here")]
    assert said(think_open(), cut("why</think>so", n)) == [Reasoning("why"), Content("so")]
    assert said(think_open(), cut("cut of", n)) == [Reasoning("cut of")]
