"""Accepted forms of attention with one foreign operator inserted at one edge: results are the program's, or it is not
replaced.

``python -m tests.frontends.insertions --cases 20000 --seed 1`` runs many and prints those with wrong numbers.

A case is a form (`inserted_forms`), an edge of it, an operator (`inserted_operators`), the tensors that want gradients,
and their dtype.  The compiled program is compared with eager PyTorch in double precision.  Where it differs, it is
compiled without dash_inductor too: what is wrong there as well is a defect of PyTorch.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import dash_inductor
from dash_inductor.records.records import sites

from ..support.flex import training_on_the_cpu
from ..support.graphs import capture
from .inserted_forms import FORMS
from .inserted_operators import BATCH, HEADS, LENGTH

WANTED = {"all": (0, 1, 2, 3), "none": (), "value": (2,), "query": (0,), "query and key": (0, 1), "bias": (3,)}
"""Which of query, key, value and bias want gradients."""


@dataclass(frozen=True)
class Case:
    """One program: a form with an operator at an edge, which tensors want gradients, and the dtype of all of them."""

    form: str
    edge: str
    operator: str
    wanted: str
    dtype: str = "float32"

    def function(self, *, reference: bool = False) -> Callable[..., Tensor]:
        form, operator = FORMS[self.form], FORMS[self.form].inserted(self.edge)[self.operator]
        function = form.reference or form.function if reference else form.function
        edge = self.edge

        def at(name: str, x: Tensor) -> Tensor:
            return operator(x) if name == edge else x

        def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return function(q, k, v, bias, at)

        return program


def cases() -> Iterator[Case]:
    """Every case."""
    for name, form in FORMS.items():
        for edge, wanted in itertools.product(form.edges, WANTED):
            for operator in form.inserted(edge):
                if operator != "columns hidden" or edge in _SCORES:
                    yield from (Case(name, edge, operator, wanted, dtype) for dtype in ROUNDING)


ROUNDING = {"float32": (2e-5, 1e-2), "bfloat16": (8e-3, 0.3)}
"""By dtype: an error that is allowed beside four times that of eager, and a bound from which on nothing is compared."""
_SCORES = ("product", "scaled", "capped", "biased", "scores")
"""Edges at which numbers may be hidden: elsewhere results depend on how numbers of 1e9 are rounded."""


def sample(count: int, seed: int) -> list[Case]:
    """So many cases, each at most once, which a seed draws."""
    every = list(cases())
    return random.Random(seed).sample(every, min(count, len(every)))


def tensors(wanted: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and bias, of which some want gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, HEADS, LENGTH, LENGTH)] * 3 + [(HEADS, LENGTH, LENGTH)]
    found = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [x.requires_grad_(number in wanted) for number, x in enumerate(found)]


Results = list[Tensor | None]


def results(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Results:
    """The output, and the gradients of all inputs that want one; None for those that get none."""
    output = function(*inputs)
    found: Results = [output.detach()]
    wanting = [x for x in inputs if x.requires_grad]
    if output.requires_grad and wanting:
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
        return [*found, *torch.autograd.grad(output, wanting, weights, allow_unused=True)]
    return [*found, *(None for _ in wanting)]


def error_of(found: Results, exact: Results) -> float:
    """The largest difference, relative to the largest number; infinite for other shapes or numbers that are not finite
    elsewhere.
    """
    errors = [0.0]
    for ours, true in zip(found, exact, strict=True):
        if ours is None or true is None:
            rest = true if ours is None else ours
            errors.append(0.0 if rest is None or not rest.any() else torch.inf)
            continue
        if ours.shape != true.shape or (ours.isfinite() != true.isfinite()).any():
            return torch.inf
        difference = torch.where(true.isfinite(), ours.double() - true, 0.0).abs().max()
        errors.append(float(difference / (1 + true.nan_to_num(0, 0, 0).abs().max())))
    return max(errors)


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        kind: "replaced"; "fallback"; "no record"; "no numbers" where eager's own error is larger than what is looked
            for; "wrong"; "both wrong" where PyTorch alone is wrong as well.
        detail: errors and records.
    """

    kind: str
    detail: str = ""


def _run(case: Case, inputs: Sequence[Tensor]) -> Results | Exception:
    with capture() as graphs:
        try:
            return results(graphs.compile(case.function()), inputs)
        except Exception as raised:
            return raised


def outcome(case: Case) -> Outcome:
    """Compile a case and compare it."""
    inputs = tensors(WANTED[case.wanted], getattr(torch, case.dtype))
    allowed, largest = ROUNDING[case.dtype]
    exact_inputs = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    with training_on_the_cpu():
        ours = _run(case, inputs)
        records = list(sites())
        try:
            exact = results(case.function(reference=True), exact_inputs)
            eager = results(case.function(reference=True), inputs)
        except Exception as raised:
            return Outcome("fallback", f"eager raises {type(raised).__name__}")
        bound = 4 * error_of(eager, exact) + allowed
        if bound > largest or any(x is not None and x.isnan().any() for x in exact):
            return Outcome("no numbers")
        status = {record.status for record in records}
        kind = "no record" if not records else "replaced" if status == {"replaced"} else "fallback"
        if not isinstance(ours, Exception) and error_of(ours, exact) <= bound:
            return Outcome(kind)
        with dash_inductor.disabled():
            plain = _run(case, inputs)
    words = [f"{r.status} {r.reason.value if r.reason else ''} {r.detail}" for r in records]
    found = ours if isinstance(ours, Exception) else error_of(ours, exact)
    alone = plain if isinstance(plain, Exception) else error_of(plain, exact)
    text = f"{found!r}"[:300] + f" where PyTorch has {alone!r}"[:300] + f"; eager {bound}; {words}"
    same = type(ours) is type(plain) if isinstance(ours, Exception) else not isinstance(alone, float) or alone > bound
    return Outcome("both wrong" if same else "wrong", text)


def run(found: Sequence[Case]) -> tuple[Counter[str], list[tuple[Case, str]]]:
    """How often each outcome occurs, and the cases that are wrong."""
    kinds, wrong = Counter[str](), list[tuple[Case, str]]()
    for case in found:
        result = outcome(case)
        kinds[result.kind] += 1
        if result.kind == "wrong":
            wrong.append((case, result.detail))
    return kinds, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--form", default="")
    parser.add_argument("--only", default="", help="FORM/EDGE/OPERATOR/WANTED of a single case")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.only:
        print(outcome(Case(*options.only.split("/"))))
        return 0
    chosen = [case for case in sample(1 << 30, options.seed) if options.form in case.form][: options.cases]
    kinds: Counter[str] = Counter()
    for number, case in enumerate(chosen, 1):
        found = outcome(case)
        kinds[found.kind] += 1
        if found.kind in ("wrong", "no record") or (found.kind == "both wrong" and "Error" not in found.detail):
            print(f"{found.kind}: {case}: {found.detail}"[:900], flush=True)
        if number % 500 == 0:
            print(number, dict(kinds), flush=True)
    print(dict(kinds))
    return int(kinds["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
