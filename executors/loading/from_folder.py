"""A Hugging Face folder as a checkpoint: config.json and safetensors, in one file or sharded. No torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.models.errors import ModelError
from octavo.core.models.gguf import GgmlType
from octavo.executors.loading import tensorfile
from octavo.executors.loading.checkpoint import Checkpoint, gather
from octavo.executors.loading.families import TRANSPOSED, names_of, spec_of
from octavo.executors.loading.fingerprint import fingerprint
from octavo.executors.loading.latent import absorb
from octavo.executors.loading.packed import Packing, packing_of
from octavo.executors.loading.rows import Bytes, Floats, Rows
from octavo.executors.loading.tensorfile import Tensor

_IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|^lm_head\.weight$|^embed_out\.weight$|\.attn\.(masked_)?bias$|attention\.(masked_)?bias$|"
    r"\.(input_scale|input_zero_point|k_scale|v_scale|weight_shape|g_idx)$"
)
"""Tensors that a folder may have without use: derived ones, the head of a model that ties it to its embedding, scales
for 8-bit activations and KV of others."""
_BLOCK = re.compile(r"(^|\.)(layers|h|blocks)\.\d+\.")
_TIED = (
    "gemma", "gemma2", "gemma3_text", "gpt2", "smollm3", "bloom", "mpt", "falcon", "starcoder2", "opt",
    "gpt_bigcode",
)  # fmt: skip
"""Families whose head is the embedding unless the config says otherwise."""
_KINDS = {"F32": GgmlType.F32, "F16": GgmlType.F16, "BF16": GgmlType.BF16}
_FP8 = ("F8_E4M3", "F8_E5M2")


def from_folder(folder: Path) -> Checkpoint:
    """Raises `ModelError` when the folder holds no model of a known family, or not all of it."""
    config = read_json(folder / "config.json")
    try:
        how = config.get("quantization_config") or {}
        packing, block = packing_of(how, folder) if how else None, _block_of(how)
        spec = spec_of(config, folder)
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise ModelError(f"{folder}/config.json has a value that cannot be: {error}") from None
    tensors, files = _tensors(folder)
    source = _Source(folder, tensors, TRANSPOSED.get(spec.architecture, ()), packing, block)
    if config.get("tie_word_embeddings", spec.architecture in _TIED):
        source.hide("lm_head.weight", "embed_out.weight")
    matrices, vectors = gather(spec, names_of(spec), source)
    if config.get("tie_word_embeddings") is False and "head" not in matrices:
        raise ModelError(f"{folder} has no head, and its config.json says that the embedding is none")
    if spec.latent:
        absorb(matrices, spec.layers, spec.heads, spec.latent)
    notes = []
    if unused := sorted(name for name in tensors.keys() - source.used if not _IGNORED.search(name)):
        if inside := [name for name in unused if _BLOCK.search(name)]:
            raise ModelError(
                f"{folder} has {len(inside)} tensors that a {spec.architecture} model of {spec.layers} layers does "
                f"not, as {inside[0]}"
            )
        notes.append(f"{len(unused)} tensors were left aside, as {unused[0]}")
    digest = fingerprint([folder / "config.json", *files])
    return Checkpoint(spec, matrices, vectors, digest, tuple(notes))


class _Source:
    """The folder's tensors as a `checkpoint.Source`."""

    def __init__(
        self,
        folder: Path,
        tensors: dict[str, Tensor],
        transposed: tuple[str, ...],
        packing: Packing | None = None,
        block: tuple[int, int] | None = None,
    ) -> None:
        self._folder = folder
        self._tensors = tensors
        self._transposed = transposed
        self._packing = packing
        self._block = block
        self._hidden: set[str] = set()
        self.used: set[str] = set()

    def hide(self, *names: str) -> None:
        self._hidden.update(names)

    def rows(self, name: str) -> Rows | None:
        if (tensor := self._tensor(name)) is None:
            return self._packed(name)
        if len(tensor.shape) != 2:
            raise ModelError(f"{self._folder}: tensor {name} has shape {tensor.shape}, a matrix was expected")
        if tensor.dtype in _FP8:
            return self._fp8(name, tensor)
        rows = Rows.stored(tensor.data, self._kind(name, tensor), *tensor.shape)
        return Rows.of_floats(rows.floats().T) if name.endswith(self._transposed) else rows

    def vector(self, name: str) -> Floats | None:
        if (tensor := self._tensor(name)) is None:
            return None
        if len(tensor.shape) != 1:
            raise ModelError(f"{self._folder}: tensor {name} has shape {tensor.shape}, a vector was expected")
        return _floats(tensor, self._kind(name, tensor))

    def _tensor(self, name: str) -> Tensor | None:
        """Base models are saved without the name of what their head stands on."""
        for each in (name, name.partition(".")[2]):
            if each in self._tensors and each not in self._hidden:
                self.used.add(each)
                return self._tensors[each]
        return None

    def _kind(self, name: str, tensor: Tensor) -> GgmlType:
        if (kind := _KINDS.get(tensor.dtype)) is None:
            raise ModelError(
                f"{self._folder}: tensor {name} is stored as {tensor.dtype}, which cannot be read as weights"
            )
        return kind

    def _packed(self, name: str) -> Rows | None:
        stem = name.removesuffix("weight")
        if self._packing is None or stem == name:
            return None
        return self._packing.rows(lambda ending: self._tensor(stem + ending), f"{self._folder}: layer {stem[:-1]}")

    def _fp8(self, name: str, tensor: Tensor) -> Rows:
        """8-bit floats times a scale: one, one for each row, or one for each block of a grid over the matrix."""
        for ending in ("_scale_inv", "_scale"):
            if (found := self._tensor(name + ending)) is not None:
                scale = _floats(found, self._kind(name + ending, found))
                break
        else:
            raise ModelError(f"{self._folder}: tensor {name} is {tensor.dtype} but there is no scale for it")
        where = f"{self._folder}: tensor {name}"
        block = _grid(tensor.shape, scale.shape, self._block, where)

        def data() -> Bytes:
            values: Floats = _fp8_table(tensor.dtype)[tensor.data].reshape(tensor.shape)
            return Rows.of_floats(_times(values, scale, block)).bytes

        return Rows.stored(data, GgmlType.F32, *tensor.shape)._replace(origin=tensor.dtype)


