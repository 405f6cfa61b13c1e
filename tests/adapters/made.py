"""Small random adapters as PEFT saves them, and the same merged into a model's weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.executors.loading.spec import Spec

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "fan_in_fan_out": False}


def adapted(model: PreTrainedModel, targets: Iterable[str]) -> dict[str, nn.Module]:
    """The modules of these short names, by full name."""
    wanted = tuple(targets)
    return {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in wanted}


def save_adapter(
    folder: Path, model: PreTrainedModel, *, seed: int = 0, targets: Iterable[str] = LINEARS, **changes: Any
) -> Path:
    """A folder with random A and B for each target; `changes` go into its config, `rank_pattern` into its tensors."""
    config = CONFIG | {"target_modules": sorted(targets)} | changes
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, module in adapted(model, targets).items():
        rank = config.get("rank_pattern", {}).get(name.rpartition(".")[2], config["r"])
        rows, cols = _shape(module)
        for side, shape in (("A", (rank, cols)), ("B", (rows, rank))):
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = torch.randn(shape, generator=generator) * 0.15
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Add the adapter to the model's own weights, in fp32."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name in {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in tensors}:
            down, up = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
            short = name.rpartition(".")[2]
            alpha = config.get("alpha_pattern", {}).get(short, config["lora_alpha"])
            scale = alpha / (math.sqrt(len(down)) if config.get("use_rslora") else len(down))
            more, weight = scale * up @ down, modules[name].weight
            assert isinstance(weight, Tensor)
            weight += more if isinstance(modules[name], nn.Linear) else more.T
    return model


def _shape(module: nn.Module) -> tuple[int, int]:
    """[outputs, inputs]."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    rows, cols = weight.shape
    return (rows, cols) if isinstance(module, nn.Linear) else (cols, rows)


def save_for(folder: Path, spec: Spec, seed: int, rank: int = 8) -> Path:
    """For a Llama that is not a library's model (a GGUF, say): on all of its attention."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "q_proj": (spec.heads * spec.head_dim, spec.hidden),
        "k_proj": (spec.kv_heads * spec.head_dim, spec.hidden),
        "v_proj": (spec.kv_heads * spec.head_dim, spec.hidden),
        "o_proj": (spec.hidden, spec.heads * spec.head_dim),
    }
    tensors: dict[str, Tensor] = {}
    for i in range(spec.layers):
        for name, (rows, cols) in shapes.items():
            for side, shape in (("A", (rank, cols)), ("B", (rows, rank))):
                key = f"base_model.model.model.layers.{i}.self_attn.{name}.lora_{side}.weight"
                tensors[key] = (torch.randn(shape, generator=generator) * 0.06).bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {"r": rank, "lora_alpha": 64, "target_modules": sorted(shapes)}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
