"""What `import torch` runs of dash_inductor: arm a hook that installs the package once Inductor is imported.

torch loads every entry point of the group `torch.backends` at the end of its own import, and any exception there makes
`import torch` fail for the whole environment.  So this is a module of its own, standard library only.  It imports
nothing of the package (Python would run `dash_inductor/__init__.py` first, inside `import torch`) until
`torch._inductor.compile_fx` has been imported, that is, until the user compiles; and whatever goes wrong becomes one
warning, after which attention is compiled as plain PyTorch compiles it.
"""

from __future__ import annotations

import importlib.machinery
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

_TARGET = "torch._inductor.compile_fx"

failure: str | None = None  # why dash_inductor is inactive for the rest of this process
_armed = False


def off_by_environment() -> bool:
    """Whether DASH_INDUCTOR=0 is set: nothing is installed then, whatever the program asks for."""
    return os.environ.get("DASH_INDUCTOR") == "0"


def autoload() -> None:
    """Arm the hook, once; install at once where Inductor has already been imported.  Never raises."""
    global _armed
    if _armed or off_by_environment():
        return
    _armed = True
    try:
        switch = os.environ.get("DASH_INDUCTOR", "")
        if switch not in ("", "1"):
            raise ValueError(f"DASH_INDUCTOR={switch!r} is not allowed: expected one of '0', '1'")
        if _TARGET in sys.modules:
            _install()
        else:
            sys.meta_path.insert(0, _InstallAfterImport())
    except Exception as error:  # an exception would make `import torch` fail
        give_up(error)


def give_up(error: BaseException) -> None:
    """Stay inactive for the rest of this process and say why, once."""
    global failure
    if failure is not None:
        return
    failure = f"{type(error).__name__}: {error}"
    text = f"dash_inductor is inactive, attention is compiled as plain PyTorch compiles it. {failure}"
    logging.getLogger("dash_inductor").debug("inactive", exc_info=error)
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    except Warning:  # warnings are errors in this process, but this one must not break an import
        print(f"warning: {text}", file=sys.stderr)


def _install() -> None:
    try:
        from dash_inductor import _install

        _install.install()
    except (Exception, SystemExit) as error:  # a broken package must not break the user's program
        give_up(error)


class _InstallAfterImport:
    """A `sys.meta_path` entry that lets the others find the target, and adds a step after the target's import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _TARGET:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)  # old finders have only find_module
            spec: importlib.machinery.ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                self._install_after(spec)
                return spec
        return None

    def _install_after(self, spec: importlib.machinery.ModuleSpec) -> None:
        loader = spec.loader
        if loader is None:
            return
        run_module = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run_module(module)
            if module.__name__ == _TARGET and self in sys.meta_path:  # some loaders are shared between modules
                sys.meta_path.remove(self)
                _install()

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign]  # on this loader object alone
        except AttributeError as error:
            give_up(error)
