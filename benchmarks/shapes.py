"""The shapes of the backward benchmark: a regular table, and shapes that are compared with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dash_inductor.model import AttentionSpec, Band, Mask, Site

TOKENS = 16384
HIDDEN = 2048
TILE = 128
CAUSAL, FULL, WINDOW = Band(0), Band(), Band(0, 1023)


@dataclass(frozen=True)
class Shape:
    """One attention backward in bf16 with equal lengths of q and k.

    Args:
        group: the part of the benchmark it belongs to.
        regular: name of the shape of the regular table whose rate per visible tile this one should come near.
        softcap: the bound of scores, None for none.
    """

    group: str
    batch: int
    q_heads: int
    kv_heads: int
    length: int
    head_dim: int
    value_dim: int
    mask: Band
    regular: str | None = None
    softcap: float | None = None

    @property
    def name(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        heads = f"{self.q_heads}" if self.q_heads == self.kv_heads else f"{self.q_heads}/{self.kv_heads}"
        return f"{self.group}:d{dims}:{self.mask}:b{self.batch}h{heads}:s{self.length}"

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def _per_pair(self) -> int:
        """The operations per visible (query, key) pair: three matmuls over the head dim of q and k, two over v's."""
        return 2 * (3 * self.head_dim + 2 * self.value_dim)

    @property
    def flops(self) -> float:
        """Operations of the visible pairs; a causal mask counts as half of all pairs, as is usual."""
        s = self.length
        if self.mask == CAUSAL:
            pairs = s * s / 2
        else:
            pairs = sum(min(s - 1, self._last(i)) - max(0, self._first(i)) + 1 for i in range(s))
        return float(self.batch * self.q_heads * pairs * self._per_pair)

    @property
    def tile_flops(self) -> float:
        """Operations of all tiles of 128 x 128 pairs of which any is visible, ragged ones counted whole."""
        n, tiles = -(-self.length // TILE), 0
        for i in range(n):
            first = max(0, self._first(i * TILE)) // TILE
            last = min(n - 1, self._last(min((i + 1) * TILE, self.length) - 1) // TILE)
            tiles += last - first + 1
        return float(self.batch * self.q_heads * tiles * TILE**2 * self._per_pair)

    def _first(self, i: int) -> int:
        """Returns the first key that query i sees, if there is one."""
        return 0 if self.mask.hi is None else i - self.mask.hi

    def _last(self, i: int) -> int:
        return self.length - 1 if self.mask.lo is None else i - self.mask.lo

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(Mask(self.mask), self.scale, softcap=self.softcap)

    def site(self) -> Site:
        return Site(
            "cuda", "bfloat16", self.batch, self.q_heads, self.kv_heads, self.length, self.length,
            self.head_dim, self.value_dim, self.spec,
        )  # fmt: skip

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, do: [batch, heads, length, head dim], heads interleaved as models have them."""
        g = torch.Generator(device="cuda").manual_seed(0)
        sizes = (
            (self.q_heads, self.head_dim),
            (self.kv_heads, self.head_dim),
            (self.kv_heads, self.value_dim),
            (self.q_heads, self.value_dim),
        )
        return tuple(
            torch.randn(self.batch, self.length, heads, dim, device="cuda", generator=g)
            .to(torch.bfloat16)
            .transpose(1, 2)
            for heads, dim in sizes
        )


def regular(head_dim: int, mask: Band, length: int) -> Shape:
    heads = HIDDEN // head_dim
    return Shape("regular", TOKENS // length, heads, heads, length, head_dim, head_dim, mask)


def _like(group: str, batch: int, q_heads: int, kv_heads: int, length: int, mask: Band, near: Shape) -> Shape:
    return Shape(group, batch, q_heads, kv_heads, length, 128, 128, mask, near.name)


LENGTHS = (1024, 2048, 4096, 8192, 16384)
REGULAR = [regular(d, mask, s) for d in (128, 64) for mask in (FULL, CAUSAL) for s in LENGTHS]
ALSO = [
    *(_like("few", 1, n, n, s, CAUSAL, regular(128, CAUSAL, s)) for s in (8192, 16384) for n in (2, 4, 8)),
    _like("few", 1, 4, 4, 32768, CAUSAL, regular(128, CAUSAL, 16384)),
    *(
        _like("gqa", max(1, TOKENS // s), 64, 8, s, CAUSAL, regular(128, CAUSAL, min(s, 16384)))
        for s in (2048, 4096, 8192, 16384, 32768)
    ),
    _like("gqa", 1, 8, 1, 8192, CAUSAL, regular(128, CAUSAL, 8192)),  # a rank's heads in a tensor-parallel model
    # a query sees 1024 keys, as on average in the causal mask of 2048
    *(
        _like("window", max(1, TOKENS // s), 16, 16, s, WINDOW, regular(128, CAUSAL, 2048))
        for s in (8192, 16384, 32768)
    ),
    *(Shape("mixed", TOKENS // s, 16, 16, s, 192, 128, CAUSAL, regular(128, CAUSAL, s).name) for s in (4096, 8192)),
    # other batch sizes, lengths and head dims, with which predictions are compared as well
    _like("few", 1, 8, 8, 4096, CAUSAL, regular(128, CAUSAL, 4096)),
    *(_like("gqa", b, 64, 8, s, CAUSAL, regular(128, CAUSAL, s)) for b, s in ((2, 2048), (1, 8192))),
    *(Shape("window", 4, 16, 16, 4096, d, d, WINDOW, regular(d, CAUSAL, 2048).name) for d in (128, 64)),
    Shape("wide", 4, 8, 8, 4096, 256, 256, CAUSAL, regular(128, CAUSAL, 4096).name),
    *(_like("odd", 2, 16, 16, 8191, mask, regular(128, mask, 8192)) for mask in (FULL, CAUSAL)),
]
SHAPES = {shape.name: shape for shape in (*REGULAR, *ALSO)}
