"""The portable forward, and the Hopper forward where heads or lengths are small, beside the forwards of PyTorch.

    python -m benchmarks.portable [--only fp32 decode ...] [--tiles fp32=64x32w8s1 16bit=64x64w4s3 ...] [--list]

One call from q, k, v to out and log-sum-exp.  Columns, in TFLOP/s over visible pairs as in `benchmarks.forward`: the
portable forward with its tiles for this architecture ("portable"), with other ones under their names (only at 4096
tokens), the Hopper forward, then PyTorch's: FlashAttention-2 ("flash"), cuDNN, and for fp32 the memory-efficient kernel
("efficient").  Medians; all calls of a row take turns.  "difference" is the relative difference of the first column's
out to the first of PyTorch's; "equal" says whether ten calls of each kernel of ours (three of a slow one) gave the same
bits.  A second table has the times in microseconds.  Two minutes on an idle GPU; results:
benchmarks/results/portable.json.

The groups: "fp32", where the portable forward is ours on sm_90; "16bit", which shows users of other architectures what
they get; "narrow" and "short", in which the Hopper forward computes much that nobody needs; and "decode", few queries
against many keys, for which it has kernels of their own.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.hopper.forward import launch
from dash_inductor.kernels.portable import standalone
from dash_inductor.kernels.portable.family import forward_tiles
from dash_inductor.model import AttentionSpec, Mask, Plan, Site, Tiles
from dash_inductor.model.architectures import SAME_AS, SHARED_BYTES

from . import common, forward, turns
from .common import NotRun
from .contenders import BSHD, arch
from .shapes import CAUSAL, FULL, TOKENS, Shape
from .turns import Contenders, Results, Run

WIDTH = 1024
"""Heads times head dim: half as much as in the other benchmarks, as fp32 without tensor cores takes its time."""
BITS = {"fp32": 32, "16bit": 16}
aten = torch.ops.aten
TILES = {
    "fp32": ("64x32w8s1", "64x64w8s1", "32x64w4s1"),
    "16bit": ("64x64w4s3", "128x128w8s2", "64x128w4s2"),
}
"""Tiles that are tried beside `FORWARD_TILES`."""
TRIED_AT = 4096
"""The length at which they are tried."""


@dataclass(frozen=True)
class ForwardShape(Shape):
    """One attention forward.

    Args:
        dtype: of q, k, v and out.
        queries: their number, where it is not the number of keys, all of which they see.
    """

    dtype: str = "bfloat16"
    queries: int | None = None

    @property
    def name(self) -> str:
        return super().name if self.queries is None else f"{super().name}:q{self.queries}"

    @property
    def flops(self) -> float:
        return super().flops if self.queries is None else super().flops * self.queries / self.length

    @property
    def bits(self) -> int:
        return 32 if self.dtype == "float32" else 16

    def site(self) -> Site:
        queries = self.length if self.queries is None else self.queries
        return replace(super().site(), dtype=self.dtype, q_len=queries)  # type: ignore[arg-type]  # a name

    def tensors(self) -> tuple[torch.Tensor, ...]:
        q, *others = (t.to(getattr(torch, self.dtype)) for t in super().tensors())
        return q[:, :, : self.queries], *others


def shape_of(group: str, head_dim: int, mask: Any, length: int, **more: Any) -> ForwardShape:
    heads = WIDTH // head_dim
    return ForwardShape(group, TOKENS // length, heads, heads, length, head_dim, head_dim, mask, **more)


def shapes() -> list[ForwardShape]:
    lengths, masks = (1024, 4096, 16384), (FULL, CAUSAL)
    found = [
        shape_of("fp32", d, mask, s, dtype="float32") for d in (32, 64, 128) for mask in masks for s in lengths
    ]  # fmt: skip
    found += [shape_of("16bit", d, mask, s) for d in (64, 128) for mask in masks for s in lengths]
    found += [shape_of("narrow", d, mask, s) for d in (8, 16, 32) for mask in masks for s in lengths]
    found += [shape_of("short", d, mask, s) for d in (64, 128) for mask in masks for s in (128, 256, 512)]
    found += [shape_of("decode", d, FULL, 4096, queries=n) for d in (64, 128) for n in (1, 2, 4, 8, 16)]
    found += [
        ForwardShape("decode", batch, heads, 8, s, 128, 128, FULL, queries=n)
        for batch, heads, s in ((1, 8, 16384), (1, 8, 131072), (1, 64, 32768), (8, 64, 8192))
        for n in (1, 8)
    ]  # fmt: skip
    found += [shape_of("decode_fp32", 64, FULL, 4096, queries=n, dtype="float32") for n in (1, 16)]
    return found


def plan_of(shape: ForwardShape, tiles: Tiles) -> Plan:
    """Returns a plan with the portable forward; its backward tiles do not matter."""
    head_chunk = 1 if shape.mask == FULL else 4  # as the planner launches kernels that wait for nobody
    return Plan("portable", "two_pass", "portable", tiles, tiles, head_chunk, forward_tiles=tiles)


def rendered(shape: ForwardShape, tiles: Tiles) -> standalone.Rendered:
    """Renders the kernel for tensors with the layouts of `Shape.tensors` and `allocated`."""
    site = shape.site()

    def interleaved(length: int | None, heads: int, dim: int) -> tuple[int, ...]:
        assert length is not None
        return length * heads * dim, dim, heads * dim, 1

    keys, rows = (shape.length, site.kv_heads), (site.q_len, site.q_heads)
    strides = {
        "Q": interleaved(shape.length, site.q_heads, site.head_dim),  # a part of a longer tensor, if there are fewer
        "K": interleaved(*keys, site.head_dim),
        "V": interleaved(*keys, site.value_dim),
        "OUT": interleaved(*rows, site.value_dim),
    }
    return standalone.render_forward(plan_of(shape, tiles), site, strides)


def portable(shape: ForwardShape, tensors: Results, tiles: Tiles) -> Run:
    """The kernel launched directly; out and log-sum-exp are allocated by every call, as a graph does."""
    kernel = rendered(shape, tiles)
    problem = _failure((shape, tiles, arch()))  # in Triton's cache already
    if problem:
        raise NotRun(problem)
    start = standalone.build(kernel, arch())[(kernel.grid, 1, 1)]
    named = dict(zip("QKV", tensors, strict=False))
    batch, q_heads, q_len, _ = named["Q"].shape

    def run() -> Results:
        q = named["Q"]
        out = q.new_empty(batch, q_len, q_heads, shape.value_dim).transpose(1, 2)
        lse = q.new_empty(batch, q_heads, q_len, dtype=torch.float32)
        given = named | {"OUT": out, "LSE": lse}
        start(*[given[name] for name in kernel.names])
        return out, lse

    return run


def hopper(shape: ForwardShape, tensors: Results) -> Run:
    if arch() != "sm_90" or shape.bits != 16:
        raise NotRun("16 bits on sm_90 only")
    q, k, v, _ = tensors
    spec = AttentionSpec(Mask(shape.mask), shape.scale, (BSHD,))
    run = launch.prepare((q, k, v), (), spec)
    return lambda: run((q, k, v, ()))


def others_of(shape: ForwardShape) -> tuple[str, ...]:
    """Returns PyTorch's forwards that support the shape."""
    return ("flash", "cudnn") if shape.bits == 16 else ("efficient",)


