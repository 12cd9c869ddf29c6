"""The Hopper forward on a GPU: against fp64, and bit by bit over repeats, load, graphs, streams, batches, layouts."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.forward import compile_all
from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.hopper.forward import build, launch
from dash_inductor.kernels.hopper.forward.device import consumer, producer
from dash_inductor.model import Band
from dash_inductor.model.traits import Traits
from dash_inductor.upstream import compat

from ..support import hopper_calls, sanitizer
from ..support.attention import Attention
from ..support.calls import forward_spec
from ..support.hopper import MARKS, any_forward
from ..support.hopper_forward import (
    Forward,
    check,
    forward,
    no_short_configs,
    repeated,
    results_of_the_cta,
    rounding_of_sums,
    whole_tiles,
)
from ..support.poison import MASKS as UNSEEN
from ..support.poison import surrounded
from ..support.processes import once_in_this_run
from ..support.repeats import bits, differing_runs, poison
from ..support.spinner import sms_held

pytestmark = MARKS

DIMS = [(8, 8), (40, 40), (64, 64), (72, 72), (96, 96), (128, 128), (64, 128), (192, 128), (136, 72), (256, 256)]
MASKS = [
    Band(),
    Band(0),
    Band(0, None, "bottom_right"),
    Band(0, 99),
    Band(0, 99, "bottom_right"),
    Band(-40, 40),
    Band(None, 5),
    Band(30, 500),
]
LENGTHS = [(1, 1), (17, 17), (128, 128), (255, 255), (1024, 1024), (113, 1023), (1023, 113), (1, 255), (255, 1)]

_groups = itertools.cycle((1, 4, 8, 2))
_dtypes = itertools.cycle((torch.bfloat16, torch.float16, torch.bfloat16))
# full and causal at all head dims, the other masks at every second one
GRID = [
    (dims, mask, next(_groups), next(_dtypes))
    for d, dims in enumerate(DIMS)
    for m, mask in enumerate(MASKS)
    if m < 2 or (d + m) % 2 == 0
]
all_configs = pytest.mark.parametrize("dims", build.FORWARD_CONFIGS, ids=str)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Kernels are compiled several at a time, before the tests find them in Triton's cache one by one."""
    bounds = list(itertools.product((False, True), repeat=2))
    used = itertools.product(build.FORWARD_CONFIGS, ("bfloat16", "float16"), bounds, (False, True))
    kernels = [build.Specialisation(dtype, *dims, Traits(lo, hi), even) for dims, dtype, (lo, hi), even in used]  # type: ignore[arg-type]
    once_in_this_run("hopper_forward", lambda: compile_all(kernels))


def problem(
    dims: tuple[int, int], mask: Band, q_len: int, kv_len: int, *, batch: int = 2, kv_heads: int = 2, group: int = 1,
    dtype: torch.dtype = torch.bfloat16, scale: float | None = None,
) -> Attention:  # fmt: skip
    p = Attention.random(
        q_len, kv_len, dims[0], mask, batch=batch, kv_heads=kv_heads, group=group, dtype=dtype, value_dim=dims[1]
    )
    return p if scale is None else dataclasses.replace(p, scale=scale)


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("dims", "mask", "group", "dtype"), GRID, ids=str)
def test_lengths(dims: tuple[int, int], mask: Band, group: int, dtype: torch.dtype) -> None:
    for q_len, kv_len in LENGTHS:
        p = problem(dims, mask, q_len, kv_len, batch=1, group=group, dtype=dtype)
        poison()
        check(p, forward(p))


@all_configs
def test_all_configs(dims: tuple[int, int]) -> None:
    for mask, q_len, kv_len in ((Band(), 700, 800), (Band(0), 777, 777), (Band(-40, 300), 900, 500)):
        p = problem(dims, mask, q_len, kv_len, group=2)
        check(p, forward(p))


