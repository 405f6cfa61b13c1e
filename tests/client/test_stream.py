"""What waits for a consumer: joined when it lags, bounded by its backlog, and the same text in the end."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.client.stream import BEHIND, Backlog, Overrun, Piece, Stream
from octavo.core.messages import Row, TextLogprob, Usage


def rows(n: int, choices: int = 1) -> list[Row]:
    """`n` tokens of each choice, with log-probabilities, in turn."""
    found = []
    for i in range(n):
        for choice in range(choices):
            finish, usage = ("stop", Usage(1, n, 0)) if i == n - 1 else (None, None)
            entry = [TextLogprob(str(i), b"", -float(i), [])]
            first = [TextLogprob("p", b"p", 0.0, [])] if not i else None
            found.append(Row("r", choice, 0, i, [i], f"{i} ", finish, "", usage, entry, first))
    return found


def taken(stream: Stream) -> list[Piece]:
    async def all_of_it() -> list[Piece]:
        return [piece async for piece in stream]

    return anyio.run(all_of_it)


def stream_of(n: int) -> Stream:
    stream = Stream("r", n, lambda _: None)
    stream.accept(1)
    return stream


@given(n=st.integers(1, 300), choices=st.integers(1, 3))
def test_a_lagging_consumer_gets_fewer_pieces_and_the_same_output(n: int, choices: int) -> None:
    stream = stream_of(choices)
    for row in rows(n, choices):
        stream.feed(row)
    pieces = taken(stream)
    assert len(pieces) <= min(n * choices, BEHIND + choices - 1)
    for choice in range(choices):
        mine = [piece for piece in pieces if piece.choice == choice]
        assert [token for piece in mine for token in piece.ids] == list(range(n))
        assert [piece.index for piece in mine] == [piece.ids[0] for piece in mine]
        assert "".join(piece.text for piece in mine) == "".join(f"{i} " for i in range(n))
        assert [entry.logprob for piece in mine for entry in piece.logprobs or ()] == [-float(i) for i in range(n)]
        assert [piece.finish for piece in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1].usage == Usage(1, n, 0)
        assert [bool(piece.prompt_logprobs) for piece in mine] == [True] + [False] * (len(mine) - 1)


def test_several_streams_share_a_backlog_and_what_is_taken_makes_room() -> None:
    told: list[str] = []
    backlog = Backlog(100_000, lambda: told.append("over"))
    first, second = stream_of(1), stream_of(1)
    first.bound(backlog)
    first.feed(rows(2)[0])
    already = backlog.waiting
    assert already > 0
    second.bound(backlog)
    for row in rows(20):
        second.feed(row)
    assert backlog.waiting > already
    taken(second)
    assert backlog.waiting == already
    assert not told


@given(before=st.integers(0, 200), after=st.integers(1, 50))
def test_what_waited_before_it_was_bound_never_counts(before: int, after: int) -> None:
    """However much that is, and however it is joined with what comes later."""
    told: list[str] = []
    backlog = Backlog(20_000, lambda: told.append("over"))
    stream = stream_of(1)
    fed = rows(before + after)
    for row in fed[:before]:
        stream.feed(row)
    stream.bound(backlog)
    assert backlog.waiting == 0
    for row in fed[before:]:
        stream.feed(row)
    assert backlog.waiting > 0
    assert [token for piece in taken(stream) for token in piece.ids] == list(range(before + after))
    assert backlog.waiting == 0
    assert not told


def test_one_too_many_ends_the_stream_and_is_told_once() -> None:
    told: list[str] = []
    backlog = Backlog(5_000, lambda: told.append("over"))
    stream = stream_of(1)
    stream.bound(backlog)
    for row in rows(1000):
        stream.feed(row)
        assert backlog.waiting <= 5_000
    assert told == ["over"]
    with pytest.raises(Overrun, match="5000 bytes"):
        taken(stream)


def test_who_gives_up_in_the_moment_in_which_its_patience_ends_leaves_nothing_behind() -> None:
    async def run() -> list[int]:
        stream = stream_of(1)
        hasty = asyncio.ensure_future(stream.take(0))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0, hasty.cancel)  # right behind its timer
        with pytest.raises(asyncio.CancelledError):
            await hasty
        patient = asyncio.ensure_future(stream.take(None))
        await asyncio.sleep(0)
        stream.feed(rows(1)[0])
        piece = await patient
        assert piece is not None, "it seemed to be over"
        return piece.ids

    assert asyncio.run(run()) == [0]
