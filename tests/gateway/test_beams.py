"""Beam search: the pure search against a plain one over whole distributions, and its answers over HTTP.

That the real engine gives transformers' beams is `tests/e2e/test_beams.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.client.stream import Stream
from octavo.core.config.schema import Config, ServerConfig
from octavo.core.messages import Ids, Params, Prompt, Row, TextLogprob, Usage
from octavo.plugins.openai.app import build_app
from octavo.plugins.openai.beams import Beams, BeamSearch, EarlyStopping, Option
from octavo.plugins.openai.tenants.usage import report
from tests.gateway.conftest import FakeEngine
from tests.gateway.tenants import Clock, bearer, guarded, make, octavo
from tests.gateway.test_errors import error
from tests.gateway.test_generate import events, post

Table = npt.NDArray[np.float32]
"""Log-probabilities of what follows a token that stands somewhere: shape [position, token, next token], fp32.
They hang on the position too: else outputs of the same tokens in another order would be equally good."""


def table(seed: int, vocabulary: int, positions: int, sharpness: float = 2.0) -> Table:
    shape = (positions, vocabulary, vocabulary)
    logits = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * sharpness
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), np.float32)


def plain_search(after: Table, start: int, search: BeamSearch, ends: set[int], limit: int) -> list[tuple[int, ...]]:
    """The same search, of everything that could follow, in fp32."""
    width, penalty = search.width, search.length_penalty
    running: list[tuple[np.float32, tuple[int, ...]]] = [(np.float32(0), (start,))]
    finished: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, limit + 1):
        everything = [
            (np.float32(score + after[length - 1, ids[-1], token]), (*ids, token))
            for score, ids in running
            for token in range(after.shape[-1])
        ]
        everything.sort(key=lambda one: -one[0])
        for score, ids in everything[:width]:
            if ids[-1] in ends or length == limit:
                finished.append((float(score) / length**penalty, ids))
        finished = sorted(finished, key=lambda one: -one[0])[:width]
        running = [one for one in everything if one[1][-1] not in ends][:width]
        if len(finished) == width and running:
            reach = limit if search.early_stopping == "never" and penalty > 0 else length
            if search.early_stopping is True or float(running[0][0]) / reach**penalty <= finished[-1][0]:
                break
        if not running:
            break
    return [ids[1:] for _, ids in finished]


def search_table(after: Table, start: int, search: BeamSearch, ends: set[int], limit: int) -> list[tuple[int, ...]]:
    beams = Beams(search, sorted(ends), limit)
    while not beams.done:
        told = []
        for beam in beams.running:
            row = after[len(beam.ids), beam.ids[-1] if beam.ids else start]
            best = np.argsort(-row, kind="stable")[: beams.options_needed]
            told.append([Option(int(i), float(row[i]), TextLogprob("", b"", float(row[i]), [])) for i in best])
        beams.tell(told)
    return [beam.ids for _, beam in beams.finished]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.integers(6, 24),
    width=st.integers(1, 5),
    ends=st.sets(st.integers(0, 5), max_size=3),
    limit=st.integers(1, 12),
    penalty=st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]),
    stopping=st.sampled_from([False, True, "never"]),
)
def test_h38_the_search_is_that_of_all_continuations_however_many_end(
    seed: int, vocabulary: int, width: int, ends: set[int], limit: int, penalty: float, stopping: EarlyStopping
) -> None:
    """Ends are among few tokens, so short outputs that end, and steps of few candidates, are common."""
    after = table(seed, vocabulary, limit)
    search = BeamSearch(width, penalty, stopping)
    found = search_table(after, 5, search, ends, limit)
    assert found == plain_search(after, 5, search, ends, limit)
    assert len(set(found)) == len(found)


def test_never_with_no_penalty_finds_the_likeliest_of_all_where_beams_hold_everything() -> None:
    after, limit, ends = table(4, 4, 3), 3, {3}
    every = plain_search(after, 0, BeamSearch(64, 0.0, "never"), ends, limit)
    assert search_table(after, 0, BeamSearch(64, 0.0, "never"), ends, limit)[0] == every[0]


class ModelEngine(FakeEngine):
    """An engine with a model: tokens are bytes, and what follows one hangs on it and on its position alone."""

    END = 65
    POSITIONS = 16

    def __init__(self) -> None:
        super().__init__()
        self.after = table(11, 256, self.POSITIONS, 3.0)
        self.after[:, :, self.END] = -1.5
        self.fail_at: int | None = None
        self.block = anyio.Event()
        self.blocked_at: int | None = None
        self.tells = 256
        """Of how many candidates, at most."""

    async def generate(self, prompt: Prompt, params: Params, **about: Any) -> Stream:
        if self.blocked_at == len(self.seen):
            self.block.set()
            self.silent = True
        await anyio.sleep(0)
        stream = await super().generate(prompt, params, **about)
        stream.ends = () if params.ignore_eos else (self.END, *params.stop_ids)
        return stream

    def play(self, stream: Stream, params: Params, ids: list[int]) -> None:
        assert (params.n, params.max_tokens, params.sampling.temperature) == (1, 1, 0)
        if self.fail_at == len(self.seen):
            stream.feed(Row(stream.request_id, 0, 0, 0, [], "", "error", "the step broke"))
            return
        row = self.row(len(ids), ids[-1])
        best = [int(i) for i in np.argsort(-row, kind="stable")[: params.sampling.logprobs]]
        top = [(chr(i), bytes([i]), float(row[i])) for i in best]
        entry = TextLogprob(*top[0], top[: self.tells], [best[0], *best[: self.tells]])
        finish = "stop" if best[0] == self.END else "length"
        stream.feed(
            Row(
                stream.request_id,
                0,
                0,
                0,
                best[:1],
                chr(best[0]),
                finish,
                "",
                Usage(len(ids), 1, 4),
                [entry] if self.tells else None,
            )
        )

    def row(self, length: int, last: int) -> npt.NDArray[np.float32]:
        return np.asarray(self.after[length % self.POSITIONS, last])

    async def detokenize(
        self, ids: list[int], *, before: list[int] | None = None, skip_special_tokens: bool = False
    ) -> str:
        return "".join(chr(i) for i in ids if not (skip_special_tokens and i == self.END))

    def beams(self, width: int, limit: int, penalty: float = 1.0, start: int = ord("b")) -> list[tuple[int, ...]]:
        """Of a prompt of two tokens whose last is `start`."""
        return plain_search(np.roll(self.after, -2, axis=0), start, BeamSearch(width, penalty), {self.END}, limit)


@pytest.fixture
def engine() -> ModelEngine:
    return ModelEngine()


@pytest.fixture
async def http(engine: ModelEngine, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(engine, Config()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=10) as client:
        yield client


def text(ids: tuple[int, ...]) -> str:
    return "".join(chr(i) for i in ids if i != ModelEngine.END)


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_search_over_http_is_the_plain_one(http: httpx.AsyncClient, engine: ModelEngine, stream: bool) -> None:
    found = engine.beams(4, 9)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await post(
        http, "completions", prompt="ab", use_beam_search=True, n=3, beam_width=4, max_tokens=9, logprobs=2, **options
    )
    bodies = events(response) if stream else [response.json()]
    choices = [choice for body in bodies for choice in body["choices"]]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["text"] for choice in choices] == [text(ids) for ids in found[:3]]
    ended = ["stop" if ids[-1] == engine.END else "length" for ids in found[:3]]
    assert [choice["finish_reason"] for choice in choices] == ended
    for choice, ids in zip(choices, found, strict=False):
        assert choice["logprobs"]["tokens"] == [chr(i) for i in ids]
        pairs = enumerate(zip([ord("b"), *ids], ids, strict=False))
        values = [engine.row(2 + i, before)[token] for i, (before, token) in pairs]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(values)
        assert all(2 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])
    usage = bodies[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, len(engine.seen))


@pytest.mark.anyio
async def test_several_prompts_and_chats_are_searched_each_for_itself(
    http: httpx.AsyncClient, engine: ModelEngine
) -> None:
    body = {"use_beam_search": True, "n": 2, "max_tokens": 5, "length_penalty": 0.0}
    response = (await post(http, "completions", prompt=["xb", "xc"], **body)).json()
    expected = [*engine.beams(2, 5, 0.0), *engine.beams(2, 5, 0.0, ord("c"))]
    assert [choice["text"] for choice in response["choices"]] == [text(ids) for ids in expected]
    chat = await post(http, "chat/completions", messages=[{"role": "user", "content": "xb"}], **body)
    assert [c["message"]["content"] for c in chat.json()["choices"]] == [text(ids) for ids in engine.beams(2, 5, 0.0)]
    ids = [prompt.ids for _, prompt, _ in engine.seen if isinstance(prompt, Ids)]
    assert all(one[:2] in ([120, 98], [120, 99]) for one in ids)


@pytest.mark.anyio
async def test_a_search_without_a_limit_goes_on_to_the_end_of_the_context(
    http: httpx.AsyncClient, engine: ModelEngine
) -> None:
    response = await post(
        http,
        "chat/completions",
        messages=[{"role": "user", "content": "b" * 190}],
        use_beam_search=True,
        ignore_eos=True,
    )
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == 10


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["x"]}, "stop"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"guided_regex": "a+"}, "response_format"),
        ({"n": 3, "beam_width": 2}, "beam_width"),
        ({"n": 16, "stop_token_ids": [1, 2, 3, 4]}, "beam_width"),
        ({"length_penalty": 1e300}, "length_penalty"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
    ],
)
async def test_what_a_search_cannot_keep_to_is_refused_by_name(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    assert error(await post(http, "completions", prompt="b", use_beam_search=True, **fields), 400)["param"] == param


@pytest.mark.anyio
async def test_what_has_no_effect_is_named(http: httpx.AsyncClient) -> None:
    drawn = {"temperature": 0.7, "top_p": 1, "seed": 4}
    searched = await post(http, "completions", prompt="b", use_beam_search=True, max_tokens=1, **drawn)
    assert searched.headers["x-octavo-ignored-fields"] == "temperature, seed"
    plain = await post(http, "completions", prompt="b", max_tokens=1, temperature=0, length_penalty=2, logprobs=1)
    assert plain.headers["x-octavo-ignored-fields"] == "length_penalty"
    refused = await post(http, "responses", input="b", use_beam_search=True)
    assert error(refused, 400)["param"] == "use_beam_search"


@pytest.mark.anyio
async def test_a_failed_step_fails_the_answer_and_a_refused_prompt_refuses_it(
    http: httpx.AsyncClient, engine: ModelEngine
) -> None:
    engine.fail_at = 3
    broken = await post(http, "completions", prompt="b", use_beam_search=True, n=2, max_tokens=5)
    assert error(broken, 500)["message"] == "the step broke"
    long = await post(http, "completions", prompt="b" * 300, use_beam_search=True)
    assert error(long, 400)["code"] == "context_length_exceeded"


@pytest.mark.anyio
async def test_a_search_that_is_told_too_little_is_refused_and_does_not_hang(
    http: httpx.AsyncClient, engine: ModelEngine
) -> None:
    for told in (0, 1):
        engine.tells = told
        refused = await post(http, "completions", prompt="b", use_beam_search=True, n=2, max_tokens=5)
        assert error(refused, 400)["param"] == "use_beam_search"
        assert f"{told} candidates" in refused.json()["error"]["message"]


@pytest.mark.anyio
async def test_a_search_that_comes_all_at_once_is_no_slow_readers(engine: ModelEngine) -> None:
    """It is much more than what may wait for a stream."""
    config = Config(server=ServerConfig(stream_buffer_bytes=1024))
    transport = httpx.ASGITransport(build_app(engine, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=10) as http:
        body: dict[str, Any] = {"prompt": "ab", "n": 2, "max_tokens": 40, "ignore_eos": True, "logprobs": 5}
        with anyio.fail_after(10):
            response = await post(http, "completions", use_beam_search=True, stream=True, **body)
    ended = [choice["finish_reason"] for body in events(response) for choice in body["choices"]]
    assert ended == ["length", "length"]
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.anyio
async def test_a_client_that_leaves_cancels_the_step(engine: ModelEngine) -> None:
    """Step 2 of three beams says nothing until the client has gone."""
    engine.blocked_at = 4
    app = build_app(engine, Config())
    body = b'{"prompt": "b", "use_beam_search": true, "n": 3, "max_tokens": 6, "logprobs": 0}'
    sent = iter([{"type": "http.request", "body": body}])

    async def receive() -> Any:
        if (message := next(sent, None)) is not None:
            return message
        await engine.block.wait()
        while len(engine.seen) < 7:
            await anyio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError("nobody listens")

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    with anyio.fail_after(5):
        await app(scope, receive, send)
    assert len(engine.seen) == 7
    assert set(engine.cancelled) == {request_id for request_id, _, _ in engine.seen[4:]}


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_search_ends_with_its_key(engine: ModelEngine, tmp_path: Path, stream: bool) -> None:
    """The key is revoked in the search's second step, whose tokens have come and count; there is no third."""
    key, clock = make(tmp_path / "keys.db", "alice"), Clock()
    generate = engine.generate

    async def revoking(prompt: Prompt, params: Params, **about: Any) -> Stream:
        if len(engine.seen) == 1:
            octavo("keys", "revoke", "alice", "--file", str(tmp_path / "keys.db"))
            clock.pass_(1.0)
        return await generate(prompt, params, **about)

    engine.generate = revoking  # type: ignore[method-assign]
    body = {"prompt": "ab", "use_beam_search": True, "n": 3, "max_tokens": 9, "stream": stream}
    async with guarded(tmp_path / "keys.db", engine, clock) as (http, accounts):
        with anyio.fail_after(5):
            answer = await http.post("/v1/completions", json=body, headers=bearer(key))
        accounts.ledger.flush()
        row = next(iter(report(tmp_path / "keys.db")))
    assert error(answer, 401)["code"] == "invalid_api_key"
    assert len(engine.seen) == 4
    assert (row["cancelled"], row["prompt"], row["output"]) == (1, 2, 4)


