"""The model's names for the inputs of a graph: `attention_mask`, where the graph says `primals_25`.

AOTAutograd renames the inputs of a joint graph, but records each one's index among the inputs of Dynamo's graph.  Only
Dynamo's graph knows their sources, so its names are stored while Inductor compiles it.  Also stored is the first input
that requires a gradient although this graph does not compute one, as inside an autograd function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..upstream import seams

_captured: ContextVar[tuple[str, ...]] = ContextVar("dash_inductor_arguments", default=())
"""The names of the inputs of the graph that is being compiled, in the order of Dynamo's graph."""
_wanting: ContextVar[str] = ContextVar("dash_inductor_wanting", default="")
"""The first of these inputs that is a non-leaf requiring a gradient, if compilation runs without autograd."""


def install() -> None:
    """Wrap Inductor's compilation of a graph so that the names of the graph's inputs are known while it runs."""
    seams.COMPILE_GRAPH.wrap(_noting)


def _noting(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    def compile_and_note(model_: Any, *args: Any, **kwargs: Any) -> Any:
        names = names_of(model_.graph) if isinstance(model_, torch.fx.GraphModule) else ()
        token, wanting = _captured.set(names), _wanting.set(_first_wanting(names, args[0] if args else ()))
        try:
            return compile_graph(model_, *args, **kwargs)
        finally:
            _captured.reset(token)
            _wanting.reset(wanting)

    return compile_and_note


def _first_wanting(names: Sequence[str], inputs: Sequence[Any]) -> str:
    if torch.is_grad_enabled():
        return ""
    pairs = zip(names, inputs, strict=False)
    return next((name for name, x in pairs if isinstance(x, Tensor) and x.requires_grad and not x.is_leaf), "")


def wanting_a_gradient() -> str:
    """Return the name of an input that requires a gradient which the compiled graph does not compute; "" without one.

    The forward of an autograd function that Dynamo does not trace is such a graph: its backward runs outside of it.
    """
    return _wanting.get()


def names_of(graph: Graph) -> tuple[str, ...]:
    """Return the inputs of Dynamo's graph, as expressions of the model's source.

    A graph that was split off Dynamo's (by the DDP optimizer) has no sources any more, only the names derived from
    them.
    """
    sources = ((node, getattr(node, "_dynamo_source", None)) for node in graph.nodes if node.op == "placeholder")
    return tuple(node.name if source is None else in_source(str(source.name)) for node, source in sources)


def in_source(name: str) -> str:
    """Return Dynamo's name of a source as the model would write it.

    ``L['attention_mask']`` becomes ``attention_mask``, ``L['self']._modules['attn']._parameters['weight']`` becomes
    ``self.attn.weight``, and a stack value at a graph break is described as one.
    """
    name = re.sub(r"\bL\['kwargs'\]\['(\w+)'\]", r"\1", name)
    name = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", name)
    name = re.sub(r"\.(?:__dict__\[')?_(?:modules|parameters|buffers)(?:'\])?\['(\w+)'\]", r".\1", name)
    return re.sub(r"\b___stack(\d+)\b", r"value \1 of before the graph break", name)


def name_of(node: Node) -> str:
    """Return the model's name of an input of a joint or inference graph; the node's own name if that is unknown.

    A tensor that AOTAutograd derived from inputs is described by them, for example ``x._base``.
    """
    description = node.meta.get("desc")
    if description is None:
        return str(node.name)
    names = _captured.get()

    def of_place(match: re.Match[str]) -> str:
        place = int(match[1])
        return names[place] if place < len(names) else str(node.name)

    text = re.sub(r"\bself\.get_(?:parameter|buffer)\('([^']+)'\)", r"self.\1", description.expr())
    return re.sub(r"\bargs\[(\d+)\]", of_place, text)


def in_words(text: str, graph: Graph) -> str:
    """Replace the graph's names of its inputs in a text by the model's names."""
    inputs = {node.name: name_of(node) for node in graph.nodes if node.op == "placeholder"}
    return re.sub(r"\b\w+\b", lambda match: str(inputs.get(match[0], match[0])), text)
