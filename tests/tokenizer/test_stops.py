"""Stop strings end a text at the same place however it comes, and nothing that may belong to one is let go."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.core.tokenizer.detokenize import Piece
from octavo.core.tokenizer.stops import Released, StopFilter, StopStrings

TEXTS = st.lists(st.text("ab", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=3).map(tuple)


def numbered(texts: list[str]) -> list[Piece]:
    return [Piece([i], text) for i, text in enumerate(texts)]


def run(stops: tuple[str, ...], pieces: list[Piece]) -> list[Released]:
    """What is released for each piece, up to the end."""
    stop_filter = StopFilter(StopStrings(stops))
    released = []
    for piece in pieces:
        released.append(stop_filter.push(piece))
        if released[-1].stopped:
            return released
    return [*released, stop_filter.flush()]


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, int | None]:
    """By definition: the text before the stop string that is complete first, and how many characters complete it."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], end
    return text, None


@settings(max_examples=200, deadline=None)
@given(TEXTS, STOPS)
@example(["aa", "ab"], ("aab",))
@example(["abab", "aabb"], ("abaabb", "babb"))
def test_the_text_ends_where_the_definition_says(texts: list[str], stops: tuple[str, ...]) -> None:
    released = run(stops, numbered(texts))
    text, end = cut("".join(texts), stops)
    ids = [i for one in released for i in one.ids]
    assert "".join(one.text for one in released) == text
    assert released[-1].stopped == (end is not None)
    if end is None:
        assert ids == list(range(len(texts)))
    else:
        completing = next(i for i in range(len(texts)) if len("".join(texts[: i + 1])) >= end)
        assert ids == list(range(completing + 1))


@settings(max_examples=200, deadline=None)
@given(TEXTS, STOPS)
def test_ids_and_their_text_are_released_together(texts: list[str], stops: tuple[str, ...]) -> None:
    for one in run(stops, numbered(texts)):
        if not one.stopped:
            assert one.text == "".join(texts[i] for i in one.ids)


@settings(max_examples=200, deadline=None)
@given(TEXTS, STOPS)
def test_a_fresh_filter_goes_on_from_whatever_was_released(texts: list[str], stops: tuple[str, ...]) -> None:
    whole = run(stops, numbered(texts))
    done = 0
    for i, one in enumerate(whole):
        rest = run(stops, numbered(texts)[done:])
        assert "".join(r.text for r in rest) == "".join(r.text for r in whole[i:])
        assert [n for r in rest for n in r.ids] == [n for r in whole[i:] for n in r.ids]
        done += len(one.ids)


@settings(max_examples=200, deadline=None)
@given(TEXTS, STOPS)
def test_nothing_is_held_without_need(texts: list[str], stops: tuple[str, ...]) -> None:
    """The piece held longest has a character that may begin a stop string."""
    stop_filter = StopFilter(StopStrings(stops))
    seen, released = "", 0
    for piece in numbered(texts):
        one = stop_filter.push(piece)
        if one.stopped:
            return
        seen += piece.text
        released += len(one.ids)
        if released <= piece.ids[0]:
            may_begin = max(n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n]))
            after_oldest = sum(len(text) for text in texts[released + 1 : piece.ids[0] + 1])
            assert may_begin > after_oldest
