"""Control tokens that stand in what a client wrote are text: only a chat template may put real ones into a prompt.

Otherwise a message with `<|im_end|>` in it could end its own turn and speak as somebody else. Before the template is
rendered, their names in the conversation are marked; afterwards the names that are not marked are the template's. These
get other names, which nobody can know from outside, and a copy of the tokenizer in which control tokens have only those
names does the rest. Where a conversation has no such name, nothing of this happens. A plain prompt may hold control
tokens: whoever writes one writes the whole template.

Control tokens are the special ones, and others that are spelled as such (`<|…|>`, also with full-width bars): some
models do not call their turn marks special. What else a tokenizer has added are words to be used, like `<think>`, which
templates look for in messages, and runs of spaces.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

import msgspec
from tokenizers import Tokenizer

from octavo.core.messages import Chat
from octavo.core.models.errors import ModelError

_SPELLED_AS_CONTROL = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
_DIGITS = 24


class Literal:
    """For one tokenizer. Raises `ModelError` if there can be no such copy of it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        control = (token.content for token in added if _is_control(token.content, token.special))
        self._names = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or r"(?!)")
        # The template has the mark and may show it, in whatever way it escapes text: digits stay as they are. Nothing
        # follows from it to the secret, which no template ever sees.
        self._mark = str(secrets.randbelow(10**_DIGITS)).zfill(_DIGITS)
        self._secret = f"\ue004{secrets.token_hex(16)}\ue005"
        try:
            self._copy = self._renamed(tokenizer)
        except Exception as error:  # the library has no narrower class
            raise ModelError(
                f"the model's tokenizer has no form in which control tokens can be told from their names: {error}"
            ) from error

    def marked(self, chat: Chat) -> Chat | None:
        """The conversation with such names marked; None if there are none in it. Raises RecursionError."""
        given: tuple[Any, ...] = (chat.messages, chat.tools, chat.variables)
        marked = tuple(self._walk(value) for value in given)
        if marked == given:
            return None
        messages, tools, variables = marked
        return msgspec.structs.replace(chat, messages=messages, tools=tools, variables=variables)

    def encode(self, rendered: str) -> list[int]:
        """Ids of what the template made of a marked conversation."""
        text = self._names.sub(lambda found: self._secret + found[0], rendered)
        return self._copy.encode(self.unmarked(text), add_special_tokens=False).ids

    def unmarked(self, text: str) -> str:
        """What the template has made of marked text, without the marks."""
        return text.replace(self._mark, "")

    def _walk(self, value: Any) -> Any:
        match value:
            case str():
                return self._names.sub(lambda found: found[0][0] + self._mark + found[0][1:], value)
            case dict():
                return {self._walk(key): self._walk(item) for key, item in value.items()}
            case list():
                return [self._walk(item) for item in value]
            case _:
                return value

    def _renamed(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer with its control tokens under their secret names, which no merge leads to."""
        described = json.loads(tokenizer.to_str())
        control = [token for token in described["added_tokens"] if _is_control(token["content"], token["special"])]
        names = {token["content"]: self._secret + token["content"] for token in control}
        for token in control:
            token["content"] = names[token["content"]]
        model = described["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(name, name): token for name, token in vocabulary.items()}
        else:
            model["vocab"] = [[names.get(name, name), score] for name, score in vocabulary]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            inside = len(model.get("continuing_subword_prefix") or "")
            model["merges"] = [
                [left, right]
                for left, right in (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
                if names.keys().isdisjoint((left, right, left + right[inside:]))
            ]
        described["post_processor"] = None
        return Tokenizer.from_str(json.dumps(described))


def _is_control(name: str, special: bool) -> bool:
    return special or _SPELLED_AS_CONTROL.fullmatch(name) is not None
