"""Every fault of `faults.py` makes a check fail, in some order of execution, that the kernels as they are pass.

On each run a sample of them, another one whenever a kernel changes; all with `--kernels-all`, which writes the result.
"""

from __future__ import annotations

import faulthandler
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo.kernels.cuda.cache import digest
from octavo.kernels.cuda.emulator import Emulator
from octavo.kernels.cuda.instances import DECODE_ROWS, PREFILL_ROWS, WGMMA_ROWS
from octavo.kernels.cuda.launch import Kernels
from octavo.kernels.cuda.sources import HERE
from tests.kernels import (
    latent,
    test_attention,
    test_cascade,
    test_latent,
    test_plan,
    test_pool,
    test_rows,
    test_verify,
)
from tests.kernels.bench import DECODES, PREFILLS, WGMMAS, Case, run
from tests.kernels.conftest import bulk_in, made
from tests.kernels.faults import FAULTS, Fault
from tests.kernels.results import FOLDER, write

SAMPLE = 8
NAME = "kernel_faults.md"
LONG = Case(((1, 300), (2, 77)))
"""Each warp's ring goes round more than once."""


def attention(case: Case, rows: int) -> Callable[[Kernels], None]:
    return lambda kernels: test_attention.close(*run(kernels, case, rows))


def absorbed(name: str) -> Callable[[Kernels], None]:
    return lambda kernels: test_attention.close(*latent.run(kernels, latent.CASES[name]))


def expanding(*, fp8: bool) -> Callable[[Kernels], None]:
    def check(kernels: Kernels) -> None:
        out, want = test_latent.expanded(kernels, fp8=fp8)
        assert (out - want).abs().max() < 0.03 * want.abs().max()

    return check


def append(normed: bool, rotated: int, kv_dtype: torch.dtype = torch.bfloat16) -> Callable[[Kernels], None]:
    spec = replace(LONG, kv_dtype=kv_dtype).spec
    return lambda kernels: test_pool.append(lambda _: kernels, spec, normed, rotated, False, 0)


def gate(activation: str) -> Callable[[Kernels], None]:
    return lambda kernels: test_rows.test_gate_mul(lambda _: kernels, torch.float32, activation)


def sampler(kernels: Kernels) -> None:
    for kind in test_rows.KINDS:
        test_rows.test_tokens_are_those_of_the_executors_sampler(lambda _: kernels, kind, 0)


def planner(kernels: Kernels) -> None:
    for split, window in ((64, 90), (512, 0), (test_plan.NO_SPLIT, 90)):
        test_plan.test_with_a_fixed_split(lambda _: kernels, 0, 300, PREFILL_ROWS, split, window)


def filling(kernels: Kernels) -> None:
    for fill in (30, 64, 100, 264):
        test_plan.test_with_the_split_that_fills_the_device(lambda _: kernels, fill)


def rejection(kernels: Kernels) -> None:
    for seed in range(12):
        test_verify.reject(kernels, seed)


def blocks(kernels: Kernels) -> None:
    test_pool.test_blocks_are_copied_as_if_at_once(lambda _: kernels, 0)
    test_pool.test_blocks_go_out_and_come_back_elsewhere(lambda _: kernels, 0)


def sharing(kernels: Kernels) -> None:
    for name in test_cascade.CASES:
        shared, _, expected = test_cascade.run(kernels, name, DECODE_ROWS, PREFILL_ROWS)
        test_attention.close(shared, expected)


