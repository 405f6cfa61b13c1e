"""Latent attention (MLA) on the emulator: absorbed decode against fp64, and the same model expanded for prefill."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.kernels.cuda import reference
from octavo.kernels.cuda.emulator import Emulator
from octavo.kernels.cuda.instances import DECODE_ROWS, PREFILL_ROWS, Heads
from octavo.kernels.cuda.launch import Kernels, Step
from octavo.kernels.cuda.plan import Query, plan
from octavo.kernels.cuda.pool import LatentLayout, PoolLayout
from tests.kernels.conftest import Maker
from tests.kernels.latent import CASES, LATENT_LIMITS, LATENTS, LatentCase, run
from tests.kernels.test_attention import close
from tests.kernels.test_pool import angles


@pytest.mark.parametrize("order", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("name", CASES)
def test_absorbed_decode(kernels: Maker, name: str, order: int) -> None:
    close(*run(kernels(order), CASES[name]))


def test_one_stage_is_enough(emulator: Emulator) -> None:
    """Where shared memory is short."""
    small = emulator.ordered(3, bulk=False, shared_limit=LATENT_LIMITS[1])
    case = LatentCase(((1, 150),), sizes=LATENTS[1], heads=3)
    close(*run(Kernels(small, torch.device("cpu")), case))


@pytest.mark.parametrize("order", [0, 3])
@pytest.mark.parametrize("interleaved", [False, True])
def test_append(kernels: Maker, interleaved: bool, order: int) -> None:
    layout = LatentLayout(3, 32, 64, 16, torch.bfloat16)
    latent, norm = torch.randn(5, 80).bfloat16(), (torch.rand(64) + 0.5).bfloat16()
    slots, positions = torch.tensor([0, 17, -1, 40, 95]), torch.tensor([0, 1, 2, 30, 7], dtype=torch.int32)
    pool, table = layout.allocate(), angles(40, 16)
    step = Step(positions, slots, torch.empty(0), torch.empty(0))
    kernels(order).append_latent(layout, step, latent, pool, table, norm, 1e-5, interleaved=interleaved)
    content = reference.rmsnorm(latent[:, :64], norm, 1e-5)
    rotated = reference.rotate(latent[:, None, 64:], table[positions], interleaved=interleaved)[:, 0]
    want = torch.zeros(96, 80)
    want[slots[slots >= 0]] = torch.cat((content, rotated), dim=1)[slots >= 0]
    got = layout.unpack(pool).float()
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-5)
    assert (got == want.bfloat16().float()).float().mean() > 0.99  # but for sums that fall between two numbers


def test_prefill_expanded_and_decode_absorbed_are_one_model(kernels: Maker) -> None:
    """Keys and values made of the latent rows for every head, against queries taken into the latent space."""
    heads, content, rotated, plain, length = 4, 64, 16, 32, 70
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    latent = random(80, content + rotated).bfloat16().float()
    up_k, up_v = (random(heads, plain, content) * content**-0.5 for _ in range(2))
    q = random(1, heads, plain + rotated)
    scale = (plain + rotated) ** -0.5
    made = kernels(1)

    # Expanded: a head has its own keys of 48 numbers, and values of 32 padded to as many.
    wide = plain + rotated
    keys = torch.cat(
        (torch.einsum("nc,hpc->nhp", latent[:, :content], up_k), latent[:, None, content:].expand(-1, heads, -1)), -1
    )
    values = torch.nn.functional.pad(torch.einsum("nc,hpc->nhp", latent[:, :content], up_v), (0, rotated))
    expanded = Heads(heads, torch.bfloat16, PoolLayout(5, 16, heads, wide, torch.bfloat16), scale)
    step = Step(
        torch.tensor([length - 1], dtype=torch.int32),
        torch.empty(0),
        torch.zeros(1, dtype=torch.int32),
        torch.arange(5, dtype=torch.int32).view(1, 5),
    )
    query = Query(0, 0, 1, length)
    mixed = torch.empty(1, heads, wide).bfloat16()
    staged = made.stage(plan([query], 1, PREFILL_ROWS), heads, wide)
    made.attention(expanded, step, staged, q.bfloat16(), expanded.layout.pack(torch.stack((keys, values))), mixed)

    # Absorbed: up_k goes into the query, up_v comes after the attention.
    layout = LatentLayout(5, 16, content, rotated, torch.bfloat16)
    absorbed = torch.cat((torch.einsum("thp,hpc->thc", q[..., :plain], up_k), q[..., plain:]), -1).bfloat16()
    inner = torch.empty(1, heads, content).bfloat16()
    staged = made.stage(plan([query], heads, DECODE_ROWS), 1, content)
    made.attention_latent(layout, step, staged, absorbed, layout.pack(latent), inner, scale)
    outer = torch.einsum("thc,hpc->thp", inner.float(), up_v)
    torch.testing.assert_close(mixed[..., :plain].float(), outer, rtol=0.02, atol=0.02)
    assert mixed[..., plain:].float().abs().max() == 0


def test_tokens_move_as_if_at_once() -> None:
    layout = LatentLayout(3, 32, 64, 16, torch.bfloat16)
    latent = torch.randn(96, 80).bfloat16()
    pool, source, target = layout.pack(latent), torch.tensor([40, 41, 95, 3]), torch.tensor([41, 42, 0, 17])
    layout.move(pool, source, target)
    latent[target] = latent[source]
    assert torch.equal(layout.unpack(pool), latent)


def test_what_no_kernel_can_do_is_refused() -> None:
    with pytest.raises(ValueError, match="latent KV is 72"):
        LatentLayout(1, 16, 72, 16, torch.bfloat16)
    with pytest.raises(ValueError, match="block_size is 24"):
        LatentLayout(1, 24, 64, 16, torch.bfloat16)
