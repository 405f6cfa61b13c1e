"""Drafters that compute with the target or beside it, on the CUDA executor: in its exact mode the same bits as without
them, whatever happens meanwhile, and what they take of a device's memory is counted before its pool is sized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.core.config.schema import SpeculationConfig
from octavo.core.messages import Sampling, StepResult
from octavo.core.models.errors import ModelError
from octavo.core.trace.catalogue import RequestPreempted, StepBound
from octavo.executors.cpu.executor import CpuExecutor
from octavo.executors.cpu.llama import KvPool, Llama
from octavo.executors.cpu.stacks import CpuStack
from octavo.executors.cuda.batch import Batch
from octavo.executors.cuda.emulated import again
from octavo.executors.cuda.executor import CudaExecutor
from octavo.executors.cuda.forward import Forward
from octavo.executors.cuda.graphs import Graphs, Kind, Pass
from octavo.executors.cuda.memory import RESERVED
from octavo.executors.cuda.stacks import CudaStack
from octavo.executors.drafting.contract import Stack
from octavo.executors.drafting.eagle_head import EagleHead, HeadSpec, save_head
from octavo.executors.drafting.medusa import Head, save_heads
from octavo.executors.residents import Span
from octavo.kernels.cuda.launch import Kernels
from octavo.kernels.cuda.plan import Plan
from tests.executors.tiny import VOCAB, save_tiny
from tests.kernels.conftest import Maker
from tests.kernels.results import write
from tests.kernels.test_executor import Bytes, Mode, config, prompt
from tests.speculation.replica import Replica, asked
from tests.speculation.test_eagle import random_head

HIDDEN = 64
SHARED = prompt(9, 18)
REQUESTS = [
    asked(0, SHARED, tokens=12),
    asked(1, [*SHARED, 7], tokens=9, n=2,
          sampling=Sampling(temperature=0.4, seed=3, logprobs=2, repetition=1.2, frequency=0.2)),
    asked(2, SHARED * 2, tokens=7, sampling=Sampling(temperature=1.0, seed=4, top_k=9, top_p=0.9, prompt_logprobs=1)),
    asked(3, [8], tokens=14,
          sampling=Sampling(temperature=0.6, seed=5, allowed=tuple(range(40)), banned=((7,), (3, 8)), min_tokens=9)),
]  # fmt: skip
DRAFTERS = ("self", "draft-model", "target", "medusa", "medusa tree", "eagle-1", "eagle-1 tree", "eagle-3 tree")
Make: TypeAlias = Callable[..., CudaExecutor]
"""drafter=None, mode="exact", tokens=1024, host_tokens=0, rule="coupled", memory=Bytes(), fit=False, kv="auto"."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target of four layers, a smaller model, and heads for the target."""
    root = tmp_path_factory.mktemp("drafters")
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    save_tiny(root / "target", hidden_size=HIDDEN, num_hidden_layers=4, **sizes)
    save_tiny(root / "small", hidden_size=32, num_hidden_layers=1, **sizes)
    generator = torch.Generator().manual_seed(1)

    def some(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) * 0.1

    heads = [Head([(some(HIDDEN, HIDDEN), some(HIDDEN))], some(VOCAB, HIDDEN)) for _ in range(3)]
    save_heads(root / "medusa", heads)
    for third in (False, True):
        head = random_head(third, HeadSpec(HIDDEN, 2, 1, 32, 1e-5, 10000.0))
        save_head(root / f"eagle-{3 if third else 1}", head)
    return {path.name: path for path in root.iterdir()}


def options_of(drafter: str, folders: dict[str, Path]) -> tuple[str, dict[str, Any]]:
    kind, _, tree = drafter.partition(" ")
    width = {"width": 3} if tree else {}
    match kind:
        case "draft-model":
            return kind, {"model": str(folders["small"])}
        case "target":
            return "draft-model", {"model": str(folders["target"])}
        case "medusa":
            return kind, {"heads": str(folders[kind]), **width}
        case "self":
            return kind, {"layers": 2}
        case _:
            return "eagle", {"head": str(folders[kind]), **width}


@pytest.fixture
def make(folders: dict[str, Path], resident_kernels: Maker) -> Make:
    def made(
        drafter: str | None = None,
        mode: Mode | None = None,
        tokens: int = 1024,
        rule: str = "coupled",
        memory: Bytes | None = None,
        **how: Any,
    ) -> CudaExecutor:
        name, options = (None, {}) if drafter is None else options_of(drafter, folders)
        mode = mode or ("fast" if "width" in options else "exact")  # which has no trees
        speculation = SpeculationConfig(drafter=name, verification=rule, options=options)  # type: ignore[arg-type]
        settings = msgspec.structs.replace(
            config(folders["target"], tokens=tokens, mode=mode, **how), speculation=speculation
        )
        return CudaExecutor.on(resident_kernels(1), settings, torch.float16, memory or Bytes(), again)

    return made


