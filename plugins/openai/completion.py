"""`/v1/completions` on its way in. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.messages import Ids, Prompt, Text
from octavo.plugins.openai.asked import Asked, to_asked
from octavo.plugins.openai.body import convert, kind_of, parse
from octavo.plugins.openai.errors import invalid
from octavo.plugins.openai.types import CompletionBody

MAX_PROMPTS = 2048
COMPLETION_MAX_TOKENS = 16
"""What `/v1/completions` generates where `max_tokens` is absent, as in OpenAI's API."""


def decode_completion(body: bytes) -> Asked:
    """`/v1/completions`."""
    request, ignored = convert(parse(body), CompletionBody)
    limit = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    logprobs = -1 if request.logprobs is None else request.logprobs
    asked = to_asked(request, prompts(request.prompt), limit, logprobs, ignored, request.best_of)
    params, n = asked.params, request.n or 1
    most = n if asked.beams is not None else request.best_of or n
    if most < n:
        raise invalid("best_of", f"best_of is {most}, less than n, {n}")
    if most > n:
        if asked.stream:
            raise invalid("best_of", "best_of more than n is not possible with stream: the best is known at the end")
        sampling = msgspec.structs.replace(params.sampling, logprobs=max(logprobs, 0))
        params = msgspec.structs.replace(params, n=most, sampling=sampling)
    if request.echo and logprobs >= 0:
        sampling = msgspec.structs.replace(params.sampling, prompt_logprobs=logprobs)
        params = msgspec.structs.replace(params, sampling=sampling, max_tokens=max(params.max_tokens or 0, 1))
        asked = asked._replace(scores_only=limit == 0)
    return asked._replace(params=params, echo=bool(request.echo))


def prompts(prompt: str | list[Any]) -> list[Prompt]:
    """The four forms: a string, strings, ids, lists of ids."""
    if isinstance(prompt, str):
        return [_text_prompt(prompt, "prompt")]
    if not prompt:
        raise invalid("prompt", "prompt is empty")
    if isinstance(prompt[0], int):
        return [_ids_prompt(prompt, "prompt")]
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt has {len(prompt)} entries, at most {MAX_PROMPTS} are possible")
    if isinstance(prompt[0], str):
        return [_text_prompt(item, f"prompt[{i}]") for i, item in enumerate(prompt)]
    return [_ids_prompt(item, f"prompt[{i}]") for i, item in enumerate(prompt)]


def _text_prompt(text: Any, path: str) -> Text:
    if not isinstance(text, str):
        raise invalid(path, f"{path} must be a string like the entries before it, not {kind_of(text)}")
    if not text:
        raise invalid(path, f"{path} is empty")
    return Text(text)


def _ids_prompt(ids: Any, path: str) -> Ids:
    if not isinstance(ids, list):
        raise invalid(path, f"{path} must be a string or a list of token ids, not {kind_of(ids)}")
    if not ids:
        raise invalid(path, f"{path} is empty")
    for i, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31:
            raise invalid(f"{path}[{i}]", f"{path}[{i}] is not a token id: an integer from 0 on")
    return Ids(ids)
