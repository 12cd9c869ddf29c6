"""Installation into Inductor: one joint-graph pass and our part of the cache keys.

Imported once Inductor has been imported.  Installing costs little, because it happens in every program that compiles
anything; what rewrites and lowers graphs is loaded at the first compile under deterministic algorithms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

import _dash_inductor_autoload as _autoload

from . import _cache_key, _switch, compat
from .config import config
from .errors import UnsupportedVersionError


class JointPass:
    """The entry in Inductor's list of joint-graph passes.

    It runs after all of Inductor's own patterns, on every joint and inference graph, and on every graph nested in one.
    """

    pass_name = "dash_inductor"

    def apply(self, graph: torch.fx.Graph) -> int:
        """Rewrite the graph where we are active; returns a count of changes: Inductor recompiles the graph if not 0."""
        rewrite = _loaded() if active() else None
        if rewrite is None:
            return 0
        rewrite(graph)
        return 1


@functools.cache
def install() -> None:
    """Install into Inductor, once.

    Raises:
        UnsupportedVersionError: this torch or triton lacks something that we rely on; nothing was changed.
        ArgumentError: an environment variable holds a value that is not allowed; nothing was changed.
    """
    missing = compat.probe()
    if missing:
        raise UnsupportedVersionError(
            f"torch {torch.__version__} lacks what dash_inductor relies on: {'; '.join(missing)} "
            f"(tested: torch {' and '.join(compat.TESTED)})"
        )
    compat.joint_passes().append(JointPass())
    _cache_key.install(active)


def active() -> bool:
    """Whether a graph compiled here and now is rewritten: switched on, under determinism, and everything loads."""
    return _switch.off_reason() is None and torch.are_deterministic_algorithms_enabled() and _loaded() is not None


def _loaded() -> Callable[[torch.fx.Graph], None] | None:
    """The function that rewrites a graph, with the lowerings it needs; None, after one warning, where they do not load.

    Raises:
        Exception: what loading raised, if `strict` is set.
    """
    try:
        return _load()
    except Exception as error:
        if config.strict:
            raise
        _autoload.give_up(error)
        return None


@functools.cache
def _load() -> Callable[[torch.fx.Graph], None]:
    from .lowering import register
    from .matching.rewrite import rewrite_graph

    register()
    _cache_key.sources_digest()  # here, because an error while a key is computed would only switch the cache off
    return rewrite_graph