def other(shape: ForwardShape, tensors: Results, name: str) -> Run:
    """Prepares a forward of PyTorch that returns a log-sum-exp, for full or causal masks (causal: equal lengths)."""
    q, k, v, _ = tensors
    causal, rest = shape.mask.lo is not None, {"scale": shape.scale}
    calls: dict[str, Run] = {
        "flash": lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, **rest),
        "cudnn": lambda: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, **rest),
        "efficient": lambda: aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, **rest),
    }
    return calls[name]


def tiles_of(shape: ForwardShape, architecture: str, tried: Mapping[str, Sequence[Tiles]]) -> dict[str, Tiles]:
    """The tiles with which the portable forward is timed, by the names of their columns."""
    own = forward_tiles(architecture, shape.bits, shape.head_dim, shape.value_dim)
    if architecture == "sm_90" and shape.group in ("narrow", "short", "decode"):
        return {}
    others = tried.get(shape.group, ()) if shape.length == TRIED_AT else ()
    return {"portable": own} | {str(tiles): tiles for tiles in others if tiles != own}


def contenders(shape: ForwardShape, architecture: str, tried: Mapping[str, Sequence[Tiles]]) -> Contenders:
    found: dict[str, Callable[..., Run]] = {
        name: functools.partial(portable, tiles=tiles)
        for name, tiles in tiles_of(shape, architecture, tried).items()
    }  # fmt: skip
    if shape.bits == 16:
        found["hopper"] = hopper
    return found | {name: functools.partial(other, name=name) for name in others_of(shape)}


