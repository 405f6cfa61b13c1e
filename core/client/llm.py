"""`octavo.LLM`: a model for scripts, without HTTP.

    with LLM() as llm:
        print(llm.chat([{"role": "user", "content": "What is 2+2?"}], temperature=0).text)

The daemon's processes are started around it, or a running daemon is joined with `LLM(run=…)`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import anyio
import msgspec

from octavo.core.client.blocking import START_S, BlockingClient
from octavo.core.client.client import SEED_ABSENT, Client
from octavo.core.client.stream import ClientError, Piece, RequestFailed
from octavo.core.messages import Chat, Facts, Ids, Params, Prompt, Sampling, Text, TextLogprob, Usage


class Choice(msgspec.Struct, frozen=True):
    """One continuation. `finish` is stop or length."""

    text: str
    ids: list[int]
    finish: str
    usage: Usage
    logprobs: list[TextLogprob] | None


class Output(msgspec.Struct, frozen=True):
    """What a prompt gave: its `n` choices. `text` is the first one's."""

    request_id: str
    prompt_tokens: int
    choices: list[Choice]

    @property
    def text(self) -> str:
        return self.choices[0].text


class LLM:
    """A model that is ready when the constructor returns.

    `model` is what `octavo serve` takes; `settings` are sections of the configuration document, as in
    `LLM("ghost", kv={"tokens": 4096})`. With `run`, the folder of a running daemon, neither has a meaning.
    Raises `ServiceUnavailable` with the daemon's own words if it does not get ready.
    """

    def __init__(
        self,
        model: str = "default",
        *,
        run: str | Path | None = None,
        start_timeout_s: float = START_S,
        **settings: Mapping[str, Any],
    ) -> None:
        arguments = [model, *(word for pair in _leaves(settings, "") for word in ("--set", pair))]
        self._blocking = BlockingClient(None if run is None else Path(run), arguments, start_timeout_s)

    @property
    def facts(self) -> Facts:
        """The model's id, context and the like."""
        return self._blocking.facts

    @property
    def run_dir(self) -> Path:
        """The daemon's run folder: for its status and its trace."""
        return self._blocking.client.run_dir

    def generate(
        self, prompts: str | Sequence[int] | Sequence[str | list[int]], params: Params | None = None, **how: Any
    ) -> list[Output]:
        """Continue one prompt or several at once, each text or token ids; an output per prompt, in order.

        `how` are fields of `Params` and `Sampling` (max_tokens, n, stop, temperature, seed, …), over `params`.
        Raises `RequestRefused` if one of them cannot be served; the others are cancelled then."""
        asked = parameters(params, **how)
        return self._blocking.call(lambda: _all(self._blocking.client, _prompts(prompts), asked))

    def chat(self, messages: list[dict[str, Any]], params: Params | None = None, **how: Any) -> Output:
        """The answer to a conversation: dicts with role and content, as in OpenAI's API."""
        asked = parameters(params, **how)
        (output,) = self._blocking.call(lambda: _all(self._blocking.client, [Chat(messages)], asked))
        return output

    def stream(self, messages: list[dict[str, Any]], params: Params | None = None, **how: Any) -> Iterator[Piece]:
        """The same, as it comes; leaving the iteration cancels it."""
        return self._blocking.pieces(Chat(messages), parameters(params, **how))

    def tokenize(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Token ids of a text, or of a conversation up to where the answer begins. Raises `RequestRefused`."""
        asked = Text(prompt) if isinstance(prompt, str) else Chat(prompt)
        return self._blocking.call(lambda: self._blocking.client.tokenize(asked))

    def close(self) -> None:
        """Stop the daemon, unless it was joined."""
        self._blocking.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def parameters(params: Params | None = None, **how: Any) -> Params:
    """`params` (by default none, with a fresh seed) with the fields in `how` set. TypeError for an unknown one."""
    if params is None:
        params = Params(sampling=Sampling(seed=SEED_ABSENT))
    known = (*Sampling.__struct_fields__, *(name for name in Params.__struct_fields__ if name != "sampling"))
    unknown = sorted(set(how) - set(known))
    if unknown:
        raise TypeError(f"unknown parameter {', '.join(unknown)}: there are {', '.join(known)}")
    sampling = {name: how.pop(name) for name in Sampling.__struct_fields__ if name in how}
    for name in ("stop", "stop_ids"):
        if name in how:
            how[name] = (how[name],) if isinstance(how[name], str) else tuple(how[name])
    return msgspec.structs.replace(params, sampling=msgspec.structs.replace(params.sampling, **sampling), **how)


def _leaves(settings: Mapping[str, Any], path: str) -> Iterator[str]:
    """`a.b=c` for every leaf; JSON's spelling of a value is TOML's."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}={json.dumps(value)}"


def _prompts(prompts: str | Sequence[int] | Sequence[str | list[int]]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [Text(prompts)]
    if prompts and isinstance(prompts[0], int):
        return [Ids(list(cast("Sequence[int]", prompts)))]
    several = cast("Sequence[str | list[int]]", prompts)
    return [Text(one) if isinstance(one, str) else Ids(one) for one in several]


async def _all(client: Client, prompts: list[Prompt], params: Params) -> list[Output]:
    """All prompts at once; the first error (not a group of them) ends all."""
    outputs: list[Output | None] = [None] * len(prompts)
    errors: list[ClientError] = []

    async def one(i: int, scope: anyio.CancelScope) -> None:
        try:
            outputs[i] = await _output(client, prompts[i], params)
        except ClientError as error:
            errors.append(error)
            scope.cancel()

    async with anyio.create_task_group() as tasks:
        for i in range(len(prompts)):
            tasks.start_soon(one, i, tasks.cancel_scope)
    if errors:
        raise errors[0]
    return [output for output in outputs if output is not None]


async def _output(client: Client, prompt: Prompt, params: Params) -> Output:
    pieces: list[list[Piece]] = [[] for _ in range(params.n)]
    async with await client.generate(prompt, params) as stream:
        prompt_tokens = await stream.accepted()
        async for piece in stream:
            if piece.finish not in (None, "stop", "length"):
                raise RequestFailed(piece.finish, piece.reason)
            pieces[piece.choice].append(piece)
    return Output(stream.request_id, prompt_tokens, [_choice(mine) for mine in pieces])


def _choice(pieces: list[Piece]) -> Choice:
    last = pieces[-1]
    assert last.finish is not None  # a stream ends only after each choice's last piece
    assert last.usage is not None  # and that has them
    return Choice(
        text="".join(piece.text for piece in pieces),
        ids=[token for piece in pieces for token in piece.ids],
        finish=last.finish,
        usage=last.usage,
        logprobs=[entry for piece in pieces for entry in piece.logprobs or ()] if last.logprobs is not None else None,
    )
