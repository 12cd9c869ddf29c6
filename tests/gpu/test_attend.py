"""The portable forward on a GPU, and the portable kernels of masks that are data: values, and bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor.kernels.portable import standalone
from dash_inductor.kernels.portable.family import LIMIT, forward_tiles
from dash_inductor.kernels.reference import backward as reference
from dash_inductor.kernels.reference import forward as reference_forward
from dash_inductor.model import Band, Order, Plan

from ..support.calls import BSHD
from ..support.hopper_forward import check, check_distance
from ..support.keyed import KeyedAttention
from ..support.poison import MASKS as UNSEEN
from ..support.portable_plans import portable_plan
from ..support.repeats import bits, differing_runs
from ..support.together import Results, Together, dense, rounded, side_by_side

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda"
Dims = tuple[int, int]


@pytest.fixture(scope="module", autouse=True)
def compiled_side_by_side() -> Iterator[None]:
    with side_by_side():
        yield


@pytest.fixture(autouse=True)
def nothing_but_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators' eager kernels would give the right values too: they must not run here."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("the reference executor ran in place of a kernel")

    monkeypatch.setattr(reference_forward, "forward", refuse)
    monkeypatch.setattr(reference, "backward", refuse)


def arch() -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def problem(
    dims: Dims, mask: Band, q_len: int, kv_len: int, *, batch: int = 2, kv_heads: int = 2, group: int = 1,
    dtype: torch.dtype = BF16, scale: float | None = None, valid: str = "all",
    documents: str = "none",
) -> KeyedAttention:  # fmt: skip
    return KeyedAttention.random(
        q_len, kv_len, mask, dims=dims, batch=batch, kv_heads=kv_heads, group=group, dtype=dtype, valid=valid,
        documents=documents, scale=dims[0] ** -0.5 if scale is None else scale, device=DEVICE,
    )  # fmt: skip


def forward_plan(p: KeyedAttention) -> Plan:
    """The portable forward with its tiles for this architecture, which are not planned for 16 bits on sm_90."""
    tiles = forward_tiles(arch(), 8 * p.q.element_size(), p.q.shape[3], p.v.shape[3])
    return Plan("portable", "two_pass", "portable", tiles, tiles, head_chunk=4, forward_tiles=tiles)


def forwards(problems: Sequence[KeyedAttention], **how: Any) -> Together:
    return Together(problems, [forward_plan(p) for p in problems], **how)


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def differing(a: Sequence[Results], b: Sequence[Results]) -> list[int]:
    """The places in two lists of results at which any bit differs."""
    return [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not same(x, y)]


def check_all(problems: Sequence[KeyedAttention], results: Sequence[Results]) -> None:
    for p, (out, lse) in zip(problems, results, strict=True):
        check(dense(p), (out, lse), library=False, logsumexp=True)


def flat(results: Sequence[Results]) -> list[Tensor]:
    """The tensors that `repeats.differing_runs` compares."""
    return [tensor for result in results for tensor in result]


# ---- values

DIMS: list[Dims] = [(8, 8), (16, 16), (40, 40), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
BANDS = [
    Band(0, None, "bottom_right"),
    Band(0, 99),
    Band(-40, 40),  # look-ahead
    Band(None, 5),
    Band(30, 500),  # the first rows see no key, and in some lengths the last ones
    Band(-40, 99, "bottom_right"),
    Band(None, -5),  # the first keys are seen by no row
]
LENGTHS = [(113, 1023), (1023, 113), (128, 128), (255, 255), (17, 17), (2, 300), (300, 2)]
"""The first pair is the one that a graph is made for; it serves the others as it is."""

Case = tuple[Dims, Band, int, torch.dtype]


def grid() -> list[Case]:
    """Every head dim in every dtype with kernels for it, under two masks: full or causal, and one of the bands."""
    bands, groups = itertools.cycle(BANDS), itertools.cycle((1, 4, 8, 4, 1))
    plain = {BF16: (Band(0), Band(0)), FP16: (Band(), Band()), FP32: (Band(), Band(0))}
    return [
        (dims, mask, next(groups), dtype)
        for d, dims in enumerate(DIMS)
        for dtype in (BF16, FP16, FP32)
        if dtype != FP32 or max(dims) <= LIMIT
        for mask in (plain[dtype][d % 2], next(bands))
    ]


GRID = grid()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_lengths(dtype: torch.dtype) -> None:
    """One kernel per head dim and mask for all lengths, without the knowledge of any of them."""
    cases = [case for case in GRID if case[3] == dtype]
    run: Together | None = None
    for q_len, kv_len in LENGTHS:
        problems = [problem(dims, mask, q_len, kv_len, group=group, dtype=dtype) for dims, mask, group, _ in cases]
        run = run or forwards(problems, dynamic=(2,))
        check_all(problems, run(problems))


# head dims, mask, group, dtype, q_len, kv_len, scale
ODD: list[tuple[Dims, Band, int, torch.dtype, int, int, float]] = [
    ((64, 64), Band(0), 1, BF16, 1, 1, 0.125),
    ((128, 128), Band(), 8, BF16, 1, 255, 0.1),
    ((192, 128), Band(0, None, "bottom_right"), 1, FP16, 1, 255, 0.07),
    ((64, 64), Band(), 4, FP32, 1, 255, 0.125),
    ((40, 40), Band(0), 4, FP32, 255, 1, 0.2),
    ((256, 256), Band(), 1, BF16, 255, 1, 0.06),
    ((64, 64), Band(0), 2, BF16, 300, 260, -0.3),
    ((64, 64), Band(0), 2, BF16, 300, 260, 0.0),
    ((128, 128), Band(10, 40), 1, FP16, 300, 260, -0.3),
    ((64, 64), Band(), 1, FP32, 300, 260, -0.3),
    ((64, 64), Band(0), 1, FP16, 400, 400, 2.5),
]


def test_single_rows_and_keys_and_scales_of_any_sign() -> None:
    problems = [
        problem(dims, mask, q_len, kv_len, group=group, dtype=dtype, scale=scale)
        for dims, mask, group, dtype, q_len, kv_len, scale in ODD
    ]
    check_all(problems, forwards(problems)(problems))


# head dims, dtype, and by how much the bands and lengths of `UNSEEN` are multiplied: there are several tiles
POISONED: list[tuple[Dims, torch.dtype, int]] = [((64, 64), BF16, 8), ((192, 128), FP16, 8), ((40, 40), FP32, 2)]


def test_what_nobody_sees_may_hold_anything() -> None:
    """Rows without keys give 0 and -inf, also where all that others see is NaN."""
    problems = [
        problem(
            dims, Band(*(None if x is None else x * factor for x in (mask.lo, mask.hi)), mask.anchor), q_len * factor,
            kv_len * factor, group=2, dtype=dtype,
        ).surrounded(0.0)
        for i, (mask, q_len, kv_len) in enumerate(UNSEEN)
        for dims, dtype, factor in (POISONED[i % 2], POISONED[2])
    ]  # fmt: skip
    run = forwards(problems)
    expected = run(problems)
    check_all(problems, expected)
    for fill in (float("nan"), float("inf"), float("-inf")):
        assert differing(expected, run([p.surrounded(fill) for p in problems])) == [], fill
        everywhere = [replace(p, q=p.q * fill, k=p.k * fill, v=p.v * fill).surrounded(fill) for p in problems]
        for p, (out, lse) in zip(everywhere, run(everywhere), strict=True):
            blind = ~p.keep()[0].any(1)
            assert (out[:, :, blind] == 0).all(), p.mask
            assert (lse[:, :, blind] == -torch.inf).all(), p.mask
            assert blind.all() or out[:, :, ~blind].isnan().any(), "what somebody sees reaches him"


def spread(t: Tensor, extra: int) -> Tensor:
    """The same values in rows that are `extra` elements further apart."""
    wide = torch.full((*t.shape[:3], t.shape[3] + extra), float("nan"), dtype=t.dtype, device=t.device)
    wide[..., : t.shape[3]] = t
    return wide[..., : t.shape[3]]


def shifted(t: Tensor) -> Tensor:
    """The same values, starting one element past an aligned address."""
    memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:]
    return memory.view(t.shape).copy_(t)


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    torch.Tensor.contiguous,
    lambda t: spread(t, 8),
    lambda t: spread(t, 3),
    shifted,
    lambda t: t.mT.contiguous().mT,  # columns strided
]
ORDERS: list[Order] = [(0, 1, 2, 3), (2, 0, 1, 3)]


@pytest.mark.parametrize(("dims", "dtype"), [((64, 64), BF16), ((40, 40), FP32)], ids=str)
def test_layouts_give_the_same_bits(dims: Dims, dtype: torch.dtype) -> None:
    """Layouts of inputs and output; with them a view into one fused tensor, and a batch of one element repeated."""
    p = problem(dims, Band(0), 300, 333, group=2, dtype=dtype)
    others = [replace(p, q=change(p.q), k=change(p.k), v=change(p.v)) for change in LAYOUTS]
    qkv = torch.randn(2, 300, 3, 4, dims[0], device=DEVICE).to(dtype)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    fused = KeyedAttention(q, k, v, v, None, Band(0), 0.125)
    repeated = KeyedAttention(*(t[:1].expand(2, -1, -1, -1) for t in (q, k, v)), v, None, Band(0), 0.125)
    problems = [p, *others, *[p] * len(ORDERS), fused, repeated]
    orders = [*[BSHD] * (1 + len(others)), *ORDERS, BSHD, BSHD]
    first, *results = forwards(problems, orders=orders)(problems)
    check_all([p, fused, repeated], [first, *results[-2:]])
    assert differing([first] * (len(others) + len(ORDERS)), results[:-2]) == []
    for (out, _), order in zip([first, *results], orders, strict=True):
        assert out.permute(order).is_contiguous()
    alone = [t[:1] for t in results[-2]]
    assert same([torch.cat((t, t)) for t in alone], results[-1])


# ---- bits

# head dims, mask, group, dtype, q_len, kv_len
SHAPES: list[tuple[Dims, Band, int, torch.dtype, int, int]] = [
    ((64, 64), Band(0), 1, BF16, 1024, 1024),
    ((128, 128), Band(), 4, BF16, 1000, 1500),
    ((128, 128), Band(0, 255), 8, FP16, 1023, 1023),
    ((192, 128), Band(0), 1, BF16, 700, 700),
    ((64, 64), Band(), 2, FP32, 512, 512),
    ((40, 40), Band(-40, 40), 1, FP32, 300, 500),
]


def shaped(*, batch: int = 2, kv_heads: int = 2) -> list[KeyedAttention]:
    return [
        problem(dims, mask, q_len, kv_len, batch=batch, kv_heads=kv_heads, group=group, dtype=dtype)
        for dims, mask, group, dtype, q_len, kv_len in SHAPES
    ]


def rows_of(p: KeyedAttention, n: int) -> KeyedAttention:
    """The first `n` queries and keys of a causal problem; another one as it is."""
    if p.mask != Band(0):
        return p
    return replace(p, q=p.q[:, :, :n], k=p.k[:, :, :n], v=p.v[:, :, :n])


def test_repeats_and_dynamic_lengths() -> None:
    """A thousand calls, idle and under load; kernels that know nothing of lengths have the bits of those that do."""
    problems = shaped(kv_heads=4)
    run = forwards(problems)
    expected = [tuple(t.clone() for t in result) for result in run(problems)]
    check_all(problems, expected)
    assert differing_runs(lambda: flat(run(problems)), 1000) == 0
    assert differing_runs(lambda: flat(run(problems)), 1000, load=True) == 0
    assert differing_runs(lambda: flat(run(problems)), 50, poisoned=True) == 0

    dynamic = forwards(problems, dynamic=(2,))
    dynamic(
        [
            problem(dims, mask, 300 + i, 200 + i, kv_heads=4, group=group, dtype=dtype)
            for i, (dims, mask, group, dtype, _, _) in enumerate(SHAPES)
        ]
    )
    assert differing(expected, dynamic(problems)) == []
    for n in (2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 512, 700):  # masked tiles leave a row as it is
        parts = [rows_of(p, n) for p in problems]
        cut = [tuple(t[:, :, : p.q.shape[2]] for t in result) for p, result in zip(parts, expected, strict=True)]
        assert differing(cut, dynamic(parts)) == [], n


def elements_of(p: KeyedAttention, which: Any) -> KeyedAttention:
    """The same problem for some of its batch elements."""
    return p.for_elements(lambda t: t[which])


def test_any_batch_and_any_place() -> None:
    """A (batch element, head) has the same bits alone, and at every place of batches of 1 to 9."""
    problems = shaped(batch=9)
    run = forwards(problems, dynamic=(0,))
    whole = run(problems)
    check_all(problems, whole)
    for b in range(9):
        expected = [tuple(t[b : b + 1] for t in result) for result in whole]
        assert differing(expected, run([elements_of(p, slice(b, b + 1)) for p in problems])) == [], b
    for size in range(2, 9):
        order = torch.randperm(9)[:size].to(DEVICE)
        expected = [tuple(t[order] for t in result) for result in whole]
        assert differing(expected, run([elements_of(p, order) for p in problems])) == [], size


def heads_of(p: KeyedAttention, first: int, end: int) -> KeyedAttention:
    """The same problem for the kv heads first .. end-1, and the query heads of their groups."""
    return replace(p, q=p.q[:, first * p.group : end * p.group], k=p.k[:, first:end], v=p.v[:, first:end])


def test_any_number_of_heads() -> None:
    """A head's bits are the same beside other heads, other batch elements, in a group that is spelt out, or alone."""
    wholes, parts, expected = [], [], []
    for i in (0, 1, 4):
        dims, mask, group, dtype, q_len, kv_len = SHAPES[i]
        p = problem(dims, mask, q_len, kv_len, kv_heads=5, group=group, dtype=dtype)
        k, v = (t.repeat_interleave(group, 1) for t in (p.k, p.v))
        cuts = [(0, 1), (4, 5), (1, 3), (2, 5)]
        wholes.append(p)
        parts += [heads_of(p, *cut) for cut in cuts] + [replace(p, k=k, v=v)]
        expected += [(i, first * group, end * group) for first, end in cuts] + [(i, 0, 5 * group)]
        parts.append(replace(p, q=p.q[:, group - 1 : group], k=p.k[:, :1], v=p.v[:, :1]))
        expected.append((i, group - 1, group))
    problems = [*wholes, *parts]
    results = forwards(problems)(problems)
    check_all(wholes, results[: len(wholes)])
    whole = dict(zip((0, 1, 4), results, strict=False))
    wanted = [tuple(t[:, first:end] for t in whole[i]) for i, first, end in expected]
    assert differing(wanted, results[len(wholes) :]) == []


