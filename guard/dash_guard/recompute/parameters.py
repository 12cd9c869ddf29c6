"""Finds out whether a call of a module writes parameters, and restores what was written.

A forward may write parameters: local learning rules, codebooks and averages do so under ``torch.no_grad()``.  If such a
call ran again, the training would go on with other weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dash_inductor.upstream.dispatch import DispatchMode, has_own_dispatch
from dash_inductor.upstream.eager import versions_kept
from dash_inductor.upstream.pytree import tree_leaves

from ..upstream.parallel import broadcasts_next


class WroteParameters(RuntimeError):
    """Raised if a call that ran again has written parameters; `undisturbed` says when their values are restored."""


class Versions:
    """The version counters of a module's parameters, read when this is created.

    Args:
        root: the module.
    """

    def __init__(self, root: nn.Module) -> None:
        parameters = [] if broadcasts_next(root) else root.named_parameters()
        self._versions = [(name, tensor, _version(tensor)) for name, tensor in parameters]

    def why_not_again(self) -> str:
        """Why a call that began when this was created cannot run again: which parameter it has written; "" if none.

        A write through ``parameter.data`` does not change a version, see `Values`.
        """
        written = (name for name, tensor, version in self._versions if _version(tensor) != version)
        name = next(written, "")
        return f"its forward writes the parameter {name}" if name else ""


class Values:
    """Copies on the CPU of the values that parameters have when this is created.

    Args:
        parameters: the parameters; of a DTensor, the local shard is copied.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._copies = [(_plain(p), _plain(p).detach().to("cpu", copy=True)) for p in parameters if not p.is_meta]

    def restore(self) -> bool:
        """Restore parameters whose values have changed, without changing versions; returns whether any had changed."""
        written = [(p, copy) for p, copy in self._copies if not _equal(p, copy)]
        with torch.no_grad(), versions_kept(tuple(p for p, _ in written)):
            for parameter, copy in written:
                parameter.copy_(copy)
        return bool(written)


class Protected(DispatchMode):
    """A dispatch mode that saves the values of parameters before eager code writes them; `restore` puts them back.

    It also sees writes through ``parameter.data``, but no writes by compiled code.  While a dispatch mode is active,
    some autograd formulas avoid in-place operators, so results may be rounded differently than without it.

    Args:
        parameters: parameters, of which the local shards are protected.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        plain = [_plain(parameter) for parameter in parameters if not parameter.is_meta]
        self._parameters = {tensor.untyped_storage()._cdata: tensor for tensor in plain}
        self._saved: dict[int, tuple[Tensor, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Save the parameters that an operator is about to write, then run it.

        Operators on tensor subclasses are handled when these have become plain tensors.
        """
        if any(has_own_dispatch(kind) for kind in types):
            return NotImplemented
        if func._schema.is_mutable:
            named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._save(named.get(argument.name))
        return func(*args, **(kwargs or {}))

    def _save(self, written: Any) -> None:
        for tensor in tree_leaves(written):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                parameter = self._parameters.get(storage._cdata)
                if parameter is not None and storage._cdata not in self._saved:
                    self._saved[storage._cdata] = parameter, storage.clone()

    def restore(self) -> None:
        """Puts the saved values of parameters back, without changing their versions."""
        for parameter, values in self._saved.values():
            parameter.untyped_storage().copy_(values)
        self._saved.clear()


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
