"""Coupled verification: the same tokens, and the same bits behind them, whoever guesses, how far, and whatever happens
meanwhile."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from octavo.core.grammar import Mask
from octavo.core.messages import Enqueue, Grammar, Sampling, TokenLogprob
from octavo.core.trace.catalogue import RequestFinished, RequestPreempted, StepBound
from octavo.executors.cpu.executor import CpuExecutor
from octavo.executors.drafting.contract import Drafter
from octavo.executors.drafting.eagle_head import save_head
from octavo.executors.native.executor import NativeExecutor
from tests.executors.tiny import VOCAB
from tests.speculation.conftest import CpuMaker, NativeMaker
from tests.speculation.drafters import Bush, Oracle, Silly
from tests.speculation.replica import GREEDY, Replica, asked
from tests.speculation.test_eagle import random_head

Answers = dict[tuple[int, int], list[int]]
AnyExecutor = CpuExecutor | NativeExecutor
AnyMaker = CpuMaker | NativeMaker

SAMPLINGS = [
    GREEDY,
    Sampling(temperature=0.3, seed=3, logprobs=2, repetition=1.2, presence=0.1, frequency=0.2),
    Sampling(temperature=1.0, seed=4, top_k=9, top_p=0.9, min_p=0.01),
    Sampling(temperature=1.0, seed=7, typical_p=0.7),
    Sampling(temperature=0.0, logprobs=1, frequency=0.7, bias={5: 3.0, 9: -4.0}),
    Sampling(temperature=0.6, seed=5, allowed=tuple(range(40)), banned=((7,), (3, 8)), min_tokens=9, ends=(2, 4)),
    Sampling(temperature=0.0, prompt_logprobs=1),
]


def workload(tokens: tuple[int, ...]) -> list[Enqueue]:
    """All sampler options, choices that fork, prompts that share their beginnings, of one tenant or of two."""
    draw = random.Random(5)
    shared = [draw.randrange(VOCAB) for _ in range(11)]
    prompts = [shared * 2, [*shared, 7], [8], shared + shared[:4], [*shared, 7], [3, 4] * 6]
    return [
        asked(i, prompt, tokens=tokens[i % len(tokens)], sampling=SAMPLINGS[i], n=3 if i in (2, 3) else 1,
              tenant="ada" if i == 4 else "")
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


def bits(logprobs: dict[Any, list[TokenLogprob | None]]) -> dict[Any, list[Any]]:
    """Of those who asked: equal ones to the last bit mean equal logits."""
    return {
        key: [(e.token, e.logprob, e.top_ids, e.top_logprobs) for e in entries if e is not None]
        for key, entries in logprobs.items()
        if any(entry is not None for entry in entries)
    }


def options_of(drafter: str | type[Drafter], requests: list[Enqueue], answers: Answers, paths: dict[str, Path]) -> Any:
    if drafter in (Oracle, Bush):
        told = {(tuple(r.ids.tolist()), c): answers[r.handle, c] for r in requests for c in range(r.n)}
        return {"answers": told}
    return {
        "draft-model": {"model": str(paths["small"])},
        "self": {"layers": 1},
        "medusa": {"heads": str(paths["heads"])},
        "medusa tree": {"heads": str(paths["heads"]), "width": 3},
        "eagle": {"head": str(paths["eagle"])},
        "eagle tree": {"head": str(paths["eagle"]), "width": 3},
    }.get(str(drafter), {})


DRAFTERS: list[str | type[Drafter]] = [
    "ngram",
    "suffix",
    "draft-model",
    "self",
    "medusa",
    "medusa tree",
    "eagle",
    "eagle tree",
    Oracle,
    Bush,
    Silly,
]


def installed(drafter: str | type[Drafter]) -> str | type[Drafter]:
    return drafter.partition(" ")[0] if isinstance(drafter, str) else drafter


SHORT = (24, 1, 9)
LONG = (200, 1)


@pytest.fixture(scope="session", params=["cpu", "native"])
def tiny(request: pytest.FixtureRequest, tiny: CpuMaker, tiny_native: NativeMaker) -> AnyMaker:
    return tiny if request.param == "cpu" else tiny_native


@pytest.fixture(scope="session")
def paths(small_folder: Path, heads_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    eagle = tmp_path_factory.mktemp("eagle")
    save_head(eagle, random_head(third=False))
    return {"small": small_folder, "heads": heads_folder, "eagle": eagle}


@pytest.fixture(scope="session")
def plain(tiny: AnyMaker) -> dict[tuple[int, ...], Replica]:
    """Without guesses: the short ones one after another, the long ones together."""
    out: dict[tuple[int, ...], Replica] = {}
    for tokens, slots in ((SHORT, 1), (LONG, 8)):
        out[tokens] = Replica(tiny(), policy="off", slots=slots, depth=1, caching=False)
        out[tokens].run(workload(tokens))
    return out


def same(executor: AnyExecutor, tokens: tuple[int, ...], k: int, plain: Replica, **how: Any) -> Replica:
    replica = Replica(executor, options={"tokens": k}, **how)
    assert replica.run(workload(tokens)) == plain.said
    assert bits(replica.logprobs) == bits(plain.logprobs)
    assert replica.drafted > 0
    assert replica.scheduler.stats["blocks_available"] == executor.facts.total_blocks
    return replica


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_answers_are_those_without_guesses(
    tiny: AnyMaker, plain: dict[tuple[int, ...], Replica], paths: dict[str, Path], drafter: str | type[Drafter], k: int
) -> None:
    """In company; in a pool that is too small, so that some are preempted; and after the executor's death."""
    without = plain[SHORT]
    options = options_of(drafter, workload(SHORT), without.said, paths)
    executor = tiny(installed(drafter), tokens=56 if k == 3 else 2048, **options)
    replica = same(executor, SHORT, k, without, slots=5, budget=13, crash_at=6 if k == 8 else -1)
    assert any(isinstance(event, RequestPreempted) for event in replica.events) == (k == 3)


