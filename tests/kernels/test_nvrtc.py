"""Every kernel compiles for every GPU that we name, without a GPU: registers, spills, shared memory and instructions.

On each run a sample of them, another one whenever a kernel changes; all with `--kernels-all`, which writes the result.
The cache of cubins, and what is said when something is missing, is tested beside it.
"""

from __future__ import annotations

import importlib.util
import random
import re
import subprocess
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from octavo.kernels.cuda import cubins, nvrtc
from octavo.kernels.cuda.cache import digest, stored
from octavo.kernels.cuda.cubins import Cubin, cubin
from octavo.kernels.cuda.elf import used
from octavo.kernels.cuda.nvrtc import Compiled, Figures, NvrtcError
from octavo.kernels.cuda.shipped import ARCHS, Shipped, shared_limit, shipped
from octavo.kernels.cuda.sources import HERE, Instance, closure
from tests.kernels.conftest import probe
from tests.kernels.results import write

SAMPLE = 8
REGISTERS = {
    "attn_decode": 255,
    "attn_prefill": 255,
    "attn_wgmma": 168,
    "attn_latent": 208,
    "attn_merge": 64,
    "append_kv": 48,
    "append_latent": 48,
    "gather_latent": 48,
    "expand_latent": 48,
    "add_rmsnorm": 48,
    "gate_mul": 40,
    "logits": 64,
    "sample": 64,
    "attn_plan": 64,
    "copy_blocks": 32,
    "spec_verify": 32,
    "spec_reject": 64,
}
"""Allowed to a thread: what two blocks of attention (of latents: one) and eight of others on an SM leave, rounded to
what is needed."""


class Job(NamedTuple):
    arch: str
    kernel: Shipped

    @property
    def name(self) -> str:
        return self.kernel.instance.name.partition("<")[0]


def chosen() -> list[Job]:
    """As many as a run has time for, one of each kernel first."""
    texts = [path.read_bytes() for path in sorted(HERE.iterdir()) if path.suffix in (".cu", ".cuh")]
    chance = random.Random(digest(texts))
    jobs = [Job(arch, kernel) for arch in ARCHS for kernel in shipped(arch)]
    seen: Counter[str] = Counter()
    turns = []
    for job in chance.sample(jobs, len(jobs)):
        turns.append((seen[job.name], job))
        seen[job.name] += 1
    return [job for _, job in sorted(turns, key=lambda turn: turn[0])][:SAMPLE]


def compiled(jobs: list[Job]) -> list[Cubin]:
    with ThreadPoolExecutor(2) as pool:  # the compiler works outside of Python
        return list(pool.map(lambda job: cubin(job.kernel.instance, job.arch), jobs))


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> list[Job]:
    if request.config.getoption("--kernels-all"):
        return [Job(arch, kernel) for arch in ARCHS for kernel in shipped(arch)]
    return chosen()


@pytest.fixture(scope="module")
def made(jobs: list[Job]) -> list[Cubin]:
    return compiled(jobs)


@pytest.mark.timeout(7200)
def test_kernels_stay_within_registers_and_shared_memory(
    request: pytest.FixtureRequest, jobs: list[Job], made: list[Cubin]
) -> None:
    wrong = []
    for job, one in zip(jobs, made, strict=True):
        own = used(one.path.read_bytes())[one.entry]
        assert (own.registers, own.stack) == (one.figures.registers, one.figures.stack)  # two witnesses
        allowed = REGISTERS[job.name]
        if own.registers > allowed or own.registers * job.kernel.threads > 65536 or one.figures.spilled:
            wrong.append(f"{job.arch}: {job.kernel.instance.name}: {one.figures}, allowed {allowed}")
        if one.figures.loss:
            wrong.append(f"{job.arch}: {job.kernel.instance.name}: the assembler speaks of a loss of speed")
        if job.kernel.shared + own.shared > shared_limit(job.arch):
            wrong.append(f"{job.arch}: {job.kernel.instance.name}: {job.kernel.shared} bytes of shared memory")
    assert not wrong, "\n".join(wrong)
    if request.config.getoption("--kernels-all"):
        report(jobs, made)


