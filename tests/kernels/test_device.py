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
from octavo.kernels.cuda.sources import Instance
from tests.kernels.bench import DECODES, run
from tests.kernels.conftest import made, sources
from tests.kernels.ferry import Ferry
from tests.kernels.test_attention import close

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    folder = tmp_path_factory.mktemp("probes")
    for path in (*Path(__file__).parent.glob("*.cu"), *sources()):
        (folder / path.name).write_bytes(path.read_bytes())
    return Device(torch.device("cuda", 0), folder)


def both(
    device: Device, probes: Emulator, name: str, tensors: list[torch.Tensor], *scalars: Argument, blocks: int = 1,
    threads: int = 32, shared: int = 0,
) -> None:  # fmt: skip
    """Every tensor is the same after the probe ran on either."""
    instance, there = Instance("probes.cu", name), [tensor.cuda() for tensor in tensors]
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
        library.get_function(Instance("probes.cu", "probe_widen"))((256,), (256,), args)
    assert torch.equal(wide.nan_to_num(1.5), there.cpu().nan_to_num(1.5))


@on_gpu
def test_matrices_are_loaded_and_multiplied_alike(device: Device, probes: Emulator) -> None:
    """Small whole numbers, so that the order of sums does not show."""
    a, b = torch.randint(-8, 8, (2, 16, 16)).half()
    out, turned = torch.zeros(16, 8), torch.zeros(4, 32, 2, dtype=torch.float16)
    both(device, probes, "probe_mma", [a, b, out, turned], shared=1024)


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
        library.get_function(Instance("probes.cu", "probe_noise"))((4,), (64,), args)
        results.append((words.cpu(), noise.cpu()))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-14, atol=0)


def test_a_ferry_brings_back_what_was_written(emulator: Emulator) -> None:
    """With copies for a device: nothing of the test's own memory is seen by a kernel."""
    ferry = Ferry(made(emulator.ordered(1, bulk=True)))
    for name in ("split", "sinks, split on the device"):
        close(*run(ferry, DECODES[name], DECODE_ROWS))  # type: ignore[arg-type]
