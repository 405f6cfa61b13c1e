"""The tokenizer inside a GGUF file, written out once as a folder that `vocabulary` loads.

GGUF holds a vocabulary and merges, and names the rule that splits text before merging (`tokenizer.ggml.pre`)
without spelling it out; a wrong rule gives ids that look right and are not. So only rules known here are
accepted, the rest is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from octavo.core.models.cache import cache_folder
from octavo.core.models.errors import ModelError
from octavo.core.models.gguf import GgufFile

_VERSION = 1
"""Part of the cache key: raise it when the same file would be converted differently."""

_CONTROL, _USER_DEFINED = 3, 4
"""The format's numbers for token types that text must match whole."""

_END_NAMES = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>"}
)
"""Control tokens that end an answer under these names: GGUF stores one end token, models have several."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(pattern: str) -> PreTokenizer:
    by_pattern = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([by_pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


class _Rule(NamedTuple):
    """How one `tokenizer.ggml.pre` splits text, and what else goes with that family of tokenizers."""

    splitter: Callable[[], PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    whole_words_first: bool = False
    """A piece that is in the vocabulary is taken whole, whatever the merges would make of it."""
    adds_bos: bool = False
    """Where the file does not say."""


_RULES: dict[str, _Rule] = {
    "gpt-2": _Rule(lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)),
    "smollm": _Rule(
        lambda: pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    ),
    "llama-bpe": _Rule(lambda: _split(_WORDS % r"\p{N}{1,3}"), whole_words_first=True, adds_bos=True),
    "qwen2": _Rule(lambda: _split(_WORDS % r"\p{N}"), normalizers.NFC),
}


def converted_tokenizer(path: Path) -> Path:
    """Folder in the cache with the tokenizer of this GGUF file; converts it the first time.

    The key is the file's path, size and time of change, so a start that finds the folder reads nothing of the
    model. Raises `ModelError` when the tokenizer cannot be converted, or the cache cannot be written."""
    stat = path.stat()
    identity = f"{_VERSION}|{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    folder = cache_folder() / "tokenizers" / f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    files = _convert(GgufFile(path).metadata, str(path))
    try:
        _write_whole(folder, files)
    except OSError as error:
        raise ModelError(
            f"the tokenizer of {path} cannot be written to {folder}: {error} (OCTAVO_CACHE names another folder)"
        ) from error
    return folder


def tokenizer_from_gguf(metadata: dict[str, Any], origin: str) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describe; `origin` names the file in errors. Raises `ModelError`."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"{origin} has a tokenizer of type {kind!r}; from GGUF only byte-level BPE ('gpt2') is read. "
            "Use the model's folder with tokenizer.json instead"
        )
    rule = _rule(metadata, origin)
    tokens = _required(metadata, "tokenizer.ggml.tokens", origin)
    merges = _required(metadata, "tokenizer.ggml.merges", origin)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=rule.whole_words_first)
    except Exception as error:  # the library has no narrower class; it checks that merges are of the vocabulary
        raise ModelError(f"{origin}: the vocabulary and the merges do not fit together: {error}") from error
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = rule.splitter()
    tokenizer.decoder = decoders.ByteLevel()
    if rule.normalizer:
        tokenizer.normalizer = rule.normalizer()
    types = metadata.get("tokenizer.ggml.token_type", [])
    tokenizer.add_special_tokens(_added(tokens, types, _CONTROL, special=True))
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED, special=False))
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", rule.adds_bos):
        name = _name(tokens, bos, origin)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{name} $A", pair=f"{name} $A $B", special_tokens=[(name, bos)]
        )
    return tokenizer


def _rule(metadata: dict[str, Any], origin: str) -> _Rule:
    name = metadata.get("tokenizer.ggml.pre")
    if rule := _RULES.get(str(name)):
        return rule
    raise ModelError(
        f"{origin} splits text by the rule {name!r} (tokenizer.ggml.pre), which is not known here; known are "
        f"{', '.join(_RULES)}. Use the model's folder with tokenizer.json instead"
    )


def _required(metadata: dict[str, Any], key: str, origin: str) -> list[str]:
    value: list[str] | None = metadata.get(key)
    if not value:
        raise ModelError(f"{origin} has no {key}: it holds no tokenizer")
    return value


def _added(tokens: list[str], types: list[int], kind: int, special: bool) -> list[AddedToken]:
    wanted = (token for token, its_kind in zip(tokens, types, strict=False) if its_kind == kind)
    return [AddedToken(token, special=special, normalized=False) for token in wanted]


def _name(tokens: list[str], index: int, origin: str) -> str:
    if not 0 <= index < len(tokens):
        raise ModelError(f"{origin} names token {index} as special, its vocabulary has {len(tokens)} tokens")
    return tokens[index]


def _convert(metadata: dict[str, Any], origin: str) -> dict[str, str]:
    """File names and contents, laid out as on the Hugging Face hub."""
    tokenizer = tokenizer_from_gguf(metadata, origin)
    tokens = _required(metadata, "tokenizer.ggml.tokens", origin)
    special = {
        f"{role}_token": _name(tokens, metadata[f"tokenizer.ggml.{key}_token_id"], origin)
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}, indent=2),
        "generation_config.json": json.dumps({"eos_token_id": _end_ids(metadata, tokens)}),
    }
    if template := metadata.get("tokenizer.chat_template"):
        files["chat_template.jinja"] = template
    return files


def _end_ids(metadata: dict[str, Any], tokens: list[str]) -> list[int]:
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    named = {int(metadata[key]) for key in keys if key in metadata}
    types = metadata.get("tokenizer.ggml.token_type", [])
    known = {
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and token in _END_NAMES
    }
    return sorted(named | known)


def _write_whole(folder: Path, files: dict[str, str]) -> None:
    """The folder appears with all its files or not at all; of two writers the first wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".convert-", dir=folder.parent) as scratch:
        whole = Path(scratch) / "tokenizer"
        whole.mkdir()
        for name, content in files.items():
            (whole / name).write_text(content, encoding="utf-8")
        try:
            whole.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
