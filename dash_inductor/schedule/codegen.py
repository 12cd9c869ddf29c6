"""Generates code from the schedule expressions: Triton source for the kernels, Python functions for the host.

Both are printed from the same expressions by the same printer, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import sympy

from ..model.mask import Band
from .schedules import Schedule, define
from .symbols import Expr, FloorDiv, Maximum, Minimum, Rem, Where

TILE_SCHEDULE = ("q_len", "kv_len", "lo", "hi")
"""Members of the tuple `tile_schedule`: the run-time values on which tile schedules and ranks depend.

Block sizes are not among them, because Triton turns the constants in a tuple that is assigned to a variable into
run-time values."""

_TAIL = ("tile_schedule", "BLOCK_Q", "BLOCK_KV")
SIGNATURES: dict[str, tuple[str, ...]] = {
    "dash_launch": ("work_id", "heads", *_TAIL, "HEAD_CHUNK"),
    "dash_kv_tile": ("cta_index", "part", *_TAIL),
    "dash_visits": ("kv", *_TAIL),
    "dash_q_tile": ("kv", "step", *_TAIL),
    "dash_rank": ("q", "kv", *_TAIL),
    "dash_q_range": ("kv", *_TAIL),
    "dash_kv_range": ("q", *_TAIL),
    "dash_seen_rows": _TAIL,
    "dash_seen_keys": _TAIL,
}
"""Parameters of the functions that the kernels call; upper-case ones are compile-time constants.

