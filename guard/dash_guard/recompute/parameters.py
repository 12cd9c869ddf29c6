"""Finds out whether a call of a module writes parameters, and restores what was written.

A forward may write parameters: local learning rules, codebooks and averages do so under ``torch.no_grad()``.  If such a
call ran again, the training would go on with other weights.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dash_inductor.upstream.eager import versions_kept


class WroteParameters(RuntimeError):
    """A call that ran again has written parameters; their values are restored."""


class Versions:
    """The versions of a module's parameters, as they are when this is created.

    Args:
        root: the module.
    """

    def __init__(self, root: nn.Module) -> None:
        self._versions = [(name, tensor, _version(tensor)) for name, tensor in root.named_parameters()]

    def why_not_again(self) -> str:
        """Why a call that began when this was created cannot run again: it has written a parameter; "" if it has not.

        A write through ``parameter.data`` does not change a version, see `Values`.
        """
        written = (name for name, tensor, version in self._versions if _version(tensor) != version)
        name = next(written, "")
        return f"its forward writes the parameter {name}" if name else ""


class Values:
    """The values of parameters, copied to the CPU, as they are when this is created.

    Args:
        parameters: parameters, of which the local shards are copied.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._copies = [(_plain(p), _plain(p).detach().to("cpu", copy=True)) for p in parameters if not p.is_meta]

    def restore(self) -> bool:
        """Restores the values of parameters that have others, without changing versions; returns whether any had."""
        written = [(p, copy) for p, copy in self._copies if not _equal(p, copy)]
        with torch.no_grad(), versions_kept(tuple(p for p, _ in written)):
            for parameter, copy in written:
                parameter.copy_(copy)
        return bool(written)


def _equal(parameter: Tensor, copy: Tensor) -> bool:
    """Whether all bits are equal."""
    now = parameter.detach().to("cpu").contiguous()
    return torch.equal(now.view(-1).view(torch.uint8), copy.contiguous().view(-1).view(torch.uint8))


def _plain(parameter: Tensor) -> Tensor:
    """The local shard of a parameter that is distributed, else the parameter."""
    local = getattr(parameter, "to_local", None)
    if local is None:
        return parameter
    with torch.no_grad():
        shard: Tensor = local()
        return shard


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