@pytest.fixture(scope="module")
def plain() -> dict[str, Replica]:
    """What was said without a drafter; filled by the first that asks."""
    return {}


def told(replica: Replica) -> dict[tuple[int, int], list[Any]]:
    """Log-probabilities of those who asked."""
    return {
        key: [(entry.token, entry.logprob, entry.top_logprobs) for entry in entries if entry is not None]
        for key, entries in replica.logprobs.items()
        if any(entry is not None for entry in entries)
    }


def without(make: Make, plain: dict[str, Replica]) -> Replica:
    if "" not in plain:
        plain[""] = Replica(make(), policy="off")
        plain[""].run(REQUESTS)
    return plain[""]


def same(got: Replica, want: Replica, drafter: str) -> bool:
    """To the last bit, but for trees, which mode `exact` has not: so small a model says the same in mode `fast`."""
    return got.said == want.said and (drafter.endswith("tree") or told(got) == told(want))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_guesses_change_no_bit(make: Make, plain: dict[str, Replica], drafter: str) -> None:
    """All sampler options, choices that fork, prompts that share their beginnings, in chunks beside decodes."""
    want = without(make, plain)
    got = Replica(make(drafter), options={"tokens": 4}, budget=30)
    got.run(REQUESTS)
    assert same(got, want, drafter)
    assert got.drafted > 20
    if drafter == "target":  # its own KV is right whatever was forked, cached or guessed wrong before
        assert got.accepted == got.drafted
    if drafter.endswith("tree"):
        assert any(is_tree(result) for result in got.results)


def is_tree(result: StepResult) -> bool:
    return len(result.depth) > 0 and bool((result.depth < result.drafted).any())


@pytest.mark.timeout(1200)
def test_the_whole_grid(make: Make, plain: dict[str, Replica], request: pytest.FixtureRequest) -> None:
    """Every drafter, one to eight guesses, with room for all and through a death; writes what it found."""
    if not request.config.getoption("--kernels-all"):
        pytest.skip("needs --kernels-all")
    want, found = without(make, plain), []
    for drafter in DRAFTERS:
        for k in range(1, 9):
            runs = [Replica(make(drafter), options={"tokens": k}, crash_at=crash_at) for crash_at in (-1, 6)]
            for run in runs:
                run.run(REQUESTS)
                assert same(run, want, drafter), (drafter, k)
            drafted, accepted = sum(run.drafted for run in runs), sum(run.accepted for run in runs)
            found.append(f"| {drafter} | {k} | {drafted} | {accepted} |")
    about = (
        "The CUDA executor on the emulator, mode `exact`, a random model of four layers; four requests (five choices) "
        "with sampler options, run with room for all and with the executor dying at its sixth step. In every cell "
        "token ids and log-probabilities are those without guesses; of trees, which are in mode `fast`, token ids. "
        "`target` is a draft model that is the target."
    )
    write(
        "speculation_grid_cuda.md",
        [about, "", "| drafter | k | guesses verified | right |", "|---|--:|--:|--:|", *found],
    )


@pytest.mark.parametrize("drafter", ["target", "eagle-3 tree"])
def test_nor_do_they_after_a_death(make: Make, plain: dict[str, Replica], drafter: str) -> None:
    want = without(make, plain)
    got = Replica(make(drafter), options={"tokens": 4}, crash_at=6)
    got.run(REQUESTS)
    assert same(got, want, drafter)


@pytest.mark.parametrize("drafter", ["target", "eagle-3 tree"])
def test_nor_do_they_for_want_of_blocks(make: Make, drafter: str) -> None:
    requests = [asked(i, prompt(i, 14), tokens=22) for i in range(3)]
    want = Replica(make(), policy="off").run(requests)
    got = Replica(make(drafter, tokens=96), options={"tokens": 4})
    assert got.run(requests) == want
    assert any(isinstance(event, RequestPreempted) for event in got.events)


