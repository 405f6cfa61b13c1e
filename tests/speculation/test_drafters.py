"""What each drafter is good at, and what it must not do: a tenant's text is its own, memory is bounded."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.config.schema import Config, SpeculationConfig
from octavo.core.messages import Facts, Sampling
from octavo.core.models.errors import ModelError
from octavo.core.plugins import PluginError
from octavo.executors.drafting.automaton import Automaton
from octavo.executors.drafting.contract import Host, Want
from octavo.executors.drafting.drafting import Drafting
from octavo.executors.drafting.medusa import load_heads
from octavo.executors.drafting.ngram import Ngram
from octavo.executors.drafting.paged import Written
from octavo.executors.drafting.suffix import Suffix
from octavo.executors.residents import Resident

FACTS = Facts(
    model_id="m", context=64, vocab_size=97, block_size=4, total_blocks=16, block_bytes=1, cache_seed=b"",
)  # fmt: skip


def resident(tokens: list[int], prompt_len: int = 1, namespace: bytes = b"") -> Resident:
    return Resident(1, tokens, prompt_len, 0, Sampling(), namespace=namespace)


def host(drafter: str = "ngram", **options: object) -> Host:
    return Host(Config(speculation=SpeculationConfig(drafter=drafter, options=options)), FACTS)


def guesses(drafter: Ngram | Suffix, of: Resident, most: int = 4) -> list[int]:
    return list(drafter.draft([Want(of, most)])[0].tokens)


@pytest.mark.parametrize("drafter", [Ngram(host(), Ngram.Options()), Suffix(host(), Suffix.Options())])
def test_what_was_said_before_is_guessed_again(drafter: Ngram | Suffix) -> None:
    one = resident([1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4])
    assert guesses(drafter, one) == [5, 6, 9, 1]
    assert guesses(drafter, one, 2) == [5, 6]
    one.tokens += [5, 6]
    assert guesses(drafter, one, 3) == [9, 1, 2]
    assert guesses(drafter, resident([1, 2, 3, 4, 5])) == []
    assert guesses(drafter, resident([7, 8, 9] * 3), 7) == [7, 8, 9, 7, 8, 9, 7]  # it goes on for ever


@pytest.mark.parametrize("drafter", [Ngram(host(), Ngram.Options()), Suffix(host(), Suffix.Options())])
def test_after_little_in_common_little_is_guessed(drafter: Ngram | Suffix) -> None:
    said, rest = [1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 50]
    for common, made in ((1, 1), (2, 3), (3, 3), (4, 6)):
        end = said[4 - common : 4]
        assert guesses(drafter, resident([*said, 50, *end]), 6) == rest[:made]
    assert guesses(drafter, resident([*said, 50, 2, 3]), 2) == [4, 5]
    assert guesses(drafter, resident([*said, 50, 60]), 6) == []


def test_the_latest_of_the_longest_ngram_counts() -> None:
    drafter = Ngram(host(), Ngram.Options(longest=3))
    assert guesses(drafter, resident([1, 2, 3, 50, 2, 3, 60, 9, 2, 3, 70, 1, 2, 3]), 1) == [50]
    assert guesses(drafter, resident([2, 3, 50, 2, 3, 60, 9, 2, 3]), 1) == [60]


def test_past_answers_help_only_their_own_tenant() -> None:
    drafter = Suffix(host(), Suffix.Options())
    said = [11, 12, 13, 14, 15, 16]
    drafter.left(resident([1, *said], namespace=b"ada"))
    assert guesses(drafter, resident([3, 11, 12, 13], namespace=b"ada"), 9) == [14, 15, 16]
    assert guesses(drafter, resident([3, 11, 12, 13], namespace=b"bob")) == []
    wary = Suffix(host(), Suffix.Options(shortest=3))
    wary.left(resident([1, *said]))
    assert guesses(wary, resident([3, 11, 12])) == []  # too little in common
    following = resident([3, 11], namespace=b"ada")
    for token in (12, 13):
        following.tokens.append(token)
    assert guesses(drafter, following, 1) == [14]


def test_the_memory_of_past_answers_is_bounded_and_the_newest_stay() -> None:
    drafter = Suffix(host(), Suffix.Options(memory=400, shortest=3))
    draw = random.Random(1)
    answers = [[draw.randrange(97) for _ in range(30)] for _ in range(60)]
    for i, answer in enumerate(answers):
        drafter.left(resident([1, *answer], namespace=b"ada" if i % 3 else b"bob"))
        assert drafter.remembered <= 400
    newest = answers[-1]
    assert guesses(drafter, resident([5, *newest[:6]], namespace=b"ada")) == newest[6:10]
    assert guesses(drafter, resident([5, *answers[1][:6]], namespace=b"ada")) == []
    drafter.left(resident([1, *range(96)] * 5))  # longer than the memory: it would only drive out the others
    assert guesses(drafter, resident([5, *newest[:6]], namespace=b"ada")) == newest[6:10]


texts = st.lists(st.integers(0, 2), max_size=40)


def longest(text: list[int], tail: list[int], inside: int) -> int:
    """Of the suffixes of `tail`, the longest that ends within the first `inside` tokens of `text`."""
    found = [
        n for n in range(len(tail) + 1) if any(text[e - n : e] == tail[len(tail) - n :] for e in range(n, inside + 1))
    ]
    return max(found, default=0)


@settings(max_examples=200)
@given(texts, texts)
def test_the_automaton_finds_the_longest_repeated_suffix(text: list[int], other: list[int]) -> None:
    automaton = Automaton(text)
    end, length = automaton.repeated()
    assert length == longest(text, text, len(text) - 1)
    assert text[end - length : end] == text[len(text) - length :]
    state, length = 0, 0
    for i, token in enumerate(other):
        state, length = automaton.step(state, length, token)
        assert length == longest(text, other[: i + 1], len(text))
        assert text[automaton.end(state) - length : automaton.end(state)] == other[i + 1 - length : i + 1]


def test_kv_counts_for_the_tokens_and_the_prefix_that_it_was_computed_for() -> None:
    written = Written(16, 4)
    one = resident([1, 2, 3, 4, 5, 6])
    one.table = array("i", [7, 3, 9])
    assert written.upto(one) == 0
    written.wrote(one, 0, [1, 2, 3, 4, 5, 6, 77, 78, 79])  # with guesses
    assert written.upto(one) == 6
    one.tokens += [77, 50]  # of the guesses, one was right
    assert written.upto(one) == 7
    written.wrote(one, 7, [50])
    one.tokens += [79]
    assert written.upto(one) == 8  # the 79 that is there stood after 78
    two = resident([1, 2, 3, 4, 5, 8])
    two.table = array("i", [7, 3])
    assert written.upto(two) == 5  # a shared prefix
    other = resident([9, 9, 9, 9, 5, 6])
    other.table = array("i", [1, 3])
    written.wrote(other, 0, [9, 9, 9, 9])
    assert written.upto(other) == 4  # the block is of the same tokens after another prefix
    written.copy([3], [5])
    two.table = array("i", [7, 5])
    assert written.upto(two) == 5
    written.clear()
    assert written.upto(one) == 0


def test_heads_are_read_in_the_published_layout(heads_folder: Path, tmp_path: Path) -> None:
    heads = load_heads(heads_folder, 97)
    assert [len(head.blocks) for head in heads] == [1, 2, 1]
    prefixed: dict[str, torch.Tensor] = {}
    for i, head in enumerate(heads):
        for j, (weight, bias) in enumerate(head.blocks):
            prefixed |= {f"medusa_head.{i}.{j}.linear.weight": weight, f"medusa_head.{i}.{j}.linear.bias": bias}
        prefixed[f"medusa_head.{i}.{len(head.blocks)}.weight"] = head.out
    torch.save(prefixed, tmp_path / "medusa_lm_head.pt")
    again = load_heads(tmp_path, 97)
    x = torch.randn(2, 48)
    assert all(torch.equal(a(x), b(x)) for a, b in zip(heads, again, strict=True))
    with pytest.raises(ModelError, match="97 tokens, the model has 96"):
        load_heads(tmp_path, 96)
    with pytest.raises(ModelError, match="none of"):
        load_heads(tmp_path / "nowhere", 97)


@pytest.mark.parametrize(
    ("drafter", "options", "error", "says"),
    [
        ("ngram", {"longest": 99}, PluginError, "longest"),
        ("ngram", {"shortest": 5}, PluginError, "above longest"),
        ("suffix", {"depth": 3}, PluginError, "depth"),
        ("draft-model", {}, ModelError, "options.model"),
        ("draft-model", {"model": "x"}, ModelError, "cannot run a second model"),
        ("self", {}, ModelError, "cannot run part"),
        ("medusa", {}, ModelError, "options.heads"),
        ("eagle", {}, ModelError, "options.head"),
        ("eagle", {"head": "x"}, ModelError, "lends no embedding"),
        ("medusa", {"heads": "x", "width": 2}, ModelError, "no trees"),
        ("oracle", {}, PluginError, "ngram"),
    ],
)
def test_what_cannot_draft_says_why(
    drafter: str, options: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Drafting.of(host(drafter, **options))
