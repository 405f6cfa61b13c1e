"""What a model would take, against figures worked out by hand from the models' own descriptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.models.default import default_model
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import locate
from octavo.plugins.memory.calculator import kept, need, parse_size
from octavo.plugins.memory.command import command, kinds
from octavo.plugins.memory.shape import Layer, from_config, read_shape

GIB = 2**30

MODELS: dict[str, tuple[dict[str, Any], str, int]] = {
    "MHA, gpt2": ({"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257}, "MHA", 12 * 2 * 768 * 2),
    "GQA, llama 3 8B": (
        {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
         "intermediate_size": 14336, "vocab_size": 128256},
        "GQA",
        131072,
    ),
    "MQA, falcon 7b": (
        {"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True},
        "MQA",
        32 * 2 * 64 * 2,
    ),
    "MLA, deepseek v2 lite": (
        {"num_hidden_layers": 27, "num_attention_heads": 16, "hidden_size": 2048, "kv_lora_rank": 512,
         "qk_rope_head_dim": 64},
        "MLA",
        27 * (512 + 64) * 2,
    ),
    "half of the layers have a window, gemma 2": (
        {"model_type": "gemma2", "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
         "head_dim": 256, "hidden_size": 2304, "sliding_window": 4096},
        "GQA",
        26 * 2 * 4 * 256 * 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_bytes_per_token_are_those_of_the_models_config(name: str) -> None:
    config, sharing, per_token = MODELS[name]
    shape = from_config(name, config)
    assert shape.sharing == sharing
    assert need(shape, context=16, concurrency=1).per_token == per_token
    rotary = sum(layer.rotary for layer in shape.layers)  # these stay in 16 bits
    assert (rotary > 0) == (sharing == "MLA")
    assert need(shape, context=16, concurrency=1, dtype="fp8").per_token == per_token / 2 + rotary


def test_an_estimate_of_the_weights_is_near_the_truth() -> None:
    shape = from_config("llama 3 8B", MODELS["GQA, llama 3 8B"][0])
    assert not shape.counted
    assert shape.parameters == pytest.approx(8.03e9, rel=0.01)


def test_a_window_bounds_what_a_sequence_takes() -> None:
    shape = from_config("gemma", MODELS["half of the layers have a window, gemma 2"][0])
    assert [layer.window for layer in shape.layers] == [4096, None] * 13
    assert kinds(shape) == "layers: 13 with a window of 4096 and 13 full, GQA"
    short, long = (need(shape, context=context, concurrency=1).per_sequence for context in (4096, 65536))
    values = 2 * 4 * 256 * 2
    assert short == 26 * 4096 * values
    assert long == 13 * (65536 + 4096 + 16) * values


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 8}, [None] * 4),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, [None, None, None, 8]),
        ({"sliding_window": 8}, [8] * 4),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}, [8, None] * 2),
        ({"sliding_window": None}, [None] * 4),
    ],
)
def test_which_layers_have_a_window_is_as_the_config_says(more: dict[str, Any], windows: list[int | None]) -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 8, **more}
    assert [layer.window for layer in from_config("m", config).layers] == windows


def test_linear_layers_keep_no_tokens() -> None:
    kindred = ["linear_attention", "full_attention"]
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "layer_types": kindred}
    assert from_config("m", config).layers == (Layer("state", 0), Layer("full", 16))


def test_what_fits_is_what_is_left_beside_the_weights() -> None:
    shape = from_config("llama 3 8B", MODELS["GQA, llama 3 8B"][0])
    found = need(shape, context=32768, concurrency=64, memory=24 * GIB)
    left = 24 * GIB - shape.weights
    assert found.fits_tokens == left // 131072
    assert found.fits_sequences == left // (32768 * 131072)
    assert found.total == shape.weights + 64 * 32768 * 131072
    assert need(shape, context=1, concurrency=1, memory=GIB).fits_tokens == 0


@given(st.integers(1, 5000), st.sampled_from((1, 4, 16, 256)), st.one_of(st.none(), st.integers(1, 5000)))
def test_a_layer_has_room_for_its_tokens_and_wastes_less_than_two_blocks(
    context: int, block: int, window: int | None
) -> None:
    room = kept(Layer("full", 1, window), context, block)
    used = context if window is None else min(context, window)
    assert used <= room < used + 2 * block
    assert room % block == 0


@pytest.mark.parametrize(("text", "size"), [("32k", 32768), ("24GiB", 24 * GIB), ("1000", 1000), ("1.5 MB", 1572864)])
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_gguf_file_is_counted_without_loading_it() -> None:
    shape = read_shape(locate("default"))
    assert (len(shape.layers), shape.sharing, shape.counted) == (30, "GQA", True)
    assert shape.parameters == pytest.approx(134.5e6, rel=0.01)
    assert shape.weights < default_model().stat().st_size
    assert need(shape, context=8192, concurrency=1).per_token == 30 * 2 * 3 * 64 * 2


def test_a_folder_is_counted_from_its_headers(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F16", "shape": [3, 5], "data_offsets": [0, 30]}, "__metadata__": {}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(30))
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 4, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(locate(str(tmp_path)))
    assert (shape.weights, shape.parameters, shape.context) == (30, 15, 64)


def test_the_command_tells_all_of_it_and_refuses_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(model="default", context="32k", concurrency=64, available="24GiB") == 0
    told = " ".join(capsys.readouterr().out.split())
    for part in ("30 layers, GQA", "22.5 KiB", "720.0 MiB", "45.0 GiB", "64 sequences", "made for 8192 tokens"):
        assert part in told
    assert command(model="default", dtype="fp7") == 2
    assert command(model="default", context="long") == 2
    assert "32k" in capsys.readouterr().err
    with pytest.raises(ModelError, match="ghost"):
        command(model="ghost")
