"""The tokenizer of the `ghost` model, which has no files: a token per byte, and three special tokens.

With it the whole service runs, text in and text out, on the ghost executor alone.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.core.tokenizer.alphabet import BYTE_OF_CHAR

SPECIAL_TOKENS = ("<|start|>", "<|end|>", "<|sep|>")
"""Ids 256 to 258, after those of the bytes."""

EOS_ID = 257
"""`<|end|>`; the ghost executor knows it by this number."""

SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}<|sep|>{{ message.content }}<|end|>{% endfor %}"
    "<|start|>assistant<|sep|>"
)


CONFIG = {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
"""As in a tokenizer_config.json."""


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: the id of a byte's token is the byte."""
    vocabulary = dict(BYTE_OF_CHAR)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer
