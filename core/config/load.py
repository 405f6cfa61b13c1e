"""Where configuration values come from: defaults, then a TOML file, then the environment, then `--set`.

Later ones win, and every leaf of the document remembers its origin. Whatever is wrong anywhere is
reported at once, in one `ConfigError`: nobody should fix a configuration one error a start.

    file          kv.block_size = 8        (or a [kv] table)
    environment   OCTAVO_KV__BLOCK_SIZE=8  (two underscores between the levels)
    --set         kv.block_size=8

Text from the environment and from `--set` is read as a TOML value if it is one, and as plain text
otherwise. What stands below `policies.options.GROUP` is for the chosen policy to know: its `Options` check it; so does
the drafter with what stands below `speculation.options`, when the executor loads it.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec
from msgspec import inspect

from octavo.core import plugins
from octavo.core.config.schema import AUTO, POLICY_GROUPS, Config, ModelConfig, Section

PREFIX = "OCTAVO_"
OPTIONS = ("policies", "options")
DRAFTER_OPTIONS = ("speculation", "options")
ADAPTERS = ("lora",)

Key = tuple[str, ...]


class Problem(NamedTuple):
    """One thing that is wrong: the key path, where its value came from, and why it is not accepted."""

    key: str
    origin: str
    why: str

    def __str__(self) -> str:
        return f"{self.key} ({self.origin}): {self.why}" if self.key else f"{self.origin}: {self.why}"


class ConfigError(Exception):
    """All that is wrong with a configuration."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        plural = "s" if len(problems) != 1 else ""
        super().__init__("\n  ".join([f"{len(problems)} error{plural} in the configuration:", *map(str, problems)]))


class Loaded(NamedTuple):
    config: Config
    origin: dict[str, str]
    """Per leaf of the document: `default`, `file NAME`, `env VARIABLE` or `--set`."""


class Given(NamedTuple):
    """A value as some source gave it; `text` is its spelling where the source has no types."""

    key: Key
    value: Any
    origin: str
    text: str | None = None


def load(file: Path | None = None, environ: Mapping[str, str] | None = None, sets: Sequence[str] = ()) -> Loaded:
    """The effective document. Raises `ConfigError` with everything that is wrong."""
    document = _Document()
    for given in (*document.read_file(file), *document.read_environ(environ or {}), *document.read_sets(sets)):
        document.assign(given)
    # Refused values stand at their defaults here, so that the rest is checked in the same run.
    loaded = Loaded(msgspec.convert(document.values, Config), document.origin)
    refused = {problem.key for problem in document.problems}
    problems = [*document.problems, *_contradictions(loaded, refused), *_not_installed(loaded)]
    problems += _policies(loaded)
    if problems:
        raise ConfigError(problems)
    return loaded


def leaves(config: Config) -> Iterator[tuple[str, Any]]:
    """Every leaf of the document with its value, in the schema's order; options of policies are leaves too."""
    yield from _leaves((), config)


def _leaves(at: Key, node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Section):
        for name in node.__struct_fields__:
            yield from _leaves((*at, name), getattr(node, name))
    elif isinstance(node, dict) and ((at[:2] == OPTIONS and len(at) < 4) or at in (DRAFTER_OPTIONS, ADAPTERS)):
        for name, value in node.items():
            yield from _leaves((*at, name), value)
    else:
        yield ".".join(at), node


