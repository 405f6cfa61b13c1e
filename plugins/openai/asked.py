"""What the engine is asked: prompts and parameters, made from what all ways to generate have in common. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from octavo.core.messages import Params, Prompt, Sampling
from octavo.plugins.openai import structure
from octavo.plugins.openai.beams import BeamSearch
from octavo.plugins.openai.errors import invalid
from octavo.plugins.openai.types import MOST_BEAMS, Generation, StreamOptions


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
    beams: BeamSearch | None = None
    """It is searched for."""


UNSUPPORTED = "unsupported_parameter"
BEAM_FIELDS = ("beam_width", "length_penalty", "early_stopping")
EXCLUDED = (
    "stop",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
)
"""What changes what may come next, or ends it within a token: a search that ignored them would be wrong."""
UNUSED: dict[str, tuple[Any, ...]] = {
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "typical_p": (1,),
    "seed": (),
}
"""What has no effect where nothing is drawn, with the values that ask for nothing."""


def to_asked(
    request: Generation,
    prompts: list[Prompt],
    limit: int | None,
    logprobs: int,
    ignored: list[str],
    best_of: int | None = None,
) -> Asked:
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
        [*ignored, *_without_effect(request)],
        beams=_beams(request, best_of),
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
        typical_p=_or(request.typical_p, default.typical_p),
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


def _beams(request: Generation, best_of: int | None) -> BeamSearch | None:
    """The search that is asked for, if one is."""
    if not request.use_beam_search:
        return None
    refused = [name for name in EXCLUDED if getattr(request, name)]
    refused += ["repetition_penalty"] if request.repetition_penalty not in (None, 1) else []
    refused += ["response_format"] if structure.asked(request) is not None else []
    for name in refused:
        raise invalid(name, f"{name} is not possible with use_beam_search", UNSUPPORTED)
    n = request.n or 1
    width = request.beam_width or best_of or n
    if width > MOST_BEAMS:
        raise invalid(
            "n" if width == n else "best_of", f"{width} beams are asked for, at most {MOST_BEAMS} are possible"
        )
    if width < n:
        raise invalid("beam_width", f"beam_width is {width}, less than n, {n}")
    stopping = False if request.early_stopping is None else request.early_stopping
    return BeamSearch(width, _or(request.length_penalty, 1.0), stopping)


def _without_effect(request: Generation) -> list[str]:
    """Fields that are only for the other way to generate: searching for the likeliest, or drawing."""
    if not request.use_beam_search:
        return [name for name in BEAM_FIELDS if getattr(request, name) is not None]
    return [name for name, nothing in UNUSED.items() if getattr(request, name) not in (None, *nothing)]