def _block_of(how: dict[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale, where `quantization_config` says so."""
    given = how.get("weight_block_size")
    for group in (how.get("config_groups") or {}).values():
        given = given or (group.get("weights") or {}).get("block_structure")
    if not given:
        return None
    block = int(given[0]), int(given[1])
    if min(block) < 1:
        raise ModelError(f"scales are said to be for blocks of {block[0]} x {block[1]}")
    return block


def _floats(tensor: Tensor, kind: GgmlType) -> Floats:
    count = int(np.prod(tensor.shape, dtype=np.int64))
    return Rows.stored(tensor.data, kind, 1, count).floats().reshape(tensor.shape)


def floats_of(tensor: Tensor, what: str) -> Floats:
    """A tensor's numbers, in its shape. Raises `ModelError` for what is not stored as floats of 16 or 32 bits."""
    if (kind := _KINDS.get(tensor.dtype)) is None:
        raise ModelError(f"{what} is stored as {tensor.dtype}, which cannot be read as weights")
    return _floats(tensor, kind)


def _grid(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None, where: str
) -> tuple[int, int]:
    """Rows and columns that share one of the scales. Raises `ModelError` for scales of another shape."""
    rows, cols = shape
    if len(scales) < 2:
        scales = (scales[0] if scales else 1, 1)
    for height, width in ((rows, cols), (1, cols), *([block] if block else [])):
        if scales == (-(-rows // height), -(-cols // width)):
            return height, width
    if block is None and scales[0] and scales[1]:  # blocks of which nobody says how large they are: the least that fit
        height, width = (-(-length // count) for length, count in zip(shape, scales, strict=True))
        if scales == (-(-rows // height), -(-cols // width)):
            return height, width
    raise ModelError(f"{where} of shape {shape} has scales {scales}" + (f" for blocks of {block}" if block else ""))


def _times(values: Floats, scale: Floats, block: tuple[int, int]) -> Floats:
    scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale
    grid = np.repeat(np.repeat(scale, block[0], axis=0), block[1], axis=1)
    return values * grid[: values.shape[0], : values.shape[1]]


def _fp8_table(dtype: str) -> Floats:
    """The number that each byte stands for (OCP 8-bit floating point, 2023)."""
    fraction_bits, bias = (3, 7) if dtype == "F8_E4M3" else (2, 15)
    codes = np.arange(256)
    exponent, fraction = (codes & 127) >> fraction_bits, (codes & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    values = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))
    special = (codes & 127) == 127 if dtype == "F8_E4M3" else exponent == 31
    return np.where(special, np.nan, np.where(codes > 127, -values, values)).astype(np.float32)


def _tensors(folder: Path) -> tuple[dict[str, Tensor], list[Path]]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = read_json(index).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
            raise ModelError(f"{index} has no weight_map that names a file for each tensor")
        where = {name: folder / file for name, file in named.items()}
        files = sorted(set(where.values()))
        if lost := [str(path) for path in files if not path.is_file()]:
            raise ModelError(f"{index} names files that are not there: {', '.join(lost)}; fetch the model again")
        found = {name: tensor for path in files for name, tensor in tensorfile.read(path).items()}
        if missing := sorted(where.keys() - found.keys()):
            raise ModelError(f"{index} names {len(missing)} tensors that its files do not have, as {missing[0]}")
        return found, files
    if (single := folder / "model.safetensors").is_file():
        return tensorfile.read(single), [single]
    if any(folder.glob("*.bin")):
        raise ModelError(f"{folder} has weights as pickles (*.bin), which can run code; save it as safetensors")
    raise ModelError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is {type(value).__name__} in JSON, an object was expected")
    return value