class _Document:
    """Gathers values, their origins, and what is wrong with them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origin = dict.fromkeys((key for key, _ in leaves(Config())), "default")
        self.problems: list[Problem] = []

    # ── sources ──────────────────────────────────────────────────────────────────────────────────

    def read_file(self, file: Path | None) -> Iterator[Given]:
        if file is None:
            return
        origin = f"file {file}"
        try:
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            self.problems.append(Problem("", origin, f"cannot be read: {error.strerror}"))
        except UnicodeDecodeError as error:
            self.problems.append(Problem("", origin, f"is not UTF-8 text: byte {error.start} is {error.reason}"))
        except tomllib.TOMLDecodeError as error:
            self.problems.append(Problem("", origin, f"is not TOML: {error}"))
        else:
            yield Given((), tables, origin)

    def read_environ(self, environ: Mapping[str, str]) -> Iterator[Given]:
        flattened = {PREFIX + "_".join(key.split(".")).upper(): key for key in self.origin}
        for variable, text in sorted(environ.items()):
            if not variable.startswith(PREFIX):
                continue
            key = tuple(variable.removeprefix(PREFIX).lower().split("__"))
            if len(key) > 1 or key[0] in Config.__struct_fields__:
                yield Given(key, _parse(text), f"env {variable}", text)
            elif variable in flattened:
                correct = PREFIX + flattened[variable].replace(".", "__").upper()
                why = f"two underscores stand between the levels of a key: {correct}"
                self.problems.append(Problem(flattened[variable], f"env {variable}", why))
            # Any other OCTAVO_ variable is not ours: other parts (a cache folder, a test) have theirs.

    def read_sets(self, sets: Iterable[str]) -> Iterator[Given]:
        for setting in sets:
            key, equals, text = setting.partition("=")
            if not equals or not key.strip():
                self.problems.append(Problem("", f"--set {setting}", "must look like a.b=value"))
            else:
                yield Given(_key(key.strip()), _parse(text.strip()), "--set", text.strip())

    # ── checking and taking ──────────────────────────────────────────────────────────────────────

    def assign(self, given: Given) -> None:
        """Walk down the schema to where the value belongs, and take it there if it is right."""
        node: Any = Config
        for depth, name in enumerate(given.key):
            known = _children(given.key[:depth], node)
            if known is None:
                parent = ".".join(given.key[:depth])
                self._refuse(given, f"{parent} is a single value and has no keys below it")
                return
            if known and name not in known:
                self._refuse(given, _no_such_key(given.key, depth, known))
                return
            node = known.get(name, str if given.key[:depth] == ADAPTERS else Any)
        children = _children(given.key, node)
        if children is None:
            self._take(given, node)
        elif isinstance(given.value, dict):
            for name, value in given.value.items():
                self.assign(Given((*given.key, name), value, given.origin))
        else:
            free = "its keys are the names of adapters" if given.key == ADAPTERS else "its keys are the options"
            names = f"its keys are {', '.join(children)}" if children else free
            self._refuse(given, f"is a table, not a value; {names}")

    def _take(self, given: Given, kind: Any) -> None:
        # A key that takes text takes it as it was written: `--set model.name=7` means "7".
        candidates = [given.value] if given.text is None else [given.value, given.text]
        for candidate in candidates:
            try:
                value = msgspec.convert(candidate, kind)
            except msgspec.ValidationError:
                continue
            if isinstance(value, float) and not math.isfinite(value):
                continue
            self._store(given, value)
            return
        self._refuse(given, f"must be {_describe(inspect.type_info(kind))}, not {_show(given)}")

    def _store(self, given: Given, value: Any) -> None:
        table = self.values
        for name in given.key[:-1]:
            table = table.setdefault(name, {})
        table[given.key[-1]] = value
        self.origin[".".join(given.key)] = given.origin

    def _refuse(self, given: Given, why: str) -> None:
        self.problems.append(Problem(".".join(given.key), given.origin, why))


# ── the schema, seen from a key path ─────────────────────────────────────────────────────────────


def _children(key: Key, node: Any) -> dict[str, Any] | None:
    """Types of the keys below `key`; empty if any key is allowed, None if it is a leaf."""
    if isinstance(node, type) and issubclass(node, Section):
        return get_type_hints(node, include_extras=True)
    if key == OPTIONS:
        return dict.fromkeys(POLICY_GROUPS, dict[str, Any])
    if (key[:2] == OPTIONS and len(key) == 3) or key in (DRAFTER_OPTIONS, ADAPTERS):
        return {}
    return None


def _no_such_key(key: Key, depth: int, known: Mapping[str, Any]) -> str:
    parent, name, rest = key[:depth], key[depth], key[depth + 1 :]
    close = difflib.get_close_matches(name.replace("-", "_").lower(), known, n=1)
    if close:
        return f"no such key; did you mean {'.'.join((*parent, close[0], *rest))}?"
    if elsewhere := [known_key for known_key, _ in leaves(Config()) if known_key.split(".")[-1] == name]:
        return f"no such key; did you mean {elsewhere[0]}?"
    return f"no such key; {'.'.join(parent) or 'the document'} has {', '.join(known)}"


def _key(text: str) -> Key:
    """An adapter's name may have dots in it."""
    first, *rest = text.split(".")
    return (first, ".".join(rest)) if (first,) == ADAPTERS and rest else (first, *rest)