def launcher(p: KeyedAttention, place: str) -> Callable[[], Results]:
    """The forward launched directly, with an expression of Triton's added to its log-sum-exp."""
    (batch, q_heads, q_len, _), value_dim = p.q.shape, p.v.shape[3]
    q, k, v = (t.contiguous() for t in (p.q, p.k, p.v))
    kernel = standalone.render_forward(forward_plan(p), p.site())
    store = "q_rows * lse_head.strides[0], sums, mask"
    assert kernel.text.count(store) == 1
    kernel = replace(kernel, text=kernel.text.replace(store, f"q_rows * lse_head.strides[0], sums + {place}, mask"))
    compiled, _ = standalone.compile_for(kernel, arch())
    out = torch.empty(batch, q_heads, q_len, value_dim, dtype=p.q.dtype, device=DEVICE)
    lse = torch.empty(batch, q_heads, q_len, device=DEVICE)
    tensors = {"Q": q, "K": k, "V": v, "LSE": lse, "OUT": out}
    arguments = [tensors[name] for name in kernel.names]

    def run() -> Results:
        compiled[(kernel.grid, 1, 1)](*arguments)
        return out, lse

    return run


UNCHANGED, PROGRAM, MULTIPROCESSOR = "0.0", "tl.program_id(0)", "tl.extra.cuda.smid()"


