"""What a client sends when processes come and go, and that its consumers never notice."""

from __future__ import annotations

import pytest

from octavo.core.client.session import Peers, Session
from octavo.core.messages import (
    Accepted,
    Attach,
    Cancel,
    Deliver,
    Message,
    Params,
    Refused,
    Row,
    Submit,
    Text,
    Tokenize,
    Tokenized,
)


def submit(request_id: str = "r", n: int = 1) -> Submit:
    return Submit(client="c", request_id=request_id, attempt=0, prompt=Text("hi"), params=Params(n=n), received_ns=0)


FIRST = Peers(1, 1)


def session(peers: Peers | None = FIRST) -> Session:
    made = Session("c", "ipc://c")
    made.connect(peers)
    return made


def kinds(messages: list[Message]) -> list[str]:
    return [type(message).__name__ for message in messages]


def test_it_attaches_once_per_tokenizer_generation_and_before_all_else() -> None:
    s = Session("c", "ipc://c")
    s.submit(submit())
    assert kinds(s.connect(Peers(1, 1))) == ["Attach", "Submit"]
    assert kinds(s.connect(Peers(1, 1))) == []
    assert kinds(s.connect(Peers(1, 2))) == ["Submit"]
    assert kinds(s.connect(None)) == []
    assert kinds(s.connect(Peers(2, 2))) == ["Attach", "Submit"]


def test_a_request_is_held_while_nobody_can_take_it_and_is_then_attempt_0() -> None:
    s = session(None)
    assert s.submit(submit()) == []
    attach, first = s.connect(Peers(3, 3))
    assert isinstance(attach, Attach)
    assert isinstance(first, Submit)
    assert first.attempt == 0


@pytest.mark.parametrize("peers", [Peers(2, 1), Peers(1, 2)])
def test_a_lost_tokenizer_or_scheduler_resumes_with_what_was_delivered(peers: Peers) -> None:
    s = session()
    s.submit(submit(n=2))
    s.receive(Deliver([Row("r", 0, 0, 0, [7, 8], "ab"), Row("r", 1, 0, 0, [9], "c", "stop")]))
    s.connect(None)
    again = s.connect(peers)[-1]
    assert isinstance(again, Submit)
    assert again.attempt == 1
    assert [(d.choice, d.ids, d.finished) for d in again.delivered] == [(0, [7, 8], False), (1, [9], True)]
    stale, fresh = Row("r", 0, 0, 2, [5], "x"), Row("r", 0, 1, 2, [6], "y")
    assert s.receive(Deliver([stale, fresh])).news == [fresh]


def test_a_finished_request_is_not_resumed() -> None:
    s = session()
    s.submit(submit())
    s.receive(Deliver([Row("r", 0, 0, 0, [1], "a", "stop")]))
    assert kinds(s.connect(Peers(1, 2))) == []


def test_a_gap_resumes_at_once_and_only_once() -> None:
    s = session()
    s.submit(submit())
    late = [Row("r", 0, 0, 2, [3], "c"), Row("r", 0, 0, 3, [4], "d")]
    (again,) = s.receive(Deliver(late)).messages
    assert isinstance(again, Submit)
    assert again.attempt == 1


def test_a_gap_while_the_service_is_away_is_not_forgotten() -> None:
    s = session()
    s.submit(submit())
    s.connect(None)
    assert s.receive(Deliver([Row("r", 0, 0, 2, [3], "c")])).messages == []
    (again,) = s.connect(Peers(1, 1))
    assert isinstance(again, Submit)
    assert again.attempt == 1


def test_a_client_taken_for_gone_attaches_and_resumes() -> None:
    s = session()
    s.submit(submit())
    s.forgotten()
    attach, again = s.connect(Peers(1, 1))
    assert isinstance(attach, Attach)
    assert isinstance(again, Submit)
    assert again.attempt == 1


def test_a_cancel_reaches_whoever_survived() -> None:
    s = session()
    s.submit(submit())
    s.connect(None)
    assert s.cancel("r") == []
    sent = s.connect(Peers(2, 1))
    assert kinds(sent) == ["Attach", "Cancel"]
    assert isinstance(sent[1], Cancel)
    assert s.receive(Deliver([Row("r", 0, 0, 0, [1], "a")])).news == []


def test_verdicts_on_an_old_attempt_do_not_count() -> None:
    s = session()
    s.submit(submit())
    s.connect(Peers(1, 2))
    assert s.receive(Refused("r", 0, "prompt", "too late")).news == []
    assert s.receive(Accepted("r", 1, 2)).news != []


def test_a_question_is_asked_again_of_the_next_tokenizer() -> None:
    s = session()
    question = Tokenize("c", 5, Text("hi"))
    assert s.ask(question) == [question]
    assert question in s.connect(Peers(2, 1))
    assert s.receive(Tokenized(5, [1])).news != []
    assert s.receive(Tokenized(5, [1])).news == []
    assert question not in s.connect(Peers(3, 1))


def test_an_open_id_cannot_be_opened_again() -> None:
    s = session()
    s.submit(submit())
    with pytest.raises(ValueError, match="open already"):
        s.submit(submit())
