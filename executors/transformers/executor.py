"""Loads a model folder by the transformers library and runs it as the CPU executor runs its own models.

Two checks at load, on this very machine, decide whether it may serve: what a token gets must not depend on its
company, bit for bit; and it must be what the library's own attention gives, within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from octavo.core.config.schema import Config
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import locate
from octavo.executors.cpu import probe
from octavo.executors.cpu.executor import CpuExecutor
from octavo.executors.cpu.layout import PoolShape, Span
from octavo.executors.cpu.linear import Backend, Linear, RowCounts
from octavo.executors.cpu.llama import Arithmetic, KvPool, token_bytes
from octavo.executors.drafting.contract import Host
from octavo.executors.drafting.drafting import Drafting, settled
from octavo.executors.facts import PLAIN_KV, check_memory, kept_as, model_facts
from octavo.executors.grammars import grammars_of
from octavo.executors.loading.fingerprint import fingerprint
from octavo.executors.loading.rope import Rope
from octavo.executors.loading.spec import Spec
from octavo.executors.threads import default_threads
from octavo.executors.transformers.decoder import Decoder, linears
from octavo.executors.transformers.look import Seen, look

_MODE = b"transformers fp32"
_SAMPLE = 12
"""Tokens on which the two attentions are compared."""
_TOLERANCE = 1e-3
"""How far logits may be apart, as a part of the largest."""
_STRETCHED = ("dynamic", "longrope")
"""Rotary embeddings whose angles change with the length: only what is below the change can be cached."""


class TransformersExecutor(CpuExecutor):
    """Entry point `transformers` of `octavo.executor`."""

    @classmethod
    def load(cls, config: Config) -> Self:
        """Raises `ModelError` for what is no folder, what the library does not know, and what fails a check."""
        config = settled(config)
        kept_as(config, PLAIN_KV, "transformers")
        torch.set_num_threads(config.executor.threads or default_threads())
        files = locate(config.model.path)
        if files.kind != "folder" or files.path is None:
            raise ModelError(f"the executor 'transformers' reads model folders; {files.model_id} is none")
        folder = files.path
        spec, decoder = checked(lambda: _from_library(folder))
        facts = model_facts(
            config,
            files.model_id,
            spec,
            token_bytes=token_bytes(spec),
            seed=fingerprint(_content(folder)) + _MODE,
            serves=("prompt_logprobs", "restrictions"),
        )
        check_memory(facts, facts.block_bytes)
        grammars = grammars_of(config, files, facts.vocab_size)
        if grammars is not None:
            facts = msgspec.structs.replace(facts, serves=(*facts.serves, "grammar"))
        shape = PoolShape(facts.places, facts.block_size, spec.kv_heads, spec.head_dim)
        return cls(decoder, KvPool(shape, spec.layers), facts, grammars, Drafting.of(Host(config, facts, trees=True)))


def checked(make: Callable[[], PreTrainedModel]) -> tuple[Spec, Decoder]:
    """The model with the first arithmetic that makes it independent of company; raises `ModelError` if it is not what
    the library computes. `make` makes it anew: a decoder takes a model's weights over."""
    model = make()
    try:
        return _checked(model, make)
    except (AttributeError, TypeError, ValueError, LookupError, RuntimeError) as error:
        # Any model of the library gets here, and each reads a config and calls attention in its own way.
        kind = model.config.model_type
        raise ModelError(f"this {kind} model cannot be run by transformers here: {_said(error)}") from error


def _checked(model: PreTrainedModel, make: Callable[[], PreTrainedModel]) -> tuple[Spec, Decoder]:
    ids = torch.arange(_SAMPLE) * 7919 % int(model.config.get_text_config().vocab_size)
    with torch.inference_mode():
        expected = _library_logits(model, ids)
        seen = look(model)
        spec = _spec(model, seen)
        candidates = list(_arithmetics(model, spec, seen))
        for arithmetic in candidates:
            decoder = Decoder(model, spec, seen.rules, arithmetic)
            if probe.independent(decoder):
                break
            model = make()
        else:
            raise probe.NotExactError(
                f"no way was found to compute this {spec.architecture} model's numbers independently of the batch"
            )
        off = float((_own_logits(decoder, ids) - expected).abs().max() / expected.abs().max())
    if not off <= _TOLERANCE:
        raise ModelError(
            f"this {spec.architecture} model attends in a way that is not known here, or keeps more than keys and "
            f"values: its logits are {off:.1e} of the largest away from the library's own, {_TOLERANCE:.0e} are allowed"
        )
    return spec, decoder


def _from_library(folder: Path) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
    except (OSError, AttributeError, TypeError, ValueError, LookupError, ImportError, RuntimeError) as error:
        raise ModelError(f"{folder} cannot be loaded by transformers: {_said(error)}") from error
    model.train(False)
    return model


def _said(error: Exception) -> str:
    """One line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _content(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin"))


def _spec(model: PreTrainedModel, seen: Seen) -> Spec:
    config: PretrainedConfig = model.config.get_text_config()
    given: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    context = int(getattr(config, "max_position_embeddings", 0))
    for rope in (given, *(each for each in given.values() if isinstance(each, dict))):  # some have one by kind of layer
        if rope.get("rope_type") in _STRETCHED:
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            context = min(context, int(original or context))
    if getattr(config, "attn_temperature_tuning", False):  # from there on by places in a step, which are no positions
        context = min(context, int(config.floor_scale) - 1)
    return Spec(
        architecture=config.model_type,
        vocab_size=int(config.vocab_size),
        hidden=int(config.hidden_size),
        layers=len(seen.rules),
        heads=seen.kv_heads * max(seen.groups),
        kv_heads=seen.kv_heads,
        head_dim=seen.head_dim,
        inner=int(config.hidden_size),
        norm_eps=0.0,
        context=context,
        rope=Rope(1.0),
    )


def _arithmetics(model: PreTrainedModel, spec: Spec, seen: Seen) -> Iterator[Arithmetic]:
    """From the fastest to the surest: row counts that agree with each other; one count for all; a token at a time."""
    shared = set.intersection(
        *(set(probe.equal_tiles(replace(spec, heads=group * spec.kv_heads))) for group in set(seen.groups))
    )
    if not (tiles := tuple(sorted(shared))):
        return
    shapes = {tuple(weight.shape): (weight, bias) for _, _, weight, bias in linears(model)}
    backends = [b for b in (Backend.PACKED, Backend.PLAIN) if b is Backend.PLAIN or torch._C._has_mkldnn]
    for backend in backends:
        counts = set(probe.ROWS)
        for weight, bias in shapes.values():
            counts &= probe.equal_row_counts(Linear(weight, bias, backend), weight.shape[1], probe.ROWS)
        if counts:
            rows = RowCounts(tuple(sorted(counts)))
            yield Arithmetic(backend, rows, rows, tiles)
    for counts_ in ((probe.ANCHOR,), (1,)):
        for backend in backends:
            yield Arithmetic(backend, RowCounts(counts_), RowCounts(counts_), tiles)


def _library_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    model.set_attn_implementation("eager")
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits


def _own_logits(decoder: Decoder, ids: Tensor) -> Tensor:
    spec = decoder.spec
    shape = PoolShape(len(ids), 1, spec.kv_heads, spec.head_dim)
    spans = [Span(ids.tolist(), 0, list(range(len(ids))))]
    return decoder.logits(decoder.hidden(decoder.layout(spans, shape), KvPool(shape, spec.layers)))
