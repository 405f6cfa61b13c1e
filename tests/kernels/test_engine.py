"""The whole engine on the CUDA executor's code path, with the emulator for a GPU: the production scheduler and
KV-manager around it, then real processes. Tokens are those of the exact CPU executor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from octavo.core.client.client import Client
from octavo.core.config.schema import SpeculationConfig
from octavo.core.grammar import Mask
from octavo.core.messages import Grammar, Ids, Params, Sampling
from octavo.executors.cpu.executor import CpuExecutor
from octavo.executors.cuda.emulated import again
from octavo.executors.cuda.executor import CudaExecutor
from octavo.executors.cuda.speaker import Speaker
from octavo.executors.drafting.contract import Draft, Drafter, Host, Want
from octavo.executors.drafting.drafting import Drafting
from octavo.executors.residents import Resident
from tests.executors.driver import Driver
from tests.executors.tiny import VOCAB
from tests.kernels.conftest import Maker
from tests.kernels.test_executor import Bytes, Kv, Mode, config, prompt, save_small
from tests.processes.daemon import daemon
from tests.speculation.drafters import Bush, Oracle, Silly
from tests.speculation.replica import Replica, asked

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, seed=3, logprobs=2, repetition=1.2, presence=0.1, frequency=0.2),
    Sampling(temperature=1.0, seed=4, top_k=9, top_p=0.9, min_p=0.01, prompt_logprobs=1),
    Sampling(temperature=0.6, seed=5, allowed=tuple(range(40)), banned=((7,), (3, 8)), min_tokens=9, ends=(2, 4)),
]
SHARED = prompt(9, 18)
REQUESTS = [
    asked(0, SHARED, tokens=12, sampling=SAMPLINGS[0]),
    asked(1, [*SHARED, 7], tokens=9, sampling=SAMPLINGS[1], n=2),
    asked(2, SHARED * 2, tokens=6, sampling=SAMPLINGS[2]),
    asked(3, [8], tokens=20, sampling=SAMPLINGS[3]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer of a word for each id, for the daemon."""
    made = save_small(tmp_path_factory.mktemp("models") / "tiny64")
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(str(made / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def exact(folder: Path) -> CpuExecutor:
    return CpuExecutor.load(config(folder))


def cuda(
    kernels: Maker,
    folder: Path,
    *,
    mode: Mode = "fast",
    tokens: int = 1024,
    drafter: type[Drafter] | None = None,
    rule: str = "coupled",
    grammars: EveryThird | None = None,
    kv: Kv = "auto",
    **options: Any,
) -> CudaExecutor:
    """With graphs that are replayed by doing the work again."""
    settings = msgspec.structs.replace(
        config(folder, tokens=tokens, mode=mode, kv=kv),
        speculation=SpeculationConfig(verification=rule),  # type: ignore[arg-type]
    )
    made = CudaExecutor.on(kernels(1), settings, torch.float16, Bytes(), again)
    if drafter is None and grammars is None:
        return made
    guesser = None if drafter is None else drafter(Host(settings, made.facts), drafter.Options(**options))
    drafting = Drafting(guesser, made.facts.vocab_size, settings.speculation.verification, trees=True)
    return CudaExecutor(made.forward, made.facts, grammars, drafting)


class EveryThird:
    """A grammar: ids that are the sum of the answer so far, modulo 3."""

    def start(self, grammar: Grammar) -> EveryThird:
        return EveryThird()

    def __init__(self) -> None:
        self._sum = 0

    def take(self, tokens: list[int]) -> None:
        self._sum += sum(tokens)

    def mask(self) -> Mask:
        allowed: Mask = np.arange(VOCAB) % 3 == self._sum % 3
        return allowed


@pytest.mark.parametrize(("tokens", "crash_at"), [(1024, 5), (64, -1)])
def test_answers_are_those_of_the_exact_executor(
    resident_kernels: Maker, folder: Path, exact: CpuExecutor, tokens: int, crash_at: int
) -> None:
    """All sampler options, choices that fork, prompts that share their beginnings, in chunks beside decodes, two steps
    ahead; when the executor dies, and in a pool so small that most have to wait."""
    want = Replica(exact, policy="off", slots=1, depth=1, caching=False)
    want.run(REQUESTS)
    got = Replica(cuda(resident_kernels, folder, tokens=tokens), policy="off", slots=4, budget=15, crash_at=crash_at)
    assert got.run(REQUESTS) == want.said


@pytest.mark.parametrize("drafter", [Oracle, Silly])
def test_guesses_change_no_bit(resident_kernels: Maker, folder: Path, drafter: type[Drafter]) -> None:
    """In exact mode: tokens, and the log-probabilities of those who asked."""
    want = Replica(cuda(resident_kernels, folder, mode="exact"), policy="off")
    want.run(REQUESTS)
    told = {(tuple(r.ids.tolist()), c): want.said[r.handle, c] for r in REQUESTS for c in range(r.n)}
    options: Any = {"answers": told} if drafter is Oracle else {}
    executor = cuda(resident_kernels, folder, mode="exact", drafter=drafter, **options)
    got = Replica(executor, options={"tokens": 5})
    assert got.run(REQUESTS) == want.said
    assert got.drafted > 0
    assert drafter is Silly or got.accepted > 10
    told_of = [
        [[entry.top_logprobs for entry in replica.logprobs[1, choice] if entry] for choice in range(2)]
        for replica in (got, want)
    ]
    assert told_of[0] == told_of[1]
    assert len(told_of[0][0]) == 9


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_trees_of_guesses_change_nothing(resident_kernels: Maker, folder: Path, kv: Kv) -> None:
    """Guesses in any shape: what was right stays in the cells of its positions, and its log-probabilities with it. To
    the bit in texts so short, where a warp has but one tile: so in mode `exact`, though it offers no trees."""
    want = Replica(cuda(resident_kernels, folder, mode="exact", kv=kv), policy="off")
    want.run(REQUESTS)
    told = {(tuple(r.ids.tolist()), c): want.said[r.handle, c] for r in REQUESTS for c in range(r.n)}
    got = Replica(
        cuda(resident_kernels, folder, mode="exact", drafter=Bush, kv=kv, answers=told), options={"tokens": 12}
    )
    assert got.run(REQUESTS) == want.said
    assert got.accepted > 10
    told_of = [
        [[entry.top_logprobs for entry in replica.logprobs[1, choice] if entry] for choice in range(2)]
        for replica in (got, want)
    ]
    assert told_of[0] == told_of[1]


def test_a_tree_of_more_guesses_than_a_mask_holds_is_cut(resident_kernels: Maker, folder: Path) -> None:
    requests = [asked(0, SHARED, tokens=90)]
    want = Replica(cuda(resident_kernels, folder, mode="exact"), policy="off").run(requests)
    told = {(tuple(SHARED), 0): want[0, 0]}
    got = Replica(cuda(resident_kernels, folder, mode="exact", drafter=Bush, answers=told), options={"tokens": 64})
    assert got.run(requests) == want
    assert max(result.drafted.max() for result in got.results if len(result.drafted)) == 63


class Drawn(Drafter):
    """Trees of any shape, of guesses drawn from distributions that know nothing of the model."""

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        return [self._one(want.resident, want.most) for want in wants]

    def _one(self, resident: Resident, n: int) -> Draft:
        luck = np.random.default_rng([len(resident.tokens), resident.choice, resident.sampling.seed])
        chances = luck.dirichlet(np.full(VOCAB, 0.2), n)
        tokens = [int(luck.choice(VOCAB, p=row)) for row in chances]
        return Draft(tokens, chances, [int(luck.integers(-1, min(i, 3))) if i else -1 for i in range(n)])


class Careless(Drawn):
    """The same, but more than are asked for, in single precision, some of tokens that there are not."""

    def _one(self, resident: Resident, n: int) -> Draft:
        tokens, chances, parents = super()._one(resident, n + 2)
        assert chances is not None
        beyond = VOCAB if len(resident.tokens) % 3 == 0 else 0
        return Draft([*tokens[:2], tokens[2] + beyond, *tokens[3:]], chances.astype(np.float32), parents)


@pytest.mark.parametrize("drafter", [Oracle, Bush, Drawn, Careless])
def test_rejection_on_the_device_says_what_the_shared_rule_says(
    resident_kernels: Maker, folder: Path, drafter: type[Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains and trees of certain guesses, trees of drawn ones, with all sampler options, beside a greedy request; a
    drafter that does not keep to its contract, too."""
    want = Replica(cuda(resident_kernels, folder, mode="exact"), policy="off").run(REQUESTS)
    told = {(tuple(r.ids.tolist()), c): want[r.handle, c] for r in REQUESTS for c in range(r.n)}
    options: dict[str, Any] = {} if issubclass(drafter, Drawn) else {"answers": told}
    monkeypatch.setattr("octavo.executors.cuda.speaker.CHANCES", 8)  # so that a step has several portions

    def run() -> Replica:
        executor = cuda(resident_kernels, folder, mode="exact", drafter=drafter, rule="rejection", **options)
        replica = Replica(executor, options={"tokens": 6})
        assert replica.run(REQUESTS)[0, 0] == want[0, 0]
        return replica

    mine = run()
    monkeypatch.setattr(Speaker, "_needs_host", Speaker._rejects)
    theirs = run()
    assert mine.said == theirs.said
    assert [mine.logprobs[1, c][-1] for c in range(2)] == [theirs.logprobs[1, c][-1] for c in range(2)]
    assert (mine.drafted, mine.accepted) == (theirs.drafted, theirs.accepted)
    assert 0 < mine.accepted < mine.drafted


@pytest.mark.parametrize("guesses", [0, 4])
def test_grammars_are_followed(resident_kernels: Maker, folder: Path, guesses: int) -> None:
    grammar = Grammar("regex", ".*")
    requests = [
        asked(i, [5, 6, 7], tokens=12, sampling=Sampling(temperature=float(i), seed=i, grammar=grammar)) for i in (0, 1)
    ]
    plain = Replica(cuda(resident_kernels, folder, mode="exact", grammars=EveryThird()), policy="off").run(requests)
    for answer in plain.values():
        assert all(token % 3 == sum(answer[:i]) % 3 for i, token in enumerate(answer))
    if guesses:
        told = {((5, 6, 7), 0): plain[1, 0]}
        executor = cuda(resident_kernels, folder, mode="exact", grammars=EveryThird(), drafter=Oracle, answers=told)
        replica = Replica(executor, options={"tokens": guesses})
        assert replica.run(requests) == plain
        assert replica.accepted > 0


async def test_processes_answer_on_the_emulated_device(folder: Path, exact: CpuExecutor) -> None:
    """From a client to the kernels' sources and back."""
    alone = Driver(exact)
    wanted = [alone.finish(alone.open(prompt(i, 20 + i)), 8) for i in range(2)]
    sets = ("executor.kind=cuda-emulated", "executor.threads=1", "kv.block_size=16", "kv.tokens=512")
    with daemon(*sets, "scheduler.chunk_budget=16", model=str(folder)) as running:
        running.wait_ready()
        answers: list[list[int]] = [[], []]

        async def ask(client: Client, i: int) -> None:
            params = Params(sampling=Sampling(temperature=0.0), max_tokens=8)
            async with await client.generate(Ids(prompt(i, 20 + i)), params) as stream:
                async for piece in stream:
                    answers[i] += piece.ids

        async with Client.connect(running.run_dir) as client:
            await client.wait_ready(120)
            with anyio.fail_after(120):
                async with anyio.create_task_group() as group:
                    for i in range(2):
                        group.start_soon(ask, client, i)
        assert answers == wanted
