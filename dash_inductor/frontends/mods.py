"""Inlines a mod (`mask_mod` or `score_mod` of FlexAttention) into the surrounding graph, for all scores at once.

A mod is a graph on single numbers: the score, the indices of its batch element, head, query and key, and tensors of the
program.  To compute it for all scores, each index becomes a vector of all its values along one of four dimensions, and
elementwise operators broadcast.  An operator that depends on an index is refused if it is neither elementwise nor reads
one element of a tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..graph import sizes
from ..graph.nodes import bind, is_elementwise, op_name
from ..graph.numbers import rounded
from ..graph.temporaries import Temporaries
from ..model.reasons import Reason
from ..upstream.dispatch import HigherOrderOperator, OpOverload, disable_current_modes
from ..upstream.fake import is_fake
from ..upstream.pytree import tree_leaves, tree_map_only
from .attention import NotReadable

aten, prims = torch.ops.aten, torch.ops.prims

INDICES = ("b", "h", "q", "kv")
"""The names of a score's indices, and of its dimensions."""

_LOW = (torch.float16, torch.bfloat16)
"""Dtypes that kernels do not compute in: FlexAttention's kernels compute in float32 what a mod computes in these."""

_CONSTANT = {f"aten::{of}{name}": value for of in ("", "new_") for name, value in (("ones", 1), ("zeros", 0))}
_CONSTANT |= {"aten::ones_like": 1, "aten::zeros_like": 0}
_FILLED = ("aten::full", "aten::full_like", "aten::new_full")

_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "remainder": "%", "ge": ">=", "gt": ">", "le": "<=", "lt": "<",
    "eq": "==", "ne": "!=", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "logical_and": "&",
    "logical_or": "|",
}  # fmt: skip

_LONGEST = 200
"""The maximum length of a mod's text, in characters."""


def unread(text: str) -> NotReadable:
    """Return the exception to raise if a call of FlexAttention cannot be read; `text` is the detail of the record."""
    return NotReadable(Reason.FLEX_ATTENTION, text)


@dataclass(frozen=True)
class Plane:
    """The scores of one attention, [batch, heads, query length, key length].

    Their sizes are read from the query and the key, which are [batch, heads, length, head dim].
    """

    query: Node
    key: Node

    @property
    def shares_keys(self) -> bool:
        """Whether several heads of the query may share one of the key."""
        return not sizes.same(self.query.meta["val"].shape[1], self.key.meta["val"].shape[1])

    def of(self, axis: int) -> tuple[Node, int]:
        """Return the node, query or key, from which the size of an axis of the scores is read, and its dimension.

        Args:
            axis: 0 to 3, of the scores [batch, heads, query length, key length].
        """
        return (self.key, 2) if axis == 3 else (self.query, axis)

    def size(self, axis: int) -> sizes.Dim:
        """Return the size of an axis of the scores [batch, heads, query length, key length]."""
        tensor, dim = self.of(axis)
        return cast(sizes.Dim, tensor.meta["val"].shape[dim])


