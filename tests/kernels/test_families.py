"""Every family on the CUDA executor's forward pass, with the emulator for a GPU, against transformers in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.config.schema import Config, ModelConfig
from octavo.core.models.errors import ModelError
from octavo.executors.cuda.decoder import Decoder
from octavo.executors.cuda.emulated import again
from octavo.executors.cuda.executor import CudaExecutor
from octavo.executors.cuda.forward import Forward
from octavo.executors.loading.files import in_fp32
from octavo.executors.loading.from_folder import from_folder
from octavo.executors.residents import Span
from tests.executors.tiny import VOCAB
from tests.kernels.conftest import Maker
from tests.native.families import FAMILIES, save_family

IDS = [(i * 37 + 5) % VOCAB for i in range(52)]
SIZES = {
    "hidden_size": 128, "n_embd": 128, "num_attention_heads": 2, "n_head": 2, "num_key_value_heads": 1, "head_dim": 64,
}  # fmt: skip
"""Heads of 64, for which the emulator has its kernels."""
ROUNDING = 2.5
"""How many times as far from transformers in fp32 as transformers itself in fp16."""


def spans(first: int, last: int, table: list[int]) -> list[Span]:
    return [Span(IDS[first:last], first, table)]


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith("deepseek")])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, resident_kernels: Maker) -> None:
    model = save_family(name, tmp_path, **SIZES)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
        rounded = torch.nn.Module.to(model, torch.float16)(torch.tensor([IDS])).logits[0].float()
    theirs = float((rounded - expected).square().mean().sqrt())
    loaded, table = in_fp32(from_folder(tmp_path)), [5, 1, 3, 0]
    for exact in (False, True)[: 1 + (loaded.spec.experts is not None)]:  # experts are computed in two ways
        decoder = Decoder(loaded, resident_kernels(exact), torch.float16, 16, exact=exact)
        decoder.allocate(6)
        forward = Forward(decoder, again)
        with torch.inference_mode():
            passes = [(0, 33), (33, 50), *((i, i + 1) for i in range(50, len(IDS)))]  # chunks, then recorded decodes
            made = [(forward.run(spans(first, last, table)), last - first) for first, last in passes[:2]]
            logits = [forward.logits(one, list(range(n))).clone() for one, n in made]
            logits += [forward.logits(forward.run(spans(a, b, table)), [0]).clone() for a, b in passes[2:]]
        error = float((torch.cat(logits) - expected).square().mean().sqrt())
        print(f"{name}{', exact' if exact else ''}: off by {error:.1e}, transformers in fp16 by {theirs:.1e}")
        assert error < ROUNDING * theirs


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "gpt_neox"])
def test_in_exact_mode_company_and_chunks_change_no_bit(name: str, tmp_path: Path, resident_kernels: Maker) -> None:
    save_family(name, tmp_path, **SIZES)
    loaded = in_fp32(from_folder(tmp_path))

    def computed(passes: list[list[Span]], rows: list[int]) -> torch.Tensor:
        decoder = Decoder(loaded, resident_kernels(0), torch.float16, 16, exact=True)
        decoder.allocate(8)
        forward = Forward(decoder)
        with torch.inference_mode():
            made = [forward.run(each) for each in passes]
            return forward.logits(made[-1], rows)

    alone = computed([spans(0, 40, [0, 1, 2])], [39])
    other = Span(IDS[10:40], 0, [3, 4])
    crowd = computed([spans(0, 17, [7, 5, 6]), [other, *spans(17, 40, [7, 5, 6])]], [52])
    assert torch.equal(alone, crowd)


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    save_family("deepseek_v2", tmp_path)
    nothing: Any = None
    with pytest.raises(ModelError, match=r"latent attention \(MLA\).* executor.kind = \"native\""):
        CudaExecutor.on(nothing, Config(model=ModelConfig(path=str(tmp_path))), torch.float16, nothing)
