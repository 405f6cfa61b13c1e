"""What may be asked of an answer beside its text: echo, best_of, what may be chosen, deadlines, usage as it grows."""

from __future__ import annotations

import itertools
import time
from typing import Any

import httpx
import pytest

from octavo.core.messages import Chat
from tests.gateway.test_generate import USER, events, post

pytestmark = pytest.mark.anyio


def objects(response: httpx.Response, stream: bool) -> list[Any]:
    return events(response) if stream else [response.json()]


def logprobs(found: list[Any], index: int = 0) -> dict[str, list[Any]]:
    """Those of one choice, of all its chunks."""
    mine = [c["logprobs"] for body in found for c in body["choices"] if c["index"] == index and c["logprobs"]]
    return {key: [item for one in mine for item in one[key]] for key in mine[0]} if mine else {}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["0123456789", list(b"0123456789")])
async def test_h11_echo_scores_every_token_of_the_prompt(
    http: httpx.AsyncClient, engine: Any, prompt: Any, stream: bool
) -> None:
    response = await post(http, "completions", prompt=prompt, echo=True, logprobs=1, max_tokens=1, stream=stream)
    found = objects(response, stream)
    text = "".join(c["text"] for body in found for c in body["choices"])
    assert text == "0123456789h"
    scores = logprobs(found)
    assert [len(column) for column in scores.values()] == [11] * 4
    assert (scores["token_logprobs"][0], scores["top_logprobs"][0]) == (None, None)
    assert scores["token_logprobs"][1:] == [-0.125] * 9 + [-0.5]
    assert scores["tokens"] == list(text)
    assert scores["text_offset"] == list(range(11))
    for token, value, top in zip(*(scores[k][1:] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert top[token] == value == max(top.values())


@pytest.mark.parametrize(
    ("echo", "wanted", "stream"), list(itertools.product([False, True], [None, 0, 3], [False, True]))
)
async def test_h12_every_mix_of_echo_logprobs_and_stream(
    http: httpx.AsyncClient, echo: bool, wanted: int | None, stream: bool
) -> None:
    response = await post(http, "completions", prompt="ab", echo=echo, logprobs=wanted, max_tokens=3, stream=stream)
    assert response.status_code == 200
    found = objects(response, stream)
    assert "".join(c["text"] for body in found for c in body["choices"]) == "ab" * echo + "hél"
    assert [c["finish_reason"] for body in found for c in body["choices"]][-1] == "length"
    scores = logprobs(found)
    assert bool(scores) == (wanted is not None)
    assert {len(column) for column in scores.values()} <= {3 + 2 * echo}
    assert all(c["logprobs"] is None or wanted is not None for body in found for c in body["choices"])


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_of_several_prompts_and_choices(http: httpx.AsyncClient, stream: bool) -> None:
    body = {"prompt": [[97], [98, 99]], "n": 2, "echo": True, "logprobs": 0, "max_tokens": 2, "stream": stream}
    found = objects(await post(http, "completions", **body), stream)
    texts = ["", "", "", ""]
    for one in found:
        for choice in one["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["ahé", "ahé", "bché", "bché"]
    assert [logprobs(found, i)["token_logprobs"][0] for i in range(4)] == [None] * 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wanted", [None, 1])
async def test_echo_without_output(http: httpx.AsyncClient, wanted: int | None, stream: bool) -> None:
    """Only scores of the prompt: whatever is computed for it is not shown."""
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": wanted, "stream": stream}
    response = await post(
        http, "completions", **body, **({"stream_options": {"include_usage": True}} if stream else {})
    )
    found = objects(response, stream)
    assert "".join(c["text"] for one in found for c in one["choices"]) == "abc"
    assert [c["finish_reason"] for one in found for c in one["choices"]][-1] == "length"
    assert found[-1]["usage"]["completion_tokens"] == 0
    if wanted is not None:
        assert logprobs(found)["token_logprobs"] == [None, -0.125, -0.125]


async def test_best_of_shows_the_likeliest_and_counts_all(http: httpx.AsyncClient, engine: Any) -> None:
    """Choice 0 is the likeliest of each prompt, so the two best are 0 and 1."""
    response = await post(http, "completions", prompt=["a", "b"], n=2, best_of=5, max_tokens=3)
    body = response.json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert all(c["logprobs"] is None for c in body["choices"])
    assert body["usage"]["completion_tokens"] == 2 * 5 * 3
    assert [params.n for _, _, params in engine.seen] == [5, 5]
    shown = await post(http, "completions", prompt="a", best_of=4, logprobs=1, max_tokens=2)
    assert shown.json()["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -0.5]


async def test_what_may_be_chosen_reaches_the_engine(http: httpx.AsyncClient, engine: Any) -> None:
    before = time.monotonic_ns()
    response = await post(
        http,
        "chat/completions",
        messages=USER,
        logit_bias={"5": -100, "7": 2.5},
        allowed_token_ids=[5, 7],
        bad_words=["no"],
        min_tokens=2,
        max_tokens=4,
        deadline_ms=60_000,
    )
    assert response.status_code == 200
    assert "x-octavo-ignored-fields" not in response.headers
    ((_, _, params),) = engine.seen
    assert params.sampling.bias == {5: -100.0, 7: 2.5}
    assert (params.sampling.allowed, params.sampling.min_tokens, params.bad_words) == ((5, 7), 2, ("no",))
    (deadline,) = engine.deadlines
    assert 59_000_000_000 < deadline - before < 120_000_000_000


async def test_a_last_message_is_continued(http: httpx.AsyncClient, engine: Any) -> None:
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    response = await post(http, "chat/completions", messages=messages, continue_final_message=True)
    assert response.status_code == 200
    await post(http, "chat/completions", messages=USER, add_generation_prompt=False, chat_template_kwargs={"x": 1})
    (_, first, _), (_, second, _) = engine.seen
    assert isinstance(first, Chat)
    assert isinstance(second, Chat)
    assert first.continues
    assert (second.add_generation_prompt, second.variables) == (False, {"x": 1})


async def test_usage_as_it_grows(http: httpx.AsyncClient, engine: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(await post(http, "chat/completions", messages=USER, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if "content" in chunk["choices"][0]["delta"]]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == len(engine.answer)
    assert all(chunk["usage"]["prompt_tokens"] == 2 for chunk in chunks)


async def test_a_form_content_type_is_taken_for_json(http: httpx.AsyncClient) -> None:
    """curl -d sends it."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    response = await http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 200


async def test_the_routes_that_routers_ask(http: httpx.AsyncClient) -> None:
    assert (await http.get("/ping")).status_code == 200
    assert (await http.get("/server_info")).json()["kv_tokens"] == 16 * 64
    assert (await http.get("/model_info")).json()["max_model_len"] == 200
    refused = await http.post("/v1/embeddings", json={"model": "m", "input": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_endpoint")


async def test_how_long_to_keep_the_cached_prefix_reaches_the_engine(http: httpx.AsyncClient, engine: Any) -> None:
    await post(http, "chat/completions", messages=USER, cache_keep_s=90)
    assert [params.keep_s for _, _, params in engine.seen] == [90]
    assert (await post(http, "chat/completions", messages=USER, cache_keep_s=-1)).status_code == 400
