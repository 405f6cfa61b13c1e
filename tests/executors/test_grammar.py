"""Answers keep to their grammars: checked by sampling from them, at random, with a model that means nothing."""

from __future__ import annotations

import json
import re
import time

import msgspec
import pytest
import torch

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig
from octavo.core.grammar import CallKind, Calls, Engine, GrammarError, Grammars
from octavo.core.messages import Grammar, Sampling
from octavo.core.models.locate import locate
from octavo.core.tokenizer.vocabulary import Vocabulary, load_vocabulary
from octavo.executors.cpu.executor import CpuExecutor
from octavo.executors.grammars import Matchers
from octavo.executors.residents import Resident
from octavo.executors.sampling import Context, sample
from tests import grammars

SIZE = 49152


@pytest.fixture(scope="module", params=grammars.NAMES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return grammars.engine(request.param)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(locate("default"))


@pytest.fixture(scope="module")
def loaded(engine: Engine) -> Grammars:
    return engine.load("default", SIZE)


def written(loaded: Grammars, vocabulary: Vocabulary, grammar: Grammar, seed: int, restart: bool = False) -> str:
    """An answer of random logits, that like short tokens and the end; `restart` makes the matcher anew each time."""
    matchers = Matchers(loaded)
    noise = torch.Generator().manual_seed(seed)
    sampling = Sampling(seed=seed, grammar=grammar, bias=dict.fromkeys(vocabulary.encode('0"}],e'), 4.0) | {2: 9.0})
    resident = Resident(1, [5, 6], 2, 0, sampling)
    for _ in range(400):
        mask = (Matchers(loaded) if restart else matchers).mask(resident)
        assert mask is not None
        row = torch.randn(SIZE, generator=noise).numpy()
        token = sample(row, Context(sampling, 0, 2, resident.tokens, mask))
        assert mask[token], "a forbidden token was chosen"
        if token in vocabulary.eos_ids:
            return vocabulary.decode(resident.tokens[2:])
        resident.tokens.append(token)
    pytest.fail("the answer does not end")


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 7}, "s": {"enum": ['a"b', "👍"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(3))
def test_h30_answers_of_a_schema_are_its_json(loaded: Grammars, vocabulary: Vocabulary, seed: int) -> None:
    value = json.loads(written(loaded, vocabulary, Grammar("schema", json.dumps(SCHEMA)), seed))
    assert value.keys() == {"n", "s"}
    assert 3 <= value["n"] <= 7
    assert value["s"] in SCHEMA["properties"]["s"]["enum"]  # type: ignore[index]
    bare = json.loads(written(loaded, vocabulary, Grammar("schema", '{"enum": ["a\\"b", "👍"]}'), seed))
    assert bare in ('a"b', "👍")


def test_h31_h33_regular_expressions_of_any_order_and_alphabet(loaded: Grammars, vocabulary: Vocabulary) -> None:
    for pattern in (r"[\u4e00-\u4e2f]{2}", r"(.{0,5})", r"(|.{0,5})", r"[0-9]{4}-[0-9]{2}"):
        text = written(loaded, vocabulary, Grammar("regex", pattern), seed=1)
        assert re.fullmatch(pattern, text), (pattern, text)


def test_choices_and_lark_grammars(loaded: Grammars, vocabulary: Vocabulary) -> None:
    choices = ["yes", 'no "really" é', "yes and no"]
    assert written(loaded, vocabulary, Grammar("choice", json.dumps(choices)), seed=2) in choices
    assert re.fullmatch("ab{0,3}", written(loaded, vocabulary, Grammar("lark", 'start: "a" "b"~0..3'), seed=2))


def test_calls_in_free_text(loaded: Grammars, vocabulary: Vocabulary) -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 5}}, "required": ["s"]}
    calls = Calls(
        "<call>", [CallKind("f", '{"arguments": ', {**schema, "additionalProperties": False}, "}")], "</call>"
    )
    grammar = Grammar("calls", msgspec.json.encode(calls).decode())
    walk = loaded.start(grammar)
    for token in vocabulary.encode('as a < b <call>\n{"arguments": {"s": "x'):
        assert walk.mask()[token]
        walk.take([token])
    (tab,) = vocabulary.encode("\t")
    assert not walk.mask()[tab], "a control character in a string"


