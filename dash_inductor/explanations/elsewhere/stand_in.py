"""Moves Dynamo's graph to the device that stands in for a GPU, and the joint graph back; see `elsewhere`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from ...upstream import configs, devices
from ...upstream.dispatch import is_traceable_wrapper_subclass
from ...upstream.fake import FakeTensor
from ...upstream.patches import replaced
from ...upstream.pytree import tree_leaves

_NAME = re.compile(r"cuda(?::(\d+))?")


def stands_for_a_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU or a stand-in: ``cpu:1`` stands for the first GPU, and so on."""
    return device.type == "cuda" or _is_stand_in(device)


def _is_stand_in(device: torch.device) -> bool:
    return device.type == "cpu" and bool(device.index)


def _there(device: torch.device) -> torch.device:
    """The stand-in of a GPU; other devices are returned unchanged."""
    return torch.device("cpu", (device.index or 0) + 1) if device.type == "cuda" else device


def _back(device: torch.device) -> torch.device:
    """The GPU of a stand-in; other devices are returned unchanged."""
    return torch.device("cuda", device.index - 1) if _is_stand_in(device) else device


@contextmanager
def standing_in(graph: GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """A context manager in which a Dynamo graph and its `inputs` are compiled on the device that stands in for a GPU.

    Joint graphs are moved back to CUDA.  The Dynamo graph is not, because nothing else reads it.
    """
    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                _move(node)
            module.recompile()
    held = [inputs, vars(graph), dict(graph.named_parameters()), dict(graph.named_buffers())]
    passes = _first(configs.inductor.joint_custom_pre_pass)
    with (
        _tensors_there(held),
        configs.inductor.patch(joint_custom_pre_pass=passes),
        replaced(devices.meta_registrations, {"device_hint": _hint}),
        replaced(devices.pattern_matcher, {"aot_function": _patterns_there(devices.aot_function)}),
    ):
        yield


@contextmanager
def flex_attention_there() -> Iterator[None]:
    """A context manager in which FlexAttention traces the gradient of its score_mod on the GPU's stand-in."""
    flex_attention = devices.flex_attention()
    create = flex_attention.create_fw_bw_graph

    def create_there(score_mod: Callable[..., Any], *given: Any) -> Any:
        with _tensors_there(given):
            return create(score_mod, *given)

    with replaced(flex_attention, {"create_fw_bw_graph": create_there}):
        yield


@contextmanager
def _tensors_there(values: Any) -> Iterator[None]:
    """Moves the fake tensors among `values` to the stand-in inside the block."""
    before = [(tensor, tensor.fake_device) for tensor in _fakes(values)]
    for tensor, device in before:
        tensor.fake_device = _there(device)
    try:
        yield
    finally:
        for tensor, device in before:
            tensor.fake_device = device


def _patterns_there(trace: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the tracing of Inductor's training patterns, so that it runs on the stand-in and the results are
    for CUDA.
    """

    def there(
        fn: Callable[..., Any], *args: Any, partition_fn: Callable[..., Any], **kwargs: Any
    ) -> Callable[..., Any]:
        recorded: list[Graph] = []

        def partition(joint: GraphModule, *rest: Any, **more: Any) -> Any:
            copied = devices.pattern_matcher.clone_graph(joint)
            _arguments_back(copied.graph)
            recorded.append(copied.graph)
            partition_fn(copied, *rest, **more)  # keeps the graph; the partition below is what runs on the stand-in
            return devices.default_partition(joint, *rest, **more)

        def call(*given: Any) -> Any:
            with _tensors_there(given):
                result = trace(fn, *args, partition_fn=partition, **kwargs)(*given)
            for graph in recorded:
                _values_back(graph)
            return result

        return call

    return there


_hint_of = devices.meta_registrations.device_hint


def _hint(tensor: Tensor) -> str:
    """The device type on which shape and dtype formulas depend: that of the GPU for its stand-in."""
    device = getattr(tensor, "fake_device", None)
    return _back(device).type if device is not None else _hint_of(tensor)


def _move(node: Node) -> None:
    """Replaces CUDA devices in a Dynamo node by the stand-in."""
    autocast = getattr(node.target, "__name__", "") == "_enter_autocast"

    def there(value: Any) -> Any:
        if isinstance(value, torch.device):
            return _there(value)
        if isinstance(value, str) and _NAME.fullmatch(value):
            return "cpu" if autocast else str(_there(torch.device(value)))
        return value

    node.args, node.kwargs = map_aggregate(node.args, there), map_aggregate(node.kwargs, there)
    if node.op == "call_method" and node.target == "cuda":
        index: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("device")
        device = index if isinstance(index, (torch.device, str)) else torch.device("cpu", int(index or 0) + 1)
        node.target, node.args, node.kwargs = "to", (node.args[0], device), {}


def _first(passes: Any) -> Any:
    """The first joint-graph passes: `_bring_back`, then those of the program."""
    if isinstance(passes, (list, tuple)):
        return [_bring_back, *passes]
    if passes is None:
        return _bring_back

    def both(graph: Graph) -> None:
        _bring_back(graph)
        passes(graph)

    return both


def _bring_back(graph: Graph) -> None:
    """Replaces the stand-in in a joint graph by CUDA."""
    _arguments_back(graph)
    _values_back(graph)


def _arguments_back(graph: Graph) -> None:
    def back(value: Any) -> Any:
        return _back(value) if isinstance(value, torch.device) else value

    for node in graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, back), map_aggregate(node.kwargs, back)


def _values_back(graph: Graph) -> None:
    for node in graph.nodes:
        for tensor in _fakes(node.meta):
            tensor.fake_device = _back(tensor.fake_device)


def _fakes(values: Any) -> list[FakeTensor]:
    """The fake tensors in nested containers and in wrapper subclasses."""
    found = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, FakeTensor):
            found.append(leaf)
        elif isinstance(leaf, Tensor) and is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            found += _fakes([getattr(leaf, name) for name in names])
    return found
