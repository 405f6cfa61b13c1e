"""The tokenizer as a pure core: requests become ids on their way in, ids become text on their way out.

In:  Submit → checked, rendered, tokenised → Accepted to the client, Enqueue to the scheduler (or Refused).
Out: Deltas → a Deliver of rows per client; a completed stop string ends its choice at once and tells the scheduler.

Losses. When the scheduler is lost, clients resubmit their requests as higher attempts; a resume starts from the
ids that were delivered and needs nothing else, since ids are delivered only with all of their text. What was
submitted while the scheduler is away, or was never answered by the lost one, is kept and sent to its successor:
its client may have resubmitted before we heard of the loss.

Counting. An end token that the model gave (one of the request's `stop_ids`, too) counts as a completion token, as do
the tokens of a stop string up to the one that completed it; neither is part of the text (an end token is, if
`skip_special_tokens` is off).

Pure: `core/machine.py` says what that means. (A chat template that asks for today's date gets it from the system.)
"""

from __future__ import annotations

import hashlib
import json
from itertools import count

import msgspec

from octavo.core.grammar import Engine, GrammarError
from octavo.core.machine import Outbound, Outputs
from octavo.core.messages import (
    Accepted,
    Adapter,
    Body,
    Cancel,
    Deliver,
    Deltas,
    Describe,
    Described,
    Detokenize,
    Detokenized,
    End,
    Enqueue,
    Facts,
    Grammar,
    Message,
    PeerDown,
    PeerUp,
    Refused,
    Role,
    Row,
    Stages,
    Stop,
    Submit,
    Taken,
    Tokenize,
    Tokenized,
    Usage,
    col,
    namespace_name,
)
from octavo.core.pace import latencies, off
from octavo.core.tokenizer import limits
from octavo.core.tokenizer.choice import Choice
from octavo.core.tokenizer.detokenize import continued
from octavo.core.tokenizer.invalid import InvalidRequestError
from octavo.core.tokenizer.requests import Live, Requests
from octavo.core.tokenizer.stops import StopStrings
from octavo.core.tokenizer.vocabulary import Vocabulary
from octavo.core.trace.catalogue import (
    Event,
    RequestCancelled,
    RequestDelivered,
    RequestFailed,
    RequestReceived,
    RequestTaken,
    RequestTokenized,
)


