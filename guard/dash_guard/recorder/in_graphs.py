"""Records gradients of attention in compiled graphs, by an operator that passes them to observers.

The operator is inserted into graphs that are compiled while an observer wants such gradients. After every
`attention_backward`, `dash_guard::observe` (`recorder.observe`) reads the results of the kernel, which are in memory in
any case. So it changes nothing but the duration of the graph. Its `scratch` holds the lanes of a hash before they go to
the journal.

A CUDA graph replays launches and no Python. So captured calls append the lanes of each tensor to a journal on the
device, from which the recorder takes them at the end of a step. The journal stays at its address for the life of the
process, because a captured graph may be replayed at any time.

Importing this module enables the operator.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from dash_inductor.observers import active
from dash_inductor.upstream.dispatch import disable_current_modes

from ..fingerprints import hashing
from ..fingerprints.arriving import Arriving
from ..fingerprints.fingerprint import add_one, description, plain_view
from ..fingerprints.lane_buffer import CAPACITY
from ..fingerprints.sizes import LANES
from . import observe as operator_of_graphs
from .steps import FromGraphs

_GRADIENTS = {"dq": "dQ", "dk": "dK", "dv": "dV", "dbias": "dbias"}
_CALL = 7
"""The place of the text of the call among the arguments of `attention_backward`."""

_journals: dict[torch.device, Journal] = {}


class Journal:
    """A buffer on one GPU to which CUDA graphs append hashes of tensors, in the order of their launches."""

    def __init__(self, device: torch.device) -> None:
        self._names: list[tuple[str, str]] = []
        # Modes are off, because a graph that is being compiled has fake tensors.
        with disable_current_modes(), torch.inference_mode(False), torch.cuda.device(device):
            self._entries = torch.zeros(1, 1 + 3 * CAPACITY, dtype=torch.int64, device=device)
            self._load_kernels()

    def _load_kernels(self) -> None:
        """Launch every kernel once, because none can be loaded while a CUDA graph is captured."""
        from ..fingerprints.gpu_kernels import append

        scratch = torch.zeros(LANES, dtype=torch.int64, device=self._entries.device)
        bytes_ = torch.zeros(2 * hashing.WORD, dtype=torch.uint8, device=self._entries.device)
        for unit in (1, 2, 4, 8):
            add_one(bytes_[unit : unit + hashing.WORD], scratch)
        append[(1,)](self._entries, scratch, 0, 0)
        self.clear()

    def append(self, name: str, tensor: Tensor, scratch: Tensor) -> None:
        """Hash a tensor and append its hash to the journal, with launches that a CUDA graph can capture.

        Args:
            name: the name of the tensor.
            tensor: the tensor, on the device of the journal.
            scratch: int64 [2], zeros; it contains zeros again afterwards.
        """
        from ..fingerprints.gpu_kernels import append

        key = name, description(tensor)
        if key not in self._names:
            self._names.append(key)
        if tensor.numel():
            add_one(plain_view(tensor), scratch)
        append[(1,)](self._entries, scratch, self._names.index(key), CAPACITY)

    def take(self) -> FromGraphs | None:
        """Start to copy the entries to the host and clear the journal; None if no graph can have appended any."""
        if not self._names:
            return None
        ready = Arriving(self._entries).rows
        self.clear()
        return FromGraphs(self._names, ready)

    def clear(self) -> None:
        self._entries[:, 0].zero_()


def journals() -> Sequence[Journal]:
    return list(_journals.values())


def prepare(device: torch.device) -> None:
    """Allocate the journal of a GPU, once; not while a CUDA graph is captured, and not in its warm-up's memory pool."""
    if device.type == "cuda" and device not in _journals:
        _journals[device] = Journal(device)


def insert(graph: Graph) -> bool:
    """Make a joint graph pass the gradients of its attentions to the observers that watch graphs, if there are any.

    Returns:
        Whether the graph has changed.
    """
    from dash_inductor.graph.emit import Emitter
    from dash_inductor.graph.model_line import model_line
    from dash_inductor.model.attention_spec import AttentionSpec
    from dash_inductor.operators import attention as ops

    watching = active.watching_graphs()
    if not watching:
        return False
    emitter, seen = Emitter(graph), False
    for node in list(graph.nodes):
        if node.target is not ops.attention_backward or _observed(node):
            continue
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        results = AttentionSpec.parse(node.args[_CALL]).results
        parts = {index: part for index, part in parts.items() if results[index] in _GRADIENTS}
        if not parts:
            continue
        _, module = model_line([node])
        names = [f"{module or node.name} {_GRADIENTS[results[index]]}" for index in sorted(parts)]
        tensors = [parts[index] for index in sorted(parts)]
        after = emitter.behind(max(tensors))
        device = tensors[0].meta["val"].device
        like = {"dtype": torch.int64, "device": device, "pin_memory": False}
        scratch = emitter.call(torch.ops.aten.full.default, ([LANES], 0), like, before=after, like=node)
        emitter.call(operator_of_graphs.observe, (tensors, names, scratch), before=after, like=node)
        for observer in watching:
            observer.prepare(device)
        seen = True
    return seen


def _observed(backward: Node) -> bool:
    return any(user.target is operator_of_graphs.observe for part in backward.users for user in part.users)


def _receive(tensors: list[Tensor], names: list[str], scratch: Tensor) -> None:
    device = scratch.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if device in _journals:
            for name, tensor in zip(names, tensors, strict=True):
                _journals[device].append(name, tensor, scratch)
        return
    for observer in active.watching_graphs():
        observer.attention_gradients(list(zip(names, tensors, strict=True)))


operator_of_graphs.receive = _receive
