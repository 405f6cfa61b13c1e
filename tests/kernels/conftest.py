"""Kernels on the emulator: every instance that the tests use is compiled once, files in parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeAlias, cast

import pytest
import torch

from octavo.executors.cuda.emulated import again
from octavo.executors.cuda.graphs import CudaRecorder, Recorder
from octavo.executors.threads import default_threads
from octavo.kernels.cuda.cubins import cubin
from octavo.kernels.cuda.device import Device
from octavo.kernels.cuda.emulator import Emulator
from octavo.kernels.cuda.instances import (
    ACTIVATIONS,
    COPY_BLOCKS,
    DECODE_ROWS,
    PLAN_THREADS,
    SPEC_VERIFY,
    WGMMA_ROWS,
    append_instance,
    append_latent_instance,
    attention_instance,
    expand_latent_instance,
    gate_instance,
    gather_latent_instance,
    latent_instance,
    logits_instance,
    merge_instance,
    norm_instance,
    plan_instance,
    reject_instance,
    sample_instance,
)
from octavo.kernels.cuda.launch import Kernels
from octavo.kernels.cuda.nvrtc import NvrtcError
from octavo.kernels.cuda.pool import LatentLayout
from octavo.kernels.cuda.sources import HERE, Instance
from tests.kernels.bench import BOTH, DECODES, PREFILLS, WGMMAS, WIDTHS, Case, wide
from tests.kernels.ferry import Ferry
from tests.kernels.latent import LATENT_LIMITS, LATENTS

Maker: TypeAlias = Callable[[int], Kernels]
"""An order of execution to kernels; odd orders have bulk copies late, orders 2 and 3 have cp.async in their place."""

THREADS = 64
PROBES = [
    "probe_narrow",
    "probe_widen",
    "probe_noise",
    "probe_logarithm",
    "probe_mma",
    "probe_lost_barrier",
    "probe_race",
    "probe_early_read",
    *(f"probe_products<{kind},{columns},false>" for kind in ("bf16", "f16") for columns in (64, 128)),
    *(f"probe_tail<{kind},{columns}>" for kind in ("bf16", "f16") for columns in (16, 32)),
    *("probe_products<bf16,64,true>", "probe_ring<false>", "probe_ring<true>"),
]


def bulk_in(order: int) -> bool:
    return order not in (2, 3)


def instances() -> list[Instance]:
    cases = [(case, BOTH["decode"]) for case in DECODES.values()] + [
        (case, BOTH["prefill"]) for case in PREFILLS.values()
    ]
    cases += [(wide(size), rows) for size in WIDTHS for rows in BOTH.values()]
    cases += [(case, WGMMA_ROWS) for case in WGMMAS.values()]
    found = []
    for case, rows in cases:
        for bulk in (False, True):
            biased = case.alibi or case.tree
            instance, _, _ = attention_instance(case.spec, rows, biased=biased, bulk=bulk, shared_limit=227 * 1024)
            if bulk or (case.head_dim == 64 and rows != WGMMA_ROWS):  # other widths run with bulk copies only
                found.append(instance)
        if case.split:
            found.append(merge_instance(case.dtype, case.head_dim, rows))
    found.append(merge_instance(torch.bfloat16, 64, DECODE_ROWS))
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        spec = Case(((1, 1),), kv_dtype=dtype).spec
        found += [append_instance(spec, interleaved=interleaved) for interleaved in (False, True)]
    found.append(append_instance(Case(((1, 1),), dtype=torch.float16, kv_dtype=torch.float16).spec, interleaved=False))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found.append(norm_instance(dtype, THREADS)[0])
        found += [gate_instance(dtype, activation) for activation in ACTIVATIONS]
    found += [logits_instance(dtype, THREADS) for dtype in (torch.bfloat16, torch.float32)]
    for content, rotated, fp8 in LATENTS:
        layout = LatentLayout(1, 16, content, rotated, torch.bfloat16, fp8)
        found += [latent_instance(layout, shared_limit=limit)[0] for limit in LATENT_LIMITS]
        found.append(latent_instance(layout, trees=True, shared_limit=LATENT_LIMITS[0])[0])
        found += [append_latent_instance(layout), merge_instance(torch.bfloat16, content, DECODE_ROWS)]
        if content <= 128:
            found += [gather_latent_instance(layout), expand_latent_instance(layout, 64)]
    found += [COPY_BLOCKS, SPEC_VERIFY, plan_instance(PLAN_THREADS)[0], sample_instance(THREADS)]
    found.append(sample_instance(THREADS, whole=True))
    found.append(reject_instance(THREADS)[0])
    return found


@cache
def prepared() -> Emulator:
    made = Emulator()
    made.prepare(instances())
    return made


def compiled_ahead(arch: str, wanted: Iterable[Instance]) -> int:
    """Compile for a GPU on all cores, and count what is there now; what does not compile is its own test's matter."""

    def done(instance: Instance) -> bool:
        with suppress(NvrtcError):
            return cubin(instance, arch).path.exists()
        return False

    with ThreadPoolExecutor(default_threads()) as pool:
        return sum(pool.map(done, wanted))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile before any test's time runs: with an empty cache that takes minutes."""
    if session.config.getoption("--kernels-on-gpu"):
        if session.items:
            device = Device(torch.device("cuda", 0))
            can = (one for one in instances() if device.wgmma or one.file != "attn_wgmma.cu")
            compiled_ahead(device.arch, can)
        return
    if any(
        {"emulator", "resident_kernels"} & {*item.fixturenames}
        for item in session.items
        if isinstance(item, pytest.Function)
    ):
        prepared()


