"""What fast mode may lose, held for the default model; and that it is measured right."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from octavo.core.models.errors import ModelError
from octavo.core.models.locate import locate
from octavo.core.tokenizer.vocabulary import load_vocabulary
from octavo.executors.cpu import llama
from octavo.executors.cpu.layout import PoolShape
from octavo.executors.cpu.linear import Backend, RowCounts
from octavo.executors.loading.files import in_fp32, open_checkpoint
from octavo.executors.residents import Span
from octavo.kernels.attention import paged_attention
from octavo.plugins.quality.command import measured, quality
from octavo.plugins.quality.measure import compare
from octavo.plugins.quality.texts import TEXTS


def test_a_model_is_no_distance_from_itself() -> None:
    logits = np.random.default_rng(0).normal(size=(150, 40)).astype(np.float32)
    found = compare(logits + 3, logits, list(range(40)) * 4)
    assert found.positions == 150
    assert found.kl == pytest.approx(0, abs=1e-9)
    assert found.top1 == 1
    assert found.perplexity == pytest.approx(found.reference, rel=1e-6)


def test_figures_are_those_of_their_definitions() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.2, 0.3, 0.5])
    found = compare(np.log([q, p]).astype(np.float32), np.log([p, p]).astype(np.float32), [0, 2])
    assert found.kl == pytest.approx(float((p * np.log(p / q)).sum()) / 2, rel=1e-5)
    assert found.top1 == 0.5
    assert found.perplexity == pytest.approx(1 / 0.5, rel=1e-5)
    assert found.reference == pytest.approx(1 / 0.25, rel=1e-5)


LIMITS = {"file": 0.006, "bf16": 0.001}
"""Mean KL of each text from fp32, by how weights are stored; the default model's file is Q4_1 and Q8_0."""


FP8_LIMIT = 0.012
"""The same of KV in fp8, for the text that it hurts most."""


@pytest.mark.parametrize("prompt", [False, True], ids=["generated", "prompt"])
@pytest.mark.parametrize("weights", LIMITS)
def test_fast_mode_stays_near_fp32(weights: str, prompt: bool) -> None:
    for name, found in measured("default", weights, "bf16", prompt=prompt):
        print(f"{weights} {name}: KL {found.kl:.5f}, top-1 {found.top1:.3f}")
        assert found.kl <= LIMITS[weights], name
        assert found.top1 >= 0.93, name
        assert found.perplexity == pytest.approx(found.reference, rel=0.05), name


def test_kv_in_fp8_stays_near_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CUDA executor loses by `executor.kv = fp8`, all else in fp32: KV is rounded to e4m3 and read."""
    files = locate("default")
    model, rows = in_fp32(open_checkpoint(files)), RowCounts((128,))
    decoder = llama.Llama(model, llama.Arithmetic(Backend.PLAIN, rows, rows, (16,)))
    shape = PoolShape(8, 16, model.spec.kv_heads, model.spec.head_dim)
    ids = load_vocabulary(files).encode(TEXTS["code"])[:128]

    def attended(queries: Tensor, pool: Tensor, *rest: Any) -> Tensor:
        pool.copy_(pool.clamp(-448, 448).to(torch.float8_e4m3fn).float())
        return paged_attention(queries, pool, *rest)

    def logits() -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            layout = decoder.layout([Span(ids, 0, range(8))], shape)
            hidden = decoder.hidden(layout, llama.KvPool(shape, model.spec.layers))
            made: npt.NDArray[np.float32] = decoder.logits(hidden).numpy()
        return made

    reference = logits()
    monkeypatch.setattr(llama, "paged_attention", attended)
    found = compare(logits(), reference, ids)
    print(f"KV in fp8: KL {found.kl:.5f}, top-1 {found.top1:.3f}, perplexity {found.perplexity:.3f}")
    assert 0 < found.kl <= FP8_LIMIT
    assert found.top1 >= 0.93
    assert found.perplexity == pytest.approx(found.reference, rel=0.05)


def test_the_command_prints_a_line_a_text_and_refuses_what_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match="weights file, bf16, w8, w4"):
        quality("default", weights="w2")
    with pytest.raises(ModelError, match="no weights"):
        quality("ghost")
    assert quality("default", exact=True, kv="fp32") == 0
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split()[0] for line in lines] == ["prose", "code", "chat"]
    assert {line.split()[2] for line in lines} == {"0.00000"}
