"""A Llama so small that it runs in a blink, with random weights: big enough that tokens differ from one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCAB = 97


def tiny_config(**changes: Any) -> LlamaConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return LlamaConfig(**(settings | changes))


def save(model: PreTrainedModel, folder: Path, **how: Any) -> PreTrainedModel:
    """Give `model` random weights that matter and save it as a folder."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 if "norm" in name else 0.2
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + ("norm" in name))
    model.save_pretrained(folder, **how)
    model.train(False)
    return model


def save_tiny(folder: Path, **changes: Any) -> PreTrainedModel:
    return save(LlamaForCausalLM(tiny_config(**changes)), folder)
