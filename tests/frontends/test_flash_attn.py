"""The packages flash-attn 2 and 3, as operators without kernels: numbers on the CPU, records of graphs on CUDA."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2

from dash_inductor.config import config
from dash_inductor.errors import FallbackError
from dash_inductor.frontends import flash_attn as entry
from dash_inductor.frontends.written import written
from dash_inductor.graph.nodes import op_name
from dash_inductor.model.components import Operand
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import FORWARD_ONLY, FULL, SiteRecord, sites

from ..support.flash_attn import FA3, HUB, attention, extension, fa2, fa2_kvpacked, fa2_qkvpacked, fa2_varlen
from ..support.graphs import (
    BACKWARD,
    FORWARD,
    assert_not_replaced_after_an_error,
    capture,
    rewritten,
    step,
    tensors,
    trace,
)
from ..support.packed import documents

ops = torch.ops.flash_attn
pytestmark = pytest.mark.usefixtures("deterministic")
PACKAGES: dict[str, Callable[..., Any]] = {"2": fa2, "3": FA3, "hub": HUB}
PADDED = PACKAGES | {"extension": extension}
QKV = [(2, 40, 4, 16), (2, 40, 2, 16), (2, 40, 2, 16)]
LONGER = [(2, 40, 4, 16), (2, 56, 2, 16), (2, 56, 2, 16)]
SHORTER = [(2, 40, 4, 16), (2, 24, 2, 16), (2, 24, 2, 16)]


def assert_exact(results: list[Tensor], function: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Output and gradients are near those of the same function in fp64, which the operators compute exactly."""
    true = step(function, [t.detach().double().requires_grad_() for t in inputs])
    tolerance = 1e-5 if inputs[0].dtype == torch.float32 else 4e-2
    for ours, exact in zip(results, true, strict=True):
        assert ours.shape == exact.shape
        assert (ours.double() - exact).abs().max() < tolerance * max(1.0, float(exact.abs().max()))


def check(function: Callable[..., Tensor], inputs: list[Tensor], dynamic: bool = False) -> SiteRecord:
    with capture(strict=True) as graphs:
        results = step(graphs.compile(function, dynamic=dynamic), inputs)
    (record,) = sites()
    assert (record.status, record.kind, record.forward) == ("replaced", FULL, "reference")
    assert (graphs.count(FORWARD), graphs.count(BACKWARD)) == (1, 1)
    assert not any("flash_attn" in name for counts in graphs.after for name in counts)
    assert_exact(results, function, inputs)
    return record


# ---- numbers of tensors [batch, length, heads, head dim] ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("package", list(PADDED))
def test_causal_attention_with_grouped_heads(package: str, dynamic: bool, dtype: torch.dtype) -> None:
    function = functools.partial(PADDED[package], causal=True)
    record = check(function, tensors(*QKV, dtype=dtype), dynamic)
    assert (record.mask, record.op.rpartition("::")[2]) == (
        "causal",
        "mha_bwd" if package == "extension" else "_flash_attn_backward",
    )
    assert dynamic or record.shape == f"2x4(2)x40x16 {str(dtype).removeprefix('torch.')}"


WINDOWS = [
    (QKV, False, (5, 3), "band(-3,5)"),
    (QKV, False, (-1, 4), "band(-4,none)"),
    (QKV, True, (7, 7), "band(0,7)"),
    (LONGER, True, (-1, -1), "causal:bottom_right"),
    (LONGER, False, (9, 0), "band(0,9):bottom_right"),
    (SHORTER, True, (-1, -1), "causal:bottom_right"),
    (SHORTER, False, (3, 2), "band(-2,3):bottom_right"),
    (SHORTER, False, (-1, -1), "full"),
]


@pytest.mark.parametrize("package", ["2", "3"])
@pytest.mark.parametrize(("shapes", "causal", "window", "mask"), WINDOWS)
def test_windows_are_anchored_bottom_right(
    package: str, shapes: list[tuple[int, ...]], causal: bool, window: tuple[int, int], mask: str
) -> None:
    """Queries without keys have zeros, and give none."""
    record = check(functools.partial(PACKAGES[package], causal=causal, window=window), tensors(*shapes))
    assert record.mask == mask


def test_dynamic_lengths_that_differ() -> None:
    with capture(strict=True) as graphs:
        compiled = graphs.compile(functools.partial(fa2, causal=True), dynamic=True)
        for shapes in (LONGER, [(2, 33, 4, 16), (2, 50, 2, 16), (2, 50, 2, 16)]):
            inputs = tensors(*shapes)
            assert_exact(step(compiled, inputs), functools.partial(fa2, causal=True), inputs)
    assert len(graphs.after) == 1


