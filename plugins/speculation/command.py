"""`octavo verify speculation`: the same prompts, with a drafter and without, on daemons that are started for it.

Coupled, every token must be the same, greedy and sampled. By rejection the same is asked of greedy answers; sampled
ones must have the same distribution, place by place, which a two-sample test looks at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from octavo.core.client.llm import LLM
from octavo.core.client.stream import ClientError
from octavo.core.messages import Usage
from octavo.plugins.speculation.homogeneity import homogeneity

FAILED = 1

PROMPTS = (
    "List the numbers from one to twenty in words: one, two, three, four,",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n",
    '{"name": "Ada", "age": 36}\n{"name": "Bob", "age": 41}\n{"name": "Cyd", "age":',
    "The sea was calm. The sea was grey. The sea was",
    "Copy this line exactly: the quick brown fox jumps over the lazy dog.\nthe quick brown fox",
)
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "repetition": 1.1, "presence": 0.1}
TESTED = "red green blue red green blue red green blue red green"
PLACES = 4
LEVEL = 0.001
"""Over all tests of one run together."""


def speculation(
    *,
    drafter: str,
    model: str = "default",
    executor: str = "auto",
    verification: Literal["coupled", "rejection"] = "coupled",
    guesses: int = 4,
    tokens: int = 48,
    draws: int = 512,
    option: Annotated[
        list[str] | None, Parameter(name="--option", negative=(), help="the drafter's: model=PATH, head=FOLDER")
    ] = None,
) -> int:
    """Check that answers are the same with a drafter and without; exit status 0 only if they are.

    Parameters
    ----------
    drafter
        ngram, suffix, draft-model, self, medusa, eagle, or another that is installed; medusa takes `--option
        heads=FOLDER`, eagle `--option head=FOLDER` (`examples/train_heads.py` makes them)
    model
        whatever `octavo serve` takes
    executor
        executor.kind
    verification
        `coupled`, or `rejection`: then sampled answers are compared by their distribution
    guesses
        tokens drafted in each step
    tokens
        length of the answers that are compared
    draws
        answers of each side that the distribution is estimated from
    """
    common = {"executor": {"kind": executor}, "kv": {"tokens": 16384}, "trace": {"enabled": False}}
    common["policies"] = {"speculation": "off"}
    options = dict(_pairs(option or []))
    if drafter == "draft-model" and "model" not in options:
        options["model"] = model
        print("no --option model=PATH says which smaller model guesses: the model guesses for itself", flush=True)
    drafting = {
        "speculation": {"drafter": drafter, "verification": verification, "options": options},
        "policies": {"speculation": "fixed", "options": {"speculation": {"tokens": guesses}}},
    }
    modes: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}}
    if verification == "coupled":
        modes["sampled"] = SAMPLED
    counted = draws if verification == "rejection" else 0
    try:
        print(f"{model} answers without guesses ...", flush=True)
        plain, plain_draws, _ = _answers(model, common, modes, tokens, counted, 0)
        print(f"{model} answers with {drafter}, {guesses} guesses a step, verified {verification} ...", flush=True)
        ours, our_draws, made = _answers(model, {**common, **drafting}, modes, tokens, counted, draws)
    except ClientError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return FAILED
    print(
        f"\nAnswers of up to {tokens} tokens, token by token, to {len(PROMPTS)} prompts, {' and '.join(modes)}"
        f"{_told(SAMPLED) * ('sampled' in modes)}:\n"
    )
    sound = True
    for mode in modes:
        for prompt, one, other in zip(PROMPTS, plain[mode], ours[mode], strict=True):
            differs = next((i for i, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), None)
            same = one == other
            sound &= same
            verdict = "equal" if same else f"differs at token {differs if differs is not None else 'the end'}"
            print(f"  {mode:8} {len(one):4} tokens  {verdict:24} {prompt[:40]!r}")
    if counted:
        print(
            f"\nThe first {PLACES} tokens of {draws} sampled answers{_told(SAMPLED)} of each side, by distribution:\n"
        )
    for place, (one, other) in enumerate(zip(plain_draws, our_draws, strict=True)):
        found = homogeneity(one, other)
        sound &= found.p >= LEVEL / PLACES
        print(f"  place {place}: {len(one)} and {len(other)} draws, chi-square {found.statistic:.1f}"
              f" with {found.degrees} degrees of freedom, p = {found.p:.3f}")  # fmt: skip
    drafted, accepted = made
    print(f"\n  {drafted} guesses were verified, {accepted} were right")
    if not drafted:
        print("  so nothing is shown: this drafter guessed nothing")
    print("holds" if sound and drafted else "does not hold")
    return 0 if sound and drafted else FAILED


def _told(sampling: Mapping[str, Any]) -> str:
    return f" ({', '.join(f'{name} {value}' for name, value in sampling.items())})"


def _answers(
    model: str, settings: Mapping[str, Any], modes: Mapping[str, Mapping[str, Any]], tokens: int, draws: int, seed: int
) -> tuple[dict[str, list[list[int]]], list[list[int]], tuple[int, int]]:
    """Ids of each prompt's answer in each mode; tokens by place of `draws` short answers; guesses verified and
    right."""
    answers: dict[str, list[list[int]]] = {}
    usages: list[Usage] = []
    with LLM(model, **settings) as llm:
        for mode, how in modes.items():
            choices = [out.choices[0] for out in llm.generate(list(PROMPTS), max_tokens=tokens, seed=7, **how)]
            answers[mode] = [choice.ids for choice in choices]
            usages += [choice.usage for choice in choices]
        places: list[list[int]] = [[] for _ in range(PLACES if draws else 0)]
        for at in range(seed, seed + draws, 8):
            for choice in llm.generate(TESTED, max_tokens=PLACES, n=8, seed=at, **SAMPLED)[0].choices:
                usages.append(choice.usage)
                for place, token in enumerate(choice.ids):
                    places[place].append(token)
    return answers, places, (sum(one.drafted for one in usages), sum(one.accepted for one in usages))


def _pairs(options: list[str]) -> Iterator[tuple[str, int | str]]:
    for option in options:
        name, _, value = option.partition("=")
        yield name, int(value) if value.isdecimal() else value
