"""The supervisor's process: sockets, children and signals around its pure core.

Children are new interpreters, not forks: clean command lines, no inherited locks. They hang on this process by
three threads: the parent-death signal, the end of their standard input, and the control line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import msgspec
import setproctitle
import zmq
from anyio.abc import Process

from octavo.core import control, rundir, wire
from octavo.core.config.schema import Config
from octavo.core.control import READY, Ready, SetShadow
from octavo.core.messages import Role
from octavo.core.policy.watch import forget_asked, read_asked
from octavo.core.supervisor.actions import Action, EndShadow, Kill, Note, Say, Spawn, StartShadow, Stop, Tell
from octavo.core.supervisor.core import SupervisorCore
from octavo.core.supervisor.table import CHILDREN
from octavo.core.trace.catalogue import ServiceState
from octavo.core.trace.emit import Emitter
from octavo.core.trace.log import configure_log, log

TICK_S = 0.2
STOP_GRACE_S = 8.0
"""How long children may take to end by themselves."""

HURRY_S = 0.3
"""The same after a second signal."""


def serve(config: Config) -> int:
    """Run the service until it is stopped; its exit code."""
    setproctitle.setproctitle("octavo: supervisor")
    configure_log("octavo", config.trace.level)
    run_dir: Path | None = None
    try:
        run_dir = rundir.create(config)
        wire.control_endpoint(run_dir)
        rundir.write(run_dir, config, model=config.model.name or config.model.path, pid=os.getpid())
    except (OSError, ValueError) as error:
        log().error(str(error))
        if run_dir is not None:
            rundir.abandon(run_dir, config)
        return 1
    with Emitter(run_dir, Role.SUPERVISOR, config.trace) as events:
        try:
            return anyio.run(_run, config, run_dir, events)
        finally:
            rundir.remove_sockets(run_dir)


async def _run(config: Config, run_dir: Path, events: Emitter) -> int:
    return await Supervisor(config, run_dir, events).run()


class Supervisor:
    """Carries out what `SupervisorCore` says, one event after the other."""

    def __init__(self, config: Config, run_dir: Path, events: Emitter) -> None:
        self._run_dir = run_dir
        self._events = events
        roles = tuple(role for role in CHILDREN if role is not Role.GATEWAY or config.server.enabled)
        self._core = SupervisorCore(
            config.supervisor,
            roles,
            lambda role, generation: wire.endpoint(run_dir, role, 0, generation),
            os.getpid(),
            partial(read_asked, run_dir),
        )
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = context.socket(zmq.ROUTER)
        self._router.linger = 200
        self._router.router_mandatory = True
        self._router.bind(wire.control_endpoint(run_dir))
        self._processes: dict[Role, Process] = {}
        self._shadows: dict[str, Process] = {}
        self._arrivals = wire.Arrivals(self._router)
        self._turn = anyio.Lock(fast_acquire=True)  # or each heartbeat would wait for the event loop once more
        self._stop: Stop | None = None
        self._stopped = anyio.Event()
        self._hurry = anyio.Event()

    async def run(self) -> int:
        """Until the core says stop and no child is left."""
        log().info(f"run folder {self._run_dir}")
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._signals)
            tasks.start_soon(self._hear)
            tasks.start_soon(self._tick)
            await self._do(self._core.start)
            await self._stopped.wait()
            await self._end_children()
            tasks.cancel_scope.cancel()
        self._arrivals.close()
        self._router.close()
        assert self._stop is not None  # it set the event
        (log().error if self._stop.code else log().info)(f"stopped: {self._stop.why}")
        return self._stop.code

    # ── what comes in ────────────────────────────────────────────────────────────────────────────

    async def _signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
            async for _ in received:
                if self._core.draining:
                    self._hurry.set()
                await self._do(partial(self._core.drain, time.monotonic_ns()))
                await self._hear_all()

    async def _tick(self) -> None:
        while True:
            await anyio.sleep(TICK_S)
            await self._hear_all()
            await self._do(partial(self._core.tick, time.monotonic_ns()))

    async def _hear(self) -> None:
        while True:
            await self._hear_all()
            await self._arrivals.wait()

    async def _hear_all(self) -> None:
        """Until nothing waits. To be called also after others have sent: a send on the socket may swallow the
        wake-up that `_hear` waits for."""
        while await self._hear_one():
            pass

    async def _hear_one(self) -> bool:
        """False when nothing waits."""
        if not wire.readable(self._router):
            return False
        identity, frame = self._router.recv_multipart(zmq.NOBLOCK)
        try:
            message = control.decode_to_supervisor(frame)
        except msgspec.MsgspecError as error:
            log().warning(f"undecodable control message: {error}")
            return True
        if isinstance(message, Ready) and message.address is not None:
            self._leave_word(partial(rundir.relocate, self._run_dir, message.address))
            log().info(f"listening on {message.address}")
        await self._do(partial(self._core.heard, identity, message, time.monotonic_ns()))
        return True

    def _leave_word(self, write: Callable[[], None]) -> None:
        """Change daemon.json. On a full disk it stays as it was: no reason to serve nobody."""
        try:
            write()
        except OSError as error:
            log().warning(f"{self._run_dir}/daemon.json cannot be brought up to date: {error}")

    # ── what is to be done ───────────────────────────────────────────────────────────────────────

    async def _do(self, happen: Callable[[], list[Action]]) -> None:
        async with self._turn:  # one thing happens at a time, though starting a process takes a while
            actions = happen()
            while actions:
                actions = [more for action in actions for more in await self._act(action)]

    async def _act(self, action: Action) -> list[Action]:
        match action:
            case Spawn():
                return await self._spawn(action)
            case Kill(role):
                self._kill(self._processes[role])
            case StartShadow(shadow):
                return await self._start_shadow(shadow)
            case EndShadow(group):
                await self._end_shadow(group)
            case Tell(identity, message):
                self._tell(identity, message)
            case Note(event):
                self._events.emit(event)
                if isinstance(event, ServiceState) and event.state == READY:
                    self._leave_word(partial(rundir.served, self._run_dir))
            case Say(level, text):
                getattr(log(), level)(text)
            case Stop():
                self._stop = self._stop or action
                self._stopped.set()
        return []

    async def _spawn(self, spawn: Spawn) -> list[Action]:
        if self._stop is not None:
            return []
        name = spawn.role.name.lower()
        forget_asked(self._run_dir, spawn.role)
        command = [sys.executable, "-m", "octavo.core.process", name, "--run", str(self._run_dir)]
        process = await self._open([*command, "--generation", str(spawn.generation), "--parent", str(os.getpid())])
        self._processes[spawn.role] = process
        self._tasks.start_soon(self._await_exit, spawn.role, process)
        return self._core.spawned(spawn.role, process.pid, time.monotonic_ns())

    async def _open(self, command: list[str]) -> Process:
        return await anyio.open_process(
            command,
            stdin=subprocess.PIPE,  # held open: its end tells the child that we are gone
            stdout=2,
            stderr=None,
            start_new_session=True,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )

    async def _start_shadow(self, shadow: SetShadow) -> list[Action]:
        await self._end_shadow(shadow.group)
        if self._stop is not None:
            return []
        options = msgspec.json.encode(shadow.options).decode()
        command = [sys.executable, "-m", "octavo.core.policy.shadow", shadow.group, shadow.name, "--options", options]
        process = await self._open([*command, "--run", str(self._run_dir), "--parent", str(os.getpid())])
        self._shadows[shadow.group] = process
        self._tasks.start_soon(self._await_shadow, shadow.group, process)
        return self._core.shadow_started(shadow, process.pid)

    async def _await_shadow(self, group: str, process: Process) -> None:
        code = await process.wait()
        await self._do(lambda: self._core.shadow_ended(group, process.pid, code))
        await self._hear_all()

    async def _end_shadow(self, group: str) -> None:
        process = self._shadows.pop(group, None)
        if process is not None:
            self._kill(process)
            await process.wait()

    async def _await_exit(self, role: Role, process: Process) -> None:
        code = await process.wait()
        await self._do(lambda: self._core.exited(role, code, time.monotonic_ns()))
        await self._hear_all()

    def _kill(self, process: Process) -> None:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            process.kill()

    def _tell(self, identity: bytes, message: control.Control) -> None:
        try:
            self._router.send_multipart((identity, control.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            # It has died, or is so far behind that its heartbeats will tell.

    async def _end_children(self) -> None:
        """Ask, wait a little, then insist."""
        for group in list(self._shadows):
            await self._end_shadow(group)
        for action in self._core.farewell():
            await self._act(action)
        with anyio.move_on_after(STOP_GRACE_S):
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(self._cancel_on_hurry, waiting.cancel_scope)
                for process in self._processes.values():
                    await process.wait()
                waiting.cancel_scope.cancel()
        for process in self._processes.values():
            self._kill(process)
        for process in self._processes.values():
            await process.wait()

    async def _cancel_on_hurry(self, scope: anyio.CancelScope) -> None:
        await self._hurry.wait()
        await anyio.sleep(HURRY_S)
        scope.cancel()
