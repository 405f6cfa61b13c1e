"""A real daemon that guesses, on the default model: H46 of the list of cases, what is told of it, and `kill -9`."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from octavo.core.client.llm import LLM
from octavo.core.policy.command import change
from octavo.core.trace.show import engine_id
from tests.processes.daemon import Daemon, daemon, eventually

PROMPTS = [
    "one two three four one two three four one two",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    '{"id": 1, "name": "a"}\n{"id": 2, "name": "b"}\n{"id": 3,',
    "The sea was calm. The sea was grey. The sea was",
    "A, B, C, A, B, C, A, B, C,",
]
TOKENS = 64


@pytest.fixture(scope="module")
def guessing() -> Iterator[Daemon]:
    sets = ("speculation.drafter=ngram", "policies.speculation=fixed", "kv.block_size=16", "scheduler.chunk_budget=256")
    with daemon(*sets, gateway=True, model="default") as running:
        running.wait_ready()
        yield running


def answers(running: Daemon, *, seed: int = 1, temperature: float = 0.0) -> list[list[int]]:
    with LLM(run=running.run_dir) as llm:
        outputs = llm.generate(PROMPTS, max_tokens=TOKENS, temperature=temperature, seed=seed)
    return [output.choices[0].ids for output in outputs]


@pytest.fixture(scope="module")
def plain(guessing: Daemon) -> list[list[list[int]]]:
    """Without guesses: greedy, and sampled."""
    assert change("speculation=off", (), guessing.run_dir) == 0
    eventually("the policy is off", lambda: guessing.events("policy.swapped"))
    said = [answers(guessing), answers(guessing, temperature=0.8)]
    assert change("speculation=fixed", (), guessing.run_dir) == 0
    eventually("the policy is on", lambda: len(guessing.events("policy.swapped")) > 1)
    return said


def counted(running: Daemon) -> dict[str, float]:
    """The counters of guesses on the page of metrics."""
    page = httpx.get(f"{running.info().address}/metrics").text
    rows = (line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("octavo_draft_"))
    return {name: float(value) for name, value in rows}


def test_h46_ids_are_the_same_with_guesses_and_without_and_both_are_counted(
    guessing: Daemon, plain: list[list[list[int]]]
) -> None:
    before = counted(guessing)
    assert answers(guessing) == plain[0]
    assert answers(guessing, temperature=0.8) == plain[1]
    everything = len(plain) * len(PROMPTS) * 2  # without guesses, and with
    done = [e for e in guessing.told("request.finished", everything) if e["drafted"]]
    drafted = sum(int(str(e["drafted"])) for e in done)
    accepted = sum(int(str(e["accepted"])) for e in done)
    assert 0 < accepted < drafted

    def told() -> bool:
        now = counted(guessing)
        right = now['octavo_draft_tokens_total{outcome="accepted"}']
        return right >= accepted and right + now['octavo_draft_tokens_total{outcome="wasted"}'] >= drafted

    eventually("metrics have them", told)
    assert before.keys() == counted(guessing).keys()
    assert counted(guessing)['octavo_draft_accepted_total{place="1"}'] > 0


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_usage_tells_what_became_of_a_requests_guesses(guessing: Daemon, path: str) -> None:
    said = "one two three four five one two three four five one two three"
    asked: dict[str, object] = {"temperature": 0}
    if path == "responses":
        asked |= {"input": said, "max_output_tokens": 40}
    else:
        asked |= {"prompt": said} if path == "completions" else {"messages": [{"role": "user", "content": said}]}
        asked |= {"max_tokens": 40}
    body = httpx.post(f"{guessing.info().address}/v1/{path}", json=asked, timeout=60).raise_for_status().json()
    usage = body["usage"].get("completion_tokens_details") or body["usage"]["output_tokens_details"]
    asked_as = engine_id(body["id"])

    def finished() -> dict[str, object] | None:
        return next((one for one in guessing.events("request.finished") if one["request_id"] == asked_as), None)

    done = eventually("the trace tells it too", finished)
    drafted, accepted = int(str(done["drafted"])), int(str(done["accepted"]))
    assert drafted > 0
    assert usage["accepted_prediction_tokens"] == accepted
    assert usage["rejected_prediction_tokens"] == drafted - accepted


def test_a_killed_executor_changes_no_answer(guessing: Daemon, plain: list[list[list[int]]]) -> None:
    """Killed while it computes: what was guessed and not delivered is guessed again, or not."""
    pid = guessing.pids()["executor"]
    with LLM(run=guessing.run_dir) as llm:
        stream = llm.stream(
            [{"role": "user", "content": "Count from one to thirty."}], max_tokens=TOKENS, temperature=0
        )
        first = list(next(stream).ids)
        guessing.kill("executor")
        disturbed = first + [token for piece in stream for token in piece.ids]
        guessing.wait_replaced("executor", pid)
        again = llm.stream([{"role": "user", "content": "Count from one to thirty."}], max_tokens=TOKENS, temperature=0)
        assert disturbed == [token for piece in again for token in piece.ids]
    assert answers(guessing) == plain[0]