def test_what_a_drafter_keeps_is_swapped_with_the_blocks(make: Make) -> None:
    """Prompts that push one another out of the pool and come back: a model that is the target stays right of them."""
    requests = [asked(i, prompt(i, 40), tokens=6) for i in range(3)]
    want = Replica(make(), policy="off", slots=1, caching=False).run(requests)
    got = Replica(make("target", tokens=96, host_tokens=256), options={"tokens": 3}, slots=1, budget=48)
    for again_ in range(2):
        repeated = [msgspec.structs.replace(r, handle=r.handle + 10 * again_) for r in requests]
        assert {(h - 10 * again_, c): ids for (h, c), ids in got.run(repeated).items()} == want
    assert sum(event.swapped_in for event in got.events if isinstance(event, StepBound)) >= 3
    assert got.accepted == got.drafted > 0


@pytest.mark.parametrize("drafter", ["draft-model", "eagle-1 tree"])
def test_rejection_says_as_much_and_greedy_ones_the_same(make: Make, plain: dict[str, Replica], drafter: str) -> None:
    """Guesses that were drawn, from a distribution that is told, and trees of certain ones: judged on the device."""
    want = without(make, plain)
    got = Replica(make(drafter, rule="rejection"), options={"tokens": 4})
    said = got.run(REQUESTS)
    assert said[0, 0] == want.said[0, 0]
    assert {key: len(ids) for key, ids in said.items()} == {key: len(ids) for key, ids in want.said.items()}
    assert 0 < got.accepted < got.drafted


@pytest.mark.parametrize(("drafter", "layers"), [("self", {2, 4}), ("draft-model", {1, 4}), ("eagle-3", {4})])
def test_graphs_are_replayed_for_guesses_too(
    make: Make, monkeypatch: pytest.MonkeyPatch, drafter: str, layers: set[int]
) -> None:
    """Of the first layers of the target, of another model, and with the inputs of layers that a head looks at. Mode
    `fast`: so small a model says the same in it."""
    replayed: set[int] = set()

    def run(self: Graphs, kind: Kind, batch: Batch, shared: Plan | None = None) -> Pass:
        replayed.add(kind.layers)
        assert (len(kind.taps) == 3) == (drafter == "eagle-3")
        return ran(self, kind, batch, shared)

    requests = REQUESTS[:1]
    want = Replica(make(mode="fast"), policy="off").run(requests)
    ran = Graphs.run
    monkeypatch.setattr(Graphs, "run", run)
    executor = make(drafter, mode="fast")
    assert Replica(executor, options={"tokens": 3}).run(requests) == want
    assert Replica(executor, policy="off").run(requests) == want
    assert replayed == layers


@pytest.mark.parametrize(("drafter", "per_token"), [("draft-model", 2 * 32 * 2), ("eagle-1", 4 * (2 * 32 + HIDDEN))])
def test_the_pool_has_room_for_what_a_drafter_keeps(make: Make, drafter: str, per_token: int) -> None:
    plain = make().facts.block_bytes
    block = plain + 16 * per_token
    draft = drafter == "draft-model"
    held = 0 if draft else 2 * 16 * per_token  # of two places in host memory
    held += 2 * 4 * (block if draft else plain)  # what is on its way there and back
    memory = Bytes(free_bytes=RESERVED + 7 * block + held + 5)
    executor = make(drafter, fit=True, memory=memory, host_tokens=32)
    assert (executor.facts.total_blocks, executor.facts.block_bytes) == (7, block)
    with pytest.raises(ModelError, match=r"leaves a pool of 112 tokens, kv\.tokens asks for 128"):
        make(drafter, tokens=128, memory=memory, host_tokens=32)


