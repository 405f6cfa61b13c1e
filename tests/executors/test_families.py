"""The executor `cpu` beyond Llama: layer norms, learned positions, slopes, other MLPs, against transformers in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig
from octavo.core.messages import Sampling
from octavo.executors.cpu.executor import CpuExecutor
from octavo.executors.cpu.layout import PoolShape, Span
from octavo.executors.cpu.llama import KvPool, Llama
from octavo.executors.loading.files import plain
from octavo.executors.loading.from_folder import from_folder
from tests.executors.driver import Driver
from tests.executors.test_loading import IDS, PLAIN, reference
from tests.native.families import FAMILIES, save_family

_BEGINS = ("bloom", "falcon", "gpt", "mpt", "opt", "phi", "seed_oss", "smollm3", "stablelm")
SERVED = [name for name in FAMILIES if (name.startswith(_BEGINS) and "phi3" not in name) or name == "gemma"]


@pytest.mark.parametrize("name", SERVED)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """In one chunk and in pieces, beside another sequence, from its blocks."""
    expected = reference(save_family(name, tmp_path))
    llama = Llama(plain(from_folder(tmp_path)), PLAIN)
    shape = PoolShape(120, 3, llama.spec.kv_heads, llama.spec.head_dim)
    mine, theirs = list(range(60))[::-1], list(range(60, 120))
    passes = [
        [Span(IDS[:70], 0, mine), Span(IDS[:11], 0, theirs)],
        [Span(IDS[70:71], 70, mine), Span(IDS[60:90], 60, mine[:20] + theirs)],
        [Span(IDS[71:], 71, mine)],
    ]
    pool = KvPool(shape, llama.spec.layers)
    with torch.inference_mode():
        made = [llama.logits(llama.hidden(llama.layout(spans, shape), pool)) for spans in passes]
    largest = float(expected.abs().max())
    apart = torch.cat([made[0][:70], made[1][:1], made[2]]) - expected
    assert float(apart.abs().max()) < 2e-4 * max(1.0, largest / 10)
    assert float((made[1][1:] - expected[60:90]).abs().max()) < 2e-4 * max(1.0, largest / 10)


@pytest.mark.parametrize("name", ["bloom", "falcon with slopes, side by side", "gpt_neox"])
def test_company_chunks_and_warm_starts_change_no_bit(name: str, tmp_path: Path) -> None:
    save_family(name, tmp_path)
    config = Config(
        model=ModelConfig(path=str(tmp_path)),
        kv=KvConfig(tokens=1024, block_size=8),
        executor=ExecutorConfig(threads=1),
    )
    executor = CpuExecutor.load(config)
    sampling = Sampling(temperature=0.9, seed=3, logprobs=2)
    alone = Driver(executor)
    expected = alone.open(IDS[:60], sampling=sampling)
    alone.finish(expected, 4)
    driver = Driver(executor, seed=5)
    first = driver.open(IDS[:60])
    driver.finish(first, 1, 17)
    again, other = driver.open(IDS[:60], sampling=sampling, warm=first), driver.open(IDS[5:90], sampling=sampling)
    while len(again.output) < 4:
        driver.advance([other, again], 7)
    assert (again.output, again.logprobs) == (expected.output, expected.logprobs)