SINKS = replace(DECODES["sinks, split on the device"], on_device=False)
CHECKS: dict[str, Callable[[Kernels], None]] = {
    "decode": attention(LONG, DECODE_ROWS),
    "prefill": attention(PREFILLS["gqa"], PREFILL_ROWS),
    "prefill split": attention(PREFILLS["split, window, cap"], PREFILL_ROWS),
    "prefill sinks": attention(replace(PREFILLS["gqa"], sinks=True), PREFILL_ROWS),
    "window": attention(replace(LONG, window=40, soft_cap=5.0), DECODE_ROWS),
    "fp8": attention(DECODES["fp8"], DECODE_ROWS),
    "split": attention(DECODES["split"], DECODE_ROWS),
    "many parts": attention(Case(((1, 300),), split=32), DECODE_ROWS),
    "sinks": attention(DECODES["sinks"], DECODE_ROWS),
    "sinks split": attention(DECODES["sinks, split on the device"], DECODE_ROWS),
    "biased": attention(DECODES["alibi, cap"], DECODE_ROWS),
    "tree": attention(DECODES["tree"], DECODE_ROWS),
    "tree far": attention(DECODES["tree, alibi, split, window"], DECODE_ROWS),
    "wgmma": attention(Case(((40, 75),)), WGMMA_ROWS),
    "wgmma ring": attention(WGMMAS["stages go round"], WGMMA_ROWS),
    "wgmma 128": attention(WGMMAS["mqa of 3, fp16, heads of 128"], WGMMA_ROWS),
    "wgmma wide": attention(Case(((20, 90),), head_dim=256), WGMMA_ROWS),
    "wgmma tail": attention(Case(((40, 90),), head_dim=96), WGMMA_ROWS),
    "wgmma split": attention(WGMMAS["sinks, split on the device"], WGMMA_ROWS),
    "wgmma sinks": attention(Case(((40, 75),), sinks=True), WGMMA_ROWS),
    "cascade": sharing,
    "append": append(False, 64),
    "append part": append(False, 32),
    "append normed": append(True, 64),
    "append fp8": append(False, 64, torch.float8_e4m3fn),
    "copy": blocks,
    "norm": lambda kernels: test_rows.test_add_rmsnorm(lambda _: kernels, torch.float32, 0),
    "norm of little": lambda kernels: test_rows.norm(kernels, torch.float32, 1e-3),
    "gate": gate("silu"),
    "gelu": gate("gelu"),
    "gelu_tanh": gate("gelu_tanh"),
    "scores": test_rows.scores,
    "sample": sampler,
    "sick": lambda kernels: test_rows.test_a_row_that_is_not_finite_gives_no_token(lambda _: kernels),
    "plan": planner,
    "plan bounds": lambda kernels: test_plan.test_each_kernel_has_its_own_queries(lambda _: kernels),
    "plan room": lambda kernels: test_plan.test_what_there_is_no_room_for_is_counted_and_not_written(lambda _: kernels),
    "plan fill": filling,
    "latent": absorbed("many heads"),
    "latent split": absorbed("split, blocks of 32"),
    "latent tree": absorbed("trees"),
    "latent fp8": absorbed("fp8"),
    "expanded": expanding(fp8=False),
    "expanded fp8": expanding(fp8=True),
    "append latent": lambda kernels: test_latent.test_append(lambda _: kernels, False, False, 0),
    "append latent fp8": lambda kernels: test_latent.test_append(lambda _: kernels, True, False, 0),
    "verify": lambda kernels: test_verify.test_trees(lambda _: kernels, 0),
    "reject": rejection,
    "left over": test_verify.left_over,
    "guessed twice": test_verify.guessed_twice,
    "distributions": test_verify.distributions,
}


def check(name: str, folder: Path, order: int) -> None:
    torch.manual_seed(0)
    CHECKS[name](made(Emulator(order, bulk=bulk_in(order), folder=folder)))


def passes(name: str, folder: Path, order: int) -> bool:
    """In a process of its own: a broken kernel may crash or never end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            faulthandler.disable()
            signal.alarm(120)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            check(name, folder, order)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def chosen() -> list[Fault]:
    """As many as a run has time for, from as many files as can be."""
    texts = [path.read_bytes() for path in sorted(HERE.iterdir()) if path.suffix in (".cu", ".cuh")]
    mixed = random.Random(digest(texts)).sample(FAULTS, len(FAULTS))
    seen: Counter[str] = Counter()
    turns = []
    for fault in mixed:
        turns.append((seen[fault.file], fault))
        seen[fault.file] += 1
    return [fault for _, fault in sorted(turns, key=lambda turn: turn[0])][:SAMPLE]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault" in metafunc.fixturenames:
        every = metafunc.config.getoption("--kernels-all")
        metafunc.parametrize("fault", FAULTS if every else chosen(), ids=lambda fault: f"{fault.file}: {fault.name}")


SEEN: Counter[str] = Counter()


def test_a_fault_is_seen(tmp_path: Path, fault: Fault) -> None:
    for source in HERE.iterdir():
        if source.suffix in (".cu", ".cuh", ".h"):
            (tmp_path / source.name).write_bytes(source.read_bytes())
    text = (tmp_path / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.text) == 1, f"{fault.file} no longer has, just once: {fault.text}"
    (tmp_path / fault.file).write_text(text.replace(fault.text, fault.fault), encoding="utf-8")
    assert passes(fault.check, HERE, fault.orders[0]), f"{fault.check} fails without a fault"
    assert not all(passes(fault.check, tmp_path, order) for order in fault.orders)
    SEEN[fault.file] += 1


def test_every_kernel_has_ten_faults_and_each_is_planted(request: pytest.FixtureRequest) -> None:
    planted = Counter(fault.file for fault in FAULTS)
    for path in HERE.glob("*.cu*"):
        if path.name != "prims.cuh":  # its primitives have probes of their own
            assert planted[path.name] >= 10, f"{path.name} has {planted[path.name]} faults"
    if request.config.getoption("--kernels-all"):
        record({file: n for file, n in SEEN.items() if n == planted[file]})


def record(whole: dict[str, int]) -> None:
    """Of sources whose faults were all planted in this run; `-k` chooses some, and the others keep their lines."""
    rows = dict(re.findall(r"^\| `(\S+)` \| (\d+) \|$", FOLDER.joinpath(NAME).read_text("utf-8"), re.MULTILINE))
    lines = [f"| `{file}` | {n} |" for file, n in sorted((rows | whole).items())]
    write(NAME, ["| source | single-line faults planted, each seen |", "|---|---|", *lines])
