"""Finds the results of an operator that writes to tensors of its caller (``out=`` style), after functionalization.

A functionalized call returns what the operator returns, followed by the tensors as they are after the writes.  In its
second form (auto_functionalized_v2), arguments that are views of one tensor share one entry in `_all_bases`, and
keyword arguments describe the view that each argument is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..graph import sizes
from ..graph.emit import Emitter
from ..graph.nodes import called, is_functionalized
from ..model.attention_spec import Order
from .attention import Axes, Output, Sink, between

aten = torch.ops.aten

_DENSE: Order = (0, 2, 1, 3)
"""The layout of a result that is copied into part of another tensor: [batch, length, heads, head dim] in memory."""


def written(node: Node, names: Sequence[str], axes: Axes) -> tuple[Sink, Sink, Sink] | None:
    """Return the sinks of three arguments that a call writes to, such as dq, dk and dv.

    Return None if any of them cannot be determined.

    Args:
        node: the functionalized call.
        names: the names of the arguments in the operator's schema.
        axes: the order of the dimensions of the arguments.
    """
    operator = called(node)
    if operator is None or not is_functionalized(node):
        return None
    first = max(1, len(operator._schema.returns))
    arguments = [argument.name for argument in operator._schema.arguments if is_written(argument)]
    if "_all_bases" not in node.kwargs:  # auto_functionalized v1: each argument is its own tensor
        if any(name not in arguments or not isinstance(node.kwargs.get(name), Node) for name in names):
            return None
        outputs = [Output(node, first + arguments.index(name), axes) for name in names]
        return outputs[0], outputs[1], outputs[2]
    found: dict[str, Sink] = {}
    parts = {name: _View.of(node, name) for name in arguments}
    for index, base in enumerate(node.kwargs["_all_bases"]):  # type: ignore[arg-type]  # a list of nodes
        of_base = {name: view for name, view in parts.items() if view is not None and view.base == index}
        if not of_base.keys() <= set(names):  # another argument is written there too
            continue
        whole = [name for name, view in of_base.items() if view.is_whole(base)]
        if whole:
            found |= {name: Output(node, first + index, axes) for name in whole if len(of_base) == 1}
            continue
        together = _Together(Output(node, first + index), base, of_base)
        found |= {name: _Part(together, name, axes) for name in of_base}
    if set(names) - found.keys():
        return None
    dq, dk, dv = (found[name] for name in names)
    return dq, dk, dv


def given(node: Node, name: str) -> Any:
    """Return the node that is passed to a functionalized call for an argument that the operator writes to.

    Return None if the argument is only a part of a tensor, or the call is not one of auto_functionalized_v2.
    """
    view, bases = _View.of(node, name), node.kwargs.get("_all_bases")
    if view is None or bases is None or view.slice is not None or view.strided is not None:
        return None
    return bases[view.base]  # type: ignore[index]  # a list of nodes


def is_written(argument: Any) -> bool:
    """Return whether an operator's schema says that the operator writes to an argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


@dataclass(frozen=True)
class _View:
    """The view of its base that an argument is: all of it, a slice, or one with given sizes and strides."""

    base: int
    slice: tuple[Any, ...] | None = None
    strided: tuple[Any, ...] | None = None

    @staticmethod
    def of(node: Node, name: str) -> _View | None:
        """Return the view that a call of `auto_functionalized_v2` passes for an argument; None if that is not a tensor.

        Args:
            node: the call.
            name: the name of the argument in the operator's schema.
        """
        told = {
            key.removeprefix(f"_{name}_"): value for key, value in node.kwargs.items() if key.startswith(f"_{name}_")
        }
        base: Any = told.get("base_index")
        if base is None:
            return None
        if "slice_dim" in told:
            return _View(base, slice=(told["slice_dim"], told["slice_start"], told["slice_end"]))
        if "storage_offset" in told:
            return _View(base, strided=(told["size"], told["stride"], told["storage_offset"]))
        return _View(base)

    def is_whole(self, base: Node) -> bool:
        """Return whether the view is the whole base."""
        return self.slice is None and self.strided is None

    def place(self, base: Tensor) -> tuple[int, int] | None:
        """Return (dimension, index) if the view is ``base.select(dimension, index)``; else None."""
        if self.strided is None or base.storage_offset() != 0:
            return None
        size, stride, offset = self.strided
        for dim in range(base.dim()):
            step, extent = (sizes.static(x) for x in (base.stride(dim), base.shape[dim]))
            others = [d for d in range(base.dim()) if d != dim]
            known = [_value(x) for x in (*size, *stride)]
            wanted = [*(base.shape[d] for d in others), *(base.stride(d) for d in others)]
            number = sizes.static(_value(offset))
            if not step or extent is None or number is None or number % step or len(known) != len(wanted):
                continue
            if number // step < extent and sizes.same_all(known, wanted):
                return dim, number // step
        return None


@dataclass(frozen=True)
class _Together:
    """A tensor of which several results are parts, replaced as a whole once all of them are known.

    Attributes:
        output: the tensor after the writes.
        base: the tensor before the writes.
        views: its parts, by argument name.
        results: the parts whose replacements are known so far, by argument name.
    """

    output: Output
    base: Node
    views: dict[str, _View]
    results: dict[str, Node] = field(default_factory=dict)

    def put(self, emitter: Emitter, name: str, result: Node, before: Node) -> tuple[Node, Node] | None:
        self.results[name] = result
        if self.results.keys() != self.views.keys():
            return None
        used, found = self.output.used, self.base
        assert used is not None
        stacked = self._stacked()
        if stacked is not None:
            dim, results = stacked
            parts = [emitter.call(aten.unsqueeze.default, (part, dim), before=before, like=used) for part in results]
            return used, emitter.call(aten.cat.default, (parts, dim), before=before, like=used)
        for name, view in self.views.items():
            result = self.results[name]
            if view.slice is not None:
                made = aten.slice_scatter.default, (found, result, *view.slice)
            else:
                assert view.strided is not None
                made = aten.as_strided_scatter.default, (found, result, *view.strided)
            found = emitter.call(*made, before=before, like=used)
        return used, found

    def _stacked(self) -> tuple[int, list[Node]] | None:
        """Return the dimension along which the parts make up the whole tensor, and the results in order.

        Return None if they do not.
        """
        value: Tensor = self.base.meta["val"]
        places = {view.place(value): name for name, view in self.views.items()}
        dims = {None if place is None else place[0] for place in places}
        if len(dims) != 1 or None in dims or not value.is_contiguous():
            return None
        (dim,) = dims
        assert dim is not None
        order = [places.get((dim, number)) for number in range(sizes.static(value.shape[dim]) or 0)]
        return None if None in order else (dim, [self.results[name] for name in order if name is not None])


@dataclass(frozen=True)
class _Part:
    """A sink: a result that is part of a tensor."""

    together: _Together
    name: str
    axes: Axes

    @property
    def used(self) -> Node | None:
        return self.together.output.used

    @property
    def users(self) -> list[Node]:
        return self.together.output.users

    @property
    def order(self) -> Order | None:
        return _DENSE

    def put(self, emitter: Emitter, result: Node, before: Node) -> tuple[Node, Node] | None:
        return self.together.put(emitter, self.name, between(emitter, result, self.axes, before), before)


def _value(x: Any) -> Any:
    return x.meta["val"] if isinstance(x, Node) else x
