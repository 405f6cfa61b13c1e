"""The command line turns words into calls, and what is wrong into one message and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.core.cli import main
from octavo.core.config.load import load


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"PATH": "/usr/bin:/bin", "COLUMNS": "200"})


def test_the_printed_document_is_a_configuration_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["kv.tokens=64", 'model.name=ü "7"', "policies.batching=scored", "trace.steps=false"]
    sets += ["policies.options.batching.filters=['fits']", "policies.options.batching.scores={age=1, prefix=2.5}"]
    assert main(["config", *(word for one in sets for word in ("--set", one))]) == 0
    printed = capsys.readouterr().out
    file = tmp_path / "printed.toml"
    file.write_text(printed, encoding="utf-8")
    assert load(file).config == load(sets=sets).config
    assert {line.rsplit("# ", 1)[1] for line in printed.splitlines()} == {"default", "--set"}


def test_each_value_says_where_it_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "o.toml"
    file.write_text("kv.block_size = 4\n", encoding="utf-8")
    monkeypatch.setitem(os.environ, "OCTAVO_KV__TOKENS", "64")
    assert main(["config", "--json", "--config", str(file)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kv.block_size"] == {"value": 4, "origin": f"file {file}"}
    assert document["kv.tokens"] == {"value": 64, "origin": "env OCTAVO_KV__TOKENS"}
    assert document["run_dir"] == {"value": None, "origin": "default"}


def test_a_wrong_configuration_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "ghost", "--port", "70000", "--set", "kv.tokens=0"]) == 2
    told = capsys.readouterr().err
    assert "server.port (--set): must be an integer from 0 to 65535, not '70000'" in told
    assert "kv.tokens (--set): must be an integer of at least 1, not '0'" in told


@pytest.mark.parametrize("words", [["sevre"], ["config", "extra"], ["trace", "show"], ["serve", "--port", "http"]])
def test_misuse_is_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert capsys.readouterr().err


def test_an_interrupt_while_a_command_is_still_looked_up_causes_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.core.cli.build", interrupted)
    assert main(["chat"]) == 130


def test_help_imports_nothing_that_a_command_drives() -> None:
    script = "import sys; from octavo.core.cli import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "serve" in done.stdout
    assert "chat" in done.stdout
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "octavo.core.config.load" in loaded
    assert not {"zmq", "torch", "numpy", "anyio", "starlette", "octavo.core.supervisor", "octavo.plugins"} & loaded


def test_a_reader_that_left_causes_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-P", "-m", "octavo", "config"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
