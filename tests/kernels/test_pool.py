"""The pool's layout: one to one, and the same in Python and CUDA. Also what writes it: append and block copies."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from octavo.executors.cuda import swap
from octavo.executors.cuda.swap import HostPool, Mark
from octavo.kernels.cuda import reference
from octavo.kernels.cuda.instances import Heads
from octavo.kernels.cuda.launch import Step
from octavo.kernels.cuda.pool import PoolLayout
from tests.kernels.bench import Case
from tests.kernels.conftest import Maker

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_pack_and_unpack_are_inverse(head_dim: int, dtype: torch.dtype) -> None:
    if dtype == FP8 and head_dim % 32:
        with pytest.raises(ValueError, match="multiple of 32"):
            PoolLayout(1, 16, 1, head_dim, dtype)
        return
    layout = PoolLayout(3, 32, 2, head_dim, dtype)
    kv = torch.randn(2, 96, 2, head_dim).to(dtype)
    pool = layout.pack(kv)
    assert pool.shape == (3, layout.block_bytes)
    assert torch.equal(layout.unpack(pool).float(), kv.float())
    moved = layout.unpack(pool[[2, 0, 1]]).float()
    assert torch.equal(moved[:, :32], kv[:, 64:].float())


def test_what_no_kernel_can_do_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size is 24"):
        PoolLayout(1, 24, 1, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="head_dim is 72"):
        PoolLayout(1, 16, 1, 72, torch.bfloat16)


def angles(positions: int, rotated: int) -> torch.Tensor:
    turns = torch.outer(torch.arange(positions).float(), 1.0 / 100 ** (torch.arange(0, rotated, 2) / rotated))
    return torch.cat((turns.cos(), turns.sin()), dim=1)


@pytest.mark.parametrize("order", [0, 3])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [64, 32])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
def test_append(
    kernels: Maker, kv_dtype: torch.dtype, normed: bool, rotated: int, interleaved: bool, order: int
) -> None:
    spec = Case(((1, 60),), kv_dtype=kv_dtype, block_size=32).spec
    append(kernels, spec, normed, rotated, interleaved, order)


def test_append_fp16(kernels: Maker) -> None:
    append(kernels, Case(((1, 60),), dtype=torch.float16, kv_dtype=torch.float16).spec, True, 64, False, 1)


def append(kernels: Maker, spec: Heads, normed: bool, rotated: int, interleaved: bool, order: int) -> None:
    layout, d = spec.layout, spec.layout.head_dim
    all_heads, kv_heads = spec.heads + 2 * layout.kv_heads, layout.kv_heads
    spec = dataclasses.replace(spec, key_scale=0.5, value_scale=0.25) if layout.dtype == FP8 else spec
    qkv = torch.randn(5, all_heads * d).to(spec.dtype)
    qkv[0, -1], qkv[1, -1], qkv[2, -1] = 1e4, 448 * spec.value_scale, 1e4  # saturates fp8, fits, is padding
    saturated = torch.tensor([3], dtype=torch.int32)
    slots = torch.tensor([0, 17, -1, 33, layout.blocks * layout.block_size - 1])
    step = Step(torch.tensor([0, 1, 2, 30, 7], dtype=torch.int32), slots, torch.empty(0), torch.empty(0))
    norms = (torch.rand(2, d) + 0.5).to(spec.dtype) if normed else (None, None)
    table = angles(40, rotated)
    pool = layout.allocate()
    q = kernels(order).append_kv(
        spec,
        step,
        qkv,
        pool,
        table,
        interleaved=interleaved,
        query_norm=norms[0],
        key_norm=norms[1],
        eps=1e-5,
        saturated=saturated,
    )
    heads = qkv.view(5, all_heads, d).float()
    queries, keys, values = torch.tensor_split(heads, (spec.heads, spec.heads + kv_heads), dim=1)
    if norms[0] is not None and norms[1] is not None:
        queries, keys = reference.rmsnorm(queries, norms[0], 1e-5), reference.rmsnorm(keys, norms[1], 1e-5)
    turned = [reference.rotate(x, table[step.positions], interleaved=interleaved) for x in (queries, keys)]
    written = slots >= 0
    assert saturated.tolist() == [4 if layout.dtype == FP8 else 3]
    eps = torch.finfo(layout.dtype).eps
    expected = turned[0].masked_fill(~written.view(-1, 1, 1), 0)
    torch.testing.assert_close(q.float(), expected, rtol=torch.finfo(spec.dtype).eps, atol=1e-5)
    stored = layout.unpack(pool).float()
    scales = (spec.key_scale, spec.value_scale)
    for kept, new, scale in zip(stored, (turned[1], values), scales, strict=True):
        want = torch.zeros_like(kept)
        scaled = new[written] / scale
        want[slots[written]] = (scaled.clamp(-448, 448) if layout.dtype == FP8 else scaled).to(layout.dtype).float()
        torch.testing.assert_close(kept, want, rtol=eps, atol=1e-3)
        assert (kept == want).float().mean() > 0.99  # but for sums that fall between two numbers


@pytest.mark.parametrize("order", [0, 1])
def test_blocks_are_copied_as_if_at_once(kernels: Maker, order: int) -> None:
    layout = PoolLayout(6, 16, 3, 64, torch.bfloat16)
    pools = [torch.randint(0, 255, (6, layout.block_bytes), dtype=torch.uint8) for _ in range(2)]
    before = [pool.clone() for pool in pools]
    kernels(order).copy_blocks(pools, [(0, 5), (3, 4)])
    kernels(order).copy_blocks(pools, [(1, 2), (2, 3), (0, 1)])  # a chain: needs what it overwrites
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool, old[[0, 0, 1, 2, 3, 0]])


@pytest.mark.parametrize("order", [0, 1])
def test_blocks_go_out_and_come_back_elsewhere(kernels: Maker, order: int) -> None:
    layout = PoolLayout(6, 16, 3, 64, torch.bfloat16)
    pools = [torch.randint(0, 255, (6, layout.block_bytes), dtype=torch.uint8) for _ in range(2)]
    before = [pool.clone() for pool in pools]
    away = kernels(order).staging(pools, 4)[:3]
    kernels(order).gather_blocks(pools, [4, 0, 5], away)
    assert torch.equal(away, torch.stack([pool[[4, 0, 5]] for pool in before], dim=1))
    kernels(order).scatter_blocks(pools, [1, 2, 4], away)
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool, old[[0, 4, 0, 3, 5, 5]])
    kernels(order).gather_blocks(pools, [], away[:0])


@pytest.mark.parametrize("order", [0, 1])
def test_a_binds_copies_reach_host_memory_and_back_as_if_at_once(kernels: Maker, order: int) -> None:
    """Blocks 6 to 9 are places in host memory."""
    layout = PoolLayout(6, 16, 3, 64, torch.bfloat16)
    pools = [torch.randint(0, 255, (6, layout.block_bytes), dtype=torch.uint8) for _ in range(2)]
    host = HostPool(kernels(order), pools, 4)
    expected = [torch.cat((pool, torch.zeros(4, layout.block_bytes, dtype=torch.uint8))) for pool in pools]
    binds = [[(0, 6), (5, 9)], [(6, 5), (5, 7), (4, 0), (9, 4)], [(7, 1), (1, 2), (2, 8)], []]
    for copies in binds:
        host.copy(copies)
        for pool, known in zip(pools, expected, strict=True):
            known[[target for _, target in copies]] = known[[source for source, _ in copies]]
            assert torch.equal(pool, known[:6])


class Late:
    """Transfers that run as late as they may: when steps wait for them. Into `host` goes what steps read into a buffer
    just before, so such a one is held for all that steps have launched."""

    def __init__(self) -> None:
        self.host: set[int] = set()
        """Where its pieces lie."""
        self.steps = 0
        """Marks of steps."""
        self.held = 0
        """The last of them that transfers wait for."""
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0

    def of_steps(self) -> int:
        self.steps += 1
        return self.steps

    def of_transfers(self) -> int:
        return self.done + len(self.waiting)

    def hold_steps(self, mark: Mark) -> None:
        assert isinstance(mark, int)
        while self.done < mark:
            target, source = self.waiting.pop(0)
            target.copy_(source)
            self.done += 1

    def hold_transfers(self, mark: Mark) -> None:
        assert isinstance(mark, int)
        self.held = max(self.held, mark)

    def transfer(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.untyped_storage().data_ptr() in self.host:
            assert self.held == self.steps
        self.waiting.append((target, source))


def random_pairs(luck: random.Random) -> list[swap.Pair]:
    """Between 12 blocks and 8 places behind them."""
    targets = luck.sample(range(20), luck.randrange(1, 14))
    pairs = [(luck.choice([i for i in range(20) if min(i, target) < 12]), target) for target in targets]
    return [pair for pair in pairs if pair[0] != pair[1]]


@pytest.mark.parametrize("seed", range(6))
def test_transfers_run_aside_of_steps_and_in_rounds(kernels: Maker, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Random copies, rings among them, through staging buffers of three blocks; steps write what is copied at once. The
    host has its places in three pieces: pinned as one, up to twice as many bytes would be taken as were counted."""
    luck = random.Random(seed)
    layout = PoolLayout(12, 16, 1, 16, torch.bfloat16)
    monkeypatch.setattr(swap, "STAGED", 3 * 2 * layout.block_bytes)
    monkeypatch.setattr(swap, "PINNED", 3 * 2 * layout.block_bytes + 1)
    pools = [torch.randint(0, 255, (12, layout.block_bytes), dtype=torch.uint8) for _ in range(2)]
    late = Late()
    host = HostPool(kernels(0), pools, 8, late)
    assert [len(piece) for piece in host._host] == [3, 3, 2]
    late.host = {piece.untyped_storage().data_ptr() for piece in host._host}
    known = [torch.cat((pool, torch.zeros(8, layout.block_bytes, dtype=torch.uint8))) for pool in pools]
    lagging = 0
    for _ in range(12):
        pairs = random_pairs(luck)
        host.copy(pairs)
        for pool, all_ in zip(pools, known, strict=True):
            if pairs:
                all_[[target for _, target in pairs]] = all_[[source for source, _ in pairs]]
            assert torch.equal(pool, all_[:12])
            written = luck.randrange(12)  # by the step that follows
            pool[written] = all_[written] = luck.randrange(256)
        lagging += bool(late.waiting)
    assert lagging > 3  # steps went on while blocks were on their way out
    late.hold_steps(late.of_transfers())
    for layer, all_ in enumerate(known):
        assert torch.equal(torch.cat(host._host)[:, layer], all_[12:])


