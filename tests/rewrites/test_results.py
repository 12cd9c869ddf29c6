"""Results of graphs that are rewritten: memory, strides and sharing as without rewrites, and what writes to them do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from torch import Tensor

import dash_inductor
from dash_inductor.records.records import clear_sites

from ..support import attention_entries, rewritten_programs
from ..support.attention_entries import ENTRIES
from ..support.fuzzed import compiled, everything_on_the_cpu, rewritten
from ..support.graphs import capture
from ..support.rewritten_programs import PROGRAMS
from ..support.shown_memory import WRITES, Layout, Program, after, layouts, same

pytestmark = pytest.mark.usefixtures("deterministic")

Found = dict[tuple[int, str], list[Tensor] | str]


def _seen(program: Program, tensors: Sequence[Tensor]) -> tuple[list[Layout], Found]:
    """The layouts of a program's results, and its gradients after each write to one of them or to an input."""
    shown = layouts(program, tensors)
    places = range(-len(tensors), len(shown))
    return shown, {
        (place, how): after(program, tensors, place, write) for place in places for how, write in WRITES.items()
    }


def _hold(
    ours: tuple[list[Layout], Found], plain: tuple[list[Layout], Found], right: list[Tensor] | str, inputs: bool
) -> None:
    """Hold what is seen of a program with rewrites against it without them.

    Args:
        right: the gradients without a write.
        inputs: whether writes to inputs count; else autograd may notice them, as in eager mode.
    """
    assert ours[0] == plain[0]
    for (place, how), found in ours[1].items():
        expected = plain[1][place, how]
        fine = same(found, expected) or same(found, right)
        if place < 0 and not inputs:
            fine |= isinstance(found, str) or how == "through .data"
        assert fine, (place, how, found, expected)


def _nothing(tensor: Tensor) -> None:
    """Write nothing."""


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, dynamic: bool) -> None:
    case, tensors = PROGRAMS[name], rewritten_programs.tensors_of(name)
    with everything_on_the_cpu():
        clear_sites()
        program = compiled(case.program, dynamic)
        ours = _seen(program, tensors)
        assert dynamic or not case.rewrite or case.rewrite in rewritten()
        with dash_inductor.disabled():
            plain = compiled(case.program, dynamic)
            _hold(ours, _seen(plain, tensors), after(plain, tensors, 0, _nothing), inputs=True)


def _returned_otherwise(function: Callable[..., Tensor], how: str) -> Program:
    def program(*tensors: Tensor) -> tuple[Tensor, ...]:
        out = function(*tensors)
        return {
            "alone": (out,),
            "with what reads it": (out, out * 2),
            "as a part": (out[:1],),
            "with a product": (out, out.flatten(-2).sum(-1)),
        }[how]

    return program


@pytest.mark.parametrize("how", ["alone", "with what reads it", "as a part", "with a product"])
@pytest.mark.parametrize("name", [name for name in ENTRIES if ENTRIES[name].exact is None])
def test_attention(name: str, how: str) -> None:
    """A write to an input is noticed where a backward of ours reads it, as in eager mode."""
    function, tensors = (
        _returned_otherwise(ENTRIES[name].function, how),
        [*attention_entries.tensors_of(ENTRIES[name]).values()],
    )
    with capture():
        ours = _seen(compiled(function), tensors)
        with dash_inductor.disabled():
            plain = compiled(function)
            _hold(ours, _seen(plain, tensors), after(plain, tensors, 0, _nothing), inputs=False)
