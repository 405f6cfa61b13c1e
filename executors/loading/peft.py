"""A LoRA adapter (Hu et al., 2021) from the folder that PEFT saves: adapter_config.json and adapter_model.safetensors.

What it adds to a matrix W of the base is scale · B A: here as parts, each for some of the rows of one of our matrices.
Everything that would make an answer differ from what PEFT computes is refused by name. No torch.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from octavo.core.models.errors import ModelError
from octavo.executors.loading import tensorfile
from octavo.executors.loading.families import names_of
from octavo.executors.loading.from_folder import floats_of, read_json
from octavo.executors.loading.rows import Floats, Int32s
from octavo.executors.loading.spec import Spec

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_OF_GGUF = {"gemma3": "gemma3_text", "gptneox": "gpt_neox", "qwen3moe": "qwen3_moe"}
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.(?:default\.)?weight")
MOST = 1 << 31
"""Of a rank or an alpha: more is no adapter's, and does not fit everywhere."""
_PLAIN_START = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base's weights as they are."""
_REFUSED = (
    ("use_dora", "DoRA"), ("modules_to_save", "modules of its own (modules_to_save)"), ("lora_bias", "biases"),
    ("layer_replication", "repeated layers"), ("target_parameters", "bare parameters (target_parameters)"),
    ("trainable_token_indices", "tokens of its own (trainable_token_indices)"),
    ("alora_invocation_tokens", "activated LoRA"), ("use_qalora", "QALoRA"), ("megatron_config", "Megatron layers"),
)  # fmt: skip


class Part(NamedTuple):
    """Adds `up` · (`down` · x) to rows [start, start + len(up)) of a product: `down` [rank, cols], `up` [rows, rank]
    with the scale in it, both fp32."""

    start: int
    down: Floats
    up: Floats


@dataclass(frozen=True, slots=True)
class Lora:
    """`parts` by matrix of ours: i.qkv, i.o, i.gate_up (gate's rows, then up's) or i.up, i.down. `digest`, 16 bytes, is
    of the tensors and their scales: of all that an answer depends on."""

    parts: Mapping[str, tuple[Part, ...]]
    digest: bytes
    about: str
    """For people: ranks and modules."""


class _Site(NamedTuple):
    """Where a module of the base is in a matrix of ours: `order` gives, for each of our rows, which of its own."""

    matrix: str
    start: int
    order: Int32s
    cols: int


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read(folder: Path, spec: Spec) -> Lora:
    """The adapter for a base of this shape. Raises `ModelError` in one line."""
    if spec.latent:
        raise ModelError(f"{folder}: adapters of models with latent attention are not served")
    config, tensors = _open(folder)
    sites = _sites(spec)
    sides: dict[str, dict[str, str]] = {}
    for name in tensors:
        sides.setdefault(_module(folder, name, sites), {})[_side(name)] = name
    parts: dict[str, list[Part]] = {}
    digest = hashlib.sha256()
    modules: dict[str, int] = {}
    for module in sorted(sides):
        named, site = sides[module], sites[module]
        if named.keys() != {"A", "B"}:
            raise ModelError(f"{folder}: {module} has lora_{min(named)} alone")
        down, up = (_matrix(folder, named[side], tensors[named[side]]) for side in "AB")
        rank, scale = _rank_and_scale(folder, config, module)
        if down.shape != (rank, site.cols) or up.shape != (len(site.order), rank):
            raise ModelError(
                f"{folder}: {module} has A of shape {down.shape} and B of {up.shape}; with rank {rank} this model "
                f"wants {(rank, site.cols)} and {(len(site.order), rank)}"
            )
        digest.update(f"{module} {down.shape} {up.shape}".encode() + np.float64(scale).tobytes())
        digest.update(down.data)
        digest.update(up.data)
        with np.errstate(over="ignore"):  # told by name
            scaled = np.ascontiguousarray(up[site.order] * np.float32(scale))
        if not np.isfinite(scaled).all():
            raise ModelError(f"{folder}: {module} times its scale, {scale:g}, is not finite in 32 bits")
        parts.setdefault(site.matrix, []).append(Part(site.start, down, scaled))
        modules[module.rpartition(".")[2]] = max(rank, modules.get(module.rpartition(".")[2], 0))
    return Lora({name: tuple(each) for name, each in parts.items()}, digest.digest()[:16], _about(modules))


def summary(folder: Path) -> tuple[str, str]:
    """What an adapter folder is and what it was made for, whatever the base is. Raises `ModelError`."""
    config, tensors = _open(folder)
    modules: dict[str, int] = {}
    for name, tensor in tensors.items():
        if (found := _TENSOR.fullmatch(name)) is None:
            raise ModelError(f"{folder}: tensor {name} is of no LoRA that is served")
        if found["side"] == "A":
            short = found["module"].rpartition(".")[2]
            modules[short] = max(modules.get(short, 0), tensor.shape[0])
    return _about(modules), str(config.get("base_model_name_or_path") or "a base that it does not name")


