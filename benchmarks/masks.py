"""Masks that are data, dropout and biases, beside what a user would pick instead, in one run on one GPU.

    python -m benchmarks.masks [--only documents padded ...] [--name masks] [--list]

Forward and backward of one `scaled_dot_product_attention` in bf16, each compiled: "dash" under
deterministic algorithms, "torch" the same with dash_inductor switched off, "flex" FlexAttention with a block mask,
"varlen" FlashAttention-2 on packed documents (flash_attn if it is installed, else torch.nn.attention.varlen),
"operator" dash on `torch.nn.attention.varlen.varlen_attn`, "mask_mod" dash on FlexAttention with the mask of "flex",
"FA3" FlashAttention-3's forward and "FA4" FlashAttention-4 on packed documents (see docs/benchmarks.md), and "closed
form" dash on the plain mask of the same shape.
TFLOP/s over visible pairs, medians; all calls of a row take turns. A site that is not replaced is not timed: the
reason is printed instead. "torch" of rows with dropout draws other numbers. Results: benchmarks/results/masks.json.
"""

from __future__ import annotations

import argparse
import functools
import gc
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import dash_inductor

from . import common, library
from .common import NotRun
from .contenders import FA3
from .documents import packed, skewed, zipf
from .shapes import CAUSAL
from .turns import chosen, report, write

DEVICE = "cuda"
DROPOUT = 0.1
TABLES = (
    "find_starts", "first_equal", "seen", "classify", "write_seen", "unite_kinds", "rank_contributors",
    "write_tile_schedules", "write_rows", "write_document_tables", "measure_documents", "find_documents",
    "measure_documents_of_mask", "order_q_tiles",
)  # fmt: skip
"""The kernels of `dash_inductor::mask_tables`, `document_tiles` and `document_tiles_of_mask`."""