The first five are functions of `tile_schedule.TileSchedule`, and are the same for every head; `heads` is the number of
heads of all batch elements.  The ranges, and which rows and keys are seen, depend on the band alone."""
HOST_SIGNATURES: dict[str, tuple[str, ...]] = {
    "dash_ctas_per_head": _TAIL,
    "dash_resident": ("heads", *_TAIL, "HEAD_CHUNK"),
}


def definitions(s: Schedule) -> dict[str, tuple[Expr, ...]]:
    """Return the expressions that each function of `SIGNATURES` and `HOST_SIGNATURES` returns, by function name."""
    q, kv = s.visible.q, s.visible.kv
    return {
        "dash_launch": s.launch,
        "dash_kv_tile": (s.kv_tile,),
        "dash_visits": (s.num_steps,),
        "dash_q_tile": (s.q_tile,),
        "dash_rank": (s.rank,),
        "dash_q_range": (q.first, q.full_first, q.full_end, q.end),
        "dash_kv_range": (kv.first, kv.full_first, kv.full_end, kv.end),
        "dash_seen_rows": s.visible.rows,
        "dash_seen_keys": s.visible.keys,
        "dash_ctas_per_head": (s.ctas_per_head,),
        "dash_resident": (s.resident if s.resident is not None else sympy.Integer(1),),
    }


class PythonPrinter:
    """Prints an expression as Python; subclasses override the syntax of single operations."""

    def where(self, condition: str, a: str, b: str) -> str:
        """Return the source of the expression ``a if condition else b``."""
        return f"({a} if {condition} else {b})"

    def extremum(self, name: str, a: str, b: str) -> str:
        """Return the source of the maximum or the minimum, as `name` ("max" or "min") says."""
        return f"{name}({a}, {b})"

    def divide(self, a: str, b: str) -> str:
        """Return the source of the integer division of `a` by `b`."""
        return f"({a} // {b})"

    def remainder(self, a: str, b: str) -> str:
        """Return the source of the remainder of `a` divided by `b`."""
        return f"({a} % {b})"

    def print(self, e: Expr) -> str:
        """Return the source of `e`; compound results are parenthesized."""
        if e.is_Symbol:
            return str(e.name)
        if e.is_Integer:
            return str(int(e)) if e >= 0 else f"({int(e)})"
        if isinstance(e, sympy.Add):
            return f"({self._sum(e)})"
        args = [self.print(a) for a in e.args]
        if isinstance(e, sympy.Mul):
            return f"({' * '.join(args)})"
        if isinstance(e, FloorDiv):
            return self.divide(*args)
        if isinstance(e, Rem):
            return self.remainder(*args)
        if isinstance(e, Where):
            return self.where(*args)
        if isinstance(e, (Maximum, Minimum)):
            return self.extremum("max" if isinstance(e, Maximum) else "min", *args)
        if isinstance(e, sympy.core.relational.Relational):
            return f"({args[0]} {e.rel_op} {args[1]})"
        raise NotImplementedError(f"no spelling for {type(e).__name__} in {e}")

    def _sum(self, e: Expr) -> str:
        plus = [t for t in e.as_ordered_terms() if not t.could_extract_minus_sign()]
        minus = [-t for t in e.as_ordered_terms() if t.could_extract_minus_sign()]
        text = " + ".join(self.print(t) for t in plus) or "0"
        return text + "".join(f" - {self.print(t)}" for t in minus)


class TritonPrinter(PythonPrinter):
    """Prints an expression for the body of a ``@triton.jit`` function."""

    def where(self, condition: str, a: str, b: str) -> str:
        return f"tl.where({condition}, {a}, {b})"

    def extremum(self, name: str, a: str, b: str) -> str:
        return f"tl.{name}imum({a}, {b})"


def _share(results: Sequence[Expr]) -> tuple[list[tuple[Expr, Expr]], list[Expr]]:
    """Extract subexpressions that are used more than once.

    Return them as (symbol, value) in order of use, and the results in terms of the symbols.
    """
    uses: dict[Expr, int] = {}

    def count(e: Expr) -> None:
        uses[e] = uses.get(e, 0) + 1
        if uses[e] == 1:
            for a in e.args:
                count(a)

    shared: list[tuple[Expr, Expr]] = []
    done: dict[Expr, Expr] = {}

    def rewrite(e: Expr) -> Expr:
        if not e.args:
            return e
        if e not in done:
            args = [rewrite(a) for a in e.args]
            new = e if all(a is b for a, b in zip(args, e.args, strict=True)) else e.func(*args)
            if uses[e] > 1 and not e.could_extract_minus_sign() and isinstance(e, sympy.Expr):
                shared.append((sympy.Symbol(f"t{len(shared)}", integer=True), new))
                new = shared[-1][0]
            done[e] = new
        return done[e]

    for r in results:
        count(r)
    return shared, [rewrite(r) for r in results]


def function_source(name: str, parameters: Sequence[str], results: Sequence[Expr], printer: PythonPrinter) -> str:
    """Return the source of a function; shared subexpressions are assigned to variables.

    Members of `tile_schedule` are unpacked only if the function reads them.

    Args:
        name: the name of the function.
        parameters: the parameters as they are to appear in the source.
        results: the expressions that it returns.
        printer: prints expressions.
    """
    shared, reduced = _share(results)
    read = {symbol.name for result in results for symbol in result.free_symbols}
    lines = [f"    {member} = tile_schedule[{i}]" for i, member in enumerate(TILE_SCHEDULE) if member in read]
    lines += [f"    {symbol.name} = {printer.print(value)}" for symbol, value in shared]
    lines.append("    return " + ", ".join(printer.print(r) for r in reduced))
    return f"def {name}({', '.join(parameters)}):\n" + "\n".join(lines) + "\n"


@cache
def _triton_source(s: Schedule) -> str:
    results, printer = definitions(s), TritonPrinter()
    functions = []
    for name, parameters in SIGNATURES.items():
        spelled = [f"{p}: tl.constexpr" if p.isupper() else p for p in parameters]
        functions.append("@triton.jit\n" + function_source(name, spelled, results[name], printer))
    return "\n\n".join(functions)


def triton_source(schedule_name: str, band: Band) -> str:
    """Return the source of the ``@triton.jit`` functions in `SIGNATURES`; its module must import triton and tl.

    `tile_schedule` is a tuple of the members named in `TILE_SCHEDULE`.  All values are int32.  `lo` and `hi` are
    anchored top left: subtract ``kv_len - q_len`` from the bounds of a band anchored bottom right.  A bound that the
    band does not have is never read.

    Raises:
        ArgumentError: an unknown schedule or an unsupported mask.
    """
    return _triton_source(define(schedule_name, band))


def compile_functions(s: Schedule, printer: PythonPrinter, scope: dict[str, Any] | None = None) -> SimpleNamespace:
    """Return all functions of a schedule as Python callables; `scope` holds the names that the source uses."""
    results, namespace = definitions(s), dict(scope or {})
    for name, parameters in (SIGNATURES | HOST_SIGNATURES).items():
        exec(function_source(name, parameters, results[name], printer), namespace)  # our own source, printed above
    return SimpleNamespace(**{name: namespace[name] for name in results})


@cache
def _python_functions(s: Schedule) -> SimpleNamespace:
    return compile_functions(s, PythonPrinter())


def python_functions(schedule_name: str, band: Band) -> SimpleNamespace:
    """Return the functions of `SIGNATURES` and `HOST_SIGNATURES` as Python callables, by the same names.

    Raises:
        ArgumentError: an unknown schedule or an unsupported mask.
    """
    return _python_functions(define(schedule_name, band))
