"""The tokenizer's core between clients and a scheduler that the test plays itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.client.journal import Journal, Verdict
from octavo.core.grammar import GrammarError
from octavo.core.machine import Outputs
from octavo.core.messages import (
    Accepted,
    Attach,
    Body,
    Cancel,
    Chat,
    Deliver,
    Delivered,
    Deltas,
    Detokenize,
    Detokenized,
    End,
    Enqueue,
    Facts,
    Grammar,
    Ids,
    Params,
    PeerDown,
    PeerUp,
    Prompt,
    PromptLogprobs,
    Refused,
    Role,
    Row,
    Sampling,
    Stop,
    Submit,
    Text,
    Tick,
    Tokenize,
    Tokenized,
    TokenLogprob,
    Usage,
    col,
    decode,
    encode,
)
from octavo.core.tokenizer.core import TokenizerCore, cache_namespace
from octavo.core.tokenizer.vocabulary import Vocabulary
from octavo.core.trace.catalogue import Event

EOS = 257
CONTEXT = 64


def facts(vocabulary: Vocabulary, context: int = CONTEXT) -> Facts:
    return Facts(
        model_id="test",
        context=context,
        vocab_size=vocabulary.size,
        block_size=16,
        total_blocks=100,
        block_bytes=1,
        cache_seed=b"weights",
        serves=("restrictions",),
    )


@dataclass
class World:
    """A core, and everything that it has sent, by receiver. Messages travel encoded both ways, as in the daemon."""

    core: TokenizerCore
    scheduler: list[Any] = field(default_factory=list)
    clients: dict[str, list[Any]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    now_ns: int = 1000

    def tell(self, message: Body) -> Outputs:
        self.now_ns += 1
        outputs = self.core.apply(self.now_ns, decode(encode(message)))
        for outbound in outputs.messages:
            received = decode(encode(outbound.message))
            if outbound.role is Role.SCHEDULER:
                self.scheduler.append(received)
            else:
                assert outbound.role is Role.CLIENT
                self.clients.setdefault(outbound.name, []).append(received)
        self.events += outputs.events
        return outputs

    def submit(self, prompt: Prompt | None = None, *, request_id: str = "r", **rest: Any) -> Enqueue | None:
        """Submit, and what came out at the scheduler."""
        before = len(self.scheduler)
        params = rest.pop("params", Params())
        fields: dict[str, Any] = {"client": "c", "attempt": 0, "received_ns": self.now_ns} | rest
        self.tell(Submit(request_id=request_id, prompt=prompt or Ids([1, 2, 3]), params=params, **fields))
        return self.scheduler[-1] if len(self.scheduler) > before else None

    def accept(self, prompt: Prompt | None = None, **rest: Any) -> Enqueue:
        enqueue = self.submit(prompt, **rest)
        assert enqueue is not None, self.clients
        return enqueue

    def deltas(
        self,
        request: Enqueue,
        tokens: list[int],
        index: int = 0,
        *,
        choice: int = 0,
        end: str | None = None,
        logprobs: Sequence[TokenLogprob | None] | None = None,
    ) -> None:
        ends = [End(request.handle, choice, request.attempt, end, "")] if end else []
        row = (request.handle, choice, request.attempt, index, len(tokens))
        handle, number, attempt, start, n = (col([value]) for value in row)
        entries = None if logprobs is None else list(logprobs)
        self.tell(Deltas(1, handle, number, attempt, start, n, col([16]), col(tokens), ends, entries))

    def rows(self, client: str = "c") -> list[Row]:
        return [row for m in self.clients.get(client, []) if isinstance(m, Deliver) for row in m.rows]

    def text(self, choice: int = 0) -> str:
        return "".join(row.text for row in self.rows() if row.choice == choice)

    def refusal(self) -> Refused:
        last = self.clients["c"][-1]
        assert isinstance(last, Refused), last
        return last


def world(vocabulary: Vocabulary, context: int = CONTEXT) -> World:
    made = World(TokenizerCore(vocabulary, facts(vocabulary, context)))
    made.tell(PeerUp(Role.SCHEDULER, 1))
    return made


@pytest.fixture
def w(ghost: Vocabulary) -> World:
    return world(ghost)


# ── an ordinary life ─────────────────────────────────────────────────────────────────────────────


def test_a_request_lives_from_text_to_text(w: World) -> None:
    w.tell(Attach("c", "ipc://somewhere"))
    params = Params(max_tokens=5, n=2, stop_ids=(9,))
    enqueue = w.accept(Text("hi"), params=params, tenant="t", priority=3, trace_id="tr")
    assert enqueue.ids.tolist() == [*b"hi"]
    assert (enqueue.n, enqueue.max_tokens, enqueue.stop_ids) == (2, 5, [9, EOS])
    assert (enqueue.tenant, enqueue.priority, enqueue.trace_id) == ("t", 3, "tr")
    assert enqueue.namespace == cache_namespace("t", b"weights")
    assert isinstance(accepted := w.clients["c"][0], Accepted)
    assert accepted.prompt_tokens == 2

    w.deltas(enqueue, [*b"ab"])
    w.deltas(enqueue, [*b"XY"], choice=1)
    w.deltas(enqueue, [*b"cd", EOS], 2, end="stop")
    assert w.core.live == 1
    w.deltas(enqueue, [*b"Z"], 2, choice=1, end="length")
    assert w.core.live == 0
    assert (w.text(0), w.text(1)) == ("abcd", "XYZ")
    last = [row for row in w.rows() if row.finish]
    assert [(row.choice, row.finish, row.usage) for row in last] == [
        (0, "stop", Usage(2, 5, 16)),
        (1, "length", Usage(2, 3, 16)),
    ]
    names = [type(event).__name__ for event in w.events]
    assert names == ["RequestReceived", "RequestTokenized", "RequestDelivered", "RequestDelivered"]


def test_each_client_gets_one_message_per_step(w: World) -> None:
    first, second = w.accept(client="c", request_id="1"), w.accept(client="d", request_id="2")
    third = w.accept(client="c", request_id="3")
    handles = col([r.handle for r in (first, second, third)])
    zeros = col([0, 0, 0])
    w.tell(Deltas(1, handles, zeros, zeros, zeros, col([1, 2, 1]), zeros, col([*b"abbc"]), []))
    assert [[row.text for row in w.rows(client)] for client in "cd"] == [["a", "c"], ["bb"]]
    assert sum(isinstance(message, Deliver) for message in w.clients["c"]) == 1


def test_log_probabilities_travel_with_their_tokens(w: World) -> None:
    enqueue = w.accept(params=Params(sampling=Sampling(logprobs=2), stop=("ab",)))
    thumb = [*"👍".encode()]
    known = [TokenLogprob(token, -token / 10, [token, 0x62], [-0.5, -1.5]) for token in [*thumb, 0x61, 0x63]]
    w.deltas(enqueue, thumb[:2], logprobs=known[:2])
    w.deltas(enqueue, [*thumb[2:], 0x61], 2, logprobs=known[2:5])
    w.deltas(enqueue, [0x63], 5, end="length", logprobs=known[5:])
    found = [one for row in w.rows() for one in row.logprobs or []]
    assert all(len(row.ids) == len(row.logprobs or []) for row in w.rows())
    assert [one.logprob for one in found] == [one.logprob for one in known]
    assert b"".join(one.data for one in found) == "👍ac".encode()
    assert found[4].token == "a"
    assert found[4].top == [("a", b"a", -0.5), ("b", b"b", -1.5)]


def test_questions_are_answered_to_who_asked(w: World) -> None:
    w.tell(Tokenize("c", 1, Chat([{"role": "user", "content": "é"}])))
    w.tell(Detokenize("d", 2, w.clients["c"][-1].ids))
    w.tell(Tokenize("c", 3, Chat([])))
    w.tell(Detokenize("d", 4, [5, 100_000]))
    answered, refused = w.clients["c"]
    assert isinstance(answered, Tokenized)
    assert answered.ids[0] == 256
    assert refused.error is not None
    assert "no messages" in refused.error
    answered, refused = w.clients["d"]
    assert isinstance(answered, Detokenized)
    assert answered.text == "<|start|>user<|sep|>é<|end|><|start|>assistant<|sep|>"
    assert refused.error is not None
    assert "100000" in refused.error


# ── the cases ────────────────────────────────────────────────────────────────────────────────────


def test_h01_no_letter_of_a_stop_string_is_sent(w: World) -> None:
    enqueue = w.accept(params=Params(stop=("DEFGHIJ",)))
    sent = []
    for index, token in enumerate(b"ABCDEFGHIJ"):
        w.deltas(enqueue, [token], index)
        sent.append(w.text())
    assert sent == ["A", "AB"] + ["ABC"] * 8
    stop = w.scheduler[-1]
    assert isinstance(stop, Stop)
    assert (stop.request_id, stop.choice, stop.index) == ("r", 0, 9)
    last = w.rows()[-1]
    assert (last.finish, last.ids, last.usage) == ("stop", [*b"DEFGHIJ"], Usage(3, 10, 16))
    assert w.core.live == 0


def test_h02_a_stop_string_over_several_tokens(smollm: Vocabulary) -> None:
    w = world(smollm)
    enqueue = w.accept(params=Params(stop=("beta gamma",)))
    ids = smollm.encode("Repeat: alpha beta gamma delta")
    for index, token in enumerate(ids):
        w.deltas(enqueue, [token], index)
    assert w.text() == "Repeat: alpha "
    assert w.rows()[-1].finish == "stop"


@pytest.mark.parametrize("text", ["ok 👍🏽 done", "👩‍👩‍👧‍👦 你好"])
def test_h03_streams_have_whole_characters(vocabulary: Vocabulary, text: str) -> None:
    w = world(vocabulary)
    ids = vocabulary.encode(text)
    enqueue = w.accept()
    for index, token in enumerate(ids):
        w.deltas(enqueue, [token], index, end="length" if index == len(ids) - 1 else None)
    assert w.text() == text
    assert not any("\N{REPLACEMENT CHARACTER}" in row.text for row in w.rows())


@pytest.mark.parametrize(
    ("skip", "stop", "text"),
    [(True, (), "hi"), (False, (), "hi<|im_end|>"), (True, ("<|im_end|>",), "hi"), (False, ("<|im_end|>",), "hi")],
)
def test_h04_an_end_token_ends_and_shows_only_if_asked_for(
    smollm: Vocabulary, skip: bool, stop: tuple[str, ...], text: str
) -> None:
    w = world(smollm)
    enqueue = w.accept(Chat([{"role": "user", "content": "hi"}]), params=Params(skip_special_tokens=skip, stop=stop))
    assert 2 in enqueue.stop_ids
    hi = smollm.encode("hi")
    w.deltas(enqueue, [*hi, 2], end="stop")
    assert w.text() == text
    assert [row.finish for row in w.rows()] == ["stop"]
    assert w.rows()[0].usage == Usage(enqueue.ids.size, len(hi) + 1, 16)


@pytest.mark.parametrize(("skip", "text"), [(True, "a"), (False, "ab")])
def test_an_ordinary_token_that_ends_an_answer_is_no_part_of_it_either(w: World, skip: bool, text: str) -> None:
    enqueue = w.accept(Text("b"), params=Params(skip_special_tokens=skip, stop_ids=(ord("b"),)))
    w.deltas(enqueue, [*b"ab"], end="stop")
    assert w.text() == text
    assert [token for row in w.rows() for token in row.ids] == [*b"ab"]


def test_h35_other_weights_share_no_prefix() -> None:
    """Whatever is computed otherwise has a seed of its own; adapters, once there are some, will too."""
    spaces = {cache_namespace(tenant, seed) for tenant in ("", "a", "aa") for seed in (b"w", b"w1", b"aw")}
    assert len(spaces) == 9


# ── exactly once ─────────────────────────────────────────────────────────────────────────────────


def test_any_output_resumed_anywhere_reads_the_same(ghost: Vocabulary) -> None:
    """Cut into any steps, the scheduler lost at any of them: ids, text and finish are as without."""
    output = st.lists(st.sampled_from([*b"abc", *"é👍".encode(), 256]), min_size=1, max_size=25)
    stops = st.lists(st.text("abcé", min_size=1, max_size=4), max_size=2).map(tuple)

    def play(tokens: list[int], params: Params, steps: list[int], lost: set[int]) -> tuple[str, list[int], str | None]:
        w, journal = world(ghost), Journal(1)
        request: Enqueue = w.accept(params=params)
        text, seen, generation = "", 0, 1
        ids: list[int] = []
        finish: str | None = None
        for number, size in enumerate([*steps, len(tokens)]):
            done = sum(steps[:number]) if number not in lost else 0
            at = max(len(request.delivered[0]), min(done, len(tokens)))
            upto = max(at, min(sum(steps[:number]) + size, len(tokens)))
            w.deltas(request, tokens[at:upto], at, end="length" if upto == len(tokens) else None)
            for row in w.rows()[seen:]:
                assert journal.take(row) is Verdict.TAKEN
                text, ids, finish = text + row.text, ids + row.ids, row.finish
            seen = len(w.rows())
            if finish:
                break
            if number + 1 in lost:
                generation += 1
                w.tell(PeerDown(Role.SCHEDULER))
                w.tell(PeerUp(Role.SCHEDULER, generation))
                delivered = journal.resume()
                request = w.accept(params=params, attempt=journal.attempt, delivered=delivered)
        assert w.core.live == 0
        return text, ids, finish

    @settings(max_examples=200, deadline=None)
    @given(output, stops, st.booleans(), st.lists(st.integers(1, 4), max_size=10), st.sets(st.integers(1, 10)))
    def holds(tokens: list[int], stop: tuple[str, ...], skip: bool, steps: list[int], lost: set[int]) -> None:
        params = Params(stop=stop, skip_special_tokens=skip)
        plain = play(tokens, params, [], set())
        assert play(tokens, params, steps, lost) == plain
        whole = ghost.decode(tokens, skip)
        assert plain[0] == whole if plain[2] == "length" else whole.startswith(plain[0])

    holds()


def test_tokens_that_come_again_are_skipped(w: World) -> None:
    enqueue = w.accept()
    w.deltas(enqueue, [*b"abc"])
    w.deltas(enqueue, [*b"abc"])
    w.deltas(enqueue, [*b"bcd"], 1)
    assert w.text() == "abcd"


def test_lost_tokens_make_the_client_resume(w: World) -> None:
    enqueue, journal = w.accept(), Journal(1)
    w.deltas(enqueue, [*b"ab"])
    w.deltas(enqueue, [*b"de"], 3, end="stop")
    assert [journal.take(row) for row in w.rows()] == [Verdict.TAKEN, Verdict.GAP]
    assert w.text() == "ab"
    resumed = w.accept(attempt=1, delivered=journal.resume())
    assert resumed.delivered == [[*b"ab"]]


def test_a_later_attempt_fences_the_earlier(w: World) -> None:
    first = w.accept()
    w.deltas(first, [*b"ab"])
    second = w.accept(attempt=2, delivered=[Delivered(0, [*b"ab"], False)])
    assert w.submit(attempt=1) is None
    assert w.submit(attempt=2) is None
    w.deltas(first, [*b"OLD"], 2, end="length")
    w.deltas(second, [*b"cd"], 2)
    assert w.text() == "abcd"
    assert w.core.live == 1


def test_a_resume_tells_the_scheduler_what_each_choice_has(w: World) -> None:
    delivered = [Delivered(2, [7, 8], False), Delivered(0, [5], True)]
    enqueue = w.accept(params=Params(n=3), attempt=1, delivered=delivered)
    assert (enqueue.delivered, enqueue.finished) == ([[5], [], [7, 8]], [True, False, False])
    w.deltas(enqueue, [9], 1, choice=0, end="stop")
    assert w.rows() == []


@pytest.mark.parametrize(("ids", "finish"), [([97, EOS], "stop"), ([97, 98, 99], "length")])
def test_a_choice_of_which_only_the_end_was_lost_ends_at_once(w: World, ids: list[int], finish: str) -> None:
    assert w.submit(params=Params(max_tokens=3), attempt=1, delivered=[Delivered(0, ids, False)]) is None
    row = w.rows()[0]
    assert (row.index, row.ids, row.finish, row.usage) == (len(ids), [], finish, Usage(3, len(ids), 0))
    assert w.core.live == 0


# ── losses ───────────────────────────────────────────────────────────────────────────────────────


def test_what_is_submitted_while_the_scheduler_is_away_is_sent_when_it_is_back(w: World) -> None:
    w.tell(PeerDown(Role.SCHEDULER))
    assert w.submit(request_id="1") is None
    assert w.submit(request_id="2") is None
    assert [type(message) for message in w.clients["c"]] == [Accepted, Accepted]
    w.tell(PeerUp(Role.SCHEDULER, 2))
    assert [message.request_id for message in w.scheduler] == ["1", "2"]
    w.deltas(w.scheduler[0], [97])
    assert w.text() == "a"


@pytest.mark.parametrize("told", [True, False])
def test_a_lost_scheduler_keeps_only_what_it_never_answered(w: World, told: bool) -> None:
    w.deltas(w.accept(request_id="answered"), [97])
    w.accept(request_id="unanswered")
    if told:
        w.tell(PeerDown(Role.SCHEDULER))
    sent = len(w.scheduler)
    w.tell(PeerUp(Role.SCHEDULER, 2))
    assert [message.request_id for message in w.scheduler[sent:]] == ["unanswered"]
    assert w.core.live == 1


def test_the_same_scheduler_is_not_told_again(w: World) -> None:
    w.accept()
    w.tell(PeerUp(Role.SCHEDULER, 1))
    assert len(w.scheduler) == 1


def test_a_client_that_is_gone_takes_its_requests_along(w: World) -> None:
    mine = w.accept(request_id="mine", client="gone")
    w.accept(request_id="other")
    w.tell(PeerDown(Role.CLIENT, "gone"))
    assert [m.request_id for m in w.scheduler if isinstance(m, Cancel)] == ["mine"]
    w.deltas(mine, [97])
    assert w.rows("gone") == []
    assert w.core.live == 1


@pytest.mark.parametrize("scheduler", [True, False])
def test_a_cancel_ends_every_choice(w: World, scheduler: bool) -> None:
    if not scheduler:
        w.tell(PeerDown(Role.SCHEDULER))
    enqueue = w.submit(params=Params(n=2, stop=("abc",)))
    if enqueue:
        w.deltas(enqueue, [*b"ab"])
    w.tell(Cancel("r"))
    assert isinstance(w.scheduler[-1], Cancel) if scheduler else w.scheduler == []
    assert [(row.choice, row.text, row.finish) for row in w.rows()] == [
        (0, "ab" if scheduler else "", "cancelled"),
        (1, "", "cancelled"),
    ]
    assert w.core.live == 0
    w.tell(PeerUp(Role.SCHEDULER, 2))
    assert not any(isinstance(message, Enqueue) for message in w.scheduler[1:])


def test_a_cancel_of_what_is_not_known_here_goes_to_the_scheduler(w: World) -> None:
    w.tell(Cancel("from before our restart"))
    assert [m.request_id for m in w.scheduler] == ["from before our restart"]
    assert w.clients == {}


def test_a_refusal_of_the_scheduler_reaches_the_client(w: World) -> None:
    w.accept()
    w.tell(Refused("r", 7, "prompt", "of another attempt"))
    w.tell(Refused("r", 0, "prompt", "never fits", "too_large"))
    assert (w.refusal().reason, w.refusal().code) == ("never fits", "too_large")
    assert w.core.live == 0


def test_what_is_not_for_the_tokenizer_changes_nothing(w: World) -> None:
    w.accept()
    before = len(w.scheduler)
    for stray in (Tick(), Accepted("r", 0, 1), Deliver([]), PeerUp(Role.CLIENT, 0, "c"), w.scheduler[0]):
        assert w.tell(stray) == Outputs([], [])
    assert len(w.scheduler) == before


# ── what is refused ──────────────────────────────────────────────────────────────────────────────

SAMPLING: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.1}),
    ("top_p", {"top_p": math.nan}),
    ("min_p", {"min_p": -0.1}),
    ("min_p", {"min_p": 1.5}),
    ("typical_p", {"typical_p": 0.0}),
    ("typical_p", {"typical_p": math.inf}),
    ("top_k", {"top_k": -2}),
    ("repetition_penalty", {"repetition": 0.0}),
    ("repetition_penalty", {"repetition": math.inf}),
    ("repetition_penalty", {"repetition": math.ulp(0.0)}),  # a logit over it is no number
    ("presence_penalty", {"presence": 2.5}),
    ("presence_penalty", {"presence": math.nan}),
    ("frequency_penalty", {"frequency": -math.inf}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -2}),
]


@pytest.mark.parametrize(("name", "changes"), SAMPLING)
def test_sampling_out_of_range_is_refused_by_field(w: World, name: str, changes: dict[str, Any]) -> None:
    assert w.submit(params=Params(sampling=Sampling(**changes))) is None
    assert w.refusal().field == name
    assert str(next(iter(changes.values()))) in w.refusal().reason


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("n", {"n": 0}),
        ("n", {"n": 129}),
        ("max_tokens", {"max_tokens": 0}),
        ("stop", {"stop": ("a", "")}),
        ("stop", {"stop": ("x" * 2000,)}),
        ("stop", {"stop": ("x",) * 65}),
        ("stop_token_ids", {"stop_ids": (-1,)}),
        ("cache_keep_s", {"keep_s": -1.0}),
        ("cache_keep_s", {"keep_s": math.inf}),
        ("cache_keep_s", {"keep_s": math.nan}),
        ("min_tokens", {"sampling": Sampling(min_tokens=2**31)}),
    ],
)
def test_parameters_out_of_range_are_refused_by_field(w: World, name: str, changes: dict[str, Any]) -> None:
    assert w.submit(params=Params(**changes)) is None
    assert w.refusal().field == name


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("priority", -(2**31) + 1, 2**31 - 1),
        ("attempt", 0, 2**31 - 1),
        ("received_ns", -(2**63) + 1, 2**63 - 1),
        ("deadline_ns", -(2**63) + 1, 2**63 - 1),
    ],
)
def test_numbers_that_no_column_holds_are_refused_by_field(w: World, name: str, least: int, most: int) -> None:
    def submit(value: int) -> Enqueue | None:
        given: dict[str, Any] = {name: value}
        return w.submit(request_id=str(value), **given)

    assert submit(least) is not None
    assert submit(most) is not None
    assert submit(most + 1) is None
    assert w.refusal().field == name
    assert w.core.live == 2


def test_a_top_k_of_more_than_any_vocabulary_is_all_of_it(w: World) -> None:
    assert w.accept(params=Params(sampling=Sampling(top_k=2**40))).sampling.top_k == 2**31 - 1


@pytest.mark.parametrize(
    ("name", "code", "prompt"),
    [
        ("prompt", "invalid_value", Text("")),
        ("prompt", "invalid_value", Ids([])),
        ("prompt", "invalid_value", Ids([1, 259])),
        ("prompt", "invalid_value", Ids([-1])),
        ("prompt", "invalid_value", Ids([2**40])),
        ("prompt", "context_length_exceeded", Ids([1] * CONTEXT)),
        ("prompt", "context_length_exceeded", Text("a" * 10_000)),
        ("messages", "invalid_value", Chat([])),
        ("messages", "context_length_exceeded", Chat([{"role": "user", "content": "a" * CONTEXT}])),
    ],
)
def test_prompts_that_cannot_be_served_are_refused_by_field(w: World, name: str, code: str, prompt: Prompt) -> None:
    assert w.submit(prompt) is None
    assert (w.refusal().field, w.refusal().code) == (name, code)
    assert type(w.events[-1]).__name__ == "RequestFailed"
    assert w.core.live == 0


def test_too_long_says_how_long_it_may_be(w: World) -> None:
    w.submit(Ids([1] * 70))
    assert all(number in w.refusal().reason for number in ("70", "64", "63"))
    assert w.submit(Ids([0] * (CONTEXT - 1))) is not None


@pytest.mark.parametrize(
    "delivered",
    [
        [Delivered(1, [], False)],
        [Delivered(0, [], False)] * 2,
        [Delivered(-1, [], False)],
        [Delivered(0, [999], False)],
    ],
)
def test_a_journal_that_does_not_fit_the_request_is_refused(w: World, delivered: list[Delivered]) -> None:
    assert w.submit(attempt=1, delivered=delivered) is None
    assert w.refusal().field == "delivered"


def test_one_refused_request_disturbs_no_other(w: World) -> None:
    good = w.accept(request_id="good")
    assert w.submit(Ids([-5]), request_id="bad") is None
    w.deltas(good, [97], end="length")
    assert w.text() == "a"


# ── what is passed on ────────────────────────────────────────────────────────────────────────────


def test_equal_spellings_become_one(w: World) -> None:
    enqueue = w.accept(params=Params(sampling=Sampling(top_k=-1, seed=-1)))
    assert (enqueue.sampling.top_k, enqueue.sampling.seed) == (0, 2**64 - 1)


@pytest.mark.parametrize(("asked", "given"), [(None, None), (5, 5), (1000, CONTEXT - 3)])
def test_an_answer_is_bounded_by_the_context(w: World, asked: int | None, given: int | None) -> None:
    assert w.accept(params=Params(max_tokens=asked)).max_tokens == given


def test_end_tokens_can_be_ignored(w: World) -> None:
    assert w.accept(params=Params(ignore_eos=True, stop_ids=(4,))).stop_ids == [4]


def test_prefixes_are_shared_within_a_tenant_and_a_model_only() -> None:
    spaces = {cache_namespace(tenant, seed) for tenant in ("", "a", "ab") for seed in (b"", b"b", b"w")}
    assert len(spaces) == 9
    assert {len(space) for space in spaces} == {16}


# ── what may be chosen, and the prompt's log-probabilities ───────────────────────────────────────


def test_bad_words_and_the_ends_become_ids(w: World) -> None:
    sampling = Sampling(min_tokens=3, banned=((9,),))
    enqueue = w.accept(params=Params(sampling=sampling, bad_words=("no",), stop_ids=(5,)))
    assert enqueue.sampling.banned == ((9,), tuple(b"no"), tuple(b" no"))
    assert enqueue.sampling.ends == (5, EOS)
    assert w.accept(request_id="2").sampling.ends == (EOS,)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (Params(sampling=Sampling(bias={10_000: 1.0})), "logit_bias"),
        (Params(sampling=Sampling(bias={1: 101.0})), "logit_bias"),
        (Params(sampling=Sampling(allowed=(-1,))), "allowed_token_ids"),
        (Params(sampling=Sampling(banned=((),))), "bad_words"),
        (Params(bad_words=("",)), "bad_words"),
        (Params(sampling=Sampling(min_tokens=-1)), "min_tokens"),
        (Params(sampling=Sampling(min_tokens=5), max_tokens=4), "min_tokens"),
        (Params(sampling=Sampling(prompt_logprobs=21)), "prompt_logprobs"),
        (Params(sampling=Sampling(prompt_logprobs=1)), "prompt_logprobs"),
    ],
)
def test_what_cannot_be_chosen_is_refused(w: World, params: Params, field: str) -> None:
    """The last one because the executor of this world serves no such thing."""
    assert w.submit(params=params) is None
    assert w.refusal().field == field


def test_no_stop_string_begins_before_the_least_output(w: World) -> None:
    enqueue = w.accept(params=Params(stop=("ab",), sampling=Sampling(min_tokens=3)))
    w.deltas(enqueue, [*b"abcab"])
    assert w.text() == "abc"
    assert w.rows()[-1].finish == "stop"


def test_the_prompts_logprobs_come_with_each_choices_first_row(ghost: Vocabulary) -> None:
    serving = msgspec.structs.replace(facts(ghost), serves=("prompt_logprobs",))
    w = World(TokenizerCore(ghost, serving))
    w.tell(PeerUp(Role.SCHEDULER, 1))
    params = Params(n=2, sampling=Sampling(prompt_logprobs=1))
    enqueue = w.accept(Text("hi!"), params=params)
    entries = [TokenLogprob(105, -1.0, [104], [-0.5]), TokenLogprob(33, -2.0, [33], [-2.0])]
    none = col()
    prompts = [PromptLogprobs(enqueue.handle, 0, entries)]
    w.tell(Deltas(1, none, none, none, none, none, none, none, ends=[], prompts=prompts))
    w.deltas(enqueue, [*b"a"])
    w.deltas(enqueue, [*b"b"], 1)
    w.deltas(enqueue, [*b"c"], choice=1, end="stop")
    first, second, other = w.rows()
    assert second.prompt_logprobs is None
    for row in (first, other):
        assert row.prompt_logprobs is not None
        assert [(entry.token, entry.logprob) for entry in row.prompt_logprobs] == [("h", 0.0), ("i", -1.0), ("!", -2.0)]
        assert row.prompt_logprobs[1].top == [("h", b"h", -0.5)]
    resumed = w.accept(Text("hi!"), params=params, attempt=1, delivered=[Delivered(0, [97], False)])
    assert resumed.sampling.prompt_logprobs == 1, "choice 1 had nothing yet"
    both = [Delivered(0, [97], False), Delivered(1, [98], True)]
    assert w.accept(Text("hi!"), params=params, attempt=2, delivered=both).sampling.prompt_logprobs == -1


class _Picky:
    """A grammar engine that serves one regular expression."""

    def check(self, grammar: Grammar) -> None:
        if grammar.text != "good":
            raise GrammarError("at /x: not served")

    def load(self, model: str, vocab_size: int) -> Any:
        raise NotImplementedError


def test_a_bad_grammar_never_reaches_the_scheduler(ghost: Vocabulary) -> None:
    serving = msgspec.structs.replace(facts(ghost), serves=("grammar",))
    w = World(TokenizerCore(ghost, serving, _Picky()))
    w.tell(PeerUp(Role.SCHEDULER, 1))
    good = Params(sampling=Sampling(grammar=Grammar("regex", "good")), ignore_eos=True)
    enqueue = w.accept(params=good)
    assert enqueue.sampling.grammar == Grammar("regex", "good")
    assert enqueue.stop_ids == [EOS], "a complete answer must be able to end"
    bad = Params(sampling=Sampling(grammar=Grammar("regex", "bad")))
    assert w.submit(params=bad, request_id="2") is None
    refusal = w.refusal()
    assert (refusal.field, refusal.reason, refusal.code) == ("response_format", "at /x: not served", "invalid_grammar")


def test_a_grammar_needs_an_executor_that_keeps_to_it(w: World) -> None:
    assert w.submit(params=Params(sampling=Sampling(grammar=Grammar("regex", "good")))) is None
    assert w.refusal().code == "unsupported_parameter"
