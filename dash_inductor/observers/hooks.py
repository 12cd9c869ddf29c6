"""What eager PyTorch shows: modules, their results, gradients and optimizers, through hooks that change nothing.

Inside compiled code the hooks vanish: Dynamo traces them, and `is_compiling` is a constant there, so that no graph
breaks and no graph changes.  Outside, Dynamo must not compile them: `_disable_dynamo` says so without importing
Dynamo, which it must not do while torch itself is being imported (`start`).
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from . import active, phases
from .names import inner

if TYPE_CHECKING:
    from .recorder import Recorder


class Hooks:
    """The hooks of one recording.

    Args:
        recorder: gets what they see.
        activations: whether it gets inputs and results of modules, and gradients of results.
        local_gradients: whether it gets gradients as they are accumulated; None: of models wrapped in DDP.
    """

    def __init__(self, recorder: Recorder, activations: bool, local_gradients: bool | None) -> None:
        self._recorder, self._activations, self._local_gradients = recorder, activations, local_gradients
        self._handles: list[RemovableHandle] = []
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # running: modules, outermost first, with the place of the next entry when they began; left: the last of them
        # that ended; last: the last result, as a weak reference, and its version.
        self._calls = threading.local()

    def remove(self) -> None:
        """Take away what was put on modules and parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def add(self, model: nn.Module) -> None:
        """Name the modules and parameters of a model that is about to run, and watch what has to be watched on them."""
        names = self._recorder.names
        names.add(model)
        for device in {parameter.device for parameter in model.parameters()}:
            self._recorder.prepare(device)
        self._handles.append(model.register_forward_hook(self._after_root, with_kwargs=True))
        wrapper: nn.Module | None = model
        while wrapper is not None and not isinstance(wrapper, DistributedDataParallel):
            wrapper = inner(wrapper)
        if wrapper is not None:
            self._recorder.replicate(wrapper)
        reduced = wrapper is not None and dist.get_world_size(wrapper.process_group) > 1
        if reduced if self._local_gradients is None else self._local_gradients:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    self._watch_gradient(names.of_parameter(parameter), parameter)

    def _watch_gradient(self, name: str, parameter: Tensor) -> None:
        def accumulated(parameter: Tensor) -> None:
            self._observe(phases.LOCAL_GRADIENT, name, parameter.grad)

        self._handles.append(parameter.register_post_accumulate_grad_hook(accumulated))

    def _after_root(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if not torch.compiler.is_compiling():
            self._inputs(module, args, kwargs)

    @_disable_dynamo
    def enter(self, module: nn.Module) -> None:
        """A module begins."""
        calls = self._calls
        if not hasattr(calls, "running"):
            calls.running, calls.last = [], None
        if not calls.running and module not in self._roots:
            self._roots.add(module)
            self.add(module)
        calls.running.append((module, self._recorder.place()))

    @_disable_dynamo
    def leave(self, module: nn.Module, result: Any) -> None:
        """A module ends."""
        running = getattr(self._calls, "running", [])
        if not any(module is each for each, _ in running):
            return  # the recording has begun inside of it
        while running[-1][0] is not module:  # what has raised an exception is not running any more
            running.pop()
        self._calls.left = running.pop()
        wrapped = bool(running) and inner(running[-1][0]) is module  # then the wrapper tells
        if self._activations and not wrapped:
            for label, tensor in _labelled(self._recorder.names.of_module(module), result):
                self._result(label, tensor)

    def _result(self, label: str, tensor: Tensor) -> None:
        version = 0 if tensor.is_inference() else tensor._version
        if self._calls.last is not None and self._calls.last[0]() is tensor and self._calls.last[1] == version:
            return  # a module hands on the result of its last part
        self._calls.last = weakref.ref(tensor), version
        self._observe(phases.ACTIVATION, label, tensor)
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(lambda gradient: self._observe(phases.ACTIVATION_GRADIENT, label, gradient))

    @_disable_dynamo
    def _inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """What a module was given; the place is from before it ran."""
        left, place = self._calls.left
        if not self._activations or self._calls.running or left is not module:
            return
        for label, tensor in _labelled(self._recorder.names.of_module(module), (args, kwargs)):
            self._observe(phases.INPUT, label, tensor, place)
            place += 1

    def _observe(self, phase: str, name: str, tensor: Tensor | None, place: int | None = None) -> None:
        if active.recorder is not self._recorder or tensor is None:
            return
        self._recorder.observe_in_step(phase, [(name, tensor)], place)


def install() -> None:
    """Let PyTorch call the hooks of the recording that is on, whichever it is.

    Graphs that were compiled with these hooks in place guard them and would be compiled again without them.  So they
    stay for the life of the process.
    """
    # PyTorch warns that a compiled module runs global hooks twice, for its wrapper too: names make one of the two.
    warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
    _register()


@functools.cache
def _register() -> None:
    register_module_forward_pre_hook(_before_forward)
    register_module_forward_hook(_after_forward, always_call=True)
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_forward(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling() and active.recorder is not None:
        active.recorder.hooks.enter(module)


def _after_forward(module: nn.Module, args: Any, result: Any) -> None:
    if not torch.compiler.is_compiling() and active.recorder is not None:
        active.recorder.hooks.leave(module, result)


@_disable_dynamo
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if active.recorder is not None:
        active.recorder.before_optimizer(optimizer)


@_disable_dynamo
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if active.recorder is not None:
        active.recorder.after_optimizer(optimizer)


def _labelled(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """The tensors in a result or in arguments, numbered if there are several."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [(name if len(tensors) == 1 else f"{name}[{number}]", tensor) for number, tensor in enumerate(tensors)]
