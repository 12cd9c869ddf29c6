"""Run after `forks.FAKE_GPU`: which graphs of fake tensors of two GPUs stay on the device of their tensors.

    python -m tests.graph.devices COUNT

Prints each program that `stays_on_its_device` takes for another kind; COUNT random ones have a copy at any place.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from dash_guard.recorder import observe
from dash_inductor.graph.one_device import stays_on_its_device
from dash_inductor.passes.ops.operators import unrolled_reductions

Program = Callable[[Tensor], object]


def traced(program: Program) -> GraphModule:
    """The graph, as Inductor gets it, of a program of a tensor of the first GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return make_fx(program, select_decomp_table(), tracing_mode="fake")(torch.empty(8, 8, device="cuda:0"))


def kept() -> Callable[[Tensor], Tensor]:
    """An operator of a program, of which nobody knows what it does."""
    library.define("kept(Tensor x) -> Tensor")
    library.impl("kept", torch.empty_like, "Meta")
    return torch.ops.of_a_program.kept


library = torch.library.Library("of_a_program", "FRAGMENT")
STAYS: dict[str, Program] = {
    "arithmetic": lambda x: (x.sin() * 2).sum(0),
    "views": lambda x: x.t()[1:].reshape(-1),
    "product": lambda x: x @ x.bfloat16().float(),
    "a number of the CPU": lambda x: torch.where(x > 0, x, torch.scalar_tensor(1.0, device="cpu")),
    "ours": lambda x: unrolled_reductions.short_sum(x, 0),
    "sizes": lambda x: x * x.shape[0],
    "others of another device": lambda x: (x + 1, torch.zeros(3, device="cuda:1") + 1),
}
LEAVES: dict[str, Program] = {
    "peer": lambda x: x.to("cuda:1"),
    "peer of a view": lambda x: x[1:].sin().to("cuda:1") + 1,
    "host": lambda x: x.cpu(),
    "number for the host": lambda x: x[0, 0].cpu(),
    "later": lambda x: x.to("cpu", non_blocking=True),
    "into another": lambda x: torch.zeros(8, 8, device="cuda:1").copy_(x),
    "to Python": lambda x: observe.observe([x], ["x"], torch.zeros(2, dtype=torch.int64, device="cuda:0")),
    "reduced": lambda x: collectives.all_reduce(x, "sum", dist.group.WORLD) + 1,  # type: ignore[arg-type]
    "gathered": lambda x: collectives.all_gather_tensor(x, 0, dist.group.WORLD),  # type: ignore[arg-type]
    "kept": kept(),
}
STEPS: list[Callable[[Tensor], Tensor]] = [torch.sin, torch.relu, lambda x: x @ x, lambda x: x.t(), lambda x: x + 1]


def random_program(rng: random.Random) -> tuple[Program, bool]:
    """Operators that stay, and perhaps a copy to another device among them; whether there is none."""
    steps, at = [rng.choice(STEPS) for _ in range(rng.randrange(1, 8))], rng.randrange(8)

    def program(x: Tensor) -> Tensor:
        for place, step in enumerate(steps):
            x = step(x.to("cuda:1") if place == at else x)
        return x

    return program, at >= len(steps)


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())  # type: ignore[no-untyped-call]
    cases = [(name, program, True) for name, program in STAYS.items()]
    cases += [(name, program, False) for name, program in LEAVES.items()]
    cases += [(f"seed {seed}", *random_program(random.Random(seed))) for seed in range(int(sys.argv[1]))]
    for name, program, stays in cases:
        gm = traced(program)
        if stays_on_its_device(gm) is not stays:
            print("RESULT", name, gm.code)
    unknown = traced(STAYS["arithmetic"])
    del next(node for node in unknown.graph.nodes if node.op == "call_function").meta["val"]
    if stays_on_its_device(unknown):
        print("RESULT a graph that does not say all")
    print("RESULT", len(cases), flush=True)


if __name__ == "__main__":
    main()
