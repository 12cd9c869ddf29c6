"""Random mask_mod and score_mod programs, and whether what is read of them is what they compute.

``python -m tests.frontends.mod_programs --programs 5000 --seed 7`` prints those that are read wrongly.

A program is a function of single numbers, as FlexAttention calls them.  Its graph is made as PyTorch makes it, and
written into a graph around it.  What is written there is run, and compared with the program for all pairs; masks are
read as components, and scores as their form, which must compute the same.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from dash_inductor.frontends.attention import NotReadable
from dash_inductor.frontends.mods import Mod, Plane
from dash_inductor.frontends.scores import read_score
from dash_inductor.graph.temporaries import Temporaries, erase
from dash_inductor.masks import recognition

from ..support.flex import Data, Sizes
from ..support.mask_graphs import assert_visible, visible_by

SIZES = (Sizes(2, 4, 2, 12, 20, 8), Sizes(2, 4, 2, 20, 20, 8), Sizes(1, 4, 4, 17, 9, 8), Sizes(2, 4, 4, 1, 13, 8))
NAMES = ("ids", "ids_of_row", "starts", "ends", "lengths", "valid", "pairs", "of_heads", "slopes", "plane", "distances")


@dataclass(frozen=True)
class Program:
    """A mod.

    Args:
        text: an expression in b, h, q, k and names of `Data`, and in s if it is a score_mod.
        sizes: of the call.
    """

    text: str
    sizes: Sizes

    @property
    def scores(self) -> bool:
        return self.text.startswith("S:")

    @property
    def names(self) -> list[str]:
        """The tensors that it reads."""
        return [name for name in NAMES if f"{name}[" in self.text.replace("ids_of_row", "@") or f"{name}[" in self.text]

    def compute(self, *given: Any) -> Tensor:
        """The program: of s if it is a score_mod, of b, h, q, k, and of its tensors."""
        places = ["s"] * self.scores + ["b", "h", "q", "k", *self.names]
        scope = {"torch": torch, "inf": float("inf"), **dict(zip(places, given, strict=True))}
        found: Tensor = eval(self.text.removeprefix("S:"), scope)
        return found


class Writer:
    """Writes one random program."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)

    def number(self) -> int:
        return self.rng.choice((0, 1, 1, 2, 3, 5, 7, 9, -1, -4))

    def integer(self, depth: int = 2) -> str:
        simple = ("q", "k", "q", "k", "(q - k)", "h", "b", "ids[q]", "ids[k]", "ids_of_row[b, q]", "ids_of_row[b, k]",
                  "lengths[b]", "starts[b, ids_of_row[b, q]]", "ends[b, k]", "ends[b, q]")  # fmt: skip
        if not depth or self.rng.random() < 0.6:
            return self.pick(*simple)
        one, c = self.integer(depth - 1), abs(self.number()) + 1
        return self.pick(
            f"({one} + {self.number()})", f"({one} // {c})", f"({one} % {c})", f"({one} * {c})", f"{one}.abs()",
            f"torch.minimum({one}, {self.integer(depth - 1)})", f"({one} - {self.integer(depth - 1)})",
            f"torch.where({self.truth(depth - 1)}, {one}, {self.integer(depth - 1)})", f"{one}.clamp(0, {c})",
            f"(-{one})",
        )  # fmt: skip

    def truth(self, depth: int = 2) -> str:
        simple = (
            "(q >= k)", "(q >= k)", f"(q - k < {abs(self.number()) + 2})", "(ids[q] == ids[k])", "valid[b, k]",
            "(ids_of_row[b, q] == ids_of_row[b, k])", "(k < lengths[b])", "(k >= starts[b, ids_of_row[b, q]])",
            "(q <= ends[b, k])", "pairs[q, k]", "of_heads[h, q, k]",
            "pairs[0, k]", "pairs[k.clamp(max=3), 1]", "valid[0, k]",
            f"({self.integer(1)} {self.pick('<', '<=', '>', '>=', '==', '!=')} {self.integer(1)})",
        )  # fmt: skip
        if not depth or self.rng.random() < 0.3:
            return self.pick(*simple)
        one, other = self.truth(depth - 1), self.truth(depth - 1)
        return self.pick(*[f"({one} & {other})"] * 5, f"({one} | {other})", f"(~{one})", f"({one} ^ {other})")

    def addend(self) -> str:
        c = abs(self.number()) + 1
        return self.pick(
            "plane[h, q, k]", "plane[h, q, 0]", "plane[0, 1, k]", f"slopes[h] * ({self.integer(1)})",
            f"({self.integer(1)}) / {c}", f"(q - k) * 0.{c}",
            f"torch.sin({self.integer(1)} * 0.1)", "distances[h, (q - k).clamp(0, 8)]", f"plane[h, q, k] * {c}.0",
            f"torch.where({self.truth(1)}, 0.0, -inf)", "-torch.exp2(-(h + 1.0)) * (q - k).abs()",
            "slopes[h].to(torch.bfloat16) * (q - k)",
        )  # fmt: skip

    def factor(self) -> str:
        """A factor that is no constant, not negative."""
        return self.pick(
            "slopes[h]", "slopes[h].exp()", "plane[h, q, 0].abs()", "plane[h, 0, k].sigmoid()", "(lengths[b] + 1.0)",
            "valid[b, k]", "torch.log(q + 2.0)", "plane[h, q, k].abs()", "(h + 1)",
        )  # fmt: skip

    def score(self) -> str:
        text, c = "s", self.rng.choice((0.5, 2.0, 3.0, 1.5))
        steps = [
            ("{text} * {c}", "{text} / {c}", "{text} * {unknown}", "{text} / ({unknown} + 3)"),
            ("{c} * torch.tanh({text} / {c})", "torch.tanh({text}) * {c}"),
            ("{text} + {f}", "{f} + {text}", "{text} - {f}"),
            ("{text} + {f}", "{text} - {f}"),
            ("torch.where({cond}, {text}, -inf)", "torch.where({cond}, -inf, {text})"),
        ]
        chosen = [step for step in steps if self.rng.random() < 0.4]
        if self.rng.random() < 0.2:
            self.rng.shuffle(chosen)
        if self.rng.random() < 0.2:
            chosen.append(("{text} * slopes[h]", "torch.maximum({text}, s)", "torch.sigmoid({text})", "{f}"))
        for step in chosen:
            made = {"f": self.addend(), "cond": self.truth(1), "unknown": self.factor()}
            text = f"({self.pick(*step).format(text=text, c=c, **made)})"
        return text

    def program(self) -> Program:
        sizes = self.rng.choice(SIZES)
        return Program(f"S:{self.score()}" if self.rng.random() < 0.4 else self.truth(3), sizes)


