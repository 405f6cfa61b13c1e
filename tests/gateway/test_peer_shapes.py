"""That the comparison with another server sees what differs (`tests/peers`)."""

from __future__ import annotations

from typing import Any

from tests.peers.shapes import Allowed, Answer, Difference, answers_apart, values_apart

CHOICE = {"index": 0, "text": "a", "finish_reason": "stop", "logprobs": {"tokens": ["a"], "token_logprobs": [-0.5]}}
BODY = {"id": "x", "choices": [CHOICE], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}


def answer(**choice: Any) -> Answer:
    return Answer(200, "application/json", {**BODY, "choices": [{**CHOICE, **choice}]}, [], done=False)


def test_the_same_answer_has_no_difference_whatever_its_ids() -> None:
    other = Answer(200, "application/json", {**BODY, "id": "y"}, [], done=False)
    assert answers_apart("c", answer(), other) == values_apart("c", answer(), other, 1e-3) == []


def test_a_missing_field_is_told_once_and_not_what_is_below_it() -> None:
    (one,) = answers_apart("c", answer(), answer(logprobs=None))[:1]
    assert (one.path, one.ours, one.theirs) == ("choices[].logprobs", "object", "null")
    gone = Answer(200, "application/json", {"id": "x", "usage": BODY["usage"]}, [], done=False)
    assert [d.path for d in answers_apart("c", answer(), gone)] == ["choices"]


def test_other_texts_finishes_and_scores_are_seen() -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.6]}
    other = answer(text="b", finish_reason="length", logprobs=logprobs)
    found = values_apart("c", answer(), other, 1e-3)
    assert [d.path for d in found] == ["(texts)", "(finishes)", "(logprobs)"]


def test_the_end_of_a_stream_is_compared() -> None:
    chunks = [{"choices": [{"index": 0, "text": "a", "finish_reason": None}]}]
    ended = [*chunks, {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}]
    ours, theirs = (Answer(200, "text/event-stream", None, part, done=True) for part in (chunks, ended))
    assert "(last chunk)" in [d.path for d in answers_apart("c", ours, theirs)]


def test_what_is_allowed_is_a_pattern_of_case_and_path() -> None:
    allowed = Allowed("chat*", "choices[].*", "why")
    assert allowed.covers(Difference("chat: x", "choices[].stop_reason", "", ""))
    assert not allowed.covers(Difference("chat: x", "usage", "", ""))
    assert not allowed.covers(Difference("models", "choices[].x", "", ""))
