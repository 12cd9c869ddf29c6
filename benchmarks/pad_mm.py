"""Products whose rows begin at odd addresses, on both sides of the border of the rule that pads them, by turns.

    python -m benchmarks.pad_mm [--repeats 30] [--only n] [--name pad_mm]

A row for each product [batch x] m x k x n, compiled three times: without deterministic algorithms, where PyTorch pads
by timing ("default"), under deterministic algorithms without padding ("off"), and with padding whatever the rule says
("on").  Times are medians in us.  "gain" is off / on; the rule ("rule") is right where it pads what gains, and leaves
the rest.  "ops/byte" is what it looks at, beside the 2**29 operations of the smallest product.  Names say which operand
begins at odd addresses: logits (n), the gradient of what goes into them (dgrad, k), that of the weight (wgrad, m), an
odd width in between (mlp), batches (bmm).

The last rows are steps of a language model's head, with their peak memory in MiB.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.config import REWRITES, config
from dash_inductor.passes.ops import pad_mm
from dash_inductor.records.records import clear_sites
from dash_inductor.upstream.eager import set_deterministic_algorithms

from . import common

CONTENDERS = ("default", "off", "on")
Run = Callable[[], object]


@dataclass(frozen=True)
class Product:
    """A matmul [m, k] @ [k, n] of 16-bit elements; `turned` operands are column-major."""

    name: str
    m: int
    k: int
    n: int
    turned: tuple[bool, bool] = (False, False)
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    def tensors(self) -> list[Tensor]:
        found = []
        for (rows, columns), turned in zip(((self.m, self.k), (self.k, self.n)), self.turned, strict=True):
            shape = (columns, rows) if turned else (rows, columns)
            batch = () if self.batch == 1 else (self.batch,)
            tensor = torch.randn(*batch, *shape, device="cuda", dtype=self.dtype)
            found.append(tensor.mT if turned else tensor)
        return found

    def decided(self) -> tuple[dict[str, int], dict[str, int], float]:
        """Returns what the rule pads, what padding would pad, and the operations per byte that padding copies."""
        left, right = (pad_mm._matrix(tensor) for tensor in self.tensors())
        assert left is not None
        assert right is not None
        facts = left, right, self.dtype.itemsize, self.batch
        padded = pad_mm.unaligned(left, right, self.dtype.itemsize)
        return pad_mm.decide(*facts), padded, pad_mm.operations_per_byte(left, right, self.dtype.itemsize, padded)


LINEAR = (False, True)
PRODUCTS = [
    *(Product("logits", m, 768, 50257, LINEAR) for m in (1, 32, 64, 128, 192, 256, 1024, 8192)),
    *(Product("dgrad", m, 50257, 768) for m in (128, 192, 256, 512, 8192)),
    Product("dgrad", 8192, 50257, 192),
    *(Product("wgrad", 50257, k, 768, (True, False)) for k in (128, 1024, 8192)),
    *(Product("wgrad", 50257, 8192, n, (True, False)) for n in (128, 160)),
    *(Product("mlp", 8192, width, width, LINEAR) for width in (257, 385, 513, 1025, 3073)),
    *(Product("mlp", m, 1025, 1025, LINEAR) for m in (128, 256, 512, 1024)),
    Product("mlp fp16", 8192, 1025, 1025, LINEAR, dtype=torch.float16),
    Product("bmm", 512, 1001, 64, batch=32),
    Product("bmm", 1001, 512, 1001, LINEAR, batch=16),
]


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Computes one product."""
    return x @ y


def head(weight: Tensor, tokens: Tensor) -> Tensor:
    """Returns the loss of logits over a vocabulary of odd size, with tied embedding weights."""
    logits = F.linear(torch.tanh(F.embedding(tokens, weight)), weight)
    return F.cross_entropy(logits.float(), tokens.roll(1))


def compiled(make: Callable[[str], Run]) -> dict[str, Run]:
    """Returns the calls of the contenders; the first call of each compiles it."""
    runs: dict[str, Run] = {}
    for name in CONTENDERS:
        call = make(name)

        def run(call: Run = call, deterministic: bool = name != "default") -> None:
            set_deterministic_algorithms(deterministic)
            call()
            set_deterministic_algorithms(False)

        always = {"LEAST_OPERATIONS": 0, "OPERATIONS_PER_BYTE": 0, "OF_AN_ODD_RESULT": 0}
        with (
            config.patch(rewrites=set(REWRITES) - ({"pad_mm"} if name == "off" else set())),
            mock.patch.multiple(pad_mm, **always),
        ):
            run()
            run()
        runs[name] = run
    clear_sites()
    return runs


def row_of_product(product: Product, repeats: int) -> dict[str, Any]:
    torch._dynamo.reset()
    left, right = product.tensors()

    def make(name: str) -> Run:
        code = torch.compile(common.renamed(matmul, name), dynamic=False)
        return lambda: code(left, right)

    timings = common.time_ms(*compiled(make).values(), repeats=repeats)
    default, off, on = (1e3 * time for time in timings)
    rule, padded, per_byte = product.decided()
    shape = f"{f'{product.batch} x ' if product.batch > 1 else ''}{product.m} x {product.k} x {product.n}"
    return {
        "product": product.name, "shape": shape, "pads": ",".join(padded), "ops/byte": round(per_byte),
        "rule": "pads" if rule else "leaves", "default": default, "off": off, "on": on, "gain": off / on, "MiB": "",
    }  # fmt: skip


def row_of_head(tokens: int, repeats: int) -> dict[str, Any]:
    torch._dynamo.reset()
    weight = torch.randn(50257, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    given = torch.randint(0, 50257, (tokens,), device="cuda")

    def make(name: str) -> Run:
        code = torch.compile(common.renamed(head, name), dynamic=False)

        def step() -> None:
            weight.grad = None
            code(weight, given).backward()

        return step

    runs = compiled(make)
    default, off, on = (1e3 * time for time in common.time_ms(*runs.values(), repeats=repeats))
    peaks = []
    for run in runs.values():
        weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() >> 20)
    return {
        "product": "head, a step", "shape": f"{tokens} tokens", "pads": "all", "ops/byte": "", "rule": "pads",
        "default": default, "off": off, "on": on, "gain": off / on, "MiB": " ".join(map(str, peaks)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", default="", help="products whose name begins like this")
    parser.add_argument("--name", default="pad_mm", help="name of the results file")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch._inductor.config.force_disable_caches = True  # whose keys do not know of a rule that is passed over
    rows = []
    for product in PRODUCTS:
        common.watchdog(120)
        if product.name.startswith(options.only):
            rows.append(row_of_product(product, options.repeats))
    for tokens in (4096, 8192):
        common.watchdog(120)
        if "head".startswith(options.only):
            rows.append(row_of_head(tokens, options.repeats))
        gc.collect()
        torch.cuda.empty_cache()
    common.table(rows)
    common.write(options.name, {"conditions": common.conditions(), "rows": rows})


if __name__ == "__main__":
    main()
