"""Makes entries of Dynamo's precompile cache (``torch._dynamo.config.caching_precompile``) check dash_inductor's state.

An entry of that cache is the compiled code of a function with its guards.  It is found by the function's name and
source alone, without a key of settings.  When an entry is loaded, its `SystemInfo` decides whether it may be used.  So
this module replaces the `SystemInfo` of new entries by `CompiledUnder`, which stores the states of dash_inductor under
which the entry's graphs were compiled, and rejects the entry under any other state; Dynamo then compiles anew.
Unpickling it imports this module, also in a process with DASH_INDUCTOR=0; if the package is no longer installed,
loading fails, which Dynamo treats as a cache miss, too.

An entry without `CompiledUnder` is not used while dash_inductor is on, because it may contain attention that would be
replaced.  Functions that a program saves and loads by itself (`aot_compile`) are not checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from .. import _switch
from ..upstream import compat, seams
from ..upstream.packages import SystemInfo
from . import cache_key

OFF = "off"


def state() -> str:
    """Returns a text of all that compiles under deterministic algorithms depend on: `cache_key.entry()`, or `OFF`."""
    on = _switch.off_reason() is None and not compat.settings_that_stop_passes()
    return cache_key.entry() if on else OFF


@dataclasses.dataclass(frozen=True)
class CompiledUnder(SystemInfo):
    """PyTorch's `SystemInfo` of a precompiled entry, with the states of dash_inductor under which it was compiled.

    Attributes:
        states: the value of `state()` for each graph of the entry that was compiled with deterministic algorithms.
            Other graphs do not depend on dash_inductor, and Dynamo guards on the flag itself.
    """

    states: frozenset[str] = frozenset()

    def check_compatibility(self, other: SystemInfo, device_type: str = "cpu") -> None:
        """Checks PyTorch's own conditions for loading an entry, and that dash_inductor's state is that of its compile.

        Raises:
            RuntimeError: the systems differ, or the entry was compiled under a state other than the current one.
        """
        super().check_compatibility(other, device_type)
        here = state()
        if not self.states <= {here}:
            raise RuntimeError(f"compiled with {' and '.join(sorted(self.states))}, this process has {here}")


def install() -> None:
    """Makes precompiled entries store the states of their compile, and checks these when an entry is loaded."""
    # every load goes through this function, in which an error counts as a miss,
    seams.LOAD_PACKAGE.wrap(_checking, let_through=Exception)
    seams.STORE_PACKAGE.wrap(_noting, let_through=Exception)  # and every store through this one


def _checking(initialize: Callable[..., None]) -> Callable[..., None]:
    def checked(self: Any, fn: Any, dynamo: Any = None, *args: Any, **kwargs: Any) -> None:
        system = getattr(dynamo, "system_info", None)
        if system is not None and not isinstance(system, CompiledUnder) and state() != OFF:
            raise RuntimeError("compiled without dash_inductor, which is on in this process")
        initialize(self, fn, dynamo, *args, **kwargs)
        self.dash_inductor_states = system.states if isinstance(system, CompiledUnder) else frozenset()

    return checked


def _noting(cache_entry: Callable[..., Any]) -> Callable[..., Any]:
    def noted(self: Any) -> Any:
        entry = cache_entry(self)
        if torch.are_deterministic_algorithms_enabled():
            self.dash_inductor_states |= {state()}
        entry.system_info = CompiledUnder(**vars(entry.system_info), states=self.dash_inductor_states)
        return entry

    return noted
