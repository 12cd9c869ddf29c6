"""Finds where two runs of the same call first differ: the module, and in eager code the operator."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dash_inductor.observers import phases
from dash_inductor.observers.names import Names, unwrapped

from ..recompute.execution import Digest
from ..recompute.operators import Operator

_NUMBERS = re.compile(r"(\[\d+\])?( \(call \d+\))?$")
"""The suffix of a module's name: which of its results, and which of its calls."""

OTHERS = 4
"""The number of gradients of parameters that are named."""


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs of a call, in words.

    Attributes:
        what: what differs.
        module: the module that computes it, such as ``Model.blocks.0 (Block)``.
        operator: the first operator whose result differs, or what else the operators show; "" for nothing.
    """

    what: str
    module: str
    operator: str

    @classmethod
    def of(
        cls, root: nn.Module, digests: Sequence[Digest], found: dict[str, Any], operator: tuple[Operator, str] | None
    ) -> Difference:
        """Describe in words how two runs of a call differ.

        Args:
            root: the module that was called.
            digests: the digests of one run, in the order in which they were computed.
            found: the first digest that differs, as `checks.same_rank_recompute.differs` gives it.
            operator: the first operator that differs, and how; None if none is known.
        """
        titles = _titles(root)
        phase, label = found["phase"], found["tensor"]
        if phase == phases.ACTIVATION:
            module = titles.get(_plain(label), titles[""])
            what = f"the output of {module} differs, and everything before it is equal"
        elif phase == phases.ACTIVATION_GRADIENT:
            before = _last_gradient(digests[: found["place"]])
            module = titles.get(before, titles[""])
            output = titles.get(_plain(label), titles[""])
            what = f"all outputs are equal, and the gradient of the output of {output} differs"
            if before:
                what += (
                    f": it comes out of the backward of {module}, whose own gradient is equal, or of what is between"
                )
        elif phase == phases.ATTENTION_GRADIENT:
            module = titles[""]
            what = f"the gradient {label} of a compiled attention differs"
        elif label.startswith("input "):
            module = titles[""]
            what = f"all outputs are equal, and the gradient of {label} of {module} differs"
        else:
            owner, _, name = label.rpartition(".")
            module = titles.get(owner, titles[""])
            what = f"all outputs are equal, and the gradient of the parameter {name} of {module} differs"
        said = "" if operator is None else f"{operator[0]} {operator[1]}"
        return cls(what, module, said)


def first_operator(once: Sequence[Operator], again: Sequence[Operator]) -> tuple[Operator, str] | None:
    """The first operator that differs between two runs, and a phrase that says how; None if all are equal."""
    for one, other in zip(once, again, strict=False):
        if one.name != other.name:
            return one, "is where the runs begin to call different operators: a value outside of PyTorch decides"
        if one.inputs != other.inputs:
            return one, (
                "is given something else, which no operator of PyTorch has computed: a number of Python or numpy, "
                "state that the doctor cannot put back, or a kernel that PyTorch does not dispatch"
            )
        if one.outputs != other.outputs:
            return one, "gives other bits for equal inputs"
    return None


def _plain(label: str) -> str:
    """The name of a module in the label of a tensor, "" for the outermost one's."""
    return _NUMBERS.sub("", label)


def _titles(root: nn.Module) -> dict[str, str]:
    """The titles of modules, by their names in digests; "" is the outermost one."""
    names = Names()
    names.add(root)
    kind = type(unwrapped(root)).__name__
    titles = {}
    for module in unwrapped(root).modules():
        name, own = names.of_module(module), type(module).__name__
        path = name.removeprefix(f"{kind}.") if next(root.parameters(), None) is None else name
        titles[name] = kind if module is unwrapped(root) else f"{kind}.{path} ({own})"
    return {**titles, "": kind, kind: kind, "result": kind}


def _last_gradient(before: Sequence[Digest]) -> str:
    """The module whose output's gradient was computed last, "" for none."""
    gradients = [digest for digest in before if digest.phase == phases.ACTIVATION_GRADIENT]
    return _plain(gradients[-1].tensor) if gradients else ""