def test_what_is_swapped_out_meanwhile_comes_back_as_it_was(tiny: AnyMaker) -> None:
    """A block leaves in the very step in which the drafter writes guesses into it for its next owner."""
    draw = random.Random(1)
    shared = [draw.randrange(VOCAB) for _ in range(13)]
    prompts = [shared[: draw.choice([0, 5, 9, 13])] + [draw.randrange(VOCAB) for _ in range(5)] for _ in range(10)]
    requests = [asked(i, prompt, tokens=draw.choice([6, 14, 24, 30])) for i, prompt in enumerate(prompts)]
    expected = Replica(tiny(), policy="off", slots=1, depth=1, caching=False).run(requests)
    swapping = Replica(tiny("self", tokens=60, host_tokens=800, layers=1), options={"tokens": 4}, budget=40)
    for again in range(3):
        told = [replace(r, handle=r.handle + 100 * again, request_id=f"{r.request_id} {again}") for r in requests]
        said = swapping.run(told)
        assert {(h - 100 * again, c): ids for (h, c), ids in said.items()} == expected
    assert sum(event.swapped_in for event in swapping.events if isinstance(event, StepBound)) > 9


def test_places_of_a_tree_are_told_beside_its_guesses(
    tiny: AnyMaker, plain: dict[tuple[int, ...], Replica], paths: dict[str, Path]
) -> None:
    """So a policy can tell what guesses cost from what their depth gains; nothing more of chains."""
    for drafter in ("medusa tree", "medusa"):
        options = options_of(drafter, workload(SHORT), plain[SHORT].said, paths)
        replica = same(tiny("medusa", **options), SHORT, 6, plain[SHORT], slots=5)
        told = [result for result in replica.results if len(result.depth)]
        assert bool(told) == (drafter == "medusa tree")
        for result in told:
            rows = result.drafted > 0
            assert (result.depth[rows] >= 1).all()
            assert (result.depth <= result.drafted).all()
            assert (result.depth[rows] >= result.n_new[rows] - 1).all()


@pytest.mark.parametrize("drafter", [Oracle, Bush, "suffix"])
def test_long_answers_are_those_without_guesses(
    tiny: AnyMaker, plain: dict[tuple[int, ...], Replica], paths: dict[str, Path], drafter: str | type[Drafter]
) -> None:
    options = options_of(drafter, workload(LONG), plain[LONG].said, paths)
    replica = same(tiny(installed(drafter), **options), LONG, 5, plain[LONG], slots=8, depth=3)
    if drafter is Oracle:
        assert replica.accepted > 500