def test_a_matcher_made_anew_goes_on_where_the_old_one_was(loaded: Grammars, vocabulary: Vocabulary) -> None:
    """As after a preemption: nothing but the tokens is carried over."""
    grammar = Grammar("schema", json.dumps(SCHEMA))
    assert written(loaded, vocabulary, grammar, 5, restart=True) == written(loaded, vocabulary, grammar, 5)


def test_white_space_is_bounded(loaded: Grammars, vocabulary: Vocabulary) -> None:
    walk = loaded.start(Grammar("schema", json.dumps(SCHEMA)))
    (brace,), (line,) = vocabulary.encode("{"), vocabulary.encode("\n")
    walk.take([brace])
    for _ in range(21):
        if not walk.mask()[line]:
            return
        walk.take([line])
    pytest.fail("white space for ever")


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "foo**", "multiple repeat"),
        ("regex", "(", "close"),
        ("regex", "(?<=a)b", "regex"),
        ("regex", "a{0,99999}", "repeats more than"),
        ("regex", "(a{1000}){1000}", "repeats more than"),
        ("schema", '{"type": "objekt"}', "/type"),
        ("schema", '{"abc": 1}', "abc"),
        ("schema", "[]", "object"),
        ("schema", '"x"', "object"),
        ("schema", "{", "JSON"),
        (
            "schema",
            '{"properties": {"a/b": {"unevaluatedProperties": false}}}',
            "/properties/a~1b/unevaluatedProperties",
        ),
        ("schema", '{"properties": {"a": {"pattern": "x**"}}}', "/properties/a/pattern"),
        ("schema", '{"maxLength": 1e999}', "1e999"),
        ("schema", '{"maximum": NaN}', "NaN"),
        ("schema", '{"$ref": "#"}', "/"),
        ("lark", "start: nobody", "nobody"),
    ],
)
def test_h28_h29_bad_grammars_are_refused_at_once_and_say_where(
    engine: Engine, kind: str, text: str, says: str
) -> None:
    before = time.thread_time()
    with pytest.raises(GrammarError, match=re.escape(says)):
        engine.check(Grammar(kind, text))  # type: ignore[arg-type]
    assert time.thread_time() - before < 1.0


def test_what_a_grammar_cannot_go_on_with_fails_that_sequence(loaded: Grammars) -> None:
    matchers = Matchers(loaded)
    resident = Resident(1, [5, 100, 100], 1, 0, Sampling(grammar=Grammar("choice", '["yes"]')))
    with pytest.raises(GrammarError):
        matchers.mask(resident)


@pytest.mark.parametrize("name", grammars.NAMES)
def test_h10_h32_each_of_many_in_one_executor_keeps_to_its_own(name: str) -> None:
    """Through the executor: eight with grammars of their own, in the same steps; a neighbour without one is as ever."""
    from tests.executors.driver import DECODE, Driver

    config = Config(
        model=ModelConfig(path="default"),
        kv=KvConfig(block_size=16, tokens=2048),
        executor=ExecutorConfig(threads=2, grammar=name),
    )
    executor = CpuExecutor.load(config)
    assert "grammar" in executor.facts.serves
    vocabulary = load_vocabulary(locate("default"))
    driver = Driver(executor)
    prompt = vocabulary.encode("The colour is")
    asked = [
        Sampling(temperature=1.0, seed=i, logprobs=20, grammar=Grammar("choice", f'["number {i}"]')) for i in range(8)
    ]
    sequences = [driver.open(prompt, sampling=sampling) for sampling in asked]
    plain = driver.open(prompt)
    driver.step(*((s, len(prompt)) for s in [*sequences, plain]))
    ended: dict[int, str] = {}
    for _ in range(12):
        for i, s in enumerate(sequences):
            if i not in ended and s.output[-1] in vocabulary.eos_ids:
                ended[i] = vocabulary.decode(s.output[:-1])
        driver.step(*((s, DECODE) for i, s in enumerate(sequences) if i not in ended), (plain, DECODE))
    assert ended == {i: f"number {i}" for i in range(8)}
    entries = [entry for s in sequences for entry in s.logprobs if entry is not None]
    assert len(entries) >= 8 * 3
    assert all(-9999.0 <= value <= 0.0 for entry in entries for value in (entry.logprob, *entry.top_logprobs))
    alone = Driver(executor)
    expected = alone.open(prompt)
    assert alone.finish(expected, 5) == plain.output[:5]