def test_negative_controls() -> None:
    """Results that depend on the place in the grid, or on who computes them, do not pass the same comparisons."""
    p = problem((64, 64), Band(0), 1024, 1024, batch=4, kv_heads=8)
    last = elements_of(p, slice(3, 4))
    whole, alone = launcher(p, UNCHANGED), launcher(last, UNCHANGED)
    check(dense(p), whole(), library=False, logsumexp=True)  # type: ignore[arg-type]  # two of them
    assert same([t[3:] for t in whole()], alone())
    assert differing_runs(whole, 200, load=True) == 0
    assert not same([t[3:] for t in launcher(p, PROGRAM)()], launcher(last, PROGRAM)())
    assert differing_runs(launcher(p, MULTIPROCESSOR), 100, load=True) > 0


# ---- keys

# head dims, band, group, dtype, ordered schedule
KEYED: list[tuple[int, Band, int, torch.dtype, str]] = [
    (64, Band(), 1, BF16, "ascending"),
    (128, Band(0), 4, BF16, "descending"),
    (40, Band(-40, 99, "bottom_right"), 2, FP16, "spt"),
    (64, Band(0), 2, FP32, "spt"),
]
KEYED_LENGTHS = [(113, 300), (257, 257), (300, 130), (512, 640)]
"""The first pair is the one that a graph is made for.  In one there are more queries than keys."""
VALID = ["ones", "padded", "left", "holes", "nobody"]