@dataclass(frozen=True)
class Row:
    """One attention with equal lengths of q and k.

    Args:
        name: its first word says what is special: "documents" (causal, packed), "padded" (full), "dense" (a causal mask
            as a tensor), "dropout" (causal) or "bias" (full, with a gradient).
        ends: of the documents of each batch element, or the one number of valid keys.
        head_dim: that of query, key and value.
    """

    name: str
    batch: int
    q_heads: int
    kv_heads: int
    length: int
    ends: tuple[tuple[int, ...], ...] = ()
    head_dim: int = 128

    @property
    def kind(self) -> str:
        return self.name.split(":")[0]

    @property
    def pairs(self) -> float:
        """The visible pairs of all batch elements and heads."""
        s = self.length
        if self.kind == "documents":
            lengths = [b - a for ends in self.ends for a, b in zip((0, *ends), ends, strict=False)]
            return self.q_heads * sum(n * (n + 1) / 2 for n in lengths)
        if self.kind == "padded":
            return self.q_heads * sum(ends[0] * s for ends in self.ends)
        return self.batch * self.q_heads * (s * s if self.kind == "bias" else s * (s + 1) / 2)

    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v, do: [batch, heads, length, head dim], heads interleaved as models have them."""
        generator = torch.Generator(device=DEVICE).manual_seed(0)
        heads = (self.q_heads, self.kv_heads, self.kv_heads, self.q_heads)
        shapes = [(self.batch, self.length, n, self.head_dim) for n in heads]
        return tuple(
            torch.randn(shape, device=DEVICE, generator=generator).to(torch.bfloat16).transpose(1, 2)
            for shape in shapes
        )

    def documents(self) -> Tensor:
        """Returns the document index of every token, int32 [batch, length]."""
        places = torch.arange(self.length, device=DEVICE)
        return torch.stack(
            [torch.bucketize(places, torch.tensor(e, device=DEVICE), right=True) for e in self.ends]
        ).int()

    def valid(self) -> Tensor:
        """Returns whether keys are valid, bool [batch, length]."""
        return torch.arange(self.length, device=DEVICE) < torch.tensor(self.ends, device=DEVICE)


ROWS = [
    Row("documents:16 in 32k", 1, 32, 8, 32768, (packed(16, 32768),)),
    Row("documents:8 in 16k", 1, 16, 4, 16384, (packed(8, 16384),)),
    Row("documents:64 in 32k", 1, 32, 8, 32768, (packed(64, 32768),)),
    Row("documents:4 in 32k", 1, 32, 8, 32768, (packed(4, 32768),)),
    Row("documents:32 by Zipf in 32k", 1, 32, 8, 32768, (zipf(32, 32768),)),
    Row("documents:1 of 16k and 64 of 256", 1, 32, 8, 32768, (skewed(16384, 64, 256),)),
    Row("documents:16 in 32k, 16/16 heads", 1, 16, 16, 32768, (packed(16, 32768),)),
    Row("documents:16 in 32k, d64", 1, 32, 8, 32768, (packed(16, 32768),), 64),
    Row("documents:64 in 32k, d64", 1, 32, 8, 32768, (packed(64, 32768),), 64),
    Row("padded:6000 and 7800 of 8192", 2, 16, 16, 8192, ((6000,), (7800,))),
    Row("dense:causal 4096", 2, 16, 16, 4096),
    Row("dropout:causal 8192", 2, 16, 16, 8192),
    Row("bias:[1,H,S,S] 4096", 2, 16, 16, 4096),
]

Step = tuple[Callable[[], Any], Callable[[], Any] | None]
"""A forward and a backward from saved tensors."""


def _step(attend: Callable[..., Tensor], leaves: list[Tensor], grad_out: Tensor, deterministic: bool) -> Step:
    """Returns forward and backward of a compiled function of the leaves, as two calls."""

    def under(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            torch.use_deterministic_algorithms(deterministic)
            try:
                return call()
            finally:
                torch.use_deterministic_algorithms(False)

        return run

    forward = under(lambda: attend(*leaves))
    out = forward()
    backward = under(lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True))
    backward()
    return forward, backward


def _arguments(row: Row) -> tuple[dict[str, Any], list[Tensor]]:
    """Returns the mask arguments of a row for a compiled call, and leaves other than q, k and v."""
    if row.kind == "documents":
        return {"documents": row.documents()}, []
    if row.kind == "padded":
        return {"valid": row.valid()}, []
    if row.kind == "dense":
        return {"mask": torch.ones(row.length, row.length, dtype=torch.bool, device=DEVICE).tril()}, []
    if row.kind == "bias":
        shape = (1, row.q_heads, row.length, row.length)
        return {}, [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()]
    return {"dropout": DROPOUT}, []


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    documents: Tensor | None = None,
    valid: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """The attention of a row as models of transformers write it, which repeat k and v where there is a mask.

    Its result is [batch, length, heads, head dim]: a graph expects the gradient of its output contiguous, and copies
    any other one.
    """
    if k.shape[1] != q.shape[1]:
        k, v = (repeated(t, q.shape[1] // k.shape[1]) for t in (k, v))
    if documents is not None:
        place = torch.arange(q.shape[2], device=q.device)
        same = documents[:, None, :, None] == documents[:, None, None, :]
        mask = same & (place[:, None] >= place)
    elif valid is not None:
        mask = valid[:, None, None, :]
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask if bias is None else bias,
        dropout_p=dropout,
        is_causal=causal or dropout > 0,
    )
    return out.transpose(1, 2)


def repeated(t: Tensor, group: int) -> Tensor:
    """Repeats each head `group` times: [batch, kv heads, length, head dim] to [batch, q heads, length, head dim]."""
    batch, heads, length, dim = t.shape
    return t[:, :, None].expand(batch, heads, group, length, dim).reshape(batch, heads * group, length, dim)


def _compiled(name: str, options: dict[str, Any]) -> Callable[..., Tensor]:
    """Compiles `attend` with these options for one contender, from a copy, since Dynamo caches per code object."""
    own = types.FunctionType(attend.__code__.replace(co_name=name), globals(), name, attend.__defaults__)
    own.__kwdefaults__ = attend.__kwdefaults__
    compiled: Callable[..., Tensor] = torch.compile(functools.partial(own, **options), dynamic=False)
    return compiled


def _leaves(row: Row) -> tuple[list[Tensor], Tensor]:
    *inputs, grad_out = row.tensors()
    return [t.detach().requires_grad_() for t in inputs], grad_out.transpose(1, 2)


def dash(row: Row) -> Step:
    options, more = _arguments(row)
    return _replaced("dash", row, options, more)


def closed_form(row: Row) -> Step:
    if row.kind not in ("padded", "dense", "dropout"):
        raise NotRun("there is no plain mask like this one")
    return _replaced("closed_form", row, {"causal": row.kind != "padded"}, [])


def _replaced(name: str, row: Row, options: dict[str, Any], more: list[Tensor]) -> Step:
    leaves, grad_out = _leaves(row)
    return _checked(_compiled(name, options), leaves + more, grad_out)


def _checked(compiled: Callable[..., Tensor], leaves: list[Tensor], grad_out: Tensor) -> Step:
    """Returns forward and backward of a function whose attention dash_inductor must replace."""
    dash_inductor.clear_sites()
    with torch._inductor.config.patch(force_disable_caches=True):  # a cached graph has no records
        step = _step(compiled, leaves, grad_out, deterministic=True)
    fallback = [record for record in dash_inductor.sites() if record.reason is not None]
    if fallback or not dash_inductor.sites():
        raise NotRun(f"not replaced: {fallback[0].reason.value}: {fallback[0].detail}" if fallback else "no site")  # type: ignore[union-attr]
    return step


def pytorch(row: Row) -> Step:
    """Prepares compiled PyTorch under deterministic algorithms; with a mask this is the memory-efficient kernel."""
    options, more = _arguments(row)
    leaves, grad_out = _leaves(row)
    with dash_inductor.disabled():
        return _step(_compiled("pytorch", options), leaves + more, grad_out, deterministic=True)


def flex(row: Row) -> Step:
    attended, leaves, grad_out = _flex(row)
    return _step(attended, leaves, grad_out, deterministic=False)


def mask_mod(row: Row) -> Step:
    """Prepares FlexAttention, compiled with dash_inductor."""
    return _checked(*_flex(row))


def _flex(row: Row) -> tuple[Callable[..., Tensor], list[Tensor], Tensor]:
    """Compiled FlexAttention with the mask of a row as a block mask; leaves; a gradient of the output."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if row.kind not in ("documents", "padded", "dense"):
        raise NotRun("FlexAttention has no dropout, and a bias with a gradient is another kernel")
    options, _ = _arguments(row)

    def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if row.kind == "documents":
            return (options["documents"][b, i] == options["documents"][b, j]) & (i >= j)
        return options["valid"][b, j] if row.kind == "padded" else i >= j

    mask = create_block_mask(keep, row.batch, None, row.length, row.length, device=DEVICE)
    leaves, grad_out = _leaves(row)

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flex_attention(q, k, v, block_mask=mask, enable_gqa=row.q_heads != row.kv_heads)  # type: ignore[assignment]
        return out.transpose(1, 2)

    return torch.compile(attended, dynamic=False), leaves, grad_out


