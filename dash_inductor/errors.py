"""The exceptions of the package.  All derive from `DashError`; messages name the argument, its value and valid ones."""

from __future__ import annotations

import traceback
from collections.abc import Iterable


class DashError(Exception):
    """Base of all errors raised by dash_inductor."""


class ArgumentError(DashError, ValueError):
    """An invalid argument of a public function, or an invalid setting.

    Args:
        name: the argument or setting.
        value: the given value.
        allowed: what is allowed: a sentence, or the list of allowed values.
    """

    def __init__(self, name: str, value: object, allowed: str | Iterable[object]) -> None:
        self.name, self.value = name, value
        self.allowed = allowed if isinstance(allowed, str) else "one of " + ", ".join(repr(a) for a in allowed)
        super().__init__(f"{name}={value!r} is not allowed: expected {self.allowed}")


class MissingPackageError(DashError, ImportError):
    """Raised if an optional package is not installed.

    Args:
        package: the name of the package for pip.
        wanted_for: what needs it.
        extra: the extra of dash-inductor that installs it.
    """

    def __init__(self, package: str, wanted_for: str, extra: str) -> None:
        command = f'python -m pip install "dash-inductor[{extra}]"'
        super().__init__(f"{wanted_for} need {package}, which is not installed: {command}")


class LaunchError(DashError, RuntimeError):
    """Raised if the CUDA driver rejects the launch of a kernel."""


class UnsupportedVersionError(DashError, RuntimeError):
    """Raised if the installed torch or triton lacks something that dash_inductor relies on."""


class FallbackError(DashError, RuntimeError):
    """Raised at compile time, if `config.strict` is set, when an attention could not be replaced."""


def described(error: Exception) -> str:
    """The type, message and location of a raised error: ``ValueError: bad at /path/file.py:12``."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} at {where.filename}:{where.lineno}"
