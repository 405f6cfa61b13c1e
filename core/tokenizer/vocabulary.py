"""A model's tokens: text to ids, ids to text, conversations to ids, and which ids end an answer.

Made from a folder's tokenizer.json and its neighbours by the `tokenizers` library alone: neither transformers nor
torch is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from octavo.core.messages import Chat, Ids, Prompt, Text, TextLogprob, TokenLogprob
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import ModelFiles
from octavo.core.tokenizer import ghost
from octavo.core.tokenizer.alphabet import BYTE_OF_CHAR
from octavo.core.tokenizer.convert import converted_tokenizer
from octavo.core.tokenizer.invalid import InvalidRequestError
from octavo.core.tokenizer.literal import Literal
from octavo.core.tokenizer.template import ChatTemplate, TemplateError


class Vocabulary:
    """Text ⇄ ids of one model. `tokenizer` is there for incremental decoding.

    Raises `ModelError` for a tokenizer with which conversations would not be safe (see `Literal`)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: Iterable[int],
        template: ChatTemplate | None,
        config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        """What tokenizer_config.json says, with the chat template wherever that was found."""
        self.eos_ids: tuple[int, ...] = tuple(sorted(set(eos_ids)))
        self.special_ids = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        names = tokenizer.get_vocab(with_added_tokens=True)
        self.size: int = max(names.values(), default=-1) + 1
        self._longest = max((len(name) for name in names), default=1)
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self._template = template
        self._literal = None if template is None else Literal(tokenizer)
        self._byte_level = "ByteLevel" in repr(tokenizer.decoder)
        self._strings_bytes_together = isinstance(tokenizer.decoder, ByteLevel)
        self._alone: dict[int, str | None] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with what the model's tokenizer itself puts around a text (often a BOS, often nothing)."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids that have no token become nothing."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def alone(self, token: int) -> str | None:
        """A token's text, if it is that wherever the token stands between whole characters; None if that is not sure.
        Known at once from the second time on."""
        try:
            return self._alone[token]
        except KeyError:
            text = self.decode([token]) if self._strings_bytes_together else ""
            self._alone[token] = known = text if text and "\N{REPLACEMENT CHARACTER}" not in text else None
            return known

    def prompt_ids(self, prompt: Prompt, limit: int, add_special_tokens: bool = True) -> list[int]:
        """Ids of any kind of prompt. Raises `InvalidRequestError`; at once, if a text is so long that it must have more
        than `limit` tokens: tokenising megabytes would keep everyone else waiting.

        A rendered template holds its own special tokens, so none are added to it: no doubled BOS. Those that a client
        wrote into a conversation are text."""
        match prompt:
            case Ids(ids):
                return ids
            case Text(text):
                return self.encode(self._bounded(text, limit, "prompt"), add_special_tokens)
            case Chat():
                if self._literal is not None and (marked := self._marked(self._literal, prompt)) is not None:
                    return self._literal.encode(self._bounded(self._rendered(self._literal, marked), limit, "messages"))
                text = self._bounded(self.render(prompt), limit, "messages")
                return self.encode(text, add_special_tokens=False)

    def _marked(self, literal: Literal, chat: Chat) -> Chat | None:
        try:
            return literal.marked(chat)
        except RecursionError:
            raise InvalidRequestError("messages", "the conversation is nested too deeply") from None

    def _rendered(self, literal: Literal, marked: Chat) -> str:
        """As `render`; what a template complains of is told in the client's words."""
        try:
            return self.render(marked)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.field, literal.unmarked(error.reason), error.code) from error

    def _bounded(self, text: str, limit: int, field: str) -> str:
        # A token is at most `longest` characters of text; normalizing may shrink text, by no more than to a third.
        least = len(text) // (self._longest if self.tokenizer.normalizer is None else 3 * self._longest)
        if least > limit:
            raise InvalidRequestError(
                field,
                f"the text has {len(text)} characters, that is more than {least} tokens; at most {limit} fit the model",
                "context_length_exceeded",
            )
        return text

    def render(self, chat: Chat) -> str:
        """A conversation as the model's prompt text. Raises `InvalidRequestError`."""
        if self._template is None:
            raise InvalidRequestError(
                "messages",
                "this model has no chat template, so it cannot take messages; use completions with a prompt, or put a "
                "chat_template.jinja beside its tokenizer.json",
                "no_chat_template",
            )
        if not chat.messages:
            raise InvalidRequestError("messages", "there are no messages; at least one is needed")
        try:
            return self._template.render(chat)
        except TemplateError as error:
            raise InvalidRequestError("messages", str(error)) from error

    def spellings(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Each word as the ids it has at the start of a text and after a space: not every way to spell it."""
        found = {tuple(self.encode(text, add_special_tokens=False)): None for w in words for text in (w, f" {w}")}
        return list(found)

    def spelled(self, found: TokenLogprob) -> TextLogprob:
        """Log-probabilities with the text of their tokens."""
        top = [(*self._spelled(token), value) for token, value in zip(found.top_ids, found.top_logprobs, strict=True)]
        return TextLogprob(*self._spelled(found.token), found.logprob, top, [found.token, *found.top_ids])

    def spelled_prompt(self, prompt: Sequence[int], entries: Sequence[TokenLogprob]) -> list[TextLogprob]:
        """An entry per token of the prompt; nothing is known of the first but its text."""
        return [TextLogprob(*self._spelled(prompt[0]), 0.0, [], [prompt[0]]), *map(self.spelled, entries)]

    def _spelled(self, token: int) -> tuple[str, bytes]:
        data = self.token_bytes(token)
        return data.decode("utf-8", "replace"), data

    def token_bytes(self, token: int) -> bytes:
        """Exactly the bytes that a token stands for in the middle of a text; empty if there is no such token."""
        name = self.tokenizer.id_to_token(token)
        if name is None:
            return b""
        if token in self._added:
            return name.encode()
        if self._byte_level:
            return bytes(BYTE_OF_CHAR[char] for char in name if char in BYTE_OF_CHAR)
        if len(name) == 6 and name.startswith("<0x"):
            return bytes.fromhex(name[3:5])
        return name.replace("▁", " ").encode()


def load_vocabulary(files: ModelFiles) -> Vocabulary:
    """The vocabulary of a located model. Raises `ModelError`."""
    if files.path is None:
        template = ChatTemplate({"default": ghost.CHAT_TEMPLATE}, {})
        return Vocabulary(ghost.byte_tokenizer(), [ghost.EOS_ID], template, ghost.CONFIG)
    return load_folder(converted_tokenizer(files.path) if files.kind == "gguf" else files.path)


def load_folder(folder: Path) -> Vocabulary:
    """The vocabulary in a folder as on the Hugging Face hub. Raises `ModelError`."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json. Where it has another kind of tokenizer, transformers can write one: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no narrower class
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens(config)
    sources = _template_sources(folder, config)
    try:
        template = ChatTemplate(sources, special) if sources else None
    except TemplateError as error:
        raise ModelError(f"{folder}: {error}") from error
    if "default" in sources:
        config = {**config, "chat_template": sources["default"]}
    return Vocabulary(tokenizer, _eos_ids(folder, tokenizer, special), template, config)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, as templates use them: plain text, or the object that older files have."""
    found = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, from the places where the hub has kept them: the newer place wins."""
    sources: dict[str, str] = {}
    for stored in (config.get("chat_template"), _read_json(folder / "chat_template.json").get("chat_template")):
        if isinstance(stored, str):
            sources["default"] = stored
        elif isinstance(stored, list):
            sources |= {entry["name"]: entry["template"] for entry in stored}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = path.read_text(encoding="utf-8")
    if (path := folder / "chat_template.jinja").is_file():
        sources["default"] = path.read_text(encoding="utf-8")
    return sources


def _eos_ids(folder: Path, tokenizer: Tokenizer, special: Mapping[str, str]) -> set[int]:
    """Ends of an answer: what generation_config.json lists (else config.json), and the tokenizer's own."""
    listed = _read_json(folder / "generation_config.json").get("eos_token_id")
    if listed is None:
        listed = _read_json(folder / "config.json").get("eos_token_id")
    ids = set(listed if isinstance(listed, list) else [] if listed is None else [listed])
    if (own := tokenizer.token_to_id(special.get("eos_token", ""))) is not None:
        ids.add(own)
    return ids
