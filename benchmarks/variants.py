"""The three ways to compile a program that the benchmarks compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dash_inductor import _switch


@dataclass(frozen=True)
class Variant:
    """A way to compile and run a program.

    Attributes:
        name: the head of its column.
        means: its description, in words.
        deterministic: whether deterministic algorithms are on.
        ours: whether dash_inductor is on.
    """

    name: str
    means: str
    deterministic: bool
    ours: bool

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.compile`; what it returns is to be called inside `active`.

        The backend keeps the variants apart: Dynamo has no guard that knows whether dash_inductor is on.
        """
        return torch.compile(function, dynamic=False, backend="dash" if self.ours else "inductor")

    @contextmanager
    def active(self) -> Iterator[None]:
        """Compile and run under this variant inside the block, in all threads: autograd's compile backwards too."""
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        enabled = _switch.is_enabled()
        torch.use_deterministic_algorithms(self.deterministic)
        if not self.ours:
            _switch.disable()
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            if enabled:
                _switch.enable()

    def during(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Wraps a call so that it runs under this variant."""

        def active_call() -> Any:
            with self.active():
                return call()

        return active_call


DEFAULT = Variant("default", "PyTorch as it is; its attention need not be deterministic", False, False)
DETERMINISTIC = Variant("deterministic", "PyTorch under use_deterministic_algorithms(True)", True, False)
DASH = Variant("dash", "the same with dash_inductor", True, True)
VARIANTS = (DEFAULT, DETERMINISTIC, DASH)


def same_bits(call: Callable[[], Sequence[Tensor]], repeats: int) -> bool:
    """Returns whether `repeats` more calls give the bits of the first one."""
    expected = [_bytes(tensor) for tensor in call()]
    return all(all(map(torch.equal, expected, map(_bytes, call()))) for _ in range(repeats))


def _bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor, uint8 [size in bytes], since `torch.equal` treats 0.0 and -0.0 as equal."""
    return tensor.detach().clone().contiguous().view(-1).view(torch.uint8)
