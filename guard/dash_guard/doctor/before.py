"""Saves what a call of a module depends on before the call, so that the call can be run again."""

from __future__ import annotations

import copy
import enum
import functools
import os
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dash_inductor.doctor.flag import Flag
from dash_inductor.upstream.eager import has_cuda_graphs, versions_kept
from dash_inductor.upstream.pytree import tree_leaves
from dash_inductor.upstream.tensors import is_functorch_wrapped

from ..fingerprints.fingerprint import local, why_unseen
from ..recompute.micro_batch import MicroBatch, Random
from ..recompute.saved_state import SavedState

_SHARED = (
    int, float, complex, bool, str, bytes, type(None), enum.Enum, type, torch.dtype, torch.device, torch.layout,
    torch.memory_format, types.FunctionType, types.BuiltinFunctionType, functools.partial,
)  # fmt: skip
"""Arguments that a call cannot change; others are copied."""


class CannotRepeat(Exception):
    """Raised if a call cannot be run again; the message says why."""


@dataclass
class Before:
    """A recorded call of a module, and the state that it depends on.

    Attributes:
        batch: the call, with copies of its arguments.
        parameters: the values of the parameters, on the host.
        flag: the state of PyTorch's determinism flag.
        generators: the RNG states of all GPUs; [] if there is only one GPU, whose state `batch` has.
    """

    batch: MicroBatch
    parameters: Parameters
    flag: Flag
    generators: list[Tensor]

    @classmethod
    def of(cls, root: nn.Module, args: Any, kwargs: Any, copies: dict[tuple[int, int], Tensor]) -> Before:
        """Copy everything that a call of a module is about to use.

        Args:
            root: the module.
            args: the positional arguments of the call.
            kwargs: the keyword arguments of the call.
            copies: copies of parameters by (id, version), shared by all calls of a step; new copies are added.

        Raises:
            CannotRepeat: something cannot be copied.
        """
        if any(is_lazy(tensor) for tensor in (*root.parameters(), *root.buffers())):
            raise CannotRepeat("it makes its parameters in its first call")
        random, generators = Random.now(), _generators()
        try:
            batch = MicroBatch.of(root, args, kwargs)
            batch.leaves[:] = _copied(batch.leaves)
            batch.random, batch.saved = random, SavedState(root)
            if why := batch.why_not_again():
                raise CannotRepeat(why)
            parameters = Parameters(root, copies)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, MemoryError) as error:
            raise CannotRepeat(f"{type(error).__name__}: {_first_line(error)}") from error
        return cls(batch, parameters, Flag.now(), generators)

    def again(self) -> MicroBatch:
        """The call with fresh copies of its arguments, which a second run may write to.

        Raises:
            CannotRepeat: CUDA graphs write to results that the program may still read.
        """
        if has_cuda_graphs():
            raise CannotRepeat("Inductor has made CUDA graphs, whose results the program may still read")
        return replace(self.batch, leaves=_copied(self.batch.leaves))

    @contextmanager
    def put(self) -> Iterator[None]:
        """A context manager that restores the determinism flag and the RNG states of all GPUs.

        On exit, the current RNG states are set again. `MicroBatch.run` restores everything else.
        """
        now = _generators()
        self.flag.put()
        try:
            if self.generators:
                torch.cuda.set_rng_state_all(self.generators)
            yield
        finally:
            if now:
                torch.cuda.set_rng_state_all(now)


class Parameters:
    """Copies, on the host, of the current values of a module's parameters.

    Args:
        root: the module.
        copies: earlier copies by (id, version) of parameters; new copies are added.

    Raises:
        CannotRepeat: the copies need more than half of the free memory.
    """

    def __init__(self, root: nn.Module, copies: dict[tuple[int, int], Tensor]) -> None:
        self._parameters = list(root.parameters())
        keys = [(id(parameter), parameter._version) for parameter in self._parameters]
        new = [p for p, key in zip(self._parameters, keys, strict=True) if key not in copies]
        needed = sum(local(parameter).nbytes for parameter in new)
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > free // 2:
            raise CannotRepeat(f"copies of its parameters take {needed >> 20} MiB, and {free >> 20} MiB are free")
        for parameter in new:
            copies[id(parameter), parameter._version] = _on_host(parameter)
        self._values = [copies[key] for key in keys]

    @contextmanager
    def put(self) -> Iterator[None]:
        """A context manager that sets the parameters to the copied values, and on exit restores the current ones."""
        pairs = list(zip(self._parameters, self._values, strict=True))
        with versions_kept(tuple(self._parameters)):
            now = [value if same_bits(parameter, value) else _on_host(parameter) for parameter, value in pairs]
            try:
                _write(self._parameters, self._values)
                yield
            finally:
                _write(self._parameters, now)


def computes(root: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a call of a module computes real data: it is not being traced, and its tensors are not fake."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)] + list(root.parameters())
    if any(map(is_functorch_wrapped, tensors)):
        return False
    return any(is_lazy(tensor) or not why_unseen(local(tensor)) for tensor in tensors)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of equal dtype and shape have equal bits; `other` must be on the host."""
    first, second = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (local(one).cpu(), other))
    return torch.equal(first, second)


def _write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        if not same_bits(tensor, value):
            local(tensor).data.copy_(value)


def _on_host(tensor: Tensor) -> Tensor:
    return local(tensor).detach().to("cpu", copy=True)


def _generators() -> list[Tensor]:
    several = torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.device_count() > 1
    return torch.cuda.get_rng_state_all() if several else []


def _copied(leaves: list[Any]) -> list[Any]:
    """The arguments of a call, with copies of mutable objects that are no tensors."""
    return [leaf if isinstance(leaf, (Tensor, *_SHARED)) else _copy(leaf) for leaf in leaves]


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, (nn.Module, torch.Generator, types.MethodType)):
        raise CannotRepeat(f"an argument of type {type(leaf).__name__}, which cannot be copied")
    try:
        return copy.deepcopy(leaf)
    except Exception as error:  # of a class of the program
        raise CannotRepeat(f"an argument of type {type(leaf).__name__}, which cannot be copied: {error}") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
