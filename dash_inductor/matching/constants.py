"""Compares a recognised band with the values of the mask's own operators.

What is checked: everything, where the mask has at most `BUDGET` elements; else, for the first and the last batch entry
and head, all columns of blocks of rows: the first, the middle and the last rows, and those where an edge of the band
enters or leaves the columns.  With dynamic lengths the chain is evaluated at the hinted lengths and at small ones that
the guards of the shape environment allow, shorter and longer than the band is wide, with more keys than queries and
the reverse.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..schedule.problem import Band
from .index_expr import NotRecognised
from .mask_reader import Position, is_size, shape_of
from .real_values import RealValues, Window

BUDGET = 1 << 20
"""Elements of a mask that are compared."""
BLOCK_ROWS = 16
SMALL_LENGTHS = (2, 7, 40)
WIDEST_SMALL = 512
"""Bands up to this width are also checked at small lengths that exceed the width."""

Sizes = dict[sympy.Symbol, sympy.Integer]


def verify(node: Node, chain: list[Node], band: Band, plane: Position, shape_env: ShapeEnv | None) -> None:
    """Raise `NotRecognised` ("value_mismatch") unless the checked elements of the mask are those of `band`.

    Args:
        node: the mask; `chain` its producers, none of which is a tensor input of the graph.
        plane: shape of the scores, [B, H, q_len, kv_len].
    """
    checked = 0
    with _one_thread():
        for sizes in _assignments(chain, band, plane, shape_env):
            _compare(node, band, plane, RealValues(sizes), sizes)
            checked += 1
    if not checked:
        raise NotRecognised("value_mismatch", f"no lengths are known at which {node.name} can be checked")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Operators this small do not gain from threads, and are 30 times slower with them where processes share cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _compare(node: Node, band: Band, plane: Position, values: RealValues, sizes: Sizes) -> None:
    q_len, kv_len = (values.size(n) for n in plane[-2:])
    resolved = band.resolve(q_len, kv_len)
    for window, rows in _windows(values.shape(node), resolved, q_len, kv_len):
        try:
            mask = values.window(node, window)
        except (RuntimeError, IndexError, ValueError, TypeError) as e:
            raise NotRecognised("value_mismatch", f"{node.name} cannot be evaluated{_at(sizes)}: {e}") from e
        values.forget()
        expected = _rows(resolved, rows, kv_len)
        if mask.dtype == torch.bool:
            wrong = mask != expected
        else:
            wrong = torch.where(expected, mask != 0, ~(mask <= torch.finfo(mask.dtype).min / 2))
        if wrong.any():
            place = [int(i) for i in wrong.nonzero()[0]]
            where = f"element {place} of the window {window}{_at(sizes)}"
            raise NotRecognised("value_mismatch", f"{node.name} differs from {band}: {where}")


def _at(sizes: Sizes) -> str:
    return f" at sizes {sizes}" if sizes else ""


def _rows(band: Band, rows: tuple[int, int], kv_len: int) -> torch.Tensor:
    """Rows of the mask that `band` (anchored top left) means: bool, [rows, kv_len]."""
    start, stop = rows
    d = torch.arange(stop - 1, start - kv_len, -1)  # of the last row; the row above sees the same, one column earlier
    visible = torch.ones_like(d, dtype=torch.bool)
    if band.lo is not None:
        visible &= d >= band.lo
    if band.hi is not None:
        visible &= d <= band.hi
    return visible.unfold(0, kv_len, 1).flip(0)


def _windows(shape: tuple[int, ...], band: Band, q_len: int, kv_len: int) -> Iterator[tuple[Window, tuple[int, int]]]:
    """Windows of the mask to compare, each with its range of query rows.  `band` is anchored top left."""
    *outer, rows, columns = (1,) * (2 - len(shape)) + shape
    if torch.Size(outer).numel() * q_len * kv_len <= BUDGET:
        entries, blocks = [[(0, n) for n in outer]], [(0, q_len)]
    else:
        entries = [[(0, 1) for _ in outer], [(n - 1, n) for n in outer]]
        edges = [x for bound in (band.lo, band.hi) if bound is not None for x in (bound, bound + kv_len)]
        centers = sorted({min(max(x, 0), q_len) for x in (0, q_len // 2, q_len, *edges)})
        height = min(BLOCK_ROWS, max(1, BUDGET // (len(entries) * kv_len * len(centers))))
        starts = sorted({min(max(x - height // 2, 0), max(q_len - height, 0)) for x in centers})
        blocks = [(x, min(x + height, q_len)) for x in starts]
    for entry, block in product(entries, blocks):
        window = (*entry, (0, 1) if rows == 1 else block, (0, columns))
        yield window[len(window) - len(shape) :], block


def _assignments(chain: list[Node], band: Band, plane: Position, shape_env: ShapeEnv | None) -> Iterator[Sizes]:
    """Values of the size symbols at which to check: one empty assignment for static shapes."""
    used = {s for n in plane for s in n.free_symbols}
    for node in chain:
        shapes = [node.meta["val"].node.expr] if isinstance(node.meta.get("val"), torch.SymInt) else []
        used |= {s for n in (shapes if is_size(node) else shape_of(node)) for s in n.free_symbols}
    symbols = sorted(used, key=str)
    if not symbols or shape_env is None:
        yield {}
        return
    hints = {s: sympy.Integer(shape_env.backed_var_to_val[s]) for s in symbols if s in shape_env.backed_var_to_val}
    if len(hints) == len(symbols):
        yield hints
    lengths = [s for s in symbols if any(s in n.free_symbols for n in plane[-2:])]
    width = max(abs(x) for x in (band.lo or 0, band.hi or 0))
    others = {s: sympy.Integer(2) for s in symbols if s not in lengths}
    for base in (*SMALL_LENGTHS, *([width + 3] if width <= WIDEST_SMALL else [])):
        for order in (lengths, lengths[::-1])[: len(lengths)]:
            sizes = others | {s: sympy.Integer(base + 5 * i) for i, s in enumerate(order)}
            if sizes != hints and _allowed(sizes, shape_env):
                yield sizes


def _allowed(sizes: Sizes, shape_env: ShapeEnv) -> bool:
    """Whether the ranges and guards of the shape environment admit these values."""
    for symbol, value in sizes.items():
        known = shape_env.bound_sympy(symbol)
        if not known.lower <= value <= known.upper:
            return False
    facts = (guard.expr.xreplace(sizes) for guard in shape_env.guards)
    return not any(fact == sympy.false for fact in facts)
