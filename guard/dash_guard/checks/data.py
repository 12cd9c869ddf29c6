"""Hashes the inputs of the model, because data-parallel ranks must not read the same data."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import deque
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
from ..shared.heartbeat import packed
from .check import Check, Host

_EVERY = 4  # after the first steps, one step in this many is hashed
_FIRST = 8
_LEAST = 16  # bytes: equal inputs that are smaller mean nothing


class Data(Check):
    """A check that hashes the tensors passed to the outermost module, in the first call of a step."""

    name = "data"

    def __init__(self, rank: Host, **settings: Any) -> None:
        super().__init__(rank, **settings)
        self._handles: list[RemovableHandle] = []
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._depth, self._seen = 0, 0
        self._ready: deque[tuple[int, Ready, tuple[int, ...]]] = deque()
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
                number, ready, peers = self._ready.popleft()
                digest = hashlib.blake2b(repr(ready()).encode(), digest_size=8).hexdigest()
                self.send(number, digest=digest, peers=packed(peers) if peers else [])
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
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and not why_unseen(t)]
        if sum(tensor.nbytes for tensor in tensors) < _LEAST:
            return
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(tensor.device, []).append(tensor)
        for device, group in list(by_device.items())[:1]:
            with torch.no_grad():
                lanes = torch.zeros(len(group), 2, dtype=torch.int64, device=device)
                add_lanes(group, lanes, range(len(group)))
            self._ready.append((step, Arriving(lanes).rows, _data_parallel(module)))


def _data_parallel(module: nn.Module) -> tuple[int, ...]:
    """The data-parallel ranks of a DDP model; () for any other model."""
    wrapper = data_parallel_wrapper(module)
    return () if wrapper is None else tuple(dist.get_process_group_ranks(wrapper.process_group))
