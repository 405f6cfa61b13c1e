"""The CUDA executor's own code, with the emulator for a GPU, against the exact CPU executor."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig, SchedulerConfig
from octavo.core.messages import Sampling
from octavo.core.models.errors import ModelError
from octavo.executors.cpu.executor import CpuExecutor
from octavo.executors.cuda import batch, forward, graphs, memory, mirror
from octavo.executors.cuda.batch import Batch, attention_plans, build
from octavo.executors.cuda.emulated import again
from octavo.executors.cuda.executor import CudaExecutor
from octavo.executors.cuda.forward import Forward
from octavo.executors.cuda.graphs import CudaRecorder, Graphs, Kind, Pass, Recorder, Replay
from octavo.executors.cuda.lora import Adapted, Adapting
from octavo.executors.cuda.memory import RESERVED, CudaMemory
from octavo.executors.residents import Span
from octavo.kernels.cuda.device import DeviceError
from octavo.kernels.cuda.launch import Kernels, Staged
from octavo.kernels.cuda.plan import Plan
from tests.adapters.made import save_adapter
from tests.executors.driver import DECODE, Driver, Sequence
from tests.executors.tiny import VOCAB, save_tiny
from tests.kernels.conftest import Maker

GREEDY = Sampling(temperature=0.0, logprobs=3)
Mode: TypeAlias = Literal["fast", "exact"]
Kv: TypeAlias = Literal["auto", "fp32", "bf16", "int8", "fp8"]
Make: TypeAlias = Callable[..., CudaExecutor]
"""order=0, mode="fast", block_size=16, tokens=1024, memory=Bytes(), fit=False, recorder=None, kv="auto"."""


@dataclass
class Bytes:
    """A device with so many bytes free and so many that a step takes; counts its steps."""

    free_bytes: int = 1 << 40
    peak: int = 0
    ran: list[bool] = field(default_factory=list)
    run: bool = False

    def free(self) -> int:
        return self.free_bytes

    def peak_of(self, work: Callable[[], None]) -> int:
        if self.run:
            work()
        self.ran.append(self.run)
        return self.peak


def config(
    folder: Path,
    block_size: int = 16,
    tokens: int = 1024,
    mode: Mode = "fast",
    fit: bool = False,
    kv: Kv = "auto",
    host_tokens: int = 0,
) -> Config:
    return Config(
        model=ModelConfig(path=str(folder)),
        kv=KvConfig(block_size=block_size, tokens=tokens, fit=fit, host_tokens=host_tokens),
        executor=ExecutorConfig(threads=1, mode=mode, kv=kv),
        scheduler=SchedulerConfig(max_sequences=4, chunk_budget=20),
    )


def save_small(folder: Path) -> Path:
    """Four heads of 64 over two KV heads."""
    save_tiny(
        folder,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_hidden_layers=2,
        attention_bias=True,
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("models") / "tiny64")


@pytest.fixture(scope="module")
def exact(folder: Path) -> CpuExecutor:
    return CpuExecutor.load(config(folder))


@pytest.fixture
def make(folder: Path, resident_kernels: Maker) -> Make:
    """In fp16: its 11 bits leave greedy tokens of so small a model alone."""

    def made(
        order: int = 0,
        mode: Mode = "fast",
        block_size: int = 16,
        tokens: int = 1024,
        memory: Bytes | None = None,
        fit: bool = False,
        recorder: Recorder | None = None,
        kv: Kv = "auto",
    ) -> CudaExecutor:
        settings = config(folder, block_size, tokens, mode, fit, kv)
        return CudaExecutor.on(resident_kernels(order), settings, torch.float16, memory or Bytes(), recorder)

    return made


def prompt(seed: int, n: int) -> list[int]:
    return [random.Random(f"{seed} {i}").randrange(VOCAB) for i in range(n)]


@pytest.mark.parametrize(
    ("order", "block_size", "mode", "recorded"),
    [(0, 16, "fast", False), (1, 32, "exact", False), (2, 16, "exact", True), (3, 48, "fast", True)],
)
def test_a_crowd_gives_the_tokens_of_the_exact_executor(
    make: Make, recorder: Recorder, exact: CpuExecutor, order: int, block_size: int, mode: Mode, recorded: bool
) -> None:
    """Chunks and decodes in one step, a warm start, a fork with a copied tail; greedy, seeded, restricted."""
    samplings = [
        GREEDY,
        Sampling(temperature=0.8, top_p=0.9, seed=4, logprobs=3),
        Sampling(temperature=1.0, top_k=8, repetition=1.2, frequency=0.2, seed=5, logprobs=3),
        Sampling(temperature=0.7, seed=6, logprobs=3, allowed=(3, 4, 5, 6, 40), banned=((4,), (6, 5)), bias={40: -2.5}),
        Sampling(temperature=0.0, logprobs=3, presence=0.1, min_tokens=3, ends=tuple(range(1, 90)), bias={9: 1.0}),
    ]
    prompts = [prompt(1, 40), prompt(2, 19), prompt(3, 3), prompt(4, 5), prompt(5, 8)]
    driver = Driver(make(order, mode, block_size, recorder=recorder if recorded else None), seed=order)
    live = [driver.open(ids, sampling=sampling) for ids, sampling in zip(prompts, samplings, strict=True)]
    for _ in range(6):
        driver.advance(live, chunk=17)
    warm = driver.open(prompts[0] + [9, 9], sampling=GREEDY, warm=live[0])
    child = driver.fork(live[1], 18, [7, 8], sampling=GREEDY)
    for _ in range(3):
        driver.advance([warm, child, live[0]])
    for sequence in (*live, warm, child):
        assert sequence.failure is None
        expected = replayed(exact, sequence)
        assert sequence.ids == expected.ids
        for got, want in zip(sequence.logprobs, expected.logprobs, strict=True):
            assert got is not None
            assert want is not None
            assert got.token == want.token
            assert got.top_logprobs == pytest.approx(want.top_logprobs, abs=0.05)


def replayed(executor: CpuExecutor | CudaExecutor, sequence: Sequence, chunk: int | None = None) -> Sequence:
    """The same request alone."""
    alone = Driver(executor, seed=99)
    made = alone.open(
        sequence.ids[: len(sequence.ids) - len(sequence.logprobs)],
        prompt_len=sequence.prompt_len,
        sampling=sequence.sampling,
    )
    while len(made.logprobs) < len(sequence.logprobs):
        alone.advance([made], chunk)
    return made


def test_in_exact_mode_numbers_do_not_depend_on_company_chunks_or_blocks(make: Make, recorder: Recorder) -> None:
    """Bit for bit: the log-probabilities that come with the tokens."""
    sampling = Sampling(temperature=0.9, seed=3, logprobs=5)
    driver = Driver(make(1, "exact"))
    crowd = [driver.open(prompt(i, n), sampling=sampling) for i, n in enumerate((50, 3, 18))]
    for _ in range(8):
        driver.advance(crowd, chunk=13)
    other = make(2, "exact", block_size=48, recorder=recorder)
    for sequence in crowd:
        alone = replayed(other, sequence, chunk=7)
        assert alone.ids == sequence.ids
        assert [entry.top_logprobs for entry in alone.logprobs if entry] == [
            entry.top_logprobs for entry in sequence.logprobs if entry
        ]


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_what_sequences_share_is_attended_to_together(
    make: Make, exact: CpuExecutor, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """Tokens as ever; in `exact`, log-probabilities bit for bit as without company."""
    for name in ("SPLIT", "SHARED"):
        monkeypatch.setattr(batch, name, 32)
    planned: list[bool] = []

    def seen(*how: Any) -> list[Plan]:
        found = attention_plans(*how[:3], **how[3])
        planned.append(any(made.shared is not None for made in found))
        return found

    monkeypatch.setattr(forward, "attention_plans", lambda *how, **named: seen(*how, named))
    driver = Driver(make(1, mode))
    sampling = Sampling(temperature=0.9, seed=3, logprobs=5)
    first = driver.open(prompt(1, 70), sampling=sampling)
    for _ in range(2):
        driver.advance([first], chunk=40)
    others = [driver.open(prompt(1, 66) + prompt(i, 3), sampling=sampling, warm=first) for i in range(2, 5)]
    for _ in range(4):
        driver.advance([first, *others])
    assert any(planned)
    for sequence in (first, *others):
        assert sequence.ids == replayed(exact, sequence).ids
        alone = replayed(make(2, mode), sequence)
        if mode == "exact":
            assert [entry and entry.top_logprobs for entry in alone.logprobs] == [
                entry and entry.top_logprobs for entry in sequence.logprobs
            ]


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_what_sequences_share_is_attended_to_together_in_graphs(
    make: Make, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """The plan of each step lies in the graph's buffers. In `exact` mode the bits are those of launches, and of each
    alone; one that has ended, and steps of who share nothing, change nothing."""
    for name in ("SPLIT", "SHARED"):
        monkeypatch.setattr(batch, name, 32)
    monkeypatch.setattr(graphs, "SPLIT", 32)
    kinds: list[Kind] = []

    def ran(self: Graphs, kind: Kind, batch: Batch, shared: Plan | None = None) -> Pass:
        kinds.append(kind)
        return run(self, kind, batch, shared)

    run = Graphs.run
    monkeypatch.setattr(Graphs, "run", ran)
    recording = Recording(monkeypatch)

    def said(executor: CudaExecutor) -> list[Sequence]:
        driver = Driver(executor)
        sampling = Sampling(temperature=0.9, seed=3, logprobs=5)
        first = driver.open(prompt(1, 70), sampling=sampling)
        for _ in range(2):
            driver.advance([first], chunk=40)
        others = [driver.open(prompt(1, 66) + prompt(i, 3), sampling=sampling, warm=first) for i in range(2, 4)]
        other = driver.open(prompt(7, 34), sampling=sampling)
        driver.advance([*others, other], chunk=40)
        for crowd in ([first, *others, other],) * 4 + ([first, *others], [first, other], [first, *others, other]):
            driver.advance(crowd)
        return [first, *others, other]

    got, want = said(make(1, mode, recorder=recording)), said(make(2, mode))
    shared = [kind.common > 0 for kind in kinds]
    assert sum(shared) == 6
    assert recording.replayed >= 4
    for one, same in zip(got, want, strict=True):
        assert one.ids == same.ids
        if mode == "exact":
            expected = [entry and entry.top_logprobs for entry in same.logprobs]
            assert [entry and entry.top_logprobs for entry in one.logprobs] == expected
            alone = replayed(make(3, mode), one)
            assert [entry and entry.top_logprobs for entry in alone.logprobs] == expected


def test_a_plan_of_the_host_leaves_layers_with_windows_their_room(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What those attend to is planned by the device, with as many works as there are parts of contexts in `exact`."""
    for module in (batch, graphs):
        monkeypatch.setattr(module, "SPLIT", 32)
    executor = make(1, "exact", recorder=again)
    found = executor.forward._graphs
    assert found is not None
    crowd = build([Span([1], 100, [0, 1, 2, 3, 4, 5 + i, 9]) for i in range(3)], 16)
    for windows, works in (([0], 4), ([0, 48], 16)):
        executor.forward.decoder.windows = windows
        kind = found.kind(crowd, 2, (), found.shared(crowd))
        assert kind is not None
        assert (kind.works, kind.common > 0) == (works, True)