class Mod:
    """The graph of a mask_mod or score_mod of a FlexAttention call, or the joint graph of its score_mod.

    Args:
        name: "mask_mod" or "score_mod", or a description of a joint graph.
        module: its graph, whose placeholders are the score (score_mod only), the four indices, the gradient of the
            result (joint graph only), and the tensors and numbers of the program.
        given: these tensors and numbers, in the surrounding graph.
        is_joint: whether it is a joint graph, whose results are the gradients of all arguments except the gradient.
        tokens: numbers that identify computations; mods whose tokens are compared share this dict.

    Raises:
        NotReadable: the number of arguments or results is wrong, or the result of a mod is not one number.
    """

    def __init__(
        self, name: str, module: GraphModule, given: Sequence[Any], *, is_joint: bool = False,
        tokens: dict[object, int] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.graph = name, module.graph
        places = module.graph.find_nodes(op="placeholder")
        own = places[: len(places) - len(given)]
        if len(own) not in ((6,) if is_joint else (4, 5)):
            raise unread(f"{name} has {len(places)} arguments, {len(given)} of them of the program")
        self.gradient: Node | None = own.pop() if is_joint else None
        self.score: Node | None = own[0] if len(own) == 5 else None
        self.indices: tuple[Node, ...] = tuple(own[-4:])
        self.given: dict[Node, Any] = dict(zip(places[len(places) - len(given) :], given, strict=True))
        self.results: list[Any] = list(tree_leaves(module.graph.output_node().args, is_leaf=lambda x: x is None))
        self.moved = self._reached(self.indices)
        self.scored = self._reached(() if self.score is None else (self.score,))
        self.of_gradient = self._reached(() if self.gradient is None else (self.gradient,))
        self._tokens: dict[Node, int] = {}
        self._numbers: dict[object, int] = {} if tokens is None else tokens
        if is_joint:
            if len(self.results) != 5 + len(given):
                raise unread(f"the joint graph of {name} has {len(self.results)} results")
            return
        found = [leaf for leaf in self.results if isinstance(leaf, Node)]
        if len(found) != 1 or not isinstance(found[0].meta.get("val"), Tensor) or found[0].meta["val"].dim():
            raise unread(f"{name} gives something else than one number: {self}")
        self.result = found[0]

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the score, which is that of the query; None without a score."""
        dtype: torch.dtype | None = None if self.score is None else self.score.meta["val"].dtype
        return dtype

    def name_of(self, number: int) -> str:
        """Return the surrounding graph's name of the program's tensor or number with index `number` in `given`."""
        return str(list(self.given.values())[number])

    def behind(self, node: Node) -> list[Node]:
        """Return a node and all nodes that it depends on, in graph order."""
        return sorted(_behind([node]))

    def token(self, value: Any) -> object:
        """Return a hashable token that identifies how a value of the mod is computed.

        Two values have equal tokens if and only if they are computed by the same operators from the same mod
        arguments, so that tokens can be compared instead of graphs.
        """
        if not isinstance(value, Node):
            return _token(value, self.token)
        for node in self.behind(value) if value not in self._tokens else ():
            self._tokens[node] = self._numbers.setdefault(self._token_of(node), len(self._numbers))
        return "node", self._tokens[value]

    def _token_of(self, node: Node) -> object:
        if node in self.indices:
            return "index", self.indices.index(node)
        if node in self.given:
            return "given", list(self.given).index(node)
        if node is self.score:
            return ("score",)
        if node.op == "get_attr" and _held(node) is not None:
            return "held", _held(node), node.meta["val"].dtype
        if node.op != "call_function":
            return "node", node
        return node.target, self.token(node.args), self.token(node.kwargs)

    def _reached(self, sources: Sequence[Node]) -> frozenset[Node]:
        """Return these nodes and all nodes that depend on one of them."""
        found = set(sources)
        for node in self.graph.nodes:
            if node.op != "output" and not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return frozenset(found)

    def tensors(self, node: Node) -> tuple[Node, ...]:
        """Return the program's tensors that a node of the mod depends on, as nodes of the surrounding graph."""
        own = (self.given.get(found) for found in _behind([node]))
        return tuple(dict.fromkeys(found for found in own if isinstance(found, Node)))

    def places(self, node: Node) -> frozenset[int]:
        """Return which of the program's tensors and numbers a node of the mod depends on, as indices in `given`."""
        numbers = {place: number for number, place in enumerate(self.given)}
        return frozenset(numbers[found] for found in _behind([node]) if found in numbers)

    def axes(self, node: Node) -> frozenset[int]:
        """Return on which of the indices in `INDICES` a node of the mod depends, as numbers from 0 to 3."""
        behind = set(_behind([node]))
        return frozenset(axis for axis, index in enumerate(self.indices) if index in behind)

    def write(self, wanted: Node, plane: Plane, temporaries: Temporaries, like: Node, *, floats: bool = False) -> Node:
        """Inline a node of the mod that does not depend on the score, and return a node that holds it for all scores.

        The result has four dimensions that broadcast to [batch, heads, query length, key length], or none if the value
        is the same for all scores.

        Args:
            wanted: the node of the mod.
            plane: the scores.
            temporaries: adds nodes to the surrounding graph.
            like: the node whose metadata the new nodes get.
            floats: whether 16-bit floats are converted to float32 where they are read.

        Raises:
            NotReadable: the mod has an operator that cannot be applied to all scores at once.
        """
        writer = _Writer(self, plane, temporaries, like, floats)
        return writer.write(wanted)

    def text(self, node: Node | None = None) -> str:
        """Return a node of the mod, by default its results, as an expression for messages: ``score + bias[h]``."""
        text = ", ".join(map(self._in_words, self.results if node is None else [node]))
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(map(self._in_words, self.results))}"[:_LONGEST]

    def _in_words(self, value: Any, inside: bool = False) -> str:
        if not isinstance(value, Node):
            return f"[{', '.join(map(self._in_words, value))}]" if isinstance(value, (list, tuple)) else str(value)
        if value in self.indices:
            return INDICES[self.indices.index(value)]
        if value is self.score:
            return "score"
        if value is self.gradient:
            return "gradient"
        if value in self.given:
            return str(self.given[value])
        name, args = (
            op_name(value).partition("::")[2] or str(getattr(value.target, "__name__", value.target)),
            value.args,
        )
        if name in ("convert_element_type", "_to_copy", "alias", "lift_fresh_copy"):
            return self._in_words(args[0], inside)
        if name == "index" and isinstance(args[1], (list, tuple)):
            return f"{self._in_words(args[0], True)}[{', '.join(map(self._in_words, args[1]))}]"
        if name in _SIGNS and len(args) == 2:
            left, right = (self._in_words(arg, True) for arg in args)
            return f"({left} {_SIGNS[name]} {right})" if inside else f"{left} {_SIGNS[name]} {right}"
        if value.op == "get_attr":
            return str(value.target if _held(value) is None else _held(value))
        return f"{name}({', '.join(map(self._in_words, args))})"


