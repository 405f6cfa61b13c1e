"""How prompts are computed where a processor has a way of its own for them: near what the weights say, and with the
same bits in every chunk and company."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig, SpeculationConfig
from octavo.core.messages import Enqueue, Sampling
from octavo.core.models.gguf import GgmlType
from octavo.core.trace.catalogue import RequestAdmitted, RequestMatched, RequestPreempted, RequestRecovered
from octavo.executors.loading.from_folder import from_folder
from octavo.executors.native.executor import NativeExecutor
from octavo.executors.native.library import CMatrix, Floats, Isa
from octavo.executors.native.program import Native
from octavo.executors.native.teacher import stored as stored_as
from tests.executors.test_loading import IDS
from tests.native.families import FAMILIES, save_family
from tests.native.net import levels, library, make, step
from tests.native.test_kernels import FLOATS, STORED, SUPER, packed, stored
from tests.native.test_serves import path as path
from tests.speculation.replica import Replica, asked

HOW = 2
"""`OCT_PROMPT`."""
OTHERS = "f32"
"""Weights whose rows are a prompt's no more than others: they would lose more than their format."""
END = 90


@pytest.fixture
def tiles() -> Isa:
    if Isa.AMX not in levels():
        pytest.skip("this processor has no AMX, or the system does not let this process use it")
    return Isa.AMX


def product(isa: Isa, matrix: CMatrix, x: Floats) -> Floats:
    y, x = np.full((len(x), matrix.blocks * 16), np.nan, np.float32), np.ascontiguousarray(x)
    library().oct_linear(isa, matrix, x.ctypes.data, len(x), HOW, y.ctypes.data)
    return y[:, : matrix.rows]


def bf16(x: Floats, *, to_even: bool) -> Floats:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1) if to_even else 0x8000)) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize("name", [name for name in STORED if name != OTHERS])
def test_products_are_those_of_rounded_numbers(tiles: Isa, name: str) -> None:
    for cols in (256, 1792) if name in SUPER else (32, 576, 1600) + ((31, 100) if name in FLOATS else ()):
        for outputs in (5, 16, 50, 83):
            rows, kind = stored(name, outputs, cols)
            assert library().oct_prompts(tiles, kind) == 1
            matrix, _arena = packed(rows, kind)
            x = np.random.default_rng(cols).normal(size=(400, cols)).astype(np.float32)
            x[::5] *= 1e4
            near, weights = bf16(x, to_even=True), bf16(rows.floats(), to_even=False)
            expected = near.astype(np.float64) @ weights.T.astype(np.float64)
            # Sums in fp32, and a weight in the middle between two bf16 may be rounded to the other one.
            most = (
                1e-5 * (np.abs(near) @ np.abs(weights.T))
                + 2**-8 * np.abs(near).max(1, keepdims=True) * np.abs(weights).max()
            )
            whole = product(tiles, matrix, x)
            assert (np.abs(whole - expected) <= most).all()
            for part in (slice(0, 1), slice(0, 17), slice(100, 133), slice(399, None), slice(None, None, 7)):
                assert np.array_equal(product(tiles, matrix, x[part]), whole[part])


def test_a_row_that_is_not_finite_stays_alone(tiles: Isa) -> None:
    matrix, _arena = packed(*stored("q4_1", 50, 576))
    x = np.random.default_rng(0).normal(size=(50, 576)).astype(np.float32)
    sound = product(tiles, matrix, x)
    x[3, 17], x[21, 500], x[39, 0] = np.nan, np.inf, -np.inf
    y, bad = product(tiles, matrix, x), [3, 21, 39]
    assert not np.isfinite(y[bad]).any()
    assert np.array_equal(np.delete(y, bad, 0), np.delete(sound, bad, 0))


def test_levels_without_tiles_and_weights_in_fp32_have_no_way_of_their_own(tiles: Isa) -> None:
    kinds = {name: kind for name, (_, kind) in STORED.items()}
    assert not any(library().oct_prompts(isa, kind) for isa in levels() if isa < tiles for kind in kinds.values())
    assert library().oct_prompts(tiles, kinds[OTHERS]) == 0


