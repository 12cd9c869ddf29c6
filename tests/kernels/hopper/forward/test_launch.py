"""The host side of the Hopper forward without a GPU: checks, scales, descriptors, launch order, and the control."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.common import call_launches, launcher, score
from dash_inductor.kernels.common.arguments import flat
from dash_inductor.kernels.hopper import execution
from dash_inductor.kernels.hopper.forward import build, launch
from dash_inductor.kernels.hopper.forward.arguments import DATA, DROPOUT
from dash_inductor.kernels.hopper.forward.data import ForwardData
from dash_inductor.kernels.hopper.forward.device import entry
from dash_inductor.kernels.hopper.shared import prepared
from dash_inductor.kernels.hopper.shared.prepared import used_extras
from dash_inductor.model import AttentionSpec, Band, Dropout, Mask, Operand, Site
from dash_inductor.model.components import Segments
from dash_inductor.model.plan import Plan, Tiles
from dash_inductor.operators.document_tiles import document_tiles_of_mask
from dash_inductor.operators.mask_tables import mask_tables
from dash_inductor.planning import plan
from dash_inductor.schedule import Problem
from dash_inductor.upstream import compat

from ....support import forward_tables, hopper_forward
from ....support.attention import Attention
from ....support.call_launches import packing
from ....support.calls import BSHD, forward_spec_of, traits_of
from ....support.dropout import dense as attention_with
from ....support.dropout import kept_pairs
from ....support.hopper_calls import given
from ....support.hopper_forward import results_of_the_cta
from ....support.hopper_forward_builds import Case
from ....support.hopper_forward_glue import (
    Descriptor,
    ForwardSimulation,
    Input,
    Output,
    Pointer,
    arguments_of,
    constants_of,
)

SMS = 132
FULL = Band()


@dataclass
class Launches:
    """The launches that would have been made: (kernel, grid, descriptors, stream, addresses, arguments)."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    problems: list[build.Specialisation] = field(default_factory=list)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """A device of SMS SMs on which nothing runs."""
    seen = Launches()

    def kernel(compiled: str, grid: int, descriptors: Sequence[Any] = ()) -> Any:
        def pack(stream: int, addresses: Sequence[int], *arguments: Any) -> Any:
            return ((compiled, grid, list(descriptors), stream, list(addresses), list(arguments)),)

        return SimpleNamespace(pack=pack)

    def kernels(problem: build.Specialisation, device: int) -> Any:
        seen.problems.append(problem)
        return SimpleNamespace(prepare="prepare", main="main")

    properties = SimpleNamespace(multi_processor_count=SMS)
    monkeypatch.setattr(launcher, "KernelLauncher", kernel)
    packing(monkeypatch, seen.calls.extend)
    monkeypatch.setattr(launch, "kernels", kernels)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(call_launches, "raw_stream", lambda device: 7)
    monkeypatch.setattr(
        compat, "empty_cuda", lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
    )
    return seen


def tensors(
    q_len: int = 100, kv_len: int = 90, dims: tuple[int, int] = (64, 64), group: int = 2, batch: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((2 * group, q_len, dims[0]), (2, kv_len, dims[0]), (2, kv_len, dims[1]))
    return tuple(torch.randn(batch, n, h, d).bfloat16().transpose(1, 2) for h, n, d in sizes)  # type: ignore[return-value]


def run(
    q: Tensor, k: Tensor, v: Tensor, band: Band = FULL, scale: float = 0.1, *, data: ForwardData | None = None,
    drops: Dropout | None = None, order: Sequence[int] = BSHD, softcap: float | None = None, ctas: int | None = None,
    **operands: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `launch.prepare` after its first lines, on tensors that pretend to lie on a GPU."""
    spec = replace(forward_spec_of(band, scale, data, order=order), softcap=softcap, dropout=drops)
    spec = replace(spec, sinks=Operand(9) if "sinks" in operands else None)
    spec, extras = given(spec, data, operands)
    tensors = q, k, v
    found = launch._launches(spec, ctas, tensors, extras)
    used = used_extras(ForwardData.places(spec, len(extras)), spec)
    out, lse = found([t.data_ptr() for t in (*tensors, *(extras[i] for i in used))])
    return out, lse


