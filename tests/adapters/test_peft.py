"""What is read of an adapter's folder, and what each bad one is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.core.models.errors import ModelError
from octavo.core.models.locate import locate
from octavo.executors.adapters import Adapters
from octavo.executors.loading.files import open_checkpoint
from octavo.executors.loading.peft import Lora, read
from octavo.executors.loading.spec import Spec
from tests.adapters.conftest import Made


@pytest.fixture(scope="module")
def spec(made: Made) -> Spec:
    return open_checkpoint(locate(str(made.base))).spec


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Path:
    """Of `red`, to be spoilt."""
    return Path(shutil.copytree(made.red, tmp_path / "copy"))


def change(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def retensor(folder: Path, **changes: torch.Tensor | None) -> None:
    """Set tensors by their short names (`0.q_proj.A`), or take them out."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for short, value in changes.items():
        layer, module, side = short.split("__")
        parent = "self_attn" if module in ("q_proj", "o_proj") else "mlp"
        name = f"base_model.model.model.layers.{layer.removeprefix('l')}.{parent}.{module}.lora_{side}.weight"
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path)


def digest(lora: Lora) -> str:
    return lora.digest.hex()


def test_content_is_what_counts(made: Made, spec: Spec, copy: Path) -> None:
    """Not the folder, not what its config says beside the scales; but each number, and each scale."""
    original = read(made.red, spec)
    assert digest(read(made.twin, spec)) == digest(original)
    change(copy, base_model_name_or_path="elsewhere", inference_mode=True, lora_dropout=0.3)
    assert digest(read(copy, spec)) == digest(original)
    change(copy, lora_alpha=9)
    other_scale = digest(read(copy, spec))
    change(copy, lora_alpha=8)
    retensor(copy, l0__q_proj__A=torch.ones(7, 48))
    assert len({digest(original), other_scale, digest(read(copy, spec)), digest(read(made.blue, spec))}) == 4


def test_it_says_what_it_is(made: Made, spec: Spec) -> None:
    assert read(made.blue, spec).about == "a LoRA adapter of rank 16, on q_proj, v_proj"
    assert read(made.red, spec).about.startswith("a LoRA adapter of ranks 4 to 7, on down_proj, gate_proj, ")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "has DoRA, which is not served"),
    "modules": ({"modules_to_save": ["lm_head"]}, "has modules of its own (modules_to_save), which is not served"),
    "bias": ({"bias": "all"}, "trains biases (bias = 'all'); 'none' is served"),
    "kind": ({"peft_type": "IA3"}, "is an adapter of type 'IA3'; LORA is served"),
    "start": ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa', which changes the base's own weights"),
    "rank": ({"r": 5}, "has A of shape (4, 80) and B of (48, 4); with rank 5 this model wants (5, 80) and (48, 5)"),
    "no rank": (
        {"r": "many"},
        "has rank 'many' and lora_alpha 3 for model.layers.0.mlp.down_proj; numbers are expected",
    ),
    "many ranks": ({"r": 10**400}, "numbers are expected"),
    "much alpha": ({"lora_alpha": 10**400}, "numbers are expected"),
    "patterns": ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is ['q_proj']; an object of patterns is expected"),
    "pattern": ({"rank_pattern": {"q_proj(": 7}}, "rank_pattern has the pattern 'q_proj('"),
    "alora": ({"alora_invocation_tokens": [1, 2]}, "has activated LoRA, which is not served"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_config_that_is_not_served_is_told_in_a_line(copy: Path, spec: Spec, name: str) -> None:
    changes, message = BAD[name]
    change(copy, **changes)
    with pytest.raises(ModelError) as caught:
        read(copy, spec)
    assert message in str(caught.value)
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)


def told(folder: Path, spec: Spec) -> str:
    with pytest.raises(ModelError) as caught:
        read(folder, spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bad_tensors_are_named(copy: Path, spec: Spec) -> None:
    retensor(copy, l1__q_proj__B=None)
    assert "model.layers.1.self_attn.q_proj has lora_A alone" in told(copy, spec)
    retensor(copy, l1__q_proj__B=torch.full((48, 7), torch.nan))
    assert "q_proj.lora_B.weight has numbers that are not finite" in told(copy, spec)
    retensor(copy, l1__q_proj__B=torch.full((48, 7), 3e38))
    assert "model.layers.1.self_attn.q_proj times its scale" in told(copy, spec)
    retensor(copy, l1__q_proj__B=torch.ones(47, 7))
    assert "wants (7, 48) and (48, 7)" in told(copy, spec)


def test_what_cannot_be_adapted_is_named(copy: Path, spec: Spec) -> None:
    path = copy / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 48)}, path)
    assert f"{copy} adapts lm_head; of this model can be adapted: down_proj, gate_proj, " in told(copy, spec)
    save_file(tensors | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 97)}, path)
    assert "embed_tokens.lora_embedding_A is of no LoRA that is served" in told(copy, spec)


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "/a\0b", "x" * 5000])
def test_what_can_be_no_path_is_told_in_a_line(path: str, spec: Spec) -> None:
    """The executor that is asked to read it goes on."""
    held = Adapters(lambda folder: read(folder, spec), lambda lora: lora)
    with pytest.raises(ModelError, match=r"^[^\n]+$"):
        held.load("odd", path)


def test_files_that_are_missing_or_cut(copy: Path, spec: Spec, tmp_path: Path) -> None:
    path = copy / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "cut short" in told(copy, spec)
    path.rename(copy / "adapter_model.bin")
    assert "adapter_model.bin is a pickle" in told(copy, spec)
    assert f"{tmp_path} is no LoRA adapter: there is no adapter_config.json" in told(tmp_path, spec)
    (copy / "adapter_config.json").write_text("{")
    assert "is not JSON" in told(copy, spec)
