"""From pieces of output to OpenAI's response objects: pure.

`ChatReply` and `CompletionReply` each make the chunks of a stream and the whole object of the same answer. The
number of a choice over HTTP is prompt × n + choice.
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from octavo.core.client.stream import Piece
    from octavo.core.messages import TextLogprob

Object = dict[str, Any]


@dataclass(slots=True)
class Total:
    """Tokens of an answer: each prompt counts once, the output of all choices is summed."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def add(self, piece: Piece) -> None:
        """Count a choice that has ended; of the prompt's cached part, choice 0's counts, since the others fork it."""
        if piece.usage is not None:
            self.completion += piece.usage.completion
            self.cached += piece.usage.cached if piece.choice == 0 else 0

    def body(self) -> Object:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
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

    def opening(self, number: int) -> list[Object]:
        """The chunks that come before a choice's first output."""
        ...

    def chunks(self, number: int, piece: Piece) -> list[Object]: ...

    def usage_chunk(self, total: Total) -> Object: ...

    def whole(self, choices: list[list[Piece]], total: Total) -> Object: ...


class ChatReply:
    """`chat.completion` and `chat.completion.chunk`."""

    prefix = "chatcmpl-"

    def __init__(self, about: About, *, include_usage: bool) -> None:
        self._about = about
        self._include_usage = include_usage

    def opening(self, number: int) -> list[Object]:
        return [self._chunk(number, {"role": "assistant", "content": ""})]

    def chunks(self, number: int, piece: Piece) -> list[Object]:
        """The finish has a chunk of its own: some clients do not read the content beside it."""
        chunks = []
        if piece.text or piece.logprobs:
            logprobs = _chat_logprobs(piece.logprobs) if piece.logprobs is not None else None
            chunks.append(self._chunk(number, {"content": piece.text}, logprobs))
        if piece.finish is not None:
            chunks.append(self._chunk(number, {}, finish=piece.finish))
        return chunks

    def usage_chunk(self, total: Total) -> Object:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": total.body()}

    def whole(self, choices: list[list[Piece]], total: Total) -> Object:
        return {
            **self._head("chat.completion"),
            "choices": [self._choice(number, pieces) for number, pieces in enumerate(choices)],
            "usage": total.body(),
        }

    def _choice(self, number: int, pieces: list[Piece]) -> Object:
        text = "".join(piece.text for piece in pieces)
        entries = _joined_logprobs(pieces)
        return {
            "index": number,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None if entries is None else _chat_logprobs(entries),
            "finish_reason": pieces[-1].finish,
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

    def __init__(self, about: About, *, include_usage: bool) -> None:
        self._about = about
        self._include_usage = include_usage
        self._offsets: defaultdict[int, _Offsets] = defaultdict(_Offsets)

    def opening(self, number: int) -> list[Object]:
        return []

    def chunks(self, number: int, piece: Piece) -> list[Object]:
        if not (piece.text or piece.logprobs or piece.finish is not None):
            return []
        usage: Object = {"usage": None} if self._include_usage else {}
        choice = self._choice(number, piece.text, piece.logprobs, piece.finish, self._offsets[number])
        return [{**_head(self._about, "text_completion"), "choices": [choice], **usage}]

    def usage_chunk(self, total: Total) -> Object:
        return {**_head(self._about, "text_completion"), "choices": [], "usage": total.body()}

    def whole(self, choices: list[list[Piece]], total: Total) -> Object:
        return {
            **_head(self._about, "text_completion"),
            "choices": [
                self._choice(
                    number, "".join(p.text for p in pieces), _joined_logprobs(pieces), pieces[-1].finish, _Offsets()
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
            "logprobs": None if entries is None else _completion_logprobs(entries, text, offsets),
            "finish_reason": finish,
        }


@dataclass(slots=True)
class _Offsets:
    """Where in a choice's text each token begins, in characters; a token may begin inside of one."""

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
    maps: list[dict[str, float]] = []
    for entry in entries:
        likeliest = {token: logprob for token, _, logprob in reversed(entry.top)}
        likeliest.setdefault(entry.token, entry.logprob)
        maps.append(likeliest)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": maps,
        "text_offset": offsets.take(entries, text),
    }
