"""Beam search over the engine: one answer made from many small requests. The search itself is in `beams`.

A step asks for one token after every beam, with its alternatives; the engine computes the beams together and takes
what they share from the prefix cache. Each of them is a request of its own, `<id>-<step>-<beam>`. The answer is a
`Stream` like any other, which is fed once the search is over; leaving it cancels what is open.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple, Protocol

import anyio
import msgspec

from octavo.core.client.stream import ClientError, Piece, RequestRefused, Stream
from octavo.core.messages import Ids, Row, Sampling, TextLogprob, Usage
from octavo.plugins.openai.beams import Beam, Beams, BeamSearch, Option

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

    from octavo.core.messages import Facts, Params, Prompt

MOST_OPTIONS = 20
"""Of how many tokens the engine tells the log-probability, in a step."""


class Words(Protocol):
    """What a search needs of the engine beside its requests."""

    @property
    def facts(self) -> Facts | None: ...

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool) -> list[int]: ...

    async def detokenize(self, ids: list[int], *, before: list[int] | None, skip_special_tokens: bool) -> str: ...


class _Step(NamedTuple):
    """What one request for one token gave."""

    piece: Piece
    prompt_tokens: int
    ends: tuple[int, ...]


class Searcher:
    """One search for one prompt. `open_request(prompt, params, request_id)` opens a request of the engine; `generated`
    is told how many tokens have come, as they come; what it raises of `ClientError` ends the search."""

    def __init__(
        self,
        words: Words,
        open_request: Callable[[Prompt, Params, str], Awaitable[Stream]],
        search: BeamSearch,
        params: Params,
        request_id: str,
        generated: Callable[[int], None],
    ) -> None:
        self._words = words
        self._generated = generated
        self._open = open_request
        self._search = search
        self._params = params
        self._request_id = request_id
        self._steps = 0

    def start(self, prompt: Prompt, tasks: TaskGroup) -> Stream:
        """The answer, of `params.n` choices, best first; it is worked on in `tasks`."""
        scope = anyio.CancelScope()
        stream = Stream(self._request_id, self._params.n, cancel=lambda _: scope.cancel())

        async def run() -> None:
            with scope:
                try:
                    await self._run(prompt, stream)
                except ClientError as error:
                    stream.fail(error)

        tasks.start_soon(run)
        return stream

    async def _run(self, prompt: Prompt, stream: Stream) -> None:
        first = await self._first(prompt, stream)
        if first is None:
            return
        context = self._words.facts.context if self._words.facts is not None else 0
        room = context - first.prompt_tokens
        limit = room if self._params.max_tokens is None else min(self._params.max_tokens, room)
        beams = Beams(self._search, first.ends, limit)
        ids = await self._words.tokenize(prompt, add_special_tokens=True)
        steps: list[_Step] | None = [first]
        asked = max(self._params.sampling.logprobs, beams.options_needed)
        while steps is not None:
            beams.tell([_options(step.piece, beams.options_needed) for step in steps])
            if beams.done:
                await self._answer(stream, beams, ids, first)
                return
            prompts: list[Prompt] = [Ids([*ids, *beam.ids]) for beam in beams.running]
            steps = await self._step(prompts, Sampling(temperature=0.0, logprobs=asked), stream)

    async def _first(self, prompt: Prompt, stream: Stream) -> _Step | None:
        """The prompt's own step; whether the prompt is accepted is whether the answer is."""
        wanted = self._params.sampling.prompt_logprobs
        sampling = Sampling(temperature=0.0, logprobs=MOST_OPTIONS, prompt_logprobs=wanted)
        steps = await self._step([prompt], sampling, stream)
        return None if steps is None else steps[0]

    def _accept(self, stream: Stream, prompt_tokens: int, ends: tuple[int, ...]) -> None:
        """Raises `RequestRefused`."""
        needed = self._search.width + len(ends)
        facts = self._words.facts
        most = MOST_OPTIONS if facts is None else min(MOST_OPTIONS, facts.vocab_size)
        if needed > most:
            raise RequestRefused(
                "beam_width",
                f"{self._search.width} beams and {len(ends)} end tokens need {needed} candidates of a beam; "
                f"at most {most} are possible here: ask for fewer beams",
            )
        stream.accept(prompt_tokens, ends)

    async def _step(self, prompts: list[Prompt], sampling: Sampling, stream: Stream) -> list[_Step] | None:
        """One more token after each prompt, all at once; None if one failed, and then the answer has failed as it."""
        params = msgspec.structs.replace(self._params, n=1, max_tokens=1, sampling=sampling)
        steps: list[_Step] = []
        streams: list[Stream] = []
        async with AsyncExitStack() as opened:
            try:
                for number, prompt in enumerate(prompts):
                    request_id = f"{self._request_id}-{self._steps}-{number}"
                    streams.append(await opened.enter_async_context(await self._open(prompt, params, request_id)))
                for one in streams:
                    prompt_tokens = await one.accepted()
                    if self._steps == 0:
                        self._accept(stream, prompt_tokens, one.ends)
                    pieces = [piece async for piece in one]
                    last = pieces[-1]
                    if last.finish not in ("stop", "length"):
                        stream.feed(Row(self._request_id, 0, 0, 0, [], "", last.finish, last.reason))
                        return None
                    steps.append(_Step(next(piece for piece in pieces if piece.ids), prompt_tokens, one.ends))
                    stream.unseen_tokens += 1
                    self._generated(1)
            finally:  # where the search ends here, the others' tokens may have come all the same
                stream.unseen_tokens += sum(one.open_tokens for one in streams[len(steps) :])
        self._steps += 1
        return steps

    async def _answer(self, stream: Stream, beams: Beams, prompt: list[int], first: _Step) -> None:
        """Give out the best. All tokens that were generated are counted: choice 0 has those of beams not shown."""
        shown = [beam for _, beam in beams.finished[: self._params.n]]
        skip = self._params.skip_special_tokens
        texts = [
            await self._words.detokenize(
                list(beam.ids[: len(beam.ids) - (skip and beams.ends_with(beam))]),
                before=prompt,
                skip_special_tokens=skip,
            )
            for beam in shown
        ]
        counts = [len(beam.ids) for beam in shown]
        counts[0] = max(counts[0], stream.unseen_tokens - sum(counts[1:]))
        stream.unseen_tokens = 0
        cached = first.piece.usage.cached if first.piece.usage is not None else 0
        for choice, (beam, text) in enumerate(zip(shown, texts, strict=True)):
            finish = "stop" if beams.ends_with(beam) else "length"
            usage = Usage(len(prompt), counts[choice], cached)
            entries, before = self._entries(beam), first.piece.prompt_logprobs
            stream.feed(Row(stream.request_id, choice, 0, 0, list(beam.ids), text, finish, "", usage, entries, before))

    def _entries(self, beam: Beam) -> list[TextLogprob] | None:
        """A beam's log-probabilities, with as many alternatives as were asked for."""
        asked = self._params.sampling.logprobs
        if asked < 0:
            return None
        return [
            msgspec.structs.replace(entry, top=entry.top[:asked], ids=entry.ids[: asked + 1]) for entry in beam.entries
        ]


def _options(piece: Piece, needed: int) -> list[Option]:
    """The tokens that may come instead of the piece's own, as if each had been chosen; best first. Raises
    `RequestRefused`: with fewer than needed there might be no end to give out."""
    entry = piece.logprobs[0] if piece.logprobs else None
    told = 0 if entry is None else len(entry.top)
    if entry is None or told < needed:
        reason = f"the executor that runs tells of {told} candidates for a token, and a search needs {needed} here"
        raise RequestRefused("use_beam_search", reason, "unsupported_parameter")
    return [
        Option(token, logprob, TextLogprob(text, data, logprob, entry.top, [token, *entry.ids[1:]]))
        for token, (text, data, logprob) in zip(entry.ids[1:], entry.top, strict=True)
    ]
