"""What a request may ask for: ranges of its parameters, and whether its prompt fits. Everything that is not checked
here reaches the executor. Pure; every refusal names the field as clients know it, and has the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from octavo.core.messages import Adapter, Chat, Delivered, Facts, Params, Prompt, Sampling, Submit
from octavo.core.tokenizer.invalid import InvalidRequestError

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BIAS = 100.0
MAX_KEEP_S = 1e9
INT32 = 2**31
INT64 = 2**63

_RANGES: dict[str, tuple[str, float, float, str]] = {
    "temperature": ("temperature", 0.0, 100.0, "from 0 to 100"),
    "top_p": ("top_p", math.ulp(0.0), 1.0, "more than 0, up to 1"),
    "min_p": ("min_p", 0.0, 1.0, "from 0 to 1"),
    "typical_p": ("typical_p", math.ulp(0.0), 1.0, "more than 0, up to 1"),
    "repetition": ("repetition_penalty", 1e-6, 100.0, "from 0.000001 to 100"),
    "presence": ("presence_penalty", -2.0, 2.0, "from -2 to 2"),
    "frequency": ("frequency_penalty", -2.0, 2.0, "from -2 to 2"),
}
"""Per number of `Sampling`: its name for clients, least and greatest value, and the range in words."""


def checked_sampling(sampling: Sampling) -> Sampling:
    """The same with equivalent spellings made one: `top_k` -1 is 0 (off), as many as 32 bits count are all, a
    seed is taken modulo 2^64."""
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
    if not -1 <= sampling.prompt_logprobs <= MAX_LOGPROBS:
        raise InvalidRequestError(
            "prompt_logprobs",
            f"{sampling.prompt_logprobs} alternatives per prompt token are asked for; at most {MAX_LOGPROBS} are given",
        )
    return msgspec.structs.replace(sampling, top_k=min(max(0, sampling.top_k), INT32 - 1), seed=sampling.seed % 2**64)


def checked_adapter(asked: str | Adapter, facts: Facts) -> Adapter | None:
    """The adapter asked for, if the executor takes any."""
    if isinstance(asked, str):
        if asked:  # the client library knows no such name
            raise InvalidRequestError("model", f"there is no adapter {asked!r}", "model_not_found")
        return None
    if "adapters" not in facts.serves:
        raise InvalidRequestError(
            "model",
            f"the executor ({facts.executor or 'this one'}) does not serve LoRA adapters; native, cpu and cuda do",
            "unsupported_parameter",
        )
    return asked


def check_choosable(sampling: Sampling, facts: Facts) -> None:
    """What says which ids may be chosen."""
    if len(sampling.bias) > MAX_BIASES:
        raise InvalidRequestError(
            "logit_bias", f"logit_bias has {len(sampling.bias)} entries; at most {MAX_BIASES} are taken"
        )
    for token, bias in sampling.bias.items():
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequestError(
                "logit_bias", f"logit_bias of token {token} is {bias}; it must be from -{MAX_BIAS:g} to {MAX_BIAS:g}"
            )
    check_ids("logit_bias", list(sampling.bias), facts.vocab_size)
    check_ids("allowed_token_ids", sampling.allowed, facts.vocab_size)
    for word in sampling.banned:
        if not word:
            raise InvalidRequestError("bad_words", "a bad word gives no tokens")
        check_ids("bad_words", word, facts.vocab_size)
    if not 0 <= sampling.min_tokens < INT32:
        raise InvalidRequestError(
            "min_tokens", f"min_tokens is {sampling.min_tokens}; it must be from 0 to {INT32 - 1}"
        )
    restricted = sampling.bias or sampling.allowed or sampling.banned or sampling.min_tokens
    if restricted and "restrictions" not in facts.serves:
        raise InvalidRequestError(
            "logit_bias",
            "the executor that runs serves no logit_bias, allowed_token_ids, bad_words or min_tokens",
            "unsupported_parameter",
        )
    if sampling.grammar is not None and "grammar" not in facts.serves:
        raise InvalidRequestError(
            "response_format", "the executor that runs keeps to no grammar or schema", "unsupported_parameter"
        )
    if sampling.grammar is not None and sampling.allowed:
        raise InvalidRequestError("allowed_token_ids", "allowed_token_ids and a grammar exclude each other")
    if sampling.prompt_logprobs >= 0 and "prompt_logprobs" not in facts.serves:
        raise InvalidRequestError(
            "prompt_logprobs",
            "the executor that runs gives no log-probabilities of a prompt (which echo with logprobs asks for)",
            "unsupported_parameter",
        )


def check_carried(submit: Submit) -> None:
    """That its own numbers fit where they go: columns of the scheduler, of 32 and (times) 64 bits, both signed."""
    for field, value, bound in (
        ("priority", submit.priority, INT32),
        ("attempt", submit.attempt, INT32),
        ("received_ns", submit.received_ns, INT64),
        ("deadline_ns", submit.deadline_ns or 0, INT64),
    ):
        if not -bound < value < bound:
            raise InvalidRequestError(field, f"{field} is {value}; {field} must fit {bound.bit_length()} bits")


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
    if not 0 <= params.keep_s <= MAX_KEEP_S:  # false for NaN as well
        raise InvalidRequestError(
            "cache_keep_s", f"cache_keep_s is {params.keep_s}; it must be from 0 to {MAX_KEEP_S:g} seconds"
        )
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            "bad_words", f"there are {len(params.bad_words)} bad words; at most {MAX_BAD_WORDS} are taken"
        )
    for word in params.bad_words:
        if not 1 <= len(word) <= MAX_STOP_CHARS:
            raise InvalidRequestError(
                "bad_words", f"a bad word has {len(word)} characters; it must have from 1 to {MAX_STOP_CHARS}"
            )
    if params.max_tokens is not None and params.sampling.min_tokens > params.max_tokens:
        raise InvalidRequestError(
            "min_tokens", f"min_tokens is {params.sampling.min_tokens}, more than max_tokens, {params.max_tokens}"
        )
    check_choosable(params.sampling, facts)


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