_ABOUT = """# Coupled verification: the whole grid

A tiny random model; six requests (ten choices) with all sampler options, answers of 1 and of 200 tokens. In every cell
token ids and log-probabilities are those without guesses. Each was run three times: with room for all, preempted for
want of blocks, and with the executor dying at its 20th step.
Written by `pytest tests/speculation/test_coupled.py --speculation-all`.
"""


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_whole_grid(
    tiny: AnyMaker,
    plain: dict[tuple[int, ...], Replica],
    paths: dict[str, Path],
    drafter: str | type[Drafter],
    root: Path,
    pytestconfig: pytest.Config,
) -> None:
    """Every drafter, k = 1 … 8, answers of 1 and of 200 tokens, through everything; writes what it found."""
    if not pytestconfig.getoption("--speculation-all"):
        pytest.skip("needs --speculation-all")
    options, found = options_of(drafter, workload(LONG), plain[LONG].said, paths), []
    for k in range(1, 9):
        runs = [
            same(tiny(installed(drafter), tokens=tokens, **options), LONG, k, plain[LONG], slots=8, crash_at=crash_at)
            for tokens, crash_at in ((2048, -1), (320, -1), (2048, 20))
        ]
        found.append(f"| {called(drafter)} | {k} | {sum(r.drafted for r in runs)} | {sum(r.accepted for r in runs)} |")
    kind = "cpu" if isinstance(tiny, CpuMaker) else "native"
    write_grid(root / f"tests/results/speculation_grid_{kind}.md", kind, called(drafter), found)


def called(drafter: str | type[Drafter]) -> str:
    return drafter if isinstance(drafter, str) else drafter.__name__.lower()


def write_grid(file: Path, kind: str, drafter: str, found: list[str]) -> None:
    """With what was found of the other drafters before."""
    known = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = [row for row in known if row.startswith("| ") and not row.startswith(("| drafter |", f"| {drafter} |"))]
    order = [f"| {called(each)} " for each in DRAFTERS]
    rows = sorted([*rows, *found], key=lambda row: order.index(row.split("|")[0] + "|" + row.split("|")[1]))
    head = [_ABOUT, f"Executor `{kind}`.", "", "| drafter | k | guesses verified | right |", "|---|---|---|---|"]
    file.write_text("\n".join([*head, *rows]) + "\n", encoding="utf-8")


def test_a_draft_model_that_is_the_target_is_always_right(
    tiny: AnyMaker, plain: dict[tuple[int, ...], Replica]
) -> None:
    """So its own KV is right whatever was cached, forked, preempted or guessed wrong before; rows are sampled with the
    target's noise. Guesses fail only where an option looks at the whole answer's grammar, and none does here."""
    executor = tiny("draft-model", tokens=56, model=tiny.path)
    replica = same(executor, SHORT, 4, plain[SHORT], slots=5)
    assert any(isinstance(event, RequestPreempted) for event in replica.events)
    assert replica.drafted == replica.accepted


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


@pytest.mark.parametrize("k", [1, 6])
def test_grammars_are_followed_guess_by_guess(tiny: AnyMaker, k: int) -> None:
    grammar = Grammar("regex", ".*")
    requests = [
        asked(i, [5, 6, 7], tokens=30, sampling=Sampling(temperature=float(i), seed=i, grammar=grammar)) for i in (0, 1)
    ]
    plain = Replica(tiny(grammars=EveryThird()), policy="off").run(requests)
    for answer in plain.values():
        assert all(token % 3 == sum(answer[:i]) % 3 for i, token in enumerate(answer))
    options = options_of(Oracle, requests, plain, {})
    replica = Replica(tiny(Oracle, grammars=EveryThird(), **options), options={"tokens": k})
    assert replica.run(requests) == plain
    assert 0 < replica.accepted < replica.drafted


def test_what_became_of_guesses_is_told(tiny: AnyMaker, plain: dict[tuple[int, ...], Replica]) -> None:
    """Per request, per step and in sums: the executor's own counts, whoever counts them."""
    options = options_of(Oracle, workload(SHORT), plain[SHORT].said, {})
    replica = Replica(tiny(Oracle, **options), options={"tokens": 4})
    replica.run(workload(SHORT))
    stats, finished = replica.scheduler.stats, [e for e in replica.events if isinstance(e, RequestFinished)]
    assert (stats["drafted"], stats["accepted"]) == (replica.drafted, replica.accepted)
    assert sum(event.drafted for event in finished) <= replica.drafted  # those after the end are of no request's life
    assert sum(event.accepted for event in finished) <= replica.accepted
    told = {(f"r{handle}", choice): counts for (handle, choice), counts in replica.guessed.items()}
    assert told == {(e.request_id, e.choice): (e.drafted, e.accepted) for e in finished if e.drafted}
    assert 0 < sum(stats[f"accepted_{i}"] for i in range(1, 9)) == replica.accepted
    judged = [stats[f"judged_{i}"] for i in range(1, 6)]
    assert judged[0] >= judged[1] >= judged[2] >= judged[3] > judged[4] == 0
    assert stats["accepted_1"] >= judged[1]
