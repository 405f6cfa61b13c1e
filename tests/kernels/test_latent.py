"""Latent attention (MLA) on the emulator against fp64: absorbed, and expanded for chunks of prompts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.executors.cuda import expansion
from octavo.executors.cuda.batch import build
from octavo.executors.cuda.expansion import Expansion, pays, reach, share, shares
from octavo.executors.loading.spec import Latent
from octavo.executors.residents import Span, slots_of
from octavo.kernels.cuda import reference
from octavo.kernels.cuda.emulator import Emulator
from octavo.kernels.cuda.launch import Kernels, Step
from octavo.kernels.cuda.pool import LatentLayout
from tests.kernels.conftest import Maker
from tests.kernels.latent import CASES, LATENT_LIMITS, LatentCase, run
from tests.kernels.test_attention import close
from tests.kernels.test_pool import angles


@pytest.mark.parametrize("order", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("name", CASES)
def test_absorbed_decode(kernels: Maker, name: str, order: int) -> None:
    close(*run(kernels(order), CASES[name]))


@pytest.mark.parametrize("fp8", [False, True])
def test_one_stage_is_enough(emulator: Emulator, fp8: bool) -> None:
    """Where shared memory is short."""
    small = emulator.ordered(3, bulk=False, shared_limit=LATENT_LIMITS[1])
    case = LatentCase(((1, 150),), sizes=(512, 64), heads=3, fp8=fp8)
    close(*run(Kernels(small, torch.device("cpu")), case))


@pytest.mark.parametrize("order", [0, 3])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_append(kernels: Maker, fp8: bool, interleaved: bool, order: int) -> None:
    rank = 128 if fp8 else 64
    layout = LatentLayout(3, 32, rank, 16, torch.bfloat16, fp8)
    latent, norm = torch.randn(5, rank + 16).bfloat16(), (torch.rand(rank) + 0.5).bfloat16()
    slots, positions = torch.tensor([0, 17, -1, 40, 95]), torch.tensor([0, 1, 2, 30, 7], dtype=torch.int32)
    pool, table = layout.allocate(), angles(40, 16)
    step = Step(positions, slots, torch.empty(0), torch.empty(0))
    kernels(order).append_latent(layout, step, latent, pool, table, norm, 1e-5, interleaved=interleaved)
    content = reference.rmsnorm(latent[:, :rank], norm, 1e-5) / layout.unit
    rotated = reference.rotate(latent[:, None, rank:], table[positions], interleaved=interleaved)[:, 0]
    want = torch.zeros(96, rank + 16)
    want[slots[slots >= 0]] = torch.cat((content, rotated), dim=1)[slots >= 0]
    got = layout.unpack(pool).float()
    torch.testing.assert_close(got[:, rank:], want[:, rank:], rtol=2**-7, atol=1e-5)
    rtol, atol = (2**-4, 2**-10) if fp8 else (2**-7, 1e-5)
    torch.testing.assert_close(got[:, :rank], want[:, :rank], rtol=rtol, atol=atol)
    rounded = want[:, :rank].to(layout.content_dtype).float(), want[:, rank:].bfloat16().float()
    assert (got == torch.cat(rounded, dim=1)).float().mean() > 0.99  # but for sums that fall between two numbers


@pytest.mark.parametrize("rank", [128, 512])
def test_contents_in_fp8_never_saturate(kernels: Maker, rank: int) -> None:
    """The greatest that a norm gives is within its range; what is not finite stays so."""
    layout, ones = (
        LatentLayout(1, 16, rank, 16 if rank == 128 else 64, torch.bfloat16, fp8=True),
        torch.ones(rank).bfloat16(),
    )
    step = Step(torch.arange(3).int(), torch.arange(3), torch.empty(0), torch.empty(0))
    latent, pool = torch.randn(3, layout.width).bfloat16(), layout.allocate()
    latent[0, :rank], latent[0, 5] = 0, 300  # all of the norm is in one number
    latent[1, 7] = torch.inf
    kernels(0).append_latent(layout, step, latent, pool, angles(3, layout.rotated), ones, 1e-6)
    first, sick, plain = layout.unpack(pool)[:3, :rank].float() * layout.unit
    assert 224 < first[5] / layout.unit <= 448
    assert abs(first[5] - rank**0.5) < 2**-4 * rank**0.5
    assert sick.isnan().any()
    want = reference.rmsnorm(latent[2:, :rank], ones, 1e-6)[0]
    torch.testing.assert_close(plain, want, rtol=2**-4, atol=2**-10 * layout.unit)


EXPANDED = {False: Latent(64, 16, 40, 32), True: Latent(128, 16, 40, 32)}
"""Keys of 56 numbers, which are padded to 64; of contents in 16 bits and in fp8."""


def expanded(kernels: Kernels, fill: int = 0, order: int = 0, *, fp8: bool = False) -> tuple[Tensor, Tensor]:
    """What `Expansion` gives for two sequences, one of them behind a prefix, in groups of heads if memory is short, and
    what attention over keys and values made in fp64 does, [tokens, heads, values]. The pool is NaN where nothing was
    written."""
    latent, heads, size = EXPANDED[fp8], 4, 32
    generator = torch.Generator().manual_seed(order + 1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    layout = LatentLayout(8, size, latent.rank, latent.rotated, torch.bfloat16, fp8)
    units = torch.tensor([*[layout.unit] * latent.rank, *[1.0] * latent.rotated])
    plain = torch.full((8 * size, layout.width), torch.nan)
    lengths, starts = [150, 70], [80, 0]
    tables = np.array([[5, 2, 0, 6, 3], [7, 1, 4, 0, 0]], dtype=np.int32)
    for row, length in enumerate(lengths):
        slots = torch.from_numpy(slots_of(tables[row], np.arange(length), size))
        plain[slots] = random(length, layout.width).bfloat16().float()
    pool = layout.pack(plain / units)
    plain = layout.unpack(pool).float() * units
    into, out_of = random(heads, latent.kept, latent.rank) * 0.2, random(heads, latent.rank, latent.values) * 0.2
    spans = [Span([0] * (n - at), at, tables[i]) for i, (n, at) in enumerate(zip(lengths, starts, strict=True))]
    batch = build(spans, size)
    q = random(len(batch.ids), heads, latent.kept + latent.rotated).bfloat16()
    made = Expansion(kernels, layout, latent, heads, 0.2, 250)
    (wave,) = made.waves(batch, [share(batch, [0, 1], heads)], fill)
    both = into.bfloat16(), out_of.bfloat16()
    out = made.attention(q, wave, *both, pool)
    keys = torch.cat(
        (torch.einsum("nr,hpr->nhp", plain[:, : latent.rank].double(), both[0].double()),
         plain[:, None, latent.rank :].double().expand(-1, heads, -1)), dim=-1,
    )  # fmt: skip
    values = torch.einsum("nr,hrv->nhv", plain[:, : latent.rank].double(), both[1].double())
    padded = torch.nn.functional.pad(values, (0, keys.shape[-1] - latent.values))
    want = reference.attention(
        q, torch.stack((keys, padded)), torch.from_numpy(tables), batch.queries(), block_size=size, scale=0.2
    )
    return out, want[..., : latent.values]


@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("room", "fill", "fp8"), [(1 << 17, 0, False), (1 << 17, 0, True), (500, 0, False), (500, 40, False)]
)
def test_expanded(
    warpgroups: Maker, monkeypatch: pytest.MonkeyPatch, room: int, fill: int, fp8: bool, order: int
) -> None:
    """All heads at once, or two by two; whole contexts, or in parts."""
    monkeypatch.setattr(expansion, "ROOM", room)
    out, want = expanded(warpgroups(order), fill, order, fp8=fp8)
    assert (out - want).abs().max() < 0.03 * want.abs().max()


def test_it_pays_to_expand_when_there_are_fewer_products() -> None:
    """Counted pair by pair, for DeepSeek-V2's heads."""
    latent = Latent(512, 64, 128, 128)
    made = 2 * 512 * (128 + 128)
    for tokens, prefix in ((1, 0), (70, 30), (100, 150), (180, 10**4), (200, 10**5), (512, 7)):
        pairs = sum(prefix + i + 1 for i in range(tokens))
        absorbed = pairs * 2 * (576 + 512) + tokens * made
        assert pays(latent, tokens, prefix + tokens) == (pairs * 2 * (192 + 192) + (prefix + tokens) * made < absorbed)
    assert next(tokens for tokens in range(180, 190) if pays(latent, tokens, 10**7 + tokens)) == 187
    assert all(pays(latent, tokens, tokens) for tokens in range(1, 300))


