"""Attention whose scores have a factor that is no constant: a number for each head, query or key, learned or not.

``python -m tests.frontends.factor_programs`` runs every case and prints those that are wrong or not replaced.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import dash_inductor
from dash_inductor.records.records import SiteRecord, sites

from ..support.flex import Case as FlexCase
from ..support.flex import Mod, Sizes, causal, training
from ..support.graphs import capture, tensors

SIZES = Sizes(batch=2, heads=4, kv_heads=4, q_len=24, kv_len=24)
SHAPES = {
    "constant": (1, 1, 1, 1), "head": (1, 4, 1, 1), "query": (1, 1, 24, 1), "head and query": (1, 4, 24, 1),
    "batch and query": (2, 1, 24, 1), "batch, head and query": (2, 4, 24, 1), "key": (1, 1, 1, 24),
    "batch and key": (2, 1, 1, 24), "head and key": (1, 4, 1, 24),
}  # fmt: skip
"""What a factor may depend on, and its shape."""

FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "times": lambda s, f: s * f,
    "exp": lambda s, f: s * f.exp(),
    "divided": lambda s, f: s / (f.abs() + 1),
    "constants": lambda s, f: (s * 0.5 * f) * 3.0,
    "softcap": lambda s, f: 2 * torch.tanh(f * s / 2),
}
MASKS = ("none", "causal", "padding")
DTYPES = ("float32", "bfloat16", "autocast")
ALLOWED = {"float32": 2e-5, "bfloat16": 2e-2, "autocast": 2e-2}
"""By dtype, the error that is allowed relative to the largest number of a result, whatever PyTorch's error is."""
_NAMES = ("output", "dq", "dk", "dv", "gradient of the factor")


def padding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Whether a query sees a key; every query sees one."""
    return k < SIZES.kv_len - 5 * b - 3


@dataclass(frozen=True)
class Program:
    """One attention.

    Attributes:
        frontend: "flex" or "by hand".
        depends: the key of `SHAPES`.
        form, mask: the keys of `FORMS` and `MASKS`.
        dtype: of query, key, value and the factor; "autocast" computes in bfloat16 from float32.
        learned: whether the factor has a gradient.
    """

    frontend: str
    depends: str
    form: str
    mask: str
    dtype: str
    learned: bool

    @staticmethod
    def all() -> Iterator[Program]:
        for parts in itertools.product(("flex", "by hand"), SHAPES, FORMS, MASKS, DTYPES, (True, False)):
            if parts[0] == "by hand" or parts[4] != "autocast":  # FlexAttention takes no part in autocast
                yield Program(*parts)

    def inputs(self) -> list[Tensor]:
        """Query, key, value and the factor, some of whose numbers are 0 or negative."""
        dtype = torch.float32 if self.dtype == "autocast" else getattr(torch, self.dtype)
        shape = (SIZES.batch, SIZES.heads, SIZES.q_len, SIZES.dim)
        found = tensors(shape, shape, shape, SHAPES[self.depends], dtype=dtype)
        factor = found[3].detach()
        if factor.numel() > 1:
            factor.view(-1)[::5] = 0.0
        return [*found[:3], factor.requires_grad_(self.learned)]

    def mod(self, factor: Tensor) -> Mod:
        shape = factor.shape
        vector = factor.squeeze() if factor.numel() > 1 else factor.view(())
        form = FORMS[self.form]

        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            places = tuple(place for place, n in zip((b, h, q, k), shape, strict=True) if n > 1)
            return form(s, vector[places] if places else vector)

        return score_mod

    def by_hand(self, q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "autocast"):
            scores = FORMS[self.form](q @ k.mT * 0.25, factor)
            if self.mask != "none":
                size = scores.shape
                grid = [torch.arange(n).view([n if i == d else 1 for i in range(4)]) for d, n in enumerate(size)]
                visible = (causal if self.mask == "causal" else padding)(*grid)
                scores = scores.masked_fill(~visible, -math.inf)
            return scores.softmax(-1).to(v.dtype) @ v


def outcome(program: Program) -> tuple[SiteRecord, str]:
    """The record of a program, and what is wrong with its results: "" if nothing is."""
    inputs = program.inputs()
    ours, record = _compiled(program, inputs)
    theirs: list[Tensor] | None = None
    if program.frontend == "by hand":
        with dash_inductor.disabled():
            theirs, _ = _compiled(program, inputs)
    return record, _compare(program, ours, theirs, inputs)


def step(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of all inputs that want one, for one fixed gradient of the output."""
    output = function(*inputs)
    grad_out = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, [x for x in inputs if x.requires_grad], grad_out)]


def _compare(program: Program, ours: list[Tensor], theirs: list[Tensor] | None, inputs: list[Tensor]) -> str:
    doubles = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    true = step(program.by_hand, doubles)  # it defines what FlexAttention computes, too
    for number, (found, wanted) in enumerate(zip(ours, true, strict=True)):
        largest = float(wanted.abs().max().clamp(min=1))
        if number == 4:
            largest += _summed(program, doubles)
        allowed = ALLOWED[program.dtype] * largest
        if theirs is not None:
            allowed += 2 * float((theirs[number] - wanted).abs().max())
        error = float((found - wanted).abs().max())
        if not error <= allowed:
            return f"{_NAMES[number]} differs by {error}, where {allowed} is allowed"
    return ""


def _summed(program: Program, doubles: list[Tensor]) -> float:
    """The size of a sum of what one number of the factor has as gradients from all scores, if their signs are random.

    These may cancel in the gradient of the factor, but not their rounding errors.
    """
    *rest, factor = doubles
    size = (SIZES.batch, SIZES.heads, SIZES.q_len, SIZES.kv_len)
    terms = step(program.by_hand, [*rest, factor.detach().expand(size).clone().requires_grad_()])[-1]
    summed = [dim for dim, n in enumerate(factor.shape) if n == 1]
    return float(terms.square().sum(summed).sqrt().max()) if summed else 0.0


def _compiled(program: Program, inputs: list[Tensor]) -> tuple[list[Tensor], SiteRecord]:
    if program.frontend == "by hand":
        with capture() as graphs:
            found = step(graphs.compile(program.by_hand), inputs)
        return found, sites()[-1] if sites() else None  # type: ignore[return-value]  # none where it is disabled
    factor = inputs[3]
    mask = {"none": None, "causal": causal, "padding": padding}[program.mask]
    batch = SIZES.batch if program.mask == "padding" else None
    case = FlexCase(program.mod(factor), mask, SIZES, (factor,) * program.learned, batch)
    with training() as graphs:
        run = graphs.compile(case.function())
        found = step(lambda q, k, v, _: run(q, k, v), inputs)
    return found, sites()[-1]


def sample(count: int, seed: int) -> list[Program]:
    """So many programs, which a seed draws."""
    return random.Random(seed).sample(list(Program.all()), count)


def main() -> int:
    torch.use_deterministic_algorithms(True)
    wrong = 0
    for program in sample(int(sys.argv[1]), int(sys.argv[2])) if sys.argv[1:] else Program.all():
        record, error = outcome(program)
        if error or record.status != "replaced":
            wrong += bool(error)
            print(program, record.status, record.detail, error, flush=True)
    print(f"{wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
