"""The primitives alone, bit for bit, and that the emulator sees what it is there to see."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from octavo.executors.philox import Purpose, philox4x32, uniforms
from octavo.kernels.cuda.draws import draws
from octavo.kernels.cuda.emulator import Emulator, EmulatorError
from octavo.kernels.cuda.library import Function
from octavo.kernels.cuda.sources import Instance
from tests.kernels import conftest


def probe(probes: Emulator, name: str, order: int = 0) -> Function:
    return probes.ordered(order, bulk=True).get_function(conftest.probe(name))


def test_numbers_are_narrowed_as_torch_does(probes: Emulator) -> None:
    """Every half, every value between two e4m3, and ties: rounded to even, saturated (fp8) or infinite."""
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    brains = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    between = (halves[:-1] + halves[1:]) / 2
    x = torch.cat((halves, brains, between, between * (1 + 2**-20), torch.randn(1000) * 100)).contiguous()
    f16, bf16 = torch.empty(2, len(x), dtype=torch.int16)
    fp8 = torch.empty(len(x), dtype=torch.uint8)
    args = (x.data_ptr(), f16.data_ptr(), bf16.data_ptr(), fp8.data_ptr(), np.int32(len(x)))
    probe(probes, "probe_narrow")((-(-len(x) // 256),), (256,), args)
    same(f16.view(torch.float16), x.half())
    same(bf16.view(torch.bfloat16), x.bfloat16())
    number = ~x.isnan()
    same(fp8.view(torch.float8_e4m3fn)[number], x[number].clamp(-448, 448).to(torch.float8_e4m3fn))
    assert fp8.view(torch.float8_e4m3fn)[~number].float().isnan().all()


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    a, b = got.float(), expected.float()
    wrong = ~((a == b) | (a.isnan() & b.isnan()))
    assert not wrong.any(), (a[wrong][:5], b[wrong][:5])


def test_numbers_are_widened_exactly(probes: Emulator) -> None:
    out = torch.empty(3, 65536)
    probe(probes, "probe_widen")((256,), (256,), tuple(row.data_ptr() for row in out))
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    same(out[0], bits.view(torch.float16))
    same(out[1], bits.view(torch.bfloat16))
    same(out[2, :256], torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn))


@pytest.mark.parametrize(("seed", "choice", "position"), [(0, 0, 0), (2**64 - 1, 3, 70000), (123456789012345, 1, 17)])
def test_noise_is_the_executors(probes: Emulator, seed: int, choice: int, position: int) -> None:
    """Words bit for bit; the noise made of them to the last places of two logarithms."""
    quads = 200
    draw = draws(1)
    draw["seed"], draw["choice"], draw["position"] = seed, choice, position
    words, noise = np.empty((quads, 4), np.uint32), np.empty(4 * quads)
    args = (draw.ctypes.data, words.ctypes.data, noise.ctypes.data, np.int32(quads))
    probe(probes, "probe_noise")((-(-quads // 64),), (64,), args)
    assert np.array_equal(words, philox4x32((np.arange(quads), position, choice, Purpose.SAMPLE), seed))
    expected = -np.log(-np.log(uniforms(np.arange(4 * quads), seed, choice, position, Purpose.SAMPLE)))
    np.testing.assert_allclose(noise, expected, rtol=1e-13, atol=1e-15)


def test_logarithms_are_right_to_one_unit_in_the_last_place(probes: Emulator) -> None:
    """Of all magnitudes down to subnormal ones, and around 1 and the powers of two, where digits cancel."""
    generator = np.random.default_rng(0)
    x = np.exp(generator.uniform(-744.0, 709.0, 20_000))
    near = np.ldexp(1.0 + generator.normal(size=20_000) * 2.0 ** -generator.integers(1, 50, 20_000), 1)
    edges = [
        5e-324,
        2.2250738585072014e-308,
        np.nextafter(2.2250738585072014e-308, 0),
        0.5,
        1.0,
        1.7976931348623157e308,
    ]
    x = np.concatenate([x, np.abs(near) / 2, np.sqrt(2) * (1 + np.arange(-9, 9) * 2.0**-52), edges])
    got = np.empty_like(x)
    args = (x.ctypes.data, got.ctypes.data, np.int32(len(x)))
    probe(probes, "probe_logarithm")((-(-len(x) // 64),), (64,), args)
    expected = np.log(x.astype(np.longdouble))
    off = np.abs(got - expected) / np.spacing(np.abs(expected).astype(np.float64))
    assert off.max() < 1.0
    assert got[x == 1.0].tolist() == [0.0] * int((x == 1.0).sum())


@pytest.mark.parametrize("order", [0, 1, 6])
def test_tensor_core_fragments(probes: Emulator, order: int) -> None:
    a, b = torch.randn(2, 16, 16).half()
    out, turned = torch.empty(16, 8), torch.empty(4, 32, 2, dtype=torch.float16)
    args = tuple(x.data_ptr() for x in (a, b, out, turned))
    probe(probes, "probe_mma", order)((1,), (32,), args, shared_mem=1024)
    torch.testing.assert_close(out, a.float() @ b[:8].float().T, rtol=1e-5, atol=1e-5)
    # Lane l of a transposed 8x8 matrix has column l / 4 of rows 2 (l % 4) and the next; matrices go down, then right.
    for i in range(4):
        block = b[i % 2 * 8 :, i // 2 * 8 :][:8, :8]
        assert torch.equal(turned[i].view(8, 8), block.T)


def answers(run: Callable[[int], torch.Tensor]) -> list[list[float]]:
    return [run(order).tolist() for order in range(4)]


def test_a_missing_barrier_shows(probes: Emulator) -> None:
    def run(order: int) -> torch.Tensor:
        out = torch.zeros(64, dtype=torch.int32)
        probe(probes, "probe_race", order)((1,), (64,), (out.data_ptr(),), shared_mem=256)
        return out

    right = [(i + 32) % 64 for i in range(64)]
    assert any(answer != right for answer in answers(run))


def test_a_copy_that_is_not_waited_for_is_nan(probes: Emulator) -> None:
    x, out = torch.randn(128), torch.zeros(32)
    probe(probes, "probe_early_read")((1,), (32,), (x.data_ptr(), out.data_ptr()), shared_mem=512)
    assert out.isnan().all()


def test_a_barrier_that_not_all_reach_is_named(probes: Emulator) -> None:
    with pytest.raises(EmulatorError, match="probe_lost_barrier in order 0: no thread can run"):
        probe(probes, "probe_lost_barrier")((1,), (64,), ())


def test_a_source_that_does_not_compile_says_why() -> None:
    with pytest.raises(EmulatorError, match="does not compile"):
        Emulator().get_function(Instance("copy_blocks.cu", "no_such_kernel"))