def varlen(row: Row) -> Step:
    """Prepares FlashAttention-2 on packed documents, [tokens, heads, head dim]; its fast form is not deterministic."""
    ends, longest, leaves, grad_out = _packed(row)
    return _step(_varlen(ends, longest), leaves, grad_out, deterministic=False)


def _packed(row: Row) -> tuple[Tensor, int, list[Tensor], Tensor]:
    """The bounds of documents, the longest, leaves and a gradient of the output [tokens, heads, head dim]."""
    if row.kind != "documents" or row.batch != 1:
        raise NotRun("only for packed documents")
    ends = torch.tensor((0, *row.ends[0]), dtype=torch.int32, device=DEVICE)
    inputs, grad_out = _leaves(row)
    leaves = [t.detach()[0].transpose(0, 1).contiguous().requires_grad_() for t in inputs]
    return ends, int(ends.diff().max()), leaves, grad_out[0]


def operator(row: Row) -> Step:
    """Prepares PyTorch's packed operator, compiled with dash_inductor."""
    from torch.nn.attention.varlen import varlen_attn

    ends, longest, leaves, grad_out = _packed(row)
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0), **grouped)
        return out

    return _checked(torch.compile(run, dynamic=False), leaves, grad_out)


def flash3(row: Row) -> Step:
    """Prepares FlashAttention-3 on packed documents, in the library that `contenders.FA3` names; it has no backward."""
    ends, longest, leaves, _ = _packed(row)
    q, k, v = (t.detach()[None].transpose(1, 2) for t in leaves)
    return library.named(FA3).forward((q, k, v), CAUSAL, row.head_dim**-0.5, row.name, ends, longest), None


def flash4(row: Row) -> Step:
    """Prepares FlashAttention-4 on packed documents; its backward runs through autograd, without its determinism."""
    try:
        from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]  # optional
    except ImportError as error:
        raise NotRun(f"FlashAttention-4 (the package flash-attn-4) is not there: {error}") from error
    ends, longest, leaves, grad_out = _packed(row)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
        )[0]
        return out

    return _step(run, leaves, grad_out, deterministic=False)


