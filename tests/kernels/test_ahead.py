"""Steps of the CUDA executor that begin before the one before them has ended, on the emulator: the same answers, and
nothing is read before it is there or written while the device may still read it."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from octavo.core.messages import Enqueue, Grammar, Sampling
from octavo.executors.cuda.executor import CudaExecutor
from octavo.executors.cuda.mirror import Mirror, Reading
from octavo.executors.cuda.speaker import reads_tokens
from tests.adapters.made import save_adapter
from tests.kernels.conftest import Maker
from tests.kernels.test_engine import EveryThird, cuda
from tests.kernels.test_executor import prompt, save_small
from tests.speculation.replica import Replica, asked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("models") / "tiny64")


class Watch:
    """What the device may still read must stay as it was sent, until a reading after it was waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.before: dict[int, int] = {}
        self.overlaps = 0
        send, wait = Mirror.send, Reading.wait
        init = Reading.__init__
        watch = self

        def sends(mirror: Mirror) -> None:
            host = mirror._sources[mirror._room.turn]
            watch.sent.append((host, host.clone()))
            send(mirror)

        def made(reading: Reading, numbers: torch.Tensor) -> None:
            init(reading, numbers)
            watch.before[id(reading)] = len(watch.sent)

        def waits(reading: Reading) -> list[int]:
            known = watch.before.get(id(reading), 0)
            if known < len(watch.sent):
                watch.overlaps += 1  # something was launched after it
            for host, was in watch.sent[:known]:
                assert torch.equal(host, was), "written while the device may still read it"
            watch.sent[:known] = []
            watch.before = {key: max(0, n - known) for key, n in watch.before.items()}
            return wait(reading)

        monkeypatch.setattr(Mirror, "send", sends)
        monkeypatch.setattr(Reading, "__init__", made)
        monkeypatch.setattr(Reading, "wait", waits)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def crowd(seed: int) -> list[Enqueue]:
    """Requests of every kind, some of which end in the middle: by a stop id, at once, or by length."""
    luck = random.Random(seed)

    def sampling() -> Sampling:
        kind = luck.choice(["greedy", "drawn", "penalised", "banned", "short", "told"])
        base = Sampling(temperature=luck.choice([0.0, 0.7, 1.0]), seed=luck.randrange(1000))
        kinds: dict[str, dict[str, object]] = {
            "greedy": {"temperature": 0.0},
            "drawn": {"temperature": 0.9, "top_k": 20, "top_p": 0.95},
            "penalised": {"repetition": 1.3, "frequency": 0.4},
            "banned": {"banned": ((7,), (luck.randrange(97), luck.randrange(97)), (luck.randrange(97),))},
            "short": {"min_tokens": 3, "ends": tuple(range(30))},
            "told": {"logprobs": 2, "prompt_logprobs": luck.choice([-1, 1])},
        }
        return msgspec.structs.replace(base, **kinds[kind])

    made = []
    for i in range(8):
        ids = prompt(seed * 10 + i % 3, luck.choice([1, 7, 17, 30]))  # some share their beginnings
        request = asked(i, ids, tokens=luck.choice([1, 2, 9, 15]), sampling=sampling(), n=luck.choice([1, 1, 2]))
        made.append(msgspec.structs.replace(request, stop_ids=luck.sample(range(97), luck.choice([0, 4, 12]))))
    return made


@pytest.mark.parametrize(("seed", "tokens", "depth", "crash_at"), [
    (1, 1024, 2, -1), (2, 1024, 3, 9), (3, 112, 2, -1), (4, 112, 4, 5), (5, 1024, 1, -1), (6, 144, 2, 12),
])  # fmt: skip
def test_answers_are_those_of_the_reference(
    resident_kernels: Maker,
    folder: Path,
    watch: Watch,
    seed: int,
    tokens: int,
    depth: int,
    crash_at: int,
) -> None:
    """Under the production scheduler and KV-manager: mixed steps and recorded ones, requests that end while their next
    step is under way, pools so small that sequences are preempted, deaths of the executor. In exact mode, against
    requests one by one and steps one by one, which `test_engine` compares with torch."""
    requests = crowd(seed)
    want = Replica(cuda(resident_kernels, folder, mode="exact"), policy="off", slots=1, depth=1, caching=False)
    want.run(requests)
    watch.overlaps = 0
    got = Replica(
        cuda(resident_kernels, folder, tokens=tokens, mode="exact"),
        policy="off", slots=4, budget=15, depth=depth, crash_at=crash_at,
    )  # fmt: skip
    assert got.run(requests) == want.said
    assert got.finish == want.finish
    if depth > 1:
        assert watch.overlaps > 5
    else:
        assert watch.overlaps == 0