@pytest.mark.parametrize("seed", range(2))
def test_transfers_of_a_device_are_in_order(
    resident_kernels: Maker, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The same with tensors where the kernels are, on a GPU by a real stream: nothing is looked at before the end."""
    luck, kernels = random.Random(seed), resident_kernels(0)
    layout = PoolLayout(12, 16, 4, 64, torch.bfloat16)
    monkeypatch.setattr(swap, "STAGED", 3 * 2 * layout.block_bytes)
    first = [torch.randint(0, 255, (12, layout.block_bytes), dtype=torch.uint8) for _ in range(2)]
    known = [torch.cat((pool, torch.zeros(8, layout.block_bytes, dtype=torch.uint8))) for pool in first]
    pools = [pool.to(kernels.device) for pool in first]
    host = HostPool(kernels, pools, 8)
    for _ in range(10):
        pairs = random_pairs(luck)
        host.copy(pairs)
        written, value = luck.randrange(12), luck.randrange(256)
        for pool, all_ in zip(pools, known, strict=True):
            if pairs:
                all_[[target for _, target in pairs]] = all_[[source for source, _ in pairs]]
            pool[written], all_[written] = value, value
    if kernels.device.type == "cuda":
        torch.cuda.synchronize(kernels.device)
    for layer, (pool, all_) in enumerate(zip(pools, known, strict=True)):
        assert torch.equal(pool.cpu(), all_[:12])
        assert torch.equal(torch.cat(host._host)[:, layer], all_[12:])


@pytest.mark.parametrize("seed", range(40))
def test_rounds_write_nothing_that_is_still_to_be_read(seed: int) -> None:
    luck = random.Random(seed)
    size, most = luck.randrange(2, 30), luck.randrange(1, 9)
    targets = luck.sample(range(size), luck.randrange(1, size))
    pairs = [(luck.randrange(size), target) for target in targets]
    if seed % 2:  # rings and nothing else
        pairs = list(zip(luck.sample(targets, len(targets)), targets, strict=True))
    made = list(swap.rounds(pairs, most))
    assert sorted(pair for some in made for pair in some) == sorted(pairs)
    known = list(range(size))
    for some in made:
        read = [known[source] for source, _ in some]
        for (_, target), value in zip(some, read, strict=True):
            known[target] = value
        following = dict(some)
        rings = [pair for pair in some if pair[1] in following]
        assert len(some) <= most or rings
    want = list(range(size))
    for source, target in pairs:
        want[target] = source
    assert known == want
