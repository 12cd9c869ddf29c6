"""Products of value and of combined probabilities, as of differential attention, ``(P1 - c * P2) @ V``.

``python -m tests.frontends.combination_programs`` runs every case and prints those that are wrong or not replaced.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dash_inductor
from dash_inductor.records.records import SiteRecord, sites

from ..support.graphs import JointGraphs, capture, tensors

BATCH, HEADS, LENGTH, DIM = 2, 4, 24, 16
Maps = tuple[Tensor, ...]
Softmax = Callable[[Tensor, Tensor], Tensor]

FORMS: dict[str, Callable[[Softmax, Tensor, Tensor, int], Maps]] = {
    "softmaxes": lambda softmax, q, k, n: tuple(map(softmax, q.chunk(n, 1), k.chunk(n, 1))),
    "pairs": lambda softmax, q, k, n: softmax(q, k).unflatten(1, (-1, n)).unbind(2),
    "selected": lambda softmax, q, k, n: _selected(softmax(q, k).unflatten(1, (-1, n)), n),
    "halves": lambda softmax, q, k, n: softmax(q, k).chunk(n, 1),
    "sliced": lambda softmax, q, k, n: _sliced(softmax(q, k), n),
}
"""How maps are made of query and key, which have the heads of all maps."""
COMBINED: dict[str, Callable[[Maps, Any], Tensor]] = {
    "difference": lambda p, c: p[0] - c * p[1],
    "factor behind": lambda p, c: p[0] - p[1] * c,
    "sum": lambda p, c: p[0] + c * p[1],
    "of a sum": lambda p, c: (p[0] + p[1]) * c,
    "negated": lambda p, c: -c * p[1] + p[0],
    "both scaled": lambda p, c: c * p[0] * 2.0 - (1 - c) * p[1] / 3,
    "twice": lambda p, c: c * (0.5 * p[0] - c * p[1]),
    "three": lambda p, c: p[0] - c * (p[1] - 0.5 * p[2]),
}
FACTORS: dict[str, tuple[int, ...]] = {
    "scalar": (), "one": (1,), "head": (HEADS, 1, 1), "query": (LENGTH, 1), "all": (BATCH, HEADS, LENGTH, 1),
    "number": (),
}  # fmt: skip
"""Shapes of the factor; the last is a number of the program, which has no gradient."""
NUMBER = 0.75
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda weights, value: weights @ value,
    "einsum": lambda weights, value: torch.einsum("bhqk,bhkd->bhqd", weights, value),
}
MASKS = ("none", "causal", "padding", "bias")
DTYPES = ("float32", "bfloat16", "rounded", "wide", "autocast")
"""Of query, key, value and the factor.  In bfloat16, "rounded" probabilities are computed in float32, "wide" ones are
combined in it, too; "autocast" computes in bfloat16 from float32."""
TRAINED = ("all", "not the factor", "not the second map", "not value", "value alone", "the factor alone", "nothing")
CALLS = ("plain", "checkpoint", "dynamic")
_NAMES = ("query", "key", "value", "factor")


def _selected(maps: Tensor, number: int) -> Maps:
    return tuple(maps[:, :, place] for place in range(number))


def _sliced(maps: Tensor, number: int) -> Maps:
    size = maps.shape[1] // number  # a slice may begin before the first element
    return tuple(maps[:, place * size or -99 : (place + 1) * size] for place in range(number))


@dataclass(frozen=True)
class Program:
    """One product.

    Attributes:
        form, combined, factor, product: the keys of `FORMS`, `COMBINED`, `FACTORS` and `PRODUCTS`.
        mask, dtype, trained, call: elements of `MASKS`, `DTYPES`, `TRAINED` and `CALLS`.
        groups: how many query heads share a key head.
    """

    form: str = "softmaxes"
    combined: str = "difference"
    factor: str = "scalar"
    mask: str = "causal"
    dtype: str = "float32"
    trained: str = "all"
    groups: int = 1
    call: str = "plain"
    product: str = "matmul"

    @staticmethod
    def all() -> Iterator[Program]:
        for parts in itertools.product(FORMS, COMBINED, FACTORS, MASKS, DTYPES, TRAINED, (1, 2), CALLS, PRODUCTS):
            program = Program(*parts)
            if not program.gradients_differ:
                yield program

    @property
    def gradients_differ(self) -> bool:
        """Whether maps of one softmax have gradients that keep it: other ones than value, or expanded by Inductor."""
        detached = self.trained == "not the second map" and self.form != "softmaxes"
        return detached or (self.form, self.combined) == ("halves", "of a sum")

    @property
    def maps(self) -> int:
        """How many maps are combined."""
        return 3 if self.combined == "three" else 2

    def inputs(self) -> list[Tensor]:
        """Query, key, value and the factor."""
        dtype = torch.float32 if self.dtype in ("float32", "autocast") else torch.bfloat16
        heads, shared = self.maps * HEADS, HEADS // self.groups
        found = tensors(
            (BATCH, heads, LENGTH, DIM), (BATCH, self.maps * shared, LENGTH, DIM), (BATCH, shared, LENGTH, 2 * DIM),
            FACTORS[self.factor], dtype=dtype,
        )  # fmt: skip
        return [x.detach().requires_grad_(self.trains(name)) for x, name in zip(found, _NAMES, strict=True)]

    def trains(self, name: str) -> bool:
        """Whether an input has a gradient."""
        if name == "factor" and self.factor == "number":
            return False
        if self.trained.endswith("alone"):
            return name in self.trained
        return self.trained != "nothing" and (not self.trained.startswith("not") or name not in self.trained)

    def run(self, q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
        """The program."""
        call = self._checkpointed if self.call == "checkpoint" else self._product
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "autocast" and q.dtype == torch.float32):
            return call(q, k, v, c)

    def _checkpointed(self, *inputs: Tensor) -> Tensor:
        found: Tensor = checkpoint(self._product, *inputs, use_reentrant=False)
        return found

    def _product(self, q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(self.groups, 1) for x in (k, v))
        maps = FORMS[self.form](self._softmax, q, k, self.maps)
        if self.trained == "not the second map":
            maps = maps[0], maps[1].detach(), *maps[2:]
        factor: Any = NUMBER if self.factor == "number" else c
        return PRODUCTS[self.product](COMBINED[self.combined](maps, factor).to(v.dtype), v)

    def _softmax(self, q: Tensor, k: Tensor) -> Tensor:
        scores, place = q @ k.mT * DIM**-0.5, torch.arange(k.shape[2])
        if self.mask == "causal":
            scores = scores.masked_fill(place > place[:, None], -math.inf)
        elif self.mask == "padding":
            scores = scores.masked_fill(place >= place.shape[0] - 5, -math.inf)
        elif self.mask == "bias":
            scores = scores + (place[:, None] - place).abs().to(scores.dtype) * -0.125
        wide = torch.promote_types(q.dtype, torch.float32)
        found = scores.softmax(-1, dtype=wide if self.dtype in ("rounded", "wide") else None)
        return found.to(q.dtype) if self.dtype == "rounded" else found


@dataclass(frozen=True)
class Outcome:
    """What becomes of a program: its records, its graphs, and what is wrong with its results ("" if nothing is)."""

    records: list[SiteRecord]
    graphs: JointGraphs
    wrong: str


def outcome(program: Program) -> Outcome:
    """Compile a program with and without dash_inductor, and compare both with double precision."""
    inputs = program.inputs()
    ours, graphs = _compiled(program, inputs)
    records = list(sites())
    with dash_inductor.disabled():
        theirs, _ = _compiled(program, inputs)
    true = step(program.run, [x.detach().double().requires_grad_(x.requires_grad) for x in inputs])
    names = ["output", *(name for name in _NAMES if program.trains(name))]
    for name, found, other, wanted in zip(names, ours, theirs, true, strict=True):
        assert (found.shape, found.dtype, found.stride()) == (other.shape, other.dtype, other.stride()), program
        largest = float(wanted.abs().max().clamp(min=1)) + (_summed(program, inputs) if name == "factor" else 0.0)
        allowed = (2e-5 if program.dtype == "float32" else 2e-2) * largest
        allowed += 2 * float((other - wanted).abs().max())
        error = float((found - wanted).abs().max())
        if not error <= allowed:
            return Outcome(records, graphs, f"{name} differs by {error}, where {allowed} is allowed")
    return Outcome(records, graphs, "")


def _summed(program: Program, inputs: list[Tensor]) -> float:
    """The size of a sum of what one number of the factor has as gradients from all rows, if their signs are random.

    These may cancel in the gradient of the factor, but not their rounding errors.
    """
    *rest, factor = (x.detach().double() for x in inputs)
    size = (BATCH, HEADS, LENGTH, 1)
    terms = step(program.run, [*rest, factor.expand(size).clone().requires_grad_()])[-1]
    shape = (1,) * (4 - factor.dim()) + factor.shape
    summed = [dim for dim, n in enumerate(shape) if n == 1]
    return float(terms.square().sum(summed).sqrt().max())


def step(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of all inputs that want one, for one fixed gradient of the output."""
    output, wanted = function(*inputs), [x for x in inputs if x.requires_grad]
    grad_out = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return [output.detach(), *(torch.autograd.grad(output, wanted, grad_out) if wanted else ())]


def _compiled(program: Program, inputs: list[Tensor]) -> tuple[list[Tensor], JointGraphs]:
    if program.call == "dynamic":
        for x in inputs:
            for dim in (dim for dim, size in enumerate(x.shape) if size == LENGTH):
                torch._dynamo.mark_dynamic(x, dim)
    with capture() as graphs:
        return step(graphs.compile(program.run), inputs), graphs


def sample(count: int, seed: int) -> list[Program]:
    """So many programs, which a seed draws."""
    return random.Random(seed).sample(list(Program.all()), count)


def main() -> int:
    torch.use_deterministic_algorithms(True)
    wrong = 0
    for program in sample(int(sys.argv[1]), int(sys.argv[2])) if sys.argv[1:] else Program.all():
        found = outcome(program)
        kept = [record.detail for record in found.records if record.status != "replaced"]
        if found.wrong or kept or not found.records:
            wrong += bool(found.wrong)
            print(program, found.wrong, kept, flush=True)
    print(f"{wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