@pytest.mark.parametrize(("seed", "tokens", "depth", "crash_at"), [(7, 1024, 3, -1), (8, 128, 2, 7)])
def test_adapters_of_a_crowd(
    resident_kernels: Maker, folder: Path, tmp_path: Path, seed: int, tokens: int, depth: int, crash_at: int
) -> None:
    """Beside sequences without, in launched steps between recorded ones; preempted, forked, and after a death."""
    model = LlamaForCausalLM.from_pretrained(folder)
    paths = [save_adapter(tmp_path / name, model, seed=i) for i, name in enumerate(("red", "blue"))]

    def told(executor: CudaExecutor) -> list[Enqueue]:
        adapters = [None, None, *(executor.adapters.load(path.name, str(path)) for path in paths)]
        luck = random.Random(seed)
        chosen = [(request, luck.choice(adapters)) for request in crowd(seed)]
        return [
            msgspec.structs.replace(request, adapter=adapter, namespace=adapter.digest if adapter else b"")
            for request, adapter in chosen
        ]

    one, many = (cuda(resident_kernels, folder, mode="exact", tokens=n) for n in (1024, tokens))
    want = Replica(one, policy="off", slots=1, depth=1, caching=False)
    want.run(told(one))
    got = Replica(many, policy="off", slots=4, budget=15, depth=depth, crash_at=crash_at)
    assert got.run(told(many)) == want.said
    assert got.finish == want.finish
    bare = Replica(cuda(resident_kernels, folder, mode="exact"), policy="off").run(crowd(seed))
    assert sum(bare[key] != said for key, said in want.said.items()) > 1


def test_a_grammar_follows_tokens_that_came_late(resident_kernels: Maker, folder: Path) -> None:
    """Its mask is of the step before: the pass begins, the draw waits. Beside it others draw at once."""
    grammar = Sampling(temperature=1.0, seed=3, grammar=Grammar("regex", ".*"))
    requests = [asked(0, [5, 6, 7], tokens=12, sampling=grammar), asked(1, prompt(1, 9), tokens=14)]
    answers = []
    for depth in (1, 2):
        executor = cuda(resident_kernels, folder, mode="exact", grammars=EveryThird())
        answers.append(Replica(executor, policy="off", depth=depth).run(requests))
    assert answers[0] == answers[1]
    said = answers[0][0, 0]
    assert all(token % 3 == sum(said[:i]) % 3 for i, token in enumerate(said))


def test_a_run_that_fails_takes_its_next_step_along(resident_kernels: Maker, folder: Path) -> None:
    """The next step has begun by the time that a token with no finite embedding is told of; others go on."""
    executor = cuda(resident_kernels, folder)
    with torch.inference_mode():
        executor.forward.decoder.embed[91] = torch.inf
    allowed = Sampling(temperature=0.0, allowed=(91,))
    replica = Replica(executor, policy="off")
    requests = [asked(0, [5, 6, 7], tokens=9, sampling=allowed), asked(1, [8, 9], tokens=9)]
    want = Replica(cuda(resident_kernels, folder), policy="off").run(requests[1:])
    assert replica.run(requests)[1, 0] == want[1, 0]
    assert replica.said[0, 0] == [91]
    assert replica.finish[0, 0] == "error"


@pytest.mark.parametrize(
    ("sampling", "reads"),
    [
        (Sampling(), False),
        (Sampling(temperature=0.0, banned=((3,),), min_tokens=4, ends=(1,), bias={3: 1.0}, allowed=(1, 2, 3)), False),
        (Sampling(banned=((3,), (4, 5))), True),
        (Sampling(presence=0.1), True),
        (Sampling(repetition=1.1), True),
        (Sampling(frequency=-0.1), True),
        (Sampling(grammar=Grammar("regex", "a")), True),
    ],
)
def test_who_waits_for_tokens(sampling: Sampling, reads: bool) -> None:
    assert reads_tokens(sampling) is reads


def test_a_host_side_is_written_in_turns() -> None:
    mirror = Mirror(torch.device("cpu"), {"ids": (np.int32, (4,))}, turns=2)
    mirror.host["ids"][:] = 1
    mirror.send()
    mirror.host["ids"][:] = 2  # while the device may still read the first
    assert mirror._room.hosts[0].view(torch.int32)[:4].tolist() == [1] * 4
    assert mirror.device["ids"].tolist() == [1] * 4
    mirror.send()
    assert mirror.device["ids"].tolist() == [2] * 4


def test_to_forget_is_to_drop_what_is_under_way(resident_kernels: Maker, folder: Path) -> None:
    executor: CudaExecutor = cuda(resident_kernels, folder)
    first = Replica(executor, policy="off")
    first.run([asked(0, [1, 2, 3], tokens=4)])
    again = Replica(executor, policy="off", crash_at=2)
    assert again.run([asked(0, [1, 2, 3], tokens=4)]) == first.said
    executor.forget()
    assert not executor.under_way
    assert executor.end() == []
