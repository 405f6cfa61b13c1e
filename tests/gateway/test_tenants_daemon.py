"""Keys, usage, weights and the cache, over real processes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from octavo.core import control
from octavo.core.cli import main
from octavo.core.messages import Role, Weigh
from octavo.core.trace.record import Applied, frames, record_path
from octavo.plugins.openai.tenants.usage import report
from tests.gateway.tenants import bearer, make, octavo
from tests.processes.daemon import Daemon, daemon, eventually

COMPLETIONS = "/v1/completions"


class Guarded:
    """A daemon with two tenants, and their keys."""

    def __init__(self, running: Daemon, file: Path, keys: dict[str, str]) -> None:
        self.running = running
        self.file = file
        self.keys = keys

    def post(self, who: str, path: str = COMPLETIONS, **body: Any) -> httpx.Response:
        address = self.running.info().address
        return httpx.post(f"{address}{path}", json=body or None, headers=bearer(self.keys[who]), timeout=60)

    def cached(self, who: str, prompt: str) -> int:
        """Tokens that a request found in the prefix tree."""
        response = self.post(who, prompt=prompt, max_tokens=1, temperature=0)
        found: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    file = tmp_path_factory.mktemp("keys") / "keys.db"
    keys = {name: make(file, name, "--weight", weight) for name, weight in (("ada", "4"), ("bob", "1"))}
    keys["root"] = make(file, "root", "--scope", "admin")
    settings = ("policies.batching=fair", "policies.eviction=tenant-quota", "trace.record=true")
    with daemon(f"server.keys_file={file}", *settings, gateway=True) as running:
        running.wait_ready()
        yield Guarded(running, file, keys)


def weighed(running: Daemon, role: Role) -> list[dict[str, float]]:
    """What the actor has been told."""
    told = [frame.body() for frame in frames(record_path(running.run_dir, role)) if isinstance(frame, Applied)]
    return [message.weights for message in told if isinstance(message, Weigh)]


def told_last(running: Daemon, role: Role, weights: dict[str, float]) -> bool:
    return weighed(running, role)[-1:] == [weights]


def test_tenants_weights_reach_those_who_ask_policies(served: Guarded) -> None:
    """At the start, when they change, and in a successor."""
    first = {"ada": 4.0, "bob": 1.0, "root": 1.0}
    for role in (Role.SCHEDULER, Role.KV):
        eventually("the weights are there", partial(told_last, served.running, role, first))
    octavo("keys", "weigh", "bob", "2.5", "--file", str(served.file))
    others = {**first, "bob": 2.5}

    def changed() -> bool:
        served.cached("bob", "x")  # it looks when it is asked
        return all(told_last(served.running, role, others) for role in (Role.SCHEDULER, Role.KV))

    eventually("the others are there", changed)
    before = len(weighed(served.running, Role.SCHEDULER))
    served.running.wait_replaced("scheduler", served.running.kill("scheduler"))
    eventually("a successor has them", lambda: weighed(served.running, Role.SCHEDULER)[before:] == [others])


def test_a_flush_is_a_tenants_or_everybodys(served: Guarded, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("--run", str(served.running.run_dir))
    prompt = "shared by both tenants" * 3
    assert [served.cached(who, prompt) for who in ("ada", "bob", "ada", "bob")] == [0, 0, 64, 64]
    octavo("cache", "show", "--json", *run)
    shown = json.loads(capsys.readouterr().out)
    rows = {row["tenant"]: row["cached"] for row in shown["tenants"]}
    assert rows["ada"] >= 16
    assert rows["bob"] >= 16
    octavo("cache", "flush", "--tenant", "ada", "--json", *run)
    assert json.loads(capsys.readouterr().out)["freed"] == rows["ada"]
    assert [served.cached(who, prompt) for who in ("ada", "bob")] == [0, 64]
    octavo("cache", "flush", "--prefix", prompt, *run)
    assert "0 when what uses them ends" in capsys.readouterr().out
    assert [served.cached(who, prompt) for who in ("ada", "bob")] == [0, 0]
    ids = json.dumps(list(prompt.encode()))
    octavo("cache", "flush", "--prefix", ids, "--tenant", "bob", *run)
    assert [served.cached(who, prompt) for who in ("ada", "bob")] == [64, 0]
    assert served.post("ada", "/reset_prefix_cache").status_code == 403
    assert served.post("root", "/reset_prefix_cache").json()["freed"] > 16
    octavo("cache", "show", *run)
    assert "ada" not in capsys.readouterr().out
    assert [served.cached(who, prompt) for who in ("ada", "bob")] == [0, 0]


def test_a_prefix_that_cannot_be_is_refused_and_nobody_dies_of_it(
    served: Guarded, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ("--run", str(served.running.run_dir))
    before = served.running.pids()
    for prefix, told in (("[4000000000]", "4000000000"), ("[5, -1]", "-1"), (f"[{10**20}]", "1000000"), ("", "empty")):
        assert main(["cache", "flush", "--prefix", prefix, *run]) == 1, prefix
        assert told in capsys.readouterr().err
    octavo("cache", "show", *run)
    assert served.running.pids() == before
    with pytest.raises(msgspec.ValidationError):
        control.decode_to_supervisor(control.encode(control.AskCache(ref=1, flush=True, prefix=[2**31])))


def test_a_flush_under_a_stream_changes_no_token_of_it(served: Guarded) -> None:
    body: dict[str, Any] = {"prompt": "tell me all of it", "max_tokens": 600, "temperature": 0}
    expected = served.post("ada", **body).json()["choices"][0]["text"]
    address = served.running.info().address
    text, in_use = "", Counter[bool]()
    request: dict[str, Any] = {"json": {**body, "stream": True}, "headers": bearer(served.keys["ada"]), "timeout": 60}
    with httpx.stream("POST", f"{address}{COMPLETIONS}", **request) as response:
        for number, line in enumerate(line for line in response.iter_lines() if line.startswith("data: {")):
            text += json.loads(line[6:])["choices"][0]["text"]
            if number % 40 == 10:
                in_use[served.post("root", "/reset_prefix_cache").json()["in_use"] > 0] += 1
    assert text == expected
    assert in_use[True], "some of it was cached and in use"


def test_usage_survives_the_gateways_death_to_the_token_and_no_file_has_a_key(
    served: Guarded, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is killed right after its last answers: these have not been counted yet."""

    def used() -> Counter[str]:
        rows = [row for row in report(served.file) if row["tenant"] == "ada"]
        return Counter({name: rows[0][name] for name in ("finished", "prompt", "cached", "output")} if rows else {})

    served.running.wait_replaced("gateway", served.running.kill("gateway"))
    before = used()
    said = Counter[str]()
    for number in range(9):
        stream: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if number % 2 else {}
        response = served.post("ada", prompt="count me", max_tokens=5 + number, n=1 + number % 3, **stream)
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        usage = (json.loads(lines[-1][6:]) if lines else response.json())["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        said += Counter(finished=1, prompt=usage["prompt_tokens"], cached=cached, output=usage["completion_tokens"])
    pid = served.running.kill("gateway")
    served.running.wait_replaced("gateway", pid)
    assert used() == before + said
    assert served.post("bob", prompt="x", temperature=7).status_code == 400
    octavo("usage", "--tenant", "bob", "--by", "day", "--file", str(served.file))
    assert "bob" in capsys.readouterr().out

    secrets = [key.removeprefix("sk-octavo-").encode() for key in served.keys.values()]
    files = [path for path in [*served.running.run_dir.iterdir(), *served.file.parent.iterdir()] if path.is_file()]
    assert any(path.name.startswith("trace-gateway") for path in files)
    for data in [*(path.read_bytes() for path in files), served.running.log.encode()]:
        assert not any(secret in data for secret in secrets)


def test_without_a_daemon_there_is_no_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "show", "--run", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err
