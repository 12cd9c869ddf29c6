"""Random softmaxes with one more in the sum: right and wrong maxima, numbers, masks, uses of what is between.

``python -m tests.frontends.one_more_programs --cases 300 --seed 1`` runs many and prints those with wrong numbers.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.records.records import SiteRecord, sites

from ..support.graphs import capture, tensors

BATCH, HEADS, LENGTH, DIM = 2, 3, 12, 8
Step = Callable[..., Tensor]


def _visible(s: Tensor) -> Tensor:
    place = torch.arange(s.shape[-1])
    return place[: s.shape[-2], None] >= place


SCORES: dict[str, Step] = {
    "scaled": lambda s, bias, t: s * 0.25,
    "biased": lambda s, bias, t: s * 0.25 + bias,
    "bias of rows": lambda s, bias, t: s * 0.25 + bias[:, :, :1],
    "bias subtracted": lambda s, bias, t: s * 0.25 - bias[:, :1],
    "temperature": lambda s, bias, t: s * t,
    "divided": lambda s, bias, t: s / (t.abs() + 0.5),
    "capped": lambda s, bias, t: 3 * torch.tanh(s * 0.25 / 3),
    "lifted": lambda s, bias, t: s * 0.25 + 4,
}
MASKS: dict[str, Step] = {
    "none": lambda s: s,
    "causal": lambda s: s.masked_fill(~_visible(s), -math.inf),
    "lowest": lambda s: s.masked_fill(~_visible(s), torch.finfo(s.dtype).min),
    "added": lambda s: s + torch.zeros_like(_visible(s), dtype=s.dtype).masked_fill(~_visible(s), -math.inf),
    "some rows empty": lambda s: s.masked_fill(torch.arange(s.shape[-2])[:, None] < 3, -math.inf),
}
BOUNDS: dict[str, Step] = {
    "max": lambda s, r: s.max(-1, keepdim=True).values,
    "amax": lambda s, r: s.amax(-1, keepdim=True),
    "detached": lambda s, r: s.detach().amax(-1, keepdim=True),
    "clamped": lambda s, r: s.amax(-1, keepdim=True).clamp(min=0),
    "clamped at 1": lambda s, r: s.amax(-1, keepdim=True).clamp(min=1.0, max=2.0),
    "clamped detached": lambda s, r: s.detach().amax(-1, keepdim=True).clamp_min(0),
    "relu": lambda s, r: s.amax(-1, keepdim=True).relu(),
    "maximum": lambda s, r: torch.maximum(s.amax(-1, keepdim=True), torch.zeros(())),
    "over queries": lambda s, r: s.amax(-2, keepdim=True),
    "over queries detached": lambda s, r: s.detach().amax(-2, keepdim=True),
    "over heads": lambda s, r: s.amax(1, keepdim=True),
    "over heads detached": lambda s, r: s.detach().amax(1, keepdim=True),
    "over batch": lambda s, r: s.amax(0, keepdim=True),
    "over all": lambda s, r: s.amax((0, 1, 2, 3), keepdim=True),
    "over all, no dims": lambda s, r: s.max(),
    "over heads and keys": lambda s, r: s.amax((1, 3), keepdim=True),
    "over queries and keys": lambda s, r: s.amax((2, 3), keepdim=True),
    "mean": lambda s, r: s.mean(-1, keepdim=True),
    "given": lambda s, r: r,
    "first key": lambda s, r: s[..., :1],
}
SHIFTS: dict[str, Step] = {
    "shifted": lambda s, m: s - m,
    "shifted and halved": lambda s, m: (s - m) * 0.5,
    "shifted, then masked": lambda s, m: (s - m).masked_fill(~_visible(s), -math.inf),
    "added negative": lambda s, m: s + -m,
    "alpha": lambda s, m: torch.sub(s, m, alpha=2),
    "not": lambda s, m: s,
}
ONES: dict[str, Callable[..., Tensor | float]] = {
    "exp(-m)": lambda m, n, c: torch.exp(-m),
    "2 exp(-m)": lambda m, n, c: 2 * torch.exp(-m),
    "exp(-m) / 4": lambda m, n, c: torch.exp(-m) / 4,
    "-exp(-m) / 9": lambda m, n, c: -torch.exp(-m) / 9,
    "0 exp(-m)": lambda m, n, c: torch.exp(-m) * 0,
    "exp(0 - m)": lambda m, n, c: torch.exp(0 - m),
    "exp(1 - m)": lambda m, n, c: torch.exp(1 - m),
    "exp(-2m)": lambda m, n, c: torch.exp(-(2 * m)),
    "exp(-m / 2)": lambda m, n, c: torch.exp(-m * 0.5),
    "exp(m)": lambda m, n, c: torch.exp(m - 4),
    "exp(-m detached)": lambda m, n, c: torch.exp(-m.detach()),
    "n exp(-m)": lambda m, n, c: n.exp() * torch.exp(-m),
    "exp(n - m)": lambda m, n, c: torch.exp(n - m),
    "1": lambda m, n, c: torch.ones(()),
    "number 1": lambda m, n, c: 1.0,
    "number 0.1": lambda m, n, c: 0.1,
    "number 0": lambda m, n, c: 0,
    "number -0.01": lambda m, n, c: -0.01,
    "ones of keys": lambda m, n, c: torch.ones(1, 1, 1, LENGTH),
    "exp2(-m)": lambda m, n, c: torch.exp2(-m),
    "exp(-c)": lambda m, n, c: torch.exp(-c),
}
SUMS: dict[str, Step] = {
    "one first": lambda e, one: one + e.sum(-1, keepdim=True),
    "one last": lambda e, one: e.sum(-1, keepdim=True) + one,
    "alpha": lambda e, one: torch.add(e.sum(-1, keepdim=True), one, alpha=2),
    "over queries": lambda e, one: e.sum(-2, keepdim=True) + one,
    "detached": lambda e, one: e.sum(-1, keepdim=True).detach() + one,
    "one detached": lambda e, one: e.sum(-1, keepdim=True) + (one.detach() if isinstance(one, Tensor) else one),
    "twice": lambda e, one: e.sum(-1, keepdim=True) * 2 + one,
    "twice one": lambda e, one: e.sum(-1, keepdim=True) + one + one,
}
OUTPUTS: dict[str, Step] = {
    "plain": lambda e, d, v, s, m: (e / d) @ v,
    "divided last": lambda e, d, v, s, m: (e @ v) / d,
    "reciprocal": lambda e, d, v, s, m: (e * (1 / d)) @ v,
    "in float32": lambda e, d, v, s, m: (e / d).float().to(v.dtype) @ v,
    "dropout of 0": lambda e, d, v, s, m: F.dropout(e / d, 0.0) @ v,
    "and the sum": lambda e, d, v, s, m: (e / d) @ v + d.log(),
    "and the maximum": lambda e, d, v, s, m: (e / d) @ v + (m if m.dim() else m.expand(1, 1, 1, 1)).mean(-1, True),
    "and its rest": lambda e, d, v, s, m: (e / d) @ v + (1 - (e / d).sum(-1, keepdim=True)),
    "both": lambda e, d, v, s, m: (e / d) @ v + (e / e.sum(-1, keepdim=True)) @ v,
    "both, the other first": lambda e, d, v, s, m: (e / e.sum(-1, keepdim=True)) @ v - (e / d) @ v,
    "both multiplied": lambda e, d, v, s, m: (e / d * (e / e.sum(-1, keepdim=True))) @ v,
    "divided twice": lambda e, d, v, s, m: (e / d / d) @ v,
    "divided by both": lambda e, d, v, s, m: (e / d / e.sum(-1, keepdim=True)) @ v,
    "squared sum": lambda e, d, v, s, m: (e / (d * d)) @ v,
    "scores": lambda e, d, v, s, m: (e / d) @ v + s.mean(-1, keepdim=True),
}
WANTED: dict[str, tuple[int, ...]] = {
    "all": (0, 1, 2, 3, 4, 5, 6), "none": (), "value": (2,), "query": (0,), "query and key": (0, 1), "bias": (3,),
    "query, key and value": (0, 1, 2),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One program: a choice for each of its parts."""

    scores: str = "scaled"
    mask: str = "none"
    bound: str = "amax"
    shift: str = "shifted"
    one: str = "exp(-m)"
    sum: str = "one last"
    output: str = "plain"
    wanted: str = "query, key and value"
    dtype: str = "float32"
    sizes: str = "static"
    transposed: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, t: Tensor, r: Tensor, n: Tensor) -> Tensor:
        product = (k @ q.mT).mT if self.transposed else q @ k.mT
        s = MASKS[self.mask](SCORES[self.scores](product, bias, t))
        m = BOUNDS[self.bound](s, r)
        e = torch.exp(SHIFTS[self.shift](s, m))
        return OUTPUTS[self.output](e, SUMS[self.sum](e, ONES[self.one](m, n, r)), v, s, m)


