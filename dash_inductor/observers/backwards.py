"""Passes what programs differentiate to observers: PyTorch has hooks of gradients, and none of a call of `backward`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from ..upstream.eager import in_backward, not_compiled
from . import active


@functools.cache
def watch() -> None:
    """Wraps `torch.autograd.backward`, which `Tensor.backward` calls, for the life of the process."""
    plain: Any = torch.autograd.backward

    @functools.wraps(plain)
    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        tensors, inputs = _read_once(tensors), _read_once(inputs)
        if grad_tensors is None and grad_variables is None:
            _begins(ours.__code__, tensors, inputs)
        plain(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)

    ours: Any = backward
    torch.autograd.backward = ours


@not_compiled
def _begins(wrapper: CodeType, tensors: Any, inputs: Any) -> None:
    found = _tensors(tensors)
    if not active.observers or in_backward():  # a checkpoint differentiates inside of a backward what is no loss
        return
    if has_torch_function((*found, *_tensors(inputs))):  # PyTorch hands the call on to a method that calls it again
        return
    _keep_from_dynamo(wrapper)
    for observer in tuple(active.observers):
        observer.backward_begins(found)


@functools.cache
def _keep_from_dynamo(wrapper: CodeType) -> None:
    """Keeps Dynamo from compiling the wrapper by itself, with guards on the loss; it is imported late (see `hooks`)."""
    from ..upstream.dynamo import skip_code

    skip_code(wrapper)


def _read_once(given: Any) -> Any:
    """What is given; of an iterator, a list."""
    return list(given) if isinstance(given, Iterator) else given


def _tensors(given: Any) -> list[Tensor]:
    """The tensors in an argument of `backward`: one, a collection, or a mapping."""
    if isinstance(given, Tensor):
        return [given]
    several = given.values() if isinstance(given, Mapping) else given
    return [each for each in several if isinstance(each, Tensor)] if isinstance(several, Iterable) else []
