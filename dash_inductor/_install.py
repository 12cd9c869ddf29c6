"""Installation into Inductor: one joint-graph pass and our part of the caches.

Imported once Inductor has been imported.  Installing costs little, because it happens in every program that compiles
anything; what rewrites and lowers graphs is loaded at the first compile under deterministic algorithms.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable

import torch

import _dash_inductor_autoload as _autoload

from . import _cache_key, _precompile, _switch, compat
from .config import config
from .errors import UnsupportedVersionError

log = logging.getLogger("dash_inductor")


class JointPass:
    """The entry in Inductor's list of joint-graph passes.

    It runs after all of Inductor's own patterns, on every joint and inference graph, and on every graph nested in one.
    """

    pass_name = "dash_inductor"

    def apply(self, graph: torch.fx.Graph) -> int:
        """Rewrite the graph where we are active; not 0 if it changed: Inductor sorts and recompiles it then."""
        rewrite = _loaded() if active() else None
        return int(rewrite is not None and rewrite(graph))


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
    _precompile.install()
    if "dash_inductor.ops" in sys.modules:
        lower_operators()


def lower_operators() -> None:
    """Let Inductor lower our operators: a saved graph may hold them in a process in which no graph was rewritten."""
    _loaded()


def active() -> bool:
    """Whether a graph compiled here and now is rewritten: switched on, under determinism, and everything loads."""
    if _switch.off_reason() is not None or not torch.are_deterministic_algorithms_enabled():
        return False
    if not compat.joint_passes_run():
        _warn_that_nothing_runs()
        return False
    return _loaded() is not None


@functools.cache
def _warn_that_nothing_runs() -> None:
    """Once: a log line, because a warning that is an error would only be lost where cache keys are computed."""
    log.warning(
        "attention is compiled as plain PyTorch compiles it: torch._inductor.config has pattern_matcher or "
        "use_joint_graph_passes off, so that no joint-graph pass runs"
    )


def _loaded() -> Callable[[torch.fx.Graph], bool] | None:
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
def _load() -> Callable[[torch.fx.Graph], bool]:
    from .lowering import compile_kernels, register
    from .matching.rewrite import rewrite_graph

    register()
    _cache_key.sources_digest()  # here, because an error while a key is computed would only switch the cache off
    return functools.partial(rewrite_graph, compile_kernels=compile_kernels)
