"""Avoids parts of PyTorch's compiler that are known to give silently wrong results, and records where it did so.

The defects are described in `upstream.defects`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch

from ..upstream import defects, seams
from ..upstream.defects import Defect

REWRITE = "defects"
"""The `rewrite` name of these records."""


class _Compile:
    """The state of one compile on its thread.

    Attributes:
        met: the places where a defect was avoided: (defect, node name) -> (operator, further text).
        traced: cached graphs of `fuse_attention`'s search patterns, by pattern function and tensor metadata.
        open: the last match of a `fuse_attention` pattern whose full comparison (`extra_check`) has not passed yet.
    """

    def __init__(self) -> None:
        self.met: dict[tuple[Defect, str], tuple[str, str]] = {}
        self.traced: dict[Any, Any] = {}
        self.open: Any = None

    def close(self) -> None:
        """Records the pending match, if there is one, as rejected, and clears it.

        A match is pending from its first, loose comparison with a `fuse_attention` pattern until it passes the full
        comparison. A match that is still pending has other constants than the pattern, dimensions included.
        """
        match, self.open = self.open, None
        if match is not None:
            node = match.output_nodes()[0]
            self.met[defects.UNCHECKED_ATTENTION, node.name] = str(node.target), ""

    def accept(self, match: Any) -> None:
        """Notes that a match passed the full comparison, and deletes its node's record of a match rejected before.

        Args:
            match: the match; an earlier pattern of `fuse_attention` may have been rejected at the same node.
        """
        self.open = None
        self.met.pop((defects.UNCHECKED_ATTENTION, match.output_nodes()[0].name), None)


_HERE: ContextVar[_Compile | None] = ContextVar("dash_inductor_defects", default=None)


def install(active: Callable[[], bool]) -> None:
    """Installs workarounds for known defects of the installed torch; they act in compiles while `active()` is true."""
    if defects.MIXED_ORDER.applies:
        seams.GENERATE.wrap(lambda plain: _recording(plain, active, _kind_of_part))
        seams.FUSE_MIXED_ORDER.wrap(lambda plain: _keeping_sums(plain, active, defects.lost_sums))
        seams.FUSE_MORE.wrap(
            lambda plain: _keeping_sums(plain, active, lambda _, other: defects.sums_along_columns_elsewhere(other))
        )
    if defects.UNCHECKED_ATTENTION.applies:
        seams.RUN_JOINT_PASSES.wrap(lambda plain: _recording(plain, active, _kind_of_joint))
        seams.REGISTER_PATTERN.wrap(lambda plain: _comparing(plain, active))
        for pattern in defects.registered_attention():
            defects.ask_again(pattern, active, _matched)


def _recording(
    run: Callable[..., Any], active: Callable[[], bool], kind: Callable[..., Literal["joint", "inference"]]
) -> Callable[..., Any]:
    """Wraps a part of a compile, to publish records of the defects that were avoided in it."""

    def run_and_publish(gm: Any, *args: Any, **kwargs: Any) -> Any:
        if not active():
            return run(gm, *args, **kwargs)
        of_graph = kind(gm, kwargs)
        with _watched() as found:
            result = run(gm, *args, **kwargs)
            found.close()
        if found.met:
            _publish(found, of_graph)
        return result

    return run_and_publish


@contextmanager
def _watched() -> Iterator[_Compile]:
    found = _Compile()
    token = _HERE.set(found)
    try:
        yield found
    finally:
        _HERE.reset(token)


def _publish(found: _Compile, kind: Literal["joint", "inference"]) -> None:
    from ..records.publication import publish
    from ..records.records import Record

    publish(
        [
            Record(
                REWRITE, place, operator, "replaced", None, f"{defect.name}{about}: {defect.remedy}",
                facts={"defect": defect.name, "reports": [f"pytorch#{number}" for number in defect.reports]},
            )
            for (defect, place), (operator, about) in found.met.items()
        ],
        kind,
    )  # fmt: skip


def _kind_of_part(gm: Any, kwargs: dict[str, Any]) -> Literal["joint", "inference"]:
    return "inference" if kwargs.get("is_inference") else "joint"


def _kind_of_joint(gm: torch.fx.GraphModule, kwargs: dict[str, Any]) -> Literal["joint", "inference"]:
    from ..graph.nodes import is_joint

    return "joint" if is_joint(gm.graph) else "inference"


def _keeping_sums(
    can_fuse: Callable[..., bool], active: Callable[[], bool], lost: Callable[[Any, Any], list[str]]
) -> Callable[..., bool]:
    """Wraps Inductor's fusion check, to refuse a fusion that would lose a sum.

    Args:
        lost: returns the names of the sums that fusing two scheduler nodes would lose.
    """

    def can_fuse_without_loss(first: Any, second: Any) -> bool:
        if not can_fuse(first, second):
            return False
        names = lost(first, second) if active() else []
        found = _HERE.get()
        if found is not None:
            found.met.update({(defects.MIXED_ORDER, name): ("inductor::reduction", "") for name in names})
        return not names

    return can_fuse_without_loss


def _comparing(register: Callable[..., bool], active: Callable[[], bool]) -> Callable[..., bool]:
    """Wraps the registration of patterns, so that attention patterns are compared in full, numbers included."""

    signature = inspect.signature(register)

    def register_compared(*args: Any, **kwargs: Any) -> bool:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        pattern, search = given.get("search_fn_pattern"), given["search_fn"]
        if pattern is None or not defects.is_attention(search):
            return register(*args, **kwargs)
        check = given["extra_check"]

        def compared(match: Any) -> bool:
            found = _HERE.get()
            if found is not None:
                found.accept(match)
            return bool(check(match))

        def matched(match: Any) -> None:
            _matched(match, check)

        defects.ask_again(pattern, active, matched)
        given["extra_check"], given["trace_fn"] = compared, _remembering(given["trace_fn"], search)
        return register(*bound.args, **bound.kwargs)

    return register_compared


def _matched(match: Any, check: Callable[[Any], bool] = bool) -> None:
    found = _HERE.get()
    if found is not None:
        found.close()
        found.open = match if check(match) else None


def _remembering(trace: Callable[..., Any], search: Any) -> Callable[..., Any]:
    """Caches traces of a search pattern, so that it is traced once for all places with the same tensor metadata."""

    def traced(function: Any, args: Any, **kwargs: Any) -> Any:
        found = _HERE.get()
        about = tuple(map(_facts, args))
        if found is None or function is not search or None in about:
            return trace(function, args, **kwargs)
        key = trace, search, about
        if key not in found.traced:
            found.traced[key] = trace(function, args, **kwargs)
        return found.traced[key]

    return traced


def _facts(value: Any) -> tuple[Any, ...] | None:
    """The metadata on which a trace depends; None for symbolic numbers or sizes, for which traces are not cached."""
    if not isinstance(value, torch.Tensor):
        return None if isinstance(value, (torch.SymInt, torch.SymFloat)) else (type(value), value)
    sizes = *value.shape, *value.stride()
    if any(isinstance(size, torch.SymInt) for size in sizes):
        return None
    return value.dim(), sizes, value.dtype, value.device, value.requires_grad
