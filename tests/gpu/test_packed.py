"""Packed operators through torch.compile on a GPU: values, bits, CUDA graphs, memory, nested tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from dash_inductor import config, sites
from dash_inductor.records.records import clear_sites

from ..support.packed import COMPANIES, GROUPED, Company, documents, packed_attention
from ..support.repeats import differing_runs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

TOKENS = 1000
WINDOWS = {"full": (-1, -1), "causal": (-1, 0), "window": (300, 0), "both sides": (70, 30)}
STARTS = {
    "documents": (0, 300, 301, 301, 310, 640, TOKENS),
    "one": (0, TOKENS),
    "padded": (0, 300, 700),
    "single tokens": tuple(range(TOKENS + 1)),
    "none": (0, 0),
}
SHAPES = [
    # heads of query and of key, head dim, dtype
    (8, 8, 64, torch.bfloat16),
    (8, 2, 128, torch.float16),
    (4, 1, 128, torch.bfloat16),
    (6, 2, 64, torch.float16),
]
Shape = tuple[int, int, int, torch.dtype]
Step = Callable[..., list[Tensor]]
"""From q, k, v, grad_out and starts to the output and the gradients."""


def problem(shape: Shape, tokens: int = TOKENS) -> list[Tensor]:
    heads, kv_heads, dim, dtype = shape
    generator = torch.Generator("cuda").manual_seed(tokens)
    counts = heads, kv_heads, kv_heads, heads
    return [torch.randn(tokens, n, dim, device="cuda", dtype=dtype, generator=generator) for n in counts]


def step(window: tuple[int, int], **options: Any) -> Step:
    """A compiled call with its backward."""
    torch._dynamo.reset()
    clear_sites()

    def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        longest = q.shape[0]
        found: Tensor = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=window, **GROUPED)
        return found

    compiled = torch.compile(attend, fullgraph=True, **options)

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, starts: Tensor) -> list[Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with config.patch(strict=True):
            out = compiled(*leaves, starts)
            gradients = torch.autograd.grad(out, leaves, do)
        return [t.detach().clone() for t in (out, *gradients)]

    return run


def exact(tensors: list[Tensor], starts: Tensor, window: tuple[int, int]) -> list[Tensor]:
    """In fp64, every document alone."""
    *leaves, do = (t.double() for t in tensors)
    for t in leaves:
        t.requires_grad_()
    out = packed_attention(*leaves, starts, window)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


@pytest.mark.parametrize("window", list(WINDOWS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape: Shape, window: str) -> None:
    """All kinds of documents; tokens behind the last have their values, and change nothing of others."""
    run, tensors = step(WINDOWS[window]), problem(shape)
    for kind, places in STARTS.items():
        starts = documents(*places, device="cuda")
        found = run(*tensors, starts)
        assert {record.status for record in sites()} == {"replaced"}
        tolerance = 2e-2 if shape[3] == torch.bfloat16 else 4e-3
        expected = exact(tensors, starts, WINDOWS[window])
        for name, ours, true in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
            error, size = (ours.double() - true).abs().max(), max(0.5, float(true.abs().max()))
            assert error <= tolerance * size, f"{name}: {error:.2e} of {size:.2e} for {kind}"
        filled = [t.clone() for t in tensors]
        for t in filled:
            t[places[-1] :] = 100.0
        inside = slice(0, places[-1])
        again = run(*filled, starts)
        assert all(torch.equal(a[inside], b[inside]) for a, b in zip(found, again, strict=True)), kind


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_dynamic_sizes_give_the_same_bits(shape: Shape) -> None:
    for tokens in (700, TOKENS, 1280):
        tensors, starts = problem(shape, tokens), documents(0, 300, 301, tokens - 9, device="cuda")
        static = step((-1, 0), dynamic=False)(*tensors, starts)
        dynamic = step((-1, 0), dynamic=True)
        dynamic(*problem(shape, 384), documents(0, 384, device="cuda"))  # another number of tokens and of documents
        assert all(map(torch.equal, static, dynamic(*tensors, starts))), tokens


@pytest.mark.parametrize(
    ("shape", "window", "schedule"),
    [
        *((shape, window, "auto") for shape in SHAPES[:2] for window in WINDOWS),
        *((shape, "causal", "auto") for shape in SHAPES[2:]),
        *((shape, window, "two_pass") for shape, window in zip(SHAPES[:2], ("full", "window"), strict=True)),
    ],
    ids=str,
)
def test_a_document_has_the_same_bits_in_any_company(shape: Shape, window: str, schedule: str) -> None:
    """Alone, first, last and between others, of which any values are NaN, too."""
    with config.patch(schedule=schedule):
        run = step(WINDOWS[window], dynamic=True)
        for length in (300, 1, 64, 127, 128, 129):
            own = document(shape, length)
            alone = in_company(run, own, Company())
            for company, factor in itertools.product(COMPANIES, (1.0, 8.0, math.nan)):
                again = in_company(run, own, company, factor)
                assert all(map(torch.equal, alone, again)), (length, company, factor)


def document(shape: Shape, length: int) -> list[Tensor]:
    """q, k, v and the gradient of the output of one document."""
    generator = torch.Generator("cuda").manual_seed(length)
    heads, kv_heads, dim, dtype = shape
    counts = heads, kv_heads, kv_heads, heads
    return [torch.randn(length, n, dim, device="cuda", dtype=dtype, generator=generator) for n in counts]


def in_company(run: Step, own: list[Tensor], company: Company, factor: float = 1.0) -> list[Tensor]:
    """The output and the gradients of a document among others."""
    length = len(own[0])
    results = run(*(company.around(t, factor) for t in own), company.starts(length, "cuda"))
    return [t[company.slice(length)] for t in results]


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_a_document_within_tiles_of_others_has_other_bits(shape: Shape) -> None:
    """The negative control: a mask of documents among all tokens, in which tiles do not begin with documents."""
    own, company = document(shape, 300), Company(before=(27,))

    def masked(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        ids = torch.bucketize(torch.arange(q.shape[0], device="cuda"), starts, right=True)
        keep = (ids == ids[:, None])[None, None]
        q, k, v = (t[None].transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep).transpose(1, 2)[0]

    torch._dynamo.reset()
    compiled = torch.compile(masked, fullgraph=True)

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, starts: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with config.patch(strict=True):
            out = compiled(*leaves, starts)
            return [t.detach() for t in (out, *torch.autograd.grad(out, leaves, do))]

    assert not all(map(torch.equal, in_company(run, own, company), in_company(run, own, Company())))
    packed = step((-1, -1))
    assert all(map(torch.equal, in_company(packed, own, company), in_company(packed, own, Company())))


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_bits_are_those_of_attention_with_a_mask_of_documents(shape: Shape) -> None:
    """Every document begins with a tile."""
    tokens = 1024
    tensors, starts = problem(shape, tokens), documents(0, 256, 384, 384, tokens, device="cuda")
    found = step((-1, 0))(*tensors, starts)
    place = torch.arange(tokens, device="cuda")
    ids = torch.bucketize(place, starts, right=True)

    def masked(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        place = torch.arange(tokens, device="cuda")
        keep = (place <= place[:, None]) & (ids == ids[:, None])
        q, k, v = (t[None].transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[None, None]).transpose(1, 2)[0]

    *leaves, grad_out = tensors
    leaves = [t.detach().requires_grad_() for t in leaves]
    torch._dynamo.reset()
    with config.patch(strict=True):
        out = torch.compile(masked, fullgraph=True)(*leaves, ids)
        gradients = torch.autograd.grad(out, leaves, grad_out)
    assert all(map(torch.equal, found, (out, *gradients)))


@pytest.mark.parametrize("window", ["causal", "full"])
def test_repeats(window: str) -> None:
    """Idle and under load, in memory that held NaN."""
    starts = documents(*STARTS["documents"], device="cuda")
    for shape in SHAPES[:2]:
        tensors, run = problem(shape), step(WINDOWS[window])
        assert differing_runs(lambda: run(*tensors, starts), 50, load=True) == 0  # noqa: B023  # called at once
        assert differing_runs(lambda: run(*tensors, starts), 20, poisoned=True) == 0  # noqa: B023


def test_cuda_graphs() -> None:
    """Other documents of the same number run the same graph; the bits are those without CUDA graphs."""
    tensors, plain = problem(SHAPES[0]), step((-1, 0))
    places = [(0, 300, 700, TOKENS), (0, 0, 1, 900), (0, 128, 256, 512), (0, 300, 700, TOKENS)]
    expected = [plain(*tensors, documents(*place, device="cuda")) for place in places]
    run = step((-1, 0), mode="reduce-overhead")
    for place, found in itertools.islice(zip(itertools.cycle(places), itertools.cycle(expected)), 12):
        assert all(map(torch.equal, found, run(*tensors, documents(*place, device="cuda")))), place


def test_the_host_does_not_wait() -> None:
    run, tensors = step((-1, 0)), problem(SHAPES[0])
    starts = documents(*STARTS["documents"], device="cuda")
    run(*tensors, starts)
    torch.cuda.synchronize()
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(*tensors, starts)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_memory() -> None:
    """No tensor of all pairs: the pairs of 32768 tokens would take a GiB in bool."""
    tokens = 32768
    run, tensors = step((-1, 0)), problem((4, 2, 64, torch.bfloat16), tokens)
    starts = documents(0, 5000, 20000, tokens, device="cuda")
    run(*tensors, starts)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(*tensors, starts)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 256 << 20


def test_layers() -> None:
    """Several layers of one graph, two of which have windows; two trainings have the same bits."""
    torch._dynamo.reset()
    clear_sites()
    windows = ((-1, 0), (128, 0), (-1, 0), (128, 0))

    def model(x: Tensor, ws: list[Tensor], starts: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        for w, window in zip(ws, windows, strict=True):
            q, k, v = (x @ w).view(x.shape[0], 3, 8, 64).unbind(1)
            x = x + attend(q, k, v, starts, window).reshape(x.shape)
        return x

    def varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: tuple[int, int]) -> Tensor:
        found: Tensor = varlen_attn(q, k, v, starts, starts, TOKENS, TOKENS, window_size=window)
        return found

    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(TOKENS, 512, device="cuda", generator=generator)
    ws = [torch.randn(512, 1536, device="cuda", generator=generator) * 512**-0.5 for _ in windows]
    starts = documents(*STARTS["documents"], device="cuda")
    compiled = torch.compile(model, fullgraph=True)

    def gradients(dtype: torch.dtype, function: Callable[..., Tensor], attend: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x, *ws)]
        out = function(leaves[0], leaves[1:], starts, attend)
        return list(torch.autograd.grad(out.square().mean(), leaves))

    with config.patch(strict=True):
        first, second = (gradients(torch.bfloat16, compiled, varlen) for _ in range(2))
    assert [record.status for record in sites()] == ["replaced"] * len(windows)
    assert all(map(torch.equal, first, second))
    for ours, true in zip(first, gradients(torch.float64, model, packed_attention), strict=True):
        assert (ours - true).norm() <= 3e-2 * true.norm()


@pytest.mark.parametrize("made_inside", [False, True])
def test_nested_tensors(made_inside: bool) -> None:
    """Jagged tensors, through SDPA, which reaches the packed operator of ATen."""
    torch._dynamo.reset()
    clear_sites()
    lengths = (300, 1, 200, 499)
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(TOKENS, 512, device="cuda", generator=generator)
    ws = [torch.randn(512, 512, device="cuda", generator=generator) * 512**-0.5 for _ in range(3)]

    def nested(x: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(x, offsets, min_seqlen=1, max_seqlen=499)

    def attend(x: Tensor, *ws: Tensor) -> Tensor:
        x = nested(x) if made_inside else x
        q, k, v = (F.linear(x, w).unflatten(-1, (8, 64)).transpose(1, 2) for w in ws)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).values()

    leaves = [w.bfloat16().requires_grad_() for w in ws]
    given = x.bfloat16() if made_inside else nested(x.bfloat16())
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.compile(attend)(given, *leaves)
    found = torch.autograd.grad(out.float().square().sum(), leaves)
    assert [(record.status, record.op) for record in sites()] == [("replaced", "aten::_flash_attention_backward")]
    doubles = [w.double().requires_grad_() for w in ws]
    q, k, v = (F.linear(x.double(), w).unflatten(-1, (8, 64)) for w in doubles)
    true = torch.autograd.grad(packed_attention(q, k, v, offsets, (-1, 0)).square().sum(), doubles)
    for ours, theirs in zip(found, true, strict=True):
        assert (ours.double() - theirs).norm() <= 3e-2 * theirs.norm()
