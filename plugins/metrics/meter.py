"""Counts what the gateway's clients ask and get, as they get it.

`Meter` stands before an engine, and follows each stream through its `watch`. A request is counted when it is asked and
once more, by outcome, when it is over; so the outcomes and the open ones always sum to the requests.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from octavo.core.client.stream import Piece, RequestRefused, ServiceUnavailable, Stream
from octavo.core.messages import Params, Prompt
from octavo.plugins.metrics.families import Counter, Family, Gauge, Histogram, Shares

OUTCOMES = ("stop", "length", "cancelled", "error", "refused", "unavailable")
"""Of several choices the one counts that is furthest to the right, but a request that its client left is cancelled."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)


COUNTS = tuple(2**i for i in range(18))
FEW = (1, 2, 4, 8, 16, 32)
TENANTS = 30
"""Tenants that are counted apart."""
_SCHEDULER = " Not of those that a stop string ended: the scheduler does not time them."


class Opens(Protocol):
    """What is metered of an engine: `generate(prompt, params, **about)`."""

    @property
    def generate(self) -> Callable[..., Awaitable[Stream]]: ...


class Numbers:
    """All that is counted here."""

    def __init__(self) -> None:
        self.requests = Counter("octavo_requests_total", "Requests that were asked of the engine.")
        self.outcomes = Counter(
            "octavo_request_outcomes_total", "Requests that are over, by how they ended.", "outcome", OUTCOMES
        )
        self.open = Gauge("octavo_requests_open", "Requests that are not over.")
        self.prompt = Counter("octavo_prompt_tokens_total", "Prompt tokens of requests that gave an answer.")
        self.cached = Counter("octavo_cached_tokens_total", "Of these, tokens that the prefix tree had.")
        self.output = Counter("octavo_output_tokens_total", "Tokens delivered to clients.")
        self.ttft = Histogram("octavo_time_to_first_token_seconds", "From asked to the first token.", SECONDS)
        self.itl = Histogram(
            "octavo_inter_token_seconds", "Between two deliveries of tokens of a choice.", TOKEN_SECONDS
        )
        self.e2e = Histogram("octavo_request_seconds", "From asked to the end, of finished requests.", SECONDS)
        self.tpot = Histogram(
            "octavo_time_per_output_token_seconds",
            "Of a choice with several tokens: from its first to its last, by the tokens after the first.",
            TOKEN_SECONDS,
        )
        self.queue = Histogram("octavo_queue_seconds", "Of a choice: until it had a slot." + _SCHEDULER, SECONDS)
        self.prefill = Histogram(
            "octavo_prefill_seconds", "Of a choice: from its first slot to its first token." + _SCHEDULER, SECONDS
        )
        self.decode = Histogram(
            "octavo_decode_seconds", "Of a choice: from its first token to its last." + _SCHEDULER, SECONDS
        )
        self.inference = Histogram(
            "octavo_inference_seconds", "Of a choice: from its first slot to its last token." + _SCHEDULER, SECONDS
        )
        self.prompts = Histogram("octavo_request_prompt_tokens", "Prompt tokens of a request.", COUNTS)
        self.outputs = Histogram("octavo_request_output_tokens", "Output tokens of a choice.", COUNTS)
        self.asked_n = Histogram("octavo_request_n", "Choices that a request asked for.", FEW)
        self.asked_tokens = Histogram(
            "octavo_request_max_tokens", "The most tokens a choice that a request asked for, if it said so.", COUNTS
        )
        self.sent_back = Histogram(
            "octavo_request_preemptions", "How often a choice was preempted." + _SCHEDULER, (0, *FEW)
        )
        self.tenant_requests = Shares(
            "octavo_tenant_requests_total", "Requests by tenant; those of later tenants are other.", "tenant", TENANTS
        )
        self.tenant_output = Shares(
            "octavo_tenant_output_tokens_total", "Tokens delivered, by tenant.", "tenant", TENANTS
        )

    def families(self) -> list[Family]:
        return list(vars(self).values())


class Meter:
    """`generate` of an engine, counted. Everything else of the engine is passed on."""

    def __init__(self, engine: Opens, numbers: Numbers) -> None:
        self._engine = engine
        self._numbers = numbers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt: Prompt, params: Params, **about: Any) -> Stream:
        watch = Watch(self._numbers, params, about.get("tenant", ""))
        try:
            stream = await self._engine.generate(prompt, params, **about)
        except ServiceUnavailable:
            watch.over("unavailable")
            raise
        stream.watch = watch
        return stream


class Watch:
    """Follows one request; told of every piece as its consumer takes it, and of the end."""

    def __init__(self, numbers: Numbers, params: Params, tenant: str) -> None:
        self._numbers = numbers
        self._tenant = tenant
        self._asked_s = time.monotonic()
        self._open_choices = params.n
        self._outcome = "stop"
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._over = False
        numbers.requests.add()
        numbers.tenant_requests.add(value=tenant)
        numbers.asked_n.observe(params.n)
        if params.max_tokens is not None:
            numbers.asked_tokens.observe(params.max_tokens)
        self._show_open()

    def piece(self, piece: Piece) -> None:
        now_s = time.monotonic()
        numbers = self._numbers
        if piece.ids:
            if not self._last_s:
                numbers.ttft.observe(now_s - self._asked_s)
            elif piece.choice in self._last_s:
                numbers.itl.observe(now_s - self._last_s[piece.choice])
            self._first_s.setdefault(piece.choice, now_s)
            self._last_s[piece.choice] = now_s
            self._tokens[piece.choice] = self._tokens.get(piece.choice, 0) + len(piece.ids)
            numbers.output.add(len(piece.ids))
            numbers.tenant_output.add(len(piece.ids), self._tenant)
        if piece.finish is not None:
            self._outcome = max(self._outcome, piece.finish, key=OUTCOMES.index)
            self._open_choices -= 1
            self._choice_over(piece)
            if not self._open_choices:
                numbers.e2e.observe(now_s - self._asked_s)
                self.over(self._outcome)

    def _choice_over(self, piece: Piece) -> None:
        numbers, tokens = self._numbers, self._tokens.get(piece.choice, 0)
        if piece.usage is not None and piece.choice == 0:
            numbers.prompt.add(piece.usage.prompt)
            numbers.cached.add(piece.usage.cached)
            numbers.prompts.observe(piece.usage.prompt)
        numbers.outputs.observe(tokens)
        if tokens > 1:
            numbers.tpot.observe((self._last_s[piece.choice] - self._first_s[piece.choice]) / (tokens - 1))
        if (stages := piece.stages) is not None:
            numbers.queue.observe(stages.queue_ns / 1e9)
            numbers.prefill.observe(stages.prefill_ns / 1e9)
            numbers.decode.observe(stages.decode_ns / 1e9)
            numbers.inference.observe((stages.prefill_ns + stages.decode_ns) / 1e9)
            numbers.sent_back.observe(stages.preemptions)

    def left(self, error: Exception | None) -> None:
        """The stream was left, before its end perhaps."""
        if isinstance(error, RequestRefused):
            self.over("refused")
        elif isinstance(error, ServiceUnavailable):
            self.over("unavailable")
        else:
            self.over("error" if error is not None else "cancelled")

    def over(self, outcome: str) -> None:
        if not self._over:
            self._over = True
            self._numbers.outcomes.add(value=outcome)
            self._show_open()

    def _show_open(self) -> None:
        numbers = self._numbers
        over = sum(numbers.outcomes.total(outcome) for outcome in OUTCOMES)
        numbers.open.set(numbers.requests.total() - over)
