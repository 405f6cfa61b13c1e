"""`octavo batch`: its files, what is asked again, and a real one that is killed half-way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.plugins.openai.batch import command as batch
from octavo.plugins.openai.batch.requests import AnswerFile, BatchError, Line, read_requests
from octavo.plugins.openai.batch.requests import Response as Answer
from tests.processes.daemon import PATIENCE_S, Daemon, daemon, eventually

CHAT = "/v1/chat/completions"


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines))
    return path


def answers(path: Path) -> dict[str, Any]:
    found = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found), "nothing is answered twice"
    return {one["custom_id"]: one["response"] for one in found}


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["{"], "line 1"),
        ([line("a"), "[]"], "line 2"),
        ([line("a"), "", line("a")], "line 3: custom_id 'a' is also that of line 1"),
        ([line("a", "/v1/embeddings")], "url is '/v1/embeddings'"),
        ([line("a", stream=True)], "streamed"),
        ([{"custom_id": "a", "url": CHAT}], "body"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_asked(
    tmp_path: Path, lines: list[dict[str, Any] | str], complaint: str
) -> None:
    with pytest.raises(BatchError, match=r"requests\.jsonl") as error:
        read_requests(written(tmp_path / "requests.jsonl", *lines))
    assert complaint in str(error.value)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="cannot be read"):
        read_requests(tmp_path / "none.jsonl")


def test_answers_are_remembered_and_a_torn_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    file = AnswerFile(path)
    file.write("a", Answer(200, "r1", {"text": "é"}))
    file.write("b", Answer(400, "r2", {}))
    file.close()
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:cut])
        resumed = AnswerFile(path)
        assert resumed.done == {"a"}
        resumed.write("b", Answer(200, "r3", {}))
        resumed.close()
        assert list(answers(path)) == ["a", "b"]


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "notes.jsonl", {"note": "mine"})
    for text in (path.read_text(), path.read_text().strip()):
        path.write_text(text)
        with pytest.raises(BatchError, match="no answer of a batch"):
            AnswerFile(path)
        assert path.read_text() == text


def test_two_batches_do_not_write_one_file(tmp_path: Path) -> None:
    first = AnswerFile(tmp_path / "answers.jsonl")
    with pytest.raises(BatchError, match="another batch"):
        AnswerFile(tmp_path / "answers.jsonl")
    first.close()
    AnswerFile(tmp_path / "answers.jsonl").close()


class Moody:
    """Refuses each request as often as it says itself, with the status that it says."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = await Request(scope, receive).json()
        name = body["name"]
        self.asked[name] = self.asked.get(name, 0) + 1
        busy = self.asked[name] <= body["refuses"]
        answer: Response = JSONResponse({"name": name}, status_code=body["status"] if busy else 200)
        await answer(scope, receive, send)
        if busy and body["status"] == 500:
            raise RuntimeError("a fault of its own, which is raised again for the log")


def test_only_a_busy_service_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "PAUSE_S", 0.0)
    given = [
        ("fine", 0, 0),
        ("busy", 2, 503),
        ("limited", 1, 429),
        ("wrong", 9, 400),
        ("fault", 9, 500),
        ("hopeless", 99, 503),
    ]
    lines = [Line(name, CHAT, {"name": name, "refuses": n, "status": status}) for name, n, status in given]
    app, file = Moody(), AnswerFile(tmp_path / "answers.jsonl")
    seen: list[int] = []
    anyio.run(batch.answer_all, app, lines, file, 2, lambda: seen.append(1))
    file.close()
    found = answers(tmp_path / "answers.jsonl")
    assert {name: one["status_code"] for name, one in found.items()} == {
        "fine": 200, "busy": 200, "limited": 200, "wrong": 400, "fault": 500,
    }  # fmt: skip
    assert app.asked == {"fine": 1, "busy": 3, "limited": 2, "wrong": 1, "fault": 1, "hopeless": batch.TRIES}
    assert len(seen) == len(lines)


@pytest.fixture(scope="module")
def ghost() -> Iterator[Daemon]:
    with daemon("kv.tokens=16384", "scheduler.max_sequences=4") as running:
        running.wait_ready()
        yield running


def start(ghost: Daemon, requests: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "octavo", "batch", str(requests), "--run", str(ghost.run_dir), "--concurrency", "4"]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)


def test_killed_half_way_the_same_command_goes_on(ghost: Daemon, tmp_path: Path) -> None:
    asked = [
        line(f"r{i}", messages=[{"role": "user", "content": f"question {i}"}], max_tokens=60, temperature=0)
        for i in range(40)
    ]
    wrong = line("wrong", "/v1/completions", prompt="a", max_tokens=-1)
    requests = written(tmp_path / "requests.jsonl", wrong, *asked)
    output = tmp_path / "requests.answers.jsonl"
    first = start(ghost, requests)
    eventually("some are answered", lambda: output.exists() and output.read_bytes().count(b"\n") >= 5)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=PATIENCE_S)
    before = [text for text in output.read_text().splitlines(keepends=True) if text.endswith("\n")]

    _, told = (again := start(ghost, requests)).communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, told
    assert "41 of 41 requests are answered" in told
    assert output.read_text().startswith("".join(before)), "what was answered stays as it was"
    found = answers(output)
    assert found.keys() == {one["custom_id"] for one in asked} | {"wrong"}
    assert found["wrong"]["status_code"] == 400
    assert found["wrong"]["body"]["error"]["param"] == "max_tokens"
    assert all(found[one["custom_id"]]["body"]["usage"]["completion_tokens"] == 60 for one in asked)
