"""`octavo chat` as a person and a pipe use it, against a running ghost."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

import octavo
from tests.processes.daemon import PATIENCE_S, Daemon, daemon, eventually


@pytest.fixture(scope="module")
def ghost() -> Iterator[Daemon]:
    with daemon("supervisor.client_timeout_s=2", "kv.tokens=16384") as running:
        running.wait_ready()
        yield running


def words(ghost: Daemon, *options: str) -> list[str]:
    return [sys.executable, "-m", "octavo", "chat", "--run", str(ghost.run_dir), *options]


def piped(ghost: Daemon, question: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = words(ghost, *options)
    return subprocess.run(command, input=question, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@contextmanager
def question(text: str) -> Iterator[IO[bytes]]:
    """A file to be somebody's standard input."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        yield file


def answer(ghost: Daemon, question: str, max_tokens: int) -> str:
    with octavo.LLM(run=ghost.run_dir) as llm:
        return llm.chat([{"role": "user", "content": question}], max_tokens=max_tokens, temperature=0).text


class Terminal:
    """What a person sees and types."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def until(self, mark: str) -> str:
        """All that is shown up to and with `mark`."""
        deadline = time.monotonic() + PATIENCE_S
        while mark not in self._seen:
            left = deadline - time.monotonic()
            assert select.select([self._descriptor], [], [], max(0, left))[0], f"no {mark!r} in {self._seen!r}"
            self._seen += os.read(self._descriptor, 4096).decode()
        before, _, self._seen = self._seen.partition(mark)
        return before + mark


def listen_to_interrupts() -> None:
    """A shell's background jobs, and so all that they start, ignore SIGINT; a program in a terminal does not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def terminal(ghost: Daemon, *options: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        words(ghost, *options),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "dumb"},
        preexec_fn=listen_to_interrupts,
    )
    os.close(theirs)
    try:
        yield Terminal(ours), process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_it_answers_what_is_piped_into_it(ghost: Daemon) -> None:
    done = piped(ghost, "hello\n", "--max-tokens", "8", "--temperature", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == answer(ghost, "hello", 8) + "\n"
    assert ghost.process.poll() is None


def test_it_says_what_is_wrong(ghost: Daemon) -> None:
    assert piped(ghost, "").returncode == 1
    done = piped(ghost, "x" * 9000)
    assert done.returncode == 1
    assert "8192" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_conversation_whose_long_answer_is_interrupted() -> None:
    with daemon("model.context=400000", "kv.tokens=400000") as endless:  # it does not end before we interrupt it
        endless.wait_ready()
        begun = answer(endless, "tell me everything", 20)
        with terminal(endless, "--temperature", "0") as (screen, process):
            screen.until("> ")
            screen.type("tell me everything\n")
            screen.until(begun)
            process.send_signal(signal.SIGINT)
            screen.until("…")
            screen.until("> ")
            eventually("nothing runs", lambda: endless.actors()["scheduler"].stats.get("running") == 0)
            screen.type("/exit\n")
            assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("max_tokens", [300, 3000])
def test_a_client_that_was_silent_for_too_long_goes_on_where_it_was(ghost: Daemon, max_tokens: int) -> None:
    """The short answer ends while nobody reads it, the long one is cancelled on the way."""
    command = words(ghost, "--max-tokens", str(max_tokens), "--temperature", "0")
    with (
        question("go on") as stdin,
        subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, bufsize=0) as process,
    ):
        assert process.stdout is not None
        try:
            begun = process.stdout.read(20)
            process.send_signal(signal.SIGSTOP)
            eventually("it is taken for gone", lambda: ghost.actors()["supervisor"].stats["clients"] == 0)
            process.send_signal(signal.SIGCONT)
            rest, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()  # leaving `with` would wait for ever for one that is stopped
    assert (begun + rest).decode() == answer(ghost, "go on", max_tokens) + "\n"
