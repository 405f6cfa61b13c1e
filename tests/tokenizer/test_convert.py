"""The tokenizer made from a GGUF file is the model's own: its ids are those that llama.cpp gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.models.errors import ModelError
from octavo.core.models.gguf import GgufFile
from octavo.core.models.locate import locate
from octavo.core.tokenizer.alphabet import CHAR_OF_BYTE
from octavo.core.tokenizer.convert import converted_tokenizer, tokenizer_from_gguf
from octavo.core.tokenizer.vocabulary import Vocabulary


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Steps:\n\n1.", [21831, 42, 1116, 33, 30]),
        ("a  12345 b", [81, 256, 33, 34, 35, 36, 37, 278]),
        ("x = 100\n\n  2) y", [104, 446, 216, 33, 32, 32, 39892, 34, 25, 329]),
    ],
)
def test_ids_are_those_of_llama_cpp(smollm: Vocabulary, text: str, ids: list[int]) -> None:
    assert smollm.encode(text) == ids


def test_special_tokens_are_matched_whole(smollm: Vocabulary) -> None:
    assert smollm.encode("<|im_start|>a<|im_end|>") == [1, *smollm.encode("a"), 2]
    assert smollm.special_ids == frozenset(range(17))
    assert smollm.eos_ids == (0, 2)


def test_any_text_comes_back(vocabulary: Vocabulary, texts: st.SearchStrategy[str]) -> None:
    @settings(max_examples=200, deadline=None)
    @given(texts)
    def comes_back(text: str) -> None:
        assert vocabulary.decode(vocabulary.encode(text)) == text

    comes_back()
    for text in ["👍🏽 👩‍👩‍👧‍👦 ok", "你好,世界\n\n\t  12", "naïve café", "a\r\n\r\nb", "  x  "]:
        assert vocabulary.decode(vocabulary.encode(text)) == text


def test_it_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = locate("default").path
    assert model is not None
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    folder = converted_tokenizer(model)
    (folder / "mark").touch()
    assert converted_tokenizer(model) == folder
    assert (folder / "mark").exists()
    assert {path.name for path in tmp_path.rglob("*.json")} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = locate("default").path
    assert model is not None
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="OCTAVO_CACHE"):
        converted_tokenizer(model)


def _metadata(**changes: Any) -> dict[str, Any]:
    """A vocabulary of single bytes, one merge, a start and an end token."""
    tokens = [CHAR_OF_BYTE[byte] for byte in range(256)]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*tokens, "ab", "<s>", "</s>"],
        "merges": ["a b"],
        "token_type": [1] * 257 + [3, 3],
        "bos_token_id": 257,
        "eos_token_id": 258,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize("rule", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_every_known_rule_loses_nothing(rule: str) -> None:
    tokenizer = tokenizer_from_gguf(_metadata(pre=rule), "a test")
    text = "It's 12345 ab\n\n  é 你 {x}\r\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    assert tokenizer.encode("</s>", add_special_tokens=False).ids == [258]


@pytest.mark.parametrize(
    ("rule", "said", "adds"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", None, False), ("gpt-2", True, True)],
)
def test_a_start_token_is_added_where_the_file_or_the_family_says_so(rule: str, said: bool | None, adds: bool) -> None:
    tokenizer = tokenizer_from_gguf(_metadata(pre=rule, add_bos_token=said), "a test")
    assert tokenizer.encode("ab").ids == ([257, 256] if adds else [256])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pre": "some-new-rule"}, "some-new-rule.*not known"),
        ({"pre": None}, "None.*not known"),
        ({"model": "llama"}, "'llama'"),
        ({"tokens": None}, "holds no tokenizer"),
        ({"merges": ["a zz"]}, "do not fit together"),
        ({"bos_token_id": 900, "add_bos_token": True}, "token 900"),
    ],
)
def test_what_cannot_be_converted_rightly_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        tokenizer_from_gguf(_metadata(**changes), "a test")


def test_reading_the_file_gives_the_same_as_the_cached_folder(smollm: Vocabulary) -> None:
    model = locate("default").path
    assert model is not None
    fresh = tokenizer_from_gguf(GgufFile(model).metadata, "the default model")
    text = "def f(x):\n    return x ** 2  # 10\n\n\n你好 <|im_end|>"
    assert fresh.encode(text).ids == smollm.encode(text)
