"""Whatever is posted, to whatever route: an answer of OpenAI's shape, no 500, and nothing in the log.

Seconds by default; `--http-fuzz MINUTES` goes on for as long and writes tests/results/http_fuzz.md."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.core.config.schema import Config, ServerConfig
from octavo.plugins.openai.app import build_app
from octavo.plugins.openai.tenants.account import Accounts
from octavo.plugins.openai.types import ChatBody, CompletionBody, DetokenizeBody, ResponsesBody, TokenizeBody
from tests.gateway.conftest import FakeEngine
from tests.gateway.tenants import make

Guard = tuple[Accounts, str]

POSTED = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
FIELDS = sorted({name for body in POSTED.values() for name in body.__struct_fields__})

GOOD = "Bearer GOOD"
"""Stands for a key that is known."""

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        ["user", "assistant", "tool", "system", "text", "function", "auto", "required", "json_schema", "m"]
    ),
)
names = st.one_of(st.sampled_from(FIELDS), st.sampled_from(["role", "content", "type", "text", "name", "function"]))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(names, inner, max_size=4)),
    max_leaves=12,
)
parts = st.lists(st.fixed_dictionaries({"type": st.just("text")}, optional={"text": st.text(max_size=9)}), max_size=3)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer", "x"])},
        optional={"content": st.one_of(st.text(max_size=20), parts, values), "tool_calls": values, "name": leaves},
    ),
    max_size=3,
)
usual: dict[str, st.SearchStrategy[Any]] = {
    "messages": messages,
    "prompt": st.one_of(
        st.text(max_size=20), st.lists(st.integers(-1, 300), max_size=5), st.lists(st.text(max_size=5))
    ),
    "input": st.one_of(st.text(max_size=20), messages, values),
    "tokens": st.lists(st.integers(-1, 300), max_size=8),
    "stream": st.booleans(),
    "n": st.integers(0, 4),
    "max_tokens": st.integers(-1, 9),
    "logprobs": st.one_of(st.booleans(), st.integers(-1, 6)),
    "echo": st.booleans(),
    "stop": st.one_of(st.text(max_size=3), st.lists(st.text(max_size=3), max_size=3)),
}
bodies = st.fixed_dictionaries({}, optional=usual).flatmap(
    lambda known: st.dictionaries(st.one_of(names, st.text(max_size=6)), values, max_size=3).map(
        lambda other: {**other, **known}
    )
)
raw = st.one_of(
    bodies.map(lambda body: json.dumps(body).encode("utf-8", "surrogatepass")),
    st.binary(max_size=60),
    st.tuples(bodies.map(json.dumps), st.integers(0, 200)).map(lambda cut: cut[0][: cut[1]].encode("utf-8", "replace")),
)
headers = st.fixed_dictionaries(
    {},
    optional={
        "content-type": st.sampled_from(["application/json", "text/plain", "application/json; charset=x", ""]),
        "traceparent": st.text("0123456789abcdef-", max_size=60),
        "x-request-id": st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=300),
        "authorization": st.sampled_from(["Bearer", "Bearer ", "Basic x", "Bearer sk", *[GOOD] * 8]),
    },
)
OTHERS = ["/v1/embeddings", "/v1/messages", "/nowhere", "/reset_prefix_cache", "/v1/models/x", "/metrics"]
Call = tuple[str, bytes, dict[str, str]]
calls = st.tuples(st.sampled_from([*POSTED, *OTHERS]), raw, headers)


class Fault(Exception):
    """The gateway's own."""


def well_formed(path: str, response: httpx.Response) -> None:
    """Raises `Fault`."""
    if response.status_code >= 500:
        raise Fault(f"{response.status_code}: {response.text[:300]}")
    text = response.text
    if "event-stream" in response.headers.get("content-type", ""):
        events = [line for line in text.splitlines() if line.startswith("data: ")]
        objects = [strict(line[6:]) for line in events if line != "data: [DONE]"]
        if not objects or not (path == "/v1/responses" or events[-1] == "data: [DONE]" or "error" in objects[-1]):
            raise Fault(f"a stream without an end: {text[-200:]}")
        return
    body = strict(text)
    if response.status_code != 200:
        error = body["error"]
        if error.keys() != {"message", "type", "param", "code"} or not isinstance(error["code"], str):
            raise Fault(f"an error of another shape: {text[:200]}")
        if len(error["message"]) > 1000:
            raise Fault(f"a message of {len(error['message'])} characters")


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise Fault(f"{name} in an answer")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guard]:
    """Keys, and one of them, which has limits."""
    file = tmp_path_factory.mktemp("keys") / "keys.db"
    limits = ("--requests-per-minute", "100000", "--output-tokens-per-minute", "2000", "--concurrency", "1")
    key = make(file, "fuzz", *limits)
    accounts = Accounts(file)
    yield accounts, key
    accounts.close()


async def play(played: list[Call], guard: Guard | None) -> None:
    accounts, key = guard or (None, "")
    app = build_app(FakeEngine(), Config(server=ServerConfig(max_body_bytes=2000)), accounts=accounts)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=20) as http:
        for path, body, given_headers in played:
            headers = {name: value.replace("GOOD", key or "GOOD") for name, value in given_headers.items()}
            well_formed(path, await http.post(path, content=body, headers=headers))


def check(played: list[Call], guard: Guard | None) -> None:
    """Anything that the application raises comes through the transport, so it fails here by itself."""
    anyio.run(play, played, guard)


@given(st.lists(calls, min_size=1, max_size=8), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_body_is_a_fault_of_ours(
    caplog: pytest.LogCaptureFixture, guard: Guard, played: list[Call], guarded: bool
) -> None:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check(played, guard if guarded else None)
    assert not caplog.records


def test_the_same_for_minutes(pytestconfig: pytest.Config, guard: Guard) -> None:
    minutes = float(pytestconfig.getoption("--http-fuzz"))
    if not minutes:
        pytest.skip("only with --http-fuzz MINUTES")
    count = itertools.count()
    deadline = time.monotonic() + 60 * minutes

    @given(st.lists(calls, min_size=4, max_size=12), st.booleans())
    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def campaign(played: list[Call], guarded: bool) -> None:
        for _ in played:
            next(count)
        check(played, guard if guarded else None)

    while time.monotonic() < deadline:
        campaign()
    text = (
        f"# HTTP fuzz\n\nWritten by `pytest tests/gateway/test_fuzz.py --http-fuzz {minutes:g}`: {next(count)} requests"
    )
    text += ", half of them to a gateway that wants keys,"
    path = Path(__file__).parents[1] / "results" / "http_fuzz.md"
    path.write_text(f"{text} in {minutes:g} minutes; no 500, no exception, every answer well formed.\n")