def outcome(program: Program) -> str:
    """Read and check a program: "read" or "fallback", of a mask or a score.

    Raises:
        AssertionError: what was read is not what the program computes.
    """
    kind = "score" if program.scores else "mask"
    sizes = program.sizes
    data = Data.of(sizes)
    tensors = [getattr(data, name) for name in program.names]
    query, key = (
        torch.zeros(sizes.batch, sizes.heads, sizes.q_len, 8),
        torch.zeros(sizes.batch, sizes.kv_heads, sizes.kv_len, 8),
    )
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t) for t in (query, key, *tensors)]
    around = make_fx(lambda query, key, *rest: query, select_decomp_table())(*fakes)
    places = around.graph.find_nodes(op="placeholder")
    numbers = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    with TransformGetItemToIndex():
        inner = make_fx(lambda *given: program.compute(*given), select_decomp_table(), tracing_mode="fake")(
            *([torch.zeros(())] * program.scores), *numbers, *tensors
        )
    temporaries, plane = Temporaries(around.graph), Plane(places[0], places[1])

    def write(mod: Mod, node: Node, floats: bool = False) -> Node:
        return mod.write(node, plane, temporaries, places[0], floats=floats)

    def value(node: Node) -> Tensor:
        run = Interpreter(around, garbage_collect_values=False)
        run.run(query, key, *tensors)
        found: Tensor = run.env[node]
        return found

    size = (sizes.batch, sizes.heads, sizes.q_len, sizes.kv_len)
    grid = [torch.arange(n).view([n if i == d else 1 for i in range(4)]).expand(size) for d, n in enumerate(size)]
    try:
        mod = Mod(f"{kind}_mod", inner, places[2:])
        if not program.scores:
            node = write(mod, mod.result)
            around.recompile()
            true = program.compute(*grid, *tensors).expand(size)
            assert torch.equal(value(node).expand(size), true), "written wrongly"
            _check_components(around, node, places, (query, key, *tensors), true, value)
            return "mask read"
        form = read_score(mod)
        factors = [(write(mod, factor.node, True), factor.inverse) for factor in form.factors]
        parts = [(write(mod, part.node, True), part.factor) for part in form.added]
        conditions = [(write(mod, part.node), part.where) for part in form.hidden]
    except NotReadable:
        erase(around.graph)
        assert len(around.graph.nodes) == len(places) + 1
        return f"{kind} not replaced"
    around.recompile()
    scores = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = scores * form.factor
    for node, inverse in factors:
        found = found / value(node) if inverse else found * value(node)
    if form.softcap is not None:
        found = form.softcap * torch.tanh(found / form.softcap)
    for node, factor in parts:
        found = found + factor * value(node)
    for node, where in conditions:
        found = torch.where(value(node) == where, -torch.inf, found)
    true = program.compute(scores, *grid, *tensors)
    low = 0.05 if "bfloat16" in program.text else 1e-5
    assert torch.allclose(found, true.double(), rtol=low, atol=low), "another score"
    return "score read"


def _check_components(
    around: GraphModule, node: Node, places: list[Node], inputs: tuple[Tensor, ...], true: Tensor, value: Any
) -> None:
    result = recognition.recognise(node, query=places[0], key=places[1])
    recognition.forget(around.graph)
    if result.components is not None:
        assert_visible(
            true, visible_by(around, result.components, inputs, value), f"{result.components} is not the mask"
        )


def run(seed: int, count: int) -> tuple[Counter[str], list[tuple[Program, Exception]]]:
    """Outcomes of the programs of a seed, and those that were read wrongly."""
    outcomes: Counter[str] = Counter()
    wrong = []
    for number in range(count):
        program = Writer(random.Random(f"{seed}/{number}")).program()
        try:
            outcomes[outcome(program)] += 1
        except Exception as error:
            wrong.append((program, error))
    return outcomes, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    options = parser.parse_args()
    outcomes, wrong = run(options.seed, options.programs)
    for program, error in wrong:
        print(f"{program}\n    {type(error).__name__}: {error}\n")
    print(dict(outcomes))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