def test_what_a_head_keeps_is_not_there_yet_when_it_is_counted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the pool's part of it nor that of the places in host memory, which free bytes would lack once more."""
    places: list[int] = []

    def pool(self: EagleHead, blocks: int, block_size: int) -> KvPool:
        places.append(blocks)
        return made(self, blocks, block_size)

    made = EagleHead.pool
    monkeypatch.setattr(EagleHead, "pool", pool)
    make("eagle-1", tokens=128, host_tokens=320)
    assert places == [1, 8 + 20]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_no_step_wants_more_logits_than_the_worst(make: Make, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """Of all rows that guesses are for: more than there are sequences. Nor more distributions of guesses."""
    rows_of: list[int] = []
    distributions: list[int] = []

    def reject(self: Kernels, firsts: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distributions.append(len(given[3]))
        return rejected(self, firsts, *given)

    rejected = Kernels.reject
    monkeypatch.setattr(Kernels, "reject", reject)

    def logits(self: Forward, made: Pass, rows: Sequence[int]) -> torch.Tensor:
        rows_of.append(len(rows))
        return computed(self, made, rows)

    computed = Forward.logits
    monkeypatch.setattr(Forward, "logits", logits)
    executor = make("self", memory=Bytes(run=True), rule=rule)
    worst, most = max(rows_of), max(distributions, default=0)
    rows_of.clear()
    distributions.clear()
    sampling = Sampling(temperature=1.0, seed=1)
    requests = [asked(i, prompt(i, 4), tokens=12, sampling=sampling) for i in range(4)]
    Replica(executor, options={"tokens": 4}, budget=20).run(requests)
    assert 5 < max(rows_of) <= worst
    assert bool(distributions) == (rule == "rejection")
    assert max(distributions, default=0) <= most


class Rows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that rows as long as the vocabulary took at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._there: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == VOCAB:
            storage = out.untyped_storage()
            self._there[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
            self._there = {key: one for key, one in self._there.items() if not one[0].expired()}  # type: ignore[no-untyped-call]
            self.most = max(self.most, sum(size for _, size in self._there.values()))
        return out


def test_rows_of_logits_and_distributions_take_no_more_than_in_the_worst_step(
    folders: dict[str, Path], resident_kernels: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of greedy requests between others, so that rows are judged in another order; some want log-probabilities; and
    there are more distributions than may be there at a time."""
    for module in ("speaker", "executor"):
        monkeypatch.setattr(f"octavo.executors.cuda.{module}.CHANCES", 16)
    settings = config(folders["target"], mode="exact")
    settings = msgspec.structs.replace(
        settings,
        scheduler=msgspec.structs.replace(settings.scheduler, chunk_budget=60),
        speculation=SpeculationConfig(drafter="self", verification="rejection", options={"layers": 2}),
    )

    class Measured(Bytes):
        def peak_of(self, work: Callable[[], None]) -> int:
            with worst:
                work()
            return 0

    worst, real = Rows(), Rows()
    executor = CudaExecutor.on(resident_kernels(1), settings, torch.float16, Measured(), again)
    samplings = [
        Sampling(temperature=i % 2, seed=i, repetition=1.1, allowed=tuple(range(40)), logprobs=0 if i else -1)
        for i in range(4)
    ]
    requests = [asked(i, prompt(i, 4), tokens=40, sampling=one) for i, one in enumerate(samplings)]
    with real:
        Replica(executor, options={"tokens": 14}, budget=60).run(requests)
    assert worst.most / 2 < real.most <= worst.most


def test_a_head_computes_where_the_target_does() -> None:
    """On a device that is only pretended: whatever is left on the CPU shows as tensors of two devices in one
    operation."""
    spec = HeadSpec(HIDDEN, 2, 1, 32, 1e-5, 10000.0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for third in (False, True):
            head = random_head(third, spec).to("meta")
            pool = head.pool(4, 16)
            tree = Span([5, 6, 7], 20, [2, 1], [[20], [21], [20, 22]])
            spans = [Span(list(range(1, 20)), 1, [2, 1]), tree]
            n = sum(len(span.ids) for span in spans)
            told = head.feature(torch.empty(n, (3 if third else 1) * HIDDEN, device="meta"))
            features = head.next(spans, torch.empty(n, HIDDEN, device="meta"), told, pool)
            pool.copy_blocks(torch.tensor([1]), torch.tensor([3]))
            assert features.device.type == "meta"
            assert features.shape == (n, HIDDEN)
            said = head.said(features)
            assert (said is not None) == third


def test_the_stacks_are_the_model_whole_or_its_first_layers(make: Make, folders: dict[str, Path]) -> None:
    """Beside the exact CPU executor's, over the same spans."""
    ids = prompt(3, 22)
    theirs = CpuExecutor.load(config(folders["target"]))
    llama = theirs.forward
    assert isinstance(llama, Llama)
    stacks: list[Stack] = [CpuStack(llama, theirs._pool), CudaStack(make().forward, 0)]
    spans = [Span(ids[:19], 0, [2, 0]), Span(ids[3:8], 0, [5])]
    with torch.inference_mode():
        for layers in (None, 2):
            for mine in (spans, [Span(ids[19:], 19, [2, 0])]):
                hidden, want = (stack.hidden(mine, layers) for stack in reversed(stacks))
                torch.testing.assert_close(hidden, want, atol=0.06, rtol=0.02)
                after = [stack.after(mine, layers) for stack in stacks]
                np.testing.assert_allclose(after[1], after[0], atol=0.05)
        torch.testing.assert_close(stacks[1].embed(ids), stacks[0].embed(ids), atol=1e-3, rtol=1e-3)
        stacks[1].copy_blocks([2, 0], [7, 8])
        again_ = [Span([9], 22, table) for table in ([2, 0], [7, 8])]
        assert np.array_equal(*stacks[1].after(again_))
