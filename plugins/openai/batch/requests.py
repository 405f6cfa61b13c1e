"""A batch as files: the requests in one, a line of JSON each, the answers in another.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
    {"id": …, "custom_id": "a", "response": {"status_code": 200, "request_id": …, "body": {…}}, "error": null}

Answers are in the order in which they came. The file of answers is also the batch's memory: what is in it is not
asked again, and a line that a crash has cut off is as if it had never been begun. Knows nothing of who answers.
"""

from __future__ import annotations

import fcntl
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


_BEGINNING = b'{"id":"batch_req_'
"""Of an answer's line, as we write it."""


class BatchError(Exception):
    """A file that cannot be used; the message names the line."""


class Line(msgspec.Struct, frozen=True):
    """One request."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: Literal["POST"] = "POST"


class Response(msgspec.Struct, frozen=True):
    """`request_id` is the one that `octavo trace show` takes, if the request got so far."""

    status_code: int
    request_id: str
    body: Any


class Answered(msgspec.Struct, frozen=True):
    """One answer. `error` is for who reads OpenAI's own files; here whatever failed has a response that says so."""

    id: str
    custom_id: str
    response: Response
    error: None = None


def read_requests(path: Path) -> list[Line]:
    """All requests, in order. Raises `BatchError` if any line is none, or two have the same `custom_id`."""
    lines: list[Line] = []
    first_seen: dict[str, int] = {}
    for number, text in _lines(path):
        try:
            line = msgspec.json.decode(text, type=Line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BatchError(f"{path}, line {number}: {error}") from error
        if line.url not in URLS:
            raise BatchError(f"{path}, line {number}: url is {line.url!r}, not one of {', '.join(URLS)}")
        if line.body.get("stream"):
            raise BatchError(f"{path}, line {number}: an answer in a file cannot be streamed; leave `stream` out")
        if (before := first_seen.setdefault(line.custom_id, number)) != number:
            raise BatchError(f"{path}, line {number}: custom_id {line.custom_id!r} is also that of line {before}")
        lines.append(line)
    return lines


class AnswerFile:
    """The answers so far; open while more are written. `done` are the custom_ids that are in it."""

    def __init__(self, path: Path) -> None:
        """Raises `BatchError` if the file holds anything but answers, or another batch is writing it."""
        self.done: set[str] = set()
        self._file = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.truncate(self._read(path, path.read_bytes()))
        except BlockingIOError as error:
            self._file.close()
            raise BatchError(f"another batch is writing {path}") from error
        except BatchError:
            self._file.close()
            raise

    def _read(self, path: Path, data: bytes) -> int:
        """Take what is answered; gives how many bytes that is."""
        whole = data.rfind(b"\n") + 1
        torn = data[whole:]
        if not _BEGINNING.startswith(torn[: len(_BEGINNING)]):
            raise BatchError(f"{path} ends in something that is no answer of a batch; name another --output")
        for number, text in enumerate(data[:whole].splitlines(), 1):
            try:
                self.done.add(msgspec.json.decode(text, type=Answered).custom_id)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise BatchError(
                    f"{path}, line {number} is no answer of a batch ({error}); name another --output"
                ) from error
        return whole

    def write(self, custom_id: str, response: Response) -> None:
        """Written through at once, so that whatever ends this process, it is kept."""
        answered = Answered(f"batch_req_{secrets.token_hex(12)}", custom_id, response)
        self._file.write(msgspec.json.encode(answered) + b"\n")
        self._file.flush()
        self.done.add(custom_id)

    def close(self) -> None:
        self._file.close()


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and text of the lines that are not empty."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BatchError(f"{path} cannot be read: {error.strerror}") from error
    for number, text in enumerate(data.splitlines(), 1):
        if text.strip():
            yield number, text
