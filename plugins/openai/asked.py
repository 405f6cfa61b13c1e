"""What the engine is asked: prompts and parameters, made from what all ways to generate have in common. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from octavo.core.messages import Params, Prompt, Sampling
from octavo.plugins.openai import structure
from octavo.plugins.openai.errors import invalid
from octavo.plugins.openai.types import Generation, StreamOptions


class Asked(NamedTuple):
    """A request to generate, decoded: one engine request per prompt, all with the same parameters."""

    model: str | None
    prompts: list[Prompt]
    params: Params
    stream: bool
    include_usage: bool
    priority: int
    ignored: list[str]
    """Paths of fields that have no effect."""
    deadline_ms: int | None = None
    shown: int = 1
    """Choices that are shown for each prompt, the best ones where more are generated (`best_of`)."""
    shows_logprobs: bool = False
    echo: bool = False
    """Each choice begins with its prompt."""
    scores_only: bool = False
    """What is generated is not shown: `max_tokens: 0` with log-probabilities of the prompt."""
    continuous_usage: bool = False
    tools: frozenset[str] = frozenset()
    """Names of the functions that the model may call."""
    one_call: bool = False
    settings: dict[str, Any] = {}  # noqa: RUF012 - never changed
    """What a response tells of its request (`/v1/responses`)."""
    must: structure.Must | None = None
    """The whole answer is a call, in this form."""


def to_asked(request: Generation, prompts: list[Prompt], limit: int | None, logprobs: int, ignored: list[str]) -> Asked:
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise invalid("stream_options", "stream_options is only possible with stream: true")
    params = Params(
        sampling=_sampling(request, logprobs),
        n=request.n or 1,
        max_tokens=None if limit is None else min(limit, 2**31 - 1),
        stop=_stops(request.stop),
        stop_ids=tuple(request.stop_token_ids or ()),
        bad_words=tuple(request.bad_words or ()),
        ignore_eos=bool(request.ignore_eos),
        skip_special_tokens=request.skip_special_tokens is not False,
        keep_s=request.cache_keep_s or 0.0,
    )
    options = request.stream_options or StreamOptions()
    return Asked(
        request.model,
        prompts,
        params,
        stream,
        bool(options.include_usage),
        request.priority or 0,
        ignored,
        deadline_ms=request.deadline_ms,
        shown=request.n or 1,
        shows_logprobs=logprobs >= 0,
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
    )


def _sampling(request: Generation, logprobs: int) -> Sampling:
    """A seed of -1 asks the client library to draw one."""
    default = Sampling()
    top_k = max(request.top_k or 0, 0)
    top_p = _or(request.top_p, default.top_p)
    if top_p == 0:
        # The smallest set whose probability reaches 0 is the likeliest token alone.
        top_k, top_p = 1, 1.0
    return Sampling(
        temperature=_or(request.temperature, default.temperature),
        top_k=top_k,
        top_p=top_p,
        min_p=_or(request.min_p, default.min_p),
        repetition=_or(request.repetition_penalty, default.repetition),
        presence=_or(request.presence_penalty, default.presence),
        frequency=_or(request.frequency_penalty, default.frequency),
        seed=-1 if request.seed is None else request.seed & (2**63 - 1),
        logprobs=logprobs,
        bias=_biases(request.logit_bias or {}),
        allowed=tuple(request.allowed_token_ids or ()),
        min_tokens=request.min_tokens or 0,
        grammar=structure.asked(request),
    )


def _biases(given: dict[str, float]) -> dict[int, float]:
    for token in given:
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise invalid("logit_bias", f"logit_bias has the key {token[:40]!r}: it must be a token id")
    return {int(token): bias for token, bias in given.items()}


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in stops:
        raise invalid("stop", "a stop string is empty")
    return stops
