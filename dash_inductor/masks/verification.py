"""Verifies the recognised components of a mask against the values that the mask's own operators compute.

All elements are checked if the mask has at most `BUDGET`.  Otherwise, for the first and the last batch element and
head, blocks of rows are checked in all columns: the first, the middle and the last rows, and those where an edge of the
band enters or leaves the columns.  For dynamic lengths the chain is evaluated at the hinted lengths and at others,
mostly small, that the ranges and guards of the shape environment allow: shorter and longer than the width of the band,
with more keys than queries and vice versa.  The data that the components read get random values, from which the graph's
operators compute the mask.  Operators without a rule are never run: they may be random, or user-defined.

Blocks are evaluated in pieces that PyTorch computes on the calling thread.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..model.components import COMPONENTS, Component
from ..model.mask import Band
from .bands import HIDDEN
from .found import ShownPairs
from .index_expr import NotRecognised
from .nodes import Position, as_expr, is_size, is_unknown, meta_of, shape_of
from .normal_form import Components
from .real_values import RealValues, Window, pieces
from .token_data import RANGES, Axis, Load

BUDGET = 1 << 20
"""Maximum number of elements of a mask that are compared."""
BLOCK_ROWS = 16
SMALL_LENGTHS = (0, 5, 38)
"""Dynamic lengths are checked at the shortest possible length plus each of these."""
ALIGNED_LENGTHS = (64, 512)
"""Further such lengths, for sizes that must be multiples of a power of 2."""
WIDEST_SMALL = 512
"""Bands up to this width are also checked at a small length that exceeds the width."""
MOST_ASSIGNMENTS = 10
STEP = 17
"""Random data repeat: an element is the same as the one in the next row this many columns before it."""
FEW_VALUES = (-100, *range(-1, 4), 100)
"""Random data consist of these numbers, and of numbers close to those that data are compared with."""

Sizes = dict[sympy.Symbol, sympy.Integer]


def verify(
    node: Node,
    chain: list[Node],
    components: Components,
    plane: Position,
    shape_env: ShapeEnv | None,
    readable: Container[str],
) -> str:
    """Compare the mask's real values with the recognised components; return a text that says what was compared.

    Args:
        node: the mask.
        chain: the nodes on whose values the mask depends, as `nodes.producers` returns them.
        components: the recognised components.
        plane: the shape of the scores, [B, H, q_len, kv_len].
        shape_env: the shape environment of the graph; None for static sizes.
        readable: the rule names (see `nodes.rule_name`) of the nodes that may be run; others never are.

    Raises:
        NotRecognised: "value_mismatch" if a checked element differs, or none can be checked.
    """
    checked = elements = 0
    for sizes in islice(_assignments(chain, components.band, plane, shape_env), MOST_ASSIGNMENTS):
        elements += _compare(node, components, plane, _values(components, chain, sizes, readable), sizes)
        checked += 1
    if not checked:
        raise NotRecognised("value_mismatch", f"no lengths are known at which {node.name} can be checked")
    lengths = "" if checked == 1 else f" at {checked} choices of lengths"
    return f"{elements} elements compared with what the graph computes{lengths}"


def _values(components: Components, chain: list[Node], sizes: Sizes, readable: Container[str]) -> RealValues:
    """Return the graph's values for these sizes, with random values for the data that the components read.

    Inputs, and results of operators without a rule, are random booleans if they do not matter to the components.
    """
    values, generator = RealValues(sizes), torch.Generator().manual_seed(0)
    for node in chain:
        if is_unknown(node, readable) and not is_size(node):
            drawn = torch.randint(0, 2, (1,) * meta_of(node).dim(), generator=generator)
            values.give(node, drawn.to(meta_of(node).dtype).expand(values.shape(node)))
    close = {c.bound + i for c in components.comparisons for i in (-1, 0, 1)}
    for load in components.loads:
        if components.positions is not None and components.segments is not None and load in components.segments.loads:
            continue  # computed from the positions
        shape, dtype = values.shape(load.node), meta_of(load.node).dtype
        least, greatest = RANGES[dtype]
        choices = torch.tensor(sorted({min(max(x, least), greatest) for x in (*FEW_VALUES, *close)}), dtype=dtype)
        steps = [STEP**d for d in range(len(shape))][::-1]  # overlapping strides save memory
        count = 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        drawn = choices[torch.randint(0, len(choices), (count,), generator=generator)]
        values.give(load.node, drawn.as_strided(shape, steps))
    if components.positions is not None:
        values.give(components.positions.node, _positions(components.positions, values, generator))
    return values


def _positions(load: Load, values: RealValues, generator: torch.Generator) -> torch.Tensor:
    """Return random positions of packed documents: most are one more than the one before, the others are arbitrary."""
    shape, dtype = values.shape(load.node), meta_of(load.node).dtype
    dim = next(d for d, index in enumerate(load.indices) if index.axis not in (None, "b"))
    steps = torch.where(
        torch.rand(shape, generator=generator) < 0.8, 1, torch.randint(-9, 9, shape, generator=generator)
    )
    return steps.cumsum(dim).to(dtype)


def _compare(node: Node, components: Components, plane: Position, values: RealValues, sizes: Sizes) -> int:
    """Compare the mask at these sizes; return the number of elements compared."""
    compared = 0
    q_len, kv_len = (values.size(n) for n in plane[-2:])
    resolved = components.band.resolve(q_len, kv_len)
    shape = values.shape(node)
    vectors = _vectors(components, values, values.size(plane[1]), q_len, kv_len)
    for window, rows in _windows(shape, resolved, q_len, kv_len):
        columns = window[-1] if shape and shape[-1] == kv_len else (0, kv_len)
        try:
            mask = values.window(node, window)
        except (RuntimeError, IndexError, ValueError, TypeError) as e:
            raise NotRecognised("value_mismatch", f"{node.name} cannot be evaluated{_at(sizes)}: {e}") from e
        values.forget()
        compared += mask.numel()
        expected = _visible(resolved, rows, columns)
        entries = window[0] if len(shape) == 4 else (0, 1)
        heads = window[-3] if len(shape) > 2 else (0, 1)
        for kind, given in vectors:
            expected = expected & _shown(kind, given, entries, heads, rows, columns)
        part: dict[Axis, tuple[int, int]] = {"b": entries, "h": heads, "q": rows, "kv": columns}
        for component in components.others:
            if isinstance(component, ShownPairs):
                expected = expected & _plane(component, values, part)
        if mask.dtype == torch.bool:
            wrong = mask != expected
        else:
            wrong = torch.where(expected, mask != 0, ~(mask <= HIDDEN[mask.dtype]))
        if wrong.any():
            place = [int(i) for i in wrong.nonzero()[0]]
            where = f"element {place} of the window {window}{_at(sizes)}"
            raise NotRecognised("value_mismatch", f"{node.name} differs from {components}: {where}")
    return compared


def _vectors(
    components: Components, values: RealValues, heads: int, q_len: int, kv_len: int
) -> list[tuple[type[Component], dict[str, torch.Tensor]]]:
    """Return the classes of the components that have vectors, each with its vectors by field."""
    calculator = _Tensors(values, {"h": heads, "q": q_len, "kv": kv_len})
    found = []
    for component in components.others:
        if not isinstance(component, ShownPairs):
            given = component.compute(calculator)
            found.append(
                (COMPONENTS[component.NAME], given | {name: given[other] for name, other in component.same.items()})
            )
    return found


@dataclass(frozen=True)
class _Tensors:
    """A `token_vectors.Calculator` on real tensors."""

    values: RealValues
    lengths: dict[str, int]

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = operator(*args, **kwargs)
        return result

    def tensor(self, node: Node) -> torch.Tensor:
        return self.values.whole(node)

    def positions(self, axis: Axis) -> torch.Tensor:
        return torch.arange(self.lengths[axis])[None]

    def size(self, symbol: sympy.Symbol) -> int:
        return int(self.values.size(symbol))


def _shown(
    kind: type[Component],
    given: Mapping[str, torch.Tensor],
    entries: tuple[int, int],
    heads: tuple[int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
) -> torch.Tensor:
    """Return which pairs a component shows in a window: bool [batch or 1, heads or 1, rows or 1, columns or 1]."""
    found = {}
    for name, vector in given.items():
        if kind.BY_HEAD:
            found[name] = _part(vector, entries, heads, rows, columns)
            continue
        of_keys = "kv" in kind.AXES[name]
        part = _part(vector, entries, columns if of_keys else rows)
        found[name] = part[:, None, None] if of_keys else part[:, None, :, None]
    shown: torch.Tensor = kind.shows(found, torch.arange(*columns))
    return shown


def _plane(dense: ShownPairs, values: RealValues, window: Mapping[Axis, tuple[int, int]]) -> torch.Tensor:
    """Return the dense mask in a window of the scores, of size 1 where it does not vary."""
    (plane,) = dense.within(window).compute(_Tensors(values, {})).values()
    found: torch.Tensor = plane
    return found


def _part(tensor: torch.Tensor, *ranges: tuple[int, int]) -> torch.Tensor:
    """Return a range along each dimension; dimensions of size 1 are kept."""
    parts = (slice(None) if n == 1 else slice(*part) for n, part in zip(tensor.shape, ranges, strict=True))
    return tensor[tuple(parts)]


def _at(sizes: Sizes) -> str:
    return f" at sizes {sizes}" if sizes else ""


def _visible(band: Band, rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor:
    """Return the part of the mask that `band` (anchored top left) describes: bool, [rows, columns]."""
    start, stop = rows
    length = columns[1] - columns[0]
    d = torch.arange(stop - 1 - columns[0], start - columns[1], -1)  # d of the last row, then of rows above
    visible = torch.ones_like(d, dtype=torch.bool)
    if band.lo is not None:
        visible &= d >= band.lo
    if band.hi is not None:
        visible &= d <= band.hi
    return visible.unfold(0, length, 1).flip(0)


def _windows(shape: tuple[int, ...], band: Band, q_len: int, kv_len: int) -> Iterator[tuple[Window, tuple[int, int]]]:
    """Yield windows of the mask to compare, each with its range of query rows; `band` is anchored top left."""
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
        for part in pieces((*entry, block, (0, columns))):
            window = (*part[:-2], (0, 1) if rows == 1 else part[-2], part[-1])
            yield window[len(window) - len(shape) :], part[-2]


def _assignments(chain: list[Node], band: Band, plane: Position, shape_env: ShapeEnv | None) -> Iterator[Sizes]:
    """Yield values of the size symbols at which to check; one empty assignment for static shapes."""
    used = {s for n in plane for s in n.free_symbols}
    for node in chain:
        extents = (as_expr(node),) if is_size(node) else shape_of(node)
        used |= {s for n in extents for s in n.free_symbols}
    symbols = sorted(used, key=str)
    if not symbols or shape_env is None:
        yield {}
        return
    tried: list[Sizes] = []
    for sizes in _candidates(symbols, band, plane, shape_env):
        if sizes not in tried and _allowed(sizes, shape_env):
            tried.append(sizes)
            yield sizes


def _candidates(symbols: list[sympy.Symbol], band: Band, plane: Position, shape_env: ShapeEnv) -> Iterator[Sizes]:
    """Yield the hints, then lengths within their ranges that differ from each other, in both orders.

    Other sizes, which may be negative, cycle through a few values.
    """
    hints = {s: sympy.Integer(shape_env.backed_var_to_val[s]) for s in symbols if s in shape_env.backed_var_to_val}
    if len(hints) == len(symbols):
        yield hints
    lengths = [s for s in symbols if any(s in n.free_symbols for n in plane[-2:])]
    width = max(abs(x) for x in (band.lo or 0, band.hi or 0))
    longer = (*SMALL_LENGTHS, *([width + 1] if width <= WIDEST_SMALL else []), *ALIGNED_LENGTHS)
    for turn, (base, step) in enumerate((base, step) for step in (5, 64) for base in longer):
        others = {s: _inside(shape_env, s, (0, 3, 1)[turn % 3]) for s in symbols if s not in lengths}
        for order in (lengths, lengths[::-1])[: max(1, len(lengths))]:
            yield others | {s: _inside(shape_env, s, base + step * i, i) for i, s in enumerate(order)}


def _inside(shape_env: ShapeEnv, symbol: sympy.Symbol, above: int, below: int = 0) -> sympy.Integer:
    """Return the minimum of the symbol's range plus `above` or, if that is too large, its maximum minus `below`."""
    known = shape_env.bound_sympy(symbol)
    value = sympy.Integer(above + (int(known.lower) if known.lower.is_Integer else -2))
    if known.upper.is_Integer and value > known.upper:
        value = sympy.Integer(max(int(known.upper) - below, int(known.lower) if known.lower.is_Integer else -2))
    return value


def _allowed(sizes: Sizes, shape_env: ShapeEnv) -> bool:
    """Return whether the ranges and guards of the shape environment allow these values."""
    for symbol, value in sizes.items():
        known = shape_env.bound_sympy(symbol)
        if not known.lower <= value <= known.upper:
            return False
    facts = (shape_env.replace(guard.expr).xreplace(sizes) for guard in shape_env.guards)
    return not any(fact == sympy.false for fact in facts)
