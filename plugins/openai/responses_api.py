"""`/v1/responses` on its way out: a response object, or the events that build it up. Pure.

Every event has its type in an `event:` line as well and a `sequence_number`; the last one, `response.completed` or
`response.incomplete`, holds the whole response.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from octavo.plugins.openai.responses import About, Object, Total
from octavo.plugins.tools.contract import Call, Content, Said

if TYPE_CHECKING:
    from octavo.core.client.stream import Piece
    from octavo.plugins.openai.asked import Asked
    from octavo.plugins.openai.errors import ApiError
    from octavo.plugins.openai.speech import Manners


class ResponsesReply:
    """The answer of a single choice, as items: reasoning, messages and calls."""

    prefix = "resp_"
    done = b""

    def __init__(self, about: About, asked: Asked, manners: Manners) -> None:
        self._about = about
        self._settings = asked.settings
        self._speech = manners.speech(asked.tools, one_call=asked.one_call, must=asked.must)
        self._numbers = count()
        self._items: list[Object] = []
        """All items so far; the last one may still grow."""
        self._open = False
        self._finish: str | None = None

    def opening(self, number: int) -> list[Object]:
        return [
            self._event(f"response.{state}", response=self._response("in_progress", None))
            for state in ("created", "in_progress")
        ]

    def chunks(self, number: int, piece: Piece) -> list[Object]:
        said = self._speech.feed(piece.text)
        if piece.finish is None:
            return self._told(said)
        self._finish = piece.finish
        return [*self._told([*said, *self._speech.finish()]), *self._close()]

    def usage_chunk(self, total: Total) -> Object:
        """The last event."""
        status = self._status()
        return self._event(f"response.{status}", response=self._response(status, total))

    def whole(self, choices: list[list[Piece]], total: Total) -> Object:
        for piece in choices[0]:
            self.chunks(0, piece)
        return self._response(self._status(), total)

    def failed(self, error: ApiError) -> Object:
        told = error.body()["error"]
        return self._event("error", code=told["code"], message=told["message"], param=told["param"])

    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _told(self, said: list[Said]) -> list[Object]:
        events: list[Object] = []
        for item in said:
            events += self._call(item) if isinstance(item, Call) else self._grow(item)
        return events

    def _grow(self, item: Said) -> list[Object]:
        """Text for the message or the reasoning that is being written, a new one if it is another kind."""
        assert not isinstance(item, Call)
        kind = "message" if isinstance(item, Content) else "reasoning"
        part = "output_text" if kind == "message" else "reasoning_text"
        events: list[Object] = []
        if not self._open or self._items[-1]["type"] != kind:
            events += self._close()
            begun: Object = {
                "id": self._id("msg" if kind == "message" else "rs"),
                "type": kind,
                "status": "in_progress",
            }
            begun |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
            self._items.append(begun)
            self._open = True
            events.append(self._of_item("response.output_item.added", item={**begun, "content": []}))
            begun["content"] = [_part(part, "")]
            events.append(self._of_part("response.content_part.added", part=_part(part, "")))
        self._items[-1]["content"][0]["text"] += item.text
        extra: Object = {"logprobs": []} if kind == "message" else {}
        events.append(self._of_part(f"response.{part}.delta", delta=item.text, **extra))
        return events

    def _close(self) -> list[Object]:
        if not self._open:
            return []
        self._open = False
        item = self._items[-1]
        item["status"] = self._item_status()
        (part,) = item["content"]
        extra: Object = {"logprobs": []} if item["type"] == "message" else {}
        return [
            self._of_part(f"response.{part['type']}.done", text=part["text"], **extra),
            self._of_part("response.content_part.done", part=dict(part)),
            self._of_item("response.output_item.done", item=dict(item)),
        ]

    def _call(self, call: Call) -> list[Object]:
        events = self._close()
        number = len(self._items)
        item: Object = {
            "id": self._id("fc"),
            "type": "function_call",
            "status": "completed",
            "call_id": f"call_{self._about.id[-24:]}_{number}",
            "name": call.name,
            "arguments": call.arguments,
        }
        self._items.append(item)
        begun = {**item, "status": "in_progress", "arguments": ""}
        about: Object = {"item_id": item["id"], "output_index": number}
        return [
            *events,
            self._of_item("response.output_item.added", item=begun),
            self._event("response.function_call_arguments.delta", **about, delta=call.arguments),
            self._event("response.function_call_arguments.done", **about, name=call.name, arguments=call.arguments),
            self._of_item("response.output_item.done", item=item),
        ]

    def _item_status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._about.id[-24:]}_{len(self._items)}"

    def _of_item(self, kind: str, **fields: Any) -> Object:
        return self._event(kind, output_index=len(self._items) - 1, **fields)

    def _of_part(self, kind: str, **fields: Any) -> Object:
        number = len(self._items) - 1
        return self._event(kind, item_id=self._items[-1]["id"], output_index=number, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Object:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _response(self, status: str, total: Total | None) -> Object:
        return {
            "id": self._about.id,
            "object": "response",
            "created_at": self._about.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._about.model,
            "output": list(self._items),
            "usage": None if total is None else _usage(total),
            **self._settings,
        }


def _part(kind: str, text: str) -> Object:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def _usage(total: Total) -> Object:
    return {
        "input_tokens": total.prompt,
        "input_tokens_details": {"cached_tokens": total.cached},
        "output_tokens": total.completion,
        "output_tokens_details": {"reasoning_tokens": 0, **total.predicted()},
        "total_tokens": total.prompt + total.completion,
    }