def keyed(q_len: int, kv_len: int, valid: str, documents: str = "none") -> list[KeyedAttention]:
    """The problem in the layout of larger tensors, which may hold anything."""
    return [
        problem(
            (dim, dim), mask, q_len, kv_len, batch=3, group=group, dtype=dtype, valid=valid, documents=documents
        ).surrounded(0.0)
        for dim, mask, group, dtype, _ in KEYED
    ]


def keyed_plans(schedule: str, documents: str = "none") -> list[Plan]:
    """Plans of the portable kernels, under "two_pass" or (any other word) the ordered schedule of each problem."""
    return [
        portable_plan(p.site(), arch(), schedule if schedule == "two_pass" else ordered)
        for p, (_, _, _, _, ordered) in zip(keyed(*KEYED_LENGTHS[0], "holes", documents), KEYED, strict=True)
    ]


def check_keyed(p: KeyedAttention, results: Results) -> None:
    """out as `check` wants it; gradients with at most twice the error of `rounded`; zeros where nobody looks."""
    out, lse, *gradients = results
    exact_out, exact_lse, exact = p.exact()
    where = f"{tuple(p.q.shape)}, {tuple(p.k.shape)}, {p.mask}"
    rows, keys = p.keep().any(2), p.keep().any(1)
    seeing = rows[:, None].expand_as(lse)
    assert (out[~seeing] == 0).all(), where
    assert (lse[~seeing] == -torch.inf).all(), where
    theirs, bounds = rounded(p, exact_out.to(out.dtype), exact_lse.float())
    check_distance(out, theirs, exact_out, False, where)
    torch.testing.assert_close(lse[seeing].double(), exact_lse[seeing], atol=2e-5, rtol=1e-5, msg=where)
    # a row with one key has a gradient of zero, of which both sides have only fp32 rounding left
    rounding = 16 * torch.finfo(FP32).eps * float(p.do.abs().max() * p.v.abs().max()) * p.q.shape[3]
    for name, got, bound, wanted in zip(("dq", "dk", "dv"), gradients, bounds, exact, strict=True):
        error, allowed = (float((t.double() - wanted).abs().max()) for t in (got, bound))
        assert error <= 2 * allowed + rounding, f"{name}: error {error:.2e}, theirs {allowed:.2e} at {where}"
    for got, looked_at in zip(gradients, (rows, keys, keys), strict=True):
        assert (got.transpose(1, 2)[~looked_at] == 0).all(), where