def measure(shape: ForwardShape, tried: Mapping[str, Sequence[Tiles]], seconds: float) -> dict[str, Any]:
    def facts(runs: Mapping[str, Run], results: Mapping[str, Results], times: Mapping[str, float]) -> dict[str, Any]:
        others = [name for name in runs if name in others_of(shape)]
        ours = [name for name in runs if name not in others]
        row: dict[str, Any] = {"difference": None, "equal": None}
        if ours and others:
            row["difference"] = turns.relative_difference(results[ours[0]][0], results[others[0]][0])
        if ours:
            row["equal"] = all(turns.equal_calls(runs[n], results[n], 10 if times[n] < 20 else 3) for n in ours)
        return row

    return turns.measure(shape, contenders(shape, arch(), tried), facts, repeats=20, seconds=seconds)


Job = tuple[ForwardShape, Tiles, str]


@functools.cache
def _failure(job: Job) -> str:
    """Returns why a kernel does not compile or fit, or "" and leaves the kernel in Triton's cache."""
    shape, tiles, architecture = job
    try:
        compiled = standalone.build(rendered(shape, tiles), architecture)
    except Exception as error:  # a compiler crash is a property of one setting
        return f"{type(error).__name__}: {error}"[:200]
    shared, limit = compiled.metadata.shared, SHARED_BYTES[SAME_AS.get(architecture, architecture)]
    return f"{shared} bytes of shared memory, there are {limit}" if shared > limit else ""


def compile_all(found: Sequence[ForwardShape], tried: Mapping[str, Sequence[Tiles]], architecture: str) -> None:
    """Compiles all of our kernels, several in parallel."""
    jobs = [(s, tiles, architecture) for s in found for tiles in tiles_of(s, architecture, tried).values()]
    turns.in_parallel(_failure, jobs)
    if architecture == "sm_90":
        forward.compile_all([*dict.fromkeys(forward.problem_of(s) for s in found if s.bits == 16)])


def parse_tiles(words: Sequence[str]) -> dict[str, list[Tiles]]:
    """`fp32=64x32w8s1 16bit=64x64w4s3 ...` by the name of the group.

    Raises:
        ArgumentError: another group, or tiles that are none.
    """
    found: dict[str, list[Tiles]] = {}
    for word in words:
        group, _, tiles = word.partition("=")
        if group not in BITS:
            raise ArgumentError("tiles", word, [f"{name}=<tiles>" for name in BITS])
        found.setdefault(group, []).append(Tiles.parse(tiles))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="words, one of which a shape's name must contain")
    parser.add_argument("--tiles", nargs="*", help="settings that are tried beside the used ones; none: only those")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for the repeats of one shape")
    parser.add_argument("--name", default="portable", help="name of the results file")
    parser.add_argument("--list", action="store_true", help="print the names of the shapes and end")
    options = parser.parse_args()
    words = [f"{group}={tiles}" for group in TILES for tiles in TILES[group]]
    tried = parse_tiles(words if options.tiles is None else options.tiles)
    found = turns.chosen(shapes(), options.only)
    if options.list:
        print("\n".join(shape.name for shape in found))
        return
    common.watchdog(300)
    compile_all(found, tried, arch())
    rows = []
    for shape in found:
        rows.append(measure(shape, tried, options.seconds))
        print(rows[-1], flush=True)
    times = dict.fromkeys(name for row in rows for name in row["ms"])
    common.table(
        [
            {"shape": row["shape"]} | {f"{n} us": 1e3 * row["ms"][n] if n in row["ms"] else None for n in times}
            for row in rows
        ]
    )
    settings = {"only": options.only, "tiles": words if options.tiles is None else options.tiles}
    turns.report(options.name, rows, settings | {"seconds": options.seconds})
    wrong = [row["shape"] for row in rows if not row["equal"]]
    if wrong:
        raise SystemExit(f"a kernel of ours did not run, or not with equal bits: {wrong}")


if __name__ == "__main__":
    main()
