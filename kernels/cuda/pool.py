"""The layout of the KV pool: the only Python that knows it. `tile.cuh` is its twin in CUDA.

A layer's pool is bytes [block][tile of 16 tokens][KV head][keys, values][image]. An image is 16 rows of head_dim
numbers as shared memory wants them: panels of 8, 4, 2 or 1 chunks of 16 bytes, rows one after another in a panel, and a
row's chunks exchanged by its number (so that ldmatrix finds its 8 rows in 8 different banks). A pool of latent KV
has two images a tile, whose content may be fp8: [block][tile of 16 tokens][content, what is rotated].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 16
_CHUNK = 16


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """`block_size` is a multiple of 16; `dtype` is bfloat16, float16 or float8_e4m3fn."""

    blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.block_size < TILE or self.block_size % TILE:
            raise ValueError(f"block_size is {self.block_size}; kernels need a multiple of {TILE}")
        step = 32 if self.dtype.itemsize == 1 else 16
        if self.head_dim % step or not step <= self.head_dim <= 256:
            raise ValueError(
                f"head_dim is {self.head_dim}; with {self.dtype} KV it must be a multiple of {step} up to 256"
            )

    @property
    def tiles_per_block(self) -> int:
        return self.block_size // TILE

    @property
    def block_bytes(self) -> int:
        """Of one layer."""
        return self.block_size * self.kv_heads * 2 * self.head_dim * self.dtype.itemsize

    def allocate(self, device: torch.device | str = "cpu") -> Tensor:
        """One layer's pool, zeroed, as bytes [blocks, block_bytes]."""
        return torch.zeros(self.blocks, self.block_bytes, dtype=torch.uint8, device=device)

    def pack(self, kv: Tensor) -> Tensor:
        """Plain [2, blocks · block_size, kv_heads, head_dim] to a pool."""
        images = self._tiled(kv.to(self.dtype)).flatten(-2)
        stored = torch.empty_like(images.view(_integer(self.dtype)))
        stored[..., _places(self.head_dim, self.dtype, kv.device)] = images.view(_integer(self.dtype))
        return stored.view(torch.uint8).reshape(self.blocks, self.block_bytes)

    def unpack(self, pool: Tensor) -> Tensor:
        """A pool to plain [2, blocks · block_size, kv_heads, head_dim]."""
        tiles = self.blocks * self.tiles_per_block
        images = pool.view(_integer(self.dtype)).view(tiles, self.kv_heads, 2, -1)
        images = images[..., _places(self.head_dim, self.dtype, pool.device)]
        rows = images.view(self.dtype).view(tiles, self.kv_heads, 2, TILE, self.head_dim)
        return rows.permute(2, 0, 3, 1, 4).reshape(2, tiles * TILE, self.kv_heads, self.head_dim)

    def move(self, pool: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy tokens from slots `source` to `target` (int64 [n]), as if all were read before any is written."""
        images = pool.view(_integer(self.dtype)).view(-1, self.kv_heads, 2, TILE * self.head_dim)
        places = _places(self.head_dim, self.dtype, pool.device).view(TILE, self.head_dim)
        read = images[(source // TILE)[:, None], :, :, places[source % TILE]]
        images[(target // TILE)[:, None], :, :, places[target % TILE]] = read

    def _tiled(self, kv: Tensor) -> Tensor:
        tiles = kv.view(2, -1, TILE, self.kv_heads, self.head_dim)
        return tiles.permute(1, 3, 0, 2, 4).contiguous()


@dataclass(frozen=True, slots=True)
class LatentLayout:
    """Of models with multi-head latent attention: a token has one row of `content` + `rotated` numbers, which is its
    key for all heads and whose content is its value. `dtype` is bfloat16 or float16; with `fp8` contents are
    float8_e4m3fn in units of `unit`, and must be normed: no number is above the root of how many they are."""

    blocks: int
    block_size: int
    content: int
    rotated: int
    dtype: torch.dtype
    fp8: bool = False

    def __post_init__(self) -> None:
        if self.block_size < TILE or self.block_size % TILE:
            raise ValueError(f"block_size is {self.block_size}; kernels need a multiple of {TILE}")
        step = 128 if self.fp8 else 64
        if self.content % step or self.rotated % 16 or self.dtype.itemsize != 2:
            raise ValueError(
                f"latent KV is {self.content} + {self.rotated} numbers, {self.content_dtype} and {self.dtype}; kernels "
                f"need multiples of {step} and of 16, what is rotated in 16 bits"
            )

    @property
    def content_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.fp8 else self.dtype

    @property
    def unit(self) -> float:
        """What 1 of a content stands for. In fp8 a power of two, which costs no bit, in whose units the greatest number
        that there can be is between 224 and 448, the most that e4m3 has: nothing saturates, and what is 14000 times
        smaller still has all the bits that e4m3 has."""
        return float(2.0 ** math.ceil(math.log2(self.content**0.5 / 448))) if self.fp8 else 1.0

    @property
    def width(self) -> int:
        return self.content + self.rotated

    @property
    def tiles_per_block(self) -> int:
        return self.block_size // TILE

    @property
    def block_bytes(self) -> int:
        """Of one layer."""
        return self.block_size * 2 * self._units

    def allocate(self, device: torch.device | str = "cpu") -> Tensor:
        """One layer's pool, zeroed, as bytes [blocks, block_bytes]."""
        return torch.zeros(self.blocks, self.block_bytes, dtype=torch.uint8, device=device)

    def pack(self, latent: Tensor) -> Tensor:
        """Plain [blocks · block_size, width] to a pool; contents in units."""
        content, rotated = latent[:, : self.content], latent[:, self.content :]
        parts = content.to(self.content_dtype).contiguous(), rotated.to(self.dtype).contiguous()
        rows = torch.cat([part.view(torch.int16) for part in parts], dim=-1)
        stored = torch.empty_like(rows).view(-1, TILE * self._units)
        stored[:, self._places(latent.device).flatten()] = rows.view(-1, TILE * self._units)
        return stored.view(torch.uint8).reshape(self.blocks, self.block_bytes)

    def unpack(self, pool: Tensor) -> Tensor:
        """A pool to plain [blocks · block_size, width] in `dtype`; contents in units."""
        images = pool.view(torch.int16).view(-1, TILE * self._units)
        rows = images[:, self._places(pool.device).flatten()].view(-1, self._units)
        content, rotated = rows[:, : self._units - self.rotated], rows[:, self._units - self.rotated :]
        parts = content.contiguous().view(self.content_dtype), rotated.contiguous().view(self.dtype)
        return torch.cat([part.to(self.dtype) for part in parts], dim=-1)

    def move(self, pool: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy tokens from slots `source` to `target` (int64 [n]), as if all were read before any is written."""
        images, places = pool.view(torch.int16).view(-1, TILE * self._units), self._places(pool.device)
        read = images[(source // TILE)[:, None], places[source % TILE]]
        images[(target // TILE)[:, None], places[target % TILE]] = read

    @property
    def _units(self) -> int:
        """Of 16 bits, in a row."""
        return self.content * self.content_dtype.itemsize // 2 + self.rotated

    def _places(self, device: torch.device) -> Tensor:
        """Where each unit of a tile lies, [row, unit]."""
        content = self._units - self.rotated
        parts = (_places(width, torch.int16, device).view(TILE, width) for width in (content, self.rotated))
        return torch.cat([part + first for part, first in zip(parts, (0, TILE * content), strict=True)], dim=1)


def _places(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where each number of an image of rows of `width` numbers lies, by row then dimension."""
    size = dtype.itemsize
    chunks, per_chunk = width * size // _CHUNK, _CHUNK // size
    row = torch.arange(TILE, device=device).unsqueeze(1)
    places = []
    for start, panel in _panels(chunks):
        chunk = torch.arange(panel, device=device) ^ ((row & 7) * panel // 8)
        at = start * TILE + row * panel + chunk
        places.append((at.unsqueeze(-1) * per_chunk + torch.arange(per_chunk, device=device)).view(TILE, -1))
    return torch.cat(places, dim=1).reshape(-1)


def _panels(chunks: int) -> list[tuple[int, int]]:
    """First chunk and width of each panel."""
    panels = []
    start = 0
    for width in (8, 4, 2, 1):
        while chunks - start >= width:
            panels.append((start, width))
            start += width
    return panels


def _integer(dtype: torch.dtype) -> torch.dtype:
    """Bits of that size: indexing and copying is not defined for every number type."""
    return torch.int8 if dtype.itemsize == 1 else torch.int16
