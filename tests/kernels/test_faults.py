"""Every fault of `faults.py` makes a check fail, in some order of execution, that the kernels as they are pass."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo.kernels.cuda.emulator import Emulator
from octavo.kernels.cuda.launch import DECODE_ROWS, PREFILL_ROWS, Kernels
from octavo.kernels.cuda.sources import HERE
from tests.kernels import test_attention, test_pool, test_rows
from tests.kernels.bench import DECODES, PREFILLS, Case, run
from tests.kernels.conftest import THREADS, bulk_in
from tests.kernels.faults import FAULTS, Fault

LONG = Case(((1, 300), (2, 77)))
"""Each warp's ring goes round more than once."""


def attention(case: Case, rows: int) -> Callable[[Kernels], None]:
    return lambda kernels: test_attention.close(*run(kernels, case, rows))


def sampler(kernels: Kernels) -> None:
    for kind in test_rows.KINDS:
        test_rows.test_tokens_are_those_of_the_executors_sampler(lambda _: kernels, kind, 0)


CHECKS: dict[str, Callable[[Kernels], None]] = {
    "decode": attention(LONG, DECODE_ROWS),
    "prefill": attention(PREFILLS["gqa"], PREFILL_ROWS),
    "window": attention(replace(LONG, window=40), DECODE_ROWS),
    "fp8": attention(DECODES["fp8"], DECODE_ROWS),
    "split": attention(DECODES["split"], DECODE_ROWS),
    "append": lambda kernels: test_pool.append(lambda _: kernels, LONG.spec, False, 64, False, 0),
    "norm": lambda kernels: test_rows.test_add_rmsnorm(lambda _: kernels, torch.float32, 0),
    "sample": sampler,
}


def check(name: str, folder: Path, order: int) -> None:
    emulator = Emulator(order, bulk=bulk_in(order), folder=folder)
    torch.manual_seed(0)
    CHECKS[name](Kernels(emulator, torch.device("cpu"), threads=THREADS, sampling_threads=THREADS))


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


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_seen(tmp_path: Path, fault: Fault) -> None:
    for source in HERE.iterdir():
        if source.suffix in (".cu", ".cuh", ".h"):
            (tmp_path / source.name).write_bytes(source.read_bytes())
    text = (tmp_path / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.text) == 1, f"{fault.file} no longer has, just once: {fault.text}"
    (tmp_path / fault.file).write_text(text.replace(fault.text, fault.fault), encoding="utf-8")
    assert not all(passes(fault.check, tmp_path, order) for order in fault.orders)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("order", [0, 3])
def test_without_a_fault_every_check_passes(name: str, order: int) -> None:
    assert passes(name, HERE, order)
