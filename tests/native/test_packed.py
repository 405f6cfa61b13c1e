"""GPTQ, AWQ and compressed-tensors folders: packed here by the rules that their writers follow, word by word, and
compared with a folder that has the same numbers as fp32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.core.models.errors import ModelError
from octavo.executors.loading.files import plain
from octavo.executors.loading.from_folder import from_folder
from octavo.executors.models import describe
from octavo.executors.native.library import Kind
from tests.executors.tiny import save_tiny
from tests.native.net import logits_of, make

Ints: TypeAlias = npt.NDArray[np.int64]
Layer: TypeAlias = dict[str, torch.Tensor]
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
IDS = [3, 14, 15, 92, 65, 35, 8, 9]


def words(numbers: Ints, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[n, m] numbers to [n, m · bits / 32] words: place i of a word has number `order[i]` of its own."""
    count = 32 // bits
    order = order or tuple(range(count))
    out = np.zeros((len(numbers), numbers.shape[1] // count), dtype=np.uint64)
    for place, number in enumerate(order):
        out |= numbers[:, number::count].astype(np.uint64) << np.uint64(place * bits)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32).copy())


def gptq(numbers: Ints, zeros: Ints, scales: torch.Tensor, groups: Ints, bits: int, *, version: int) -> Layer:
    stored = zeros - (version == 1)
    return {
        "qweight": words(numbers, bits).T.contiguous(),
        "qzeros": words(stored.T % (1 << bits), bits),
        "scales": scales.T.contiguous(),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }


def awq(numbers: Ints, zeros: Ints, scales: torch.Tensor, groups: Ints, bits: int) -> Layer:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": words(numbers.T, 4, order), "qzeros": words(zeros.T, 4, order), "scales": scales.T.contiguous()}


def compressed(numbers: Ints, zeros: Ints, scales: torch.Tensor, groups: Ints, bits: int, *, zero: bool) -> Layer:
    layer = {
        "weight_packed": words(numbers, bits),
        "weight_scale": scales.contiguous(),
        "weight_shape": torch.tensor(numbers.shape),
    }
    return layer | ({"weight_zero_point": words(zeros.T, bits).T.contiguous()} if zero else {})


def folders(
    folder: Path,
    pack: Callable[..., Layer],
    how: dict[str, Any],
    *,
    bits: int = 4,
    group: int = 32,
    zero: bool = True,
    shuffled: str = "",
    scale_type: torch.dtype = torch.float16,
    **options: Any,
) -> tuple[Path, Path]:
    """A model whose linear layers are packed, and the same one in fp32."""
    draws = np.random.default_rng(4)
    save_tiny(folder / "plain", **SHAPE)
    shutil.copytree(folder / "plain", folder / "packed")
    tensors = load_file(folder / "plain" / "model.safetensors")
    packed: Layer = {}
    for name, tensor in list(tensors.items()):
        if not name.endswith("proj.weight"):
            packed[name] = tensor
            continue
        rows, columns = tensor.shape
        width = columns if group < 0 else group
        count = columns // width
        groups = np.arange(columns) // width
        if shuffled:  # as layers of the same inputs are, or each in an order of its own
            groups = (np.random.default_rng(columns) if shuffled == "alike" else draws).permutation(groups)
        numbers = draws.integers(0, 1 << bits, (rows, columns))
        middle = 1 << (bits - 1)
        zeros = draws.integers(1, 1 << bits, (rows, count)) if zero else np.full((rows, count), middle)
        scales = torch.from_numpy((0.3 / (1 << bits)) * (0.5 + draws.random((rows, count)))).to(scale_type)
        weight = scales.float().numpy()[:, groups] * (numbers - zeros[:, groups])
        tensors[name] = torch.from_numpy(weight.astype(np.float32))
        layer = pack(numbers, zeros, scales, groups, bits, **options)
        packed |= {name.removesuffix("weight") + ending: value for ending, value in layer.items()}
    save_file(tensors, folder / "plain" / "model.safetensors")
    save_file(packed, folder / "packed" / "model.safetensors")
    configure(folder / "packed", how)
    return folder / "packed", folder / "plain"


def configure(folder: Path, how: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))


