"""`octavo.LLM` and `octavo chat` for people: the daemon around them comes, answers and goes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo
from octavo.core.client.llm import parameters
from octavo.core.client.stream import RequestRefused, ServiceUnavailable
from octavo.core.messages import Params, Sampling
from tests.processes.daemon import Daemon, daemon, eventually, is_running


@pytest.fixture(scope="module")
def ghost() -> Iterator[Daemon]:
    with daemon() as running:
        running.wait_ready()
        yield running


def test_a_model_for_a_script_starts_and_leaves_no_process() -> None:
    with octavo.LLM("ghost", start_timeout_s=60, kv={"tokens": 1024, "block_size": 4}) as llm:
        assert (llm.facts.block_size, llm.facts.total_blocks) == (4, 256)
        pids = descendants(os.getpid())
        assert len(pids) >= 5
        output = llm.chat([{"role": "user", "content": "hi"}], max_tokens=5, temperature=0)
        assert len(output.choices[0].ids) == 5
    eventually("no process is left", lambda: not any(map(is_running, pids)))


def descendants(pid: int) -> set[int]:
    """Processes that it started, and those that they did."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    own = {int(word) for task in tasks for word in (task / "children").read_text().split()}
    return own.union(*map(descendants, own))


def test_a_daemon_that_cannot_start_says_why() -> None:
    with pytest.raises(ServiceUnavailable, match=r"kv\.tokens"):
        octavo.LLM("ghost", start_timeout_s=60, kv={"tokens": 0})


def test_a_running_daemon_is_joined_and_left_running(ghost: Daemon) -> None:
    with octavo.LLM(run=ghost.run_dir) as llm:
        prompts: list[str | list[int]] = ["a", "bb", [99, 99, 99]]
        outputs = llm.generate(prompts, temperature=0, max_tokens=4, n=2)
        assert [output.prompt_tokens for output in outputs] == [1, 2, 3]
        assert all(len(output.choices) == 2 for output in outputs)
        assert outputs[0].text == outputs[0].choices[0].text
        assert len(outputs[0].text) == 4
        (alone,) = llm.generate("bb", temperature=0, max_tokens=4)
        assert alone.text == outputs[1].text
        pieces = list(llm.stream([{"role": "user", "content": "x"}], temperature=0, max_tokens=6))
        assert (
            "".join(piece.text for piece in pieces)
            == llm.chat([{"role": "user", "content": "x"}], temperature=0, max_tokens=6).text
        )
        too_long: list[str | list[int]] = ["fine", [97] * 9000]
        with pytest.raises(RequestRefused, match="context"):
            llm.generate(too_long, max_tokens=4)
        assert llm.generate("still there", max_tokens=1)
    assert ghost.process.poll() is None


def test_parameters_are_fields_of_both_structs() -> None:
    base = Params(sampling=Sampling(seed=5, top_k=3))
    made = parameters(base, temperature=0.5, stop="x", max_tokens=9)
    assert (made.sampling.seed, made.sampling.top_k, made.sampling.temperature) == (5, 3, 0.5)
    assert (made.stop, made.max_tokens) == (("x",), 9)
    with pytest.raises(TypeError, match="temprature"):
        parameters(temprature=0)


def test_a_script_that_is_killed_leaves_no_daemon() -> None:
    code = "import octavo; llm = octavo.LLM('ghost'); print('ready', flush=True); input()"
    script = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with script:
        assert script.stdout is not None
        assert script.stdout.readline() == b"ready\n"
        pids = descendants(script.pid)
        assert len(pids) >= 5
        script.kill()
    eventually("no process is left", lambda: not any(map(is_running, pids)))