@pytest.mark.parametrize("schedule", ["two_pass", "ordered"])
def test_keys(schedule: str) -> None:
    """Forward and backward, for all lengths and vectors of keys by the same kernels; hidden keys may hold anything."""
    plans = keyed_plans(schedule)
    assert {(p.kernel, p.forward, p.dq is None) for p in plans} == {("portable", "portable", schedule == "ordered")}
    run = Together(keyed(*KEYED_LENGTHS[0], "holes"), plans, with_backward=True, dynamic=(2,))
    for (q_len, kv_len), valid in itertools.product(KEYED_LENGTHS, VALID):
        problems = keyed(q_len, kv_len, valid)
        expected = run(problems)
        for p, results in zip(problems, expected, strict=True):
            check_keyed(p, results)
        for fill in (float("nan"), float("inf")):
            assert differing(expected, run([p.surrounded(fill) for p in problems])) == [], (valid, fill)


@pytest.mark.parametrize("schedule", ["two_pass", "ordered"])
def test_keys_bit_by_bit(schedule: str) -> None:
    """Repeats, idle and under load; static lengths; a batch element alone."""
    problems, plans = keyed(512, 640, "holes"), keyed_plans(schedule)
    run = Together(problems, plans, with_backward=True)
    expected = [tuple(t.clone() for t in result) for result in run(problems)]
    for p, results in zip(problems, expected, strict=True):
        check_keyed(p, results)
    assert differing_runs(lambda: flat(run(problems)), 200) == 0
    assert differing_runs(lambda: flat(run(problems)), 200, load=True) == 0
    assert differing_runs(lambda: flat(run(problems)), 20, poisoned=True) == 0
    dynamic = Together(problems, plans, with_backward=True, dynamic=(0, 2))
    dynamic(keyed(*KEYED_LENGTHS[0], "padded"))
    assert differing(expected, dynamic(problems)) == []
    order = torch.tensor([2, 0], device=DEVICE)
    parts = [elements_of(p, order) for p in problems]
    assert differing([tuple(t[order] for t in result) for result in expected], dynamic(parts)) == []


