"""Operators that store by tensors of indices, forward and backward: default, deterministic, and with dash_inductor.

    python -m benchmarks.stores [--only NAME ...] [--list] [--repeats 50] [--name stores]

Each is compiled three times, and the three take turns: median time of a forward with its backward in us, what the
backward and forward allocate at most in MiB, and what dash_inductor has done.  Sizes are those of a layer of 8192
tokens with 8 of 128 experts, and of 8192 rows of logits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dash_inductor
from dash_inductor.records.records import all_records, clear_sites

from . import common

TOKENS, WIDTH, EXPERTS, TOP = 8192, 2048, 128, 8
VOCABULARY = 128256
VARIANTS = ("default", "deterministic", "dash")


def experts() -> Tensor:
    """Draws the chosen experts, [tokens, top]."""
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.rand(TOKENS, EXPERTS, device="cuda", generator=generator).topk(TOP, -1).indices


def labels() -> Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randint(0, VOCABULARY, (TOKENS, 1), device="cuda", generator=generator)


def router_gather(x: Tensor, chosen: Tensor) -> Tensor:
    return x.float().softmax(-1).gather(-1, chosen)


def router_topk(x: Tensor, chosen: Tensor) -> Tensor:
    return x.float().softmax(-1).topk(TOP, -1).values


def permute(x: Tensor, chosen: Tensor) -> Tensor:
    order = torch.argsort(chosen.reshape(-1), stable=True)
    return x[order // TOP]


def inverse_permutation(x: Tensor, chosen: Tensor) -> Tensor:
    order = torch.argsort(chosen.reshape(-1), stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return x[inverse]


def permuted_weights(x: Tensor, chosen: Tensor) -> Tensor:
    return x.reshape(-1)[torch.argsort(chosen.reshape(-1), stable=True)]


def combine(x: Tensor, chosen: Tensor) -> Tensor:
    order = torch.argsort(chosen.reshape(-1), stable=True)
    index = (order // TOP).reshape(-1, 1).expand(-1, WIDTH)
    return torch.zeros(TOKENS, WIDTH, dtype=x.dtype, device=x.device).scatter_add(0, index, x)


def put(x: Tensor, chosen: Tensor) -> Tensor:
    order = torch.argsort(chosen.reshape(-1), stable=True)
    out = torch.zeros_like(x)
    out[order] = x
    return out.view(TOKENS, TOP, WIDTH).sum(1)


def label_gather(x: Tensor, label: Tensor) -> Tensor:
    return x.float().log_softmax(-1).gather(-1, label)


@dataclass(frozen=True)
class Operator:
    """A function, the shape of its first argument, and what makes its second one."""

    function: Callable[[Tensor, Tensor], Tensor]
    shape: tuple[int, ...]
    indices: Callable[[], Tensor] = experts

    @property
    def name(self) -> str:
        return self.function.__name__


OPERATORS = [
    Operator(router_gather, (TOKENS, EXPERTS)),
    Operator(router_topk, (TOKENS, EXPERTS)),
    Operator(permute, (TOKENS, WIDTH)),
    Operator(inverse_permutation, (TOKENS * TOP, WIDTH)),
    Operator(permuted_weights, (TOKENS, TOP)),
    Operator(combine, (TOKENS * TOP, WIDTH)),
    Operator(put, (TOKENS * TOP, WIDTH)),
    Operator(label_gather, (TOKENS, VOCABULARY), labels),
]


def variant(operator: Operator, name: str, x: Tensor, indices: Tensor) -> Callable[[], Tensor]:
    """Compiles a forward with its backward as one variant; a call sets the global flag that graphs depend on."""
    given: Any = operator.function
    compiled = torch.compile(common.renamed(given, f"{operator.name}_{name}"))
    torch.use_deterministic_algorithms(name != "default")
    out = compiled(x, indices) if name == "dash" else _without(compiled, x, indices)
    grad = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(out.dtype)

    def run() -> Tensor:
        torch.use_deterministic_algorithms(name != "default")
        (gradient,) = torch.autograd.grad(compiled(x, indices), x, grad)
        return gradient

    with nullcontext() if name == "dash" else dash_inductor.disabled():
        run()
    return run


def _without(compiled: Callable[..., Tensor], x: Tensor, indices: Tensor) -> Tensor:
    with dash_inductor.disabled():
        return compiled(x, indices)


def peak(run: Callable[[], Tensor]) -> float:
    """Returns the peak memory that a call allocates, in MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(operator: Operator, repeats: int) -> dict[str, Any]:
    """Measures the row of an operator."""
    common.watchdog(300)
    torch._dynamo.reset()
    clear_sites()
    generator = torch.Generator("cuda").manual_seed(2)
    x = torch.randn(operator.shape, device="cuda", generator=generator).bfloat16().requires_grad_()
    indices = operator.indices()
    runs = [variant(operator, name, x, indices) for name in VARIANTS]
    done = sorted({f"{record.rewrite}: {record.detail}" for record in all_records()})
    gradients = [run().float() for run in runs]
    differences = [float((g - gradients[1]).norm() / gradients[1].norm()) for g in gradients]
    times = common.time_ms(*runs, repeats=repeats)
    row: dict[str, Any] = {"operator": operator.name}
    row |= {f"{name} us": time * 1e3 for name, time in zip(VARIANTS, times, strict=True)}
    row |= {f"{name} MiB": peak(run) for name, run in zip(VARIANTS, runs, strict=True)}
    return row | {"dash / default": times[2] / times[0], "difference": differences[2], "done": "; ".join(done)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="operators whose names contain one of these words")
    parser.add_argument("--list", action="store_true", help="print the names of the operators")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--name", default="stores", help="name of the results file")
    options = parser.parse_args()
    chosen = [o for o in OPERATORS if not options.only or any(word in o.name for word in options.only)]
    if options.list:
        print("\n".join(operator.name for operator in chosen))
        return
    rows = []
    for operator in chosen:
        rows.append(measure(operator, options.repeats))
        print(rows[-1], flush=True)  # now, so that a run that is cut off shows them
        torch.cuda.empty_cache()
    common.table([{key: value for key, value in row.items() if key != "done"} for row in rows])
    for row in rows:
        print(f"{row['operator']}: {row['done']}")
    print(common.write(options.name, {"conditions": common.conditions(), "options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
