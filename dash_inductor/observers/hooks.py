"""Global hooks that pass events of modules and optimizers in eager PyTorch to observers; they change nothing.

Inside compiled code the hooks vanish: Dynamo traces them, and `is_compiling` is a constant there, so graphs neither
break nor change.  Outside, Dynamo must not compile them; `not_compiled` marks them without importing Dynamo, which is
not allowed while torch itself is being imported (`start`).
"""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..upstream.eager import not_compiled
from . import active, backwards


def install() -> None:
    """Registers global hooks on modules, backwards and optimizers, which send events to all active observers.

    Graphs that were compiled with these hooks have guards on them and would be recompiled without them.  So the hooks
    are never removed.
    """
    # PyTorch warns that compiled modules run global hooks twice, also for their wrapper; `names` treats both as one.
    warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
    _register()


@functools.cache
def _register() -> None:
    register_module_forward_pre_hook(_before_forward)
    register_module_forward_hook(_after_forward, always_call=True)
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    _watch_scalers()
    backwards.watch()


@functools.cache
def _watch_scalers() -> None:
    """Wraps two methods of `GradScaler`, because scalers have no hooks.

    `scale` knows the loss; `update` ends every training step, also a skipped one.
    """
    scale, update = torch.amp.GradScaler.scale, torch.amp.GradScaler.update

    @functools.wraps(scale)
    def scaled(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        result = scale(scaler, outputs)
        if isinstance(outputs, Tensor) and not torch.compiler.is_compiling():
            for observer in tuple(active.observers):
                observer.loss_scaled(outputs, result)
        return result

    @functools.wraps(update)
    def updated(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
        observers = tuple(active.observers) if scaler.is_enabled() else ()
        for observer in observers:
            observer.scaler_updates(scaler)
        update(scaler, *args, **kwargs)
        for observer in observers:
            observer.scaler_updated()

    torch.amp.GradScaler.scale = scaled  # type: ignore[assignment, method-assign]
    torch.amp.GradScaler.update = updated  # type: ignore[assignment, method-assign]


def _before_forward(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        for observer in tuple(active.observers):
            observer.module_begins(module)


def _after_forward(module: nn.Module, args: Any, result: Any) -> None:
    if not torch.compiler.is_compiling():
        for observer in tuple(active.observers):
            observer.module_ended(module, result)


@not_compiled
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Sends the event; if the step is given a closure, which computes gradients, in a closure that sends it then."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure) or not active.observers:
        _steps(optimizer)
        return None
    _waiting.add(optimizer)

    @functools.wraps(closure)
    def computed() -> Any:
        result = closure()
        _has_gradients(optimizer)
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": computed}
    return (args[0], computed, *args[2:]), kwargs


_waiting: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers whose steps have begun, and whose closures have not computed gradients yet."""


@not_compiled
def _has_gradients(optimizer: torch.optim.Optimizer) -> None:
    if optimizer in _waiting:
        _waiting.remove(optimizer)
        _steps(optimizer)


def _steps(optimizer: torch.optim.Optimizer) -> None:
    for observer in tuple(active.observers):
        observer.before_optimizer(optimizer)


@not_compiled
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _has_gradients(optimizer)  # of an optimizer that has not called its closure
    for observer in tuple(active.observers):
        observer.after_optimizer(optimizer)
