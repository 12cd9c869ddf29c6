"""Pads matmuls whose rows do not begin at multiples of 16 bytes, so that they run at full speed.

Matmul libraries use 16-byte loads.  If rows of an operand or of the result are not aligned to 16 bytes, as with logits
over a vocabulary of 50257 tokens, they use kernels of a quarter of the speed.  Inductor pads such matmuls if it is
faster when timed; under deterministic algorithms it does not time, and does not pad.  Here the decision is a pure
function of shapes, strides and dtype (`decide`), so the bits of a matmul depend only on these.

Padding is inserted before a permutation, if there is one, so that all matmuls that read a tensor share one padded copy:
for example a weight that embeds tokens, produces logits and gets a gradient.  The result is a view of the padded
result.  A graph input, such as a weight, is copied once in the forward and again in the backward: a copy kept between
them would be alive at the memory peak, together with logits and their gradient.

Pointwise computations on padded results, such as the gradient of logits, are not copied but computed with padded
columns (`wider`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from ...config import Config
from ...errors import described
from ...graph import sizes
from ...graph.emit import Emitter, erase_dead
from ...graph.model_line import model_line
from ...graph.views import shows_input
from ...model.site import NOMINAL_BATCH, NOMINAL_LEN
from ...records.records import Record
from ...upstream import arch
from ..base.rewrite import Result
from .wider import NotWider, Wider, read_padded

log = logging.getLogger("dash_inductor")
aten = torch.ops.aten

BYTES = 16
"""The alignment in bytes to which rows of operands and results are padded."""
BLOCK, BLOCK_FROM = 64, 1024
"""Sizes of at least `BLOCK_FROM` are padded to a multiple of `BLOCK`, the edge of a tile; others to the next
`BYTES`.
"""
LEAST_OPERATIONS = 1 << 29
"""The minimum number of operations of a product; smaller ones take less time than the launch of a padding kernel."""
OPERATIONS_PER_BYTE, OF_AN_ODD_RESULT = 144, 64
"""The minimum of operations per copied byte at which padding pays; the second value applies if only the rows of the
result are unaligned, as with logits.