BANDS = [Band(), Band(0), Band(0, 9), Band(30, 40), Band(None, -20), Band(0, None, "bottom_right"), Band(500, 600)]


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (72, 40), (192, 128)], ids=str)
def test_a_call(launches: Launches, dims: tuple[int, int], band: Band) -> None:
    """The counter is reset first; descriptors hold the rows and keys that take part, arguments lengths and bounds."""
    q, k, v = tensors(dims=dims)
    out, lse = run(q, k, v, band, order=(2, 0, 1, 3))
    (prepare, main) = launches.calls
    assert prepare[:2] == ("prepare", 1)
    assert main[0] == "main"
    counter, padding = prepare[5]
    assert padding is None
    assert main[5][:2] == [lse.data_ptr(), counter]
    resolved = Problem(band, 100, 90, 64, 128).resolved.band
    assert main[5][2][:7] == (8, 4, 2, 100, 90, resolved.lo or 0, resolved.hi or 0)
    assert main[5][2][9] == pytest.approx(0.1 * 1.4426950408889634)
    keep = torch.tensor([[band.visible(i, j, 100, 90) for j in range(90)] for i in range(100)])
    rows, keys = (keep.any(axis).nonzero().flatten().tolist() or [0] for axis in (1, 0))
    operands = zip((q, k, v), (rows, keys, keys), main[2][:3], main[4][:3], strict=True)
    for tensor, seen, (sizes, strides), address in operands:
        offset = (address - tensor.data_ptr()) // 2
        assert not any(stride * 2 % 16 for stride in strides[:3])
        expected = tensor[:, :, seen[0] : seen[-1] + 1]
        storage = tensor.untyped_storage().data_ptr()
        got = tensor.as_strided(sizes, strides, offset + (tensor.data_ptr() - storage) // 2)
        assert torch.equal(got, expected)
    assert main[2][3][0] == [2, 4, 100, dims[1]] == list(out.shape)
    assert main[2][3][1] == list(out.stride())
    assert out.permute(2, 0, 1, 3).is_contiguous()
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()


@pytest.mark.parametrize("scale", [0.1, -0.1])
def test_the_main_kernel_for_few_queries(launches: Launches, monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """Without split-KV, it runs calls that its kernels would run; the plan says which."""
    monkeypatch.setattr(execution, "_check_data", lambda spec: None)
    q, k, v = (torch.randn(2, h, n, 64).bfloat16() for h, n in ((4, 1), (2, 2000), (2, 2000)))
    spec = forward_spec_of(FULL, scale, None, order=BSHD)
    site = Site("cuda", "bfloat16", 2, 4, 2, 1, 2000, 64, 64, spec)
    split: list[Site] = []
    monkeypatch.setattr(launch.few, "launches", lambda site, *tensors: split.append(site))
    asked: list[dict[str, Any]] = []
    prepare = launch.prepare
    monkeypatch.setattr(launch, "prepare", lambda *given, **how: asked.append(how))
    for split_kv in (True, False):
        fake = [SimpleNamespace(is_cuda=True, shape=t.shape) for t in (q, k, v)]
        execution._forward(fake, (), spec, plan(site, "sm_90", split_kv=split_kv), "")  # type: ignore[arg-type]
    assert [how["split_kv"] for how in asked] == [True, False]
    monkeypatch.setattr(launch, "prepare", prepare)
    for split_kv in (True, False):
        launch._launches(replace(spec, scale=0.1), None, (q, k, v), (), split_kv=split_kv)
    assert len(split) == 1
    assert [problem.short for problem in launches.problems] == [True]


@pytest.mark.parametrize("band", [Band(), Band(0, None, "bottom_right"), Band(-5, 90), Band(None, -70)], ids=str)
@pytest.mark.parametrize(
    ("dims", "scale", "q_len"),
    [
        ((64, 64), 0.1, 200),
        ((64, 64), 0.1, 260),
        ((72, 40), -0.2, 200),
        ((136, 128), 0.0, 200),
        ((192, 256), 1e-3, 200),
    ],
)
def test_a_call_computes_attention(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], scale: float, q_len: int, band: Band
) -> None:
    """The arguments from the host side, run by the roles as plain Python with the tiles of the build."""
    q, k, v = tensors(q_len, 170, dims)
    p = Attention(q, k, v, v, band, scale)
    if not scale > 0:
        q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
    got = run(q, k, v, band, scale, ctas=3)
    _, _, descriptors, _, addresses, arguments = launches.calls[1]
    operands = [
        Descriptor(t.as_strided(sizes, strides, (address - t.untyped_storage().data_ptr()) // 2))
        for t, (sizes, strides), address in zip((q, k, v), descriptors, addresses, strict=False)
    ]
    out, lse = map(Output, got)
    assert arguments[3:] == [None] * 7  # constants of a kernel of bands
    simulated(launches, operands, out, lse, {})
    assert (out.writes == 1).all()
    assert (lse.writes == 1).all()
    monkeypatch.setattr(hopper_forward, "cudnn", lambda p: None)
    hopper_forward.check(p, (out.tensor, lse.tensor))


def simulated(launches: Launches, operands: Sequence[Any], out: Output, lse: Output, memory: dict[int, Any]) -> None:
    """Run the main kernel's roles as plain Python with the arguments of its launch; memory: pointers by address."""
    _, grid, *_, arguments = launches.calls[1]
    values = (*operands, out, Pointer(lse), None, *arguments[2:])
    named = arguments_of(**dict(zip(entry.hopper_forward.arg_names, values, strict=False)))
    for name, group in (("data", DATA), ("dropout", DROPOUT)):
        given = named[name]
        if given is not None:
            pointers = [argument for argument, kind in group.types.items() if kind.startswith("*")]
            vars(given).update({argument: memory.get(getattr(given, argument)) for argument in pointers})
    ForwardSimulation(constants_of(launches.problems[0]), named, grid, rows=64).run()


def some_segment_ids(q_len: int, kv_len: int) -> tuple[Tensor, Tensor]:
    """Two documents, and a padded end, for two batch elements."""
    q_segment_ids = (torch.arange(q_len) > 60).int().expand(2, -1).contiguous()
    kv_segment_ids = (torch.arange(kv_len) > 75).int().expand(2, -1).contiguous()
    kv_segment_ids[1, -5:] = -1
    return q_segment_ids, kv_segment_ids


def some_data(q_len: int, kv_len: int, dims: tuple[int, int], band: Band, dense: Tensor | None) -> ForwardData:
    """The data of `some_segment_ids`, and of a dense mask."""
    q_segment_ids, kv_segment_ids = some_segment_ids(q_len, kv_len)
    band_keep = Attention.random(q_len, kv_len, 8, band, device="cpu").keep()
    config = build.FORWARD_CONFIGS[build.tile_dims(*dims)]
    has_lo, tiles = band.lo is not None, (config.consumers, config.block_kv)
    if dense is None:
        return forward_tables.of_segment_ids(q_segment_ids, kv_segment_ids, band_keep, has_lo, *tiles)
    sizes = 2, 4, q_len, kv_len
    return forward_tables.of_dense(dense, sizes, band_keep, *tiles, (q_segment_ids, kv_segment_ids))


@pytest.mark.parametrize("band", [Band(), Band(-5, 90)], ids=str)
@pytest.mark.parametrize("by_head", [None, False, True])
def test_a_call_with_data_computes_attention(launches: Launches, band: Band, by_head: bool | None) -> None:
    """As above; the dense mask is one for all heads, or one for each."""
    q_len, kv_len, dims = 100, 140, (64, 64)
    q, k, v = tensors(q_len, kv_len, dims)
    dense = None
    if by_head is not None:
        dense = torch.rand(2, 4 if by_head else 1, q_len, kv_len) < 0.5
    data = some_data(q_len, kv_len, dims, band, dense)
    got = run(q, k, v, band, data=data)
    assert (launches.problems[0].layout.QUERIES > 0) == (by_head is None)
    assert launches.problems[0].has_dense == (by_head is not None)
    _, _, descriptors, _, addresses, _ = launches.calls[1]
    operands = [
        Descriptor(t.as_strided(sizes, strides, (address - t.untyped_storage().data_ptr()) // 2))
        for t, (sizes, strides), address in zip((q, k, v), descriptors, addresses, strict=False)
    ]
    memory = {t.data_ptr(): Pointer(Input(in_memory(t))) for t in data if t is not None}
    out, lse = map(Output, got)
    simulated(launches, operands, out, lse, memory)
    keep = forward_tables.seen(*some_segment_ids(q_len, kv_len), Attention(q, k, v, v, band, 0.1).keep())[:, None]
    keep = keep if dense is None else keep & dense
    expected = hopper_forward.rounded_under(keep, q, k, v, 0.1)
    torch.testing.assert_close(out.tensor, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("band", [Band(), Band(-5, 90)], ids=str)
@pytest.mark.parametrize(("dims", "p"), [((64, 64), 1e-9), ((64, 64), 0.99), ((128, 128), 0.3)])
@pytest.mark.parametrize("has_data", [False, True])
def test_a_call_with_dropout_computes_attention(
    launches: Launches, band: Band, dims: tuple[int, int], p: float, has_data: bool
) -> None:
    """As above, of what the definition of the random bits keeps; the log-sum-exp is as without dropout."""
    q_len, kv_len = 200, 300
    q, k, v = tensors(q_len, kv_len, dims)
    data = some_data(q_len, kv_len, dims, band, None) if has_data else None
    seed = torch.tensor([-0x123456789ABCDEF])
    dropout = Dropout(p, Operand(0))
    got = run(q, k, v, band, data=data, drops=dropout, dropout=seed)
    assert launches.problems[0].traits.reads("dropout")
    _, _, descriptors, _, addresses, _ = launches.calls[1]
    operands = [
        Descriptor(t.as_strided(sizes, strides, (address - t.untyped_storage().data_ptr()) // 2))
        for t, (sizes, strides), address in zip((q, k, v), descriptors, addresses, strict=False)
    ]
    memory = {t.data_ptr(): Pointer(Input(in_memory(t))) for t in (*(data or ()), seed) if t is not None}
    out, lse = map(Output, got)
    simulated(launches, operands, out, lse, memory)
    visible = Attention(q, k, v, v, band, 0.1).keep()
    if data is not None:
        assert data.q_vectors is not None
        assert data.kv_vectors is not None
        visible = forward_tables.seen(data.q_vectors[:, 0], data.kv_vectors[:, 0], visible)[:, None]
    kept = kept_pairs(dropout, seed, 2, 4, q_len, kv_len)
    expected = attention_with(q.double(), k.double(), v.double(), visible, kept, dropout, 0.1)
    torch.testing.assert_close(out.tensor.double(), expected[0], rtol=2e-2, atol=2e-2 * dropout.rescale**0.5)
    torch.testing.assert_close(lse.tensor.double(), expected[1], rtol=1e-4, atol=1e-4)


def test_wrong_operands_are_refused(launches: Launches) -> None:
    q, k, v = tensors()
    drops, seed = Dropout(0.5, Operand(0)), torch.zeros(1, dtype=torch.int64)
    run(q, k, v, drops=drops, dropout=seed)
    for wrong in (seed.int(), seed[0], torch.zeros(2, dtype=torch.int64), seed.to("meta")):
        with pytest.raises(ArgumentError, match="dropout"):
            run(q, k, v, drops=drops, dropout=wrong)
    for size in ((2, 4, 100), (1, 4, 1)):
        run(q, k, v, sinks=torch.zeros(size))
    for wrong in (torch.zeros(1, 3, 1), torch.zeros(1, 1), torch.zeros(1, 4, 1).half()):
        with pytest.raises(ArgumentError, match="sinks"):
            run(q, k, v, sinks=wrong)


def in_memory(t: Tensor) -> Tensor:
    """The elements as they lie in memory."""
    return t.as_strided((t.untyped_storage().nbytes() // t.element_size() - t.storage_offset(),), (1,))


def test_wrong_data_is_refused(launches: Launches) -> None:
    q, k, v = tensors()
    good = some_data(100, 90, (64, 64), FULL, None)
    dense = some_data(100, 90, (64, 64), FULL, torch.ones(2, 4, 100, 90).bool())
    run(q, k, v, data=good)
    run(q, k, v, data=dense)
    assert good.q_vectors is not None
    assert dense.seen_bits is not None
    wrong: list[tuple[str, ForwardData, dict[str, Any]]] = [
        ("extras", good, {"q_vectors": None}),
        ("extras", good, {"q_vectors": None, "kv_vectors": None}),
        ("extras", dense, {"q_vectors": good.q_vectors}),
        (r"data\.q_vectors", good, {"q_vectors": good.q_vectors.long()}),
        (r"data\.kv_vectors", good, {"kv_vectors": good.q_vectors}),
        (r"data\.counts", good, {"counts": good.counts[:1]}),
        (r"data\.steps", good, {"steps": torch.stack([good.steps, good.steps], -1)[..., 0]}),
        (r"data\.keys_seen", dense, {"counts": good.counts}),
        (r"data\.steps", dense, {"counts": good.counts, "keys_seen": good.keys_seen}),
        (r"data\.keys_seen", good, {"keys_seen": good.keys_seen.byte()}),
        (r"data\.keys_seen", good, {"keys_seen": good.keys_seen[:, :, :-1]}),
        (r"data\.seen_bits", dense, {"seen_bits": dense.seen_bits[:2]}),
        (r"data\.seen_bits", dense, {"seen_bits": dense.seen_bits.mT.contiguous().mT}),
    ]
    for name, data, fields in wrong:
        with pytest.raises(ArgumentError, match=name):
            run(q, k, v, data=data._replace(**fields))


def test_data_from_the_operators_extras() -> None:
    """The operands of the call come first, then the tensors made from the mask's operands."""
    t = [torch.tensor(i) for i in range(12)]

    def of(mask: str, count: int, seed: int | None = None) -> ForwardData | None:
        dropout = None if seed is None else Dropout(0.1, Operand(seed))
        return ForwardData.of(AttentionSpec(Mask.parse(mask), 1.0, dropout=dropout), t[:count])

    nothing = (None,) * 4  # dense mask bits, q tiles, token counts and elements
    assert of("causal", 0) is None
    assert of("causal", 1, seed=0) is None
    assert of("keys(0)", 6) == (*t[1:6], *nothing)
    assert of("keys(0)", 7, seed=1) == (*t[2:7], *nothing)
    assert of("segments(0,1) & keys(2)", 8) == (*t[3:8], *nothing)
    assert of("segments(0,1) & keys(2)", 9, seed=3) == (*t[4:9], *nothing)
    assert of("causal & dense(0)", 5) == (None, None, *t[1:5], *nothing[1:])
    assert of("causal & dense(0)", 6, seed=1) == (None, None, *t[2:6], *nothing[1:])
    assert of("keys(1) & dense(0)", 6) == (None, None, *t[2:6], *nothing[1:])
    assert of("causal & segments(0,1):varlen(2,3)", 5) == (*[None] * 6, t[4], t[3], None)
    assert of("causal & segments(0,0)", 6) == (*t[1:6], *nothing)
    assert of("causal & interval(0,none,none)", 7) == (t[1], None, *t[2:5], None, t[5], None, t[6])
    assert of("causal & segments(0,0)", 8) == (*t[1:6], None, t[6], None, t[7])
    assert of("causal & interval(0,none,none)", 5) == (t[1], None, *t[2:5], *nothing)
    assert of("segments(0,0) & interval(none,1,1)", 7) == (*t[2:7], *nothing)
    cases: list[tuple[str, int, int | None]] = [("keys(0)", 1, None), ("keys(0)", 5, None), ("dense(0)", 6, None)]
    cases += [("interval(0,none,none)", 4, None), ("interval(none,0,1)", 6, None)]
    cases += [("causal & segments(0,0)", 7, None), ("segments(0,1)", 9, None), ("segments(0,0)", 9, 1)]
    cases += [("band(1,none) & segments(0,0)", 8, None), ("interval(0,none,none)", 7, None)]
    for mask, count, seed in (*cases, ("keys(0)", 6, 1), ("dense(0)", 4, 1), ("segments(0,1):varlen(2,3)", 8, None)):
        with pytest.raises(ArgumentError, match="extras"):
            of(mask, count, seed)


@pytest.mark.parametrize(("kv_len", "even"), [(128, True), (384, True), (90, False), (1, False)])
@pytest.mark.parametrize("band", [Band(), Band(0), Band(None, 3), Band(-2, 2)], ids=str)
def test_what_is_compiled(launches: Launches, band: Band, kv_len: int, even: bool) -> None:
    """The mask decides which bounds there are, not the lengths; smaller head dims share a build."""
    for q_len in (1, 300):
        run(*tensors(q_len, kv_len, (40, 64)), band)
    assert launches.problems == [
        build.Specialisation("bfloat16", 64, 64, traits_of(band), even, short) for short in (True, False)
    ]


def test_which_calls_have_short_configs(launches: Launches) -> None:
    """Calls of few queries, of bands alone and without dropout; the same as for a site whose lengths are known."""
    dropout = Dropout(0.3, Operand(0))
    short = []
    for q_len, dims in ((100, (64, 64)), (200, (40, 24)), (150, (64, 64)), (100, (72, 40))):
        q, k, v = tensors(q_len, 90, dims)
        run(q, k, v, Band(0))
        run(q, k, v, Band(0), data=some_data(q_len, 90, dims, Band(0), None))
        run(q, k, v, Band(0), drops=dropout, dropout=torch.tensor([5]))
        short.append([problem.short for problem in launches.problems[-3:]])
        for spec in (
            AttentionSpec(Mask(Band(0)), 0.1, (BSHD,) * 3),
            AttentionSpec(Mask(Band(0)), 0.1, (BSHD,) * 3, dropout),
        ):
            site = Site("cuda", "bfloat16", 2, 4, 2, q_len, 90, *dims, spec)
            assert build.Specialisation.of_site(site).short == short[-1][2 if spec.dropout else 0]
            (nominal,) = build.nominal_q_lens(site, 1024)
            assert (nominal == 128) == build.Specialisation.of_site(site).short
            dynamic = build.nominal_q_lens(replace(site, q_len=None, kv_len=None), 1024)
            assert dynamic == ((128, 1024) if dims != (72, 40) and not spec.dropout else (1024,))
    assert short == [[True, False, False]] * 2 + [[False] * 3] * 2
    with pytest.raises(ArgumentError, match="short=True"):
        build.Specialisation("bfloat16", 128, 128, traits_of(Band(0)), True, short=True)


@pytest.mark.parametrize(
    ("q_len", "ctas", "grid"), [(1, None, 8), (64, None, 8), (193, None, 16), (193, 5, 5), (9000, None, SMS)]
)
def test_as_many_ctas_as_sms_and_tiles(launches: Launches, q_len: int, ctas: int | None, grid: int) -> None:
    run(*tensors(q_len), ctas=ctas)
    assert launches.calls[1][1] == grid


def test_scales_become_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another query with a positive scale is prepared, and every call is given it."""
    seen: list[Any] = []

    def prepare(tensors: Sequence[Tensor], extras: Sequence[Tensor], spec: AttentionSpec, **how: Any) -> Any:
        seen.append((*tensors, spec.scale))
        return lambda args: seen.append(args)

    monkeypatch.setattr(launch, "prepare", prepare)
    q, k = torch.randn(1, 2, 3, 8).half(), torch.randn(1, 2, 3, 8).half()
    for scale in (-0.3, 0.0, -0.0, 1e-50, -1e-50):
        run_it = launch._with_positive_scale((q, k, k), [], forward_spec_of(FULL, scale), None)
        run_it((q, k, k, []))
        for first, *others in (seen[-2], seen[-1]):
            assert torch.equal(first, -q if scale == -0.3 else torch.zeros_like(q))
            assert others[0] is k
        assert seen[-2][3] == (0.3 if scale == -0.3 else 1.0)
    with pytest.raises(ArgumentError, match="scale=nan"):
        launch._with_positive_scale((q, k, k), [], forward_spec_of(FULL, float("nan")), None)


@pytest.mark.parametrize("scale", [float("inf"), 3e38])
def test_scales_beyond_fp32_are_refused(launches: Launches, scale: float) -> None:
    with pytest.raises(ArgumentError, match="scale"):
        run(*tensors(), scale=scale)


def test_wrong_arguments_are_refused(launches: Launches) -> None:
    q, k, v = tensors()
    wrong: dict[str, tuple[Tensor, Tensor, Tensor]] = {
        "key=": (q, k[..., :56], v),
        "value=": (q, k, v[:, :, :63]),
        "query=": (q[:, :3], k, v),
        "dtypes": (q, k, v.half()),
        "head_dim, value_dim": (q[..., :60], k[..., :60], v),
        "q_len=0": (q[:, :, :0], k, v),
        "kv_len=0": (q, k[:, :, :0], v[:, :, :0]),
        "batch=0": (q[:0], k[:0], v[:0]),
    }
    for name, arguments in wrong.items():
        with pytest.raises(ArgumentError, match=name):
            run(*arguments)
    with pytest.raises(ArgumentError, match="dtypes"):
        run(q.float(), k.float(), v.float())
    with pytest.raises(ArgumentError, match="devices"):
        run(q, k, v.to("meta"))
    for order in ((0, 1, 2), (0, 0, 1, 3)):
        with pytest.raises(ArgumentError, match="order"):
            run(q, k, v, order=order)
    with pytest.raises(ArgumentError, match="ctas=0"):
        run(q, k, v, ctas=0)
    with pytest.raises(ArgumentError, match="device of query='cpu'"):
        launch.prepare((q, k, v), [], forward_spec_of(Band(), 0.1))
    with pytest.raises(ArgumentError, match="query, key, value"):
        run(q[0], k, v)


def test_head_chunks() -> None:
    """Query heads that stand together: whole groups, one with a full mask, and no more than there are."""

    def head_chunk(band: Band, kv_len: int, group: int, heads: int = 64, *, dense: bool = False) -> int:
        problem = Problem(band, kv_len, kv_len, 128, 128, 1, heads)
        found, last = launch._head_chunks(problem, 1 << 15, group, dense)
        assert last % found == 0 <= last <= heads
        if band.is_full and not dense:
            assert last == heads
        else:  # enough tiles for every CTA, or one head chunk, and less than a head chunk more than that
            tiles = (heads - last) * problem.n_q
            assert tiles >= min(launch.LAST_TILES, heads * problem.n_q)
            assert tiles < max(launch.LAST_TILES + problem.n_q, found * problem.n_q) + found * problem.n_q
        return found

    assert head_chunk(Band(), 4096, 1) == 1
    assert head_chunk(Band(), 4096, 8) == 8
    assert head_chunk(Band(0), 4096, 1) == head_chunk(Band(), 4096, 1, dense=True) == 8
    assert head_chunk(Band(0), 4096, 4) == 32
    assert head_chunk(Band(0), 1 << 20, 4) == 4
    assert head_chunk(Band(0, 127), 1 << 20, 1) == 64
    assert head_chunk(Band(0), 4096, 1, heads=3) == 3
    assert head_chunk(Band(0), 128, 1, heads=5000) == 256


def test_bounded_scores(launches: Launches) -> None:
    """The bound is a number: another one needs no other kernels."""
    q, k, v = tensors()
    for softcap in (50.0, 30.0):
        run(q, k, v, softcap=softcap)
        arguments = launches.calls[-1][5]
        assert arguments[2][9] == pytest.approx(softcap * 1.4426950408889634)
        assert arguments[-2] == pytest.approx((score.ARGUMENT * 0.1 / softcap,))
    first, second = launches.problems
    assert first == second
    assert first.traits.modifiers == ("softcap",)
    assert first.traits.low_scores
    with pytest.raises(ArgumentError, match="softcap"):
        run(q, k, v, softcap=3e38)


def test_the_control_differs_in_the_results_alone() -> None:
    """The kernel whose results depend on the CTA, for the tests on a GPU, compiles, and is gone afterwards."""
    case = Case((64, 64), Band(0))
    plain = build.Kernels(case.problem()).main.asm["ptx"]
    with results_of_the_cta():
        control = build.Kernels(case.problem()).main.asm["ptx"]
    assert control.count("%ctaid") > plain.count("%ctaid")
    for instruction in ("wgmma.mma_async", "ex2.approx", "cp.async.bulk.tensor", "mbarrier.arrive"):
        assert control.count(instruction) == plain.count(instruction)
    assert build.Kernels(case.problem()).main.asm["ptx"] == plain, "the control leaked"


WAYS = ["plain", "data", "dropout", "sinks", "all"]


def _given(way: str) -> tuple[AttentionSpec, list[Tensor]]:
    """A call, and its extras."""
    has = {name for name in WAYS[1:] if way in (name, "all")}
    data = some_data(100, 90, (64, 64), FULL, None)
    places = itertools.count()
    segments = Segments(Operand(next(places)), Operand(next(places))) if "data" in has else None
    dropout = Dropout(0.5, Operand(next(places))) if "dropout" in has else None
    sinks = Operand(next(places)) if "sinks" in has else None
    spec = AttentionSpec(Mask(FULL, segments=segments), 0.1, (BSHD,), dropout=dropout, sinks=sinks)
    extras = [
        *([torch.zeros(2, 100), torch.zeros(2, 90)] if segments else []),
        *([torch.zeros(1, dtype=torch.int64)] if dropout else []), *([torch.zeros(1, 4, 1)] if sinks else []),
        *([t for t in data if t is not None] if segments else []),
    ]  # fmt: skip
    return spec, extras


@pytest.fixture
def on_a_cpu(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The same, where the current device is the CPU, and results have the same memory in every call."""
    memory: dict[Any, Tensor] = {}

    def empty(*facts: Any) -> Tensor:
        return memory.setdefault(facts, torch.empty_strided(*facts[:2], dtype=facts[2]))

    monkeypatch.setattr(compat, "empty_cuda", empty)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(prepared, "current_device", lambda: None)
    return launches


def run_of(operands: Sequence[Tensor], extras: Sequence[Tensor], spec: AttentionSpec) -> Any:
    """As `launch.prepare` after its first lines."""
    used = used_extras(ForwardData.places(spec, len(extras)), spec)
    make = partial(launch._launches, spec, None)
    return prepared.for_any_addresses(operands, extras, 3, used, len(used) - len(spec.given), make)


@pytest.mark.parametrize("way", WAYS)
def test_a_prepared_call_launches_with_the_addresses_of_its_tensors(on_a_cpu: Launches, way: str) -> None:
    operands, (spec, extras) = tensors(), _given(way)
    found = run_of(operands, extras, spec)
    for _ in range(2):
        found((*operands, extras))
    first, second = on_a_cpu.calls[:2], on_a_cpu.calls[2:]
    assert first == second
    addresses = {t.data_ptr() for t in extras[len(spec.mask.operands) :]}
    assert addresses <= set(flat((*first[1][4], *first[1][5])))
    moved = [torch.empty_like(extra) for extra in extras]
    found((*operands, moved))
    assert (on_a_cpu.calls[4:] == first) == (way == "plain")


def shifted(t: Tensor) -> Tensor:
    """The same at an address that is no multiple of 16."""
    return torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view_as(t).copy_(t)


def test_what_is_unaligned_is_copied(on_a_cpu: Launches) -> None:
    operands, (spec, extras) = tensors(), _given("data")
    found = run_of(operands, extras, spec)
    for place in range(3):
        given = [shifted(t) if i == place else t for i, t in enumerate(operands)]
        found((*given, extras))
        addresses = on_a_cpu.calls[-1][4]
        assert [a == t.data_ptr() for a, t in zip(addresses, operands, strict=False)] == [i != place for i in range(3)]
        assert not any(a % 16 for a in addresses)
    found((*operands, [*extras[:-1], shifted(extras[-1])]))
    assert not on_a_cpu.calls[-1][5][3][1] % 16  # the steps


def test_a_call_on_another_device(on_a_cpu: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of the tensors is made the current one."""
    operands, (spec, extras) = tensors(), _given("plain")
    found, current = run_of(operands, extras, spec), [3]

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(prepared, "current_device", lambda: current[-1])
    found((*operands, extras))
    assert len(on_a_cpu.calls) == 2
    assert current == [3]


def test_unsuitable_strides_are_copied(on_a_cpu: Launches) -> None:
    q, k, v = tensors()
    spec, extras = _given("plain")
    odd = v.mT.contiguous().mT
    run_of((q, k, odd), extras, spec)((q, k, odd, extras))
    assert on_a_cpu.calls[1][4][:2] == [q.data_ptr(), k.data_ptr()]
    assert on_a_cpu.calls[1][4][2] != odd.data_ptr()


def test_documents_of_a_mask_have_a_kernel_of_their_own(launches: Launches) -> None:
    """It reads the work list and all queries and keys; the other one reads lists, of the batch elements left to it."""
    q, k, v = tensors(200, 200, (128, 128), batch=3)
    ids = (torch.arange(200) // 70).expand(3, -1).clone()
    spec = AttentionSpec(Mask(Band(0, 99), Segments(Operand(0), Operand(0))), 0.1, orders=(BSHD,))
    plan = Plan("hopper", "spt", "hopper", Tiles(64, 128, 8, 2), forward_tiles=build.FORWARD_CONFIGS[128, 128].tiles)
    tables = mask_tables([ids], 200, 200, 3, 4, 2, str(spec.mask), str(plan), False)
    extras = [ids, *tables[:5], *document_tiles_of_mask(tables[0], str(spec.mask), str(plan))]
    used = used_extras(ForwardData.places(spec, len(extras)), spec)
    found = launch._launches(spec, None, (q, k, v), extras)
    out, lse = found([t.data_ptr() for t in (q, k, v, *(extras[i] for i in used))])
    prepare, documents, lists = launches.calls
    assert (prepare[0], documents[0], lists[0]) == ("prepare", "main", "main")
    of_lists, of_documents = launches.problems
    assert (of_lists.elements, of_documents) == (True, of_lists.by_documents())
    counter = prepare[5][0]
    assert documents[5][:2] == [lse.data_ptr(), counter + 4]
    assert lists[5][:2] == [lse.data_ptr(), counter]
    names = [name for name in entry.hopper_forward.arg_names if not name.endswith("_desc") and not name.isupper()]
    of = [dict(zip(names, arguments[5], strict=True)) for arguments in (documents, lists)]
    heads_of_one, all_heads = 4, 12
    assert [each["problem"][0] for each in of] == [heads_of_one, all_heads]
    assert [each["data"] is None for each in of] == [True, False]
    assert [each["documents"] for each in of] == [(extras[6].data_ptr(),), None]
    assert [each["elements"] for each in of] == [None, (extras[7].data_ptr(),)]
    assert [each["target"] is None for each in of] == [False, True]
    shapes = [list(t.shape) for t in (q, k, v, out)]
    assert [[sizes for sizes, _ in each[2]] for each in (documents, lists)] == [shapes, shapes]
