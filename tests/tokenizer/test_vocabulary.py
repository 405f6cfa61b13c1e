"""Prompts become ids as the model's makers meant it: template, special tokens, ends of an answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from octavo.core.messages import Chat, Ids, Text
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import locate
from octavo.core.tokenizer.convert import converted_tokenizer
from octavo.core.tokenizer.ghost import byte_tokenizer
from octavo.core.tokenizer.invalid import InvalidRequestError
from octavo.core.tokenizer.template import ChatTemplate
from octavo.core.tokenizer.vocabulary import Vocabulary, load_folder

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 2+2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "héllo 👍🏽"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}, {"role": "user", "content": " c"}],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_conversation_is_rendered_as_transformers_does(smollm: Vocabulary, messages: list[dict[str, Any]]) -> None:
    transformers = pytest.importorskip("transformers")
    model = locate("default").path
    assert model is not None
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(converted_tokenizer(model))
    rendered = reference.apply_chat_template(messages, add_generation_prompt=True)
    assert smollm.prompt_ids(Chat(messages), 8192) == list(rendered["input_ids"])


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = """
import sys
from octavo.core.messages import Chat
from octavo.core.models.locate import locate
from octavo.core.tokenizer.core import TokenizerCore
from octavo.core.tokenizer.vocabulary import load_vocabulary
assert load_vocabulary(locate("default")).render(Chat([{"role": "user", "content": "hi"}]))
print(sorted({"torch", "transformers", "zmq", "anyio", "structlog"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_bytes_of_tokens_are_the_bytes_of_their_text(vocabulary: Vocabulary, texts: st.SearchStrategy[str]) -> None:
    @settings(max_examples=100, deadline=None)
    @given(texts)
    def agree(text: str) -> None:
        assert b"".join(map(vocabulary.token_bytes, vocabulary.encode(text))) == text.encode()

    agree()
    assert vocabulary.token_bytes(vocabulary.size) == b""


def _folder(path: Path, files: dict[str, Any], *, bos: bool = False) -> Path:
    tokenizer = byte_tokenizer()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|start|> $A", pair="<|start|> $A $B", special_tokens=[("<|start|>", 256)]
        )
    tokenizer.enable_truncation(4)
    tokenizer.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_template_with_a_start_token_gives_one_of_it(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<|start|>"}, "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    vocabulary = load_folder(_folder(tmp_path, {"tokenizer_config.json": config}, bos=True))
    assert vocabulary.prompt_ids(Chat([{"role": "user", "content": "abcdefgh"}]), 100) == [256, *b"abcdefgh"]
    assert vocabulary.prompt_ids(Text("ab"), 100) == [256, *b"ab"]
    assert vocabulary.prompt_ids(Text("ab"), 100, add_special_tokens=False) == [*b"ab"]
    assert vocabulary.prompt_ids(Ids([0, 0]), 100) == [0, 0]


def test_without_a_template_chat_is_refused_and_text_is_not(tmp_path: Path) -> None:
    vocabulary = load_folder(_folder(tmp_path, {}))
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        vocabulary.prompt_ids(Chat([{"role": "user", "content": "a"}]), 100)
    assert (caught.value.field, caught.value.code) == ("messages", "no_chat_template")
    assert vocabulary.prompt_ids(Text("a"), 100) == [97]


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", [{"role": "user"}], "roles must alternate"),
        ("{{ 'a' + messages[0].content }}", [{"role": "user", "content": None}], "cannot render"),
        ("{{ messages[7].content.x }}", [{"role": "user"}], "cannot render"),
        ("{{ 1 // messages[0].n }}", [{"role": "user", "n": 0}], "cannot render"),
        ("{{ ''.__class__.__mro__ }}", [{"role": "user"}], "cannot render"),
        ("a", [], "no messages"),
    ],
)
def test_what_a_template_refuses_is_the_fault_of_messages(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], says: str
) -> None:
    vocabulary = load_folder(_folder(tmp_path, {"chat_template.jinja": template}))
    with pytest.raises(InvalidRequestError, match=says) as caught:
        vocabulary.render(Chat(messages))
    assert caught.value.field == "messages"


def test_what_templates_are_written_against_is_there(tmp_path: Path) -> None:
    template = """
    {%- for message in messages %}
        {%- if loop.index > 1 %}{% break %}{% endif %}
        {%- generation %}{{ message | tojson }}{% endgeneration %}
    {%- endfor %}
    {{- tools | tojson }}{{ strftime_now('%%') }}"""
    vocabulary = load_folder(_folder(tmp_path, {"chat_template.jinja": template}))
    rendered = vocabulary.render(Chat([{"role": "ü <b>"}, {"role": "x"}], [{"name": "f"}]))
    assert rendered == '{"role": "ü <b>"}[{"name": "f"}]%'


def test_tools_choose_the_template_made_for_them(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    vocabulary = load_folder(_folder(tmp_path, {"tokenizer_config.json": {"chat_template": named}}))
    assert vocabulary.render(Chat([{"role": "user"}])) == "plain"
    assert vocabulary.render(Chat([{"role": "user"}], [{"name": "f"}])) == "with tools"


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation_config.json": {"eos_token_id": [257, 5]}}, (5, 257)),
        ({"config.json": {"eos_token_id": 7}}, (7,)),
        ({"tokenizer_config.json": {"eos_token": "<|end|>"}, "generation_config.json": {"eos_token_id": 9}}, (9, 257)),
        ({}, ()),
    ],
)
def test_ends_of_an_answer_are_all_that_the_folder_names(
    tmp_path: Path, files: dict[str, Any], ids: tuple[int, ...]
) -> None:
    assert load_folder(_folder(tmp_path, files)).eos_ids == ids


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"tokenizer.json": "{"}, "cannot be read as a tokenizer"),
        ({"tokenizer_config.json": "{"}, "not valid JSON"),
        ({"generation_config.json": "[]"}, "JSON object"),
        ({"chat_template.jinja": "{% if %}"}, "not valid Jinja"),
    ],
)
def test_a_damaged_folder_is_refused_by_file(tmp_path: Path, files: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        load_folder(_folder(tmp_path, files))


def test_a_folder_without_a_tokenizer_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="save_pretrained"):
        load_folder(tmp_path)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(smollm: Vocabulary) -> None:
    with pytest.raises(InvalidRequestError, match="more than") as caught:
        smollm.prompt_ids(Text("word " * 1_000_000), 8192)
    assert (caught.value.field, caught.value.code) == ("prompt", "context_length_exceeded")


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "rain"},
]


def test_a_template_without_tools_tells_of_them_in_words(ghost: Vocabulary) -> None:
    text = ghost.render(Chat(HISTORY, [{"type": "function", "function": {"name": "f"}}]))
    assert text.startswith("<|start|>system<|sep|>")
    assert '{"type": "function", "function": {"name": "f"}}' in text
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
    with_system = ghost.render(Chat([{"role": "system", "content": "Be kind."}, *HISTORY], [{"name": "f"}]))
    assert with_system.count("<|start|>system") == 1
    assert "Be kind." in with_system


def test_a_last_message_is_left_open(ghost: Vocabulary, smollm: Vocabulary) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Well, "}]
    assert ghost.render(Chat(turns, continues=True)).endswith("<|sep|>Well, ")
    assert smollm.render(Chat(turns, continues=True)).endswith("<|im_start|>assistant\nWell, ")
    closed = smollm.render(Chat(turns, add_generation_prompt=False))
    assert closed.endswith("Well, <|im_end|>\n")
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        Vocabulary(byte_tokenizer(), [], ChatTemplate({"default": "nothing"}, {})).render(Chat(turns, continues=True))
