"""The configuration document: who wins, where a value came from, and that every mistake is told at once."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.core.config.load import ConfigError, leaves, load
from octavo.core.config.schema import Config

DEFAULTS = dict(leaves(Config()))


def write(folder: Path, text: str) -> Path:
    file = folder / "octavo.toml"
    file.write_text(text, encoding="utf-8")
    return file


def problems(
    file: Path | None = None, environ: dict[str, str] | None = None, sets: tuple[str, ...] = ()
) -> dict[str, str]:
    """What `load` says of each key; what names no key stands under ''."""
    with pytest.raises(ConfigError) as caught:
        load(file, environ or {}, sets)
    assert all(str(problem) in str(caught.value) for problem in caught.value.problems)
    return {problem.key: str(problem) for problem in caught.value.problems}


def test_nothing_given_is_the_default_document() -> None:
    loaded = load()
    assert loaded.config == Config()
    assert set(loaded.origin.values()) == {"default"}
    assert loaded.origin.keys() == DEFAULTS.keys()


def test_later_sources_win_and_are_named(tmp_path: Path) -> None:
    file = write(tmp_path, "[kv]\nblock_size = 2\ntokens = 1024\nprefix_cache = false\n")
    loaded = load(file, {"OCTAVO_KV__TOKENS": "2048", "OCTAVO_KV__BLOCK_SIZE": "4"}, ["kv.block_size=8", "run_dir=/r"])
    assert (loaded.config.kv.block_size, loaded.config.kv.tokens, loaded.config.kv.prefix_cache) == (8, 2048, False)
    assert loaded.origin["kv.block_size"] == "--set"
    assert loaded.origin["kv.tokens"] == "env OCTAVO_KV__TOKENS"
    assert loaded.origin["kv.prefix_cache"] == f"file {file}"
    assert loaded.origin["model.path"] == "default"
    assert loaded.config.run_dir == "/r"


def test_of_two_settings_the_last_wins() -> None:
    assert load(sets=["server.port=1", "server.port=2"]).config.server.port == 2


def test_the_smallest_document_that_tests_live_on_is_valid() -> None:
    sets = ["kv.block_size=1", "kv.tokens=1024", "scheduler.chunk_budget=32", "scheduler.max_sequences=2"]
    assert load(sets=sets).config.kv.block_size == 1
    assert load(sets=["kv.block_size=1", "kv.tokens=1", "scheduler.chunk_budget=1", "scheduler.max_sequences=1"])


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        'modle = 3\n[kv]\nblock_siz = 8\ntokens = 0\n[trace]\nlevel = "loud"\n[scheduler]\ndepth = 5\n'
        '[policies]\nbatching = "fcsf"\n[supervisor]\nheartbeat_timeout_s = nan\n',
    )
    told = problems(
        file,
        {"OCTAVO_SERVER__PORT": "http"},
        ("kv.prefix_cache=1", "kv=3", "model.path.x=1", "scheduler.tell_every_ms=-1", "nonsense"),
    )
    assert told == {
        "scheduler.tell_every_ms": "scheduler.tell_every_ms (--set): must be a finite number of at least 0, not '-1'",
        "modle": f"modle (file {file}): no such key; did you mean model?",
        "kv.block_siz": f"kv.block_siz (file {file}): no such key; did you mean kv.block_size?",
        "kv.tokens": f"kv.tokens (file {file}): must be an integer of at least 1, not 0",
        "trace.level": f"trace.level (file {file}): must be one of debug, error, info, warning, not 'loud'",
        "scheduler.depth": f"scheduler.depth (file {file}): must be an integer from 1 to 4, not 5",
        "policies.batching": f"policies.batching (file {file}): "
        "no octavo.batching plugin is called 'fcsf'; installed: deadline, dynamic, fair, fcfs, prefix-first, priority, "
        "scored, shortest, static",
        "supervisor.heartbeat_timeout_s": f"supervisor.heartbeat_timeout_s (file {file}): "
        "must be a finite number above 0, not nan",
        "server.port": "server.port (env OCTAVO_SERVER__PORT): must be an integer from 0 to 65535, not 'http'",
        "kv.prefix_cache": "kv.prefix_cache (--set): must be true or false, not '1'",
        "kv": "kv (--set): is a table, not a value; its keys are block_size, tokens, fit, prefix_cache, host_tokens",
        "model.path.x": "model.path.x (--set): model.path is a single value and has no keys below it",
        "": "--set nonsense: must look like a.b=value",
    }


@pytest.mark.parametrize("key", sorted(DEFAULTS))
def test_a_misspelt_key_is_answered_with_the_right_one(key: str) -> None:
    assert f"did you mean {key}?" in problems(sets=(f"{key}x=1",))[f"{key}x"]


def test_a_key_without_its_table_is_found() -> None:
    assert "did you mean kv.block_size?" in problems(sets=("block_size=8",))["block_size"]


def test_a_pool_holds_at_least_a_block() -> None:
    told = problems(sets=("kv.tokens=8", "kv.block_size=16"))
    assert "a pool of 8 tokens has no whole block of kv.block_size = 16" in told["kv.tokens"]


def test_a_host_tier_holds_at_least_a_block_or_is_not_there() -> None:
    told = problems(sets=("kv.host_tokens=8", "kv.block_size=16"))
    assert "8 tokens are no whole block of kv.block_size = 16" in told["kv.host_tokens"]
    load(sets=["kv.host_tokens=0"])


def test_an_executor_must_be_installed() -> None:
    assert "installed: cpu, " in problems(sets=("executor.kind=abacus",))["executor.kind"]


def test_a_file_that_cannot_be_read_is_an_error_with_its_name(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in problems(tmp_path / "missing.toml")[""]
    assert "is not TOML: " in problems(write(tmp_path, "[kv\n"))[""]


def test_one_underscore_too_few_is_not_silence() -> None:
    assert "OCTAVO_KV__BLOCK_SIZE" in problems(environ={"OCTAVO_KV_BLOCK_SIZE": "8"})["kv.block_size"]
    assert load(environ={"OCTAVO_CACHE": "/c", "HOME": "/h"}).config == Config()


def test_options_of_policies_come_from_every_source(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        'policies.batching = "fair"\npolicies.chunking = "slo"\n[policies.options]\n'
        "batching.weights = {a = 2.0}\nchunking.itl_ms = 40\n",
    )
    loaded = load(
        file, {"OCTAVO_POLICIES__OPTIONS__CHUNKING__ITL_MS": "20"}, ["policies.options.batching.takeover=true"]
    )
    assert loaded.config.policies.options == {
        "batching": {"weights": {"a": 2.0}, "takeover": True},
        "chunking": {"itl_ms": 20},
    }
    assert loaded.origin["policies.options.chunking.itl_ms"] == "env OCTAVO_POLICIES__OPTIONS__CHUNKING__ITL_MS"
    assert loaded.origin.keys() == dict(leaves(loaded.config)).keys()
    assert (
        "did you mean policies.options.chunking.a?"
        in problems(sets=("policies.options.chunkin.a=1",))["policies.options.chunkin.a"]
    )


def test_the_chosen_policy_says_all_that_is_wrong_with_its_options() -> None:
    told = problems(
        sets=(
            "policies.batching=shortest",
            "policies.options.batching.ageing=-1",
            "policies.options.batching.output_cots=2",
            "policies.options.eviction.size=3",
            "policies.speculation=fixed",
            "policies.options.speculation.tokens=many",
        )
    )
    assert "Expected `float` >= 0.0; it is -1" in told["policies.options.batching.ageing"]
    assert "did you mean output_cost?" in told["policies.options.batching.output_cots"]
    assert "this policy has none (policy lru)" in told["policies.options.eviction.size"]
    assert "Expected `int`" in told["policies.options.speculation.tokens"]
    told = problems(sets=("policies.batching=scored", "policies.options.batching.filters=['no-such']"))
    assert "octavo.batching.filter is called 'no-such'; installed: fits" in told["policies.batching"]


@settings(deadline=None)  # each load looks through all that is installed
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: text == text.strip()))
def test_a_key_that_takes_text_takes_any_text(text: str) -> None:
    """Unquoted, whatever TOML would make of it: 7, true, 1979-05-27 are names too. (What is TOML text is unquoted.)"""
    try:
        quoted = tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        quoted = {}
    expected = quoted["x"] if len(quoted) == 1 and isinstance(quoted["x"], str) else text
    assert load(sets=[f"model.name={text}"]).config.model.name == expected


@settings(deadline=None)  # each load looks through all that is installed
@example("executor.cores", [])
@example("executor.cores", [0])
@given(
    st.sampled_from(sorted(DEFAULTS)),
    st.one_of(
        st.integers(),
        st.floats(),
        st.booleans(),
        st.text(st.characters(categories=["L", "N", "P", "Zs"]), max_size=8),
        st.lists(st.integers(), max_size=2),
    ),
)
def test_any_value_is_taken_or_refused_with_its_key(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: Any
) -> None:
    """From a file, where values have types: no third outcome, and a taken value is the value given."""
    file = tmp_path_factory.getbasetemp() / "any.toml"
    table, _, name = key.rpartition(".")
    spelling = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    file.write_text((f"[{table}]\n" if table else "") + f"{name} = {spelling}\n", encoding="utf-8")
    told: set[str] = set()
    try:
        loaded = load(file)
    except ConfigError as error:
        told = {problem.key for problem in error.problems}
    else:
        taken = dict(leaves(loaded.config))[key]
        assert (list(taken) if isinstance(taken, tuple) else taken) == value
        assert loaded.origin[key] == f"file {file}"
    # A good block size can still contradict the pool.
    assert told <= {"kv.tokens" if key == "kv.block_size" else key, key}


@pytest.mark.parametrize("key", sorted(DEFAULTS))
def test_every_key_says_what_it_takes(key: str) -> None:
    """A list suits no key: one that takes text takes its spelling, every other one refuses it in words."""
    try:
        loaded = load(sets=[f"{key}=[[1]]"])
    except ConfigError as error:
        told = str(error)
        assert f"{key} (--set): " in told
        assert "must be " in told or "installed: " in told
    else:
        assert dict(leaves(loaded.config))[key] == "[[1]]"
