"""The settings of the package: one typed object, `config`, with an environment variable for every setting.

    from dash_inductor.config import config

    config.strict = True
    with config.patch(schedule="descending", rewrites={"index_sums", "pad_mm"}):
        ...

Every value is checked, from the environment (at the first import of this module) and on assignment; an invalid one
raises `ArgumentError`, which lists the allowed values.  If this module is imported by the hook in `import torch`, an
invalid variable leaves the package inactive with one warning; if `strict` was requested or is itself invalid, every
compile under deterministic algorithms fails.  Settings are read when a graph is compiled; all that change what is
compiled are part of the keys of Inductor's caches.

Standard library only: this module may be imported while torch itself is being imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from _dash_inductor_state import BOOLEANS

from .errors import ArgumentError

Schedule = Literal["auto", "ascending", "descending", "shift", "symmetric_shift", "spt", "bent_fold", "two_pass"]
Cpu = Literal["off", "reference"]
Forward = Literal["auto", "keep"]
Value = bool | str | tuple[str, ...]

ATTENTION = "attention"
REWRITES = (
    ATTENTION,
    "embeddings",
    "grid_sample",
    "grouped_mm",
    "index_ranges",
    "index_sums",
    "known_masks",
    "pad_mm",
    "permutations",
    "small_scatter",
    "sorted_values",
    "tied_embeddings",
    "unrolled_reductions",
)
"""The names allowed in `Config.rewrites`, sorted: attention, and the passes of `passes.ops`."""


@dataclass(frozen=True)
class Setting:
    """The definition of one setting.

    Attributes:
        env: the environment variable of the setting.
        default: the default value.
        allowed: the allowed values by their spelling in the environment; None for any text.  If the values are tuples
            of names, a set of spellings is allowed, too, and stands for the union of their values.
        of_code: whether the setting changes what is compiled, and is part of the cache keys.
    """

    env: str
    default: Value
    allowed: Mapping[str, Value] | None
    of_code: bool = True

    def value_of(self, given: object) -> Value | None:
        """Returns the setting's value for `given`, a value or its spelling in the environment; None if not allowed.

        A boolean may also be 0 or 1, or one of the spellings of `BOOLEANS` in any case; a text may also be a path.  A
        set of names may be a set, a list or a tuple of them, or a text in which commas separate them.
        """
        if self.allowed is None:
            return os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
        if isinstance(self.default, tuple):
            return self._names_of(given)
        if not isinstance(self.default, bool):
            return self.allowed.get(given) if isinstance(given, str) else None
        if isinstance(given, str):
            return BOOLEANS.get(given.lower())
        return bool(given) if isinstance(given, int) and given in (0, 1) else None

    def _names_of(self, given: object) -> tuple[str, ...] | None:
        names = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
        if not isinstance(names, (list, tuple, set, frozenset)):
            return None
        found = {ATTENTION}
        for name in names:
            value = self.allowed.get(name) if self.allowed and isinstance(name, str) else None
            if not isinstance(value, tuple):
                return None
            found.update(value)
        return tuple(sorted(found))

    def expected(self, spelled: bool) -> str | list[Value]:
        """Returns the allowed values of the setting as text for an error message.

        Args:
            spelled: whether to spell them as in the environment; else as values in code.
        """
        if self.allowed is None:
            return "a text" if spelled else "a path"
        if isinstance(self.default, tuple):
            names = ", ".join(repr(name) for name in self.allowed if name != "all")
            return f"'all', or {'names separated by commas' if spelled else 'a set of names'} out of {names}"
        return list(self.allowed) if spelled else list(dict.fromkeys(self.allowed.values()))


def _words(*names: str) -> dict[str, Value]:
    return {name: name for name in names}


def _names(names: tuple[str, ...]) -> dict[str, Value]:
    return {"all": names, **{name: tuple(sorted({ATTENTION, name})) for name in names}}


SETTINGS: Mapping[str, Setting] = {
    "strict": Setting("DASH_INDUCTOR_STRICT", False, BOOLEANS),
    "cpu": Setting("DASH_INDUCTOR_CPU", "off", _words("off", "reference")),
    "schedule": Setting(
        "DASH_INDUCTOR_SCHEDULE",
        "auto",
        _words("auto", "ascending", "descending", "shift", "symmetric_shift", "spt", "bent_fold", "two_pass"),
    ),
    "forward": Setting("DASH_INDUCTOR_FORWARD", "auto", _words("auto", "keep")),
    "rewrites": Setting("DASH_INDUCTOR_REWRITES", REWRITES, _names(REWRITES)),
    "blocks": Setting("DASH_INDUCTOR_BLOCKS", True, dict(sorted(BOOLEANS.items(), key=lambda item: not item[1]))),
    "split_kv": Setting("DASH_INDUCTOR_SPLIT_KV", True, dict(sorted(BOOLEANS.items(), key=lambda item: not item[1]))),
    "fill_uninitialized_memory": Setting("DASH_INDUCTOR_FILL_UNINITIALIZED_MEMORY", False, BOOLEANS),
    "dump": Setting("DASH_INDUCTOR_DUMP", "", None, of_code=False),
    "profile": Setting("DASH_INDUCTOR_PROFILE", False, BOOLEANS),
}


class Config:
    """Settings of dash_inductor.

    Attributes:
        strict: an attention that is not replaced raises `FallbackError` at compile time; so does any other cause that
            keeps dash_inductor from working (DASH_INDUCTOR_STRICT).
        cpu: "reference" replaces sites on the CPU by a reference implementation in ATen operators, "off" leaves them to
            PyTorch, whose CPU kernel is deterministic (DASH_INDUCTOR_CPU).
        schedule: "auto" lets the planner choose; a name sets the schedule of every site.  If a site does not support
            it, because of its mask or head dimensions, the planner chooses as with "auto", and the detail of the site's
            record says so (DASH_INDUCTOR_SCHEDULE).  Schedules that need all CTAs resident at once may not fit on the
            GPU; the launch then fails with an error.
        forward: "auto" replaces the forward, too; "keep" leaves it to PyTorch, including output and log-sum-exp, for
            programs whose forward must equal another system's bit by bit (DASH_INDUCTOR_FORWARD).
        rewrites: the passes that run: "all" (the default), "attention" for attention alone, or a set of names out of
            `REWRITES`, such as ``{"index_sums", "pad_mm"}``; attention is always included.  Reading it gives the sorted
            tuple of names.  With "attention" alone, `blocks` and `fill_uninitialized_memory` have no effect: everything
            except attention is compiled as in plain PyTorch (DASH_INDUCTOR_REWRITES, names separated by commas).
        blocks: whether a rule chooses the block sizes of generated kernels that Inductor would autotune
            (DASH_INDUCTOR_BLOCKS).
        split_kv: whether forwards of few queries against many keys may split the keys (split-KV), which is faster and
            has other bits than a forward of many queries.  Without it, generation with a key/value cache has the bits
            of training (DASH_INDUCTOR_SPLIT_KV).
        fill_uninitialized_memory: whether compiled graphs keep PyTorch's fill of uninitialized memory
            (``torch.utils.deterministic.fill_uninitialized_memory``).  By default, graphs whose operators are all known
            to write their whole results run without it, and zeros for missing gradients are made without a fill before;
            large ones take no memory (DASH_INDUCTOR_FILL_UNINITIALIZED_MEMORY).
        dump: a folder for pages about every compiled graph, see `explanations.dump`; "" for none.  While it is set, no
            graph is loaded from a cache (DASH_INDUCTOR_DUMP).
        profile: whether the Hopper backward records when it computes and adds each tile, see `records.profiles`.  Also
            read at every call; changes no bit (DASH_INDUCTOR_PROFILE).

    Args:
        environ: the source of the initial values, by default `os.environ`; an empty variable counts as not set.
    """

    strict: bool
    cpu: Cpu
    schedule: Schedule
    forward: Forward
    blocks: bool
    split_kv: bool
    fill_uninitialized_memory: bool
    dump: str
    profile: bool

    if TYPE_CHECKING:  # assigning and reading have different types

        @property
        def rewrites(self) -> tuple[str, ...]: ...

        @rewrites.setter
        def rewrites(self, names: str | Collection[str]) -> None: ...

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        for name, setting in SETTINGS.items():
            text = (os.environ if environ is None else environ).get(setting.env, "")
            value = setting.value_of(text) if text else setting.default
            if value is None:
                raise ArgumentError(setting.env, text, setting.expected(spelled=True))
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in SETTINGS:
            raise ArgumentError("setting", name, SETTINGS)
        known = SETTINGS[name].value_of(value)
        if known is None:
            raise ArgumentError(f"config.{name}", value, SETTINGS[name].expected(spelled=False))
        object.__setattr__(self, name, known)

    def __getattr__(self, name: str) -> object:  # only called for names that are not settings
        raise AttributeError(f"dash_inductor has no setting {name!r}: the settings are {', '.join(SETTINGS)}")

    @contextmanager
    def patch(self, **changes: bool | str | Collection[str]) -> Iterator[Config]:
        """A context manager that changes settings inside its block and restores them at the end.

        Raises:
            ArgumentError: a value is not allowed; then no setting stays changed.
        """
        before = {name: getattr(self, name) for name in SETTINGS}
        try:
            for name, value in changes.items():
                setattr(self, name, value)
            yield self
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def rewrites_more(self) -> bool:
        """Returns whether any pass other than the attention pass is on."""
        return self.rewrites != (ATTENTION,)

    def cache_key(self) -> tuple[tuple[str, Value], ...]:
        """The (name, value) pairs of all settings that are part of the keys of Inductor's caches.

        `strict` is one of them, because a cached graph could otherwise hide a site that is not replaced.
        """
        return tuple((name, getattr(self, name)) for name, setting in SETTINGS.items() if setting.of_code)

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={getattr(self, name)!r}' for name in SETTINGS)})"


class _ConfigModule(ModuleType):
    """Makes ``dash_inductor.config.strict = True`` set the attribute of the object `config`, not of this module."""

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
