"""What executors with a model say of it, and whether its pool fits this machine: the same words for all of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import TypeVar

from octavo.core.config.schema import Config
from octavo.core.messages import Facts
from octavo.core.models.errors import ModelError
from octavo.executors.loading.spec import Spec

T = TypeVar("T")
PLAIN_KV = {"auto": None, "fp32": None}
"""What executors that keep KV in fp32 alone have to give."""


def model_facts(
    config: Config, model_id: str, spec: Spec, *, token_bytes: int, seed: bytes, serves: tuple[str, ...]
) -> Facts:
    """`token_bytes` of KV a token; `seed` is all that makes KV differ: the weights' digest, KV's type, the arithmetic.
    Raises `ModelError` when the configuration does not suit the model."""
    context, size = config.model.context or spec.context, config.kv.block_size
    if context > spec.context:
        raise ModelError(f"model.context is {context}, but {model_id} was made for {spec.context} tokens")
    if (blocks := config.kv.tokens // size) < 1:
        raise ModelError(f"kv.tokens = {config.kv.tokens} holds no block of kv.block_size = {size} tokens")
    return Facts(
        model_id=config.model.name or model_id,
        context=context,
        vocab_size=spec.vocab_size,
        block_size=size,
        total_blocks=blocks,
        host_blocks=config.kv.host_tokens // size,
        block_bytes=token_bytes * size,
        cache_seed=hashlib.sha256(seed).digest()[:16],
        drafter=config.speculation.drafter or "",
        serves=serves,
    )


def kept_as(config: Config, kinds: Mapping[str, T], who: str) -> T:
    """How KV is kept, of what there is by the names of `executor.kv`. Raises `ModelError`."""
    if (asked := config.executor.kv) not in kinds:
        there = " or ".join(f'"{name}"' for name in kinds if name != "auto")
        raise ModelError(f"the executor {who} has no KV in {asked}; set executor.kv to {there}, or leave it out")
    return kinds[asked]


def check_memory(facts: Facts, block_bytes: int) -> None:
    """Raises `ModelError` if blocks of so many bytes do not fit this machine. A pool is taken lazily: without this the
    system would end the process long after the start."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (needed := facts.places * block_bytes) > memory:
        raise ModelError(
            f"kv.tokens and kv.host_tokens, {facts.places * facts.block_size} together, take {needed / 2**30:.1f} GiB "
            f"for this model, the machine has {memory / 2**30:.1f} GiB; lower them"
        )
