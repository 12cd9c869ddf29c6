"""Explains, for another architecture, what a program compiles while it runs, call by call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import _switch
from ..records import records
from ..records.records import GraphRecord
from ..upstream.compilation import counters
from ..upstream.patches import replaced
from .explain import explained


class CompiledCalls:
    """Collects how the attention that a program compiles with `torch.compile` would be compiled for `arch`.

    Attributes:
        graphs: the records of the graphs, oldest first.
        unknown: why the outcome on `arch` is not known for some attention; "" if all outcomes are known.
    """

    def __init__(self, arch: str, dump: str) -> None:
        self.graphs: list[GraphRecord] = []
        self.unknown = ""
        self._arch, self._dump, self._compile = arch, dump, torch.compile
        self._known: list[GraphRecord] = []  # compiled by the program before, or in its own calls

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context manager that explains each call that compiles something under deterministic algorithms."""
        self._known += records.graphs()
        with replaced(torch, {"compile": self._watched_compile()}):
            yield
        if self._new():
            self.unknown = self.unknown or "a graph was compiled otherwise than by a call of what torch.compile returns"

    def _watched_compile(self) -> Callable[..., Any]:
        @functools.wraps(self._compile)
        def compile_and_watch(model: Any = None, **options: Any) -> Any:
            if model is None:
                return lambda function: compile_and_watch(function, **options)
            compiled = self._compile(model, **options)
            if isinstance(compiled, torch.nn.Module):
                compiled.forward = self._call(compiled.forward, model)
                return compiled
            return self._call(compiled, model)

        return compile_and_watch

    def _call(self, compiled: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # inside a function that is being compiled
                return compiled(*args, **kwargs)
            elsewhere, compiles = self._new(), _compiles()

            def look() -> None:
                self._known += (graph for graph in self._new() if not any(graph is other for other in elsewhere))
                if _compiles() != compiles and torch.are_deterministic_algorithms_enabled() and _switch.is_enabled():
                    self._explain(fn, args, kwargs)

            try:
                result = compiled(*args, **kwargs)
            except Exception:  # such as an operator that this machine does not have, and the other one has
                look()
                raise
            look()
            return result

        return call

    def _new(self) -> list[GraphRecord]:
        known = set(map(id, self._known))
        return [graph for graph in records.graphs() if id(graph) not in known]

    def _explain(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with replaced(torch, {"compile": self._compile}):
            found = explained(fn, args, kwargs, self._arch, gradients=torch.is_grad_enabled(), dump=self._dump)
        self.graphs += found.graphs
        self.unknown = self.unknown or found.unknown


def _compiles() -> int:
    """A counter that changes whenever Dynamo compiles a graph."""
    return int(counters["stats"]["unique_graphs"])
