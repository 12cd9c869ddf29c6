"""Pads matmuls whose rows begin at addresses that are no multiples of 16 bytes, so that they run at full rate.

Libraries of matmuls read 16 bytes at a time.  Where rows of an operand or of the result begin elsewhere, as those of
logits over a vocabulary of 50257 tokens, they fall back to kernels of a quarter of the rate.  Inductor pads such
matmuls where a timing says that it pays; under deterministic algorithms it times nothing and pads nothing.  Here the
decision is a pure function of shapes, strides and dtype (`decide`), so that the bits of a matmul follow from its shape.

Padding is inserted in front of a permutation where there is one, so that all matmuls that read a tensor share one
padded copy: for example a weight that embeds tokens, makes logits and has a gradient.  The result is a view of the
padded result.  A graph input, such as a weight, is copied once in the forward and once in the backward.  A copy that is
kept in between would be alive where memory is scarcest, beside logits and their gradient.

Pointwise computations on padded results, as the gradient of logits is, are not copied but computed with padded columns
(`wider`).
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
"""Rows of operands and of the result begin at multiples of this many bytes, else they are padded."""
BLOCK, BLOCK_FROM = 64, 1024
"""Sizes from `BLOCK_FROM` on are padded to a multiple of `BLOCK`, the edge of a tile; others to the next `BYTES`."""
LEAST_OPERATIONS = 1 << 29
"""Smaller products take less time than a launch of the kernel that pads."""
OPERATIONS_PER_BYTE, OF_AN_ODD_RESULT = 144, 64
"""Operations for each byte that padding copies, below which it does not pay; the second where only the rows of the
result begin at odd addresses, as those of logits.

An H100 saves about 5 ps an operation, by 600 TFLOP/s in place of 150, and takes 0.8 ps for a byte that is read and
written.  Odd rows of a result cost more than that, and rows behind an operand are copied at full rate.  The test of the
decision has what was measured on both sides of the border.
"""

NOMINAL = NOMINAL_LEN * NOMINAL_BATCH
"""The value of dynamic sizes in the decision."""
DEVICES = ("cuda",)
"""Types of devices whose products are padded."""

_MATRICES: Mapping[Any, int] = {
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
}
"""The products, and the place of their first matrix among the arguments; in front of it is what is added."""

_RECORDED = "dash_inductor_padded"  # in the metadata of a product: the pass may see a graph again


@dataclass(frozen=True)
class Matrix:
    """The facts about an operand, [rows, columns], of each batch element.

    Attributes:
        rows, columns: its sizes; None for dynamic ones.
        by_row: the elements of a row lie side by side, else those of a column do.
        pitch: elements from one such line to the next; None for a dynamic number.
    """

    rows: int | None
    columns: int | None
    by_row: bool
    pitch: int | None


def decide(left: Matrix, right: Matrix, itemsize: int, batch: int = 1) -> dict[str, int]:
    """Returns the sizes to pad, "m", "k" or "n" of [m, k] @ [k, n], with their new values; empty where none is padded.

    Dynamic sizes are not padded, and count as `NOMINAL`: the decision does not depend on the sizes at hand.

    Args:
        itemsize: bytes of an element of operands and result.
        batch: products of this shape.
    """
    found = unaligned(left, right, itemsize)
    sizes_of = _nominal(left, right)
    operations = 2 * batch * sizes_of["m"] * sizes_of["k"] * sizes_of["n"]
    enough = operations >= LEAST_OPERATIONS
    needed = OF_AN_ODD_RESULT if [*found] == ["n"] else OPERATIONS_PER_BYTE
    return found if enough and operations_per_byte(left, right, itemsize, found) >= needed else {}


def unaligned(left: Matrix, right: Matrix, itemsize: int) -> dict[str, int]:
    """The sizes whose padding lets all rows of [m, k] @ [k, n] begin at multiples of `BYTES`, with their new values."""
    size = {"m": left.rows, "k": left.columns, "n": right.columns}
    aligned = BYTES // itemsize
    lines = [
        ("k" if left.by_row else "m", left.pitch),
        ("n" if right.by_row else "k", right.pitch),
        ("n", right.columns),  # of the result
    ]
    found = {}
    for name, pitch in lines:
        known = size[name]
        if pitch is not None and pitch % aligned and known is not None and _up(known, aligned) != known:
            found[name] = _up(known, aligned)
    return found


def operations_per_byte(left: Matrix, right: Matrix, itemsize: int, padded: Mapping[str, int]) -> float:
    """Operations of a product for each byte of the operands that are copied if these sizes are padded."""
    size = _nominal(left, right)
    operands = [set("mk"), set("kn")]
    copied = sum(math.prod(size[name] for name in names) for names in operands if names & padded.keys())
    return 2 * math.prod(size.values()) / (copied * itemsize) if copied else math.inf


def _nominal(left: Matrix, right: Matrix) -> dict[str, int]:
    """Sizes of a product, of which dynamic ones count as `NOMINAL`."""
    known = {"m": left.rows, "k": left.columns, "n": right.columns}
    return {name: NOMINAL if size is None else size for name, size in known.items()}


def _up(size: int, aligned: int) -> int:
    """The next multiple to which a size is padded."""
    step = BLOCK if size >= BLOCK_FROM else aligned
    return -(-size // step) * step


@dataclass(frozen=True)
class PadMmRewrite:
    """Pads `mm`, `bmm`, `addmm` and `baddbmm` on CUDA, where the rule of `decide` says that it pays."""

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
        """Returns no results: a product that is left is PyTorch's, and as deterministic."""
        return []


