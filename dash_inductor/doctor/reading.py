"""Records which operators of PyTorch's list of nondeterministic ones a program runs, and the flag at each dispatch.

The dispatch mode sees the eager code of the first step, including its backward; graphs are read when they are compiled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..eager.determinism import DETERMINISTIC
from ..errors import described
from ..graph.model_line import model_line
from ..upstream.caches import cache_dir
from ..upstream.dispatch import DispatchMode, OpOverload, has_own_dispatch, mode_stack
from ..upstream.eager import backward_sequence_number, in_backward, next_sequence_number
from ..upstream.pytree import tree_map
from . import frames
from .flag import Flag
from .listed import Operator, listed, named

LIMIT = 300_000
"""The maximum number of recorded operator calls, for programs whose optimizer never steps twice."""


@dataclass(frozen=True)
class Place:
    """Where a program calls an operator: the line, and the module whose forward runs ("" outside of modules)."""

    line: str
    module: str = ""

    def __str__(self) -> str:
        return f"at {self.line}, in {self.module}" if self.module else f"at {self.line}"

    def inside(self, module: str) -> bool:
        """Whether this place is in a module, given by its name from `frames.name_of`, or in one of its submodules."""
        here, there = self.module.split(" (")[0], module.split(" (")[0]
        return bool(here) and (here == there or here.startswith(f"{there}."))


@dataclass(frozen=True)
class Ran:
    """A use of an operator in PyTorch's list of nondeterministic ones.

    Attributes:
        operator: the operator.
        place: where the program calls it.
        flag: the state of the determinism flag when the operator was dispatched or compiled.
        compiled: whether it is part of a compiled graph.
    """

    operator: Operator
    place: Place
    flag: Flag
    compiled: bool = False


class Reading(DispatchMode):
    """A dispatch mode that records the operators of PyTorch's list of nondeterministic ones that a program runs.

    Attributes:
        ran: the number of times that each listed operator has run; compiled ones count once per graph.
        complete: whether the whole first step was seen, or the program ended before.
        seen: the number of operators seen.
        failed: the error that ended the recording; "" if there was none.
        flagged: called for operators with an argument `deterministic`, with the name, place and value.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: Counter[Ran] = Counter()
        self.complete = True
        self.failed = ""
        self.flagged: Callable[[str, Place, bool], object] = lambda name, place, value: None
        self.seen = 0
        self._entered = False
        self._quiet = 0
        self._forwards: dict[int, Place] = {}  # by sequence number of the autograd nodes
        self._stepped: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True, so that `torch.compile` compiles programs as if this mode was not active."""
        return True

    def __enter__(self) -> Reading:
        self._entered = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if self._entered:
            self._entered = False
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A context manager in which nothing is recorded, on any thread, for work that is not part of the program."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Ends the recording if this optimizer is about to step a second time; called before each optimizer step."""
        if id(optimizer) in self._stepped:
            self.end()
        self._stepped.add(id(optimizer))

    def end(self) -> None:
        """Stops recording, and exits the mode if it is the innermost one.

        Autograd restores the modes that were active when a backward began, so the mode is not exited inside one.
        """
        self.seen = LIMIT + 1
        self._forwards.clear()
        stack = mode_stack()
        if stack and stack[-1] is self and not in_backward():
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records an operator and runs it; for wrapper subclasses such as DTensor, the operators on inner
        tensors are seen.
        """
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if any(has_own_dispatch(kind) for kind in types):
            return func(*args, **(kwargs or {}))  # fake tensors and the like, which compute nothing
        if self.seen <= LIMIT and not self._quiet and isinstance(func, OpOverload):
            try:
                looked_at(self, func, args, kwargs or {})
            except Exception as error:  # must not affect the program's operator
                self.failed, self.seen = described(error), LIMIT + 1
        return func(*args, **(kwargs or {}))

    def function(self, place: Place) -> None:
        """Records where an autograd function is called, for the autograd node that is made next."""
        if self.seen <= LIMIT:
            self._forwards[next_sequence_number()] = place

    def look(self, operator: OpOverload, args: Any, kwargs: Any) -> None:
        """Records an operator that is about to run, if it is in PyTorch's list or has an argument `deterministic`."""
        if DETERMINISTIC.switched_on:
            return  # inside our attention, during which the flag is on
        self.seen += 1
        if self.seen > LIMIT:
            self.complete = False
            return
        number = backward_sequence_number()
        if torch.is_grad_enabled():  # a node was just made, if the operator has a gradient
            self._forwards.setdefault(next_sequence_number() - 1, here())
        entry = listed(operator, args, kwargs, _device)
        other = operator.namespace != "aten" and any(a.name == "deterministic" for a in operator._schema.arguments)
        if entry is None and not other:
            return
        place = here()
        if place.line.startswith(cache_dir()):
            return  # in code generated by Inductor, whose graph was read
        if number is not None:
            place = self._forwards.get(number, place)
        if entry is not None:
            self.ran[Ran(entry, place, Flag.now())] += 1
        else:
            value = named(operator, args, kwargs).get("deterministic", False)
            self.flagged(str(operator.name()).split(".")[0], place, bool(value))

    def compiled(self, graph: Graph) -> None:
        """Records the listed operators of a graph that Inductor is about to compile."""
        for node in graph.nodes:
            if node.op == "call_function" and isinstance(node.target, OpOverload):
                args, kwargs = tree_map(_value, (node.args, node.kwargs))
                entry = listed(node.target, args, kwargs, _device, in_graph=True)
                if entry is not None:
                    line, module = model_line([node, *node.users])
                    self.ran[Ran(entry, Place(line or "an unknown line", module), Flag.now(), compiled=True)] += 1


def looked_at(reading: Reading, operator: OpOverload, args: Any, kwargs: Any) -> None:
    """Calls `Reading.look`; its stack frame separates the program's frames from the doctor's (`frames.LOOKING`)."""
    reading.look(operator, args, kwargs)


def foreign_modes() -> bool:
    """Whether dispatch modes other than the doctor's are active, as while a program is traced."""
    return any(not isinstance(mode, Reading) for mode in mode_stack())


def here() -> Place:
    """The program's current place; must be called inside a wrapped function (see `frames.LOOKING`)."""
    around = frames.modules()
    return Place(frames.line()[0], frames.name_of(around[0], around[-1]) if around else "")


def _device(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return next((found for found in map(_device, value) if found), "")
    return value.device.type if isinstance(value, Tensor) else ""


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, Node) else argument
