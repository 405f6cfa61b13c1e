"""What the executor says that it holds is what the system counts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig, SchedulerConfig
from octavo.core.models.errors import ModelError
from octavo.executors.native.executor import NativeExecutor
from tests.executors.tiny import save_tiny

FILLED = """
import sys
from octavo.core.config.schema import Config, ExecutorConfig, KvConfig
from octavo.core.memory import process_memory
from octavo.executors.native.executor import NativeExecutor
from octavo.executors.native.ledger import weights_bytes
from octavo.executors.native.library import int32s
from octavo.executors.native.program import Inputs, Native
from octavo.core.models.locate import locate
from octavo.executors.loading.files import open_checkpoint

open_checkpoint(locate("default"))  # what reading a file leaves behind is no part of the ledger
before = process_memory().anonymous
make_ready = Native.ready

def ready(model, tokens):
    print(weights_bytes(model.weights), process_memory().anonymous - before)
    make_ready(model, tokens)

Native.ready = ready
executor = NativeExecutor.load(Config(kv=KvConfig(tokens=16384), executor=ExecutorConfig(kv=sys.argv[1])))
facts = executor.facts
none, at_first = int32s([]), process_memory().anonymous
few = int32s(range(37)), int32s(range(37)), int32s([0] * 37), int32s([0, 1, 2]), int32s([0, 3])
executor.model.step(Inputs(*few, int32s([36]), int32s([-1]), none, none))
print(process_memory().anonymous - at_first)
ids = int32s(range(512))
table = int32s(range(facts.total_blocks))
places = ids, int32s([0] * 512), table, int32s([0, len(table)])
executor.model.step(Inputs(ids, *places, int32s([511]), int32s([-1]), none, none))
copies = int32s([i % 32 for i in range(32, facts.total_blocks)]), int32s(range(32, facts.total_blocks))
executor.model.step(Inputs(int32s([1]), int32s([0]), int32s([0]), int32s([0]), int32s([0, 1]), none, none, *copies))
held = facts.weights_bytes + facts.workspace_bytes + facts.total_blocks * facts.block_bytes
print(held, process_memory().anonymous - before)
"""


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_the_ledger_is_what_the_system_counts(kv: str) -> None:
    """Of the default model: its weights, and with every block of the pool and row of the workspace written. A first
    request finds there what it needs, as the system takes its time to give memory."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", FILLED, kv], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded, first, filled = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    for held, counted in (loaded, filled):
        assert held == pytest.approx(counted, rel=0.05), done.stdout
    assert first[0] < 4 << 20  # beside some 60 MB


def test_a_step_needs_no_more_than_the_pool_has_room_for() -> None:
    def loaded(budget: int) -> int:
        config = Config(kv=KvConfig(tokens=1024), scheduler=SchedulerConfig(chunk_budget=budget))
        return NativeExecutor.load(config).facts.workspace_bytes

    assert loaded(256) < loaded(1024) == loaded(1_000_000)


def test_how_kv_is_kept_is_a_choice_but_not_in_exact_mode(tmp_path: object) -> None:
    save_tiny(tmp_path)  # type: ignore[arg-type]

    def load(**executor: object) -> NativeExecutor:
        settings = ExecutorConfig(threads=1, **executor)  # type: ignore[arg-type]
        return NativeExecutor.load(
            Config(model=ModelConfig(path=str(tmp_path)), kv=KvConfig(tokens=64), executor=settings)
        )

    plain, small = load(), load(kv="int8")
    assert small.facts.block_bytes < plain.facts.block_bytes < load(kv="fp32").facts.block_bytes
    assert small.facts.cache_seed != plain.facts.cache_seed
    assert "KV int8" in small.facts.executor
    with pytest.raises(ModelError, match=r'executor.kv = "int8" is not exact'):
        load(mode="exact", kv="int8")
