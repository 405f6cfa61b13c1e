"""Every family against transformers in fp32: small random checkpoints, with chunks, blocks, batches, prefix hits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.models.errors import ModelError
from octavo.executors.loading.files import plain
from octavo.executors.loading.from_folder import from_folder
from octavo.executors.loading.rope import Rope, frequencies
from tests.executors.test_loading import IDS, reference
from tests.native.families import FAMILIES, save_family
from tests.native.net import logits_of, make, step

LARGEST_ERROR = 2e-4
"""Of logits that reach from about -10 to 10; transformers in fp32 is as far from itself in double precision."""


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_family(name, tmp_path)
    expected = reference(model).numpy()
    checkpoint = from_folder(tmp_path)
    native = make(checkpoint, exact=True, blocks=160, block_size=3)
    whole = logits_of(native, IDS)
    error = float(np.abs(whole - expected).max())
    print(f"{name}: largest difference {error:.1e} of logits up to {np.abs(expected).max():.1f}")
    assert error < LARGEST_ERROR * max(1.0, float(np.abs(expected).max()) / 10)
    assert np.array_equal(logits_of(make(checkpoint, exact=True, blocks=16), IDS, 7), whole)
    # A second sequence begins with the first one's 30 blocks, beside a third.
    table = list(range(160))[::-1][: -(-len(IDS) // 3)]
    shared = table[:30] + list(range(20))
    found = step(native, [(IDS[:11], 0, list(range(30, 34))), (IDS[90:], 90, shared)])[0]
    assert np.array_equal(found, np.concatenate([whole[:11], whole[90:]]))


def test_a_window_that_is_switched_off_is_no_window(tmp_path: Path) -> None:
    """Case H43: `use_sliding_window: false` beside a `sliding_window`."""
    save_family("qwen2, window switched off", tmp_path)
    off = from_folder(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["use_sliding_window"] is False
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"sliding_window": 20, "max_window_layers": 0, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not any(from_folder(tmp_path).spec.windows)
    (tmp_path / "config.json").write_text(json.dumps(config | {"use_sliding_window": True}))
    on = from_folder(tmp_path)
    assert set(on.spec.windows) == {20}
    slides, sees_all = (logits_of(make(each, exact=True), IDS) for each in (on, off))
    assert not np.array_equal(slides, sees_all)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 1024),
        ({"rope_type": "dynamic", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 300}, 1200),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 8.0,
          "original_max_position_embeddings": 64}, 64),
    ],
)  # fmt: skip
def test_a_scaled_rotation_says_how_far_it_reaches(tmp_path: Path, rope: dict[str, Any], limit: int) -> None:
    """Case H42."""
    save_family("mistral, full", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"head_dim": 8, "rope_parameters": {"rope_theta": 1e4} | rope})
    )
    config = json.loads((tmp_path / "config.json").read_text())
    from octavo.executors.loading.families import spec_of

    assert spec_of(config, tmp_path).context == limit
    with pytest.raises(ModelError, match="'stretchy'; known are"):
        spec_of(config | {"rope_parameters": {"rope_type": "stretchy", "rope_theta": 1e4}}, tmp_path)


@pytest.mark.parametrize("written", ["rope_parameters", "rope_scaling"])
def test_the_context_of_gemma_3_is_scaled_already(tmp_path: Path, written: str) -> None:
    from octavo.executors.loading.families import spec_of

    save_family("gemma3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    if written == "rope_parameters":
        config[written] = {"full_attention": linear, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    else:
        config = {key: value for key, value in config.items() if key != "rope_parameters"} | {written: linear}
    spec = spec_of(config, tmp_path)
    assert (spec.context, spec.rope.factor) == (512, 8.0)


def test_dynamic_frequencies_are_those_of_a_text_of_the_full_length() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=512,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    )  # fmt: skip
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=4 * 512)
    ours = frequencies(Rope(1e4, "dynamic", 4.0, original_context=512), 16)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "word"),
    [("mistral, sliding", "sliding-window"), ("qwen3", "normed queries"), ("gemma2", "sliding|soft caps|after"),
     ("gemma3", "sliding"), ("mixtral", "a mixture of experts"), ("yarn rope", "scaled angles")],
)  # fmt: skip
def test_the_torch_executors_say_what_they_lack(tmp_path: Path, name: str, word: str) -> None:
    save_family(name, tmp_path)
    with pytest.raises(ModelError, match=word):
        plain(from_folder(tmp_path))
