"""`octavo top`: a picture of what the status says."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from octavo.core.control import ActorStatus, Status
from octavo.core.rundir import RunInfo
from octavo.plugins.metrics.top import View, command

INFO = RunInfo(pid=1, birth=1, started=0.0, model="m", address="http://127.0.0.1:1", run_dir="/nowhere")


def actor(role: str, **stats: int) -> ActorStatus:
    return ActorStatus(
        role=role, name=role, pid=7, generation=2, state="ready", restarts=1, progress_age_s=0.5, stats=stats
    )


def text(picture: RenderableType) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as capture:
        console.print(picture)
    return capture.get()


def test_the_picture_says_what_the_status_says() -> None:
    actors = [
        actor("scheduler", running=3, waiting=4, preemptions=5),
        actor("kv", total_blocks=100, free_blocks=20, used_blocks=50),
        actor("executor", steps=9),
    ]
    shown = text(View(INFO).draw(Status(state="degraded", epoch=1, actors=actors)))
    for part in ("m at http://127.0.0.1:1", "degraded", "running 3   waiting 4   preemptions 5"):
        assert part in shown
    assert "50 used, 30 cached, 20 free of 100" in shown
    assert sum(name in shown for name in ("scheduler", "kv", "executor")) == 3


def test_a_daemon_that_is_silent_is_said_to_be() -> None:
    assert "does not answer" in text(View(INFO).draw(None))


def test_without_a_daemon_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(run=tmp_path, once=True) == 1
    assert "no daemon runs in" in capsys.readouterr().err