def _varlen(ends: Tensor, longest: int) -> Callable[..., Tensor]:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError as error:
            raise NotRun("neither flash_attn nor torch.nn.attention.varlen is there") from error

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            group = q.shape[1] // k.shape[1]  # not every version reads grouped heads
            k, v = (t.repeat_interleave(group, 1) for t in (k, v))
            out: Tensor = varlen_attn(q, k, v, ends, ends, longest, longest, **causal)
            return out

        names = inspect.signature(varlen_attn).parameters
        causal: dict[str, Any] = {"is_causal": True} if "is_causal" in names else {"window_size": (-1, 0)}
        return run
    return functools.partial(
        flash_attn_varlen_func,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
    )


CONTENDERS: dict[str, Callable[[Row], Step]] = {
    "dash": dash,
    "closed form": closed_form,
    "torch": pytorch,
    "flex": flex,
    "varlen": varlen,
    "operator": operator,
    "mask_mod": mask_mod,
    "FA3": flash3,
    "FA4": flash4,
}


def measure(row: Row, columns: Sequence[str], repeats: int) -> dict[str, Any]:
    """TFLOP/s of each contender's forward and backward over visible pairs, the times, and what did not run."""
    common.watchdog(300)
    torch._dynamo.reset()
    steps: dict[str, Step] = {}
    reasons = {}
    for name in columns:
        try:
            steps[name] = CONTENDERS[name](row)
        except (RuntimeError, ValueError, TypeError) as error:  # not run, not replaced, not supported, or out of memory
            reasons[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    result: dict[str, Any] = {"shape": row.name}
    times: dict[str, list[float]] = {}
    for place, direction, products in ((0, "forward", 2), (1, "backward", 5)):
        calls = {name: call for name, step in steps.items() if (call := step[place]) is not None}
        spent = common.time_ms(*calls.values(), repeats=repeats)
        for name, ms in zip(calls, spent, strict=True):
            times.setdefault(name, []).append(ms)
            # the closed form of a padded batch sees all pairs
            pairs = (
                row.batch * row.q_heads * row.length**2 if (name, row.kind) == ("closed form", "padded") else row.pairs
            )
            result[f"{name} {direction}"] = 2 * products * row.head_dim * pairs / ms / 1e9
    for name in ("dash", "operator", "mask_mod"):
        if name in steps:
            result |= _without_tables(name, row, steps[name][0], times[name][0])
    result |= {"ms": times, "not run": reasons}
    del steps
    gc.collect()
    torch.cuda.empty_cache()
    return result


def _without_tables(name: str, row: Row, forward: Callable[[], Any], ms: float) -> dict[str, Any]:
    """The time of what a layer of a model does not run, and the rate without it.

    A model builds the tables of its mask once for all layers; and the copy of the result is there because a graph that
    ends with attention may not return what its backward reads.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(5):
            forward()
        torch.cuda.synchronize()
    spent = {event.key: event.device_time_total / 5e3 for event in recorded.key_averages()}
    tables = sum(ms for kernel, ms in spent.items() if kernel in TABLES)
    if not tables:
        return {}
    copies = sum(ms for kernel, ms in spent.items() if kernel.startswith("triton_"))
    rate = 4 * row.head_dim * row.pairs / (ms - tables - copies) / 1e9
    return {f"{name} forward, tables apart": rate, "tables ms" if name == "dash" else f"{name} tables ms": tables}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="words, one of which a row's name must contain")
    parser.add_argument("--columns", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--name", default="masks", help="name of the results file")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--list", action="store_true", help="print the names of the rows and end")
    options = parser.parse_args()
    rows = chosen(ROWS, options.only)
    if options.list:
        print("\n".join(row.name for row in rows))
        return
    torch._functorch.config.donated_buffer = False  # the backward of one forward is called many times
    results: list[dict[str, Any]] = []
    chosen_options = {"only": options.only, "columns": options.columns, "repeats": options.repeats}
    for row in rows:
        results.append(measure(row, options.columns, options.repeats))
        said = ", ".join(f"{key} {value:.0f}" for key, value in results[-1].items() if key.endswith("ward"))
        print(f"{row.name}: {said}", file=sys.stderr, flush=True)
        write(options.name, results, chosen_options)  # now, so that a run that is cut off keeps them
    report(options.name, results, chosen_options)


if __name__ == "__main__":
    main()
