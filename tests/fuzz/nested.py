"""Programs inside of the graphs that higher-order operators have: loops, branches, regions, checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

from ..support.shown_memory import Program, results_of

Results = tuple[Tensor, ...]
Nest = Callable[[Program, bool], Program]
"""Puts a program into one that runs it inside of an operator; or, if the flag is not set, in Python, as the operator is
defined.  Both take the tensors of the program, of which the first has floating point, and give a tuple.
"""


def _results(program: Program, *tensors: Tensor) -> Results:
    return tuple(results_of(program, tensors))


def _less(tensor: Tensor) -> Tensor:
    """Something else with the layout of a tensor."""
    return tensor * -0.5 if tensor.is_floating_point() else tensor.logical_not().to(tensor.dtype)


def _alone(program: Program, nested: bool) -> Program:
    return lambda *tensors: _results(program, *tensors)


def _region(program: Program, nested: bool) -> Program:
    """Twice, so that one graph has two calls."""

    def inner(*tensors: Tensor) -> Results:
        return _results(program, *tensors)

    region = torch.compiler.nested_compile_region(inner) if nested else inner

    def outer(first: Tensor, *rest: Tensor) -> Results:
        found: Results = region(first, *rest)
        return *found, *region(first * 0.5, *rest)

    return outer


def _checkpointed(program: Program, nested: bool) -> Program:
    def outer(*tensors: Tensor) -> Results:
        def inner(*given: Tensor) -> Results:
            return _results(program, *given)

        found: Results = checkpoint(inner, *tensors, use_reentrant=False) if nested else inner(*tensors)
        return found

    return outer


def _branch(program: Program, nested: bool) -> Program:
    def outer(first: Tensor, *rest: Tensor) -> Results:
        def yes(first: Tensor, *rest: Tensor) -> Results:
            return _results(program, first, *rest)

        def no(first: Tensor, *rest: Tensor) -> Results:
            return tuple(_less(result) for result in _results(program, first, *rest))

        if not nested:
            return (yes if first.sum() > 0 else no)(first, *rest)
        found: Results = torch.cond(first.sum() > 0, yes, no, (first, *rest))
        return found

    return outer


def _loop(program: Program, nested: bool) -> Program:
    """Results of three rounds, each weighted; the program reads what changes in each of them."""

    def outer(first: Tensor, *rest: Tensor) -> Results:
        def more(count: Tensor, now: Tensor, *sums: Tensor) -> Tensor:
            return count < 3

        def body(count: Tensor, now: Tensor, *sums: Tensor) -> Results:
            found = _results(program, now, *rest)
            added = [a * 0.5 + b if b.is_floating_point() else b.clone() for a, b in zip(sums, found, strict=True)]
            return count + 1, now * 0.75, *added

        state: Results = torch.zeros((), dtype=torch.int64), first * 1, *map(_less, _results(program, first, *rest))
        if nested:
            state = while_loop(more, body, state)
        else:
            while more(*state):
                state = body(*state)
        return state[1:]

    return outer


def _scanned(program: Program, nested: bool) -> Program:
    def outer(first: Tensor, *rest: Tensor) -> Results:
        def step(carry: Tensor, given: Tensor) -> tuple[Tensor, Results]:
            return carry * 0.5 + given, _results(program, given + carry * 0.25, *rest)

        given = torch.stack([first, first * 0.5])
        if nested:
            last, found = scan(step, first * 1, given)
            return last, *found
        carry, steps = first * 1, []
        for one in given:
            carry, results = step(carry, one)
            steps.append(results)
        return carry, *(torch.stack(of) for of in zip(*steps, strict=True))

    return outer


NESTS: dict[str, Nest] = {
    "alone": _alone,
    "region": _region,
    "checkpoint": _checkpointed,
    "cond": _branch,
    "while": _loop,
    "scan": _scanned,
}
