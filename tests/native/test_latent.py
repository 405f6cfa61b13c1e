"""Latent attention (MLA): what it keeps of a token, that a row's bits are its own, and what it says of itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.core.config.schema import Config, ExecutorConfig, ModelConfig
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import locate
from octavo.executors.loading.families import spec_of
from octavo.executors.loading.from_folder import from_folder
from octavo.executors.models import describe
from octavo.executors.native.executor import NativeExecutor
from octavo.executors.native.library import Kind
from octavo.executors.native.program import kv_bytes
from octavo.plugins.memory.calculator import need
from octavo.plugins.memory.shape import read_shape
from tests.executors.test_loading import IDS, reference
from tests.native.families import save_family
from tests.native.net import levels, logits_of, make, step

NAME = "deepseek_v2"


@pytest.mark.parametrize("exact", [True, False])
def test_a_rows_bits_are_its_own(tmp_path: Path, exact: bool) -> None:
    """On one thread and several, in any chunks, blocks and company, beyond a segment of 256 positions."""
    save_family(NAME, tmp_path)
    checkpoint = from_folder(tmp_path)
    ids = (IDS * 8)[:500]
    for isa in levels()[1:] or levels():
        whole = logits_of(make(checkpoint, exact=exact, threads=1, isa=isa), ids)
        for threads, size, chunk in ((3, 16, 37), (2, 5, 1000)):
            found = logits_of(
                make(checkpoint, exact=exact, threads=threads, blocks=101, block_size=size, isa=isa), ids, chunk
            )
            assert np.array_equal(found, whole)
        native = make(checkpoint, exact=exact, threads=4, blocks=96, isa=isa)
        tables = [list(range(32 * s, 32 * s + 32)) for s in range(3)]
        step(native, [(ids[:499], 0, tables[0]), (ids[:300], 0, tables[1]), (ids[3:20], 0, tables[2])])
        found = step(native, [(ids[499:], 499, tables[0]), (ids[300:301], 300, tables[1])])[0]
        assert np.array_equal(found, whole[[499, 300]])


def test_fast_mode_is_near(tmp_path: Path) -> None:
    """bf16 latents; weights as they are, or in 8-bit groups with 8-bit activations."""
    expected = reference(save_family(NAME, tmp_path)).numpy()
    checkpoint = from_folder(tmp_path)
    for wanted in ("file", "w8"):
        found = logits_of(make(checkpoint, exact=False, wanted=wanted), IDS)
        p, q = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (expected, found))
        assert float((p.exp() * (p - q)).sum(-1).mean()) < 0.02


def test_what_a_token_takes(tmp_path: Path) -> None:
    """One latent and one rotated key a layer, as the calculator says too, in numbers of the size that KV has."""
    save_family(NAME, tmp_path)
    spec, shape = from_folder(tmp_path).spec, read_shape(locate(str(tmp_path)))
    assert shape.sharing == "MLA"
    assert kv_bytes(spec, Kind.BF16) == 4 * (32 + 16) * 2 == need(shape, context=64, concurrency=1).per_token
    assert kv_bytes(spec, Kind.F32) == 4 * (32 + 16) * 4
    with pytest.raises(ModelError, match="no 8-bit KV"):
        kv_bytes(spec, Kind.I8)
    config = Config(model=ModelConfig(path=str(tmp_path)), executor=ExecutorConfig(kv="int8"))
    with pytest.raises(ModelError, match="no 8-bit KV"):
        NativeExecutor.load(config)


def test_models_says_what_it_is(tmp_path: Path) -> None:
    save_family(NAME, tmp_path)
    found = describe(str(tmp_path))
    assert "6 heads over latents of 32 + 16 numbers a token" in found.what
    assert "3 of 8 experts beside a shared one after 1 dense layers" in found.what
    assert "yarn by 4 of 16 dimensions" in found.rotation
    assert found.runs.keys() == {"native"}
    assert found.refused["cpu"] == "it does not have latent attention (MLA)"


def test_the_lite_models_config(tmp_path: Path) -> None:
    """Shapes of DeepSeek-V2-Lite as its config.json has them."""
    config = {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "max_position_embeddings": 163840,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "topk_method": "greedy", "scoring_func": "softmax", "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "rope_theta": 10000,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                         "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
    }  # fmt: skip
    spec = spec_of(config, tmp_path)
    assert (spec.context, spec.rope.scale, spec.rope.dims) == (163840, 1.0, 64)
    assert spec.score_scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * np.log(40) + 1) ** 2)
    assert kv_bytes(spec, Kind.BF16) == 27 * 576 * 2
    for change, word in (
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; known is 'softmax'"),
        ({"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ({"kv_lora_rank": 500}, "latents, rotated keys and values of 500 numbers"),
    ):
        with pytest.raises(ModelError, match=word):
            spec_of(config | change, tmp_path)