CHOICES: dict[str, list[str]] = {
    "scores": [*SCORES], "mask": [*MASKS], "bound": [*BOUNDS], "shift": [*SHIFTS], "one": [*ONES], "sum": [*SUMS],
    "output": [*OUTPUTS], "wanted": [*WANTED], "dtype": ["bfloat16", "float16"], "sizes": ["dynamic"],
}  # fmt: skip


def sample(count: int, seed: int) -> Iterator[Case]:
    """So many cases, which a seed draws; each differs from the plain one in at most three parts."""
    draw = random.Random(seed)
    for _ in range(count):
        changed = {part: draw.choice(CHOICES[part]) for part in draw.sample([*CHOICES], draw.choice((1, 2, 2, 3)))}
        found = Case(**changed, transposed=draw.random() < 0.2)
        wide = found.one == "ones of keys" or found.bound.startswith("over") or found.sum == "over queries"
        yield replace(found, output="plain") if wide else found  # sums of all pairs do not fit to other outputs


def inputs(case: Case) -> list[Tensor]:
    shape = (BATCH, HEADS, LENGTH, DIM)
    plane = (1, HEADS, LENGTH, LENGTH)
    shapes = shape, shape, shape, plane, (HEADS, 1, 1), (BATCH, HEADS, LENGTH, 1), (1,)
    found = [x.to(getattr(torch, case.dtype)) for x in tensors(*shapes)]
    return [x.detach().requires_grad_(number in WANTED[case.wanted]) for number, x in enumerate(found)]