@pytest.mark.parametrize("mask", [Band(), Band(0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_as_accurate_as_cudnn(dims: tuple[int, int], dtype: torch.dtype, mask: Band) -> None:
    p = problem(dims, mask, 2048, 2048, batch=2, kv_heads=4, dtype=dtype)
    check(p, forward(p), strict=True)


@pytest.mark.parametrize("mask", [Band(), Band(0), Band(-40, 300), Band(10, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_log_sum_exp_for_the_program(mask: Band, dtype: torch.dtype) -> None:
    """It is that of probabilities in fp32; the bits of a backward's own differ, and so do those of the output."""
    p = problem((64, 64), mask, 700, 800, group=2, dtype=dtype)
    found, own = forward(p, logsumexp=True), forward(p)
    check(p, found, logsumexp=True)
    check(p, own)
    if rounding_of_sums(dtype, (64, 64)):
        assert not torch.equal(found[0], own[0])
        assert not torch.equal(found[1], own[1])
    wide = problem((128, 128), mask, 700, 800, group=2, dtype=dtype)
    assert all(map(torch.equal, forward(wide, logsumexp=True), forward(wide)))


@pytest.mark.parametrize("scale", [-0.3, -1e-3, 0.0, -0.0, 1e-42, 1e-3, 1.0])
@pytest.mark.parametrize("mask", [Band(), Band(0), Band(10, 40)], ids=str)
def test_scales(mask: Band, scale: float) -> None:
    """Scales of any sign: the largest score is not the largest product with a negative scale."""
    for dims in ((64, 64), (128, 128)):
        p = problem(dims, mask, 300, 260, group=2, scale=scale)
        check(p, forward(p))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_scales_that_fp32_cannot_hold_are_refused(scale: float) -> None:
    with pytest.raises(ArgumentError, match="scale"):
        forward(problem((64, 64), Band(), 64, 64, scale=scale))


def test_large_scores() -> None:
    """Scores of thousands, far from one another: no overflow, and the largest of a row takes all."""
    for scale in (30.0, -30.0):
        p = problem((64, 64), Band(0), 400, 400, dtype=torch.float16, scale=scale)
        check(p, forward(p))


@pytest.mark.parametrize(("mask", "q_len", "kv_len"), UNSEEN, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (72, 40), (192, 128), (256, 256)], ids=str)
def test_what_nobody_sees_may_hold_anything(dims: tuple[int, int], mask: Band, q_len: int, kv_len: int) -> None:
    for factor in (1, 12):  # one tile, and many
        band = Band(*(None if x is None else x * factor for x in (mask.lo, mask.hi)), mask.anchor)
        p = problem(dims, band, q_len * factor, kv_len * factor, group=2)
        expected = forward(p)
        check(p, expected)
        for fill in (float("nan"), float("inf"), float("-inf")):
            assert same(expected, forward(surrounded(p, *any_forward(p), fill)[0])), fill


def spread(t: Tensor, extra: int) -> Tensor:
    """The same values in rows that are `extra` elements further apart."""
    wide = torch.empty(*t.shape[:3], t.shape[3] + extra, dtype=t.dtype, device=t.device)
    wide[..., : t.shape[3]] = t
    return wide[..., : t.shape[3]]


def shifted(t: Tensor) -> Tensor:
    """The same values, starting 2 bytes past an aligned address."""
    memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:]
    return memory.view(t.shape).copy_(t)


@pytest.mark.parametrize("scale", [0.1, -0.1])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_layouts_give_the_same_bits(dims: tuple[int, int], scale: float) -> None:
    """Any strides: read in place where TMA can, copied where it cannot."""
    p = problem(dims, Band(0), 300, 300, group=2, scale=scale)
    expected = forward(p)
    check(p, expected)
    layouts = {
        "contiguous": torch.Tensor.contiguous,
        "in place: rows apart": lambda t: spread(t, 8),
        "copied: rows not aligned": lambda t: spread(t, 3),
        "copied: start not aligned": shifted,
        "copied: columns strided": lambda t: t.mT.contiguous().mT,
    }
    for layout, change in layouts.items():
        other = dataclasses.replace(p, q=change(p.q), k=change(p.k), v=change(p.v))
        assert same(expected, forward(other)), layout


def test_fused_and_expanded_inputs() -> None:
    """Views into one fused tensor; a batch that is one element repeated."""
    qkv = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    p = Attention(q, k, v, v, Band(0), 0.125)
    check(p, forward(p))
    repeated_batch = [t[:1].expand(2, -1, -1, -1) for t in (q, k, v)]
    p = Attention(*repeated_batch, v, Band(0), 0.125)
    check(p, forward(p))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (72, 40), (192, 128)], ids=str)
def test_output_layouts(dims: tuple[int, int], order: tuple[int, ...]) -> None:
    p = problem(dims, Band(), 300, 200, group=2)
    expected, got = forward(p), forward(p, order=order)
    assert same(expected, got)
    assert got[0].permute(order).is_contiguous()


@all_configs
def test_nothing_is_written_outside(dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged lengths and head dims: every element of the results is written, and nothing before or behind them."""
    guarded: list[tuple[Tensor, int, int]] = []

    def allocate(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        size, around = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)), 1 << 16
        memory = torch.full((size + 2 * around,), -77, dtype=dtype, device="cuda")
        guarded.append((memory, around, size))
        return memory.as_strided(tuple(shape), tuple(strides), around)

    monkeypatch.setattr(compat, "empty_cuda", allocate)
    for mask in (Band(), Band(0), Band(-3, 70)):
        p = problem((dims[0] - 8, dims[1] - 24), mask, 333, 299, kv_heads=3)
        results = forward(p)
        check(p, results)
        assert not any((t == -77).any() for t in results)
    for memory, around, size in guarded:
        assert (memory[:around] == -77).all()
        assert (memory[around + size :] == -77).all()


def test_offsets_beyond_32_bits() -> None:
    """2**31 elements of q: the end of a windowed sequence has the bits of the same tokens alone."""
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs 40 GiB of GPU memory")
    length, tail, mask = 1 << 20, 4096, Band(0, 127)
    q, k, v = (
        torch.randn(1, length, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for heads in (16, 2, 2)
    )
    whole = hopper_calls.forward(q, k, v, forward_spec(mask, 0.1))
    alone = hopper_calls.forward(*(t[:, :, -tail:] for t in (q, k, v)), forward_spec(mask, 0.1))
    assert same([t[:, :, -tail + 128 :] for t in whole], [t[:, :, 128:] for t in alone])


# head dims, mask, group, q_len, kv_len
SHAPES = [
    ((64, 64), Band(0), 1, 1024, 1024),
    ((64, 64), Band(), 4, 1000, 1500),
    ((128, 128), Band(), 1, 1024, 1024),
    ((128, 128), Band(0), 2, 2048, 2048),
    ((128, 128), Band(0, 255), 8, 1023, 1023),
    ((192, 128), Band(0), 1, 1024, 1024),
    ((256, 256), Band(0), 2, 700, 1000),
    ((64, 64), Band(0), 2, 200, 300),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def of(shape: tuple[Any, ...], *, batch: int = 2, kv_heads: int = 4) -> Attention:
    dims, mask, group, q_len, kv_len = shape
    return problem(dims, mask, q_len, kv_len, batch=batch, kv_heads=kv_heads, group=group)


@pytest.mark.parametrize("load", [False, True], ids=["idle", "load"])
@shapes
def test_thousand_repeats(shape: tuple[Any, ...], load: bool) -> None:
    p = of(shape)
    check(p, forward(p))
    assert differing_runs(repeated(p), 1000, load=load) == 0


@shapes
def test_poisoned_memory(shape: tuple[Any, ...]) -> None:
    """Nothing that was not written is read, the counter included; every element of the results is written."""
    p = of(shape)
    clean = [t.clone() for t in forward(p)]
    assert differing_runs(repeated(p), 50, poisoned=True) == 0
    torch.use_deterministic_algorithms(True)
    assert same(clean, forward(p))


@shapes
def test_graph_replay(shape: tuple[Any, ...]) -> None:
    p = of(shape, batch=1)
    expected = [t.clone() for t in forward(p)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = forward(p)

    def replay() -> Forward:
        graph.replay()
        return captured

    for load in (False, True):
        assert differing_runs(replay, 200, load=load) == 0
    assert same(expected, captured)


@shapes
def test_any_batch_and_any_place(shape: tuple[Any, ...]) -> None:
    """A (batch element, head) has the same bits alone, and at every place of batches of 1 to 9."""
    p = of(shape, batch=9, kv_heads=2)
    whole = forward(p)
    for b in range(9):
        alone = dataclasses.replace(p, q=p.q[b : b + 1], k=p.k[b : b + 1], v=p.v[b : b + 1])
        assert same([t[b : b + 1] for t in whole], forward(alone))
    for size in range(1, 9):
        order = torch.randperm(9, device="cuda")[:size]
        part = dataclasses.replace(p, q=p.q[order], k=p.k[order], v=p.v[order])
        assert same([t[order] for t in whole], forward(part)), size


@shapes
def test_any_number_of_heads(shape: tuple[Any, ...]) -> None:
    p = of(shape, batch=1, kv_heads=7)
    whole = forward(p)
    for first, end in ((0, 1), (6, 7), (1, 3), (2, 7)):
        q, k, v = p.q[:, first * p.group : end * p.group], p.k[:, first:end], p.v[:, first:end]
        part = forward(dataclasses.replace(p, q=q, k=k, v=v))
        assert same([t[:, first * p.group : end * p.group] for t in whole], part)
    if p.group > 1:  # a head alone, and a group that is spelt out
        one = forward(dataclasses.replace(p, q=p.q[:, 1:2], k=p.k[:, :1], v=p.v[:, :1]))
        assert same([t[:, 1:2] for t in whole], one)
        k, v = (t.repeat_interleave(p.group, 1) for t in (p.k, p.v))
        assert same(whole, forward(dataclasses.replace(p, k=k, v=v)))


@all_configs
def test_rows_do_not_depend_on_later_ones(dims: tuple[int, int]) -> None:
    """Under a causal mask a row has the bits that it has in a longer sequence: masked tiles leave it as it is."""
    p = problem(dims, Band(0), 1024, 1024)
    whole = forward(p)
    for n in (1, 63, 64, 65, 127, 128, 129, 200, 512, 1000):
        shorter = dataclasses.replace(p, q=p.q[:, :, :n], k=p.k[:, :, :n], v=p.v[:, :, :n])
        assert same([t[:, :, :n] for t in whole], forward(shorter)), n


HALVED = [dims for dims, config in build.FORWARD_CONFIGS.items() if config.half_tiles]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [*HALVED, (40, 24), (136, 72)], ids=str)
def test_hidden_halves_change_no_bit(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Wherever the diagonal lies among tiles: lower bounds around half a kv tile and a whole one, both anchors."""
    bounds = [(lo, None) for lo in (-129, -128, -127, -65, -64, -63, -1, 0, 1, 63, 64, 65, 200)]
    bounds += [(0, 99), (-40, 300), (64, 64), (-64, 0)]
    masks = [Band(*both) for both in bounds] + [Band(0, None, "bottom_right"), Band(-70, 500, "bottom_right")]
    lengths = [(1, 1), (64, 128), (200, 129), (129, 200), (777, 1024), (1024, 700)]
    problems = [problem(dims, mask, *both, batch=1, group=2, dtype=dtype) for mask in masks for both in lengths]
    found = [forward(p) for p in problems]
    with whole_tiles():
        for p, half_tiles in zip(problems, found, strict=True):
            assert same(forward(p), half_tiles), (p.mask, p.q.shape, p.k.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (40, 24)], ids=str)
def test_short_settings_change_no_bit(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Few queries in tiles of two row blocks, and in tiles of three, which longer sequences have."""
    masks = [Band(), Band(0), Band(-40, 300), Band(None, -5)]
    masks += [Band(0, None, "bottom_right"), Band(-70, 90, "bottom_right")]
    lengths = [(1, 1), (1, 1000), (63, 64), (64, 200), (65, 128), (128, 128), (128, 777)]
    lengths += [(193, 193), (200, 129), (256, 300)]
    problems = [problem(dims, mask, *both, batch=3, group=2, dtype=dtype) for mask in masks for both in lengths]
    assert all(build.is_short((64, 64), p.q.shape[2]) for p in problems)
    found = [forward(p) for p in problems]
    with no_short_configs():
        for p, short in zip(problems, found, strict=True):
            assert same(forward(p), short), (p.mask, p.q.shape, p.k.shape)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_head_chunks_change_no_bit(dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head is computed once, wherever the list of tiles has it."""
    p = problem(dims, Band(0), 300, 300, batch=5, kv_heads=3, group=2)
    expected = forward(p)
    for head_chunks in ((1, 0), (1, 30), (7, 14), (7, 28), (30, 0), (30, 30)):
        hopper_calls.forget()
        monkeypatch.setattr(launch, "_head_chunks", lambda *_, of=head_chunks: of)
        assert same(forward(p), expected), head_chunks
    hopper_calls.forget()


@pytest.mark.parametrize("ctas", [1, 2, 7, 64, 131, 1000])
def test_any_number_of_ctas(ctas: int) -> None:
    for shape in SHAPES[:4]:
        p = of(shape)
        assert same(forward(p), forward(p, ctas=ctas))


def test_on_a_gpu_that_others_use() -> None:
    """With all but a few SMs held, CTAs come late and one after the other: nothing waits for them."""
    p = of(SHAPES[3])
    expected = [t.clone() for t in forward(p)]
    available = torch.cuda.get_device_properties(0).multi_processor_count
    with sms_held(available - 3) as held:
        got = forward(p)
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        assert not held.over()
    assert same(expected, got)


def test_two_streams_at_once() -> None:
    """Each call has a counter of its own."""
    problems = [of(SHAPES[0]), of(SHAPES[3])]
    expected = [[t.clone() for t in forward(p)] for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    different = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in problems]
    torch.cuda.synchronize()
    for _ in range(300):
        for p, stream, wanted, count in zip(problems, streams, expected, different, strict=True):
            with torch.cuda.stream(stream):
                for got, want in zip(forward(p), wanted, strict=True):
                    count += (bits(got) != bits(want)).any()
    torch.cuda.synchronize()
    assert [int(count) for count in different] == [0, 0]


@pytest.mark.parametrize("lengths", [(64, 64), (256, 128), (4096, 128)], ids=str)
def test_calls_in_turn_do_not_meet(lengths: tuple[int, int]) -> None:
    """The main kernel of a call starts while `prepare` runs, and finds the counter and results of the call before."""
    problems = [Attention.random(*lengths, 128, Band(), batch=1, kv_heads=1, seed=seed) for seed in range(2)]
    expected = [[t.clone() for t in forward(p)] for p in problems]
    assert not same(*expected)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(600):
        for got, wanted in zip(forward(problems[i % 2]), expected[i % 2], strict=True):
            different += (bits(got) != bits(wanted)).any()
    assert int(different) == 0


def test_what_follows_sees_the_result_and_what_precedes_is_seen() -> None:
    """Operands made just before the call, results changed just after it, without a pause between."""
    p = of(SHAPES[2])
    expected = forward(p)
    for _ in range(200):
        q = p.q.clone()
        out, lse = hopper_calls.forward(q, p.k, p.v, forward_spec(p.mask, p.scale))
        copies = out.clone(), lse.clone()
        out.zero_()
        lse.zero_()
        q.zero_()
        assert same(expected, copies)
        assert not out.any()
        assert not lse.any()


def test_negative_control() -> None:
    """Results that depend on which CTA computes a tile do not pass the same harness."""
    p = of(SHAPES[3])
    with results_of_the_cta():
        assert differing_runs(repeated(p), 100, load=True) > 0
    assert differing_runs(repeated(p), 100, load=True) == 0


def test_wrong_tensors_are_refused() -> None:
    p = problem((64, 64), Band(), 64, 64)
    wrong = {
        "query, key, value": {"q": p.q[0]},
        "key": {"k": p.k[..., :56]},
        "value": {"v": p.v[:, :, :63]},
        "query": {"q": p.q.repeat(1, 2, 1, 1)[:, :3]},
        "dtypes": {"v": p.v.half()},
        "devices": {"k": p.k.cpu()},
        "head_dim": {"q": p.q[..., :60], "k": p.k[..., :60]},
        "q_len": {"q": p.q[:, :, :0]},
    }
    for name, tensors in wrong.items():
        with pytest.raises(ArgumentError, match=name):
            forward(dataclasses.replace(p, **tensors))
    for order in ((0, 1, 2), (0, 0, 1, 3)):
        with pytest.raises(ArgumentError, match="order"):
            forward(p, order=order)
    with pytest.raises(ArgumentError, match="ctas=0"):
        forward(p, ctas=0)


@sanitizer.needed
@pytest.mark.parametrize("tool", ["memcheck", "initcheck"])
def test_sanitizer(tool: str) -> None:
    assert "========= ERROR SUMMARY: 0 errors" in sanitizer.report(tool, "hopper_forward_sanitized")


@sanitizer.needed
def test_racecheck() -> None:
    """Only Triton's own dispatch of the roles, as in the backward, and the facts of a tile may be reported.

    The producer's words about a tile are ordered by the barrier that q fills, which the tool does not follow: see
    docs/what-we-know.md.
    """
    races = [
        line
        for line in sanitizer.report("racecheck", "hopper_forward_sanitized")
        if "Race reported" in line or "hazards]" in line
    ]
    reported = {m.groups() if (m := re.search(r"access at \S+ in (\S+):(\d+)", line)) else (line, 0) for line in races}
    facts = {("producer.py", str(line)) for line in lines_of(producer.announce)}
    facts |= {("consumer.py", str(line)) for line in lines_of(consumer.announced)}
    assert {place for place in reported if place[0] != "entry.py"} <= facts


def lines_of(function: Any) -> range:
    """Line numbers of a device function in its file."""
    lines, first = inspect.getsourcelines(function.fn)
    return range(first, first + len(lines))
