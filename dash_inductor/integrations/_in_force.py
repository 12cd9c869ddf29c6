"""What the trainings of a process share: its settings and the warnings of PyTorch, until the last of them ends."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..config import config
from ..doctor import flag

_ALERT = re.compile(r"(.+) does not have a deterministic implementation")


class _Shared:
    """A setting that several trainings need, which the last of them restores."""

    def __init__(self) -> None:
        self.users, self.restored = 0, ExitStack()

    @contextmanager
    def used(self) -> Iterator[ExitStack | None]:
        """A context manager of one user; yields what restores the setting to the first of them, None to the others."""
        self.users += 1
        try:
            yield self.restored if self.users == 1 else None
        finally:
            self.users -= 1
            if not self.users:
                self.restored.close()


_deterministic, _strict, _heard = _Shared(), _Shared(), _Shared()


@contextmanager
def deterministic() -> Iterator[None]:
    """A context manager of a training, with deterministic algorithms on and cuDNN's timing of convolutions off.

    These contexts, like those below, may overlap in any way: when none is left, all is as it was before the first.
    """
    with _deterministic.used() as restored:
        if restored is not None:
            restored.enter_context(flag.kept())
            restored.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        torch.backends.cudnn.benchmark = False
        if flag.Flag.now() is flag.Flag.OFF:
            torch.use_deterministic_algorithms(True)
        yield


@contextmanager
def strict() -> Iterator[None]:
    """A context manager of a training in which an attention that is not replaced is an error."""
    with _strict.used() as restored:
        if restored is not None:
            restored.callback(setattr, config, "strict", config.strict)
        config.strict = True
        yield


@contextmanager
def alerts(into: dict[str, None]) -> Iterator[None]:
    """A context manager that adds to `into` the operators that PyTorch warns about as nondeterministic."""
    with _heard.used() as restored:
        if restored is not None:
            restored.callback(_hear())
        _listening.append(into)
        try:
            yield
        finally:
            _listening[:] = [each for each in _listening if each is not into]


_listening: list[dict[str, None]] = []


def _hear() -> Callable[[], None]:
    """Begins to listen to warnings, and returns a function that ends this."""
    show = warnings.showwarning

    def hearing(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if alert := _ALERT.match(str(message)):
            for each in _listening:
                each.setdefault(alert[1])
        show(message, *args, **kwargs)

    def end() -> None:
        if warnings.showwarning is hearing:
            warnings.showwarning = show

    warnings.showwarning = hearing
    return end
