"""Installs dash_inductor into Inductor: a joint-graph pass, hooks before and after it, and entries in cache keys.

This module is imported once Inductor has been imported.  Installing is cheap, because it happens in every program that
compiles anything; passes and lowerings are loaded at the first compile under deterministic algorithms.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

import _dash_inductor_state as _state

from .. import _switch, failures
from ..config import config
from ..errors import FallbackError, UnsupportedVersionError
from ..graph import arguments
from ..graph.undo import Undo
from ..observers import active
from ..upstream import compat, partitioner, probe, seams
from . import (
    alerts,
    barriers,
    blocks,
    cache_key,
    carried_records,
    defects,
    embeddings,
    fill_uninitialized_memory,
    no_autotune,
    repeated_arguments,
    skipped_code,
)

log = logging.getLogger("dash_inductor")

_recorded: weakref.WeakKeyDictionary[object, set[tuple[str, str]]] = weakref.WeakKeyDictionary()
"""The (activity, error) pairs that have been recorded in each compile, so that each is recorded once."""


class JointPass:
    """The pass that dash_inductor adds to Inductor's list of joint-graph passes.

    It runs after all of Inductor's own patterns, on every joint and inference graph, and on every graph nested in one.
    """

    pass_name = "dash_inductor"

    def apply(self, graph: torch.fx.Graph) -> int:
        """Rewrites a joint or inference graph in place.

        Returns:
            1 if the graph changed, so that Inductor sorts and recompiles it; else 0.
        """
        undo = None
        try:
            passes = rewriter()
            if passes is None:
                return 0
            undo = Undo(graph)
            with _dumped(graph):
                changed = passes.rewrite_graph(graph)
                if active.graphs is not None and active.watching_graphs():
                    changed = active.graphs.show(graph) or changed
        except FallbackError:
            raise
        except Exception as error:
            failures.caught(seams.JOINT_PASSES.purpose, error)
            changed = undo is not None
            if undo is not None:
                undo.restore()
        return int(changed)


def _dumped(graph: torch.fx.Graph) -> AbstractContextManager[None]:
    """A context that dumps the graph before and after its block if ``config.dump`` is set."""
    if not config.dump:
        return nullcontext()
    from ..explanations.dump import writer

    return writer.joint_graph(graph)


@functools.cache
def install() -> None:
    """Installs dash_inductor's pass and hooks into Inductor; only the first call has an effect.

    Raises:
        UnsupportedVersionError: this torch or triton lacks something that dash_inductor relies on; nothing was changed.
        ArgumentError: an environment variable has an invalid value; nothing was changed.
    """
    missing = probe.probe()
    if missing:
        raise UnsupportedVersionError(
            f"torch {torch.__version__} lacks what dash_inductor relies on: {'; '.join(missing)} "
            f"(tested: torch {', '.join(compat.TESTED)})"
        )
    from . import precompile  # its base class exists, which the probe has checked

    failures.recorders.append(_record)
    seams.JOINT_PASSES.value().append(JointPass())
    seams.RUN_PRE_GRAD_PASSES.wrap(_making_calls_fusable)
    seams.RUN_JOINT_PASSES.wrap(_recording_what_no_pass_sees)
    seams.GENERATE.wrap(_dumping)
    seams.COMPILE_GRAPH.wrap(_compiling_anew)
    no_autotune.install(lambda: rewriter() is not None)
    blocks.install(lambda: rewriter() is not None)
    barriers.install(lambda: rewriter() is not None)
    alerts.install(lambda: rewriter() is not None)
    fill_uninitialized_memory.install(lambda: rewriter() is not None)
    defects.install(lambda: rewriter() is not None)
    embeddings.install(lambda: rewriter() is not None)
    repeated_arguments.install(lambda: rewriter() is not None)
    skipped_code.install(lambda: rewriter() is not None)
    partitioner.install()
    cache_key.install(lambda: rewriter() is not None)
    precompile.install()
    arguments.install()
    carried_records.install(lambda: rewriter() is not None)
    if "dash_inductor.operators.attention" in sys.modules:
        lower_operators()


def _record(what: str, error: str) -> None:
    """Records an error outside of passes in the graph that is being compiled; a repeated error is recorded once."""
    from ..model.reasons import Reason
    from ..records.publication import publish
    from ..records.records import Record
    from ..upstream.compilation import TracingContext

    context = TracingContext.try_get()
    known = set() if context is None else _recorded.setdefault(context, set())
    if (what, error) in known:
        return
    known.add((what, error))
    publish([Record("install", what, "", "fallback", Reason.INTERNAL_ERROR, error)], "")


def lower_operators() -> None:
    """Registers the Inductor lowerings of dash_inductor's operators.

    A process that loads a saved graph needs them even if it rewrites no graph.
    """
    _loaded()


def _making_calls_fusable(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the pre-grad passes, to change attention calls that only their layout keeps from a fused SDPA operator.

    This must happen before AOTAutograd traces the graph, which would decompose these calls.
    """

    def run_on_fusable_calls(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> torch.fx.GraphModule:
        if rewriter() is not None:
            _make_fusable(gm)
        result: torch.fx.GraphModule = run(gm, *args, **kwargs)
        return result

    return run_on_fusable_calls


def _make_fusable(gm: torch.fx.GraphModule) -> None:
    from ..frontends.fusable import make_fusable

    undo = Undo(gm.graph)
    try:
        changed = make_fusable(gm.graph)
    except Exception as error:
        undo.restore()
        changed = True
        failures.caught(seams.RUN_PRE_GRAD_PASSES.purpose, error)
    if changed:
        gm.recompile()


def _recording_what_no_pass_sees(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the joint-graph passes, to record attention as not replaced if Inductor's settings let no pass run."""

    def run_and_look(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> torch.fx.GraphModule:
        result: torch.fx.GraphModule = run(gm, *args, **kwargs)
        passes = rewriter()
        if passes is not None:
            off = compat.settings_that_stop_passes()
            modules = result.modules() if off else [result]  # with passes on, this runs for each nested graph, too
            graphs = [module.graph for module in modules if isinstance(module, torch.fx.GraphModule)]
            if passes.record_unseen(graphs, ", ".join(f"{name}=False" for name in off)):
                _warn_that_nothing_runs()
        return result

    return run_and_look


def _compiling_anew(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Inductor's compile, to disable caches while ``config.dump`` is set."""

    def compile_anew(*args: Any, **kwargs: Any) -> Any:
        if config.dump and not torch.compiler.config.force_disable_caches and rewriter() is not None:
            # Inductor applies config_patches again around the backward, which may be compiled much later
            patches = {**(kwargs.get("config_patches") or {}), "force_disable_caches": True}
            return compile_graph(*args, **{**kwargs, "config_patches": patches})
        return compile_graph(*args, **kwargs)

    return compile_anew


def _dumping(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps code generation, to dump the generated code while ``config.dump`` is set."""

    def generate_and_dump(*args: Any, **kwargs: Any) -> Any:
        compiled = generate(*args, **kwargs)
        if config.dump and rewriter() is not None:
            from ..explanations.dump import writer

            inference = "inference" if kwargs.get("is_inference") else "forward"
            writer.generated_code(compiled, "backward" if kwargs.get("is_backward") else inference)
        return compiled

    return generate_and_dump


@functools.cache
def _warn_that_nothing_runs() -> None:
    log.warning(
        "attention is compiled as plain PyTorch compiles it: torch._inductor.config has pattern_matcher or "
        "use_joint_graph_passes off, as mode='lite' has, so that no joint-graph pass runs"
    )


def rewriter() -> ModuleType | None:
    """Returns the module `passes.all` if graphs compiled now, on this thread, are rewritten; else None.

    The result is None while dash_inductor is switched off, without deterministic algorithms, and, after one warning,
    if dash_inductor's code cannot be loaded.

    Raises:
        Exception: the error of loading the code, if `strict` is set.
    """
    if _switch.off_reason() is not None or not torch.are_deterministic_algorithms_enabled():
        return None
    return _loaded()


def _loaded() -> ModuleType | None:
    """The module `passes.all`, with its lowerings registered; None, after one warning, if they cannot be loaded."""
    try:
        return _load()
    except Exception as error:
        if config.strict:
            raise
        _state.give_up(error)
        return None


@functools.cache
def _load() -> ModuleType:
    from .. import lowering
    from ..passes import all as passes
    from ..passes.ops import lowering as lowering_of_ops

    lowering.register()
    lowering_of_ops.register()
    cache_key.sources_digest()  # raises here if it must; while a key is computed, an error would only bypass the cache
    return passes
