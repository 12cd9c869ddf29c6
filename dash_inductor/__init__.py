"""Deterministic attention for torch.compile.

    torch.use_deterministic_algorithms(True)
    model = torch.compile(model)

needs no import of this package.  Importing it has the same effect if torch does not load extensions by itself
(TORCH_DEVICE_BACKEND_AUTOLOAD=0), and gives the switch, the settings and the records:

    enable(), disable(), is_enabled(), disabled()   switch it on and off for graphs compiled afterwards
    config                                          the settings, see `dash_inductor.config`
    sites(), graphs(), clear_sites()                the records of all attentions of the graphs compiled so far
    all_records()                                   the records of all passes, attention included
    explain(fn, *args, **kwargs)                    how every attention of a function would be compiled, and why
    register()                                      deterministic attention for programs that are not compiled
    profile_runs(), write_profiles(),               when the kernels computed and added each tile, see `config.profile`
    clear_profile_runs()

This file must not import torch: it may run while torch itself is being imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import _dash_inductor_autoload

from ._switch import disable, disabled, enable, is_enabled
from .version import __version__

if TYPE_CHECKING:
    from .config import config
    from .eager.registration import register
    from .explanations.explain import explain
    from .records.profiles import clear_profile_runs, profile_runs, write_profiles
    from .records.records import all_records, clear_sites, graphs, sites

__all__ = [
    "__version__", "all_records", "clear_profile_runs", "clear_sites", "config", "disable", "disabled", "enable",
    "explain", "graphs", "is_enabled", "profile_runs", "register", "sites", "write_profiles",
]  # fmt: skip

_HOMES = {
    "all_records": ".records.records",
    "clear_profile_runs": ".records.profiles",
    "clear_sites": ".records.records",
    "explain": ".explanations.explain",
    "graphs": ".records.records",
    "profile_runs": ".records.profiles",
    "register": ".eager.registration",
    "sites": ".records.records",
    "write_profiles": ".records.profiles",
}
"""The modules of the names that are imported lazily, because their modules import torch."""


def __getattr__(name: str) -> object:
    if name == "config":
        return importlib.import_module(".config", __name__)  # the module stands for the object in it
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_dash_inductor_autoload.autoload()
