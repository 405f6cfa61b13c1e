"""What warps of sm_90a do together, on the emulator: exact products, and that each thing that is left out is seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.kernels.cuda.emulator import Emulator, EmulatorError
from octavo.kernels.cuda.library import Argument
from tests.kernels.test_emulator import probe

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
ROUNDS = 7
RING_SHARED = 2 * 1024 + 4 * 8
ORDERS = (0, 1, 2, 3)


def operands(kind: str, columns: int) -> list[Tensor]:
    """Of `probe_products`: a, b, v, and room for both results. Small whole numbers: the order of sums does not show."""
    generator = torch.Generator().manual_seed(columns)
    shapes = ((64, 128), (columns, 128), (64, columns))
    numbers = [torch.randint(-4, 5, shape, generator=generator).to(DTYPES[kind]) for shape in shapes]
    return [*numbers, torch.zeros(64, columns), torch.zeros(64, columns)]


def products_shared(columns: int) -> int:
    return 2 * 64 * 128 + 2 * columns * 128 + 64 * columns * 2


def multiplied(probes: Emulator, kind: str, columns: int, omitted: int, order: int) -> bool:
    """Did both products come out right? Raises `EmulatorError` for what the emulator names."""
    a, b, v, scores, mixed = tensors = operands(kind, columns)
    args: tuple[Argument, ...] = (*(tensor.data_ptr() for tensor in tensors), np.int32(omitted))
    launch = probe(probes, f"probe_products<{kind},{columns},{'true' if omitted else 'false'}>", order)
    launch((1,), (128,), args, shared_mem=products_shared(columns))
    right = torch.equal(scores, a.float() @ b.float().T)
    return right and torch.equal(mixed, 2 * a[:, :64].float() @ v.float())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("kind", DTYPES)
def test_products(probes: Emulator, kind: str, columns: int, order: int) -> None:
    assert multiplied(probes, kind, columns, 0, order)


def tail_operands(kind: str, columns: int) -> list[Tensor]:
    """Of `probe_tail`, as `operands`: a, b, p, v, and room for both results."""
    generator = torch.Generator().manual_seed(columns)
    shapes = ((64, columns), (64, columns), (64, 64), (64, columns))
    numbers = [torch.randint(-4, 5, shape, generator=generator).to(DTYPES[kind]) for shape in shapes]
    return [*numbers, torch.zeros(64, 64), torch.zeros(64, columns)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("columns", [16, 32])
@pytest.mark.parametrize("kind", DTYPES)
def test_products_of_narrow_panels(probes: Emulator, kind: str, columns: int, order: int) -> None:
    a, b, p, v, scores, mixed = tensors = tail_operands(kind, columns)
    launch = probe(probes, f"probe_tail<{kind},{columns}>", order)
    launch((1,), (128,), tuple(tensor.data_ptr() for tensor in tensors), shared_mem=3 * 64 * 2 * columns)
    assert torch.equal(scores, a.float() @ b.float().T)
    assert torch.equal(mixed, p.float() @ v.float())


@pytest.mark.parametrize(("omitted", "what"), [(1, "the fence of stores"), (2, "a barrier"), (4, "a wait")])
def test_wrong_numbers_come_without(probes: Emulator, omitted: int, what: str) -> None:
    assert not all(multiplied(probes, "bf16", 64, omitted, order) for order in ORDERS), what


@pytest.mark.parametrize(
    ("omitted", "named"),
    [
        (3, "no fence since registers were last free"),
        (5, "the warps of a warpgroup did not issue the same products"),
        (6, "accumulators were written while a product had them"),
        (7, "a register was changed after the fence"),
    ],
)
def test_a_fault_is_named(probes: Emulator, omitted: int, named: str) -> None:
    with pytest.raises(EmulatorError, match=named):
        multiplied(probes, "bf16", 64, omitted, 0)


def summed(probes: Emulator, omitted: int, order: int) -> bool:
    x, out = torch.randint(-8, 8, (ROUNDS, 256)).float(), torch.zeros(256)
    launch = probe(probes, f"probe_ring<{'true' if omitted else 'false'}>", order)
    launch((1,), (256,), (x.data_ptr(), out.data_ptr(), np.int32(ROUNDS), np.int32(omitted)), shared_mem=RING_SHARED)
    return torch.equal(out, x.sum(0))


@pytest.mark.parametrize("order", ORDERS)
def test_a_ring_that_bulk_copies_fill(probes: Emulator, order: int) -> None:
    assert summed(probes, 0, order)


def test_barriers_that_the_copy_unit_does_not_know_are_named(probes: Emulator) -> None:
    with pytest.raises(EmulatorError, match="its mbarrier is not published"):
        summed(probes, 1, 0)


@pytest.mark.parametrize(("omitted", "what"), [(2, "a copy's arrival"), (3, "a slot that is free")])
def test_a_ring_without_waits(probes: Emulator, omitted: int, what: str) -> None:
    def right(order: int) -> bool:
        try:
            return summed(probes, omitted, order)
        except EmulatorError:
            return False

    assert not all(right(order) for order in ORDERS), what
