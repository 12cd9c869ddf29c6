"""Moves Dynamo's graph to the device that stands in for a GPU, and the joint graph back; see `elsewhere`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from ...graph.model_line import model_line
from ...upstream import configs, devices
from ...upstream.dispatch import is_traceable_wrapper_subclass
from ...upstream.fake import FakeTensor, FakeTensorMode
from ...upstream.patches import replaced
from ...upstream.pytree import tree_leaves
from . import Untraceable

FIRST = 64
"""The index of the CPU that stands for the first GPU, ``cpu:64``; the next one stands for the second GPU, and so on.

Programs use no such device, so that a stand-in is told from the devices that a program makes.
"""

_NAME = re.compile(r"(?:cuda|cpu)(?::\d+)?")
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray, "new", "new_tensor")
"""What makes a tensor from Python data: a function, or the name of a method."""


def stands_for_a_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU or a stand-in."""
    return device.type == "cuda" or _is_stand_in(device)


def with_gpus(text: str) -> str:
    """Replaces the names of stand-ins in a text by those of their GPUs."""
    return re.sub(r"\bcpu:\d+\b", lambda found: str(_back(torch.device(found[0]))), text)


def _is_stand_in(device: torch.device) -> bool:
    return device.type == "cpu" and (device.index or 0) >= FIRST


def _there(device: torch.device) -> torch.device:
    """The stand-in of a GPU; other devices are returned unchanged."""
    return torch.device("cpu", (device.index or 0) + FIRST) if device.type == "cuda" else device


def _back(device: torch.device) -> torch.device:
    """The GPU of a stand-in; other devices are returned unchanged."""
    return torch.device("cuda", device.index - FIRST) if _is_stand_in(device) else device


@contextmanager
def standing_in(graph: GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """A context manager in which a Dynamo graph and its `inputs` are compiled on the device that stands in for a GPU.

    Joint graphs are moved back to CUDA.  The Dynamo graph is not, because nothing else reads it.
    """
    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in list(module.graph.nodes):
                _move(node)
            module.recompile()
    held = [inputs, vars(graph), dict(graph.named_parameters()), dict(graph.named_buffers())]
    passes = _first(configs.inductor.joint_custom_pre_pass)
    with (
        _tensors_there(held),
        configs.inductor.patch(joint_custom_pre_pass=passes),
        replaced(devices.meta_registrations, {"device_hint": _hint}),
        replaced(FakeTensorMode, {"dispatch": _dispatch}),
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
    """Wraps the tracing of Inductor's training patterns: it runs on the stand-in, and the results are for CUDA."""

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


_dispatch_of = FakeTensorMode.dispatch


def _dispatch(
    mode: FakeTensorMode, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Runs an operator on fake tensors; a constant that is copied to the stand-in loses its known value, as on a GPU.

    PyTorch would copy the value, which is on ``cpu`` whatever the index is.
    """
    options = kwargs or {}
    device = options.get("device") if operator is torch.ops.aten._to_copy.default else None
    if device is None or not _is_stand_in(device) or not isinstance(args[0], FakeTensor):
        return _dispatch_of(mode, operator, types, args, options)
    constant, args[0].constant = args[0].constant, None
    try:
        return _dispatch_of(mode, operator, types, args, options)
    finally:
        args[0].constant = constant


def _move(node: Node) -> None:
    """Replaces CUDA devices in a Dynamo node by the stand-in.

    Raises:
        Untraceable: the program uses a device that is a stand-in.
    """
    autocast = getattr(node.target, "__name__", "") == "_enter_autocast"

    def there(value: Any) -> Any:
        named = isinstance(value, str) and _NAME.fullmatch(value)
        if not named and not isinstance(value, torch.device):
            return value
        device = torch.device(value)
        if _is_stand_in(device):
            line = model_line([node])[0]
            raise Untraceable(f"CPUs from number {FIRST} on stand for GPUs here, and the program uses one, at {line}")
        if named and autocast:
            return "cpu"
        return str(_there(device)) if named else _there(device)

    node.args, node.kwargs = map_aggregate(node.args, there), map_aggregate(node.kwargs, there)
    if node.op == "call_method" and node.target == "cuda":
        index: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("device")
        device = index if isinstance(index, (torch.device, str)) else _there(torch.device("cuda", int(index or 0)))
        node.target, node.args, node.kwargs = "to", (node.args[0], device), {}
    if node.target in _FROM_DATA:
        _move_constant(node)


def _move_constant(node: Node) -> None:
    """Moves the result of a node that makes a tensor from Python data to the stand-in, if it is on a GPU.

    PyTorch makes such a tensor on the CPU first, and would not copy it to another CPU.
    """
    made = node.meta.get("example_value")
    if not isinstance(made, Tensor) or made.device.type != "cuda":
        return
    with node.graph.inserting_after(node):
        moved = node.graph.call_method("to", (node, _there(made.device)))
    moved.meta = dict(node.meta)
    node.replace_all_uses_with(moved, delete_user_cb=lambda user: user is not moved)


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
