"""Those who ask in a simulation: send a workload's requests when they are due, and measure what comes back.

Times are taken where a client would take them, on both sides of its way to the scheduler. Knows nothing of steps.
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from octavo.core.messages import Cancel, Col, Deltas, Enqueue, Refused, Sampling, Stop
from octavo.core.trace.catalogue import RequestDelivered, RequestFailed
from octavo.plugins.sim.machine import Heard
from octavo.plugins.sim.metrics import Counts, Floats, Service
from octavo.plugins.sim.workload import Session, Turn, Workload

_ROWS = 4096


@dataclass(slots=True, eq=False)
class _Talk:
    """A session under way: all that was said, and which turn is next."""

    session: Session
    number: int
    turn: int = 0
    request_id: str = ""
    """Of the turn that waits for its answer."""
    row: int = 0
    """Of its first choice."""
    left: int = 0
    """Choices that go on."""
    said: list[int] = field(default_factory=list)
    """What the first choice answered, where a later turn needs it."""
    ids: list[Col] = field(default_factory=list)


class Measured:
    """A row per choice of each request, in the order in which they were sent; NaN where there is nothing. Times in
    virtual seconds."""

    def __init__(self) -> None:
        self.rows = 0
        self.arrival, self.first, self.last, self.end, self.within = (np.full(_ROWS, np.nan) for _ in range(5))
        self.tokens: Counts = np.zeros(_ROWS, dtype=np.int64)
        self.tenant: Counts = np.zeros(_ROWS, dtype=np.int64)
        self.tenants: dict[str, int] = {}
        """By name."""
        self.rows_of: dict[str, range] = {}
        """By request id."""
        self.gaps: array[float] = array("f")
        """Between a token and the one before it, of all requests."""
        self.unserved: dict[str, int] = {}
        """Choices not served to their end, by code."""
        self.service = Service()

    def add(self, now: float, request_id: str, tenant: str, within: float | None = None, n: int = 1) -> int:
        """A request of `n` choices is sent, to be answered `within` so many seconds; the row of its first."""
        row, size = self.rows, len(self.arrival)
        if row + n > size:
            for name in ("arrival", "first", "last", "end", "within"):
                setattr(self, name, np.pad(getattr(self, name), (0, size + n), constant_values=np.nan))
            self.tokens, self.tenant = np.pad(self.tokens, (0, size + n)), np.pad(self.tenant, (0, size + n))
        if tenant not in self.tenants:
            self.tenants[tenant] = self.service.tenant()
        self.rows += n
        self.arrival[row : row + n] = now
        self.within[row : row + n] = np.nan if within is None else within
        self.tenant[row : row + n] = self.tenants[tenant]
        self.rows_of[request_id] = range(row, row + n)
        return row

    def tenant_of(self, request_id: str) -> int:
        return int(self.tenant[self.rows_of[request_id][0]])

    def serve_prompt(self, request_id: str, tokens: int) -> None:
        """The next step computes so many of its tokens."""
        if len(self.tenants) > 1:
            row = self.rows_of[request_id][0]
            self.service.serve(self.tenant[row : row + 1], np.asarray([tokens * Service.PROMPT]))

    def receive(self, now: float, row: Col, n: Col) -> None:
        """New tokens came, `n` for each of these choices."""
        fresh = np.isnan(self.first[row])
        if fresh.any():
            self.first[row[fresh]] = now
            self.gaps.frombytes((now - self.last[row[~fresh]]).astype(np.float32).tobytes())
        else:
            self.gaps.frombytes((now - self.last[row]).astype(np.float32).tobytes())
        if (together := int(n.sum()) - len(n)) > 0:  # tokens that came with another one
            self.gaps.extend([0.0] * together)
        self.last[row] = now
        self.tokens[row] += n
        if len(self.tenants) > 1:
            self.service.serve(self.tenant[row], n.astype(np.int64) * Service.OUTPUT)

    def column(self, name: str) -> Floats:
        values: Floats = getattr(self, name)[: self.rows]
        return values


class Load:
    """The clients of a `Machine`, after a workload."""

    def __init__(self, workload: Workload) -> None:
        self.measured = Measured()
        self.finished = 0
        self._workload = workload
        self._next = next(workload, None)
        self._due: list[tuple[int, int, _Talk | str]] = []
        """When, in which order, and who goes on with a turn or which request nobody wants any more."""
        self._order = count()
        self._sessions = count()
        self._talks: dict[int, _Talk] = {}
        """Those who wait for an answer, by row of the choice."""
        self._answers: dict[int, list[int]] = {}
        """Ids so far, by row, where a later turn needs them."""
        self._stops: dict[int, int] = {}
        """After how many tokens the client has enough, by row, where it asked for more."""
        self._deaf = False
        """Something ended on the client's word: what was under way may still come."""

    def due(self) -> int | None:
        new = None if self._next is None else round(self._next.start_s * 1e9)
        old = self._due[0][0] if self._due else None
        return new if old is None else old if new is None else min(new, old)

    def ask(self, now_ns: int) -> Enqueue | Cancel | None:
        if self._next is not None and (not self._due or self._next.start_s * 1e9 <= self._due[0][0]):
            talk: _Talk | str = _Talk(self._next, next(self._sessions))
            self._next = next(self._workload, None)
        else:
            _, _, talk = heapq.heappop(self._due)
        return self._cancel(talk) if isinstance(talk, str) else self._say(now_ns, talk)

    def _say(self, now_ns: int, talk: _Talk) -> Enqueue:
        session, turn = talk.session, talk.session.turns[talk.turn]
        talk.ids.append(turn.new_ids())
        ids = np.concatenate(talk.ids) if len(talk.ids) > 1 else talk.ids[0]
        talk.request_id = turn.name or f"s{talk.number}.{talk.turn}"
        talk.left = len(turn.outputs)
        talk.row = self.measured.add(now_ns / 1e9, talk.request_id, session.tenant, session.deadline_s, talk.left)
        talk.turn += 1
        if talk.turn < len(session.turns):
            talk.ids = [ids]
            self._answers[talk.row] = []
        self._expect(now_ns, talk, turn)
        return Enqueue(
            handle=talk.row,
            request_id=talk.request_id,
            attempt=0,
            ids=ids,
            n=talk.left,
            sampling=Sampling(temperature=0.0),
            max_tokens=turn.max_tokens,
            stop_ids=[],
            tenant=session.tenant,
            priority=session.priority,
            deadline_ns=None if session.deadline_s is None else now_ns + round(session.deadline_s * 1e9),
            namespace=session.tenant.encode(),
            received_ns=now_ns,
            trace_id="",
            delivered=[],
            finished=[],
        )

    def _expect(self, now_ns: int, talk: _Talk, turn: Turn) -> None:
        for row, output in enumerate(turn.outputs, talk.row):
            self._talks[row] = talk
            if turn.max_tokens is None or output < turn.max_tokens:
                self._stops[row] = output
        if turn.cancel_s is not None:
            heapq.heappush(self._due, (now_ns + round(turn.cancel_s * 1e9), next(self._order), talk.request_id))

    def _cancel(self, request_id: str) -> Cancel | None:
        """None if it was answered before."""
        if not self._give_up(request_id, "cancelled"):
            return None
        self._deaf = True
        return Cancel(request_id)

    def _give_up(self, request_id: str, code: str) -> bool:
        """Nothing more comes for its choices that go on; False if none does."""
        rows = [row for row in self.measured.rows_of[request_id] if row in self._talks]
        for row in rows:
            self._close(row)
            self._count(code)
        return bool(rows)

    def hear(self, now_ns: int, answer: Deltas | Refused) -> Heard:
        heard = Heard([], [])
        if isinstance(answer, Refused):
            self._give_up(answer.request_id, answer.code)
            heard.events.append(RequestFailed(request_id=answer.request_id, code=answer.code, reason=answer.reason))
            return heard
        row, n = answer.handle + answer.choice, answer.n
        if self._deaf:
            wanted = np.asarray([one in self._talks for one in row.tolist()], dtype=np.bool_)
            row, n = row[wanted], n[wanted]
        if len(row):
            self.measured.receive(now_ns / 1e9, row, n)
        if self._answers:
            self._listen(answer)
        if self._stops:
            self._stop(now_ns, row, heard)
        for end in answer.ends:
            if end.handle + end.choice in self._talks:
                heard.events.append(self._ended(now_ns, end.handle + end.choice, end.reason))
        return heard

    def _listen(self, answer: Deltas) -> None:
        at, tokens = 0, answer.tokens.tolist()
        for row, n in zip((answer.handle + answer.choice).tolist(), answer.n.tolist(), strict=True):
            if (ids := self._answers.get(row)) is not None:
                ids += tokens[at : at + n]
            at += n

    def _stop(self, now_ns: int, rows: Col, heard: Heard) -> None:
        """Those that have enough say so, as a tokenizer does that has seen a stop string."""
        for row in rows.tolist():
            if row in self._stops and self.measured.tokens[row] >= (enough := self._stops[row]):
                self.measured.tokens[row] = enough
                talk = self._talks[row]
                heard.says.append(Stop(talk.request_id, row - talk.row, enough - 1))
                heard.events.append(self._ended(now_ns, row, "stop"))
                self._deaf = True

    def _ended(self, now_ns: int, row: int, reason: str) -> RequestDelivered:
        talk, answer = self._close(row)
        delivered = RequestDelivered(
            request_id=talk.request_id,
            choice=row - talk.row,
            finish=reason,
            output_tokens=int(self.measured.tokens[row]),
            since_received_ns=now_ns - round(self.measured.arrival[row] * 1e9),
        )
        if reason not in ("length", "stop"):
            self._count(reason)
            return delivered
        self.finished += 1
        self.measured.end[row] = now_ns / 1e9
        if row == talk.row:
            talk.said = answer
        if not talk.left and talk.turn < len(talk.session.turns):
            talk.ids.append(np.asarray(talk.said, dtype=np.int32))
            think = round(talk.session.turns[talk.turn].think_s * 1e9)
            heapq.heappush(self._due, (now_ns + think, next(self._order), talk))
        return delivered

    def _close(self, row: int) -> tuple[_Talk, list[int]]:
        """Nothing more comes. The session is over too, unless the caller goes on with it."""
        talk = self._talks.pop(row)
        talk.left -= 1
        self._stops.pop(row, None)
        return talk, self._answers.pop(row, [])

    def _count(self, code: str) -> None:
        self.measured.unserved[code] = self.measured.unserved.get(code, 0) + 1
