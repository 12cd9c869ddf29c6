"""Rows of packed documents by their definition, `model.VarlenLayout` and Note [Rows of documents], in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dash_inductor.model import Band, Mask, Operand, Segments, VarlenLayout
from dash_inductor.model.mask import ALIGNMENT, MAX_LENGTH, ROW_BLOCK

NOBODY = MAX_LENGTH + 1
"""The number of a query of no document."""


def mask_of(band: Band) -> Mask:
    """A mask of rows whose operands are the first four."""
    return Mask(band, segments=Segments(Operand(0), Operand(1), VarlenLayout(Operand(2), Operand(3))))


@dataclass(frozen=True)
class Rows:
    """Rows of documents of these lengths, which lie one behind the other.

    Args:
        behind: tokens after the last document.
        block, alignment: `ROW_BLOCK` and `ALIGNMENT`, or less for kernels in small.
    """

    lengths: tuple[int, ...]
    behind: int = 0
    block: int = ROW_BLOCK
    alignment: int = ALIGNMENT

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.behind

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:d]) for d in range(len(self.lengths) + 1)]

    @property
    def rows(self) -> int:
        starts = len(self.lengths) + 1
        return (self.tokens + starts * (self.alignment - 1)) // self.alignment * self.alignment

    @property
    def begins(self) -> list[int]:
        """The row of each document's first token; and the row of the first token behind the last one."""
        found = [0]
        for length in self.lengths:
            found.append(found[-1] + -(-length // self.alignment) * self.alignment)
        return found

    def documents(self) -> list[tuple[int, int, int]]:
        """(number, first row, first token, tokens) of each, the tokens behind the last one among them."""
        return list(zip(self.begins, self.starts, (*self.lengths, self.behind), strict=True))

    def entries(self) -> list[tuple[int, int, int]]:
        """The documents as `schedule.document_tiles.q_tiles` takes them; the tokens behind them by `alignment`."""
        found = [(start, begin, length) for begin, start, length in self.documents()[:-1] if length]
        begin, start, behind = self.documents()[-1]
        parts = range(0, behind, self.alignment)
        return found + [(start + i, begin + i, -min(self.alignment, behind - i)) for i in parts]

    def tokens_of_rows(self) -> list[int | None]:
        found: list[int | None] = [None] * self.rows
        for begin, start, length in self.documents():
            for i in range(length):
                found[begin + i] = start + i
        return found

    def numbers(self) -> tuple[list[int], list[int]]:
        """The numbers of queries and of keys."""
        queries, keys = [NOBODY] * self.rows, list(range(self.rows))
        for d, (begin, _, length) in enumerate(self.documents()):
            for row in range(begin, begin + length if d < len(self.lengths) else begin):
                queries[row] = keys[row] = begin
        return queries, keys

    def blocks(self) -> tuple[list[int | None], list[int]]:
        """The token of the first row of each row block, None where no row has one; how many rows have one."""
        of_rows = self.tokens_of_rows()
        parts = [of_rows[i : i + self.block] for i in range(0, self.rows, self.block)]
        return [part[0] for part in parts], [sum(token is not None for token in part) for part in parts]

    def operands(self, device: str = "cpu", elsewhere: int | None = None) -> list[Tensor]:
        """The operands of `mask_of`; `elsewhere`: the token offset of row blocks without tokens, else behind all
        tokens.
        """
        queries, keys = (torch.tensor([n], dtype=torch.int32, device=device) for n in self.numbers())
        elsewhere = self.tokens if elsewhere is None else elsewhere
        offset, count = self.blocks()
        offsets = [elsewhere if token is None else token for token in offset]
        return [queries, keys, *(torch.tensor(n, dtype=torch.int32, device=device) for n in (offsets, count))]

    def keep(self, band: Band) -> Tensor:
        """Whether rows see each other: bool [rows, rows]."""
        queries, keys = map(torch.tensor, self.numbers())
        distance = torch.arange(self.rows)[:, None] - torch.arange(self.rows)
        seen = queries[:, None] == keys
        if band.lo is not None:
            seen &= distance >= band.lo
        if band.hi is not None:
            seen &= distance <= band.hi
        return seen

    def filled(self, tensor: Tensor) -> Tensor:
        """[..., rows, dim] of [..., tokens, dim], zeros elsewhere."""
        found = tensor.new_zeros(*tensor.shape[:-2], self.rows, tensor.shape[-1])
        for row, token in enumerate(self.tokens_of_rows()):
            if token is not None:
                found[..., row, :] = tensor[..., token, :]
        return found

    def emptied(self, tensor: Tensor) -> Tensor:
        """[..., tokens, dim] of [..., rows, dim]."""
        found = tensor.new_empty(*tensor.shape[:-2], self.tokens, tensor.shape[-1])
        for row, token in enumerate(self.tokens_of_rows()):
            if token is not None:
                found[..., token, :] = tensor[..., row, :]
        return found


def random_lengths(count: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of documents, about a third of them empty."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator)
    return tuple((lengths * (torch.rand(count, generator=generator) < 0.7)).tolist())


LENGTHS: Sequence[tuple[int, ...]] = ((40, 1, 17), (16, 15, 0, 33), (1, 1, 1), (31,), (5, 90, 16))
"""Lengths of documents in small, where 16 is the alignment: out of order, of one token, of whole tiles and not."""