class Recording:
    """A recorder that does not forgive: what the host brings to the device while a graph runs would be frozen in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded = self.replayed = 0
        self._monkeypatch = monkeypatch

    def __call__(self, work: Callable[[], None]) -> Replay:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            with self._monkeypatch.context() as patched:
                for name in ("tensor", "from_numpy", "as_tensor"):
                    patched.setattr(torch, name, forbidden)
                for name in ("item", "tolist", "cpu", "numpy"):
                    patched.setattr(torch.Tensor, name, forbidden)
                work()

        return replay


def forbidden(*args: object, **how: object) -> None:
    raise AssertionError("a graph cannot hold what the host does")


class Graph:
    """That may be gone: on a GPU it would take its memory along."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_decodes_are_recorded_once_for_each_kind_and_give_the_tokens_of_launches(
    make: Make, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """Three sequences, then two, then four: kinds for four (the most: recorded before the first step, twice), two
    and four again; positions cross blocks."""
    recording = Recording(monkeypatch)

    def run(executor: CudaExecutor) -> list[list[int]]:
        driver = Driver(executor, seed=5)
        live = [driver.open(prompt(i, 14 + i), sampling=GREEDY) for i in range(4)]
        driver.advance(live)
        for crowd, steps in ((live[:3], 4), (live[1:3], 2), (live, 3)):
            for _ in range(steps):
                driver.advance(crowd)
        return [sequence.ids for sequence in live]

    assert run(make(1, mode, recorder=recording)) == run(make(1, mode))
    assert (recording.recorded, recording.replayed) == (3, 9 - 1)  # the first of a kind is launched


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_graphs_take_no_memory_once_the_pool_is_sized(make: Make, monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    """Of the device's what each kind took of its own, later, nobody would have counted: logits, parts of attention,
    tables and all else lie where they lie for the others. Nor of the host's, whose pinned memory stops the device."""
    executor = make(1, mode, recorder=again)
    rooms: set[tuple[int, ...]] = set()
    taken: list[int] = []

    def seen(kernels: Kernels, *how: Any) -> Staged:
        taken.append(how[0])
        return room(kernels, *how)

    room, run = Kernels.room, Graphs.run
    monkeypatch.setattr(Kernels, "room", seen)
    monkeypatch.setattr(mirror, "Room", forbidden)
    kinds: set[Kind] = set()

    def ran(self: Graphs, kind: Kind, batch: Batch, shared: Plan | None = None) -> Pass:
        kinds.add(kind)
        made = run(self, kind, batch, shared)
        at = self._recorded[kind][0].mirror.device["ids"]
        assert made.logits is not None
        rooms.add((made.logits.data_ptr(), made.hidden.data_ptr(), at.data_ptr()))
        return made

    monkeypatch.setattr(Graphs, "run", ran)
    with torch.inference_mode():
        for n in (4, 2, 1):
            for blocks in (1, 17, 32):
                spans = [Span([1], 16 * blocks - 1, list(range(blocks))) for _ in range(n)]
                assert len(executor.forward.run(build(spans, 16)).finite) == n
    assert len(kinds) >= 6
    assert len(rooms) == 1
    assert not taken


def test_so_many_graphs_are_kept(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes memory of the device, and contexts grow through ever more kinds: what was used last stays."""
    monkeypatch.setattr(graphs, "KEPT", 2)
    kept: list[weakref.ref[object]] = []

    def recorder(work: Callable[[], None]) -> Replay:
        graph = Graph(work)
        kept.append(weakref.ref(graph))
        return lambda: graph.replay()

    executor = make(recorder=recorder)
    kept.clear()  # the largest, twice
    with torch.inference_mode():
        for n, there in ((1, 1), (2, 2), (1, 2), (3, 2), (1, 2), (2, 2)):
            executor.forward.run(build([Span([1], 5, [i]) for i in range(n)], 16))
            assert sum(graph() is not None for graph in kept) == there, n
    assert len(kept) == 4  # for one, two, three or four, and two again


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_gpus_graphs_fit_beside_the_pool(folder: Path, resident_kernels: Maker) -> None:
    """The pool takes all that is free: what other kinds then keep is a small part of what is reserved."""
    measured = CudaMemory(torch.device("cuda", 0))
    settings = config(folder, fit=True)
    executor = CudaExecutor.on(resident_kernels(0), settings, torch.float16, measured, CudaRecorder())
    before = measured.free()
    with torch.inference_mode():
        for n in (3, 2, 1, 3):
            for blocks in (1, 17, 32):
                spans = [Span([1], 16 * blocks - 1, list(range(blocks))) for _ in range(n)]
                assert executor.forward.run(build(spans, 16)).finite.all()
    kept = before - measured.free()
    del executor
    gc.collect()  # all that was free is in its pool: the tests that follow want some
    assert kept < RESERVED // 4


def test_what_graphs_keep_is_counted_before_the_pool_is_sized(make: Make) -> None:
    """The largest one is recorded before, and again over the pool, where it finds what its recorder kept."""
    block_bytes = make(tokens=16).facts.block_bytes
    records: list[tuple[int, weakref.ref[object]]] = []

    def recorder(work: Callable[[], None]) -> Replay:
        graph = Graph(work)
        graph_of: Any = work
        blocks = len(graph_of.__self__._decoder.pools[0])
        gpu.free_bytes -= 0 if records else 3_000
        records.append((blocks, weakref.ref(graph)))
        return lambda: graph.replay()

    gpu = Bytes(free_bytes=RESERVED + 3_000 + 9 * block_bytes, run=True)
    executor = make(fit=True, memory=gpu, recorder=recorder)
    assert executor.facts.total_blocks == 9
    assert [blocks for blocks, _ in records] == [1, 9]
    assert records[0][1]() is None  # it was over a pool that is no more
    assert records[1][1]() is not None


def test_what_graphs_have_no_room_for_is_launched(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """In exact mode a step has as many works as its contexts have parts; tables may have any number of cells."""
    monkeypatch.setattr(batch, "SPLIT", 32)
    monkeypatch.setattr(graphs, "SPLIT", 32)
    monkeypatch.setattr(graphs, "WORKS", 16)
    monkeypatch.setattr(graphs, "CELLS", 80)
    recorded: list[bool] = []

    def recorder(work: Callable[[], None]) -> Replay:
        recorded.append(True)
        return work

    def logits(executor: CudaExecutor, *lengths: int) -> torch.Tensor:
        spans = [Span([3], n - 1, list(range(-(-n // 16)))) for n in lengths]
        with torch.inference_mode():
            made = executor.forward.run(build(spans, 16))
            return executor.forward.logits(made, list(range(len(lengths)))).clone()

    executor, plain = (make(1, "exact", recorder=which) for which in (recorder, None))
    for lengths, new in (((200, 200, 20), True), ((200, 200, 200), False), ((20,), True), ((20 * 16, 20, 20), False)):
        before = len(recorded)
        assert torch.equal(logits(executor, *lengths), logits(plain, *lengths))
        assert (len(recorded) > before) is new, lengths


def test_the_pool_is_what_memory_leaves_once_the_worst_step_has_run(make: Make) -> None:
    block_bytes = make(tokens=16).facts.block_bytes
    memory = Bytes(free_bytes=RESERVED + 10_000 + 7 * block_bytes + 5, peak=10_000, run=True)
    executor = make(fit=True, memory=memory)
    assert memory.ran == [True]
    assert executor.facts.total_blocks == 7
    assert Driver(executor).open(prompt(1, 20), sampling=GREEDY).failure is None
    with pytest.raises(ModelError, match=r"leaves a pool of 112 tokens, kv\.tokens asks for 128; lower it"):
        make(tokens=128, memory=memory)
    with pytest.raises(ModelError, match=r"leaves a pool of 0 tokens; lower scheduler\.chunk_budget"):
        make(fit=True, memory=Bytes(free_bytes=RESERVED))


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_the_worst_step_shares_nothing_and_begins_beside_another(
    make: Make, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """Its sequences are all the same one, and attend as if each were another; of two steps all is kept."""
    for name in ("SPLIT", "SHARED"):
        monkeypatch.setattr(batch, name, 32)
    plans: list[Plan] = []
    logits: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def seen(*how: Any) -> list[Plan]:
        found = attention_plans(*how[:3], **how[3])
        plans.extend(found)
        return found

    def of(self: Forward, made: Pass, rows: list[int]) -> torch.Tensor:
        alive.append(all(ref() is not None for ref in logits))
        found = computed(self, made, rows)
        logits.append(weakref.ref(found))
        return found

    computed = Forward.logits
    monkeypatch.setattr(forward, "attention_plans", lambda *how, **named: seen(*how, named))
    monkeypatch.setattr(Forward, "logits", of)
    make(mode=mode, memory=Bytes(run=True))
    assert plans
    assert all(made.shared is None for made in plans)
    assert alive == [True, True]


def test_adapters_leave_a_step_its_memory(
    folder: Path, resident_kernels: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are named at the start are counted before the pool is sized; what is loaded later and has no room is
    refused, so no step runs out of memory for it. The worst step has an adapter for every token."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    red, blue = (save_adapter(tmp_path / name, model, seed=i) for i, name in enumerate(("red", "blue")))
    rows: list[int] = []
    added = Adapting.add

    def add(self: Adapting, name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        rows.extend(len(adapted.rows) for adapted in self.now if isinstance(adapted, Adapted))
        added(self, name, x, y)

    monkeypatch.setattr(Adapting, "add", add)
    monkeypatch.setattr(memory, "ADAPTERS", 0)

    def made(lora: dict[str, str], free: int) -> CudaExecutor:
        settings = msgspec.structs.replace(config(folder, fit=True), lora=lora)
        memory = Bytes(free_bytes=RESERVED + free, run=True)
        return CudaExecutor.on(resident_kernels(1), settings, torch.float16, memory)

    block = made({}, 1 << 20).facts.block_bytes
    assert set(rows) == {20 + 4}
    plain = made({}, 6 * block)
    with pytest.raises(ModelError, match=r"the adapter takes 0\.\d MiB .* others have 0\.0 of the 0\.0"):
        plain.adapters.load("red", str(red))
    assert plain.facts.total_blocks == 6
    held = made(
        {"red": str(red), "twin": str(red), "gone": str(tmp_path / "gone"), "odd": "~nobody-of-this-name/x"}, 6 * block
    )
    held.adapters.load("red", str(red))
    taken = -(-held.adapters.nbytes // block)
    assert held.facts.total_blocks == 6 - taken
    with pytest.raises(ModelError, match=r"a lower kv\.tokens, without kv\.fit"):
        held.adapters.load("blue", str(blue))


def test_decodes_with_adapters_are_recorded(
    folder: Path, resident_kernels: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for whoever has which of those that are held; another, once others are. It gives what launches give,
    also to a row beside which another adapter's numbers overflow; in `exact` mode to the bit, whoever else is held."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    paths = [save_adapter(tmp_path / name, model, seed=i) for i, name in enumerate(("red", "blue", "green"))]
    recording = Recording(monkeypatch)

    def executor(recorder: Recorder | None, mode: Mode = "fast") -> CudaExecutor:
        kernels = resident_kernels(1)
        return CudaExecutor.on(kernels, config(folder, mode=mode), torch.float16, Bytes(), recorder)

    def said(made: CudaExecutor, crowds: list[tuple[int, ...]], huge: bool = False) -> list[list[float]]:
        adapters = [None, *(made.adapters.load(path.name, str(path)) for path in paths[:2])]
        driver = Driver(made, seed=5)
        live = [driver.open(prompt(i + 30, 14 + i), sampling=GREEDY, adapter=adapters[i]) for i in range(3)]
        driver.advance(live)
        if huge:
            blue = list(made.adapters.held.values())[1]
            for low in chain.from_iterable(blue.lows.values()):
                low.down.weight.fill_(6e4)
        for crowd in crowds:
            driver.advance([live[i] for i in crowd])
        green = made.adapters.load("green", str(paths[2]))
        last = driver.open(prompt(9, 5), sampling=GREEDY, adapter=green)
        driver.advance([last])
        for _ in range(2):
            driver.advance([last, live[0]])
        return [[entry.logprob for entry in one.logprobs if entry] for one in (*live[: 2 if huge else 3], last)]

    crowds = [(0, 1, 2), (0, 1), (1, 2), (2, 0), (0, 1, 2)]
    want, got = said(executor(None), crowds), said(executor(recording), crowds)
    for one, other in zip(got, want, strict=True):
        assert one == pytest.approx(other, abs=0.02)
    # The largest, twice; with two adapters for three or four and for two; with three for two.
    assert (recording.recorded, recording.replayed) == (5, 4)
    poisoned = said(executor(again), crowds, huge=True)
    assert poisoned[0] == pytest.approx(want[0][: len(poisoned[0])], abs=0.02)
    assert poisoned[1] == pytest.approx(want[1], abs=0.02)
    exact = said(executor(None, "exact"), crowds)
    assert said(executor(recording, "exact"), crowds) == exact
    assert (recording.recorded, recording.replayed) == (10, 8)
    poisoned = said(executor(again, "exact"), crowds, huge=True)
    assert poisoned[:2] == exact[:2]
    monkeypatch.setattr(forward, "APART", 2)
    assert said(executor(recording, "exact"), crowds) == exact
    assert recording.recorded == 10 + 4  # three are too many


def test_prompt_logprobs_are_those_of_the_exact_executor(make: Make, exact: CpuExecutor) -> None:
    sampling = Sampling(temperature=0.0, prompt_logprobs=2)
    told = []
    for executor in (make(1), exact):
        driver = Driver(executor)
        sequence = driver.open(prompt(7, 45), sampling=sampling)
        entries = []
        while not sequence.output:
            driver.advance([sequence], chunk=40)
            assert driver.last is not None
            entries += [entry for chunk in driver.last.prompts for entry in chunk.entries]
        told.append(entries)
    got, want = told
    assert [entry.token for entry in got] == [entry.token for entry in want] == prompt(7, 45)[1:]
    for one, other in zip(got, want, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=0.05)


def test_a_sequence_that_cannot_be_computed_fails_alone(make: Make) -> None:
    driver = Driver(make())
    good, sick = driver.open([5, 6, 7], sampling=GREEDY), driver.open([1, VOCAB, 3], sampling=GREEDY)
    driver.step((good, 3), (sick, 3))
    assert good.failure is None
    assert sick.failure is not None
    assert "vocabulary" in sick.failure
    sick.ids.append(0)
    driver.step((good, DECODE), (sick, DECODE))
    assert driver.last is not None
    assert [failed.open_id for failed in driver.last.failed] == [sick.open_id]
    assert len(good.output) == 2


def test_numbers_that_are_not_finite_fail_their_sequence(make: Make) -> None:
    executor = make(1)
    with torch.inference_mode():
        executor.forward.decoder.embed[40] = torch.inf
    driver = Driver(executor)
    good, sick = driver.open([5, 6, 7], sampling=GREEDY), driver.open([1, 40, 3], sampling=GREEDY)
    driver.step((good, 3), (sick, 3))
    assert sick.failure is not None
    assert "not finite" in sick.failure
    assert len(good.output) == 1


@pytest.mark.parametrize(("block_size", "tokens", "word"), [(24, 1024, "block_size is 24"), (16, 8, "holds no block")])
def test_what_kernels_cannot_do_is_said_at_load(make: Make, block_size: int, tokens: int, word: str) -> None:
    with pytest.raises(ModelError, match=word):
        make(block_size=block_size, tokens=tokens)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_loading_says_so(folder: Path) -> None:
    with pytest.raises(DeviceError, match="finds no GPU"):
        CudaExecutor.load(config(folder))