class TokenizerCore:
    """State machine of the tokenizer: `apply` messages of clients, of the scheduler, and news of peers."""

    def __init__(self, vocabulary: Vocabulary, facts: Facts, grammars: Engine | None = None) -> None:
        self._vocabulary = vocabulary
        self._grammars = grammars
        self._facts = facts
        self._requests = Requests()
        self._handles = count(1)
        self._scheduler: int | None = None
        """Its generation while its link is up."""
        self._now_ns = 0
        self._messages: list[Outbound] = []
        self._events: list[Event] = []
        self._rows: dict[str, list[Row]] = {}
        """Rows of this call, per client."""

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def apply(self, now_ns: int, message: Body) -> Outputs:
        self._now_ns = now_ns
        self._messages, self._events, self._rows = [], [], {}
        match message:
            case Submit():
                self._submit(message)
            case Cancel(request_id):
                self._cancel(request_id)
            case Taken():
                self._taken(message)
            case Tokenize():
                self._to_client(message.client, self._tokenized(message))
            case Detokenize():
                self._to_client(message.client, self._detokenized(message))
            case Describe():
                described = Described(message.ref, json.dumps(self._vocabulary.config, ensure_ascii=False))
                self._to_client(message.client, described)
            case Deltas():
                self._deltas(message)
            case Refused():
                self._refused(message)
            case PeerUp(Role.SCHEDULER, generation):
                self._scheduler_up(generation)
            case PeerDown(Role.SCHEDULER):
                self._scheduler_down()
            case PeerDown(Role.CLIENT, name):
                self._client_gone(name)
            case _:
                pass  # the shell's business, or not ours at all: no client may stop the service by what it sends
        for client, rows in self._rows.items():
            self._to_client(client, Deliver(rows))
        return Outputs(self._messages, self._events)

    # ── in: requests and questions ───────────────────────────────────────────────────────────────

    def _submit(self, submit: Submit) -> None:
        known = self._requests.named(submit.request_id)
        if known is not None and submit.attempt <= known.attempt:
            return  # a double, or fenced by a later attempt
        self._events.append(
            RequestReceived(
                request_id=submit.request_id,
                trace_id=submit.trace_id,
                attempt=submit.attempt,
                tenant=submit.tenant,
                received_ns=submit.received_ns,
            )
        )
        try:
            enqueue = self._enqueue(submit)
        except InvalidRequestError as error:
            refused = Refused(submit.request_id, submit.attempt, error.field, error.reason, error.code)
            self._to_client(submit.client, refused)
            self._events.append(RequestFailed(request_id=submit.request_id, code=error.code, reason=error.reason))
            return
        self._admit(submit, enqueue)

    def _enqueue(self, submit: Submit) -> Enqueue:
        """The request as the scheduler gets it. Raises `InvalidRequestError`."""
        params, facts = submit.params, self._facts
        limits.check_carried(submit)
        limits.check_params(params, facts)
        adapter = limits.checked_adapter(params.adapter, facts)
        sampling = limits.checked_sampling(params.sampling)
        ids = self._vocabulary.prompt_ids(submit.prompt, facts.context)
        limits.check_prompt(submit.prompt, ids, facts)
        limits.check_delivered(submit.delivered, params.n, facts)
        delivered: list[list[int]] = [[] for _ in range(params.n)]
        finished = [False] * params.n
        for one in submit.delivered:
            delivered[one.choice], finished[one.choice] = one.ids, one.finished
        if sampling.grammar is not None:
            self._check_grammar(sampling.grammar)
        endless = params.ignore_eos and sampling.grammar is None  # a complete answer has nothing to go on with
        eos_ids = () if endless else self._vocabulary.eos_ids
        stop_ids = sorted({*params.stop_ids, *eos_ids})
        sampling = msgspec.structs.replace(
            sampling,
            banned=(*sampling.banned, *self._vocabulary.spellings(params.bad_words)),
            ends=tuple(stop_ids),
        )
        if all(ended or ids for ids, ended in zip(delivered, finished, strict=True)):
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)  # they came with the first rows
        return Enqueue(
            handle=next(self._handles),
            request_id=submit.request_id,
            attempt=submit.attempt,
            ids=col(ids),
            n=params.n,
            sampling=sampling,
            max_tokens=None if params.max_tokens is None else min(params.max_tokens, facts.context - len(ids)),
            stop_ids=stop_ids,
            tenant=submit.tenant,
            priority=submit.priority,
            deadline_ns=submit.deadline_ns,
            namespace=cache_namespace(submit.tenant, facts.cache_seed, adapter),
            received_ns=submit.received_ns,
            trace_id=submit.trace_id,
            delivered=delivered,
            finished=finished,
            keep_ns=int(params.keep_s * 1e9),
            adapter=adapter,
        )

    def _check_grammar(self, grammar: Grammar) -> None:
        if self._grammars is None:
            raise InvalidRequestError("response_format", "no grammar engine is installed", "unsupported_parameter")
        try:
            self._grammars.check(grammar)
        except GrammarError as error:
            raise InvalidRequestError("response_format", str(error), "invalid_grammar") from error

    def _admit(self, submit: Submit, enqueue: Enqueue) -> None:
        params, prompt = submit.params, enqueue.ids.tolist()
        stops = StopStrings(params.stop)
        live = Live(
            client=submit.client,
            request_id=submit.request_id,
            attempt=submit.attempt,
            handle=enqueue.handle,
            received_ns=submit.received_ns,
            prompt=prompt,
            choices={
                number: Choice(
                    self._vocabulary,
                    prompt,
                    enqueue.delivered[number],
                    stops,
                    skip_special_tokens=params.skip_special_tokens,
                    logprobs=params.sampling.logprobs >= 0,
                    ends=enqueue.stop_ids,
                    min_tokens=params.sampling.min_tokens,
                    received_ns=submit.received_ns,
                )
                for number in range(params.n)
                if not enqueue.finished[number]
            },
            unanswered=enqueue,
        )
        if params.sampling.prompt_logprobs >= 0 and len(prompt) == 1:
            live.prompt_logprobs = self._vocabulary.spelled_prompt(prompt, [])  # there is nothing to compute
        self._requests.add(live)
        self._to_client(live.client, Accepted(live.request_id, live.attempt, live.prompt_tokens, enqueue.stop_ids))
        self._events.append(
            RequestTokenized(
                request_id=live.request_id,
                prompt_tokens=live.prompt_tokens,
                max_tokens=enqueue.max_tokens,
                n=params.n,
                namespace=namespace_name(enqueue.namespace),
                adapter="" if enqueue.adapter is None else enqueue.adapter.name,
            )
        )
        self._end_complete(live, enqueue)
        if live.choices and self._scheduler is not None:
            self._to_scheduler(enqueue)

    def _end_complete(self, live: Live, enqueue: Enqueue) -> None:
        """Choices whose last token had been delivered, but not that it was the last: they end here."""
        room = self._facts.context - live.prompt_tokens
        most = room if enqueue.max_tokens is None else enqueue.max_tokens
        for number in list(live.choices):
            ids = enqueue.delivered[number]
            if ids and ids[-1] in enqueue.stop_ids:
                self._finish(live, number, "stop")
            elif len(ids) >= most:
                self._finish(live, number, "length")
            enqueue.finished[number] = number not in live.choices

    def _cancel(self, request_id: str) -> None:
        live = self._requests.named(request_id)
        if self._scheduler is not None:
            # Also of a request that is not known here: it may be from before our restart.
            self._to_scheduler(Cancel(request_id))
        if live is None:
            return
        self._events.append(RequestCancelled(request_id=request_id, why="its client cancelled it"))
        for number in list(live.choices):
            live.choices[number].flush()
            self._finish(live, number, "cancelled")

    def _taken(self, taken: Taken) -> None:
        ours = latencies(taken.times, taken.tokens)
        sent = None if taken.sent is None else latencies(taken.sent, taken.tokens)
        self._events.append(
            RequestTaken(
                request_id=taken.request_id,
                choice=taken.choice,
                tokens=taken.tokens,
                rows=taken.times.rows,
                ttft_ns=ours.ttft,
                itl_ns=ours.itl,
                longest_ns=ours.longest,
                tpot_ns=ours.tpot,
                e2e_ns=ours.e2e,
                held_ns=taken.held_ns,
                last_held_ns=taken.last_held_ns,
                ttft_off_ns=sent and off(ours.ttft, sent.ttft),
                itl_off_ns=sent and off(ours.itl, sent.itl),
                tpot_off_ns=sent and off(ours.tpot, sent.tpot),
                e2e_off_ns=sent and off(ours.e2e, sent.e2e),
            )
        )

    def _tokenized(self, question: Tokenize) -> Tokenized:
        try:
            ids = self._vocabulary.prompt_ids(question.prompt, self._facts.context, question.add_special_tokens)
        except InvalidRequestError as error:
            return Tokenized(question.ref, [], error.reason)
        return Tokenized(question.ref, ids)

    def _detokenized(self, question: Detokenize) -> Detokenized:
        try:
            limits.check_ids("tokens", [*question.ids, *(question.before or ())], self._facts.vocab_size)
        except InvalidRequestError as error:
            return Detokenized(question.ref, "", error.reason)
        if question.before is None:
            text = self._vocabulary.decode(question.ids, question.skip_special_tokens)
        else:
            text = continued(self._vocabulary, question.before, question.ids, question.skip_special_tokens)
        return Detokenized(question.ref, text)

    # ── out: tokens ──────────────────────────────────────────────────────────────────────────────

    def _deltas(self, deltas: Deltas) -> None:
        for known in deltas.prompts:
            if (live := self._requests.handled(known.handle, known.attempt)) is not None:
                live.prompt_logprobs = self._vocabulary.spelled_prompt(live.prompt, known.entries)
        for handle, number, attempt, drafted, accepted in deltas.guesses.reshape(-1, 5).tolist():
            live = self._requests.handled(handle, attempt)
            if live is not None and (choice := live.choices.get(number)) is not None:
                choice.drafted += drafted
                choice.accepted += accepted
        ending = {(end.handle, end.choice) for end in deltas.ends}
        tokens = deltas.tokens.tolist()
        columns = (deltas.handle, deltas.choice, deltas.attempt, deltas.index, deltas.n, deltas.cached)
        start = 0
        for handle, number, attempt, index, n, cached in zip(*(column.tolist() for column in columns), strict=True):
            end = start + n
            live = self._requests.handled(handle, attempt)
            choice = live.choices.get(number) if live else None
            if live and choice:
                live.unanswered = None
                choice.cached = cached
                if index > choice.received:
                    self._broken(live, number, index)
                elif choice.take(index, tokens[start:end], deltas.logprobs[start:end] if deltas.logprobs else ()):
                    self._stopped(live, number, choice, ends=(handle, number) in ending)
                elif (handle, number) not in ending:
                    self._deliver(live, number, choice)
            start = end
        for ended in deltas.ends:
            self._ended(ended)

    def _broken(self, live: Live, number: int, index: int) -> None:
        """Tokens before `index` were lost on their way here. The row says so by not fitting the client's journal, and
        the client resumes; what else comes for this attempt is of no use."""
        del live.choices[number]
        self._row(live.client, Row(live.request_id, number, live.attempt, index, [], ""))
        if not live.choices:
            self._requests.drop(live)

    def _stopped(self, live: Live, number: int, choice: Choice, *, ends: bool) -> None:
        """A stop string is complete. The scheduler need not hear of it if the choice ends with these tokens anyway."""
        if not ends:
            self._to_scheduler(Stop(live.request_id, number, choice.received - 1))
        self._finish(live, number, "stop")

    def _ended(self, end: End) -> None:
        live = self._requests.handled(end.handle, end.attempt)
        if live is None or (choice := live.choices.get(end.choice)) is None:
            return
        live.unanswered = None
        reason = "stop" if choice.flush() else end.reason
        self._finish(live, end.choice, reason, end.detail, end.stages)

    def _deliver(self, live: Live, number: int, choice: Choice) -> None:
        index, ids, text, logprobs = choice.collect()
        if ids:
            if choice.pace is not None:
                choice.pace.row(self._now_ns)
            prompt = live.prompt_logprobs if index == 0 else None
            row = Row(
                live.request_id, number, live.attempt, index, ids, text, logprobs=logprobs, prompt_logprobs=prompt
            )
            self._row(live.client, row)

    def _finish(self, live: Live, number: int, finish: str, detail: str = "", stages: Stages | None = None) -> None:
        """The choice's last row."""
        choice = live.choices.pop(number)
        index, ids, text, logprobs = choice.collect()
        usage = Usage(live.prompt_tokens, choice.received, choice.cached, choice.drafted, choice.accepted)
        prompt = live.prompt_logprobs if index == 0 else None
        if (pace := choice.pace) is not None and ids:
            pace.row(self._now_ns)
        times = pace.end(self._now_ns) if pace is not None else None
        row = Row(
            live.request_id,
            number,
            live.attempt,
            index,
            ids,
            text,
            finish,
            detail,
            usage,
            logprobs,
            prompt,
            times,
            stages,
        )
        self._row(live.client, row)
        self._events.append(
            RequestDelivered(
                request_id=live.request_id,
                choice=number,
                finish=finish,
                output_tokens=choice.received,
                since_received_ns=self._now_ns - live.received_ns,
            )
        )
        if not live.choices:
            self._requests.drop(live)

    def _refused(self, refused: Refused) -> None:
        """By the scheduler, which has written the event."""
        live = self._requests.named(refused.request_id)
        if live is not None and live.attempt == refused.attempt:
            self._requests.drop(live)
            self._to_client(live.client, refused)

    # ── peers ────────────────────────────────────────────────────────────────────────────────────

    def _scheduler_up(self, generation: int) -> None:
        if self._scheduler not in (None, generation):
            self._scheduler_down()
        if self._scheduler is None:
            self._scheduler = generation
            for live in self._requests:
                if live.unanswered is not None:
                    self._to_scheduler(live.unanswered)

    def _scheduler_down(self) -> None:
        self._scheduler = None
        for live in self._requests:
            if live.unanswered is None:
                self._requests.drop(live)

    def _client_gone(self, client: str) -> None:
        for live in self._requests.of_client(client):
            self._requests.drop(live)
            if self._scheduler is not None:
                self._to_scheduler(Cancel(live.request_id))
            self._events.append(RequestCancelled(request_id=live.request_id, why="its client is gone"))

    # ── sending ──────────────────────────────────────────────────────────────────────────────────

    def _to_client(self, client: str, message: Message) -> None:
        self._messages.append(Outbound(Role.CLIENT, message, client))

    def _to_scheduler(self, message: Message) -> None:
        self._messages.append(Outbound(Role.SCHEDULER, message))

    def _row(self, client: str, row: Row) -> None:
        self._rows.setdefault(client, []).append(row)


def cache_namespace(tenant: str, cache_seed: bytes, adapter: Adapter | None = None) -> bytes:
    """Which prefixes a request may share: those of its own tenant, for the same weights, numerics and content of its
    adapter, whatever that is called (16 bytes)."""
    salt = tenant.encode()
    digest = b"" if adapter is None else adapter.digest
    return hashlib.sha256(len(salt).to_bytes(4, "big") + salt + cache_seed + digest).digest()[:16]