@pytest.mark.parametrize("package", ["2", "3"])
def test_softcap(package: str) -> None:
    record = check(functools.partial(PACKAGES[package], causal=True, softcap=2.0), tensors(*QKV))
    assert record.site is not None
    assert record.site.spec.softcap == 2.0


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("shapes", [QKV, LONGER])
def test_alibi(shapes: list[tuple[int, ...]], batched: bool, dynamic: bool) -> None:
    slopes = torch.rand((2, 4) if batched else (4,), generator=torch.Generator().manual_seed(2))
    record = check(functools.partial(fa2, slopes=slopes), tensors(*shapes), dynamic)
    assert record.mask.endswith("+ slopes")
    assert record.site is not None
    assert record.site.spec.slopes == Operand(0)
    record_of_causal = functools.partial(fa2, slopes=slopes, causal=True)
    with capture(strict=True) as graphs:
        results = step(graphs.compile(record_of_causal, dynamic=dynamic), tensors(*shapes))
    assert_exact(results, record_of_causal, tensors(*shapes))


def test_qkv_in_one_tensor() -> None:
    """One tensor has all three gradients, which are stacked."""
    with capture(strict=True) as graphs:
        inputs = tensors((2, 40, 3, 4, 16))
        results = step(graphs.compile(lambda qkv: fa2_qkvpacked(qkv, True)), inputs)
    assert_exact(results, lambda qkv: fa2_qkvpacked(qkv, True), inputs)
    assert [record.status for record in sites()] == ["replaced"]
    assert graphs.count("aten::cat") == 1


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_kv_in_one_tensor(dynamic: bool) -> None:
    inputs = tensors((2, 40, 4, 16), (2, 40, 2, 2, 16))
    with capture(strict=True) as graphs:
        results = step(graphs.compile(lambda q, kv: fa2_kvpacked(q, kv, True), dynamic=dynamic), inputs)
    assert_exact(results, lambda q, kv: fa2_kvpacked(q, kv, True), inputs)
    assert [record.status for record in sites()] == ["replaced"]


def test_layers_through_all_of_inductor() -> None:
    """Projections around attention: no tensor is copied on the way, in the forward or in the backward."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(2):
            q, k, v = (x @ w).unflatten(-1, (3, 4, 16)).unbind(2)
            x = x + fa2(q, k, v, causal=True).flatten(2)
        return x

    inputs = tensors((2, 40, 64), (64, 192))
    inputs[1] = (inputs[1].detach() / 8).requires_grad_()
    with capture(strict=True):
        results = step(torch.compile(model), inputs)
    assert_exact(results, model, inputs)
    assert [record.status for record in sites()] == ["replaced"] * 2


def test_the_output_is_written_to_between_forward_and_backward() -> None:
    inputs = tensors(*QKV)
    with capture(strict=True):
        compiled = torch.compile(functools.partial(fa2, causal=True))
        expected = torch.autograd.grad(compiled(*inputs).sum(), inputs)
        out = compiled(*inputs)
        out.detach().fill_(100.0)
        found = torch.autograd.grad(out.sum(), inputs)  # the program has got a view of a copy
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("package", ["2", "3"])
@pytest.mark.parametrize("shapes", [QKV, SHORTER])
def test_a_log_sum_exp_that_the_program_reads(package: str, shapes: list[tuple[int, ...]]) -> None:
    """It has the version's value where a query sees no key."""
    inputs = tensors(*shapes)
    call = functools.partial(PACKAGES[package], causal=True, return_lse=True)
    with capture(strict=True) as graphs:
        out, lse = graphs.compile(call)(*inputs)
        found = torch.autograd.grad(out.square().sum(), inputs)
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    true_out, true = call(*doubles)
    expected = torch.autograd.grad(true_out.square().sum(), doubles)
    assert [record.status for record in sites()] == ["replaced"]
    assert torch.equal(lse.isinf(), true.isinf())
    assert torch.equal(lse[lse.isinf()], true[true.isinf()].float())
    assert (lse - true)[~lse.isinf()].abs().max() < 1e-5
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("package", list(PACKAGES))
def test_a_forward_alone(package: str) -> None:
    inputs = [t.detach() for t in tensors(*LONGER)]
    with capture(strict=True) as graphs:
        compiled = graphs.compile(functools.partial(PACKAGES[package], causal=True))
        out = compiled(*inputs)
        trained = compiled(*(t.requires_grad_() for t in inputs))
    assert torch.equal(out, trained)
    alone, trained_record = sites()
    assert (alone.kind, alone.status, trained_record.kind) == (FORWARD_ONLY, "replaced", FULL)


