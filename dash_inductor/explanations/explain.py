"""Defines `explain`, which compiles a function, without running it, up to the pass that replaces attention.

It then explains what that pass did with each attention.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .. import _switch
from ..config import config
from ..errors import ArgumentError, DashError
from ..model.architectures import architecture
from ..records import records
from ..records.records import GraphRecord
from ..upstream import arch as machine
from ..upstream import configs
from ..upstream.compile_fx import compile_fx
from ..upstream.dynamo import pgo
from ..upstream.pytree import tree_leaves
from .elsewhere import why
from .explanation import Explanation


class _Seen(Exception):
    """Raised to end the compile of a graph after the joint-graph passes have run."""


def explain(fn: Callable[..., Any], *args: Any, arch: str | None = None, **kwargs: Any) -> Explanation:
    """Explains how every attention in ``torch.compile(fn)(*args, **kwargs)`` would be compiled, and why.

    `fn` is compiled anew, forward and backward together, without caches and separately from the program's own compiles,
    but only up to the pass that replaces attention.  Graphs do not run: zeros replace their outputs, so parameters,
    buffers, gradients and the random state do not change, and activations need no memory.  Python code that Dynamo
    leaves out of graphs does run.  Deterministic algorithms count as on, and `config.strict` as off.

    Args:
        fn: a module, or a function of tensors: a model, or a model with its loss.  No ``backward()`` is needed: a graph
            is compiled together with the backward of its outputs.
        args, kwargs: the arguments of the call.  A parameter or an argument must require a gradient.
        arch: compile for this GPU ("h100", "a100", ...) or architecture ("sm_90", ...), which need not be present:
            tensors on the CPU count as on that GPU, and PyTorch chooses between its attention implementations as for
            that GPU.  If the program cannot be traced that way, for example because Python code reads tensor values,
            `Explanation.unknown` says so.  "cpu": plan for the CPU.

    Raises:
        ArgumentError: `fn` is not callable, or `arch` is unknown.
        DashError: dash_inductor is off, because of DASH_INDUCTOR=0 or because it cannot be loaded.
        Exception: without `arch`, an error of `fn` or PyTorch's compiler before a graph with attention was compiled.
    """
    if not callable(fn):
        raise ArgumentError("fn", fn, "a module, or a function of tensors")
    arch = None if arch is None else architecture(arch)
    with _switch.override(True):
        off = _switch.off_reason()
    if off is not None:
        raise DashError(f"nothing can be explained: {off}")
    notes = []
    if not torch.are_deterministic_algorithms_enabled():
        notes.append(
            "Deterministic algorithms are off, so that nothing is replaced now: this is what happens with "
            "torch.use_deterministic_algorithms(True)."
        )
    found = explained(fn, args, kwargs, arch)
    if not found.graphs and not found.unknown:
        notes.append("There is no attention with a backward: no graph calls it, or nothing needs a gradient.")
    return Explanation.of(found.graphs, arch, [*notes, *found.notes], found.unknown)


@dataclass(frozen=True)
class Outcome:
    """The result of compiling one call in order to explain it.

    Attributes:
        graphs: the records of the compiled graphs.
        notes: notes for the reader, in sentences.
        unknown: why the outcome of some attention is not known; "" if all outcomes are known.
    """

    graphs: list[GraphRecord]
    notes: list[str]
    unknown: str


def explained(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], arch: str | None,
    *, gradients: bool = True, dump: str = "",
) -> Outcome:  # fmt: skip
    """Compiles a call for an architecture as `explain` does, and returns the records of its graphs, with notes.

    Args:
        fn, args, kwargs, arch: as for `explain`.
        gradients: whether the call runs with gradients, or under ``torch.no_grad()``.
        dump: the folder for pages about the graphs; "" for none.
    """
    fn = _plain(fn)
    elsewhere = arch not in (None, "cpu") and not _is_here(arch, fn, args, kwargs)
    notes, unknown = [], ""
    with _settings(arch, gradients, dump), _unchanged(fn, args, kwargs), records.aside() as graphs:
        try:
            if arch is not None and elsewhere:
                _compile_elsewhere(arch, fn, args, kwargs)
            else:
                _compile(fn, args, kwargs, _look)
        except Exception as error:
            if elsewhere:
                unknown = why.unknown(error)
            elif not records.with_attention(graphs):
                raise
            else:
                notes.append(
                    f"The call ended with {type(error).__name__} behind these graphs, which return zeros here: there "
                    "may be others."
                )
    if elsewhere and not unknown:
        unknown = why.left_on_the_cpu(graphs)
    return Outcome(list(records.with_attention(graphs)), notes, unknown)


def _compile(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], look: Callable[..., Any]) -> None:
    torch.compile(fn, backend=look, **_apart())(*args, **kwargs)


def _compile_elsewhere(arch: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compiles a call for a GPU that is not present; see `elsewhere`."""
    from .elsewhere import device, moving, stand_in

    def look(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        outputs = _outputs(graph)
        with stand_in.standing_in(graph, inputs):
            _run_passes(graph, inputs)
        return outputs

    with device.pretended(arch) as mode, moving.moved(mode, fn, args, kwargs) as (there, named):
        _compile(fn, there, named, look)


def _is_here(arch: str | None, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this machine has a GPU of this architecture, and all tensors of the call are on a GPU."""
    if not torch.cuda.is_available() or machine.arch_of(torch.device("cuda")) != arch:
        return False
    modules = [part for part in (fn, getattr(fn, "__self__", None), *args, *kwargs.values()) if _is_module(part)]
    tensors = [*tree_leaves((args, kwargs)), *(tensor for part in modules for tensor in part.parameters())]
    return all(tensor.is_cuda for tensor in tensors if isinstance(tensor, Tensor))


def _is_module(value: object) -> bool:
    return isinstance(value, torch.nn.Module)


def _plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The original function if `fn` is a result of `torch.compile`, else `fn`."""
    for name in ("_orig_mod", "_torchdynamo_orig_callable"):
        fn = getattr(fn, name, fn)
    return fn


def _apart() -> dict[str, Any]:
    """The options of `torch.compile` that separate our entries in Dynamo's cache from the program's (torch 2.13)."""
    return {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}


@contextmanager
def _settings(arch: str | None, gradients: bool, dump: str) -> Iterator[None]:
    """Sets what an explanation needs, and restores all at the end.

    dash_inductor and deterministic algorithms are on, `strict` and caches are off, and recompiles are not limited.
    """
    sizes_seen = pgo.get_code_state()
    before = copy.deepcopy(sizes_seen)
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    limits: dict[str, Any] = {"recompile_limit": 1 << 20, "accumulated_recompile_limit": 1 << 20}
    dynamo = configs.dynamo.patch(caching_precompile=False, suppress_errors=False, **limits)
    ours = config.patch(strict=False, dump=dump, cpu="reference" if arch not in (None, "cpu") else config.cpu)
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with (
        _switch.override(True), dynamo, ours,
        torch.random.fork_rng(gpus), torch.set_grad_enabled(gradients),
    ):  # fmt: skip
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
            sizes_seen.clear()  # else sizes that differ from the program's would become dynamic
            sizes_seen.update(before)


def _look(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend of `torch.compile` that runs Inductor up to its joint-graph passes, and returns zeros at run time."""
    outputs = _outputs(graph)
    _run_passes(graph, inputs)
    return outputs


def _run_passes(graph: GraphModule, inputs: Sequence[Any]) -> None:
    with suppress(_Seen), configs.inductor.patch(force_disable_caches=True):
        compile_fx.compile_fx(graph, inputs, inner_compile=_stop)


def _outputs(graph: GraphModule) -> Callable[..., Any]:
    """A function that replaces a graph of Dynamo: it returns zeros, and inputs where the graph returns inputs."""
    outputs = [_Result.of(node) for node in tree_leaves(graph.graph.output_node().args[0])]
    places = {node.name: place for place, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    return lambda *given: tuple(given[places[x.name]] if x.name in places else x.zeros() for x in outputs)


def _stop(*args: object, **kwargs: object) -> NoReturn:
    raise _Seen


@dataclass(frozen=True)
class _Result:
    """An output of a Dynamo graph: the name of its node, and its example value."""

    name: str
    value: Any

    @staticmethod
    def of(node: Any) -> _Result:
        return _Result(node.name, node.meta["example_value"]) if isinstance(node, Node) else _Result("", node)

    def zeros(self) -> Any:
        """Zeros with the shape, dtype and device of the output; for outputs that are numbers, their size hints."""
        value = self.value
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value.node.hint
        if not isinstance(value, Tensor):
            return value
        if hasattr(value, "__tensor_flatten__"):
            raise DashError(f"graphs that return {type(value).__name__} cannot be left out")
        sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape]
        zeros = torch.zeros(sizes, dtype=value.dtype, device=value.device)
        return zeros.requires_grad_(value.requires_grad)


@contextmanager
def _unchanged(fn: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Iterator[None]:
    """Restores attributes, parameters and buffers of the call's modules that Python code assigns in the block."""
    seen = [fn, getattr(fn, "__self__", None), *_variables(fn), *args, *kwargs.values()]
    modules = {part for root in seen if isinstance(root, torch.nn.Module) for part in root.modules()}
    held = [vars(part) for part in modules]
    held += [values[name] for values in held[:] for name in ("_parameters", "_buffers", "_modules")]
    before = [(values, values.copy()) for values in held]
    try:
        yield
    finally:
        for values, old in before:
            values.clear()
            values.update(old)


def _variables(fn: object) -> list[object]:
    """The values of global and closure variables that a function uses."""
    if not inspect.isfunction(fn):
        return []
    found = [fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__]
    for cell in fn.__closure__ or ():
        with suppress(ValueError):  # no value yet
            found.append(cell.cell_contents)
    return found
