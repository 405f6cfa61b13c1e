"""From pieces of output to OpenAI's response objects: pure.

`ChatReply` and `CompletionReply` each make the chunks of a stream and the whole object of the same answer. The
number of a choice over HTTP is prompt × n + choice.
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from octavo.plugins.openai import sse
from octavo.plugins.tools.contract import Call, Content, Reasoning

if TYPE_CHECKING:
    from octavo.core.client.stream import Piece
    from octavo.core.messages import TextLogprob
    from octavo.plugins.openai.asked import Asked
    from octavo.plugins.openai.errors import ApiError
    from octavo.plugins.openai.speech import Manners, Speech

Object = dict[str, Any]


@dataclass(slots=True)
class Total:
    """Tokens of an answer: each prompt counts once, the output of all choices is summed."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    drafted: int = 0
    accepted: int = 0
    """Guesses of a drafter that were verified, and those of them that were right."""
    so_far: int = 0
    """Output tokens that have come, of choices that have not ended too."""

    def add(self, piece: Piece) -> None:
        """Count a choice that has ended; of the prompt's cached part, choice 0's counts, since the others fork it."""
        self.so_far += len(piece.ids)
        if piece.usage is not None:
            self.completion += piece.usage.completion
            self.so_far = max(self.so_far, self.completion)
            self.drafted += piece.usage.drafted
            self.accepted += piece.usage.accepted
            self.cached += piece.usage.cached if piece.choice == 0 else 0

    def body(self) -> Object:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": self.predicted(),
        }

    def predicted(self) -> Object:
        """What became of guesses, as OpenAI names it for the guesses that its clients send."""
        return {
            "accepted_prediction_tokens": self.accepted,
            "rejected_prediction_tokens": self.drafted - self.accepted,
        }

    def body_so_far(self) -> Object:
        """The same in the middle of an answer, where the cached part is not known."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.so_far,
            "total_tokens": self.prompt + self.so_far,
        }


@dataclass(frozen=True, slots=True)
class About:
    """What is the same in all objects of one answer."""

    id: str
    created: int
    model: str
    fingerprint: str


class Reply(Protocol):
    """How one endpoint writes an answer."""

    prefix: str
    done: bytes
    """What ends a stream."""

    def failed(self, error: ApiError) -> Object:
        """How an error is told once a stream has begun."""
        ...

    def opening(self, number: int) -> list[Object]:
        """The chunks that come before a choice's first output."""
        ...

    def chunks(self, number: int, piece: Piece) -> list[Object]: ...

    def usage_chunk(self, total: Total) -> Object: ...

    def whole(self, choices: list[list[Piece]], total: Total) -> Object: ...


class ChatReply:
    """`chat.completion` and `chat.completion.chunk`."""

    prefix = "chatcmpl-"
    done = sse.DONE

    def __init__(self, about: About, asked: Asked, manners: Manners) -> None:
        self._about = about
        self._include_usage = asked.include_usage
        self._make = partial(manners.speech, asked.tools, one_call=asked.one_call, must=asked.must)
        self._named = asked.must is not None and asked.must.name is not None
        self._speeches: defaultdict[int, Speech] = defaultdict(self._make)

    def opening(self, number: int) -> list[Object]:
        return [self._chunk(number, {"role": "assistant", "content": ""})]

    def chunks(self, number: int, piece: Piece) -> list[Object]:
        """The finish has a chunk of its own: some clients do not read the content beside it."""
        speech = self._speeches[number]
        calls = speech.calls
        said = speech.feed(piece.text)
        if piece.finish is not None:
            said += speech.finish()
        deltas: list[Object] = []
        for item in said:
            match item:
                case Content(text):
                    deltas.append({"content": text})
                case Reasoning(text):
                    deltas.append({"reasoning_content": text})
                case Call(_, arguments):
                    call = self._call(number, calls, item._replace(arguments=""))
                    deltas.append({"tool_calls": [{"index": calls, **call}]})
                    deltas.append({"tool_calls": [{"index": calls, "function": {"arguments": arguments}}]})
                    calls += 1
        logprobs = _chat_logprobs(piece.logprobs) if piece.logprobs else None
        if logprobs is not None and not deltas:
            deltas = [{"content": ""}]  # the text is held back, its tokens are not
        chunks = [self._chunk(number, delta, logprobs if not i else None) for i, delta in enumerate(deltas)]
        if piece.finish is not None:
            chunks.append(self._chunk(number, {}, finish=self._finish(piece.finish, speech)))
        return chunks

    def _finish(self, finish: str | None, speech: Speech) -> str | None:
        """An answer that was cut says so, whatever it had called before; one that had to call a named function only
        did what it was told."""
        return "tool_calls" if finish == "stop" and speech.calls and not self._named else finish

    def _call(self, number: int, index: int, call: Call) -> Object:
        """Its id is the same whole and streamed, and no other call's."""
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call_{self._about.id[-24:]}_{number}_{index}", "type": "function", "function": function}

    def failed(self, error: ApiError) -> Object:
        return error.body()

    def usage_chunk(self, total: Total) -> Object:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": total.body()}

    def whole(self, choices: list[list[Piece]], total: Total) -> Object:
        return {
            **self._head("chat.completion"),
            "choices": [self._choice(number, pieces) for number, pieces in enumerate(choices)],
            "usage": total.body(),
        }

    def _choice(self, number: int, pieces: list[Piece]) -> Object:
        speech = self._make()
        said = [*speech.feed("".join(piece.text for piece in pieces)), *speech.finish()]
        calls = [self._call(number, i, call) for i, call in enumerate(item for item in said if isinstance(item, Call))]
        content = "".join(item.text for item in said if isinstance(item, Content))
        reasoning = "".join(item.text for item in said if isinstance(item, Reasoning))
        message: Object = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        entries = _joined_logprobs(pieces)
        return {
            "index": number,
            "message": message,
            "logprobs": None if entries is None else _chat_logprobs(entries),
            "finish_reason": self._finish(pieces[-1].finish, speech),
        }

    def _chunk(
        self, number: int, delta: Object, logprobs: Object | None = None, *, finish: str | None = None
    ) -> Object:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage: Object = {"usage": None} if self._include_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage}

    def _head(self, kind: str) -> Object:
        return _head(self._about, kind)