def report(jobs: list[Job], made: list[Cubin]) -> None:
    """By kernel: the range over all instances on each arch."""
    lines = [
        f"NVRTC {nvrtc.nvrtc().version}; `octavo kernels list` tells of each instance.",
        "",
        "| kernel | arch | instances | registers | bytes spilled | KB of shared memory |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name in sorted(REGISTERS):
        for arch in ARCHS:
            mine = [(job, one) for job, one in zip(jobs, made, strict=True) if (job.name, job.arch) == (name, arch)]
            if not mine:
                continue
            registers = [one.figures.registers for _, one in mine]
            shared = [job.kernel.shared / 1024 for job, _ in mine]
            spilled = max(one.figures.spilled for _, one in mine)
            lines.append(
                f"| {name} | {arch} | {len(mine)} | {min(registers)} to {max(registers)} | {spilled} | "
                f"{min(shared):.0f} to {max(shared):.0f} |"
            )
    write("kernel_compile.md", lines)


def disassembler() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    found = [
        path
        for folder in (spec.submodule_search_locations or () if spec else ())
        for path in Path(folder).glob("*/bin/nvdisasm")
    ]
    return found[0] if found else None


TENSOR_CORES = {"HMMA", "LDSM"}
EXPECTED = {
    "attn_decode<bf16,bf16,128": ("sm_80", TENSOR_CORES | {"LDGSTS"}),
    "attn_prefill<bf16,bf16,64": ("sm_89", TENSOR_CORES | {"LDGSTS"}),
    "attn_decode<bf16,bf16,64": ("sm_90a", TENSOR_CORES | {"UBLKCP", "SYNCS"}),
    "attn_prefill<bf16,bf16,128": ("sm_90a", TENSOR_CORES | {"UBLKCP", "SYNCS"}),
    "attn_wgmma<bf16,80": ("sm_90a", {"HGMMA", "UBLKCP", "SYNCS", "USETMAXREG"}),
    "attn_wgmma<bf16,128": ("sm_90a", {"HGMMA", "UBLKCP", "SYNCS", "USETMAXREG"}),
    "attn_latent<bf16": ("sm_80", TENSOR_CORES | {"LDGSTS"}),
}
"""Tensor cores (HGMMA: of a warpgroup), asynchronous copies, and bulk copies with their barriers, by what machine code
calls them."""


@pytest.mark.skipif(disassembler() is None, reason="no nvdisasm here: pip install nvidia-cuda-nvdisasm")
def test_machine_code_is_what_was_meant(request: pytest.FixtureRequest) -> None:
    tool = disassembler()
    assert tool is not None
    found = {}
    for start, (arch, expected) in EXPECTED.items():
        (kernel, *_) = [one for one in shipped(arch) if one.instance.name.startswith(start)]
        found[start] = (Job(arch, kernel), expected)
    jobs = [job for job, _ in found.values()]
    every = request.config.getoption("--kernels-all")
    mine = jobs if every else [random.Random(digest([HERE.joinpath("tile.cuh").read_bytes()])).choice(jobs)]
    for one, job in zip(compiled(mine), mine, strict=True):
        code = subprocess.run([tool, "-c", one.path], capture_output=True, text=True, timeout=120, check=True).stdout
        words = set(re.findall(r"\b[A-Z][A-Z0-9]{2,}\b", code))
        (expected,) = [expected for other, expected in found.values() if other == job]
        assert expected <= words, f"{job}: {expected - words} are not there"
        assert not {"LDL", "STL"} & words, f"{job} has local memory"


@pytest.mark.parametrize(
    "name",
    ["probe_products<bf16,64,false>", "probe_products<f16,128,false>", "probe_ring<false>", "probe_tail<bf16,32>"],
)
def test_what_a_gpu_is_asked_first_compiles(probe_sources: Path, name: str) -> None:
    made = cubin(probe(name), "sm_90a", sources=probe_sources)
    assert (made.figures.spilled, made.figures.loss) == (0, False)


def test_what_is_no_cubin_is_named() -> None:
    with pytest.raises(ValueError, match="this is not a cubin"):
        used(b"text")
    with pytest.raises(ValueError, match="has no notes on kernels"):
        used(Path("/proc/self/exe").read_bytes())


def test_release_instances_are_distinct_and_fit() -> None:
    for arch in ARCHS:
        kernels = shipped(arch)
        assert len({kernel.instance for kernel in kernels}) == len(kernels) > 60
        assert all(kernel.shared <= shared_limit(arch) for kernel in kernels)
        files = {path.name for path in HERE.glob("*.cu")} - ({"attn_wgmma.cu"} if arch != "sm_90a" else set())
        assert {kernel.instance.file for kernel in kernels} == files


class Stand:
    """In place of the compiler: counts what it is asked."""

    version = "13.0"
    archs = (80, 86, 90, 100)

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    def compile(self, name: str, texts: dict[str, str], file: str, options: tuple[str, ...]) -> Compiled:
        assert not [text for text in texts if text.startswith("emulator")]
        self.asked.append((name, options))
        return Compiled(b"\x7fELF", f"_Z{name}", Figures(1, 0, 0))


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    made = Stand()
    monkeypatch.setattr(cubins, "nvrtc", lambda: made)
    return made


def test_a_cubin_is_made_once_and_again_when_anything_it_depends_on_changes(stand: Stand, tmp_path: Path) -> None:
    sources, where = tmp_path / "sources", tmp_path / "cubins"
    sources.mkdir()
    for name in closure("sample.cu"):
        (sources / name).write_bytes((HERE / name).read_bytes())

    def make(name: str = "sample<64,false>", arch: str = "sm_90") -> cubins.Cubin:
        return cubins.cubin(Instance("sample.cu", name), arch, where=where, sources=sources)

    first = make()
    assert make() == first
    assert len(stand.asked) == 1
    assert first.entry == "_Zsample<64,false>"
    others = [make("sample<128,false>"), make(arch="sm_80")]
    header = sources / "prims.cuh"  # two includes away
    header.write_text(header.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    others.append(make())
    stand.version = "13.1"
    others.append(make())
    assert len({cubin.path for cubin in (first, *others)}) == 5
    assert len(stand.asked) == 5


@pytest.mark.parametrize(("capability", "arch"), [(80, "sm_80"), (87, "sm_86"), (90, "sm_90a"), (103, "sm_100")])
def test_the_nearest_architecture_that_the_compiler_knows(stand: Stand, capability: int, arch: str) -> None:
    assert cubins.arch_for(capability) == arch


def test_a_gpu_that_is_too_old_or_too_new_is_named(stand: Stand) -> None:
    with pytest.raises(NvrtcError, match="the GPU is sm_75, but kernels need sm_80"):
        cubins.arch_for(75)
    with pytest.raises(NvrtcError, match=r"NVRTC 13\.0 does not know sm_120"):
        cubins.arch_for(120)


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: ["libnvrtc.so.none"])
    with pytest.raises(NvrtcError, match="pip install nvidia-cuda-nvrtc"):
        nvrtc.nvrtc.__wrapped__()


def test_two_that_make_the_same_file_at_once_both_get_it_whole(tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=30)

    def make(path: Path) -> None:
        both.wait()
        path.write_bytes(b"x" * 100_000)

    found: list[bytes] = []
    ask = lambda: found.append(stored("made", make, tmp_path).read_bytes())  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [b"x" * 100_000] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert digest([b"ab", b"c"]) != digest([b"a", b"bc"])