@pytest.mark.anyio
async def test_tokens_of_a_search_count_as_they_come(engine: ModelEngine, tmp_path: Path) -> None:
    """Against the limits of its key while it goes on, and in the ledger when its client leaves."""
    key = make(tmp_path / "keys.db", "alice", "--output-tokens-per-minute", "1000")
    engine.blocked_at = 4
    body = {"prompt": "ab", "use_beam_search": True, "n": 3, "max_tokens": 6}
    async with guarded(tmp_path / "keys.db", engine, Clock()) as (http, accounts):
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(http.post, "/v1/completions", json=body, headers=bearer(key)))
                while len(engine.seen) < 7:
                    await anyio.sleep(0.001)
                account = accounts.open(accounts.find(key) or pytest.fail("it is not known"))
                assert account.headers()["x-ratelimit-remaining-output-tokens"] == "996"
                tasks.cancel_scope.cancel()
        accounts.ledger.flush()
        assert [(row["cancelled"], row["prompt"], row["output"]) for row in report(tmp_path / "keys.db")] == [(1, 2, 4)]
        engine.blocked_at, engine.silent = None, False
        answer = (await http.post("/v1/completions", json=body, headers=bearer(key))).json()
        left = 996 - answer["usage"]["completion_tokens"]
        assert account.headers()["x-ratelimit-remaining-output-tokens"] == str(left)
