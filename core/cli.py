"""The command line: `octavo serve`, `config`, `status`, `trace`, `policy`, `cache`, and what entry points add.

It turns words into calls and errors into exit codes, nothing more. What a command drives is imported
when it runs, so that `octavo --help` and `octavo status` cost no more than this file.

An entry point in `octavo.commands` (or `octavo.trace`) names a function with typed parameters (its docstring is the
help); it may return an exit code.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from octavo.core.config.load import ConfigError, Loaded, leaves, load
from octavo.core.models.errors import ModelError
from octavo.core.plugins import PluginError, resolve

COMMANDS = "octavo.commands"
TRACE_COMMANDS = "octavo.trace"
"""What else can be done with a run: below `octavo trace`."""
FAILED = 1
MISUSED = 2
INTERRUPTED = 130

ConfigFile = Annotated[Path | None, Parameter(name="--config", help="a TOML file")]
Sets = Annotated[list[str] | None, Parameter(name="--set", negative=(), help="a value of the document: kv.tokens=4096")]
Run = Annotated[Path | None, Parameter(name="--run", help="a daemon's run folder; by default the newest one")]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="print JSON")]


def serve(
    model: str | None = None,
    /,
    *,
    config: ConfigFile = None,
    set_: Sets = None,
    host: str | None = None,
    port: int | None = None,
) -> int:
    """Run the daemon until it is stopped (Ctrl-C drains, a second one stops at once).

    Parameters
    ----------
    model
        a folder, a GGUF file, a hub id, `default` or `ghost` (no model at all)
    host
        short for --set server.host=HOST
    port
        short for --set server.port=PORT; 0 takes a free one
    """
    from octavo.core.supervisor.main import serve as run

    shorts = {"model.path": model, "server.host": host, "server.port": port}
    given = [f"{key}={value}" for key, value in shorts.items() if value is not None]
    return run(_load(config, [*(set_ or ()), *given]).config)


def show_config(*, config: ConfigFile = None, set_: Sets = None, json_: Json = False) -> int:
    """Print the effective configuration and where each value comes from."""
    loaded = _load(config, set_ or ())
    if json_:
        document = {key: {"value": value, "origin": loaded.origin[key]} for key, value in leaves(loaded.config)}
        print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
        return 0
    lines = [
        (f"{key} = {_toml(value)}" if value is not None else f"# {key} is not set", loaded.origin[key])
        for key, value in leaves(loaded.config)
    ]
    width = max(len(line) for line, _ in lines)
    for line, origin in lines:
        print(f"{line:{width}}  # {origin}")
    return 0


def show_status(*, run: Run = None, json_: Json = False) -> int:
    """Show each actor of a running daemon and its last progress."""
    from octavo.core.supervisor.status import command

    return command(run, json_)


def show_trace(request_id: str, /, *, run: Run = None, events: bool = False) -> int:
    """Tell why a request took as long as it did, from the run's trace.

    Parameters
    ----------
    request_id
        the `id` of an answer of the API
    events
        print its plain events instead
    """
    from octavo.core.trace.show import show

    return show(request_id, run, events=events)


def show_slow(*, over: str = "ttft=500ms", run: Run = None) -> int:
    """Group the requests that took too long by what took most of their time.

    Parameters
    ----------
    over
        what is too long: ttft=500ms, itl=50ms (the longest time between two tokens) or e2e=2s
    """
    from octavo.core.trace.slow import slow

    return slow(over, run)


def list_policies() -> int:
    """List the installed policies; a star marks the default of each group."""
    from octavo.core.policy.command import list_all

    return list_all()


def show_policy(group: str, name: str, /) -> int:
    """Show what a policy does and what its options are.

    Parameters
    ----------
    group
        batching, chunking, preemption, eviction or speculation
    name
        as `octavo policy list` shows it
    """
    from octavo.core.policy.command import show

    return show(group, name)


def set_policy(
    setting: str,
    /,
    *,
    option: Annotated[list[str] | None, Parameter(name="--option", negative=(), help="one of its options: x=1")] = None,
    run: Run = None,
) -> int:
    """Give a running daemon another policy, at a step boundary and without losing a request.

    Parameters
    ----------
    setting
        group and name: batching=fair
    """
    from octavo.core.policy.command import change

    return change(setting, option or (), run)


def shadow_policy(
    setting: str | None = None,
    /,
    *,
    option: Annotated[list[str] | None, Parameter(name="--option", negative=(), help="one of its options: x=1")] = None,
    run: Run = None,
) -> int:
    """Run a policy beside the live one, on copies of its calls and without effect; tell how they differ.

    Parameters
    ----------
    setting
        group and name: batching=mine; `off` ends all; nothing tells what was found
    """
    from octavo.core.policy.command import shadow

    return shadow(setting, option or (), run)


def show_cache(*, run: Run = None, json_: Json = False) -> int:
    """Show whose blocks are in the prefix tree of a running daemon."""
    from octavo.core.client.cache import show

    return show(run, json=json_)


def flush_cache(*, tenant: str | None = None, prefix: str | None = None, run: Run = None, json_: Json = False) -> int:
    """Empty the prefix tree of a running daemon. What runs goes on; nothing that is cached now is found any more.

    Parameters
    ----------
    tenant
        only what is this tenant's
    prefix
        only what begins with this text (as a plain prompt), or with these token ids: [1, 2, 3]
    """
    from octavo.core.client.cache import flush

    return flush(run, tenant, prefix, json=json_)


def _load(file: Path | None, sets: Sequence[str]) -> Loaded:
    return load(file, os.environ, sets)


def _toml(value: Any) -> str:
    """A leaf as TOML writes it. JSON's text, numbers, truth values and lists are TOML's, too; tables are not."""
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)} = {_toml(one)}" for key, one in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=str)


def build(argv: Sequence[str]) -> App:
    """All commands. Of those that entry points add, only the one that `argv` calls is imported; the kernel's
    own cannot be replaced."""
    version = metadata.version("octavo")
    app = App(name="octavo", help="Octavo: an LLM inference engine.", version=version, result_action="return_value")
    app.command(serve)
    app.command(show_config, name="config")
    app.command(show_status, name="status")
    trace = App(name="trace", help="Read the trace of a run.")
    trace.command(show_trace, name="show")
    trace.command(show_slow, name="slow")
    app.command(trace)
    policy = App(name="policy", help="List, show and change policies.")
    policy.command(list_policies, name="list")
    policy.command(show_policy, name="show")
    policy.command(set_policy, name="set")
    policy.command(shadow_policy, name="shadow")
    app.command(policy)
    cache = App(name="cache", help="Show and empty the prefix cache.")
    cache.command(show_cache, name="show")
    cache.command(flush_cache, name="flush")
    app.command(cache)
    app.command(lambda: print(version), name="version", help="Print the version.")
    _add(trace, TRACE_COMMANDS, argv[1:2])
    _add(app, COMMANDS, argv[:1])
    return app


def _add(app: App, group: str, called: Sequence[str]) -> None:
    for point in metadata.entry_points(group=group):
        if point.name in app:
            continue
        if point.name in called:
            app.command(resolve(group, point.name), name=point.name)
        else:
            app.command(App(name=point.name, help=_summary(point)))


def _summary(point: metadata.EntryPoint) -> str:
    """The first line of the command's docstring (or of its module's, if it is no plain function), read from its source:
    importing it may cost seconds."""
    path: Sequence[str] | None = None
    origin: str | None = None
    names = point.module.split(".")
    for name in (".".join(names[: i + 1]) for i in range(len(names))):  # `find_spec` would import its parents
        spec = next((found for finder in sys.meta_path if (found := finder.find_spec(name, path))), None)
        path, origin = (spec.submodule_search_locations, spec.origin) if spec else (None, None)
    if origin is None or not origin.endswith(".py"):
        return ""
    module = ast.parse(Path(origin).read_bytes())
    functions = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == point.attr)
    return (ast.get_docstring(next(functions, module)) or "").partition("\n")[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        code = build(words)(words)
        sys.stdout.flush()
    except ConfigError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return MISUSED
    except (ModelError, PluginError) as error:
        print(f"octavo: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:  # before the command had begun, or where it has nothing to say about it
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has enough; without this, Python would complain once more when it closes the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code if isinstance(code, int) else 0