An H100 saves about 5 ps per operation (600 instead of 150 TFLOP/s), and needs 0.8 ps per byte read and written.
Unaligned result rows cost more than that, and rows appended to an operand are copied at full bandwidth.  The test of
the decision contains measurements on both sides of the threshold.
"""

NOMINAL = NOMINAL_LEN * NOMINAL_BATCH
"""The value that stands for dynamic sizes in the decision."""
DEVICES = ("cuda",)
"""The device types on which products are padded."""

_MATRICES: Mapping[Any, int] = {
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
}
"""The matmul operators, with the argument index of their first matrix; an addend precedes it."""

_RECORDED = "dash_inductor_padded"  # in node.meta, because the pass may see the same graph again


@dataclass(frozen=True)
class Matrix:
    """The sizes and the layout of a matmul operand [rows, columns]; for a batched matmul, of each batch element.

    Attributes:
        rows, columns: the sizes; None for dynamic ones.
        by_row: whether the elements of each row are contiguous; else those of each column are.
        pitch: the stride in elements between rows (or columns, if not `by_row`); None if it is dynamic.
    """

    rows: int | None
    columns: int | None
    by_row: bool
    pitch: int | None


def decide(left: Matrix, right: Matrix, itemsize: int, batch: int = 1) -> dict[str, int]:
    """Returns which sizes of a matmul [m, k] @ [k, n] are padded, as {"m", "k" or "n": padded size}; may be empty.

    Dynamic sizes are not padded, and count as `NOMINAL`, so that the decision does not depend on their current values.

    Args:
        left, right: the operands.
        itemsize: the bytes per element of operands and result.
        batch: the batch size.
    """
    found = unaligned(left, right, itemsize)
    sizes_of = _nominal(left, right)
    operations = 2 * batch * sizes_of["m"] * sizes_of["k"] * sizes_of["n"]
    enough = operations >= LEAST_OPERATIONS
    needed = OF_AN_ODD_RESULT if [*found] == ["n"] else OPERATIONS_PER_BYTE
    return found if enough and operations_per_byte(left, right, itemsize, found) >= needed else {}


def unaligned(left: Matrix, right: Matrix, itemsize: int) -> dict[str, int]:
    """Returns which sizes of a matmul [m, k] @ [k, n] must be padded so that all rows are aligned to `BYTES` bytes.

    The result is {"m", "k" or "n": padded size}, as for `decide`, but whether padding pays is not considered.
    """
    size = {"m": left.rows, "k": left.columns, "n": right.columns}
    aligned = BYTES // itemsize
    lines = [
        ("k" if left.by_row else "m", left.pitch),
        ("n" if right.by_row else "k", right.pitch),
        ("n", right.columns),  # the result
    ]
    found = {}
    for name, pitch in lines:
        known = size[name]
        if pitch is not None and pitch % aligned and known is not None and _up(known, aligned) != known:
            found[name] = _up(known, aligned)
    return found


def operations_per_byte(left: Matrix, right: Matrix, itemsize: int, padded: Mapping[str, int]) -> float:
    """Returns a matmul's operations per byte of operands that must be copied to pad it; infinity if none is copied.

    Args:
        left, right: the operands.
        itemsize: the bytes per element.
        padded: the sizes that are padded, as `unaligned` returns them.
    """
    size = _nominal(left, right)
    operands = [set("mk"), set("kn")]
    copied = sum(math.prod(size[name] for name in names) for names in operands if names & padded.keys())
    return 2 * math.prod(size.values()) / (copied * itemsize) if copied else math.inf


def _nominal(left: Matrix, right: Matrix) -> dict[str, int]:
    """The sizes of a product by name; dynamic ones are `NOMINAL`."""
    known = {"m": left.rows, "k": left.columns, "n": right.columns}
    return {name: NOMINAL if size is None else size for name, size in known.items()}


def _up(size: int, aligned: int) -> int:
    """The size after padding."""
    step = BLOCK if size >= BLOCK_FROM else aligned
    return -(-size // step) * step


@dataclass(frozen=True)
class PadMmRewrite:
    """The pass that pads `mm`, `bmm`, `addmm` and `baddbmm` on CUDA where `decide` says so."""

    name: ClassVar[str] = "pad_mm"

    def is_on(self, config: Config) -> bool:
        return self.name in config.rewrites

    def apply(self, graph: Graph) -> Sequence[Result]:
        found = [node for node in graph.nodes if node.target in _MATRICES and _RECORDED not in node.meta]
        results, copies = [], _Copies()
        for node in found:
            padded = _decided(node)
            if padded:
                results.append(Result(_rewritten(node, padded, copies)))
        copies.read(graph)
        copies.release(graph)
        return results

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """Returns no fallback records: without this pass, the matmul runs unpadded, which is deterministic, too."""
        return []


@dataclass
class _Copies:
    """The padded operands of a graph.

    Attributes:
        made: (operand, padding as for `constant_pad_nd`) -> padded operand.
        chains: operand -> the nodes that compute it with padded columns.
    """

    made: dict[tuple[Node, tuple[int, ...]], Node] = field(default_factory=dict)
    chains: dict[Node, list[Node]] = field(default_factory=dict)

    def of(self, emitter: Emitter, base: Node, pads: Sequence[int], before: Node) -> Node:
        """Returns a matmul operand padded with zeros: a node that all later matmuls with this operand share.

        Args:
            emitter: adds nodes.
            base: the operand without padding.
            pads: the padding, as for `constant_pad_nd`.
            before: the node before which a copy is inserted, if the operand has to be copied.
        """
        key = base, tuple(pads)
        if key not in self.made:
            self.made[key] = self._wide(emitter, base, pads) or self._copy(emitter, base, pads, before)
        return self.made[key]

    def _copy(self, emitter: Emitter, base: Node, pads: Sequence[int], before: Node) -> Node:
        """Inserts a copy padded with zeros; that of a graph input is recomputed in the backward."""
        kind: Any = aten.constant_pad_nd.default
        copy = emitter.shared(kind, (base, [*pads], 0.0), {}, before=before, like=base)
        if shows_input(base):
            copy.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        return copy

    def _wide(self, emitter: Emitter, base: Node, pads: Sequence[int]) -> Node | None:
        """Inserts the computation of an operand with padded columns; None if it has to be copied."""
        width = base.meta["val"].shape[-1]
        if not pads[1] or any(pads[2:]):
            return None
        known = {
            other: node
            for (other, others), node in self.made.items()
            if others == tuple(pads) and other.meta["val"].shape[-1] == width
        }
        own = Emitter(emitter.graph)
        wider = Wider(own, width, width + pads[1], known, _is_padded, before=emitter.behind(base), like=base)
        try:
            found = wider.with_zeros(base)
        except NotWider:
            own.discard()
            return None
        emitter.created += own.created
        self.chains[base] = own.created
        return found

    def forget(self, emitter: Emitter) -> None:
        """Forgets the padded operands that an emitter has added to the graph and is about to discard."""
        created = set(emitter.created)
        self.made = {key: node for key, node in self.made.items() if node not in created}
        self.chains = {base: nodes for base, nodes in self.chains.items() if not created & {*nodes}}

    def read(self, graph: Graph) -> None:
        """Makes the rest of the graph read the operands that are computed with padded columns, where possible."""
        there = {*graph.nodes}
        for base, nodes in self.chains.items():
            if base in there:
                read_padded(Emitter(graph), base, nodes[-1], {*nodes})
        erase_dead(graph, [base for base in self.chains if base in there])

    def release(self, graph: Graph) -> None:
        """Moves the last matmul that reads a padded copy forward, so that the copy can be freed earlier.

        It is moved before the first padded matmul that reads its other operand.  For example, the gradient of a weight
        is computed before the gradient of the input, whose result is as large as the copy and can reuse its memory.
        """
        there = {*graph.nodes}
        for copy in self.made.values():
            if copy in there and copy.target is aten.constant_pad_nd.default:
                shown = {copy, *(user for user in copy.users if _swapped(user) is copy)}
                readers = [product for each in shown for product in each.users if _is_padded(product)]
                if readers:
                    _move_forward(max(readers), shown)


def _is_padded(node: Node) -> bool:
    return _RECORDED in node.meta and node.target in _MATRICES


def _move_forward(product: Node, copy: Set[Node]) -> None:
    """Moves a product before the first padded product of its operand that is not the copy."""
    operands = [operand for operand in _operands(product) if operand not in copy]
    if len(operands) != 1:
        return
    turned = [user for user in operands[0].users if _swapped(user) is operands[0]]
    others = [user for each in (*operands, *turned) for user in each.users if _is_padded(user) and user < product]
    if not others:
        return
    first = min(others)
    late = [node for node in product.all_input_nodes if not node < first]
    if all(node in copy and all(source < first for source in node.all_input_nodes) for node in late):
        for node in (*late, product):
            first.prepend(node)


def _operands(node: Node) -> tuple[Node, Node]:
    """The two matrices of a matmul."""
    first = _MATRICES[node.target]
    left, right = node.args[first : first + 2]
    assert isinstance(left, Node)
    assert isinstance(right, Node)
    return left, right


def _decided(node: Node) -> dict[str, int]:
    """The result of `decide` for a node; empty if its sizes are not known or its device needs no padding."""
    values = [operand.meta["val"] for operand in _operands(node)]
    value: Tensor = values[0]
    if value.device.type not in DEVICES or not arch.is_supported(value.device):
        return {}
    if any(v.dtype != value.dtype for v in (*values, node.meta["val"])):
        return {}
    fast = value.dtype in (torch.bfloat16, torch.float16) or (
        value.dtype == torch.float32 and arch.allow_tf32(value.device)
    )
    left, right = map(_matrix, values)
    batch = sizes.static(value.shape[0]) if value.dim() == 3 else 1
    if not fast or left is None or right is None:
        return {}
    padded = decide(left, right, value.dtype.itemsize, batch or 1)
    odd = unaligned(left, right, value.dtype.itemsize)
    if odd and not padded and log.isEnabledFor(logging.DEBUG):
        log.debug("product %s stays: rows of %s begin at odd addresses, but padding would not pay", node.name, [*odd])
    return padded


def _matrix(value: Tensor) -> Matrix | None:
    """The `Matrix` of a tensor's last two dimensions; None if neither is contiguous."""
    rows, columns, row, column = (sizes.static(x) for x in (*value.shape[-2:], *value.stride()[-2:]))
    if column == 1 and (row != 1 or columns == 1):
        return Matrix(rows, columns, True, row)
    if row == 1:
        return Matrix(rows, columns, False, column)
    return None