@dataclass
class _Copies:
    """The padded operands of a graph.

    Attributes:
        made: by the operand and the zeros behind its dimensions, as `constant_pad_nd` wants them.
        chains: by an operand that is computed with padded columns, the nodes that do so.
    """

    made: dict[tuple[Node, tuple[int, ...]], Node] = field(default_factory=dict)
    chains: dict[Node, list[Node]] = field(default_factory=dict)

    def of(self, emitter: Emitter, base: Node, pads: Sequence[int], before: Node) -> Node:
        """A padded operand, the same one for all products in front of which it is."""
        key = base, tuple(pads)
        if key not in self.made:
            self.made[key] = self._wide(emitter, base, pads) or self._copy(emitter, base, pads, before)
        return self.made[key]

    def _copy(self, emitter: Emitter, base: Node, pads: Sequence[int], before: Node) -> Node:
        """A copy with zeros.  That of an input is made again in the backward, which has the input in any case."""
        kind: Any = aten.constant_pad_nd.default
        copy = emitter.shared(kind, (base, [*pads], 0.0), {}, before=before, like=base)
        if shows_input(base):
            copy.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        return copy

    def _wide(self, emitter: Emitter, base: Node, pads: Sequence[int]) -> Node | None:
        """The operand computed with padded columns; None if it has to be copied."""
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
        """Forget the operands that an emitter has made, and is about to take back."""
        created = set(emitter.created)
        self.made = {key: node for key, node in self.made.items() if node not in created}
        self.chains = {base: nodes for base, nodes in self.chains.items() if not created & {*nodes}}

    def read(self, graph: Graph) -> None:
        """Let the rest of the graph read operands that are computed with padded columns, where it can."""
        there = {*graph.nodes}
        for base, nodes in self.chains.items():
            if base in there:
                read_padded(Emitter(graph), base, nodes[-1], {*nodes})
        erase_dead(graph, [base for base in self.chains if base in there])

    def release(self, graph: Graph) -> None:
        """Let the last product that reads a padded copy come before others of its other operand, as the gradient of a
        weight is: their results are as large as the copy, and can have its memory.
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
    """Move a product in front of the first padded product of its operand that is not the copy."""
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
    """The two matrices of a product."""
    first = _MATRICES[node.target]
    left, right = node.args[first : first + 2]
    assert isinstance(left, Node)
    assert isinstance(right, Node)
    return left, right


def _decided(node: Node) -> dict[str, int]:
    """`decide` of a node; empty where sizes are not known or the device has no need."""
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
    """The facts about the last two dimensions of a tensor; None if no elements lie side by side in one of them."""
    rows, columns, row, column = (sizes.static(x) for x in (*value.shape[-2:], *value.stride()[-2:]))
    if column == 1 and (row != 1 or columns == 1):
        return Matrix(rows, columns, True, row)
    if row == 1:
        return Matrix(rows, columns, False, column)
    return None


def _rewritten(node: Node, padded: dict[str, int], copies: _Copies) -> Record:
    """Pad one product; returns its record."""
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
    """Put a padded product and a view of it in the place of a node; the error that has left it as it was, or ""."""
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
    """An operand with zeros behind its rows and columns, up to the sizes `wanted`."""
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
    """The node of which this one is a view with the last two dimensions swapped; None if it is none."""
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
    """The tensor that is added to a product, padded in the dimensions in which it has the product's sizes."""
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