def _token(value: Any, inner: Callable[[Any], object]) -> object:
    """Return a token that distinguishes arguments of operators; 1, 1.0 and True have different tokens."""
    if isinstance(value, (list, tuple)):
        return tuple(map(inner, value))
    if isinstance(value, dict):
        return tuple((name, inner(item)) for name, item in value.items())
    return type(value), repr(value)


def _behind(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield these nodes and all nodes that they depend on."""
    stack, seen = list(nodes), set[Node]()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += node.all_input_nodes


class _Writer:
    """Inlines nodes of one mod; see `Mod.write`."""

    def __init__(self, mod: Mod, plane: Plane, temporaries: Temporaries, like: Node, floats: bool) -> None:
        self._mod, self._plane, self._temporaries, self._like, self._floats = mod, plane, temporaries, like, floats
        self._device = plane.query.meta["val"].device
        self._values: dict[Node, Any] = dict(mod.given)

    def write(self, wanted: Node) -> Node:
        needed = set(_behind([wanted]))
        for node in self._mod.graph.nodes:
            if node in needed and node not in self._values:
                self._values[node] = self._written(node)
        found = self._values[wanted]
        assert isinstance(found, Node)
        return found

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self._temporaries.call(target, *args, like=self._like, **kwargs)

    def _written(self, node: Node) -> Any:
        if node in self._mod.indices:
            return self._index(self._mod.indices.index(node))
        if node.op == "get_attr":
            return self._constant(node)
        if node.op != "call_function" or isinstance(node.target, HigherOrderOperator):
            raise self._unread(node, "is no operator on numbers")
        if isinstance(node.target, OpOverload):
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                raise self._unread(node, "draws random numbers")
            if node.target._schema.is_mutable:
                raise self._unread(node, "writes to a tensor")
        if node not in self._mod.moved:
            return self._copied(node, self._mapped((node.args, node.kwargs)))
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dim():
            raise self._unread(node, "gives something else than one number")
        if op_name(node) in _CONSTANT or op_name(node) in _FILLED:
            filled = _CONSTANT.get(op_name(node))
            filled = self._mapped(bind(node)["fill_value"]) if filled is None else filled
            return self._call(aten.full.default, [], filled, dtype=value.dtype, device=self._device)
        if op_name(node) == "aten::index":
            return self._low_as_float(self._read(node), value)
        if not is_elementwise(node):
            raise self._unread(node, "is not elementwise")
        given = tree_map_only(Node, self._of_four_dimensions, (node.args, node.kwargs))
        return self._low_as_float(self._copied(node, given), value)

    def _copied(self, node: Node, given: Any) -> Node:
        args, kwargs = given
        return self._call(node.target, *args, **kwargs)

    def _mapped(self, value: Any) -> Any:
        return tree_map_only(Node, self._values.__getitem__, value)

    def _of_four_dimensions(self, node: Node) -> Any:
        """Return the value of a node; a tensor without dimensions gets four of size 1.

        Type promotion is then that of the mod: it ranks tensors without dimensions below others.
        """
        value = self._values[node]
        tensor = value.meta["val"] if isinstance(value, Node) else None
        if not isinstance(tensor, Tensor) or tensor.dim():
            return value
        if tensor.device != self._device:
            raise self._unread(node, f"is on {tensor.device}")
        return self._low_as_float(self._call(aten.view.default, value, [1] * 4), tensor)

    def _low_as_float(self, node: Node, value: Tensor) -> Node:
        if not self._floats or value.dtype not in _LOW or node.meta["val"].dtype not in _LOW:
            return node
        return self._call(prims.convert_element_type.default, node, torch.float32)

    def _index(self, axis: int) -> Node:
        """Return all values of an index, int32, along its own dimension of four."""
        tensor, dim = self._plane.of(axis)
        length = self._temporaries.size(tensor, dim, like=self._like)
        facts = {"start": 0, "step": 1, "dtype": torch.int32, "device": self._device, "requires_grad": False}
        node = self._call(prims.iota.default, length, **facts)
        return self._placed(node, [axis])

    def _placed(self, node: Node, axes: Sequence[int]) -> Node:
        """Return a tensor whose dimensions are these axes, in this order, with four dimensions."""
        order = sorted(range(len(axes)), key=axes.__getitem__)
        if order != list(range(len(axes))):
            node = self._call(aten.permute.default, node, order)
        for axis in range(4):
            if axis not in axes:
                node = self._call(aten.unsqueeze.default, node, axis)
        return node

    def _read(self, node: Node) -> Node:
        """Read one element of a tensor per score; the result is a view if each index is one of the score's indices."""
        source, places = bind(node)["self"], bind(node)["indices"]
        tensor = self._values.get(source)
        whole = isinstance(tensor, Node) and source not in self._mod.moved and None not in places
        if not whole or len(places) != source.meta["val"].dim():
            raise self._unread(node, "reads a tensor at more than one place")
        assert isinstance(tensor, Node)
        axes = [self._mod.indices.index(place) for place in places if place in self._mod.indices]
        size = tensor.meta["val"].shape
        same = len(set(axes)) == len(places) and all(map(sizes.same, size, map(self._plane.size, axes)))
        if same:
            return self._placed(tensor, axes)
        # All indices get four dimensions: PyTorch infers a wrong shape if they differ in their number of dimensions.
        found = list(map(self._of_four_dimensions, places))
        if self._floats:
            found = [self._in_range(place, tensor, dim) for dim, place in enumerate(found)]
        return self._call(aten.index.Tensor, tensor, found)

    def _in_range(self, place: Node, tensor: Node, dim: int) -> Node:
        """Clamp an index into a tensor, because the program may compute any index for hidden scores.

        FlexAttention evaluates a score_mod only for blocks in which some scores are visible.
        """
        size: Any = self._temporaries.size(tensor, dim, like=self._like)
        last = self._call(operator.sub, size, 1) if isinstance(size, Node) else size - 1
        from_behind = self._call(aten.add.Tensor, place, size)
        place = self._call(aten.where.self, self._call(aten.lt.Scalar, place, 0), from_behind, place)
        return self._call(aten.clamp_max.default, self._call(aten.clamp_min.default, place, 0), last)

    def _constant(self, node: Node) -> Node:
        """Return a tensor with a number that is stored as an attribute of the mod."""
        value = _held(node)
        if value is None:
            raise self._unread(node, "is no number that is known")
        return self._call(aten.full.default, [], value, dtype=node.meta["val"].dtype, device=self._device)

    def _unread(self, node: Node, what: str) -> NotReadable:
        return unread(f"{self._mod.name}: {self._mod.text(node)} {what}, in {self._mod.text()}")


def is_number(value: object) -> bool:
    """Return whether an argument of a mod's operator is a Python number."""
    return isinstance(value, (bool, int, float))


def scalar(mod: Mod, value: Any) -> float | None:
    """Return the value of a Python number or of a constant 0-dimensional tensor in a mod; None for anything else."""
    if is_number(value):
        return float(value)
    if not isinstance(value, Node):
        return None
    if value in mod.given:
        return float(mod.given[value]) if is_number(mod.given[value]) else None
    name = op_name(value)
    if name in _FILLED:
        found = scalar(mod, bind(value)["fill_value"])
    elif name in _CONSTANT:
        found = float(_CONSTANT[name])
    elif name in ("prims::convert_element_type", "aten::lift_fresh_copy", "aten::alias"):
        found = scalar(mod, value.args[0])
    else:
        found = _held(value)
    return None if found is None else rounded(found, value.meta["val"].dtype)


def _held(node: Node) -> float | None:
    """Return the number in a tensor that is an attribute of the graph's module; None for other nodes, or if unknown."""
    value: Any = node.graph.owning_module
    for name in str(node.target).split(".") if node.op == "get_attr" else ("",):
        value = getattr(value, name, None)
    if not isinstance(value, Tensor) or is_fake(value) or value.dim() or not isinstance(node.meta.get("val"), Tensor):
        return None
    with disable_current_modes():
        number: float = value.item()
    return number