def test_a_forward_that_stays() -> None:
    """The backward reads the package's log-sum-exp, plus infinity where a query sees no key."""
    inputs = tensors(*SHORTER)
    with capture(forward="keep") as graphs:
        results = step(graphs.compile(functools.partial(fa2, causal=True)), inputs)
    assert [record.forward for record in sites()] == ["not replaced: by the setting forward='keep'"]
    assert (graphs.count("flash_attn::_flash_attn_forward"), graphs.count(BACKWARD)) == (1, 1)
    assert_exact(results, functools.partial(fa2, causal=True), inputs)


def test_dropout() -> None:
    """Ours: of every row, the share that is kept; the backward drops what the forward has dropped."""
    q, k = tensors((2, 64, 4, 16), (2, 64, 4, 16))
    v = torch.eye(64)[None, :, None].expand(2, 64, 4, 64).contiguous().requires_grad_()
    q, k = (torch.nn.functional.pad(t, (0, 48)).detach().requires_grad_() for t in (q, k))
    with capture(strict=True) as graphs:
        compiled = graphs.compile(functools.partial(fa2, dropout_p=0.25))
        torch.manual_seed(3)
        out = compiled(q, k, v)
        dv = torch.autograd.grad(out, v, torch.ones_like(out))[0]
        torch.manual_seed(3)
        again = compiled(q, k, v)
    assert torch.equal(out, again)
    exact, _ = attention(*(t.detach().double() for t in (q, k, v)), 64**-0.5)
    dropped = out == 0.0
    assert abs(dropped.double().mean() - 0.25) < 0.02
    assert ((out - exact / 0.75)[~dropped]).abs().max() < 1e-5
    assert (dv[..., 0] - out.sum(1).mT).abs().max() < 1e-4  # of key j: what all queries have kept of it
    (record,) = sites()
    assert record.detail == "dropout with probability 0.25"


# ---- numbers of packed documents ----


def of_documents(package: str) -> Callable[..., Any]:
    """Dynamo takes no tensor twice in a call of an autograd function, but a view of it."""
    if package == "2":
        return lambda q, k, v, cu, **options: fa2_varlen(q, k, v, cu, cu, 50, **options)
    return lambda q, k, v, cu, **options: PACKAGES[package](q, k, v, cu=cu, cu_k=cu.view(-1), longest=50, **options)


PACKED = [(170, 4, 16), (170, 2, 16), (170, 2, 16)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("package", list(PACKAGES))
@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({"causal": True}, "causal & segments(0,1):varlen(2,3)"),
        ({"window": (5, 2)}, "band(-2,5) & segments(0,1):varlen(2,3)"),
        ({"causal": True, "softcap": 2.0}, "causal & segments(0,1):varlen(2,3)"),
    ],
)
def test_documents(package: str, dynamic: bool, options: dict[str, Any], mask: str) -> None:
    inputs = tensors(*PACKED)
    starts = [documents(*places) for places in ((0, 7, 7, 137, 170), (0, 128, 129, 129, 170))]
    call = of_documents(package)
    with capture(strict=True) as graphs:
        compiled = graphs.compile(functools.partial(call, **options), dynamic=dynamic)
        for cu in starts:
            results = step(lambda *t, cu=cu: compiled(*t, cu), inputs)
            assert_exact(results, lambda *t, cu=cu: call(*t, cu, **options), inputs)
    (record,) = sites()
    assert (record.status, record.kind, record.mask) == ("replaced", FULL, mask)


@pytest.mark.parametrize("package", ["2", "3"])
def test_log_sum_exps_of_documents(package: str) -> None:
    inputs, starts = tensors(*PACKED), documents(0, 7, 7, 137, 170)
    with capture(strict=True) as graphs:
        _, lse = graphs.compile(functools.partial(of_documents(package), causal=True, return_lse=True))(*inputs, starts)
    _, true = of_documents(package)(*(t.double() for t in inputs), starts, causal=True, return_lse=True)
    assert lse.shape == (4, 170)
    assert (lse - true).abs().max() < 1e-5
    assert [(record.status, record.kind) for record in sites()] == [("replaced", FULL)]