def read(native: Native, chunk: int, end: int, *, beside: bool = False) -> Floats:
    """Logits at all positions, of which those before `end` are a prompt's; with others in every step."""
    blocks, size, out = native.pool.blocks, native.pool.block_size, []
    table = list(range(blocks))[::-1][: -(-len(IDS) // size)]
    for i in range(0, len(IDS), chunk):
        spans, ends = [(IDS[i : i + chunk], i, table)], [end]
        if beside:  # a generated token before it, a prompt and a recomputed answer behind it
            spans = [(IDS[5:6], 0, [0]), *spans, (IDS[3:9], 0, [1, 2]), (IDS[7:12], 0, [3, 4])]
            ends = [0, *ends, 99, 2]
        first = 1 if beside else 0
        out.append(step(native, spans, prompts=ends)[0][first : first + len(IDS[i : i + chunk])])
    return np.concatenate(out)


@pytest.mark.parametrize("name", ["mistral, sliding", "gemma2", "phi3", "gpt2", "mixtral", "deepseek_v3", "bloom"])
def test_a_prompt_has_the_same_bits_in_any_chunk_and_company(tiles: Isa, tmp_path: Path, name: str) -> None:
    assert name in FAMILIES
    save_family(name, tmp_path)
    checkpoint = stored_as(from_folder(tmp_path), GgmlType.BF16)
    native = make(checkpoint, exact=False, isa=tiles, block_size=4)
    assert native.own_prompts
    whole, generated = read(native, len(IDS), END), read(native, len(IDS), 0)
    exact = read(make(checkpoint, exact=True, block_size=4), len(IDS), END)
    assert not np.array_equal(whole[:END], generated[:END])
    assert np.abs(whole - exact).mean() < 0.02 * np.abs(exact).max()
    for chunk, beside in ((1, False), (7, True), (33, True), (len(IDS), True)):
        assert np.array_equal(read(native, chunk, END, beside=beside), whole), (chunk, beside)


def loaded(path: Path, prompts: Literal["apart", "same"]) -> NativeExecutor:
    executor = ExecutorConfig(threads=2, prompts=prompts)
    return NativeExecutor.load(Config(model=ModelConfig(path=str(path)), kv=KvConfig(tokens=4096), executor=executor))


@pytest.mark.parametrize("prompts", ["apart", "same"])
def test_a_conversation_goes_on_as_if_nothing_were_cached(path: Path, prompts: Literal["apart", "same"]) -> None:
    """Its first answer comes back in the second prompt: in the cache it is as it was generated."""
    executor = loaded(path, prompts)
    sampling, first = Sampling(temperature=0.0, logprobs=2), [(i * 37 + 5) % 97 for i in range(41)]

    def turns(*, cached: bool) -> tuple[list[int], list[float], int]:
        replica = Replica(executor, policy="off")
        second = [*first, *replica.run([asked(0, first, tokens=24, sampling=sampling)])[0, 0], 7, 8, 9]
        goes_on = replica if cached else Replica(executor, policy="off")
        answer = goes_on.run([asked(1, second, tokens=24, sampling=sampling)])[1, 0]
        hits = [event.cached for event in goes_on.events if isinstance(event, RequestMatched)]
        return answer, [said.logprob for said in goes_on.logprobs[1, 0] if said is not None], hits[-1]

    *warm, hit = turns(cached=True)
    *cold, missed = turns(cached=False)
    assert warm == cold
    assert missed == 0
    assert hit == (32 if executor.facts.prompts_apart else 64)


def test_prompts_that_are_computed_apart_have_a_cache_of_their_own(tiles: Isa, path: Path) -> None:
    apart, same = loaded(path, "apart").facts, loaded(path, "same").facts
    assert apart.prompts_apart
    assert not same.prompts_apart
    assert apart.cache_seed != same.cache_seed


def said(replica: Replica, request: Enqueue) -> list[tuple[list[int], list[float]]]:
    """By choice, its tokens and how likely each of them was: another bit anywhere in its KV is another likelihood."""
    choices = [(request.handle, choice) for choice in range(request.n)]
    return [(replica.said[key], [one.logprob for one in replica.logprobs[key] if one is not None]) for key in choices]


@pytest.mark.parametrize("drafter", [None, "self"])
def test_an_answer_has_the_same_bits_whatever_happens_to_it(tiles: Isa, path: Path, drafter: str | None) -> None:
    """Forked, chunked, preempted and swapped back, lost with the executor, found in the cache, and guessed."""
    roomy = loaded(path, "apart")
    assert roomy.facts.prompts_apart
    tight = NativeExecutor.load(
        Config(
            model=ModelConfig(path=str(path)),
            kv=KvConfig(block_size=4, tokens=120, host_tokens=160),
            executor=ExecutorConfig(threads=2),
            speculation=SpeculationConfig(drafter=drafter),
        )
    )
    policy, options = ("off", None) if drafter is None else ("fixed", {"tokens": 3})
    replica = Replica(tight, policy=policy, options=options, slots=8, budget=13, depth=2, crash_at=40)
    begin, sampling = [(i * 37 + 5) % 97 for i in range(14)], Sampling(temperature=0.6, seed=1, logprobs=1)
    before: list[list[int]] = [begin] * 4
    for turn in range(3):
        wave = [
            asked(4 * turn + i, [*ids, i, turn], tokens=20 + i, n=1 + i % 3, sampling=sampling)
            for i, ids in enumerate(before)
        ]
        replica.run(wave)
        for request in wave:
            alone = Replica(roomy, policy="off", caching=False, budget=1000)
            alone.run([request])
            assert said(replica, request) == said(alone, request), request.handle
        before = [[*request.ids.tolist(), *replica.said[request.handle, 0]] for request in wave]
    matches = [event for event in replica.events if isinstance(event, RequestMatched)]
    assert any(event.how == "fork" for event in replica.events if isinstance(event, RequestAdmitted))
    assert any(isinstance(event, RequestPreempted) for event in replica.events)
    assert any(isinstance(event, RequestRecovered) for event in replica.events)
    assert any(match.swapped for match in matches)
    assert any(match.miss == "generated" for match in matches)
    assert bool(replica.accepted) == (drafter is not None)
