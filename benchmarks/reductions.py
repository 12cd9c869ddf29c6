"""The configurations of generated kernels: what Inductor offers, what it picks by timing, and what a deterministic mode
picks.

    python -m benchmarks.reductions [--only layer_norm dit] [--together 14] [--name reductions]
    python -m benchmarks.reductions --models mamba2 --together 12 --name reductions_mamba2

Every case is a process of its own: its kernels are compiled in many configurations, at the same time as those of other
cases, and then timed while no other process times.  A line for each kernel says its kind, its sizes ("x" and "y" are
kept, "r" is summed), the median time in us of the configuration that Inductor takes by timing ("default"), of the one
that it takes in its deterministic mode ("pinned"), and of the fastest ("best"), with that configuration.  The results
file has the times of all of them, and the facts that a rule could read.  With `--models`, cases are training steps of
`benchmarks.whole_models`; each of `--together` processes takes its share of the kernels of a model.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Made = tuple[Callable[..., Any], tuple[Tensor, ...]]
FACTS = (
    "reduction_hint", "num_load", "num_store", "num_reduction", "has_loadstore_with_contiguous_rdim", "RSPLIT_SIZE",
    "tiling_scores", "no_x_dim", "atomic_add_found", "tile_hint", "min_elem_per_thread",
)  # fmt: skip


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_(dtype.is_floating_point)


def _integers(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape)


def layer_norm(rows: int, columns: int) -> Made:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (columns,), weight, bias)

    return function, (_normal(rows, columns), _normal(columns), _normal(columns))


def rms_norm(rows: int, columns: int) -> Made:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    return function, (_normal(rows, columns), _normal(columns))


def softmax(rows: int, columns: int) -> Made:
    return (lambda x: torch.softmax(x, -1, dtype=torch.float32).to(x.dtype)), (_normal(rows, columns),)


def gelu_bias(rows: int, columns: int) -> Made:
    """GELU with a bias; the backward sums the columns of a gradient, as for a preceding linear layer."""

    def function(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias, approximate="tanh")

    return function, (_normal(rows, columns), _normal(columns))


def cross_entropy(rows: int, columns: int, pitch: int) -> Made:
    """Logits of 16 bits whose rows begin `pitch` elements apart."""

    def function(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :columns].float(), targets)

    return function, (_normal(rows, pitch), _integers(columns, rows))


def adaptive_norm(batch: int, length: int, columns: int) -> Made:
    """DiT's adaptive norm: scale, shift and gate per batch element, and the residual."""

    def function(x: Tensor, y: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        x = x + gate[:, None] * y
        return x, F.layer_norm(x, (columns,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]

    big, small = (batch, length, columns), (batch, columns)
    return function, (_normal(*big), _normal(*big), _normal(*small), _normal(*small), _normal(*small))


def heads(batch: int, length: int, number: int, width: int) -> Made:
    """Queries, keys and values from a projection and, in the backward, their gradients put together again."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        parts = x.view(batch, length, 3, number, width).permute(2, 0, 3, 1, 4)
        return tuple(part.contiguous() * (1 + i) for i, part in enumerate(parts))

    return function, (_normal(batch, length, 3 * number * width),)


def transpose(rows: int, columns: int) -> Made:
    return (lambda x, y: torch.sin(x.t() + y).contiguous()), (_normal(rows, columns), _normal(columns, rows))


def channels_last(batch: int, channels: int, side: int) -> Made:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (F.silu(x) + y).contiguous(memory_format=torch.contiguous_format)

    shape = batch, channels, side, side
    x = torch.randn(shape, dtype=torch.bfloat16).to(memory_format=torch.channels_last).requires_grad_()
    return function, (x, _normal(*shape))


def patches(batch: int, channels: int, side: int, edge: int = 2) -> Made:
    """Patches of an image put together, as the last layer of DiT does."""
    count = side // edge

    def function(x: Tensor) -> Tensor:
        x = x.view(batch, count, count, edge, edge, channels)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(batch, channels, side, side).float()

    return function, (_normal(batch, count * count, edge * edge * channels),)


def experts(tokens: int, chosen: int, columns: int) -> Made:
    """The rows of a token's experts, weighted and summed."""

    def function(rows: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
        picked = rows[inverse].view(tokens, chosen, columns).float()
        return (picked * weights[..., None]).sum(1).to(rows.dtype)

    weights = torch.rand(tokens, chosen)
    return function, (_normal(tokens * chosen, columns).detach(), torch.randperm(tokens * chosen), weights)


def sums(first: int, middle: int, last: int, dim: int) -> Made:
    return (lambda x: x.float().square().sum(dim)), (_normal(first, middle, last).detach(),)


def group_norm(batch: int, channels: int, side: int) -> Made:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.silu(F.group_norm(x, 32, weight, bias))

    return function, (_normal(batch, channels, side, side), _normal(channels), _normal(channels))


def chunks(batch: int, number: int, length: int, heads: int, dim: int, state: int) -> Made:
    """Products of a scan by chunks, summed after they were broadcast, as in Mamba-2 without kernels of its own."""

    def function(b: Tensor, c: Tensor, x: Tensor, decay: Tensor) -> tuple[Tensor, ...]:
        pairs = (c[:, :, :, None] * b[:, :, None]).sum(-1)
        weights = (pairs[..., None] * decay[..., None]).sum(-1)
        inside = (weights[..., None] * x[:, :, None]).sum(3)
        states = (b[..., None, :] * x[..., None]).sum(2)
        between = (states[:, :, None] * c[..., None, :]).sum(-1)
        return inside + between, states

    position = (batch, number, length, heads)
    tensors = [_normal(*position, size, dtype=torch.float32) for size in (state, state, dim)]
    return function, (*tensors, _normal(batch, number, length, length, heads, dtype=torch.float32))


def gated(rows: int, columns: int) -> Made:
    return (lambda x: F.silu(x[:, :columns]) * x[:, columns:]), (_normal(rows, 2 * columns),)


CASES: dict[str, Callable[[], Made]] = {
    "layer_norm 16384x768": lambda: layer_norm(16384, 768),
    "layer_norm 8192x1152": lambda: layer_norm(8192, 1152),
    "rms_norm 8192x4096": lambda: rms_norm(8192, 4096),
    "softmax 16384x1024": lambda: softmax(16384, 1024),
    "softmax 8192x4096": lambda: softmax(8192, 4096),
    "gelu_bias 8192x3072": lambda: gelu_bias(8192, 3072),
    "cross_entropy 8192x50257": lambda: cross_entropy(8192, 50257, 50257),
    "cross_entropy 8192x50257 in 50304": lambda: cross_entropy(8192, 50257, 50304),
    "cross_entropy 4096x128256": lambda: cross_entropy(4096, 128256, 128256),
    "dit 32x256x1152": lambda: adaptive_norm(32, 256, 1152),
    "dit 8x1024x1152": lambda: adaptive_norm(8, 1024, 1152),
    "heads 8x1024x12x64": lambda: heads(8, 1024, 12, 64),
    "transpose 8192x4096": lambda: transpose(8192, 4096),
    "channels_last 16x128x64": lambda: channels_last(16, 128, 64),
    "patches 64x8x64": lambda: patches(64, 8, 64),
    "experts 8192x8x1024": lambda: experts(8192, 8, 1024),
    "sums 64x1024x1024 middle": lambda: sums(64, 1024, 1024, 1),
    "sums 1x65536x512 first two": lambda: sums(1, 65536, 512, 1),
    "group_norm 16x256x64": lambda: group_norm(16, 256, 64),
    "chunks 2x16x128x24x64x64": lambda: chunks(2, 16, 128, 24, 64, 64),
    "gated 8192x3584": lambda: gated(8192, 3584),
}


def whole(model: str) -> Made:
    """Returns the loss of a model in bf16, as a function of its parameters."""
    from .whole_models import MODELS

    module, inputs = MODELS[model]()
    module.to(torch.bfloat16)

    def loss(*_: Tensor) -> Tensor:
        result: Any = module(**inputs)
        return result if isinstance(result, Tensor) else result.loss  # type: ignore[no-any-return]

    return loss, tuple(module.parameters())


def _text(config: Any) -> str:
    blocks = [f"{name.removesuffix('BLOCK').strip('_')}{size}" for name, size in config.kwargs.items()]
    return " ".join([*blocks, f"w{config.num_warps}", *([f"s{config.num_stages}"] if config.num_stages != 1 else [])])


def _more(kind: str, hint: str, hints: dict[str, int], first: Any) -> Iterator[Any]:
    """Returns configurations that Inductor does not offer, in the form of its `first`."""
    from triton import Config

    x, y = hints["x"], hints.get("y")
    r = math.prod(size for name, size in hints.items() if name.startswith("r"))
    tiles: list[tuple[int, int, int]]
    if kind == "pointwise" and len(hints) == 1:
        for size, warps in ((256, 4), (512, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8)):
            yield Config({"XBLOCK": min(size, x)}, num_warps=warps, num_stages=1)
    elif kind == "pointwise" and len(hints) == 2 and y is not None:
        tiles = [(32, 64, 4), (64, 32, 4), (32, 64, 8), (64, 32, 8), (32, 128, 8), (128, 32, 8), (16, 128, 4)]
        tiles += [(128, 16, 4), (64, 64, 4), (8, 256, 4), (256, 8, 4), (128, 8, 4), (8, 128, 4), (16, 64, 4)]
        for xs, ys, warps in tiles:
            if xs <= x and ys <= y and y // ys < 65535:
                yield Config({"XBLOCK": xs, "YBLOCK": ys}, num_warps=warps, num_stages=1)
    elif "RSPLIT_SIZE" in first.kwargs:
        for xs, per_thread in itertools.product((1, 2, 4, 8), (8, 16, 32)):
            warps = xs * r // (32 * per_thread)
            if 1 <= warps <= 16 and xs * r <= 8192:
                yield Config({**first.kwargs, "XBLOCK": xs}, num_warps=warps, num_stages=first.num_stages)
    elif y is not None:
        loops = kind == "reduction"
        for xs, ys, rs in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32), (8, 16, 32, 64, r)):
            numbers = xs * ys * rs
            if xs <= x and ys <= y and numbers in (1024, 2048, 4096) and (rs <= 64 if loops else rs == r):
                blocks = {"XBLOCK": xs, "YBLOCK": ys, **({"R0_BLOCK": rs} if loops else {})}
                yield Config(blocks, num_warps=max(numbers // 512, 1), num_stages=1)
    elif kind == "persistent":
        for xs, per_thread in itertools.product((1, 2, 4, 8, 16, 32, 64, 128, 256), (4, 8, 16)):
            warps = xs * r // (32 * per_thread)
            if xs <= x and 1 <= warps <= 16 and xs * r <= 4096 and ("XBLOCK" in first.kwargs or xs == 1):
                kept = {"XBLOCK": xs} if "XBLOCK" in first.kwargs else {}
                yield Config(kept, num_warps=warps, num_stages=1)
    elif "r1_" not in hints:
        if hint.endswith("INNER"):
            tiles = [(1, 512, 4), (1, 1024, 4), (1, 1024, 8), (1, 2048, 4), (1, 2048, 8), (1, 4096, 8), (1, 4096, 16)]
            tiles += [(1, 8192, 16), (2, 1024, 8), (4, 512, 8), (8, 256, 8)]
        else:
            tiles = [(8, 64, 4), (16, 16, 2), (16, 32, 4), (16, 64, 8), (32, 8, 2), (32, 16, 4), (32, 32, 8)]
            tiles += [(32, 32, 4), (64, 8, 8), (64, 16, 4), (64, 16, 8), (128, 4, 4), (128, 8, 4), (128, 8, 8)]
        for xs, rs, warps in tiles:
            if xs <= x and rs <= r and ("XBLOCK" in first.kwargs or xs == 1):
                kept = {"XBLOCK": xs} if "XBLOCK" in first.kwargs else {}
                yield Config({**kept, "R0_BLOCK": rs}, num_warps=warps, num_stages=1)


def _offering(
    kind: str, plain: Callable[..., Any], kernels: dict[str, dict[str, Any]], is_ours: Callable[[str], bool]
) -> Callable[..., Any]:
    """In the place of a heuristic of Inductor: notes what it offers in its modes, and compiles all of that and more.

    Args:
        is_ours: of the name of a kernel; others are left to Inductor.
    """
    from torch._inductor.runtime import triton_heuristics
    from torch._inductor.runtime.hints import HeuristicType

    def offer(size_hints: dict[str, int], inductor_meta: dict[str, Any], **kwargs: Any) -> Any:
        def configs(**meta: Any) -> list[Any]:
            given = copy.deepcopy((size_hints, {**inductor_meta, **meta}, kwargs))
            found: list[Any] = plain(size_hints=given[0], inductor_meta=given[1], return_configs=True, **given[2])
            return found

        if not is_ours(inductor_meta["kernel_name"]):
            return plain(size_hints=size_hints, inductor_meta=inductor_meta, **kwargs)
        timed = configs()
        by_hint = [*timed]
        for config in timed if kind == "reduction" else []:  # Inductor halves blocks of many registers
            half = copy.deepcopy(config)
            half.kwargs["R0_BLOCK"] = max(half.kwargs["R0_BLOCK"] // 2, 1)
            by_hint.append(half)
        pinned = configs(deterministic=True, autotune_pointwise=False)
        wide = configs(max_autotune_pointwise=True)
        every = {
            _text(c): c
            for c in [
                *by_hint,
                *pinned,
                *wide,
                *_more(kind, str(kwargs.get("reduction_hint", "")), size_hints, pinned[0]),
            ]
        }
        facts = {**inductor_meta, **kwargs}
        kernels[inductor_meta["kernel_name"]] = {
            "kind": kind,
            "hints": dict(size_hints),
            "facts": {name: str(facts[name]) for name in FACTS if facts.get(name) is not None},
            "default": [_text(c) for c in by_hint],
            "pinned": _text(pinned[0]),
        }
        heuristic = {"pointwise": HeuristicType.POINTWISE, "reduction": HeuristicType.REDUCTION}
        return triton_heuristics.cached_autotune(
            size_hints,  # type: ignore[arg-type]  # a dictionary by now
            [*every.values()],
            triton_meta=kwargs["triton_meta"],
            inductor_meta={**inductor_meta, "dynamic_scale_rblock": False},
            heuristic_type=heuristic.get(kind, HeuristicType.PERSISTENT_REDUCTION),
            filename=kwargs.get("filename"),
        )

    return offer


@contextlib.contextmanager
def _alone(lock: str) -> Iterator[None]:
    """Lets one process at a time run the block, by a file lock."""
    with open(lock, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def time_us(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return 1e3 * float(do_bench(run, warmup=2, rep=12, return_mode="median"))


def child(name: str, lock: str, part: str, parts: str) -> None:
    """Times all kernels of a case, or one of so many parts of them, and prints a line of JSON for each."""
    import torch._inductor.config as inductor
    from torch._inductor.runtime import triton_heuristics

    import dash_inductor

    dash_inductor.disable()
    inductor.force_disable_caches, inductor.compile_threads = True, 1
    kernels: dict[str, dict[str, Any]] = {}

    def is_ours(kernel: str) -> bool:
        return zlib.crc32(kernel.encode()) % int(parts) == int(part)

    for kind, attribute in (
        ("pointwise", "pointwise"), ("reduction", "reduction"), ("persistent", "persistent_reduction"),
    ):  # fmt: skip
        setattr(triton_heuristics, attribute, _offering(kind, getattr(triton_heuristics, attribute), kernels, is_ours))

    plain_times = triton_heuristics.CachingAutotuner.benchmark_all_configs

    def time_all(self: Any, *args: Any, **kwargs: Any) -> dict[Any, float]:
        if self.inductor_meta.get("kernel_name") not in kernels:
            return plain_times(self, *args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]
        timings = {}
        stream = torch.cuda.current_stream().cuda_stream
        given, named = self.clone_args(*args, **kwargs)
        with _alone(lock):
            for launcher in self.launchers:
                timings[launcher] = time_us(lambda: launcher(*given, **named, stream=stream))  # noqa: B023
        row = kernels[self.inductor_meta["kernel_name"]]
        us = {_text(launcher.config): round(time, 2) for launcher, time in timings.items()}
        spills = {_text(launcher.config): launcher.n_spills for launcher in timings if launcher.n_spills}
        registers = {_text(launcher.config): launcher.n_regs for launcher in timings}
        row |= {"us": us, "spills": spills, "registers": registers}
        print(json.dumps({"case": name, "kernel": self.inductor_meta["kernel_name"], **row}), flush=True)
        return timings

    setattr(triton_heuristics.CachingAutotuner, "benchmark_all_configs", time_all)  # noqa: B010
    torch.manual_seed(0)
    with torch.device("cuda"):
        function, tensors = CASES[name]() if name in CASES else whole(name)
    results = torch.compile(function, dynamic=False)(*tensors)
    results = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
    if results:
        torch.autograd.grad(results, [t for t in tensors if t.requires_grad], [torch.randn_like(r) for r in results])


def summary(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a line of the table."""
    us = row["us"]
    default = min((us[text] for text in row["default"] if text in us), default=math.nan)
    best = min(us, key=us.get)
    sizes = " ".join(f"{name.strip('_')}{size}" for name, size in row["hints"].items())
    pinned = us.get(row["pinned"], math.nan)
    return {
        "case": row["case"], "kind": row["kind"], "sizes": sizes, "hint": row["facts"].get("reduction_hint", ""),
        "offers": len(row["default"]), "default": default, "pinned": pinned, "pinned/default": pinned / default,
        "best": us[best], "pins": row["pinned"], "best is": best,
    }  # fmt: skip


def main() -> None:
    from .whole_models import MODELS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name begins like one of these")
    parser.add_argument(
        "--models", nargs="+", default=[], choices=MODELS, help="training steps of these instead of the cases"
    )
    parser.add_argument("--together", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    parser.add_argument("--name", default="reductions", help="name of the results file")
    parser.add_argument("--child", nargs=4, metavar=("CASE", "LOCK", "PART", "PARTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    from . import common

    parts = range(options.together)
    cases: Sequence[tuple[str, int, int]] = [(name, 0, 1) for name in CASES if name.startswith(tuple(options.only))]
    if options.models:
        cases = [(name, part, len(parts)) for name in options.models for part in parts]
    with tempfile.NamedTemporaryFile() as lock:

        def run(case: tuple[str, int, int]) -> list[dict[str, Any]]:
            name, part, parts = case
            shares = [str(part), str(parts)]
            command = [sys.executable, "-m", "benchmarks.reductions", "--child", name, lock.name, *shares]
            done = subprocess.run(command, capture_output=True, text=True, timeout=500)
            if done.returncode:
                print("failed", name, *done.stderr.strip().splitlines()[-3:], flush=True)
            return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

        with ThreadPoolExecutor(options.together) as pool:
            rows = [row for found in pool.map(run, cases) for row in found]
    common.table([summary(row) for row in rows])
    print(common.write(options.name, {"conditions": common.conditions(), "rows": rows}))


if __name__ == "__main__":
    main()
