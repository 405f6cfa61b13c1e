"""The same model from a folder and from a GGUF file, and its numbers against transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from octavo.core.models.errors import ModelError
from octavo.executors.cpu.layout import PoolShape, Span
from octavo.executors.cpu.linear import Backend, RowCounts
from octavo.executors.cpu.llama import Arithmetic, KvPool, Llama
from octavo.executors.loading.alibi import slopes
from octavo.executors.loading.files import plain
from octavo.executors.loading.from_folder import from_folder
from octavo.executors.loading.from_gguf import from_gguf
from octavo.executors.loading.spec import Model
from octavo.executors.models import describe
from tests.executors.tiny import VOCAB, save, save_tiny, tiny_config
from tests.native.families import save_family

IDS = [(i * 37 + 5) % VOCAB for i in range(150)]
PLAIN = Arithmetic(Backend.PLAIN, RowCounts((32,)), RowCounts((32,)), (16,))

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one key head, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "a key head each": {"num_key_value_heads": 6},
    "own head_dim": {"head_dim": 16},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3 rope": {"rope_parameters": LLAMA3},
}


def logits(model: Model) -> torch.Tensor:
    """Of every position of IDS, computed as chunk of 100 and one of 50."""
    llama, spec = Llama(model, PLAIN), model.spec
    shape = PoolShape(len(IDS), 1, spec.kv_heads, spec.head_dim)
    pool, table = KvPool(shape, spec.layers), list(range(len(IDS)))[::-1]
    spans = [Span(IDS[:100], 0, table), Span(IDS[100:], 100, table)]
    with torch.inference_mode():
        return torch.cat([llama.logits(llama.hidden(llama.layout([span], shape), pool)) for span in spans])


def reference(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(torch.tensor([IDS])).logits[0]
        return out


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, **VARIANTS[name])
    torch.testing.assert_close(logits(plain(from_folder(tmp_path))), reference(model), atol=1e-4, rtol=0)


def test_qwen2_and_shards(tmp_path: Path) -> None:
    settings = {k: v for k, v in tiny_config().to_dict().items() if k in Qwen2Config().to_dict()}
    settings |= {"model_type": "qwen2", "architectures": None, "layer_types": None}
    model = save(Qwen2ForCausalLM(Qwen2Config(**settings)), tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    torch.testing.assert_close(logits(plain(from_folder(tmp_path))), reference(model), atol=1e-4, rtol=0)


def write_gguf(path: Path, model: PreTrainedModel, factors: list[float] | None = None) -> None:
    """As llama.cpp's converter does: q and k rows interleaved, matrices quantised to Q8_0."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        rows = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads is not None:
            rows = rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)
        if rows.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(
                names.get_name(name, (".weight",)) or name, gguf.quants.quantize(rows, kind), raw_dtype=kind
            )
        else:
            writer.add_tensor(names.get_name(name, (".weight",)) or name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_equals_the_folder_it_was_made_from(tmp_path: Path) -> None:
    changes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    model = save_tiny(tmp_path, **changes)
    kind = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():  # quantise the folder's weights too, so that both hold the same numbers
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(
                    torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), kind), kind))
                )
    model.save_pretrained(tmp_path)
    write_gguf(tmp_path / "model.gguf", model)
    ours, theirs = plain(from_gguf(tmp_path / "model.gguf")), plain(from_folder(tmp_path))
    assert ours.weights.keys() == theirs.weights.keys()
    assert all(torch.equal(ours.weights[name], theirs.weights[name]) for name in ours.weights)
    assert torch.equal(logits(ours), logits(theirs))
    torch.testing.assert_close(logits(ours), reference(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "tanh"}, "activation 'tanh'; known are"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "wide", "rope_theta": 1e4}}, "'wide'"),
        ({"num_key_value_heads": 4}, "evenly"),
        ({"intermediate_size": 81}, "gate_up"),
        ({"num_hidden_layers": 4}, "no weight 3.qkv"),
        ({"vocab_size": 100}, "the vocabulary of the weights has 97 tokens"),
        ({"num_hidden_layers": 2}, "model.layers.2"),
    ],
)
def test_what_cannot_be_run_is_refused(tiny_folder: Path, tmp_path: Path, change: dict[str, Any], word: str) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    (tmp_path / "model.safetensors").symlink_to(tiny_folder / "model.safetensors")
    with pytest.raises(ModelError, match=word):
        plain(from_folder(tmp_path))


@pytest.mark.parametrize("heads", [1, 8, 12, 71])
def test_slopes_are_those_of_both_papers_codes(heads: int) -> None:
    """BLOOM's and MPT's, which come to the same."""
    made = torch.tensor(slopes(heads))
    torch.testing.assert_close(made, _get_alibi_slopes(heads, torch.device("cpu")))
    for greatest in (8, 16):
        theirs = build_mpt_alibi_tensor(heads, 6, alibi_bias_max=greatest)  # type: ignore[no-untyped-call]
        torch.testing.assert_close(torch.tensor(slopes(heads, greatest)) * -5, theirs[:, 0, 0])


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "BLOOM model's apply_residual"),
        ("bloom", {"n_layer": 1}, r"as transformer\.h\.1"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "MPT model's qk_ln is True; known is False"),
        ("mpt", {"attn_config": {"alibi": False}}, "MPT model's alibi is False"),
        ("mpt", {"attn_config": {"rope": True}}, "MPT model's rope is True"),
        ("mpt", {"attn_config": {"sliding_window_size": 16}}, "MPT model's sliding_window_size is 16; known is -1"),
        ("mpt", {"attn_config": {"clip_qkv": -3}}, r"cannot be kept within -3\.0"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type is 'rmsnorm'; known is 'low_precision_layernorm' or 'layernorm'"),
        ("mpt", {"ffn_config": {"ffn_act_fn": {"name": "relu"}}}, "MPT model's ffn_act_fn is"),
        ("mpt", {"n_layers": 2}, r"as transformer\.blocks\.2"),
        ("bloom", {"n_head": 10**9}, "1000000000 heads; 4096 are the most"),
        ("falcon with slopes", {"multi_query": True}, "qkv has shape"),
    ],
)
def test_families_with_alibi_are_read_or_refused(tmp_path: Path, name: str, change: dict[str, Any], word: str) -> None:
    save_family(name, tmp_path)
    assert from_folder(tmp_path).spec.slopes
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=word):
        from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "lost", "word"),
    [
        ("bloom", "transformer.h.1.input_layernorm.bias", r"a bias for norm but not for 1\.attn_norm"),
        ("bloom", "transformer.h.0.self_attention.dense.bias", r"a bias for 1\.o but not for 0\.o"),
        ("falcon with slopes", "transformer.ln_f.bias", r"a bias for 0\.attn_norm but not for norm"),
        ("llama3 rope", "lm_head.weight", "has no head, and its config.json says"),
    ],
)
def test_what_is_missing_is_not_taken_for_nothing(tmp_path: Path, name: str, lost: str, word: str) -> None:
    save_family(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=word):
        from_folder(tmp_path)


def test_a_model_without_positions_says_what_it_has_instead(tmp_path: Path) -> None:
    save_family("bloom", tmp_path, hidden_size=96)
    said = describe(str(tmp_path))
    assert (set(said.runs), said.refused) == ({"native", "cpu", "cuda"}, {})
    assert said.rotation == "none: slopes (ALiBi)"
