"""Control tokens that stand in what a client wrote are text: only a chat template may put real ones into a prompt.

Otherwise a message with `<|im_end|>` in it could end its own turn and speak as somebody else. Before the template is
rendered, their names in the conversation are marked; afterwards the names that are not marked are the template's. These
get other names, which nobody can know from outside, and a copy of the tokenizer in which control tokens have only those
names does the rest. Where a conversation has no such name, nothing of this happens. A plain prompt may hold control
tokens: whoever writes one writes the whole template.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

import msgspec
from tokenizers import Tokenizer

from octavo.core.messages import Chat


class Literal:
    """For one tokenizer; its copy is made when it is first needed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        names = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._tokenizer = tokenizer
        self._copy: Tokenizer | None = None
        nonce = secrets.token_hex(8)
        self._mark = f"\ue002{nonce}\ue003"
        self._secret = f"\ue004{nonce}\ue005"

    def marked(self, chat: Chat) -> Chat | None:
        """The conversation with such names marked; None if there are none in it."""
        given: tuple[Any, ...] = (chat.messages, chat.tools, chat.variables)
        marked = tuple(self._walk(value) for value in given)
        if marked == given:
            return None
        messages, tools, variables = marked
        return msgspec.structs.replace(chat, messages=messages, tools=tools, variables=variables)

    def encode(self, rendered: str) -> list[int]:
        """Ids of what the template made of a marked conversation."""
        if self._copy is None:
            self._copy = self._renamed()
        text = self._names.sub(lambda found: self._secret + found[0], rendered)
        return self._copy.encode(text.replace(self._mark, ""), add_special_tokens=False).ids

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

    def _renamed(self) -> Tokenizer:
        """The tokenizer with its control tokens under their secret names."""
        described = json.loads(self._tokenizer.to_str())
        control = [token for token in described["added_tokens"] if token["special"]]
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
        described["post_processor"] = None
        return Tokenizer.from_str(json.dumps(described))