def test_keys_of_ones_change_no_bit() -> None:
    """No bit of the forward changes nor, under the same plan, of the gradients: full, causal, lengths of all kinds."""
    schedules = ["two_pass", "two_pass", "ordered", "ordered", "two_pass"]
    which = [0, 1, 1, 2, 3]
    lengths = [(512, 512), (300, 333), (300, 333), (257, 300), (256, 256)]
    plans, with_keys = [], []
    for schedule, i, (q_len, kv_len) in zip(schedules, which, lengths, strict=True):
        dim, mask, group, dtype, _ = KEYED[i]
        with_keys.append(problem((dim, dim), mask, q_len, kv_len, group=group, dtype=dtype, valid="ones"))
        plans.append(keyed_plans(schedule)[i])
    without = [replace(p, keys=None) for p in with_keys]
    problems = [*without, *with_keys]
    results = Together(problems, plans * 2, with_backward=True)(problems)
    half = len(without)
    assert differing([r[:2] for r in results[:half]], [r[:2] for r in results[half:]]) == [], "out, log-sum-exp"
    assert differing([r[2:] for r in results[:half]], [r[2:] for r in results[half:]]) == [], "gradients"


# ---- segments

DOCUMENTS = ["sorted", "repeated", "single", "apart", "same"]


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("schedule", ["two_pass", "ordered"])
def test_segments(schedule: str, documents: str) -> None:
    """Forward and backward of documents, without and with valid keys; what nobody sees may hold anything.

    One graph serves all lengths, except for equal ones, where queries and keys have one vector of ids.
    """
    plans = keyed_plans(schedule, documents)
    assert {(p.kernel, p.forward, p.dq is None) for p in plans} == {("portable", "portable", schedule == "ordered")}
    for valid in ("all", "holes"):
        runs: dict[bool, Together] = {}
        for q_len, kv_len in KEYED_LENGTHS:
            problems = keyed(q_len, kv_len, valid, documents)
            one = q_len == kv_len
            if one not in runs:
                runs[one] = Together(problems, plans, with_backward=True, dynamic=() if one else (2,))
            expected = runs[one](problems)
            for p, results in zip(problems, expected, strict=True):
                check_keyed(p, results)
            for fill in (float("nan"), float("inf")):
                poisoned = runs[one]([p.surrounded(fill) for p in problems])
                assert differing(expected, poisoned) == [], (q_len, kv_len, valid, fill)


@pytest.mark.parametrize("schedule", ["two_pass", "ordered"])
def test_segments_bit_by_bit(schedule: str) -> None:
    """Repeats, idle and under load; a batch element alone."""
    problems, plans = keyed(512, 640, "holes", "repeated"), keyed_plans(schedule, "repeated")
    run = Together(problems, plans, with_backward=True)
    expected = [tuple(t.clone() for t in result) for result in run(problems)]
    for p, results in zip(problems, expected, strict=True):
        check_keyed(p, results)
    assert differing_runs(lambda: flat(run(problems)), 100) == 0
    assert differing_runs(lambda: flat(run(problems)), 100, load=True) == 0
    assert differing_runs(lambda: flat(run(problems)), 20, poisoned=True) == 0
    dynamic = Together(problems, plans, with_backward=True, dynamic=(0, 2))
    assert differing(expected, dynamic(problems)) == []
    order = torch.tensor([2, 0], device=DEVICE)
    parts = [elements_of(p, order) for p in problems]
    assert differing([tuple(t[order] for t in result) for result in expected], dynamic(parts)) == []


def test_one_document_changes_no_bit() -> None:
    """No bit of the forward changes nor, under the same plan, of the gradients."""
    one = [
        problem((dim, dim), mask, 300, 333, group=group, dtype=dtype, documents="same")
        for dim, mask, group, dtype, _ in KEYED
    ]
    without = [replace(p, segments=None) for p in one]
    plans = [*keyed_plans("two_pass")[:2], *keyed_plans("ordered")[2:]]
    results = Together([*without, *one], plans * 2, with_backward=True)([*without, *one])
    assert differing(results[: len(one)], results[len(one) :]) == []