def test_there_is_room_for_the_longest_context_that_is_expanded_and_no_longer_one() -> None:
    latent = Latent(512, 64, 128, 128)
    assert [reach(latent, chunk, 10**6) for chunk in (1, 64, 187, 10**6)] == [0, 0, 1 << 17, 1 << 17]
    assert [reach(latent, chunk, 3000) for chunk in (64, 256, 8192)] == [0, 3000, 3000]
    assert reach(latent, 8192, 64) == 0
    for chunk in (65, 100, 130, 150):
        longest = reach(latent, chunk, 10**6)
        assert chunk < longest < 10**4
        paid = [
            n
            for tokens in (65, max(65, chunk - 20), chunk)
            for n in range(tokens, 2 * longest)
            if pays(latent, tokens, n)
        ]
        assert max(paid) <= longest
        assert pays(latent, chunk, longest)


def test_what_is_expanded_at_once_has_room() -> None:
    """Decodes, trees and short chunks stay, a context that is too long does; others share as much as there is room
    for."""
    latent, spans = Latent(512, 64, 128, 128), []
    for i, (tokens, start) in enumerate([(1, 500), (300, 0), (64, 0), (300, 200), (400, 700), (100, 900), (200, 810)]):
        spans.append(Span([0] * tokens, start, [*range(100 * i, 100 * i + 64)]))
    found = shares(build(spans, 32), latent, 6, 1024)
    assert [(share.rows, share.heads) for share in found] == [([1, 3], 6), ([6], 6)]
    (first, second) = found
    assert first.tables.tolist() == [[*range(19), *[0] * 13], [*range(19, 51)]]
    assert first.tiles.tolist() == [*range(200, 219), *range(600, 632)]
    assert len(second.tiles) == 64
    assert second.tiles[:3].tolist() == [1200, 1201, 1202]


@pytest.mark.parametrize("fp8", [False, True])
def test_tokens_move_as_if_at_once(fp8: bool) -> None:
    layout = LatentLayout(3, 32, 128, 16, torch.bfloat16, fp8)
    latent = torch.randn(96, 144).bfloat16()
    latent[:, :128] = latent[:, :128].to(layout.content_dtype).bfloat16()
    pool, source, target = layout.pack(latent), torch.tensor([40, 41, 95, 3]), torch.tensor([41, 42, 0, 17])
    layout.move(pool, source, target)
    latent[target] = latent[source]
    assert torch.equal(layout.unpack(pool), latent)


def test_what_no_kernel_can_do_is_refused() -> None:
    with pytest.raises(ValueError, match="latent KV is 72"):
        LatentLayout(1, 16, 72, 16, torch.bfloat16)
    with pytest.raises(ValueError, match=r"latent KV is 64 .* torch.float8_e4m3fn and .* multiples of 128 and of 16"):
        LatentLayout(1, 16, 64, 16, torch.bfloat16, fp8=True)
    with pytest.raises(ValueError, match="block_size is 24"):
        LatentLayout(1, 24, 64, 16, torch.bfloat16)
