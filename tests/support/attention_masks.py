"""Compile a model up to its joint graph and read the masks of its attention nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch.fx import Graph

from dash_inductor.graph.nodes import bind, op_name
from dash_inductor.masks.recognition import recognise


class _Enough(Exception):
    """Stops a compile: the joint graph has been seen."""


def masks_of(graph: Graph) -> Iterator[tuple[str, str]]:
    """For every attention forward: its operator, and its mask in normal form, or the reason why it has none."""
    for node in graph.nodes:
        name = op_name(node)
        if not name.startswith("aten::_scaled_dot_product") or name.endswith("backward"):
            continue
        args = bind(node)
        mask = args.get("attn_bias", args.get("attn_mask"))
        if mask is None:
            yield name, "no mask"
            continue
        result = recognise(mask, query=args["query"], key=args["key"])
        yield name, str(result.components) if result.components else f"{result.reason}: {result.detail}"


def masks_in_joint_graph(model: Callable[..., Any], *, breaks: bool = False, **inputs: Any) -> list[tuple[str, str]]:
    """The answer of `masks_of` for the joint graph of a call; the compile ends there, no code is generated.

    Args:
        model: a module or a method of one.
        breaks: whether the call may break into several graphs; the first one with attention counts then.
        inputs: of the call.
    """
    found: list[tuple[str, str]] = []

    def look(graph: Graph) -> None:
        found.extend(masks_of(graph))
        if found or not breaks:
            raise _Enough

    torch._dynamo.reset()
    with inductor_config.patch(joint_custom_pre_pass=look), _ends_with_enough():
        torch.compile(model, fullgraph=not breaks)(**inputs)
    return found


def compile_joint_graph(model: Callable[..., Any], **inputs: Any) -> Graph:
    """Compile a call until the passes over its first joint graph have run, and return that; no code is generated.

    Constants are not folded and products are not padded, because that computes on the device, which may be a fake one.
    """

    found = []

    def look(graph: Graph) -> None:
        found.append(graph)
        raise _Enough

    torch._dynamo.reset()
    settings = {"joint_custom_post_pass": look, "joint_graph_constant_folding": False, "shape_padding": False}
    with inductor_config.patch(settings), _ends_with_enough():
        torch.compile(model)(**inputs)
    return found[0]


@contextmanager
def _ends_with_enough() -> Iterator[None]:
    try:
        yield
    except torch._dynamo.exc.BackendCompilerFailed as e:
        if not isinstance(e.inner_exception, _Enough):
            raise
    else:
        raise AssertionError("the compile produced no joint graph")
