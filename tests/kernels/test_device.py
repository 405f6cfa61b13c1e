"""Primitives on a GPU against the emulator, bit for bit: what all else rests on. Only where there is a GPU.

And, anywhere, that tensors cross over as tests on a GPU need it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.kernels.cuda.device import Device
from octavo.kernels.cuda.draws import draws
from octavo.kernels.cuda.emulator import Emulator
from octavo.kernels.cuda.instances import DECODE_ROWS
from octavo.kernels.cuda.library import Argument
from tests.kernels.bench import DECODES, run
from tests.kernels.conftest import made, probe
from tests.kernels.ferry import Ferry
from tests.kernels.test_attention import close
from tests.kernels.test_warpgroup import RING_SHARED, ROUNDS, operands, products_shared, tail_operands

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(scope="module")
def device(probe_sources: Path) -> Device:
    return Device(torch.device("cuda", 0), probe_sources)


def both(
    device: Device, probes: Emulator, name: str, tensors: list[torch.Tensor], *scalars: Argument, blocks: int = 1,
    threads: int = 32, shared: int = 0,
) -> None:  # fmt: skip
    """Every tensor is the same after the probe ran on either."""
    instance, there = probe(name), [tensor.cuda() for tensor in tensors]
    for library, mine in ((probes, tensors), (device, there)):
        args = (*(tensor.data_ptr() for tensor in mine), *scalars)
        library.get_function(instance)((blocks,), (threads,), args, shared_mem=shared)
    torch.cuda.synchronize()
    for here, other in zip(tensors, there, strict=True):
        assert torch.equal(here.view(torch.uint8), other.cpu().view(torch.uint8))


@on_gpu
def test_numbers_are_narrowed_and_widened_alike(device: Device, probes: Emulator) -> None:
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    x = torch.cat((halves[halves.isfinite()], torch.randn(5000) * 100, torch.tensor([torch.inf, -torch.inf])))
    out = [torch.empty(len(x), dtype=kind) for kind in (torch.int16, torch.int16, torch.uint8)]
    both(device, probes, "probe_narrow", [x, *out], np.int32(len(x)), blocks=-(-len(x) // 256), threads=256)
    wide = torch.zeros(3, 65536)
    for library, mine in ((probes, wide), (device, there := torch.zeros(3, 65536, device="cuda"))):
        args = tuple(row.data_ptr() for row in mine)
        library.get_function(probe("probe_widen"))((256,), (256,), args)
    assert torch.equal(wide.nan_to_num(1.5), there.cpu().nan_to_num(1.5))


@on_gpu
def test_matrices_are_loaded_and_multiplied_alike(device: Device, probes: Emulator) -> None:
    """Small whole numbers, so that the order of sums does not show."""
    a, b = torch.randint(-8, 8, (2, 16, 16)).half()
    out, turned = torch.zeros(16, 8), torch.zeros(4, 32, 2, dtype=torch.float16)
    both(device, probes, "probe_mma", [a, b, out, turned], shared=1024)


@on_gpu
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_warpgroups_multiply_alike(device: Device, probes: Emulator, kind: str, columns: int) -> None:
    """The emulator's idea of descriptors, of panels and of who holds which number is the hardware's."""
    if not device.wgmma:
        pytest.skip("this GPU is no sm_90")
    name = f"probe_products<{kind},{columns},false>"
    both(device, probes, name, operands(kind, columns), np.int32(0), threads=128, shared=products_shared(columns))


@on_gpu
@pytest.mark.parametrize("columns", [16, 32])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_warpgroups_multiply_narrow_panels_alike(device: Device, probes: Emulator, kind: str, columns: int) -> None:
    if not device.wgmma:
        pytest.skip("this GPU is no sm_90")
    name, shared = f"probe_tail<{kind},{columns}>", 3 * 64 * 2 * columns
    both(device, probes, name, tail_operands(kind, columns), threads=128, shared=shared)


@on_gpu
def test_rings_are_filled_alike(device: Device, probes: Emulator) -> None:
    """Bulk copies, the phases of their barriers, registers that change hands."""
    if not device.wgmma:
        pytest.skip("this GPU is no sm_90")
    x, out = torch.randint(-8, 8, (ROUNDS, 256)).float(), torch.zeros(256)
    both(device, probes, "probe_ring<false>", [x, out], np.int32(ROUNDS), np.int32(0), threads=256, shared=RING_SHARED)


@on_gpu
def test_words_are_alike(device: Device, probes: Emulator) -> None:
    draw = draws(1)
    draw["seed"], draw["choice"], draw["position"] = 123456789012345, 1, 17
    packed = torch.from_numpy(draw.view(np.uint8))
    results = []
    for library, where in ((probes, "cpu"), (device, "cuda")):
        words = torch.zeros(200, 4, dtype=torch.int32, device=where)
        noise = torch.zeros(800, dtype=torch.float64, device=where)
        args = (packed.to(where).data_ptr(), words.data_ptr(), noise.data_ptr(), np.int32(200))
        library.get_function(probe("probe_noise"))((4,), (64,), args)
        results.append((words.cpu(), noise.cpu()))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-14, atol=1e-15)


def test_a_ferry_brings_back_what_was_written(emulator: Emulator) -> None:
    """With copies for a device: nothing of the test's own memory is seen by a kernel."""
    ferry = Ferry(made(emulator.ordered(1, bulk=True)))
    for name in ("split", "sinks, split on the device"):
        close(*run(ferry, DECODES[name], DECODE_ROWS))  # type: ignore[arg-type]
