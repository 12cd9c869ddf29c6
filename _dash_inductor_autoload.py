"""What `import torch` runs of dash_inductor: offer the operators, and arm a hook that installs into Inductor.

torch loads every entry point of the group `torch.backends` at the end of its own import, and any exception there makes
`import torch` fail for the whole environment.  So this module stands by itself, standard library only.  It imports
nothing of the package (Python would run `dash_inductor/__init__.py` first, inside `import torch`) until an operator is
asked for or `torch._inductor.compile_fx` has been imported, that is, until the user compiles.

Whatever goes wrong becomes one warning, after which attention is compiled as plain PyTorch compiles it.  Who has set
DASH_INDUCTOR_STRICT has asked for an error instead: every compile under deterministic algorithms raises it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import _dash_inductor_state as state

_OPERATORS = "torch._ops"
_INDUCTOR = "torch._inductor.compile_fx"
_DEFINING = "dash_inductor.operators.", "dash_inductor.passes.ops.operators."  # the modules that define operators

_armed = False


def autoload() -> None:
    """Arm the hooks, once; what has been imported already is served at once.  Never raises."""
    global _armed
    if _armed:
        return
    _armed = True
    after_import(_OPERATORS, _offer_operators)
    if state.off_by_environment():
        return
    switch = os.environ.get("DASH_INDUCTOR", "")
    if switch and switch.lower() not in state.BOOLEANS:
        allowed = ", ".join(map(repr, state.BOOLEANS))
        state.give_up(ValueError(f"DASH_INDUCTOR={switch!r} is not allowed: expected one of {allowed}"))
    after_import(_INDUCTOR, _install)
    for module, place, needed in _BEFORE:
        after_import(module, functools.partial(_install_before, module, place, needed))


def _install_before(module: str, place: str, needed: Callable[..., bool]) -> None:
    """Install when Dynamo traces certain calls; Inductor may not be imported by then.

    What is installed then handles the call, see `dash_inductor.install.repeated_arguments` and `skipped_code`.

    Args:
        module, place: the method of Dynamo, ``Class.name``, that traces calls.
        needed: whether a call with these arguments of the method needs what is installed.
    """
    kind, _, name = place.partition(".")
    owner: Any = getattr(sys.modules[module], kind, None)
    if not hasattr(owner, name):
        return
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        deterministic = sys.modules["torch"].are_deterministic_algorithms_enabled()
        if deterministic and _INDUCTOR not in sys.modules and needed(*args):
            importlib.import_module(_INDUCTOR)
            return getattr(owner, name)(*args, **kwargs)
        return plain(*args, **kwargs)

    setattr(owner, name, staticmethod(call) if isinstance(vars(owner).get(name), staticmethod) else call)


def _is_repeated(_: Any, tx: Any, args: Any, *rest: Any) -> bool:
    return len({id(arg) for arg in args}) < len(args)


def _is_skipped(variable: Any, *rest: Any) -> bool:
    return "_torchdynamo_disable" in getattr(variable.value, "__dict__", {})


def _is_skipped_method(tx: Any, function: Any, *rest: Any) -> bool:
    return "_torchdynamo_disable" in getattr(getattr(function, "fn", None), "__dict__", {})


_BEFORE = (
    ("torch._dynamo.variables.higher_order_ops", "AutogradFunctionApplyVariable.call_function", _is_repeated),
    ("torch._dynamo.variables.functions", "SkipFunctionVariable.call_function", _is_skipped),
    ("torch._dynamo.symbolic_convert", "InliningInstructionTranslator.build_inline_tracer", _is_skipped_method),
)


def _install() -> None:
    if state.failure is None:
        _guarded(_install_package)
    if state.failure is not None and state.strict_by_environment():
        _guarded(_refuse_to_compile)


def _install_package() -> None:
    from dash_inductor.install import installation

    installation.install()


def _refuse_to_compile() -> None:
    """Let Inductor's entry raise under deterministic algorithms: a program that relies on us must not run without."""
    inductor: Any = sys.modules[_INDUCTOR]
    compile_fx = inductor.compile_fx

    @functools.wraps(compile_fx)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if sys.modules["torch"].are_deterministic_algorithms_enabled():
            strict = os.environ["DASH_INDUCTOR_STRICT"]
            raise RuntimeError(
                f"DASH_INDUCTOR_STRICT={strict!r} is set, but dash_inductor is inactive. {state.failure}"
            )
        return compile_fx(*args, **kwargs)

    inductor.compile_fx = refuse


def _offer_operators() -> None:
    """Make `torch.ops.dash_inductor` define its operators when the first of them is asked for.

    Saved graphs, Inductor's repro files and precompiled code name them in processes that have not compiled anything.
    """
    torch_ops: Any = sys.modules[_OPERATORS]

    class Operators(torch_ops._OpNamespace):  # type: ignore[misc]  # torch is not imported here
        __module__ = torch_ops._OpNamespace.__module__  # generated code names operators by it

        def __getattr__(self, name: str) -> Any:
            is_known = "dash_inductor.operators.all" in sys.modules or _is_defining()
            if not name.startswith("_") and not is_known:
                importlib.import_module("dash_inductor.operators.all")
                installed: Any = sys.modules.get("dash_inductor.install.installation")
                if installed is not None:
                    installed.lower_operators()
                if name in vars(self):  # that import asked for it too, and every operator must remain one object
                    return vars(self)[name]
            return super().__getattr__(name)

    torch_ops.ops.dash_inductor = Operators("dash_inductor")


def _is_defining() -> bool:
    """Whether a module of operators is being imported right now, which asks for the operators that it defines."""
    modules = [module for name, module in sys.modules.copy().items() if name.startswith(_DEFINING)]
    return any(getattr(module.__spec__, "_initializing", False) for module in modules)


def after_import(name: str, step: Callable[[], None]) -> None:
    """Run `step` once the module `name` has been imported, at once if it has been."""
    if name in sys.modules:
        _guarded(step)
    else:
        sys.meta_path.insert(0, _StepAfterImport(name, step))


def _guarded(step: Callable[[], None]) -> None:
    """Whatever is broken here must break neither `import torch` nor the user's program."""
    try:
        step()
    except (Exception, SystemExit) as error:
        state.give_up(error)


class _StepAfterImport:
    """A `sys.meta_path` entry that lets the others find its target, and adds a step after the target's import."""

    def __init__(self, target: str, step: Callable[[], None]) -> None:
        self._target, self._step = target, step

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._target:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)  # old finders have only find_module
            spec: importlib.machinery.ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                self._step_after(spec)
                return spec
        return None

    def _step_after(self, spec: importlib.machinery.ModuleSpec) -> None:
        loader = spec.loader
        if loader is None:
            return
        run_module = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run_module(module)
            if module.__name__ == self._target and self in sys.meta_path:  # some loaders are shared between modules
                sys.meta_path.remove(self)
                _guarded(self._step)

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign]  # on this loader object alone
        except AttributeError as error:
            state.give_up(error)