def _open(folder: Path) -> tuple[dict[str, Any], dict[str, tensorfile.Tensor]]:
    """Its config, checked for what is not served, and its tensors."""
    if not is_adapter(folder):
        raise ModelError(f"{folder} is no LoRA adapter: there is no {CONFIG}")
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise ModelError(f"{folder / CONFIG} is not a JSON object")
    if (kind := config.get("peft_type")) != "LORA":
        raise ModelError(f"{folder} is an adapter of type {kind!r}; LORA is served")
    for key, what in _REFUSED:
        if config.get(key):
            raise ModelError(f"{folder} has {what}, which is not served")
    if (bias := config.get("bias", "none")) != "none":
        raise ModelError(f"{folder} trains biases (bias = {bias!r}); 'none' is served")
    if (start := config.get("init_lora_weights", True)) not in _PLAIN_START:
        raise ModelError(
            f"{folder} was begun with init_lora_weights = {start!r}, which changes the base's own weights; convert it "
            "to a plain LoRA (PEFT: path_initial_model_for_weight_conversion)"
        )
    path = folder / TENSORS
    if not path.is_file():
        hint = "; adapter_model.bin is a pickle, which can run code: save it as safetensors"
        raise ModelError(f"{folder} has no {TENSORS}{hint if (folder / 'adapter_model.bin').is_file() else ''}")
    tensors = tensorfile.read(path)
    if not tensors:
        raise ModelError(f"{path} has no tensors")
    return config, tensors


def _module(folder: Path, name: str, sites: Mapping[str, _Site]) -> str:
    if (found := _TENSOR.fullmatch(name)) is None:
        raise ModelError(f"{folder}: tensor {name} is of no LoRA that is served")
    module = found["module"]
    for known in (module, f"model.{module}", f"transformer.{module}"):  # trained without a head
        if known in sites:
            return known
    served = sorted({site.rpartition(".")[2] for site in sites})
    raise ModelError(f"{folder} adapts {module}; of this model can be adapted: {', '.join(served)}")


def _side(name: str) -> str:
    return name.rpartition(".lora_")[2][0]


def _matrix(folder: Path, name: str, tensor: tensorfile.Tensor) -> Floats:
    """In memory of its own: whatever becomes of the file, this stays."""
    values = np.array(floats_of(tensor, f"{folder}: tensor {name}"), dtype=np.float32)
    if values.ndim != 2:
        raise ModelError(f"{folder}: tensor {name} has shape {values.shape}, a matrix was expected")
    if not np.isfinite(values).all():
        raise ModelError(
            f"{folder}: tensor {name} has numbers that are not finite; the file is damaged: fetch it again"
        )
    return values


def _rank_and_scale(folder: Path, config: Mapping[str, Any], module: str) -> tuple[int, float]:
    rank = _patterned(folder, config, "rank_pattern", module, config.get("r"))
    alpha = _patterned(folder, config, "alpha_pattern", module, config.get("lora_alpha", 8))
    numbers = isinstance(rank, int) and isinstance(alpha, int | float)
    if not numbers or not 1 <= rank <= MOST or not abs(alpha) <= MOST:  # false for NaN as well
        raise ModelError(
            f"{folder / CONFIG} has rank {rank!r} and lora_alpha {alpha!r} for {module}; numbers are expected"
        )
    return rank, alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _patterned(folder: Path, config: Mapping[str, Any], key: str, module: str, otherwise: Any) -> Any:
    """The first pattern that is the module's name or an end of it, as PEFT has it."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise ModelError(f"{folder / CONFIG}: {key} is {patterns!r}; an object of patterns is expected")
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise ModelError(f"{folder / CONFIG}: {key} has the pattern {pattern!r}: {error}") from None
    return otherwise


def _sites(spec: Spec) -> dict[str, _Site]:
    """Modules that can be adapted, by the name that the base's folder has for them."""
    names = names_of(_as_folder(spec))
    heads, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    rows = {
        "qkv": ((heads, keys, keys), spec.hidden),
        "o": ((spec.hidden,), heads),
        "gate_up": ((spec.inner, spec.inner), spec.hidden),
        "up": ((spec.inner,), spec.hidden),
        "down": ((spec.hidden,), spec.inner),
    }
    sites: dict[str, _Site] = {}
    for i in range(spec.layers):
        layer = names.layer.format(i=i)
        for ours, ways in names.parts.items():
            if ours not in rows or (spec.is_mixture(i) and ours not in ("qkv", "o")):
                continue
            sizes, cols = rows[ours]
            for way in ways:
                start = 0
                for module, size in zip(way, sizes if len(way) > 1 else (sum(sizes),), strict=True):
                    order = np.arange(size, dtype=np.int32)
                    for ending, wanted in (names.order or {}).items():
                        order = wanted(order) if module.endswith(ending) else order
                    sites[layer + module] = _Site(f"{i}.{ours}", start, order, cols)
                    start += size
    return sites


def _as_folder(spec: Spec) -> Spec:
    """A GGUF has other words for families; adapters have those of folders."""
    return replace(spec, architecture=_OF_GGUF.get(spec.architecture, spec.architecture))


def _about(modules: Mapping[str, int]) -> str:
    ranks = sorted(set(modules.values()))
    rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"a LoRA adapter of {rank}, on {', '.join(sorted(modules))}"
