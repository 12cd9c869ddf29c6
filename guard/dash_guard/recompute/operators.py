"""Hashes the operators that eager code runs, to find the first one whose result differs, and its source line.

A dispatch mode sees every operator that the program calls, as `torch.utils._debug_mode.DebugMode` does, and uses the
hash of recordings. It changes no bit. Collectives, and operators that leave memory unwritten, are not hashed.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_inductor.upstream.dispatch import DispatchMode, has_own_dispatch
from dash_inductor.upstream.eager import backward_node
from dash_inductor.upstream.pytree import tree_leaves

from ..fingerprints.fingerprint import add_lanes, description, digest, why_unseen
from ..fingerprints.sizes import DIGEST, LANES

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_SHARDING = str(Path(_TORCH, "distributed", "fsdp"))
"""The code in which each rank handles its own shards, which legitimately differ."""
_NOT_HASHED = ("c10d", "_c10d_functional", "c10d_functional", "fsdp", "prim", "profiler")
_UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "set_")


class Operator(NamedTuple):
    """An operator that has run.

    Attributes:
        name: its name in PyTorch.
        where: module and source line, or the node of the backward.
        inputs, outputs: digests of 8 bytes each.
        strange: the number of input tensors that no earlier operator has had as input or result.
        is_random: whether it draws random numbers.
    """

    name: str
    where: str
    inputs: bytes
    outputs: bytes
    strange: int
    is_random: bool = False

    def number(self) -> int:
        """A hash of the name, the inputs and the outputs as a signed 64-bit number."""
        content = self.name.encode() + self.inputs + self.outputs
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)

    def written(self) -> list[str]:
        """The operator as texts, for a message."""
        return [self.name[:200], self.where[:200], self.inputs.hex(), self.outputs.hex(), str(self.strange)]

    def __str__(self) -> str:
        return f"{self.name} {self.where}".strip()


class OperatorLog(DispatchMode):
    """A dispatch mode that hashes the inputs and results of every operator.

    Attributes:
        operators: the operators in the order in which they have run.
        module: returns the name of the module that runs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        self.module: Callable[[], str] = str
        self._seen: set[bytes] = set()
        self._lock = threading.Lock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and log it; operators on tensor subclasses are logged once these are plain tensors."""
        if any(has_own_dispatch(kind) for kind in types):
            return NotImplemented
        name = func.name().removeprefix("aten::")
        where = self._where()
        if where is None or func.namespace in _NOT_HASHED or name.split(".")[0] in _UNWRITTEN:
            return func(*args, **(kwargs or {}))
        if func.is_view:  # also of what a collective has not brought yet; that of something strange is strange too
            bases = [_hash(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            result = func(*args, **(kwargs or {}))
            with self._lock:
                if self._seen.issuperset(bases):
                    self._seen.update(_hash(leaf) for leaf in tree_leaves(result))
            return result
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
        inputs = [_hash(leaf) for leaf in tree_leaves({k: value for k, value in named.items() if k not in written})]
        result = func(*args, **(kwargs or {}))
        outputs = [_hash(leaf) for leaf in tree_leaves(result)]
        with self._lock:
            strange = sum(len(each) == DIGEST and each not in self._seen for each in inputs)
            self._seen.update(inputs, outputs)
            is_random = torch.Tag.nondeterministic_seeded in func.tags
            self.operators.append(Operator(name, where, _joined(inputs), _joined(outputs), strange, is_random))
        return result

    def _where(self) -> str | None:
        """Module and line of the program, or the node of the backward; None in the code that shards parameters."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and (file := frame.f_code.co_filename).startswith((_OURS, _TORCH)):
            if file.startswith(_SHARDING) and "hook" not in frame.f_code.co_name:
                return None
            frame = frame.f_back
        if node := backward_node():
            return f"in the backward ({node})"
        line = "" if frame is None else f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return f"in {self.module()}{line}"


def _hash(leaf: Any) -> bytes:
    """The hash of a tensor or a plain value; b"" for anything else."""
    if isinstance(leaf, Tensor) and not why_unseen(leaf):
        lanes = torch.zeros(1, LANES, dtype=torch.int64, device=leaf.device)
        add_lanes([leaf], lanes, [0])
        low, high = map(int, lanes[0])
        return digest(low, high, description(leaf))
    return repr(leaf).encode() if isinstance(leaf, (int, float, bool, str, torch.dtype)) else b""


def _joined(hashes: list[bytes]) -> bytes:
    return hashlib.blake2b(b"\0".join(hashes), digest_size=8).digest()