def _rewritten(node: Node, padded: dict[str, int], copies: _Copies) -> Record:
    """Pads one product; returns its record."""
    line, module = model_line([node, *node.users])
    left, right = (operand.meta["val"].shape for operand in _operands(node))
    facts: dict[str, object] = {
        "m": sizes.static(left[-2]),
        "k": sizes.static(left[-1]),
        "n": sizes.static(right[-1]),
        "padded": padded,
        "dtype": str(node.meta["val"].dtype).removeprefix("torch."),
        "rule": {
            "bytes": BYTES,
            "block": BLOCK,
            "block_from": BLOCK_FROM,
            "least_operations": LEAST_OPERATIONS,
            "operations_per_byte": OPERATIONS_PER_BYTE,
            "of_an_odd_result": OF_AN_ODD_RESULT,
        },
    }
    name, op = node.name, str(node.target)
    error = _pad(node, padded, copies)
    words = ", ".join(f"{dim} from {facts[dim]} to {size}" for dim, size in padded.items())
    return Record.of_attempt(
        error,
        rewrite=PadMmRewrite.name,
        name=name,
        op=op,
        detail=f"padded: {words}",
        line=line,
        module=module,
        facts=facts,
    )


def _pad(node: Node, padded: dict[str, int], copies: _Copies) -> str:
    """Replaces a product by a view of a padded one; returns an error message, or "" without an error."""
    emitter = Emitter(node.graph)
    first = _MATRICES[node.target]
    try:
        m, k, n = padded.get("m"), padded.get("k"), padded.get("n")
        left, right = _operands(node)
        matrices = (_padded(emitter, each, wanted, node, copies) for each, wanted in ((left, (m, k)), (right, (k, n))))
        args = [*matrices, *node.args[first + 2 :]]
        if first:
            args.insert(0, _added(emitter, node, (m, n)))
        target: Any = node.target
        product = emitter.call(target, tuple(args), node.kwargs, before=node, like=node)
        product.meta[_RECORDED] = True
        result = product
        for dim, size in ((-2, m), (-1, n)):
            if size is not None:
                end = node.meta["val"].shape[dim]
                axis = node.meta["val"].dim() + dim
                result = emitter.call(aten.slice.Tensor, (result, axis, 0, end), before=node, like=node)
    except Exception as error:
        log.debug("%s", node, exc_info=error)
        copies.forget(emitter)
        emitter.discard()
        node.meta[_RECORDED] = True
        return described(error)
    node.replace_all_uses_with(result)
    erase_dead(node.graph, [node])
    return ""