def results(function: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor | None]:
    """The output, and the gradients of all inputs that want them; None for those that get none."""
    output = function(*given)
    wanting = [x for x in given if x.requires_grad]
    if not output.requires_grad:
        return [output, *(None for _ in wanting)]
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, wanting, gradient, allow_unused=True)]


def outcome(case: Case) -> tuple[list[SiteRecord], float, float]:
    """The records of a program, and the largest relative errors of ours and of eager; infinite where a number
    should be finite.  Rows without keys are NaN in programs that subtract their maximum, minus infinity.
    """
    given = inputs(case)
    with capture() as graphs:
        ours = results(graphs.compile(case, dynamic=case.sizes == "dynamic" or None), given)
    eager = results(case, given)
    exact = results(case, [x.detach().double().requires_grad_(x.requires_grad) for x in given])
    return list(sites()), _error(ours, exact), _error(eager, exact)


def _error(found: list[Tensor | None], exact: list[Tensor | None]) -> float:
    worst = 0.0
    largest = max(float(x.nan_to_num(0, 0, 0).abs().max()) for x in exact if x is not None)
    for ours, true in zip(found, exact, strict=True):
        if ours is None or true is None:
            rest = true if ours is None else ours
            worst = max(worst, 0.0 if rest is None or not rest.any() else math.inf)
            continue
        if ours.shape != true.shape or (~ours.isfinite() & true.isfinite()).any():
            return math.inf
        error = torch.where(true.isfinite(), ours.double() - true, 0.0).abs().max()
        worst = max(worst, float(error) / (largest + 1e-9))
    return worst


def is_right(ours: float, eager: float) -> bool:
    """Whether an error is that of rounding, given the error of the program that is not compiled."""
    return ours <= 4 * eager + 2e-6


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    plain, counts = Case(), dict[str, int]()
    for case in sample(args.cases, args.seed):
        shown = {f.name: getattr(case, f.name) for f in fields(case) if getattr(case, f.name) != getattr(plain, f.name)}
        try:
            records, ours, eager = outcome(case)
        except Exception as problem:  # a program that breaks is what this looks for
            print("BREAKS", shown, type(problem).__name__, str(problem)[:300], flush=True)
            continue
        status = ",".join(record.status for record in records) or "no record"
        counts[status] = counts.get(status, 0) + 1
        if not is_right(ours, eager):
            print("WRONG", status, shown, f"{ours:.2e} {eager:.2e}", [r.detail for r in records], flush=True)
    print(counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
