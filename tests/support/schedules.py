"""Random schedule problems, and an evaluator of the generated code with C's integer division."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import strategies as st

from dash_inductor.model.mask import Band
from dash_inductor.schedule.codegen import PythonPrinter, compile_functions
from dash_inductor.schedule.schedules import LEAST, NAMES, define, supports
from dash_inductor.schedule.tile_schedule import Problem

BANDS = (
    Band(),
    Band(0, None),
    Band(0, None, "bottom_right"),
    Band(0, 9),
    Band(0, 30, "bottom_right"),
    Band(-7, 7),
    Band(None, 5, "bottom_right"),
    Band(3, None),
    Band(-9, None),
    Band(-40, -10),
    Band(500, 600),
)


@st.composite
def problems(draw: st.DrawFn, max_tiles: int = 40, max_heads: int = 3) -> Problem:
    """Up to `max_tiles` x `max_tiles` tiles with ragged last ones, any band, heads, group and head chunk.

    Or a few more than `LEAST` q tiles, so that tile schedules of `bent_fold` are bent.
    """
    block_q, block_kv = draw(st.sampled_from((1, 2, 4, 8))), draw(st.sampled_from((1, 2, 4, 8)))
    tiles_q = draw(st.integers(1, max_tiles) | st.integers(LEAST, LEAST + 6))
    tiles_kv = draw(st.integers(1, max_tiles))
    return Problem(
        draw(st.sampled_from(BANDS)),
        tiles_q * block_q - draw(st.integers(0, block_q - 1)),
        tiles_kv * block_kv - draw(st.integers(0, block_kv - 1)),
        block_q,
        block_kv,
        batch=draw(st.integers(1, 2)),
        heads=draw(st.integers(1, max_heads)),
        group=draw(st.integers(1, 3)),
        head_chunk=draw(st.integers(1, 5)),
    )


def names_for(problem: Problem) -> list[str]:
    """The schedules that support the problem's mask."""
    return [name for name in NAMES if supports(name, problem.band) is None]


def _divide(a: int, b: int) -> int:
    assert a >= 0, f"dividend {a} is negative"
    assert b > 0, f"divisor {b} is not positive"
    return a // b


def _remainder(a: int, b: int) -> int:
    return a - b * _divide(a, b)


def _where(condition: bool, a: int, b: int) -> int:
    return a if condition else b


class CPrinter(PythonPrinter):
    """Python with a GPU's rules: both branches of a selection are evaluated, no division may see a negative operand."""

    def where(self, condition: str, a: str, b: str) -> str:
        return f"where({condition}, {a}, {b})"

    def divide(self, a: str, b: str) -> str:
        return f"divide({a}, {b})"

    def remainder(self, a: str, b: str) -> str:
        return f"remainder({a}, {b})"


def c_functions(name: str, problem: Problem) -> SimpleNamespace:
    """The schedule's functions, evaluated as C would."""
    scope = {"where": _where, "divide": _divide, "remainder": _remainder}
    return compile_functions(define(name, problem.resolved.band), CPrinter(), scope)
