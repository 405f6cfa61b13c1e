"""Every kernel compiles for every GPU that we name, without a GPU: registers, spills, and shared memory within limits.

Needs NVRTC and nothing else (pip install nvidia-cuda-nvrtc, 100 MB, which is why it is not among the tests' own
requirements); skipped where it is not. The cache of cubins and what is said when something is missing is tested anyway.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from octavo.kernels.cuda import cubins, nvrtc
from octavo.kernels.cuda.cache import digest, stored
from octavo.kernels.cuda.launch import (
    DECODE_ROWS,
    PREFILL_ROWS,
    Heads,
    append_instance,
    attention_instance,
    merge_instance,
)
from octavo.kernels.cuda.nvrtc import Compiled, Figures, NvrtcError
from octavo.kernels.cuda.pool import PoolLayout
from octavo.kernels.cuda.sources import HERE, Instance, closure

SHARED = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227}
"""KiB that a block may have."""
SPILLS = {"sample<512>": 16}
"""Bytes allowed where a routine is called for the rare case (a division, a logarithm in fp64)."""


def heads(head_dim: int, kv: torch.dtype) -> Heads:
    return Heads(8, torch.bfloat16, PoolLayout(1, 16, 2, head_dim, kv), 1.0)


def instances(arch: str) -> list[Instance]:
    found = [Instance("copy_blocks.cu", "copy_blocks"), Instance("sample.cu", "sample<512>")]
    found += [Instance("logits.cu", "logits<float,512>"), Instance("add_rmsnorm.cu", "add_rmsnorm<bf16,256>")]
    found += [Instance("silu_mul.cu", "silu_mul<bf16>")]
    for head_dim, kv in [
        (64, torch.bfloat16),
        (128, torch.bfloat16),
        (128, torch.float8_e4m3fn),
        (256, torch.bfloat16),
    ]:
        spec = heads(head_dim, kv)
        for rows in (DECODE_ROWS, PREFILL_ROWS):
            bulk = int(arch[3:]) >= 90
            instance, _, shared = attention_instance(spec, rows, bulk=bulk, shared_limit=SHARED[arch] * 1024)
            assert shared <= SHARED[arch] * 1024
            found.append(instance)
        found += [merge_instance(spec, DECODE_ROWS), append_instance(spec, interleaved=False)]
    return list(dict.fromkeys(found))


def compiler() -> bool:
    try:
        nvrtc.nvrtc()
    except NvrtcError:
        return False
    return True


@pytest.mark.skipif(not compiler(), reason="no NVRTC here: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize("arch", SHARED)
def test_kernels_compile_without_spills(arch: str) -> None:
    for instance in instances(arch):
        made = cubins.cubin(instance, arch)
        assert made.path.read_bytes()[:4] == b"\x7fELF"
        assert made.figures.spilled <= SPILLS.get(instance.name, 0), f"{arch}: {instance.name} spills: {made.figures}"
        assert made.figures.registers <= 255


class Stand:
    """In place of the compiler: counts what it is asked."""

    version = "13.0"
    archs = (80, 86, 90, 100)

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    def compile(self, name: str, texts: dict[str, str], file: str, options: tuple[str, ...]) -> Compiled:
        assert "emulator.h" not in texts
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

    def make(name: str = "sample<64>", arch: str = "sm_90") -> cubins.Cubin:
        return cubins.cubin(Instance("sample.cu", name), arch, where=where, sources=sources)

    first = make()
    assert make() == first
    assert len(stand.asked) == 1
    assert first.entry == "_Zsample<64>"
    others = [make("sample<128>"), make(arch="sm_80")]
    header = sources / "prims.cuh"  # two includes away
    header.write_text(header.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    others.append(make())
    stand.version = "13.1"
    others.append(make())
    assert len({cubin.path for cubin in (first, *others)}) == 5
    assert len(stand.asked) == 5


@pytest.mark.parametrize(("capability", "arch"), [(80, "sm_80"), (87, "sm_86"), (90, "sm_90"), (103, "sm_100")])
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