def _padded(
    emitter: Emitter, operand: Node, wanted: tuple[int | None, int | None], before: Node, copies: _Copies
) -> Node:
    """The operand padded with zeros at the end of its rows and columns, to the sizes `wanted`."""
    if wanted == (None, None):
        return operand
    base, swaps = operand, []
    while (source := _swapped(base)) is not None:
        swaps.append(base)
        base = source
    sizes_of_base = wanted if len(swaps) % 2 == 0 else wanted[::-1]
    amounts = [
        0 if size is None else size - base.meta["val"].shape[dim]
        for size, dim in zip(reversed(sizes_of_base), (-1, -2), strict=True)
    ]
    pads = [amount for each in amounts for amount in (0, each)]
    padded = copies.of(emitter, base, pads, before)
    if len(swaps) % 2 == 0:
        return padded
    order = [*range(padded.meta["val"].dim() - 2), padded.meta["val"].dim() - 1, padded.meta["val"].dim() - 2]
    return emitter.shared(aten.permute.default, (padded, order), {}, before=before, like=swaps[0])


def _swapped(node: Node) -> Node | None:
    """The node of which this one is the transpose (of the last two dimensions); None if it is not one."""
    args: Any = node.args
    source = args[0] if args else None
    if not isinstance(source, Node) or not isinstance(source.meta.get("val"), Tensor):
        return None
    dims = source.meta["val"].dim()
    last = {dims - 1, dims - 2}
    swaps = (
        (node.target is aten.permute.default and [d % dims for d in args[1]] == [*range(dims - 2), dims - 1, dims - 2])
        or (node.target is aten.t.default and dims == 2)
        or (node.target is aten.transpose.int and {d % dims for d in args[1:3]} == last)
    )
    return source if swaps else None


def _added(emitter: Emitter, node: Node, wanted: tuple[int | None, int | None]) -> Node:
    """The addend of a product, padded in the dimensions in which it has the product's sizes."""
    added = node.args[0]
    assert isinstance(added, Node)
    shape, own = node.meta["val"].shape, added.meta["val"].shape
    pads: list[int] = []
    for back, size in ((1, wanted[1]), (2, wanted[0])):
        has = len(own) >= back and sizes.same(own[-back], shape[-back]) and sizes.static(shape[-back]) != 1
        pads += [0, size - own[-back] if size is not None and has else 0]
    pads = pads[: 2 * len(own)]
    if not any(pads):
        return added
    return emitter.shared(aten.constant_pad_nd.default, (added, pads, 0.0), {}, before=node, like=added)
