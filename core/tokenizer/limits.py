"""What a request may ask for: ranges of its parameters, and whether its prompt fits. Everything that is not checked
here reaches the executor. Pure; every refusal names the field as clients know it, and has the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from octavo.core.messages import Chat, Delivered, Facts, Params, Prompt, Sampling
from octavo.core.tokenizer.invalid import InvalidRequestError

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 1024

_RANGES: dict[str, tuple[str, float, float, str]] = {
    "temperature": ("temperature", 0.0, 100.0, "from 0 to 100"),
    "top_p": ("top_p", math.ulp(0.0), 1.0, "more than 0, up to 1"),
    "min_p": ("min_p", 0.0, 1.0, "from 0 to 1"),
    "repetition": ("repetition_penalty", math.ulp(0.0), 100.0, "more than 0, up to 100"),
    "presence": ("presence_penalty", -2.0, 2.0, "from -2 to 2"),
    "frequency": ("frequency_penalty", -2.0, 2.0, "from -2 to 2"),
}
"""Per number of `Sampling`: its name for clients, least and greatest value, and the range in words."""


def checked_sampling(sampling: Sampling) -> Sampling:
    """The same with equivalent spellings made one: `top_k` -1 is 0 (off), a seed is taken modulo 2^64."""
    for attribute, (field, least, greatest, words) in _RANGES.items():
        value = getattr(sampling, attribute)
        if not least <= value <= greatest:  # false for NaN as well
            raise InvalidRequestError(field, f"{field} is {value}; it must be {words}")
    if sampling.top_k < -1:
        raise InvalidRequestError(
            "top_k", f"top_k is {sampling.top_k}; it must be 0 or -1 (off), or a number of tokens"
        )
    if not -1 <= sampling.logprobs <= MAX_LOGPROBS:
        raise InvalidRequestError(
            "logprobs", f"{sampling.logprobs} log-probabilities are asked for; at most {MAX_LOGPROBS} are given"
        )
    return msgspec.structs.replace(sampling, top_k=max(0, sampling.top_k), seed=sampling.seed % 2**64)


def check_params(params: Params, facts: Facts) -> None:
    """Everything in `params` but its sampling."""
    if not 1 <= params.n <= MAX_CHOICES:
        raise InvalidRequestError("n", f"n is {params.n}; it must be from 1 to {MAX_CHOICES}")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidRequestError("max_tokens", f"max_tokens is {params.max_tokens}; it must be at least 1")
    if len(params.stop) > MAX_STOPS:
        raise InvalidRequestError("stop", f"there are {len(params.stop)} stop strings; at most {MAX_STOPS} are taken")
    for stop in params.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequestError(
                "stop", f"a stop string has {len(stop)} characters; it must have from 1 to {MAX_STOP_CHARS}"
            )
    check_ids("stop_token_ids", params.stop_ids, facts.vocab_size)


def check_prompt(prompt: Prompt, ids: Sequence[int], facts: Facts) -> None:
    """That `ids`, made from `prompt`, can be continued by at least one token."""
    field = "messages" if isinstance(prompt, Chat) else "prompt"
    if not ids:
        raise InvalidRequestError(field, f"{field} gives no tokens; the model needs at least one to continue")
    if len(ids) >= facts.context:
        raise InvalidRequestError(
            field,
            f"{field} has {len(ids)} tokens; the context is {facts.context} tokens, prompt and answer together, "
            f"so a prompt may have at most {facts.context - 1}",
            "context_length_exceeded",
        )
    check_ids(field, ids, facts.vocab_size)


def check_delivered(delivered: Sequence[Delivered], n: int, facts: Facts) -> None:
    """That a resume tells of choices that the request has, each once."""
    choices = [one.choice for one in delivered]
    if len(set(choices)) < len(choices) or not set(choices) <= set(range(n)):
        raise InvalidRequestError(
            "delivered", f"delivered tells of choices {choices}; the request has 0 to {n - 1}, each once"
        )
    for one in delivered:
        check_ids("delivered", one.ids, facts.vocab_size)


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(
            field, f"{field} has the token id {wrong}; the model has tokens 0 to {vocab_size - 1}"
        )