@pytest.fixture(scope="session")
def emulator() -> Emulator:
    return prepared()


@pytest.fixture(scope="session")
def resident_kernels(request: pytest.FixtureRequest) -> Maker:
    """For tests whose tensors are where the kernels are: the emulator's, or with `--kernels-on-gpu` a GPU's."""
    if request.config.getoption("--kernels-on-gpu"):
        device = torch.device("cuda", 0)
        gpu = Kernels(Device(device), device, threads=THREADS, sampling_threads=THREADS)
        return lambda order: gpu
    emulator: Emulator = request.getfixturevalue("emulator")
    return lambda order: made(emulator.ordered(order, bulk=bulk_in(order)))


@pytest.fixture(scope="session")
def recorder(request: pytest.FixtureRequest) -> Recorder:
    """Real graphs with `--kernels-on-gpu`; on the emulator replays do the work again."""
    return CudaRecorder() if request.config.getoption("--kernels-on-gpu") else again


@pytest.fixture(scope="session")
def kernels(request: pytest.FixtureRequest, resident_kernels: Maker) -> Maker:
    """For tests whose tensors are on the CPU."""
    if request.config.getoption("--kernels-on-gpu"):
        return lambda order: cast(Kernels, Ferry(resident_kernels(order)))
    return resident_kernels


@pytest.fixture(scope="session")
def warpgroups(request: pytest.FixtureRequest, kernels: Maker) -> Maker:
    """`kernels`, where warpgroups can multiply: on the emulator in every order, on a GPU if it is an sm_90."""
    if request.config.getoption("--kernels-on-gpu") and WGMMA_ROWS not in kernels(0).rows(Case(((1, 1),)).spec):
        pytest.skip("this GPU is no sm_90")
    return kernels


def made(library: Emulator) -> Kernels:
    return Kernels(library, torch.device("cpu"), threads=THREADS, sampling_threads=THREADS)


@pytest.fixture(scope="session")
def probes(probe_sources: Path) -> Emulator:
    made = Emulator(folder=probe_sources)
    made.prepare([probe(name) for name in PROBES])
    return made


@pytest.fixture(scope="session")
def probe_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources of the tests beside those of the kernels."""
    folder = tmp_path_factory.mktemp("probes")
    for path in (*Path(__file__).parent.glob("*.cu"), *sources()):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def probe(name: str) -> Instance:
    """Those of warpgroups are for sm_90a only, so they are in a file of their own."""
    return Instance(
        "probes_warpgroup.cu" if name.startswith(("probe_products", "probe_tail", "probe_ring")) else "probes.cu", name
    )


def sources() -> Iterator[Path]:
    yield from (path for pattern in ("*.cuh", "*.h") for path in HERE.glob(pattern))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
