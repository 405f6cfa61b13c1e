"""GGUF files of several families, written as llama.cpp's converter does, and files whose matrices mix K-quants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from octavo.core.models.gguf import BLOCK_LAYOUT, GgmlType
from octavo.executors.loading.files import plain
from octavo.executors.loading.from_folder import from_folder
from octavo.executors.loading.from_gguf import from_gguf
from octavo.executors.loading.rows import Rows
from octavo.executors.native.library import Kind
from tests.executors.test_loading import IDS, logits, reference
from tests.executors.tiny import save_tiny
from tests.native.families import save_family
from tests.native.net import logits_of, make
from tests.native.test_families import LARGEST_ERROR
from tests.native.test_model import agreement

ARCHITECTURES = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "gpt_neox": "gptneox",
    "gpt2": "gpt2",
    "yarn rope": "llama",
}


def write(path: Path, architecture: str, model: PreTrainedModel) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 4 * config.hidden_size))
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", 1e-5))
    writer.add_layer_norm_eps(1e-5)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_sliding_window(config.sliding_window)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rows = tensor.numpy()
        if architecture in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
            n = heads if "q_proj" in name else config.num_key_value_heads
            rows = rows.reshape(n, 2, len(rows) // n // 2, -1).swapaxes(1, 2).reshape(rows.shape)
        if architecture == "gptneox" and "query_key_value" in name:
            rows = rows.reshape(heads, 3, head_dim, -1).swapaxes(0, 1).reshape(rows.shape)
        if architecture == "gpt2" and name.split(".")[-2] in ("c_attn", "c_proj", "c_fc") and rows.ndim == 2:
            rows = rows.T
        if architecture.startswith("gemma") and "norm" in name:
            rows = rows + 1
        writer.add_tensor(names.get_name(name, (".weight", ".bias")) or name, np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_family(name, tmp_path)
    if name == "gemma2":  # the file has no number for it: it follows from the size of a head
        model.config.query_pre_attn_scalar = 16
        model = type(model)(model.config)
        model.load_state_dict(save_family(name, tmp_path).state_dict())
        model.train(False)
    write(tmp_path / "m.gguf", ARCHITECTURES[name], model)
    expected = reference(model).numpy()
    found = logits_of(make(from_gguf(tmp_path / "m.gguf"), exact=True, blocks=16), IDS, 70)
    error = float(np.abs(found - expected).max())
    print(f"{name}: largest difference {error:.1e}")
    assert error < LARGEST_ERROR * max(1.0, float(np.abs(expected).max()) / 10)


@pytest.mark.parametrize(("name", "architecture", "context"), [("gemma3", "gemma3", 512), ("qwen2", "qwen2", 4096)])
def test_the_context_of_gemma_3_is_scaled_already(tmp_path: Path, name: str, architecture: str, context: int) -> None:
    model = save_family(name, tmp_path)
    model.config.rope_parameters = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    write(tmp_path / "m.gguf", architecture, model)
    spec = from_gguf(tmp_path / "m.gguf").spec
    assert (spec.context, spec.rope.factor) == (context, 8.0)


MIX = {"attn_v": GgmlType.Q6_K, "ffn_down": GgmlType.Q6_K, "attn_q": GgmlType.Q4_K, "attn_k": GgmlType.Q4_K}
"""As files called Q4_K_M mix them; what is not named is Q5_K."""


def write_mixed(path: Path, kinds: dict[str, GgmlType], rest: GgmlType) -> None:
    """A Llama of random K-quants."""
    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    hidden, inner, layers, heads = 256, 512, 2, 4
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)

    def matrix(name: str, rows: int, cols: int) -> None:
        kind = kinds.get(name.split(".")[-2], rest)
        columns, size = BLOCK_LAYOUT[kind]
        units = draw.integers(0, 256, (rows, cols // columns, size), dtype=np.uint8)
        scales = (draw.choice([-1, 1], (rows, cols // columns, 2)) * 2e-4).astype(np.float16).view(np.uint8)
        if kind in (GgmlType.Q6_K, GgmlType.Q3_K):
            units[..., -2:] = scales[..., :2]
        else:
            units[..., :4] = np.abs(scales.view(np.float16)).view(np.uint8)
        data = units.reshape(rows, -1)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(int(kind)))

    matrix("token_embd.weight", 97, hidden)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for i in range(layers):
        for name, rows, cols in (
            ("attn_q", hidden, hidden), ("attn_k", 128, hidden), ("attn_v", 128, hidden),
            ("attn_output", hidden, hidden), ("ffn_gate", inner, hidden), ("ffn_up", inner, hidden),
            ("ffn_down", hidden, inner),
        ):  # fmt: skip
            matrix(f"blk.{i}.{name}.weight", rows, cols)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_k_quants_side_by_side(tmp_path: Path) -> None:
    """Each matrix stays as it is stored; exact gives the logits of the dequantised weights, fast comes near."""
    write_mixed(tmp_path / "m.gguf", MIX, GgmlType.Q5_K)
    checkpoint = from_gguf(tmp_path / "m.gguf")
    expected = logits(plain(checkpoint)).numpy()
    exact = make(checkpoint, exact=True, blocks=16)
    kinds = {name: Kind(matrix.kind) for name, matrix in exact.weights.matrices.items()}
    assert kinds["0.qkv.0"] is kinds["0.qkv.1"] is Kind.K4
    assert kinds["0.qkv.2"] is kinds["1.down"] is Kind.K6
    assert kinds["embed"] is kinds["0.gate_up"] is Kind.K5
    found = logits_of(exact, IDS)
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
    fast = make(checkpoint, exact=False, blocks=16)
    whole = logits_of(fast, IDS)
    assert agreement(whole, expected)[0] < 0.02
    assert np.array_equal(logits_of(fast, IDS, 11), whole)


def test_what_the_library_lacks_becomes_8_bit_groups(tmp_path: Path) -> None:
    """In fast mode; exact mode keeps the numbers, as fp32."""
    write_mixed(tmp_path / "m.gguf", {}, GgmlType.Q3_K)
    checkpoint = from_gguf(tmp_path / "m.gguf")
    expected = logits(plain(checkpoint)).numpy()
    exact, fast = make(checkpoint, exact=True, blocks=16), make(checkpoint, exact=False, blocks=16)
    assert {Kind(matrix.kind) for matrix in exact.weights.matrices.values()} == {Kind.F32}
    assert {Kind(matrix.kind) for matrix in fast.weights.matrices.values()} == {Kind.W8}
    assert np.abs(logits_of(exact, IDS) - expected).max() < 1e-3 * np.abs(expected).max()
    assert agreement(logits_of(fast, IDS), expected)[0] < 0.02


@pytest.mark.parametrize(("wanted", "kind", "like"), [("w8", Kind.W8, "Q8_0"), ("w4", Kind.W4, "Q4_1")])
def test_any_checkpoint_becomes_groups_on_the_fly(tmp_path: Path, wanted: Any, kind: Kind, like: str) -> None:
    """No worse than llama.cpp's format of as many bits."""
    model = save_tiny(tmp_path, hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16)
    expected = reference(model).numpy()
    native = make(from_folder(tmp_path), exact=True, wanted=wanted)
    assert {Kind(matrix.kind) for matrix in native.weights.matrices.values()} == {kind}
    kl, _ = agreement(logits_of(native, IDS), expected)
    theirs = gguf.GGMLQuantizationType[like]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                rows = gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), theirs), theirs)
                parameter.copy_(torch.from_numpy(rows))
    other, _ = agreement(reference(model).numpy(), expected)
    print(f"{wanted}: KL {kl:.4f}, {like} {other:.4f}")
    assert 0 < kl < 1.1 * other


def test_rows_know_their_size() -> None:
    rows = Rows.stored(np.zeros(3 * 210, np.uint8), GgmlType.Q6_K, 3, 256)
    assert rows.slice(1, 3).floats().shape == (2, 256)
    assert torch.equal(torch.from_numpy(rows.floats()), torch.zeros(3, 256))
