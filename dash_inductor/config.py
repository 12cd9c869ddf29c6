"""The settings of the package: one typed object, `config`, with an environment variable behind every setting.

    from dash_inductor.config import config
    config.strict = True
    with config.patch(schedule="descending"):
        ...

Every value is checked, from the environment (at the first import of this module) and on assignment; a bad one raises
`ArgumentError`, which lists the allowed ones.  Where the hook in `import torch` makes this import, the package is
inactive then, with one warning or, if `strict` was asked for or has the bad value, with an error at every compile under
deterministic algorithms.  Settings are read while a graph is compiled; all that change what is compiled are part of the
keys of Inductor's caches.
Standard library only: this module may be imported while torch itself is being imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from _dash_inductor_state import BOOLEANS

from .errors import ArgumentError

Schedule = Literal["auto", "ascending", "descending", "shift", "symmetric_shift", "spt", "bent_fold", "two_pass"]
Cpu = Literal["off", "reference"]
Forward = Literal["auto", "keep"]
Rewrites = Literal["all", "attention"]
Switch = Literal["on", "off"]


@dataclass(frozen=True)
class Setting:
    """One setting: its environment variable, its default, and the allowed values by their spelling there.

    `allowed` is None for any text.  A setting with `of_code` changes what is compiled, and is part of the cache keys.
    """

    env: str
    default: bool | str
    allowed: Mapping[str, bool | str] | None
    of_code: bool = True

    def value_of(self, given: object) -> bool | str | None:
        """The value that `given` (a value, or its spelling) stands for; None if it is not allowed.

        A boolean may also be 0 or 1, or one of the spellings of `BOOLEANS` in any case; a text may also be a path.
        """
        if self.allowed is None:
            return os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
        if not isinstance(self.default, bool):
            return self.allowed.get(given) if isinstance(given, str) else None
        if isinstance(given, str):
            return BOOLEANS.get(given.lower())
        return bool(given) if isinstance(given, int) and given in (0, 1) else None


def _words(*names: str) -> dict[str, bool | str]:
    return {name: name for name in names}


SETTINGS: Mapping[str, Setting] = {
    "strict": Setting("DASH_INDUCTOR_STRICT", False, BOOLEANS),
    "cpu": Setting("DASH_INDUCTOR_CPU", "off", _words("off", "reference")),
    "schedule": Setting(
        "DASH_INDUCTOR_SCHEDULE",
        "auto",
        _words("auto", "ascending", "descending", "shift", "symmetric_shift", "spt", "bent_fold", "two_pass"),
    ),
    "forward": Setting("DASH_INDUCTOR_FORWARD", "auto", _words("auto", "keep")),
    "rewrites": Setting("DASH_INDUCTOR_REWRITES", "all", _words("all", "attention")),
    "pad_mm": Setting("DASH_INDUCTOR_PAD_MM", "on", _words("on", "off")),
    "permutations": Setting("DASH_INDUCTOR_PERMUTATIONS", "on", _words("on", "off")),
    "small_scatter": Setting("DASH_INDUCTOR_SMALL_SCATTER", "on", _words("on", "off")),
    "index_sums": Setting("DASH_INDUCTOR_INDEX_SUMS", "on", _words("on", "off")),
    "tied_embeddings": Setting("DASH_INDUCTOR_TIED_EMBEDDINGS", "on", _words("on", "off")),
    "blocks": Setting("DASH_INDUCTOR_BLOCKS", "on", _words("on", "off")),
    "fill": Setting("DASH_INDUCTOR_FILL", "off", _words("off", "on")),
    "dump": Setting("DASH_INDUCTOR_DUMP", "", None, of_code=False),
    "profile": Setting("DASH_INDUCTOR_PROFILE", False, BOOLEANS),
}


class Config:
    """Settings of dash_inductor.

    Attributes:
        strict: an attention that is kept raises `SiteKeptError` at compile time, and so does whatever else
            keeps dash_inductor from its work (DASH_INDUCTOR_STRICT).
        cpu: "reference" replaces sites on CPU by the plain ATen executor, "off" leaves them to PyTorch, whose CPU
            kernel is deterministic (DASH_INDUCTOR_CPU).
        schedule: "auto" lets the planner choose; a name forces that schedule at every site.  Where the planner cannot
            follow, because of the mask or the head dimensions, it chooses as with "auto", and the detail of the site's
            record says so (DASH_INDUCTOR_SCHEDULE).  Whether a schedule that needs all its CTAs resident has room for
            them depends on the GPU and shows when the kernel is launched: an error there.
        forward: "auto" replaces the forward by one of our own, "keep" leaves it as PyTorch chose it, output and
            log-sum-exp too, for programs whose forward must equal another system's bit by bit (DASH_INDUCTOR_FORWARD).
        rewrites: "all" also rewrites what else of a step pays for determinism, "attention" attention alone
            (DASH_INDUCTOR_REWRITES).
        pad_mm: "on" pads products of matrices whose rows begin at odd addresses, where that pays
            (DASH_INDUCTOR_PAD_MM).
        permutations: "on" makes gathers of scatters by indices that are proved to be a permutation, or to differ
            (DASH_INDUCTOR_PERMUTATIONS).
        small_scatter: "on" makes sums of scatters of few elements into each line of zeros, where that pays
            (DASH_INDUCTOR_SMALL_SCATTER).
        index_sums: "on" makes sums by index, as of `index_add` and `scatter_add`, from one sort of each index
            (DASH_INDUCTOR_INDEX_SUMS).
        tied_embeddings: "on" adds the gradient of an embedding to the other gradient of the same weight row by row
            (DASH_INDUCTOR_TIED_EMBEDDINGS).
        blocks: "on" chooses blocks of generated kernels by a rule where Inductor would time them
            (DASH_INDUCTOR_BLOCKS).
        fill: "off" runs compiled graphs without PyTorch's fill of uninitialized memory, where all operators of a graph
            are known to write their results, and makes zeros for results without a gradient without it, many of them
            without memory; "on" leaves the fill as the program has set it (DASH_INDUCTOR_FILL).
        dump: a folder that gets pages about every graph that is compiled, see `explanations.dump`; "" for none.  While
            it is set, no graph is taken from a cache (DASH_INDUCTOR_DUMP).
        profile: the Hopper backward writes down when it computes and adds what, see `records.profiles`.  It is read at
            every call, too, and changes no bit (DASH_INDUCTOR_PROFILE).

    Args:
        environ: where the initial values come from, by default `os.environ`; an empty variable counts as not set.
    """

    strict: bool
    cpu: Cpu
    schedule: Schedule
    forward: Forward
    rewrites: Rewrites
    pad_mm: Switch
    permutations: Switch
    small_scatter: Switch
    index_sums: Switch
    tied_embeddings: Switch
    blocks: Switch
    fill: Switch
    dump: str
    profile: bool

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        for name, setting in SETTINGS.items():
            text = (os.environ if environ is None else environ).get(setting.env, "")
            value = setting.value_of(text) if text else setting.default
            if value is None:
                raise ArgumentError(setting.env, text, setting.allowed or "a text")
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in SETTINGS:
            raise ArgumentError("setting", name, SETTINGS)
        known = SETTINGS[name].value_of(value)
        if known is None:
            allowed = SETTINGS[name].allowed
            raise ArgumentError(f"config.{name}", value, dict.fromkeys(allowed.values()) if allowed else "a path")
        object.__setattr__(self, name, known)

    def __getattr__(self, name: str) -> object:  # only reached for names that are no setting
        raise AttributeError(f"dash_inductor has no setting {name!r}: the settings are {', '.join(SETTINGS)}")

    @contextmanager
    def patch(self, **changes: bool | str) -> Iterator[Config]:
        """Change settings for a block; all are checked before the first is changed, all are restored at the end."""
        before = {name: getattr(self, name) for name in SETTINGS}
        try:
            for name, value in changes.items():
                setattr(self, name, value)
            yield self
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def cache_key(self) -> tuple[tuple[str, bool | str], ...]:
        """The settings for the cache keys; `strict` too, because a cached graph would hide a kept site from it."""
        return tuple((name, getattr(self, name)) for name, setting in SETTINGS.items() if setting.of_code)

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={getattr(self, name)!r}' for name in SETTINGS)})"


class _ConfigModule(ModuleType):
    """Makes ``dash_inductor.config.strict = True`` reach the object, instead of setting a variable of this module."""

    def __getattr__(self, name: str) -> object:
        return getattr(config, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(config, name, value)

    def __repr__(self) -> str:
        return repr(config)


config = Config()
sys.modules[__name__].__class__ = _ConfigModule
