"""The entry that dash_inductor adds to Dynamo's precompile cache (``torch._dynamo.config.caching_precompile``).

An entry of that cache is a function's compiled code with its guards, found by the function's name and source alone: no
key is computed.  The `SystemInfo` in an entry decides whether it may be used: it is asked when the entry is loaded.  So
an entry gets one of ours: it knows under which state of dash_inductor its graphs were compiled, and refuses any other
one; Dynamo then compiles as if there were no entry.  It is unpickled by its name, which brings this module into a
process with DASH_INDUCTOR=0 too; where the package is gone, loading fails, which Dynamo takes for a miss as well.

An entry that knows nothing of dash_inductor is not used while dash_inductor is on: it may hold the attention that we
replace.  Functions that a program saves and loads by itself (`aot_compile`) are not asked: they run what they hold.
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
    """The settings that decide how a graph is compiled under deterministic algorithms here and now."""
    on = _switch.off_reason() is None and not compat.settings_that_stop_passes()
    return cache_key.entry() if on else OFF


@dataclasses.dataclass(frozen=True)
class CompiledUnder(SystemInfo):
    """The system of an entry, and every `state` under which a graph of it was compiled with deterministic algorithms.

    Code that was compiled without deterministic algorithms is never ours, and Dynamo guards the flag.
    """

    states: frozenset[str] = frozenset()

    def check_compatibility(self, other: SystemInfo, device_type: str = "cpu") -> None:
        """As PyTorch's check.

        Raises:
            RuntimeError: the systems differ, or the entry was compiled under another state than the one here.
        """
        super().check_compatibility(other, device_type)
        here = state()
        if not self.states <= {here}:
            raise RuntimeError(f"compiled with {' and '.join(sorted(self.states))}, this process has {here}")


def install() -> None:
    """Let packages of compiled functions note under which state they were compiled, and check it when loaded."""
    # every load goes through this one, where an error is a miss,
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
