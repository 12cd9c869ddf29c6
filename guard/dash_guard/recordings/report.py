"""Shows a comparison as text."""

from __future__ import annotations

import textwrap
from functools import partial
from typing import Any

from dash_inductor.untrusted import printable

from .agreement import sentence
from .compare import Comparison
from .layouts import LayoutComparison, StepMagnitude, Verdict
from .state import StateDifference

WIDTH = 100
_STEPS = 20


LAYOUT_HEADLINES: dict[Verdict, str] = {
    "within rounding": "The runs agree within the rounding of their layouts",
    "beyond rounding": "The runs differ by more than the rounding of their layouts",
    "not comparable": "The runs are not comparable",
}
"""The result of a comparison of layouts in one sentence, by its verdict."""


def headline(result: Comparison) -> str:
    """The result of a comparison in one sentence."""
    ranks = "1 rank" if result.ranks == 1 else f"{result.ranks} ranks"
    steps = "1 step" if result.steps == 1 else f"{result.steps} steps"
    if result.first is not None:
        return f"The runs diverge at {result.first}"
    if result.verdict == "diverged" and result.state:
        return f"The runs diverge at step {result.last_step}, in the state with which it begins"
    if result.verdict == "diverged":
        return f"The runs diverge after step {result.last_step}: one has more steps than the other"
    if result.verdict == "equal":
        return f"The runs are equal: {steps} of {ranks}, bit by bit"
    if result.steps:
        return f"The runs are not comparable; everything that both have is equal ({steps} of {ranks})"
    return "The runs are not comparable"


def text(result: Comparison, width: int = WIDTH) -> str:
    """A comparison as text for a terminal of a width, where names allow, without control characters."""
    wrapped = partial(_wrapped, width)
    lines = [headline(result), "", f"  a  {result.a}", f"  b  {result.b}"]
    if result.first is not None:
        lines += ["", "In the first tensor that differs, there is", ""]
        lines += [f"  a  {result.first.a}", f"  b  {result.first.b}"]
        if result.first.before:
            lines += ["", *wrapped(f"The last tensor before it on this rank that is equal: {result.first.before}")]
    if result.conclusion:
        lines += ["", *wrapped(result.conclusion)]
    if result.state and result.verdict == "equal":
        lines += ["", *wrapped("The tensors are equal; the state with which steps begin is not:"), ""]
        lines += [line for each in result.state for line in wrapped(state(each), "  ")]
    if result.others:
        lines += ["", f"{others(result)} in this step, in order:", ""]
        lines += [f"  rank {other.rank}: {other.phase} {other.tensor}" for other in result.others]
        lines += ["  ..."] * (result.others_count > len(result.others))
    if result.findings:
        lines += ["", "The runs themselves found:", ""]
        lines += [f"  {run}, step {finding['step']}: {sentence(finding)}" for run, finding in result.findings]
    if result.reasons:
        lines += ["", "Notes about the recordings:", ""]
        lines += [line for reason in result.reasons for line in wrapped(reason, "  ")]
    if result.facts:
        lines += ["", "The runs differ in", ""]
        for name, a, b in result.facts:
            lines += [f"  {name}", f"    a  {shown(a)}", f"    b  {shown(b)}"]
    elif result.steps:
        words = "Versions, GPU, driver, settings, numerics keys and environment of the runs are equal."
        lines += ["", *wrapped(words)]
    return "\n".join(map(printable, lines))


def text_of_layouts(result: LayoutComparison, width: int = WIDTH) -> str:
    """A comparison of layouts as text for a terminal, as `text`."""
    wrapped = partial(_wrapped, width)
    lines = [LAYOUT_HEADLINES[result.verdict], "", f"  a  {result.a}", f"  b  {result.b}", ""]
    lines += wrapped(result.conclusion)
    if result.steps:
        rows = [["step", "gradients", "factor", "parameters", "largest"]]
        for step in _spread(result.steps):
            sizes = (f"{step.parameters:.1e}", f"{step.largest:.1e}")
            rows.append([str(step.step), f"{step.gradients:.1e}", factor_text(step.factor), *sizes])
        lines += [
            "",
            *wrapped("Relative differences by step, and the largest of an element of a parameter:"),
            "",
            *_columns(rows),
        ]
    if result.tensors:
        rows = [["", "relative", "largest", "ulps", "factor", "gradient"]]
        for each in result.tensors:
            sizes = (f"{each.relative:.1e}", f"{each.largest:.1e}")
            rows.append([">" * each.beyond, *sizes, str(each.ulps), factor_text(each.factor), each.tensor])
        title = f"Gradients that differ most in step {result.deciding}, > beyond rounding:"
        lines += ["", *wrapped(title), "", *_columns(rows)]
    if result.rounding is not None:
        bound = f"{result.rounding.relative:.1e} of a gradient, {result.rounding.factor:.1e} as a common factor"
        lines += ["", *wrapped(f"Rounding of {result.rounding.dtype} explains {bound}.")]
    if result.state:
        lines += ["", "State that differs in this step:", ""]
        lines += [line for each in result.state for line in wrapped(each.what, "  ")]
    if result.reasons:
        lines += ["", "Not compared:", ""]
        lines += [line for reason in result.reasons for line in wrapped(reason, "  ")]
    return "\n".join(map(printable, lines))


def _spread(steps: list[StepMagnitude]) -> list[StepMagnitude]:
    """At most 20 steps, from the first to the last."""
    count = min(_STEPS, len(steps))
    return [steps[round(place * (len(steps) - 1) / max(1, count - 1))] for place in range(count)]


def factor_text(factor: float | None) -> str:
    """A common factor of tensors as text; "-" for None."""
    return "-" if factor is None else f"{factor:.6g}"


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return [f"  {line}".rstrip() for line in lines]


def state(difference: StateDifference) -> str:
    """A difference of state in words, with its rank and the step since which it differs."""
    return f"rank {difference.rank}, since step {difference.step}: {difference.what}"


def others(result: Comparison) -> str:
    """Returns, in words, how many tensors differ in the same step besides the first: "3 more tensors differ"."""
    return "1 more tensor differs" if result.others_count == 1 else f"{result.others_count} more tensors differ"


def shown(value: Any) -> str:
    """A fact of a comparison as text; "-" for None and []."""
    if value is None or value == []:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _wrapped(width: int, paragraph: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        printable(paragraph), width, initial_indent=indent, subsequent_indent=indent, break_long_words=False
    )
