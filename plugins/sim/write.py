"""Writes a simulation's events as a daemon writes its own, so that whatever reads a run can read a simulated one."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from octavo.core.config.schema import Config
from octavo.core.messages import Role
from octavo.core.trace.catalogue import Event
from octavo.core.trace.emit import trace_path


class TraceWriter:
    """A folder with `config.json` and a trace file a role; `ts_ns` is virtual."""

    def __init__(self, folder: Path, config: Config) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))
        roles = (Role.TOKENIZER, Role.SCHEDULER, Role.KV, Role.EXECUTOR)
        self._files: dict[Role, BinaryIO] = {role: trace_path(folder, role, 0).open("wb") for role in roles}

    def write(self, now_ns: int, role: Role, event: Event) -> None:
        fields = msgspec.to_builtins(event)
        name = fields.pop("event")
        line = {"role": role.name.lower(), "replica": 0, "ts_ns": now_ns, "spent_ns": 0, "generation": 1, **fields}
        self._files[role].write(msgspec.json.encode(line | {"event": name}) + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