class CompletionReply:
    """`text_completion`, the same object streamed and whole."""

    prefix = "cmpl-"
    done = sse.DONE

    def __init__(self, about: About, asked: Asked, manners: Manners) -> None:
        self._about = about
        self._include_usage = asked.include_usage
        self._shows_logprobs = asked.shows_logprobs
        self._make = partial(_Offsets, echo=asked.echo)
        self._offsets: defaultdict[int, _Offsets] = defaultdict(self._make)

    def opening(self, number: int) -> list[Object]:
        return []

    def chunks(self, number: int, piece: Piece) -> list[Object]:
        if not (piece.text or piece.logprobs or piece.finish is not None):
            return []
        usage: Object = {"usage": None} if self._include_usage else {}
        choice = self._choice(number, piece.text, piece.logprobs, piece.finish, self._offsets[number])
        return [{**_head(self._about, "text_completion"), "choices": [choice], **usage}]

    def failed(self, error: ApiError) -> Object:
        return error.body()

    def usage_chunk(self, total: Total) -> Object:
        return {**_head(self._about, "text_completion"), "choices": [], "usage": total.body()}

    def whole(self, choices: list[list[Piece]], total: Total) -> Object:
        return {
            **_head(self._about, "text_completion"),
            "choices": [
                self._choice(
                    number, "".join(p.text for p in pieces), _joined_logprobs(pieces), pieces[-1].finish, self._make()
                )
                for number, pieces in enumerate(choices)
            ],
            "usage": total.body(),
        }

    def _choice(
        self, number: int, text: str, entries: list[TextLogprob] | None, finish: str | None, offsets: _Offsets
    ) -> Object:
        return {
            "index": number,
            "text": text,
            "logprobs": _completion_logprobs(entries or [], text, offsets) if self._shows_logprobs else None,
            "finish_reason": finish,
        }


@dataclass(slots=True)
class _Offsets:
    """Where in a choice's text each token begins, in characters; a token may begin inside of one."""

    echo: bool
    """The first token is the prompt's first: nothing is known of it."""
    sent: int = 0
    """Characters of the text given out so far."""
    decoded: int = 0
    """Characters that the tokens so far complete."""
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def take(self, entries: list[TextLogprob], text: str) -> list[int]:
        """The offsets of these tokens, whose text is `text`: none beyond its end (a stop string cuts it)."""
        self.sent += len(text)
        offsets = []
        for entry in entries:
            offsets.append(min(self.decoded, self.sent))
            self.decoded += len(self.decoder.decode(entry.data))
        return offsets


def _head(about: About, kind: str) -> Object:
    return {
        "id": about.id,
        "object": kind,
        "created": about.created,
        "model": about.model,
        "system_fingerprint": about.fingerprint,
    }


def _joined_logprobs(pieces: list[Piece]) -> list[TextLogprob] | None:
    if all(piece.logprobs is None for piece in pieces):
        return None
    return [entry for piece in pieces for entry in piece.logprobs or ()]


def _chat_logprobs(entries: list[TextLogprob]) -> Object:
    return {
        "content": [
            {
                "token": entry.token,
                "logprob": entry.logprob,
                "bytes": list(entry.data),
                "top_logprobs": [
                    {"token": token, "logprob": logprob, "bytes": list(data)} for token, data, logprob in entry.top
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _completion_logprobs(entries: list[TextLogprob], text: str, offsets: _Offsets) -> Object:
    """The maps hold the chosen token too, so up to one entry more than was asked for; of two tokens with the
    same text the likelier one stays."""
    maps: list[dict[str, float] | None] = []
    for entry in entries:
        likeliest = {token: logprob for token, _, logprob in reversed(entry.top)}
        likeliest.setdefault(entry.token, entry.logprob)
        maps.append(likeliest)
    values: list[float | None] = [entry.logprob for entry in entries]
    if offsets.echo and entries:
        offsets.echo, maps[0], values[0] = False, None, None
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": values,
        "top_logprobs": maps,
        "text_offset": offsets.take(entries, text),
    }
