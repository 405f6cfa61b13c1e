"""Adapters of other families than Llama on the native executor: fused projections, other names, other activations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig
from octavo.core.messages import Sampling
from octavo.core.models.errors import ModelError
from octavo.executors.native.executor import NativeExecutor
from tests.adapters.made import merge, save_adapter
from tests.executors.driver import Driver
from tests.executors.tiny import VOCAB
from tests.native.families import FAMILIES, save_family

TARGETS = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "qwen3": ("q_proj", "k_proj", "up_proj"),
    "gemma2": ("v_proj", "o_proj", "gate_proj", "down_proj"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "bloom": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "mixtral": ("q_proj", "v_proj", "o_proj"),
}
PROMPT = [(i * 37 + 5) % VOCAB for i in range(33)]


def native(folder: Path) -> NativeExecutor:
    config = Config(
        model=ModelConfig(path=str(folder)),
        kv=KvConfig(tokens=1024),
        executor=ExecutorConfig(mode="exact", threads=2),
    )
    return NativeExecutor.load(config)


@pytest.mark.parametrize("family", TARGETS)
def test_a_family_with_an_adapter_is_what_its_merged_weights_give(family: str, tmp_path: Path) -> None:
    """Log-probabilities within 2e-4."""
    save_family(next(name for name in FAMILIES if name.startswith(family)), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32, attn_implementation="eager")
    folder = save_adapter(tmp_path / "adapter", model, seed=4, targets=TARGETS[family])
    executor = native(tmp_path / "base")
    driver = Driver(executor)
    adapter = executor.adapters.load("one", str(folder))
    plain = driver.open(PROMPT, sampling=Sampling(temperature=0.0))
    sequence = driver.open(PROMPT, sampling=Sampling(temperature=0.0, logprobs=3), adapter=adapter)
    driver.step((plain, 33), (sequence, 20))
    driver.finish(sequence, 5)
    merge(model, folder)
    with torch.inference_mode():
        expected = model(torch.tensor([sequence.ids])).logits[0].float().log_softmax(-1)
    for i, entry in enumerate(sequence.logprobs):
        assert entry is not None
        row = expected[len(PROMPT) - 1 + i]
        assert all(abs(v - float(row[t])) < 2e-4 for t, v in zip(entry.top_ids, entry.top_logprobs, strict=True))


def test_experts_are_not_adapted(tmp_path: Path) -> None:
    save_family(next(name for name in FAMILIES if name.startswith("mixtral")), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    folder = save_adapter(tmp_path / "adapter", model, targets=("q_proj",))
    text = (folder / "adapter_model.safetensors").read_bytes()
    renamed = text.replace(b"layers.1.self_attn.q_proj", b"layers.1.mlp.experts.q_pr")
    (folder / "adapter_model.safetensors").write_bytes(renamed)
    with pytest.raises(ModelError, match=r"adapts model\.layers\.1\.mlp\.experts\.q_pr; of this model can be adapted"):
        native(tmp_path / "base").adapters.load("one", str(folder))
