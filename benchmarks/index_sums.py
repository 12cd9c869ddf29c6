"""Sums by index: forward and backward of single operators, compiled, in microseconds.

    python -m benchmarks.index_sums [--only scatter bias ...] [--name index_sums] [--list]

"default" is torch.compile without deterministic algorithms, "torch" with them and without dash_inductor, "dash" with
both, and "segments" dash with the gradients of all embeddings made by `dash_inductor::index_sums`.  Medians; all calls
of a row take turns.  "equal" says whether ten calls of dash gave the same bits, "peak" is the memory of a call in MB.
What raises under deterministic algorithms is not timed.  Results: benchmarks/results/index_sums.json.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import dash_inductor
from dash_inductor.passes.ops import index_sums

from . import common

DEVICE = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32


def _zipf(count: int, rows: int) -> Tensor:
    """Draws row indices with Zipf's distribution: row k about 1 / k times as often as the first."""
    weights = 1 / torch.arange(1, rows + 1, device=DEVICE, dtype=FP32)
    return torch.multinomial(weights, count, replacement=True)


def _leaf(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


def _random(count: int, rows: int) -> Tensor:
    return torch.randint(0, rows, (count,), device=DEVICE)


def _scatter(x: Tensor, index: Tensor) -> Tensor:
    return x.new_zeros(100000, x.shape[1]).scatter_add(0, index[:, None].expand_as(x), x)


def _t5(table: Tensor, buckets: Tensor) -> Tensor:
    return table[buckets].permute(2, 0, 1)


def _buckets(length: int) -> Tensor:
    place = torch.arange(length, device=DEVICE)
    return ((place[:, None] - place).abs().float().log2().clamp(0, 15) + 16 * (place[:, None] > place)).long()


Case = tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, Tensor]]]
"""A function of a leaf and an index, and what makes both."""
CASES: dict[str, Case] = {
    "scatter_add:1M rows of 64": (_scatter, lambda: (_leaf(10**6, 64, dtype=FP32), _random(10**6, 100000))),
    "index_select:256k of 64k": (
        lambda x, index: x.index_select(0, index),
        lambda: (_leaf(1 << 16, 128), _random(1 << 18, 1 << 16)),
    ),
    "bias[expert_ids]:128 rows of 2880": (lambda x, index: x[index], lambda: (_leaf(128, 2880), _random(1 << 14, 128))),
    "bias[expert_ids]:32 rows of 2880": (lambda x, index: x[index], lambda: (_leaf(32, 2880), _random(1 << 14, 32))),
    "T5 bias:32 rows, 4M indices": (_t5, lambda: (_leaf(32, 12), _buckets(2048))),
    "hot:1M indices, half of them one": (
        lambda x, index: x[index],
        lambda: (_leaf(1000, 64), torch.where(_random(1 << 20, 2) == 0, 7, _random(1 << 20, 1000))),
    ),
    "bilinear:[8,64,128,128] twice": (
        lambda x, _: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        lambda: (_leaf(8, 64, 128, 128), _random(1, 1)),
    ),
    "nearest:[8,64,128,128] twice": (
        lambda x, _: F.interpolate(x, scale_factor=2.0, mode="nearest"),
        lambda: (_leaf(8, 64, 128, 128), _random(1, 1)),
    ),
    "embedding:32k Zipf tokens of 128k": (
        lambda x, index: F.embedding(index, x),
        lambda: (_leaf(128256, 2048), _zipf(1 << 15, 128256)),
    ),
    "embedding:64k tokens of 50k": (
        lambda x, index: F.embedding(index, x),
        lambda: (_leaf(50304, 768), _random(1 << 16, 50304)),
    ),
}


def _step(name: str, row: str, deterministic: bool) -> Callable[[], list[Tensor]]:
    """Returns a compiled forward and backward of a case."""
    function, make = CASES[row]
    torch.manual_seed(0)
    leaf, index = make()
    own = common.renamed(function, name)
    compiled = torch.compile(own, dynamic=False)
    torch.use_deterministic_algorithms(deterministic)
    grad_out = torch.randn_like(compiled(leaf, index))

    def run() -> list[Tensor]:
        torch.use_deterministic_algorithms(deterministic)
        try:
            out = compiled(leaf, index)
            return [out.detach(), *torch.autograd.grad(out, [leaf], grad_out)]
        finally:
            torch.use_deterministic_algorithms(False)

    run()
    return run


def _without_dash(row: str) -> Callable[[], list[Tensor]]:
    with dash_inductor.disabled():
        return _step("pytorch", row, True)


def _segments(row: str) -> Callable[[], list[Tensor]]:
    if not row.startswith("embedding"):
        raise common.NotRun("no embedding")
    with mock.patch.object(index_sums, "EMBEDDED_ROWS", 1 << 31):
        return _step("segments", row, True)


CONTENDERS: dict[str, Callable[[str], Callable[[], list[Tensor]]]] = {
    "default": functools.partial(_step, "default", deterministic=False),
    "torch": _without_dash,
    "dash": functools.partial(_step, "dash", deterministic=True),
    "segments": _segments,
}


def _peak(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def measure(row: str, repeats: int) -> dict[str, Any]:
    """Returns the time of each contender in microseconds, and the reasons of those that did not run."""
    common.watchdog(300)
    torch._dynamo.reset()
    steps: dict[str, Callable[[], list[Tensor]]] = {}
    reasons = {}
    for name, make in CONTENDERS.items():
        try:
            with torch._inductor.config.patch(force_disable_caches=True):  # a changed constant is in no key
                steps[name] = make(row)
        except (RuntimeError, ValueError) as error:
            reasons[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        finally:
            torch.use_deterministic_algorithms(False)
    spent = common.time_ms(*steps.values(), repeats=repeats)
    found: dict[str, Any] = {"case": row}
    found |= {name: 1e3 * ms for name, ms in zip(steps, spent, strict=True)}
    found |= {f"peak {name}": _peak(steps[name]) for name in ("default", "dash") if name in steps}
    if "dash" in steps:
        first = steps["dash"]()
        found["equal"] = all(torch.equal(a, b) for _ in range(10) for a, b in zip(first, steps["dash"](), strict=True))
    return found | {"not run": reasons}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="words, one of which a case's name must contain")
    parser.add_argument("--name", default="index_sums", help="name of the results file")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    options = parser.parse_args()
    names = [name for name in CASES if not options.only or any(word in name for word in options.only)]
    if options.list:
        print("\n".join(names))
        return
    rows = []
    for name in names:
        rows.append(measure(name, options.repeats))
        print(rows[-1], flush=True)
    common.write(options.name, {**common.conditions(), "repeats": options.repeats, "rows": rows})


if __name__ == "__main__":
    main()