# ---- records of graphs on CUDA ----


SHAPE = (2, 256, 8, 64)


def plain(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def joint(
    change: Callable[[dict[str, Any]], object] = lambda _: None,
    *,
    both: dict[str, Any] | None = None,
    shape: tuple[int, ...] = SHAPE,
    first: bool = False,
    more: Callable[..., Any] = lambda *_: (),
) -> Any:
    """A joint graph of one call.

    Args:
        change: changes arguments of the backward.
        both: arguments of forward and backward.
        first: the first form of functionalized calls.
        more: more results of the graph, of all results of forward and backward.
    """
    facts = {"dropout_p": 0.0, "softmax_scale": 0.125, "causal": True, "window_size_left": -1}
    facts |= {"window_size_right": -1, "softcap": 0.0, "alibi_slopes": None} | (both or {})

    def model(q: Tensor, k: Tensor, v: Tensor, do: Tensor, slopes: Tensor) -> tuple[Any, ...]:
        own = {name: slopes if value == "slopes" else value for name, value in facts.items()}
        forward = ops._flash_attn_forward(q, k, v, *own.values(), False)
        bases = [torch.empty_like(t) for t in (q, k, v)]
        backward: dict[str, Any] = {"dout": do, "q": q, "k": k, "v": v, "out": forward[0], "softmax_lse": forward[1]}
        backward |= {**own, "deterministic": False, "rng_state": forward[3]}
        backward |= {"_dq_base_index": 0, "_dk_base_index": 1, "_dv_base_index": 2, "_all_bases": bases}
        change(backward)
        operator = ops._flash_attn_backward.default
        if first:
            named = {name: value for name, value in backward.items() if not name.startswith("_")}
            results = auto_functionalized(operator, **named, dq=bases[0], dk=bases[1], dv=bases[2])
        else:
            results = auto_functionalized_v2(operator, **backward)
        return forward[0], *results[1:], *more(forward, results)

    def inputs() -> list[Tensor]:
        slopes = facts["alibi_slopes"]
        size = (SHAPE[2],) if slopes is None else slopes
        if slopes is not None:
            facts["alibi_slopes"] = "slopes"
        return [*(plain(*shape) for _ in range(4)), plain(*size, dtype=torch.float32)]

    return trace(model, inputs)


@pytest.mark.parametrize("first", [False, True])
def test_a_graph_on_an_h100(first: bool) -> None:
    graph, record = rewritten(joint(first=first))
    assert record.plan is not None
    assert (record.status, record.plan.kernel, record.plan.forward) == ("replaced", "hopper", "hopper")
    assert (record.op, record.mask) == ("flash_attn::_flash_attn_backward", "causal")
    assert record.shape == "2x8x256x64 bfloat16"
    names = [op_name(node) for node in graph.nodes]
    assert not any("flash_attn" in name or "empty" in name or "clone" in name for name in names)


@pytest.mark.parametrize(
    ("shape", "both", "kernel"),
    [
        ((2, 256, 8, 128), {}, "hopper"),
        ((2, 256, 8, 256), {"window_size_left": 99, "causal": False}, "hopper"),
        ((2, 256, 8, 128), {"alibi_slopes": (8,)}, "portable"),
        ((2, 256, 8, 64), {"dropout_p": 0.1}, "hopper"),
    ],
)
def test_plans(shape: tuple[int, ...], both: dict[str, Any], kernel: str) -> None:
    _, record = rewritten(joint(shape=shape, both=both))
    assert record.plan is not None
    assert (record.status, record.plan.kernel) == ("replaced", kernel)


def pop(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda kwargs: kwargs.pop(name)


def put(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda kwargs: kwargs.update(values)


FALLBACK: list[tuple[dict[str, Any], Reason, str]] = [
    ({"change": put(_dq_base_index=None)}, Reason.UNSUPPORTED_OP, "it does not write all of dq, dk and dv"),
    ({"change": put(_dk_base_index=0)}, Reason.UNSUPPORTED_OP, "it does not write all of dq, dk and dv"),
    ({"more": lambda _, results: (results[0],)}, Reason.UNSUPPORTED_OP, "a result beside the gradients is used"),
    ({"change": put(softcap=3.0)}, Reason.FORWARD_FALLBACK, "forward and backward have different softcap"),
    ({"both": {"softcap": -2.0}}, Reason.UNSUPPORTED_OP, "softcap=-2.0 is not allowed: expected None or a finite"),
    ({"change": put(causal=False)}, Reason.FORWARD_FALLBACK, "forward and backward have different is_causal"),
    ({"both": {"dropout_p": 0.1}, "change": put(rng_state=None)}, Reason.DROPOUT, "it has no rng_state"),
    ({"both": {"alibi_slopes": (3,)}}, Reason.SHAPE, "alibi_slopes are torch.float32 (3,) on cuda"),
    (
        {"both": {"alibi_slopes": (8,)}, "more": lambda forward, _: (forward[1],)},
        Reason.FORWARD_FALLBACK,
        "its log-sum-exp has other users",
    ),
    ({"shape": (2, 256, 8, 520)}, Reason.HEAD_DIM, "head dimension 520; covered are all up to 128, "),
    ({"more": lambda forward, _: (forward[3],), "both": {"dropout_p": 0.1}}, Reason.DROPOUT, "its random state"),
]


@pytest.mark.parametrize(("options", "reason", "detail"), FALLBACK)
def test_what_is_not_replaced(options: dict[str, Any], reason: Reason, detail: str) -> None:
    module = joint(**options)
    text = str(module.graph)
    graph, record = rewritten(module)
    assert (record.status, record.reason) == ("fallback", reason), record.detail
    assert record.detail.startswith(detail)
    assert str(graph) == text


OPTIONS_OF_3: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("seqused_k", lambda q: torch.empty(2, dtype=torch.int32, device=q.device)),
    ("page_table", lambda q: torch.empty(2, 4, dtype=torch.int32, device=q.device)),
    ("leftpad_k", lambda q: torch.empty(2, dtype=torch.int32, device=q.device)),
    ("out_", lambda q: torch.empty_like(q)),
    ("q_descale", lambda q: torch.empty(2, 8, dtype=torch.float32, device=q.device)),
    ("attention_chunk", lambda _: 128),
    ("sm_margin", lambda _: 8),
]


@pytest.mark.parametrize(("name", "make"), OPTIONS_OF_3)
def test_options_of_version_3_that_are_not_replaced(name: str, make: Callable[[Tensor], Any]) -> None:
    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = torch.ops.flash_attn_3._flash_attn_forward(q, k, v, causal=True, **{name: make(q)})[0]
        return found

    _, record = rewritten(trace(alone, lambda: [plain(*SHAPE) for _ in range(3)]))
    assert (record.reason, record.kind) == (Reason.UNSUPPORTED_OP, FORWARD_ONLY)
    assert record.detail.startswith(f"it has {name}=")
    assert record.detail.endswith("; without that it is replaced")


PACKED_FALLBACK: list[tuple[dict[str, Any], str]] = [
    (
        {"other": True},
        "cu_seqlens_q and cu_seqlens_k are not the same tensor; calls with one tensor for both are replaced",
    ),
    ({"dropout_p": 0.1}, "it has dropout_p=0.1; with 0.0 it is replaced"),
    ({"seqused": True}, "it has seqused_k=starts_1; without that it is replaced"),
    ({"table": True}, "it has block_table=starts_1; without that it is replaced"),
    ({"slopes": True}, "it has alibi_slopes=slopes_1; without that it is replaced"),
]


@pytest.mark.parametrize(("options", "detail"), PACKED_FALLBACK)
def test_documents_that_are_not_replaced(options: dict[str, Any], detail: str) -> None:
    def alone(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, slopes: Tensor) -> Tensor:
        other = torch.ops.aten.add(starts, 1) if options.get("other") else starts
        own = {"alibi_slopes": slopes if options.get("slopes") else None}
        own |= {"seqused_k": starts if options.get("seqused") else None}
        own |= {"block_table": starts if options.get("table") else None}
        facts = starts, other, 64, 64, options.get("dropout_p", 0.0), 0.125, True
        found: Tensor = ops._flash_attn_varlen_forward(q, k, v, *facts, **own)[0]
        return found

    def inputs() -> list[Tensor]:
        starts = torch.empty(4, dtype=torch.int32, device="cuda")
        return [*(plain(256, 8, 64) for _ in range(3)), starts, plain(8, dtype=torch.float32)]

    _, record = rewritten(trace(alone, inputs))
    assert (record.status, record.detail) == ("fallback", detail)
    assert record.reason in (Reason.VARLEN, Reason.UNSUPPORTED_OP)


@pytest.mark.parametrize("number", [1, 4, 5, 6, 7, 9, 12])
def test_an_error_in_any_step_leaves_the_graph_as_it_was(number: int) -> None:
    assert_not_replaced_after_an_error(joint(), number)


def test_the_setting_strict() -> None:
    inputs = tensors(*QKV)
    with capture(strict=True) as graphs, pytest.raises(FallbackError, match="sm_margin"):
        graphs.compile(functools.partial(FA3, sm_margin=4))(*inputs)
    assert not config.strict


# ---- sinks ----


def sinks_of(views: Callable[[Tensor], list[Tensor]], size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """What a call writes into views of one tensor, by autograd's backward and by ours."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse, _, state = ops._flash_attn_forward(q, k, v, 0.0, 0.25, True, -1, -1, 0.0, None, False)
            ctx.save_for_backward(q, k, v, out, lse, state)
            found: Tensor = out
            return found

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> Any:
            q, k, v, out, lse, state = ctx.saved_tensors
            base = torch.full(size, 7.0, dtype=q.dtype)
            ops._flash_attn_backward(
                dout, q, k, v, out, lse, *views(base), 0.0, 0.25, True, -1, -1, 0.0, None, True, state
            )
            return (
                base.sum() + q * 0,
                base.flatten()[: k.numel()].view(k.shape),
                base.flatten()[-v.numel() :].view(v.shape),
            )

    inputs = tensors(*[(2, 40, 4, 16)] * 3)
    with capture(strict=True) as graphs:
        ours = torch.autograd.grad(graphs.compile(Function.apply)(*inputs).sin().sum(), inputs)
    assert [record.status for record in sites()] == ["replaced"]
    theirs = torch.autograd.grad(Function.apply(*inputs).sin().sum(), inputs)
    return torch.cat([t.flatten() for t in ours]), torch.cat([t.flatten() for t in theirs])


def thirds(base: Tensor) -> list[Tensor]:
    """Parts of a tensor along its first dimension, which are slices, and one more that nothing is written to."""
    return [base[2 * i : 2 * i + 2] for i in range(3)]


def columns(base: Tensor) -> list[Tensor]:
    return [base[..., 16 * i : 16 * i + 16] for i in (2, 0, 1)]


def of_four(base: Tensor) -> list[Tensor]:
    """Three of four places of a dimension."""
    return [base[:, :, i] for i in (3, 0, 1)]


@pytest.mark.parametrize(
    ("views", "size"),
    [
        (thirds, (8, 40, 4, 16)),
        (columns, (2, 40, 4, 48)),
        (of_four, (2, 40, 4, 4, 16)),
        (lambda base: [base[:, :, i] for i in (1, 2, 0)], (2, 40, 3, 4, 16)),
    ],
)
def test_gradients_in_parts_of_one_tensor(views: Callable[[Tensor], list[Tensor]], size: tuple[int, ...]) -> None:
    """What lies beside them stays as it was."""
    ours, theirs = sinks_of(views, size)
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_calls_whose_sinks_cannot_be_told() -> None:
    module = joint()
    (node,) = (node for node in module.graph.nodes if op_name(node) == "flash_attn::_flash_attn_backward")
    assert written(node, ("dq", "dk", "dv"), "bshd") is not None
    assert written(node, ("dq", "dk", "other"), "bshd") is None
    (forward,) = (node for node in module.graph.nodes if op_name(node) == "flash_attn::_flash_attn_forward")
    assert written(forward, ("dq", "dk", "dv"), "bshd") is None


def test_other_operators_of_the_same_name() -> None:
    """Without the arguments of the packages, a call is no site of this entry."""

    @torch.library.custom_op("not_flash::_flash_attn_forward", mutates_args=())
    def forward(q: Tensor, other: Tensor) -> Tensor:
        return q + other

    @forward.register_fake
    def _(q: Tensor, other: Tensor) -> Tensor:
        return torch.empty_like(q)

    module = trace(lambda q: forward(q, q), lambda: [plain(*SHAPE)])
    assert list(entry.find(module.graph)) == []


def test_numbers_of_the_stand_ins() -> None:
    """The operators' gradients, which are written out, are those of autograd."""
    inputs = [t.detach().double().requires_grad_() for t in tensors(*SHORTER)]
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    for options in itertools.product((False, True), ((-1, -1), (5, 2)), (0.0, 2.0), (None, slopes)):
        out, _ = attention(*inputs, 0.25, *options)
        dout = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        expected = torch.autograd.grad(out, inputs, dout)
        found = attention(*inputs, 0.25, *options, dout)
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(found, expected, strict=True))
    assert bool(attention(*inputs, 0.25, True)[1].isinf().any())
