"""Hashes the inputs of the model and generators, because data-parallel ranks must not read the same data.

Nor should they draw the same random numbers, as for dropout.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dash_inductor.observers import active
from dash_inductor.observers.hook import Hook
from dash_inductor.upstream.eager import not_compiled
from dash_inductor.upstream.pytree import tree_leaves

from ..fingerprints.arriving import Arriving
from ..fingerprints.fingerprint import add_lanes, why_unseen
from ..fingerprints.lane_buffer import Ready
from ..observation.modules import data_parallel_wrapper
from ..observation.state import generators_now
from ..shared.heartbeat import packed
from .check import Check, Host

_EVERY = 4  # after the first steps, one step in this many is hashed
_FIRST = 8
_LEAST = 16  # bytes: equal inputs that are smaller mean nothing
_TENSORS = 32  # tensors whose digests are sent one by one


class Data(Check):
    """A check that hashes the tensors passed to the outermost module, in the first call of a step."""

    name = "data"

    def __init__(self, rank: Host, **settings: Any) -> None:
        super().__init__(rank, **settings)
        self._handles: list[RemovableHandle] = []
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._depth, self._seen = 0, 0
        self._ready: deque[tuple[int, Ready, dict[str, Any], list[str]]] = deque()
        self._draining = threading.Lock()

    def module_begins(self, module: nn.Module) -> None:
        """Put a hook on an outermost module that hashes its inputs, which this global hook does not receive."""
        if self._depth == 0 and module not in self._roots:
            self._roots.add(module)
            self._handles.append(module.register_forward_pre_hook(Hook(self._before), with_kwargs=True))
        self._depth += 1

    def module_ended(self, module: nn.Module, result: Any) -> None:
        """Count the end of a module's forward, to know which modules are outermost."""
        self._depth = max(0, self._depth - 1)

    def step_done(self, step: int) -> None:
        """Reset the nesting depth of modules, in case a forward has raised an error."""
        self._depth = 0

    def drain(self) -> None:
        """Wait for the digests of inputs and send them; not called on the training thread."""
        with self._draining:
            while self._ready:
                number, ready, told, names = self._ready.popleft()
                rows = ready()
                tensors = {name: _digest(repr(row)) for name, row in zip(names, rows, strict=True) if name}
                self.send(number, digest=_digest(repr(rows)), tensors=tensors, **told)
                self.rank.coverage.count(self.name, steps=1)

    def close(self) -> None:
        """Send the digests of inputs hashed since the last heartbeat, and remove hooks."""
        self.drain()
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs(module, args, kwargs)

    @not_compiled
    def _inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        step = self.rank.step
        if not active.is_on(self.rank):
            return  # in a cross-rank recompute, all ranks get the same inputs
        if step == self._seen or (step > _FIRST and step % _EVERY):
            return
        self._seen = step
        tensors = [(name, t) for name, t in _named(args, kwargs) if isinstance(t, Tensor) and not why_unseen(t)]
        if sum(tensor.nbytes for _, tensor in tensors) < _LEAST:
            return
        device = tensors[0][1].device
        group = [(name, tensor) for name, tensor in tensors if tensor.device == device]
        with torch.no_grad():
            lanes = torch.zeros(len(group), 2, dtype=torch.int64, device=device)
            add_lanes([tensor for _, tensor in group], lanes, range(len(group)))
        peers = _data_parallel(module)
        noise = {name: _digest(state) for name, state in generators_now().items()}
        told = {"peers": packed(peers) if peers else [], "noise": noise}
        large = (name if tensor.nbytes >= _LEAST and n < _TENSORS else "" for n, (name, tensor) in enumerate(group))
        self._ready.append((step, Arriving(lanes).rows, told, list(large)))


def _named(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Arguments with their names: ``input 1``, ``input 2``, ..., or the keyword, numbered if it has several tensors."""
    for number, leaf in enumerate(tree_leaves(args), 1):
        yield f"input {number}", leaf
    for key, value in kwargs.items():
        leaves = tree_leaves(value)
        for number, leaf in enumerate(leaves, 1):
            yield key if len(leaves) == 1 else f"{key} {number}", leaf


def _digest(content: str) -> str:
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def _data_parallel(module: nn.Module) -> tuple[int, ...]:
    """The data-parallel ranks of a DDP model; () for any other model."""
    wrapper = data_parallel_wrapper(module)
    return () if wrapper is None else tuple(dist.get_process_group_ranks(wrapper.process_group))