def _parse(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # More than one key: the text has a line break and goes on after the value.
    return parsed["value"] if len(parsed) == 1 else text


def _show(given: Given) -> str:
    return repr(given.value if given.text is None else given.text)


def _describe(kind: inspect.Type) -> str:
    """What a leaf accepts, in words."""
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=low, le=high):
            return f"an integer{_range(low, high)}"
        case inspect.FloatType(gt=above, ge=least):
            bound = f" above {above:g}" if above is not None else "" if least is None else f" of at least {least:g}"
            return f"a finite number{bound}"
        case inspect.StrType():
            return "text"
        case inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}"
        case inspect.UnionType(types=types):
            return " or ".join(_describe(one) for one in types if not isinstance(one, inspect.NoneType))
        case inspect.DictType(value_type=value):
            return f"a table whose values are {_describe(value)}"
        case inspect.VarTupleType(item_type=item):
            return f"a list of which each is {_describe(item)}"
        case inspect.AnyType():
            return "a finite value"
    raise TypeError(f"the schema uses {kind}, for which there are no words here")


def _range(low: int | None, high: int | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of at least {low}"
    return "" if high is None else f" of at most {high}"


# ── what no single key can tell ──────────────────────────────────────────────────────────────────


def _contradictions(loaded: Loaded, refused: AbstractSet[str]) -> Iterator[Problem]:
    config, origin = loaded
    if config.kv.tokens < config.kv.block_size and not refused & {"kv.tokens", "kv.block_size"}:
        why = f"a pool of {config.kv.tokens} tokens has no whole block of kv.block_size = {config.kv.block_size}"
        yield Problem("kv.tokens", origin["kv.tokens"], f"{why}; raise kv.tokens or lower kv.block_size")
    if 0 < config.kv.host_tokens < config.kv.block_size and not refused & {"kv.host_tokens", "kv.block_size"}:
        why = f"{config.kv.host_tokens} tokens are no whole block of kv.block_size = {config.kv.block_size}"
        yield Problem("kv.host_tokens", origin["kv.host_tokens"], f"{why}; raise kv.host_tokens, or set it to 0")
    if config.kv.host_tokens and not config.kv.prefix_cache:
        why = "is a part of the prefix cache, which kv.prefix_cache = false switches off"
        yield Problem("kv.host_tokens", origin["kv.host_tokens"], why)
    if config.trace.record and not config.trace.enabled:
        why = "is written with the trace, which trace.enabled = false stops"
        yield Problem("trace.record", origin["trace.record"], why)
    if not config.model.path:
        yield Problem("model.path", origin["model.path"], f"is empty; the default is {ModelConfig().path!r}")


def _not_installed(loaded: Loaded) -> Iterator[Problem]:
    config = loaded.config
    chosen = {
        "executor.kind": ("octavo.executor", config.executor.kind),
        "speculation.drafter": ("octavo.drafter", config.speculation.drafter),
    }
    for key, (group, name) in chosen.items():
        if name not in (None, AUTO) and name not in plugins.installed(group):
            yield Problem(key, loaded.origin[key], plugins.unknown(group, name))


def _policies(loaded: Loaded) -> Iterator[Problem]:
    """Policies that cannot be had, and what the others say to their options."""
    # Here, for its numpy is not for `octavo --help`.
    from octavo.core.policy.load import find_policy, make_policy, option_problems, settled

    policies = settled(loaded.config.policies, guesses=True)
    for group in POLICY_GROUPS:
        name, options = getattr(policies, group), policies.options.get(group, {})
        key = f"policies.{group}"
        try:
            kind = find_policy(group, name)
            wrong = list(option_problems(kind, options))
            if not wrong:
                make_policy(kind, group, name, options)
        except plugins.PluginError as error:
            yield Problem(key, loaded.origin[key], str(error))
            continue
        for option, why in wrong:
            at = f"policies.options.{group}.{option}".removesuffix(".")
            yield Problem(at, loaded.origin.get(at, loaded.origin[key]), f"{why} (policy {name})")
