"""Those who ask in a simulation: send a workload's requests when they are due, and measure what comes back.

Times are taken where a client would take them, on both sides of its way to the scheduler. Knows nothing of steps.
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from octavo.core.messages import Col, Deltas, Enqueue, Refused, Sampling
from octavo.core.trace.catalogue import RequestDelivered, RequestEvent, RequestFailed
from octavo.plugins.sim.metrics import Counts, Floats, Service
from octavo.plugins.sim.workload import Session, Workload

_ROWS = 4096


@dataclass(slots=True, eq=False)
class _Talk:
    """A session under way: all that was said, and which turn is next."""

    session: Session
    number: int
    turn: int = 0
    request_id: str = ""
    """Of the turn that waits for its answer."""
    ids: list[Col] = field(default_factory=list)


class Measured:
    """A row per request, in the order in which they were sent; NaN where there is nothing. Times in virtual seconds."""

    def __init__(self) -> None:
        self.requests = 0
        self.arrival, self.first, self.last, self.end = (np.full(_ROWS, np.nan) for _ in range(4))
        self.tokens: Counts = np.zeros(_ROWS, dtype=np.int64)
        self.tenant: Counts = np.zeros(_ROWS, dtype=np.int64)
        self.tenants: dict[str, int] = {}
        """By name."""
        self.live: dict[str, int] = {}
        """Rows of the requests that are not answered, by request id."""
        self.gaps: array[float] = array("f")
        """Between a token and the one before it, of all requests."""
        self.unserved: dict[str, int] = {}
        """Requests not served to their end, by code."""
        self.service = Service()

    def add(self, now: float, request_id: str, tenant: str) -> int:
        """A request is sent; its row."""
        row = self.requests
        if row == len(self.arrival):
            for name in ("arrival", "first", "last", "end"):
                setattr(self, name, np.pad(getattr(self, name), (0, row), constant_values=np.nan))
            self.tokens, self.tenant = np.pad(self.tokens, (0, row)), np.pad(self.tenant, (0, row))
        if tenant not in self.tenants:
            self.tenants[tenant] = self.service.tenant()
        self.requests += 1
        self.arrival[row] = now
        self.tenant[row] = self.tenants[tenant]
        self.live[request_id] = row
        return row

    def tenant_of(self, request_id: str) -> int:
        return int(self.tenant[self.live[request_id]])

    def serve_prompt(self, request_id: str, tokens: int) -> None:
        """The next step computes so many of its tokens."""
        if len(self.tenants) > 1:
            row = self.live[request_id]
            self.service.serve(self.tenant[row : row + 1], np.asarray([tokens * Service.PROMPT]))

    def rows(self, now: float, row: Col, n: Col) -> None:
        """New tokens came, `n` for each of these requests."""
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
        values: Floats = getattr(self, name)[: self.requests]
        return values


class Load:
    """The clients of a `Machine`, after a workload."""

    def __init__(self, workload: Workload) -> None:
        self.measured = Measured()
        self.finished = 0
        self._workload = workload
        self._next = next(workload, None)
        self._due: list[tuple[int, int, _Talk]] = []
        self._order = count()
        self._talks: dict[int, _Talk] = {}
        """Those who wait for an answer, by row."""
        self._answers: dict[int, list[int]] = {}
        """Ids so far, by row, where a later turn needs them."""

    def due(self) -> int | None:
        new = None if self._next is None else round(self._next.start_s * 1e9)
        old = self._due[0][0] if self._due else None
        return new if old is None else old if new is None else min(new, old)

    def ask(self, now_ns: int) -> Enqueue:
        if self._next is not None and (not self._due or self._next.start_s * 1e9 <= self._due[0][0]):
            talk = _Talk(self._next, next(self._order))
            self._next = next(self._workload, None)
        else:
            _, _, talk = heapq.heappop(self._due)
        session, turn = talk.session, talk.session.turns[talk.turn]
        talk.ids.append(turn.new_ids())
        ids = np.concatenate(talk.ids) if len(talk.ids) > 1 else talk.ids[0]
        request_id = turn.name or f"s{talk.number}.{talk.turn}"
        row = self.measured.add(now_ns / 1e9, request_id, session.tenant)
        talk.turn += 1
        talk.request_id = request_id
        self._talks[row] = talk
        if talk.turn < len(session.turns):
            talk.ids = [ids]
            self._answers[row] = []
        return Enqueue(
            handle=row,
            request_id=request_id,
            attempt=0,
            ids=ids,
            n=1,
            sampling=Sampling(temperature=0.0),
            max_tokens=turn.output,
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

    def hear(self, now_ns: int, answer: Deltas | Refused) -> list[RequestEvent]:
        if isinstance(answer, Refused):
            self._close(self.measured.live[answer.request_id])
            self._count(answer.code)
            return [RequestFailed(request_id=answer.request_id, code=answer.code, reason=answer.reason)]
        self.measured.rows(now_ns / 1e9, answer.handle, answer.n)
        if self._answers:
            self._listen(answer)
        return [self._ended(now_ns, end.handle, end.reason) for end in answer.ends]

    def _listen(self, answer: Deltas) -> None:
        at, tokens = 0, answer.tokens.tolist()
        for row, n in zip(answer.handle.tolist(), answer.n.tolist(), strict=True):
            if (ids := self._answers.get(row)) is not None:
                ids += tokens[at : at + n]
            at += n

    def _ended(self, now_ns: int, row: int, reason: str) -> RequestDelivered:
        talk, answer = self._close(row)
        delivered = RequestDelivered(
            request_id=talk.request_id,
            choice=0,
            finish=reason,
            output_tokens=int(self.measured.tokens[row]),
            since_received_ns=now_ns - round(self.measured.arrival[row] * 1e9),
        )
        if reason not in ("length", "stop"):
            self._count(reason)
            return delivered
        self.finished += 1
        self.measured.end[row] = now_ns / 1e9
        if talk.turn < len(talk.session.turns):
            talk.ids.append(np.asarray(answer, dtype=np.int32))
            think = round(talk.session.turns[talk.turn].think_s * 1e9)
            heapq.heappush(self._due, (now_ns + think, next(self._order), talk))
        return delivered

    def _close(self, row: int) -> tuple[_Talk, list[int]]:
        """Nothing more comes. The session is over too, unless the caller goes on with it."""
        talk = self._talks.pop(row)
        del self.measured.live[talk.request_id]
        return talk, self._answers.pop(row, [])

    def _count(self, code: str) -> None:
        self.measured.unserved[code] = self.measured.unserved.get(code, 0) + 1
