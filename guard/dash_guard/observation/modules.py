"""Hooks that observe the outermost module and its submodules: inputs, results, and gradients of the results."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from dash_inductor.observers import phases
from dash_inductor.observers.hook import Hook
from dash_inductor.observers.names import Names, inner
from dash_inductor.upstream.eager import not_compiled
from dash_inductor.upstream.pytree import tree_leaves

from ..upstream.frames import is_library
from .labels import EVALUATION


class Sink(Protocol):
    """The interface of what receives the observed tensors, such as a recording.

    Attributes:
        names: the names of modules and parameters.
    """

    names: Names

    def is_on(self) -> bool:
        """Whether tensors are hashed now; otherwise hooks ignore them."""

    def prepare(self, device: torch.device) -> None:
        """Allocate the buffers for fingerprints on a device."""

    def replicate(self, model: DistributedDataParallel) -> None:
        """Report a DDP model, whose parameters are equal on all of its ranks, to other observers."""

    def training_begins(self) -> None:
        """Note that an outermost module is about to be called in training."""

    def place(self) -> int:
        """The index that the next observed tensor of this step gets."""

    def observe_in_step(self, phase: str, tensors: Sequence[tuple[str, Tensor]], place: int | None = None) -> None:
        """Add fingerprints of tensors, each given with its name, to the current step.

        Args:
            phase: the kind of the tensors, one of `phases`.
            tensors: (name, tensor) pairs.
            place: the index in the step at which the entry belongs; None: at the end.
        """


class Modules:
    """Puts the hooks of one recording on modules and parameters, and passes the tensors to it.

    Args:
        sink: receives the tensors.
        activations: whether it receives inputs and results of modules, and gradients of results.
        local_gradients: whether it receives gradients as they are accumulated; None: only for models wrapped in DDP.
    """

    def __init__(self, sink: Sink, activations: bool, local_gradients: bool | None) -> None:
        self._sink, self._activations, self._local_gradients = sink, activations, local_gradients
        self._handles: list[RemovableHandle] = []
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # outermost modules that have run
        self._trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those of them that the program trains
        self._aside = Names(bare=False)  # of modules that only evaluations have called
        # running: modules, outermost first, with the place of the next entry when they began; left: the last of them
        # that ended; last: the last result, as a weak reference, and its version; mode: of the outermost module's call;
        # names: of modules in this call.
        self._calls = threading.local()

    def remove(self) -> None:
        """Remove hooks from modules and parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def buffers(self) -> list[tuple[str, Tensor]]:
        """The buffers of all outermost modules that the program trains, as (path, buffer) pairs sorted by path."""
        found: dict[int, tuple[str, Tensor]] = {}
        for root in self._trained:
            for module in root.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    found.setdefault(id(buffer), (self._sink.names.of_buffer(module, name), buffer))
        return sorted(found.values(), key=lambda pair: pair[0])

    def _call(self, model: nn.Module) -> None:
        """Note that an outermost module is called: put hooks on one that is new, and name what it has.

        Only a model that is trained gets names in the sink. So no model that is evaluated before takes these names.
        """
        calls = self._calls
        calls.mode = _mode(model)
        wrapper = data_parallel_wrapper(model)
        trained = not calls.mode or wrapper is not None or model in self._sink.names
        calls.names = self._sink.names if trained else self._aside
        if model not in self._roots:
            self._roots.add(model)
            for device in {parameter.device for parameter in model.parameters()}:
                self._sink.prepare(device)
            self._handles.append(model.register_forward_hook(Hook(self._after_root), with_kwargs=True))
        calls.names.add(model)
        if trained and model not in self._trained:
            self._trained.add(model)
            self._train(model, wrapper)

    def _train(self, model: nn.Module, wrapper: DistributedDataParallel | None) -> None:
        """Put hooks on the parameters of a model that is trained; `wrapper` is its DDP, if it has one."""
        if wrapper is not None:
            self._sink.replicate(wrapper)
        reduced = wrapper is not None and dist.get_world_size(wrapper.process_group) > 1
        if reduced if self._local_gradients is None else self._local_gradients:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    self._watch_gradient(self._sink.names.of_parameter(parameter), parameter)

    def _watch_gradient(self, name: str, parameter: Tensor) -> None:
        def accumulated(parameter: Tensor) -> None:
            self._observe(phases.LOCAL_GRADIENT, name, parameter.grad)

        self._handles.append(parameter.register_post_accumulate_grad_hook(accumulated))

    def _after_root(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        self._inputs(module, args, kwargs)

    @not_compiled
    def enter(self, module: nn.Module) -> None:
        """Note that the forward of a module begins, and put hooks on an outermost one at its first call."""
        calls = self._calls
        if not hasattr(calls, "running"):
            calls.running, calls.last = [], None
        if not calls.running:
            self._call(module)
            if not calls.mode:
                self._sink.training_begins()
        calls.running.append((module, self._sink.place()))

    @not_compiled
    def leave(self, module: nn.Module, result: Any) -> None:
        """Note that the forward of a module has ended, and pass its result to the sink."""
        running = getattr(self._calls, "running", [])
        if not any(module is each for each, _ in running):
            return  # the recording has begun inside of it
        while running[-1][0] is not module:  # what has raised an exception is not running any more
            running.pop()
        self._calls.left = running.pop()
        wrapped = bool(running) and inner(running[-1][0]) is module  # then the wrapper reports the result
        if self._activations and not wrapped:
            for label, tensor in _labelled(self._calls.names.of_module(module), result):
                self._result(label + self._calls.mode, tensor)

    def innermost(self) -> str:
        """The name of the innermost module that runs on this thread, "" for none."""
        running = getattr(self._calls, "running", [])
        return self._calls.names.of_module(running[-1][0]) if running else ""

    def _result(self, label: str, tensor: Tensor) -> None:
        version = 0 if tensor.is_inference() else tensor._version
        if self._calls.last is not None and self._calls.last[0]() is tensor and self._calls.last[1] == version:
            return  # a module returns the result of its last submodule
        self._calls.last = weakref.ref(tensor), version
        self._observe(phases.ACTIVATION, label, tensor)
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(lambda gradient: self._observe(phases.ACTIVATION_GRADIENT, label, gradient))

    @not_compiled
    def _inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The tensors that a module was given; the place is from before it ran."""
        left, place = self._calls.left
        if not self._activations or self._calls.running or left is not module:
            return
        for label, tensor in _labelled(self._calls.names.of_module(module), (args, kwargs)):
            self._observe(phases.INPUT, label + self._calls.mode, tensor, place)
            place += 1

    @not_compiled  # hooks of gradients run in a backward, which a compiled function may call
    def _observe(self, phase: str, name: str, tensor: Tensor | None, place: int | None = None) -> None:
        if tensor is None or not self._sink.is_on():
            return
        self._sink.observe_in_step(phase, [(name, tensor)], place)


def data_parallel_wrapper(module: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper of a model; None if it has none."""
    wrapper: nn.Module | None = module
    while wrapper is not None and not isinstance(wrapper, DistributedDataParallel):
        wrapper = inner(wrapper)
    return wrapper


def _mode(module: nn.Module) -> str:
    """The end of the names of what a call of an outermost module computes: "" in training.

    A program that evaluates between two steps calls the same modules. These calls are counted apart, by the function
    that makes them, so that calls of the training have the same names in a run that evaluates at other times.
    """
    if module.training and torch.is_grad_enabled():
        return ""
    frame = sys._getframe(3)
    while frame.f_back is not None and is_library(frame):
        frame = frame.f_back
    return f"{EVALUATION} in {frame.f_code.co_name})"


def _labelled(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """The tensors in a result or in arguments, numbered if there are several."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [(name if len(tensors) == 1 else f"{name}[{number}]", tensor) for number, tensor in enumerate(tensors)]
