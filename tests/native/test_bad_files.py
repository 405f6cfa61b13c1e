"""Files that are damaged or say what cannot be: each ends in one line that names the fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.core.models.errors import GgufError, ModelError
from octavo.executors.loading import tensorfile
from octavo.executors.loading.from_folder import from_folder
from octavo.executors.loading.from_gguf import from_gguf
from octavo.executors.native.weights import Weights
from tests.executors.test_loading import write_gguf
from tests.executors.tiny import save_tiny
from tests.native.families import save_family
from tests.native.net import library, logits_of, make

GGUF = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny(tmp_path)
    return tmp_path


def change(folder: Path, **values: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in (tensors | values).items() if tensor is not None},
        folder / "model.safetensors",
    )


def one_line(error: pytest.ExceptionInfo[Exception]) -> bool:
    return "\n" not in str(error.value)


@pytest.mark.parametrize("kept", [0, 4, 100, 5000, -1])
def test_a_cut_safetensors_file(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"not a safetensors file|fetch it again") as error:
        from_folder(folder)
    assert one_line(error)


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}, "cannot take 12 bytes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, "past the end|fetch"),
        ({"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}, "F99"),
        ({"dtype": "F32", "shape": "2", "data_offsets": [0]}, "damaged"),
        (None, "damaged"),
    ],
)
def test_a_header_that_lies(tmp_path: Path, entry: object, word: str) -> None:
    header = json.dumps({"x": entry}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ModelError, match=word) as error:
        tensorfile.read(tmp_path / "a.safetensors")
    assert one_line(error)


@pytest.mark.parametrize("part", [0.0001, 0.2, 0.9, 0.999])
def test_a_cut_gguf_file(tmp_path: Path, part: float) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, save_tiny(tmp_path, **GGUF))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(GgufError) as error:
        from_gguf(path)
    assert one_line(error)


def test_weights_that_are_not_numbers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, where in (("model.layers.1.mlp.down_proj.weight", "1.down"), ("model.norm.weight", "norm")):
        broken = tensors[name].clone()
        broken.view(-1)[3] = float("nan")
        change(folder, **{name: broken})
        with pytest.raises(ModelError, match=f"weight {where}.*not finite") as error:
            Weights(library(), from_folder(folder), exact=False)
        assert one_line(error)
        change(folder, **{name: tensors[name]})
    Weights(library(), from_folder(folder), exact=False)


def test_another_vocabulary_than_the_weights(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 120}))
    with pytest.raises(
        ModelError, match=r"embed has shape \(97, 48\), \(120, 48\) .* vocabulary of the weights has 97"
    ):
        from_folder(folder)


def test_a_tokenizer_of_another_size_in_a_gguf_file(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, **GGUF)
    write_gguf(tmp_path / "m.gguf", model)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(tmp_path / "n.gguf", "llama")
    for field in reader.fields.values():
        if field.name.startswith("llama."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    writer.add_token_list(["a"] * 90)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="vocabulary of 97 tokens, but its tokenizer has 90"):
        from_gguf(tmp_path / "n.gguf")


def test_unknown_tensors_are_noted_or_refused(folder: Path) -> None:
    """Beside the blocks they change nothing that is computed; inside one they would."""
    change(folder, **{"vision.patch.weight": torch.zeros(3, 3)})
    assert from_folder(folder).notes == ("1 tensors were left aside, as vision.patch.weight",)
    change(folder, **{"model.layers.0.self_attn.sinks": torch.zeros(6)})
    with pytest.raises(ModelError, match=r"has 1 tensors .* as model\.layers\.0\.self_attn\.sinks"):
        from_folder(folder)


def test_what_is_missing_is_named(folder: Path) -> None:
    change(folder, **{"model.layers.2.self_attn.o_proj.weight": None})
    with pytest.raises(ModelError, match=r"no weight 2\.o"):
        from_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        from_folder(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="pickles"):
        from_folder(folder)


def test_a_quantised_folder_says_by_what(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(ModelError, match="quantised by 'bitsandbytes'"):
        from_folder(folder)


@pytest.mark.parametrize("scales", ["one", "rows", "blocks"])
def test_fp8_weights(folder: Path, tmp_path_factory: pytest.TempPathFactory, scales: str) -> None:
    """8-bit floats with a scale each way it is written; the numbers are those of torch's own type."""
    plain = tmp_path_factory.mktemp("plain")
    shutil.copytree(folder, plain, dirs_exist_ok=True)
    eight: dict[str, torch.Tensor] = {}
    same: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            continue
        low = (tensor * 4).to(torch.float8_e4m3fn)
        if scales == "blocks":
            scale = torch.rand(-(-tensor.shape[0] // 16), -(-tensor.shape[1] // 16)) + 0.1
            grid = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[: tensor.shape[0], : tensor.shape[1]]
        else:
            scale = torch.rand(tensor.shape[0], 1) if scales == "rows" else torch.tensor([0.25])
            grid = scale
        eight |= {name: low, name + ("_scale_inv" if scales == "blocks" else "_scale"): scale}
        same[name] = low.float() * grid
    change(folder, **eight)
    change(plain, **same)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    ids = [1, 2, 3, 4]
    found = [logits_of(make(from_folder(each), exact=True), ids) for each in (folder, plain)]
    assert np.array_equal(found[0], found[1])


def test_parts_of_unequal_size(folder: Path) -> None:
    """Their sum is right: packed side by side they would run over."""
    tensors = load_file(folder / "model.safetensors")
    gate, up = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
    rows = len(tensors[gate])
    change(folder, **{gate: tensors[gate][:-8].clone(), up: torch.cat([tensors[up], tensors[up][:8]])})
    with pytest.raises(ModelError, match=rf"weight 1\.gate_up have \[{rows - 8}, {rows + 8}\] rows") as error:
        from_folder(folder)
    assert one_line(error)


@pytest.mark.parametrize("used", [0, 6])
def test_more_experts_than_there_are(tmp_path: Path, used: int) -> None:
    save_family("mixtral", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": used}))
    with pytest.raises(ModelError, match=f"{used} of 5 experts"):
        from_folder(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("num_attention_heads", "six", "value that cannot be"),
        ("hidden_size", [48], "value that cannot be"),
        ("num_attention_heads", 0, "heads is 0; it must be at least 1"),
        ("rms_norm_eps", float("nan"), "norms add nan"),
        ("vocab_size", float("nan"), "value that cannot be"),
        ("num_hidden_layers", 2**40, "1099511627776 layers; 4096 are the most"),
        ("rope_parameters", {"rope_theta": -1.0}, "no text can be rotated"),
        ("rope_parameters", 3, "value that cannot be"),
        ("quantization_config", "gptq", "value that cannot be"),
        ("quantization_config", {"quant_method": "compressed-tensors", "format": "pack-quantized",
                                 "config_groups": {"a": {"weights": None}}}, "value that cannot be"),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [0, 128]}, "blocks of 0 x 128"),
    ],
)  # fmt: skip
def test_numbers_of_a_config_that_cannot_be(folder: Path, key: str, value: object, word: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ModelError, match=word) as error:
        from_folder(folder)
    assert one_line(error)


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, "3", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_no_object(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(ModelError, match=r"JSON|weight_map|type None") as error:
        from_folder(folder)
    assert one_line(error)


@pytest.mark.parametrize(
    "header", [b"[]", b"[" * 100_000, b'{"x": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}']
)
def test_a_header_that_is_none(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ModelError, match=r"header is|cannot take") as error:
        tensorfile.read(tmp_path / "a.safetensors")
    assert one_line(error)


@pytest.mark.parametrize("name", ["q_proj", "kv_a_proj_with_mqa"])
def test_rows_that_are_no_whole_heads(tmp_path: Path, name: str) -> None:
    save_family("deepseek_v2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    whole = f"model.layers.1.self_attn.{name}.weight"
    change(tmp_path, **{whole: tensors[whole][:7].clone()})
    with pytest.raises(ModelError, match=rf"{name}.* has 7 rows") as error:
        from_folder(tmp_path)
    assert one_line(error)


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_rope_head_dim", "v_head_dim"])
def test_latents_of_no_size(tmp_path: Path, key: str) -> None:
    save_family("deepseek_v2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for value in (0, -16):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(ModelError) as error:
            from_folder(tmp_path)
        assert one_line(error)
