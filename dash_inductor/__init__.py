"""Deterministic attention backward for torch.compile.

    torch.use_deterministic_algorithms(True)
    model = torch.compile(model)

needs no import of this package; importing it does the same where torch does not load extensions by itself
(TORCH_DEVICE_BACKEND_AUTOLOAD=0), and gives the switch, the settings and the records:

    enable(), disable(), is_enabled(), disabled()   on and off, for graphs compiled from then on
    config                                          the settings, see `dash_inductor.config`
    sites(), clear_sites()                          what became of every attention of the graphs compiled so far
    profile_runs(), write_profiles()                when kernels computed and added what, see `config.profile`

This file must not import torch: it may run while torch itself is being imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import _dash_inductor_autoload

from ._switch import disable, disabled, enable, is_enabled

if TYPE_CHECKING:
    from .config import config
    from .observe.profile import clear_profile_runs, profile_runs, write_profiles
    from .observe.records import clear_sites, sites

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "clear_profile_runs",
    "clear_sites",
    "config",
    "disable",
    "disabled",
    "enable",
    "is_enabled",
    "profile_runs",
    "sites",
    "write_profiles",
]


def __getattr__(name: str) -> object:
    if name == "config":
        return importlib.import_module(".config", __name__)  # the module stands for the object in it
    if name in ("sites", "clear_sites"):
        return getattr(importlib.import_module(".observe.records", __name__), name)
    if name in ("profile_runs", "write_profiles", "clear_profile_runs"):
        return getattr(importlib.import_module(".observe.profile", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_dash_inductor_autoload.autoload()