def _ct(bits: int) -> dict[str, Any]:
    groups = {"group_0": {"weights": {"num_bits": bits, "type": "int"}, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
V2 = GPTQ | {"checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
CASES: dict[str, tuple[Callable[..., Layer], dict[str, Any], dict[str, Any], Kind]] = {
    "gptq, zeros of 8": (gptq, GPTQ, {"version": 1, "zero": False}, Kind.W4),
    "gptq, any zeros": (gptq, GPTQ, {"version": 1, "group": 64}, Kind.W5),
    "gptq_v2, any zeros": (gptq, V2, {"version": 2}, Kind.W5),
    "gptq, one group": (gptq, GPTQ, {"version": 1, "zero": False, "group": -1}, Kind.W4),
    "gptq, 8 bits": (gptq, GPTQ | {"bits": 8}, {"version": 1, "zero": False, "bits": 8}, Kind.W8),
    "gptq, 8 bits, any zeros": (gptq, GPTQ | {"bits": 8}, {"version": 1, "bits": 8}, Kind.F32),
    "gptq, desc_act": (gptq, GPTQ | {"desc_act": True}, {"version": 1, "shuffled": "alike", "zero": False}, Kind.W4),
    "gptq, desc_act, any zeros": (gptq, V2 | {"desc_act": True}, {"version": 2, "shuffled": "alike"}, Kind.W5),
    "gptq, groups of 16": (gptq, GPTQ, {"version": 1, "group": 16, "zero": False}, Kind.F32),
    "gptq, fp32 scales": (gptq, GPTQ, {"version": 1, "zero": False, "scale_type": torch.float32}, Kind.F32),
    "awq": (awq, AWQ, {"group": 64}, Kind.W5),
    "awq, bf16 scales": (awq, AWQ, {"scale_type": torch.bfloat16}, Kind.W5),
    "compressed, 4 bits": (compressed, _ct(4), {"zero": False}, Kind.W4),
    "compressed, 4 bits, zeros": (compressed, _ct(4), {"zero": True}, Kind.W5),
    "compressed, 8 bits": (compressed, _ct(8), {"zero": False, "bits": 8, "group": -1}, Kind.W8),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_numbers(case: str, tmp_path: Path) -> None:
    pack, how, options, kind = CASES[case]
    given, same = folders(tmp_path, _with_zero(pack, options), how, **options)
    checkpoint = from_folder(given)
    native = make(checkpoint, exact=True)
    assert {Kind(m.kind) for name, m in native.weights.matrices.items() if "." in name} == {kind}
    expected = logits_of(make(from_folder(same), exact=True), IDS)
    np.testing.assert_allclose(logits_of(native, IDS), expected, atol=2e-4, rtol=0)
    torch_weights, theirs = plain(checkpoint).weights, plain(from_folder(same)).weights
    assert all(torch.equal(torch_weights[name], theirs[name]) for name in theirs)
    fast = make(checkpoint, exact=False)  # what has no grid of ours becomes 8-bit groups
    kinds = {Kind(m.kind) for name, m in fast.weights.matrices.items() if "." in name}
    assert kinds == ({Kind.W8} if kind is Kind.F32 else {kind})
    error = np.abs(logits_of(fast, IDS) - expected).max() / np.abs(expected).max()
    assert error < 0.1


def _with_zero(pack: Callable[..., Layer], options: dict[str, Any]) -> Callable[..., Layer]:
    if pack is not compressed:
        return pack
    return lambda *arguments, **others: compressed(*arguments, zero=options["zero"], **others)


def test_models_says_what_becomes_of_each(tmp_path: Path) -> None:
    said = {}
    for name in ("gptq, zeros of 8", "awq", "gptq, groups of 16"):
        pack, how, options, _ = CASES[name]
        given, _ = folders(tmp_path / name, pack, how, **options)
        found = describe(str(given))
        assert not {"native", "cpu"} & found.refused.keys()
        said[name] = found.runs["native"]
        assert next(kind for kind in found.weights if "bit" in kind) == f"{name[:4].strip(',')} 4-bit"
    assert "(gptq 4-bit as W4, number by number)" in said["gptq, zeros of 8"]
    assert "(awq 4-bit as W5, number by number)" in said["awq"]
    assert "gptq 4-bit becomes 8-bit groups of 32 in fast mode, fp32 in exact mode" in said["gptq, groups of 16"]


def test_parts_whose_columns_are_in_orders_of_their_own(tmp_path: Path) -> None:
    """Queries, keys and values are packed apart then; gate and up, which stand in turn, become what they stand for."""
    given, same = folders(tmp_path, gptq, GPTQ, version=1, shuffled="apart", zero=False)
    expected = logits_of(make(from_folder(same), exact=True), IDS)
    native = make(from_folder(given), exact=True)
    kinds = {
        name.partition(".")[2]: Kind(matrix.kind) for name, matrix in native.weights.matrices.items() if "." in name
    }
    assert kinds["gate_up"] is Kind.F32
    assert {kinds[name] for name in ("qkv.0", "qkv.1", "qkv.2", "o", "down")} == {Kind.W4}
    np.testing.assert_allclose(logits_of(native, IDS), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ({"quant_method": "gptq", "bits": 3}, r"with bits 3; 4 and 8 can be read"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, r"checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:a": {"bits": 8}}}, r"dynamic"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"version 'gemv'; 'gemm' can be read"),
        (_ct(4) | {"format": "marlin-24"}, r"format 'marlin-24'"),
        ({"quant_method": "hqq"}, r"quantised by 'hqq'; of quantised folders gptq, awq"),
    ],
)
def test_what_is_not_read_is_one_line(tmp_path: Path, how: dict[str, Any], word: str) -> None:
    save_tiny(tmp_path)
    configure(tmp_path, how)
    with pytest.raises(ModelError, match=word) as error:
        from_folder(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("ending", "change", "word"),
    [
        ("qzeros", None, "no qzeros"),
        ("scales", lambda tensor: tensor[:-1].clone(), "do not go with scales"),
        ("g_idx", lambda tensor: tensor + 50, "is in group 50 of 6"),
        ("g_idx", lambda tensor: tensor - 1, "is in group -1 of 6"),
        ("g_idx", lambda tensor: tensor.long() + 2**32, "is in group 2147483647 of 6"),
        ("qzeros", lambda tensor: tensor[:0].clone(), "32-bit words"),
        ("scales", lambda tensor: tensor[:, :0].clone(), "a matrix of floats"),
        ("qweight", lambda tensor: tensor.float(), "32-bit words"),
    ],
)
def test_packed_parts_that_do_not_fit(tmp_path: Path, ending: str, change: Any, word: str) -> None:
    given, _ = folders(tmp_path, gptq, GPTQ, version=1)
    tensors = load_file(given / "model.safetensors")
    name = f"model.layers.1.mlp.down_proj.{ending}"
    tensors[name] = tensors[name] if change is None else change(tensors[name])
    if change is None:
        del tensors[name]
    save_file(tensors, given / "model.safetensors")
    with pytest.raises(ModelError, match=word) as error:
        from_folder(given)
    assert "\n" not in str(error.value)


def test_blocks_of_scales_that_do_not_divide_the_matrix(tmp_path: Path) -> None:
    """Blocks of 48 by 80 over 128 rows and columns: the last ones are narrower, so their size is not to be guessed."""
    save_tiny(tmp_path / "a", **SHAPE)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    eight = dict(tensors)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        low = (tensors[name] * 4).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-low.shape[0] // 48), -(-low.shape[1] // 80)) + 0.1
        grid = scale.repeat_interleave(48, 0).repeat_interleave(80, 1)[: low.shape[0], : low.shape[1]]
        eight[name], eight[f"{name}_scale_inv"], tensors[name] = low, scale, low.float() * grid
    save_file(eight, tmp_path / "a" / "model.safetensors")
    save_file(tensors, tmp_path / "b" / "model.safetensors")
    configure(tmp_path / "a", {"quant_method": "fp8", "weight_block_size": [48, 80]})
    found, expected = (logits_of(make(from_folder(tmp_path / each), exact=True), IDS) for each in "ab")
    assert np.array_equal(found, expected)
    assert "F8_E4M3 becomes 8-bit groups" in describe(str(tmp_path / "a")).runs["native"]
    configure(tmp_path / "a", {"quant_method": "fp8", "weight_block_size": [32, 32]})
    with pytest.raises(ModelError, match=r"has scales \(.*\) for blocks of \(32, 32\)"):
        from_folder(tmp_path / "a")


@pytest.mark.parametrize("shape", [[], [128], [128, 0], [128, -1], [128, 900]])
def test_a_shape_of_packed_columns_that_cannot_be(tmp_path: Path, shape: list[int]) -> None:
    given, _ = folders(tmp_path, _with_zero(compressed, {"zero": False}), _ct(4), zero=False)
    tensors = load_file(given / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight_shape"] = torch.tensor(shape, dtype=torch.int64)
    save_file(tensors, given / "model.safetensors")
    with pytest.raises(ModelError, match=r"weight_shape .* does not go with 192"):
        from_folder(given)
