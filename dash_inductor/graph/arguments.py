"""How the model calls the inputs of a graph: `attention_mask`, where the graph says `primals_25`.

AOTAutograd names the inputs of a joint graph anew, and leaves with each its place among the inputs of the graph that
Dynamo captured.  Only Dynamo's graph knows where these come from; so its names are noted while Inductor compiles it.
So is which of them wants a gradient that this graph does not give, as inside of an autograd function.
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
"""Names of the inputs of the graph that is being compiled, in the order of Dynamo's graph."""
_wanting: ContextVar[str] = ContextVar("dash_inductor_wanting", default="")
"""The first of these inputs that is computed from what wants gradients, where the graph is compiled without any."""


def install() -> None:
    """Note the names of every graph that Inductor is given, for as long as it compiles it."""
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
    """The name of an input of the graph that is being compiled that wants a gradient which this graph does not give;
    "" if there is none.

    The forward of an autograd function that Dynamo does not trace is such a graph: its backward runs outside of it.
    """
    return _wanting.get()


def names_of(graph: Graph) -> tuple[str, ...]:
    """The inputs of a graph that Dynamo captured, as expressions of the model's source.

    A graph that was cut out of Dynamo's (by the DDP optimizer) has no sources any more, only the names made of them.
    """
    sources = ((node, getattr(node, "_dynamo_source", None)) for node in graph.nodes if node.op == "placeholder")
    return tuple(node.name if source is None else in_source(str(source.name)) for node, source in sources)


def in_source(name: str) -> str:
    """Dynamo's name of a source as the model would write it.

    ``L['attention_mask']`` is ``attention_mask``, ``L['self']._modules['attn']._parameters['weight']`` is
    ``self.attn.weight``, and the value on the stack at a graph break is called so.
    """
    name = re.sub(r"\bL\['kwargs'\]\['(\w+)'\]", r"\1", name)
    name = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", name)
    name = re.sub(r"\.(?:__dict__\[')?_(?:modules|parameters|buffers)(?:'\])?\['(\w+)'\]", r".\1", name)
    return re.sub(r"\b___stack(\d+)\b", r"value \1 of before the graph break", name)


def name_of(node: Node) -> str:
    """The name of an input of a joint or inference graph in the model; the graph's own name where that is not known.

    A tensor that AOTAutograd made of inputs is described by them, as in ``x._base``.
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
    """A text with the model's names in the place of the graph's names of its inputs."""
    inputs = {node.name: name_of(node) for node in graph.nodes if node.op == "placeholder"}
    return re.sub(r"\b\w+\b", lambda match: str(inputs.get(match[0], match[0])), text)
