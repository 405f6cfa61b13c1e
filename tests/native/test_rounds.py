"""Steps in a row, told as one: the same tokens as told one by one, whatever is asked and whoever ends before."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path

import msgspec

from octavo.core.grammar import GrammarError, Mask
from octavo.core.messages import Grammar, Sampling
from octavo.executors.native.executor import NativeExecutor
from tests.executors.driver import DECODE, Driver, Sequence
from tests.native.test_serves import ASKED, PROMPT, EvenThenOdd, native, path  # noqa: F401 - a fixture

NEW = 11


def begin(driver: Driver, asked: dict[str, Sampling]) -> dict[str, Sequence]:
    """All have their first token."""
    opened = {name: driver.open(PROMPT, sampling=sampling) for name, sampling in asked.items()}
    driver.step(*((sequence, len(PROMPT)) for sequence in opened.values()))
    return opened


def told(sequences: dict[str, Sequence]) -> dict[str, tuple[list[int], object]]:
    return {name: (one.output, one.logprobs) for name, one in sequences.items()}


def test_rounds_say_what_single_steps_say(path: Path) -> None:  # noqa: F811
    driver = Driver(native(path, "fast"))
    asked = {name: msgspec.structs.replace(one, ends=()) for name, one in ASKED.items()}
    one_by_one = begin(driver, asked)
    for _ in range(NEW - 1):
        driver.step(*((one, DECODE) for one in one_by_one.values()))
    driver = Driver(native(path, "fast"), seed=1)
    together = begin(driver, asked)
    for rounds in (4, 1, 6 - 1):
        result = driver.step(*((one, DECODE) for one in together.values()), rounds=rounds)
        assert result.n_new.tolist() == [rounds] * len(asked)
    assert all(len(one.output) == NEW for one in together.values())
    assert told(together) == told(one_by_one)


def test_plans_that_are_cut_short_go_on_in_the_next(path: Path) -> None:  # noqa: F811
    asked = {name: msgspec.structs.replace(one, ends=()) for name, one in ASKED.items()}
    answers = []
    for cut in (False, True):
        executor = native(path, "fast")
        driver = Driver(executor, seed=int(cut))
        opened = begin(driver, asked)
        for rounds in (2, 1, 4, 3):
            if cut:
                executor.go_on = chain(repeat(True, rounds - 1), [False]).__next__
            result = driver.step(*((one, DECODE) for one in opened.values()), rounds=7 if cut else rounds)
            assert (result.rounds, set(result.n_new.tolist())) == (rounds, {rounds})
        answers.append(told(opened))
    assert answers[0] == answers[1]


def test_greedy_ones_alone_say_what_they_say_when_more_is_asked(path: Path) -> None:  # noqa: F811
    """Alone, they are computed by columns."""
    answers = []
    for explained in (False, True):
        driver = Driver(native(path, "fast"))
        sampling = Sampling(temperature=0.0, logprobs=0 if explained else -1)
        opened = [driver.open(PROMPT[:n], sampling=sampling) for n in (3, len(PROMPT), 17)]
        driver.step(*((one, len(one.ids)) for one in opened))
        for rounds in (1, 4, 1, 3):
            driver.step(*((one, DECODE) for one in opened), rounds=rounds)
        driver.step((opened[2], DECODE), (opened[0], DECODE))
        answers.append([one.output for one in opened])
    assert answers[0] == answers[1]
    assert [len(output) for output in answers[0]] == [11, 10, 11]


def test_who_ends_is_not_computed_on(path: Path) -> None:  # noqa: F811
    driver = Driver(native(path, "fast"))
    drawn = Sampling(temperature=0.9, seed=3)
    answer = driver.finish(driver.open(PROMPT, sampling=drawn), NEW)
    end = answer[4]
    assert end not in answer[:4]
    driver = Driver(native(path, "fast"))
    both = begin(driver, {"ends": msgspec.structs.replace(drawn, ends=(end,)), "goes on": drawn})
    ending, going = both.values()
    result = driver.step((ending, DECODE), (going, DECODE), rounds=7)
    assert (result.n_new.tolist(), result.rounds) == ([4, 7], 7)
    assert (ending.output, going.output) == (answer[:5], answer[:8])
    result = driver.step((ending, DECODE), (going, DECODE), rounds=3)  # planned before that was known
    assert (result.open_id.tolist(), result.n_new.tolist()) == ([going.open_id], [3])
    assert going.output == answer
    driver = Driver(native(path, "fast"))
    (alone,) = begin(driver, {"ends": msgspec.structs.replace(drawn, ends=(end,))}).values()
    result = driver.step((alone, DECODE), rounds=7)
    assert (result.n_new.tolist(), result.rounds) == ([4], 4)
    result = driver.step((alone, DECODE), rounds=3)
    assert (result.n_new.tolist(), result.tokens.tolist()) == ([], [])


def test_who_fails_in_a_later_round_keeps_what_it_said(path: Path) -> None:  # noqa: F811
    class Short(EvenThenOdd):
        def start(self, grammar: Grammar) -> EvenThenOdd:
            return Short()

        def mask(self) -> Mask:
            if self._taken == 3:
                raise GrammarError("it ends here")
            return super().mask()

    executor = native(path, "fast")
    driver = Driver(NativeExecutor(executor.model, executor.facts, Short()))
    both = begin(driver, {"fails": ASKED["ruled"], "goes on": ASKED["greedy"]})
    failing, going = both.values()
    result = driver.step((failing, DECODE), (going, DECODE), rounds=5)
    assert (result.open_id.tolist(), result.n_new.tolist()) == ([failing.open_id, going.open_id], [2, 5])
    assert (failing.failure, going.failure) == ("it ends here", None)
    assert len(failing.output) == 3
    result = driver.step((failing, DECODE), (going, DECODE), rounds=4)  # planned before that was known
    assert (result.open_id.tolist(), result.n_new.tolist()) == ([going.open_id], [4])
    assert going.output == driver.finish(driver.open(PROMPT), 10)
