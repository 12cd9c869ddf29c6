"""Rewrites inside of nested graphs, and of graphs with checkpoints and compiled autograd, beside PyTorch's."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from ..support import attention_frontends, by_hand
from ..support.attention_frontends import ENTRIES
from ..support.fuzzed import BY_DYNAMO, COMPILED_AUTOGRAD, Case, cases, check
from ..support.graphs import tensors
from ..support.shown_memory import WRITES, Program, results_of
from .nested import NESTS
from .rewritten_programs import PROGRAMS, tensors_of

ATTENTION = {name: entry for name, entry in ENTRIES.items() if entry.exact is None}
WITH_VIEWS = ("inverses", "added", "logits and loss")
"""Programs some of whose results share memory, which higher-order operators refuse."""


OUTER = {
    "region": ["checkpoint", "cond"], "cond": ["region"], "while": ["region", "cond"], "scan": ["region", "cond"],
}  # fmt: skip
"""What may be around an operator: PyTorch loses results of a region in a region, and knows no other nests."""


def _copied(program: Program) -> Program:
    """A program whose results are copies."""
    return lambda *given: tuple(result.clone() for result in results_of(program, given))


def _layout(r: random.Random, tensor: Tensor) -> Tensor:
    """The elements of a tensor, contiguous or not."""
    how = r.choice(["as it is", "as it is", "transposed", "apart"]) if tensor.dim() > 1 else "as it is"
    made = tensor.detach()
    if how == "transposed":
        made = made.transpose(0, -1).contiguous().transpose(0, -1)
    elif how == "apart":
        made = torch.stack([made, made], 1)[:, 0]
    return made


def _case(
    r: random.Random, name: str, program: Program, given: list[Tensor], nests: list[str], inputs: bool = False
) -> Case:
    """A case of a program in nests, the innermost first.

    Args:
        inputs: whether it may write to inputs past autograd: attention of ours may read others than PyTorch's.
    """
    meaning = program
    for nest in nests:
        program, meaning = NESTS[nest](program, True), NESTS[nest](meaning, False)
    kind = r.choice(["training", "training", "some gradients", "inference"])
    wanted = [t.requires_grad and kind != "inference" and (kind == "training" or r.random() < 0.5) for t in given]
    laid = given if "while" in nests else [_layout(r, t) for t in given]  # where gradients must be as inputs
    made = [t.detach().requires_grad_(want) for t, want in zip(laid, wanted, strict=True)]
    written = (r.choice([0, 0, -1 if inputs else 0]), r.choice([*WRITES]))
    dynamic = r.random() < 0.2
    words = f"{name} in {nests}, {wanted}, {[t.stride() for t in made]}, {written}, {dynamic}"
    return Case(words, program, made, dynamic, meaning=meaning, rounding=64, written=written)


def others(r: random.Random, nests: list[str]) -> Case:
    name = r.choice([*PROGRAMS])
    program = PROGRAMS[name].program
    if name in WITH_VIEWS or r.random() < 0.3:
        program = _copied(program)
    return _case(r, name, program, tensors_of(name), nests, inputs=True)


def attention(r: random.Random, nests: list[str]) -> Case:
    if r.random() < 0.5:
        name = r.choice([*ATTENTION])
        entry = ENTRIES[name]
        return _case(r, name, entry.function, [*attention_frontends.tensors_of(entry).values()], nests)
    name = r.choice([*by_hand.PROGRAMS])
    hand = by_hand.PROGRAMS[name]
    return _case(r, f"by hand {name}", hand.function, tensors(*hand.shapes), nests)


def drawn_case(r: random.Random, nests: list[str]) -> Case:
    return r.choice([others, attention])(r, nests)


@pytest.mark.parametrize("nest", NESTS)
def test_nested(nest: str) -> None:
    """In one operator, or in a second one as well."""

    def make(r: random.Random) -> Case:
        more = OUTER.get(nest, ["region", "checkpoint", "cond"])
        return drawn_case(r, [nest, *([r.choice(more)] if r.random() < 0.2 else [])])

    check(make, f"{nest} around", cases(2), least=0.3, way=BY_DYNAMO)


def test_compiled_autograd() -> None:
    def make(r: random.Random) -> Case:
        return drawn_case(r, [r.choice(["alone", "alone", "region", "checkpoint", "cond"])])

    check(make, "compiled autograd", cases(2), least=0.3, way=COMPILED_AUTOGRAD)
