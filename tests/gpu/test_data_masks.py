"""Masks that are data through torch.compile on a GPU: values, bits, and what nobody looks at."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor import clear_sites, config, sites

from ..support.repeats import differing_runs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

Vectors = tuple[Tensor, Tensor]
"""Validity of keys and segment ids, int64 [batch, length]."""
Step = Callable[..., list[Tensor]]
"""From q, k, v, grad_out and vectors to the output and the gradients."""

VECTORS = ("ones", "right", "left", "holes", "nobody", "packed", "short documents", "shuffled ids", "both")
SHAPES = [
    # batch, heads of query and of key, head dim, dtype
    (2, 8, 8, 64, torch.bfloat16),
    (3, 8, 2, 128, torch.float16),
    (2, 3, 3, 256, torch.bfloat16),
]
LENGTHS = (1000, 1280)
BANDS: dict[str, tuple[int | None, int | None]] = {"full": (None, None), "causal": (0, None), "window": (0, 300)}


def vectors(kind: str, batch: int, length: int) -> Vectors:
    generator = torch.Generator().manual_seed(length)

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    places = torch.arange(length).expand(batch, -1)
    cut = torch.tensor([[length], [length // 3], [7]])[:batch]
    valid, ids = torch.ones(batch, length, dtype=torch.int64), torch.zeros(batch, length, dtype=torch.int64)
    if kind == "right":
        valid = (places < cut).long()
    elif kind == "left":
        valid = (places >= length - cut).long()
    elif kind in ("holes", "both"):
        valid = (numbers(10, batch, length) > 2).long()
    elif kind == "nobody":
        valid[1] = 0
    if kind in ("packed", "both"):
        ids = (numbers(150, batch, length) == 0).cumsum(1)
    elif kind == "short documents":
        ids = (numbers(3, batch, length) == 0).cumsum(1)
    elif kind == "shuffled ids":
        ids = numbers(3, batch, length) * 2**40 - 2**41
    return valid.cuda(), ids.cuda()


def keep_of(band: str, lengths: tuple[int, int], given: Vectors) -> Tensor:
    """bool [batch, 1, q_len, kv_len], as a model writes it."""
    valid, ids = given
    lo, hi = BANDS[band]
    q, kv = (torch.arange(length, device=valid.device) for length in lengths)
    keep = (valid != 0)[:, None, None, :] & (ids[:, None, :, None] == ids[:, None, None, :])
    if lo is not None:
        keep = keep & (kv <= q[:, None] - lo)
    if hi is not None:
        keep = keep & (kv >= q[:, None] - hi)
    return keep


def exact(tensors: list[Tensor], keep: Tensor) -> list[Tensor]:
    """Output and gradients in fp64, zeros where nothing is seen; keep: for all heads at once, or for each."""
    q, k, v, do = (t.double() for t in tensors)
    by_kv_head = keep.expand(-1, q.shape[1], -1, -1).unflatten(1, (k.shape[1], -1)).any(2)
    rows, keys = keep.any(3)[..., None], by_kv_head.any(2)[..., None]
    q, do = (torch.where(rows, t, 0.0) for t in (q, do))
    k, v = (torch.where(keys, t, 0.0) for t in (k, v))
    group = q.shape[1] // k.shape[1]
    for t in (q, k, v):
        t.requires_grad_()
    wide = [t.repeat_interleave(group, 1) for t in (k, v)]
    scores = (q @ wide[0].mT / math.sqrt(q.shape[3])).masked_fill(~keep, -math.inf)
    weights = torch.where(rows, torch.softmax(scores, 3), 0.0)
    out = weights @ wide[1]
    out.backward(do)
    return [out.detach(), *(t.grad for t in (q, k, v) if t.grad is not None)]


def step(band: str, *, masked: bool = True, dynamic: bool = False) -> Step:
    """A compiled attention with its backward; if not `masked`, full or causal without a mask tensor."""
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, ids: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        keep = keep_of(band, (q.shape[2], k.shape[2]), (valid, ids)) if masked else None
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, is_causal=not masked and band == "causal")

    compiled = torch.compile(attend, dynamic=dynamic, fullgraph=True)

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, given: Vectors) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with config.patch(strict=True):
            out = compiled(*leaves, *given)
            out.backward(do)
        return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]

    return run


def problem(shape: tuple[int, int, int, int, torch.dtype], length: int) -> list[Tensor]:
    batch, heads, kv_heads, dim, dtype = shape
    generator = torch.Generator("cuda").manual_seed(length)
    counts = heads, kv_heads, kv_heads, heads
    sizes = [(batch, length, count, dim) for count in counts]
    return [torch.randn(s, device="cuda", dtype=dtype, generator=generator).transpose(1, 2) for s in sizes]


@pytest.mark.parametrize("band", list(BANDS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape: tuple[int, int, int, int, torch.dtype], band: str) -> None:
    """All kinds of vectors by one graph per length; what nobody looks at may hold anything and changes no bit."""
    for length in LENGTHS:
        run = step(band)
        tensors = problem(shape, length)
        for kind in VECTORS:
            given = vectors(kind, shape[0], length)
            keep = keep_of(band, (length, length), given)
            found = run(*tensors, given)
            where = f"{band} {kind} {length}"
            fates = {(r.status, r.forward, r.plan and r.plan.kernel) for r in sites()}
            assert fates == {("replaced", "hopper", "hopper")}, where
            for name, ours, theirs in zip(("out", "dq", "dk", "dv"), found, exact(tensors, keep), strict=True):
                error, size = (ours.double() - theirs).abs().max(), theirs.abs().max()
                tolerance = 2e-2 if shape[4] == torch.bfloat16 else 4e-3
                assert error <= tolerance * size, f"{name}: {error:.2e} of {size:.2e} at {where}"
            rows, keys = keep.any(3)[..., None], keep.any(2)[..., None]
            for fill in (math.nan, math.inf):
                q, do = (torch.where(rows, t, fill) for t in (tensors[0], tensors[3]))
                k, v = (torch.where(keys, t, fill) for t in tensors[1:3])
                assert all(map(torch.equal, found, run(q, k, v, do, given))), f"{where} {fill}"
            if kind == "ones" and band != "window":
                with config.patch(schedule="spt" if band == "causal" else "auto"):  # what segments are planned with
                    plain = step(band, masked=False)(*tensors, given)
                assert all(map(torch.equal, found, plain)), where
                run = step(band)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_valid_keys_alone(shape: tuple[int, int, int, int, torch.dtype]) -> None:
    """Queries are not set to zero there: those that see no key are in a batch element without any valid one."""
    torch._dynamo.reset()
    tensors = problem(shape, 700)

    @torch.compile
    def attend(q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(valid != 0)[:, None, None, :].expand(-1, 1, 700, -1))

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, valid: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with config.patch(strict=True):
            out = attend(*leaves, valid)
            out.backward(do)
        return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]

    for kind in ("ones", "right", "holes", "nobody"):
        valid = vectors(kind, shape[0], 700)[0]
        keep = (valid != 0)[:, None, None, :].expand(-1, 1, 700, -1)
        found = run(*tensors, valid)
        assert {r.mask for r in sites()} == {"keys(0)"}
        for name, ours, theirs in zip(("out", "dq", "dk", "dv"), found, exact(tensors, keep), strict=True):
            tolerance = 2e-2 if shape[4] == torch.bfloat16 else 4e-3
            assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max(), f"{name} {kind}"
        rows, keys = keep.any(3)[..., None], keep.any(2)[..., None]
        for fill in (math.nan, math.inf):
            q, do = (torch.where(rows, t, fill) for t in (tensors[0], tensors[3]))
            k, v = (torch.where(keys, t, fill) for t in tensors[1:3])
            assert all(map(torch.equal, found, run(q, k, v, do, valid))), f"{kind} {fill}"


def test_dynamic_lengths_and_a_batch_element_alone() -> None:
    shape = SHAPES[1]
    dynamic = step("causal", dynamic=True)
    for length, kind in itertools.product((700, *LENGTHS), ("left", "both")):
        tensors, given = problem(shape, length), vectors(kind, shape[0], length)
        found = dynamic(*tensors, given)
        static = step("causal")
        assert all(map(torch.equal, found, static(*tensors, given))), (length, kind)
        for b in range(shape[0]):
            alone = dynamic(*(t[b : b + 1] for t in tensors), tuple(t[b : b + 1] for t in given))
            assert all(torch.equal(a, t[b : b + 1]) for a, t in zip(alone, found, strict=True)), (length, kind, b)
        dynamic = step("causal", dynamic=True)


@pytest.mark.parametrize("kind", ["holes", "packed"])
def test_repeats(kind: str) -> None:
    """Idle and under load, in memory that held NaN."""
    for shape in SHAPES[:2]:
        tensors, given, run = problem(shape, 1280), vectors(kind, shape[0], 1280), step("causal")
        assert differing_runs(lambda: run(*tensors, given), 100) == 0  # noqa: B023  # called at once
        assert differing_runs(lambda: run(*tensors, given), 100, load=True) == 0  # noqa: B023
        assert differing_runs(lambda: run(*tensors, given), 20, poisoned=True) == 0  # noqa: B023


# --------------------------------------------------------------------------------------------------------- dense masks


def blotted(shape: Sequence[int], seed: int) -> Tensor:
    """A third each of the squares of 64 tokens is hidden, seen and mixed; some queries see nothing."""
    generator = torch.Generator("cuda").manual_seed(seed)
    squares, pairs, rows = (torch.rand(tuple(shape), device="cuda", generator=generator) for _ in range(3))
    of_square = [torch.arange(size, device="cuda") // 64 * 64 for size in shape[2:]]
    square = squares[:, :, of_square[0]][..., of_square[1]]
    return ((square > 0.67) | (square > 0.33) & (pairs < 0.3)) & (rows[..., :1] > 0.05)


DENSE: dict[str, Callable[[int, int, int, int], Tensor]] = {
    "for all": lambda b, h, q, k: blotted((1, 1, q, k), 0),
    "of batch elements": lambda b, h, q, k: blotted((b, 1, q, k), 1),
    "of heads": lambda b, h, q, k: blotted((1, h, q, k), 2),
    "of both": lambda b, h, q, k: blotted((b, h, q, k), 3),
    "expanded": lambda b, h, q, k: blotted((1, 1, q, k), 7).expand(b, h, -1, -1),
    "everything": lambda b, h, q, k: torch.ones(b, 1, q, k, dtype=torch.bool, device="cuda"),
    "nothing": lambda b, h, q, k: torch.zeros(b, 1, q, k, dtype=torch.bool, device="cuda"),
}  # fmt: skip


def dense_step(*, keys: bool = False, causal: bool = False, dynamic: bool = False) -> Step:
    """A compiled attention under a dense mask, beside valid keys and a causal band."""
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor, shown: Tensor, valid: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        keep = shown
        if keys:
            keep = keep & (valid != 0)[:, None, None, :]
        if causal:
            rows, columns = (torch.arange(length, device=q.device) for length in (q.shape[2], k.shape[2]))
            keep = keep & (rows[:, None] >= columns)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)

    compiled = torch.compile(attend, dynamic=dynamic, fullgraph=True)

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, shown: Tensor, valid: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with config.patch(strict=True):
            out = compiled(*leaves, shown, valid)
            out.backward(do)
        return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]

    return run


def check_dense(run: Step, tensors: list[Tensor], shown: Tensor, keep: Tensor, where: str) -> list[Tensor]:
    """Values, the kernels that ran, and the same bits again; `keep` is all that the mask says."""
    valid = vectors("both", len(tensors[0]), tensors[1].shape[2])[0]
    found = run(*tensors, shown, valid)
    assert {(r.status, r.forward, r.plan and r.plan.kernel) for r in sites()} == {("replaced", "hopper", "hopper")}
    assert all("dense(" in str(r.mask) for r in sites()), where
    keep = keep.expand(len(tensors[0]), -1, tensors[0].shape[2], tensors[1].shape[2])
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), found, exact(tensors, keep), strict=True):
        error, size = (ours.double() - theirs).abs().max(), theirs.abs().max()
        assert error <= (2e-2 if ours.dtype == torch.bfloat16 else 4e-3) * size, (
            f"{name}: {error:.2e} of {size:.2e} at {where}"
        )
    assert all(map(torch.equal, found, run(*tensors, shown, valid))), where
    return found


def of_lengths(shape: tuple[int, int, int, int, torch.dtype], q_len: int, kv_len: int) -> list[Tensor]:
    q, _, _, do = problem(shape, q_len)
    return [q, *problem(shape, kv_len)[1:3], do]


@pytest.mark.parametrize("how", DENSE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_masks(shape: tuple[int, int, int, int, torch.dtype], how: str) -> None:
    """Masks of any batch elements and heads; lengths that fill tiles and lengths that do not.

    Other strides along rows and keys never come: under them PyTorch computes by its math implementation.  The kernels
    of tables read any, see `test_gpu_tables`.
    """
    batch, heads = shape[:2]
    for q_len, kv_len in ((640, 640), (1000, 777), (193, 1280)):
        shown = DENSE[how](batch, heads, q_len, kv_len)
        check_dense(dense_step(), of_lengths(shape, q_len, kv_len), shown, shown, f"{how} {q_len} {kv_len}")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_masks_beside_valid_keys(shape: tuple[int, int, int, int, torch.dtype], causal: bool) -> None:
    for q_len, kv_len in ((640, 640), (700, 1001)):
        shown = DENSE["of heads"](*shape[:2], q_len, kv_len)
        keep = shown & (vectors("both", shape[0], kv_len)[0] != 0)[:, None, None, :]
        if causal:
            keep = keep & torch.ones(q_len, kv_len, dtype=torch.bool, device="cuda").tril()
        run = dense_step(keys=True, causal=causal)
        check_dense(run, of_lengths(shape, q_len, kv_len), shown, keep, f"{q_len} {kv_len} causal={causal}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_causal_dense_mask_has_the_bits_of_the_closed_form(shape: tuple[int, int, int, int, torch.dtype]) -> None:
    """It selects the same scores, and is planned as a causal mask is."""
    for length in LENGTHS:
        clear_sites()
        tensors = problem(shape, length)
        shown = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda").tril()
        found = check_dense(dense_step(), tensors, shown, shown, f"{length}")
        given = vectors("ones", shape[0], length)
        with config.patch(schedule="bent_fold"):
            plain = step("causal", masked=False)(*tensors, given)
        assert all(map(torch.equal, found, plain)), length


def test_dense_masks_of_dynamic_lengths_and_a_batch_element_alone() -> None:
    shape = SHAPES[1]
    dynamic = dense_step(keys=True, dynamic=True)
    for q_len, kv_len in ((700, 700), (1000, 1280)):
        tensors, shown = of_lengths(shape, q_len, kv_len), DENSE["of both"](*shape[:2], q_len, kv_len)
        valid = vectors("both", shape[0], kv_len)[0]
        found = dynamic(*tensors, shown, valid)
        static = dense_step(keys=True)
        assert all(map(torch.equal, found, static(*tensors, shown, valid))), (q_len, kv_len)
        for b in range(shape[0]):
            alone = static(*(t[b : b + 1] for t in (*tensors, shown, valid)))
            assert all(torch.equal(a, t[b : b + 1]) for a, t in zip(alone, found, strict=True)), (q_len, kv_len, b)
        dynamic = dense_step(keys=True, dynamic=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_masks_repeat(shape: tuple[int, int, int, int, torch.dtype]) -> None:
    """Idle and under load, in memory that held NaN: bits that no step reads may be anything."""
    tensors, shown = problem(shape, 1280), DENSE["of batch elements"](*shape[:2], 1280, 1280)
    run, valid = dense_step(), vectors("ones", shape[0], 1280)[0]
    assert differing_runs(lambda: run(*tensors, shown, valid), 100) == 0
    assert differing_runs(lambda: run(*tensors, shown, valid), 100, load=True) == 0
    assert differing_runs(lambda: run(*tensors, shown, valid), 20, poisoned=True) == 0
