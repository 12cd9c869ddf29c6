"""FlexAttention becomes operators of ours: masks and scores as they are read, results and gradients, what is not
replaced.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.attention.flex_attention as flex
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    noop_mask,
    or_masks,
)
from torch.utils.checkpoint import checkpoint

from dash_inductor.config import config
from dash_inductor.graph.nodes import op_name
from dash_inductor.model.reasons import Reason
from dash_inductor.passes.attention import checks
from dash_inductor.records.records import FORWARD_ONLY, FULL, clear_sites, sites

from ..support.flex import (
    Case,
    Data,
    Mod,
    Sizes,
    assert_exact,
    block_mask,
    causal,
    exact,
    mask_mods,
    score_mods,
    trained,
    training,
)
from ..support.graphs import FORWARD, assert_not_replaced_after_an_error, capture, rewritten

pytestmark = pytest.mark.usefixtures("deterministic")

SIZES = Sizes()
DATA = Data.of(SIZES)
MASKS, SCORES = mask_mods(DATA), score_mods(DATA)
FLEX, FLEX_BACKWARD = "flex_attention", "flex_attention_backward"


@pytest.fixture(autouse=True)
def _buffers_without_gradients() -> Any:
    yield
    for tensor in vars(DATA).values():
        tensor.requires_grad_(False)


# ---- What is read


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    mod, expected = MASKS[name]
    case = Case(mask_mod=mod, batch=SIZES.batch)
    record, results = trained(case)
    assert (record.status, record.mask, record.kind, record.detail) == ("replaced", expected, FULL, "")
    assert record.op == FLEX_BACKWARD
    assert_exact(results, case)


@pytest.mark.parametrize("wanted", [False, True], ids=["", "with its gradient"])
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, wanted: bool) -> None:
    mod, tensor = SCORES[name]
    if wanted and tensor is None:
        return
    case = Case(mod, causal, wanted=(tensor,) if wanted and tensor is not None else ())
    record, results = trained(case)
    assert (record.status, record.detail) == ("replaced", "")
    assert_exact(results, case)


def test_what_scores_are_read_as() -> None:
    def spec_of(name: str) -> Any:
        record, _ = trained(Case(SCORES[name][0], causal))
        assert record.site is not None
        return record.mask, record.site.spec.scale, record.site.spec.softcap

    assert spec_of("softcap") == ("causal", 0.25, 2.0)
    assert spec_of("softcap and factor") == ("causal", 0.25 * 0.75, 3.0)
    assert spec_of("factor") == ("causal", 0.25 * 1.5, None)
    assert spec_of("alibi") == ("causal + bias", 0.25, None)
    assert spec_of("softcap, then alibi") == ("causal + bias", 0.25, 2.0)
    assert spec_of("hidden") == ("band(0,8) + bias", 0.25, None)


def test_gradients_of_two_tensors() -> None:
    case = Case(SCORES["two"][0], causal, wanted=(DATA.slopes, DATA.plane))
    record, results = trained(case)
    assert record.status == "replaced"
    assert_exact(results, case)


def test_a_tensor_that_the_program_expands() -> None:
    """The kernel may read what was expanded; the gradient is that of what the score_mod reads."""
    row = torch.randn(1, 1, SIZES.q_len, SIZES.kv_len, requires_grad=True)

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = row.expand(SIZES.batch, SIZES.heads, -1, -1)
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + whole[b, h, i, j], enable_gqa=True)

    query, key, value, grad = SIZES.tensors()
    with training() as graphs:
        output = graphs.compile(program)(query, key, value)
        found = torch.autograd.grad(output, (query, row), grad)
    (record,) = sites()
    assert record.status == "replaced"
    doubles = [t.detach().double().requires_grad_() for t in (query, key, value)]
    true = exact(*doubles, lambda s, b, h, i, j: s + row.double()[0, 0, i, j])
    for ours, theirs in zip(found, torch.autograd.grad(true, (doubles[0], row), grad.double()), strict=True):
        assert torch.allclose(ours.double(), theirs.double(), atol=1e-5)


def test_a_tensor_that_another_attention_gives() -> None:
    """It is replaced first, so that what the score_mod reads is another node by then."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        numbers = flex_attention(q, k, v, enable_gqa=True)
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + numbers[b, h, i, 0] * j, enable_gqa=True)

    query, key, value, grad = SIZES.tensors()
    with training() as graphs:
        found = torch.autograd.grad(graphs.compile(program)(query, key, value), (query, key, value), grad)
    assert [record.status for record in sites()] == ["replaced"] * 2
    doubles = [t.detach().double().requires_grad_() for t in (query, key, value)]
    numbers = exact(*doubles)
    true = exact(*doubles, lambda s, b, h, i, j: s + numbers[b, h, i, 0] * j)
    for ours, theirs in zip(found, torch.autograd.grad(true, doubles, grad.double()), strict=True):
        assert torch.allclose(ours.double(), theirs, atol=1e-4, rtol=1e-4)


def test_places_outside_of_a_tensor_at_hidden_scores() -> None:
    """FlexAttention computes no score_mod for most of them, and what it computes is not seen."""
    near = torch.randn(SIZES.heads, 7, requires_grad=True)

    def inside(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + near[h, (q - k).clamp(0, 6)]

    def outside(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + near[h, q - k]

    window = MASKS["window"][0]
    record, results = trained(Case(outside, window, wanted=(near,)))
    assert record.mask == "band(0,6) + bias"
    assert_exact(results, Case(inside, window, wanted=(near,)))


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(batch=1), Sizes(heads=1, kv_heads=1), Sizes(heads=6, kv_heads=6), Sizes(heads=6, kv_heads=1),
        Sizes(q_len=33, kv_len=70), Sizes(q_len=70, kv_len=33), Sizes(q_len=1, kv_len=40), Sizes(dim=24),
    ],
    ids=str,
)  # fmt: skip
def test_sizes(sizes: Sizes) -> None:
    data = Data.of(sizes)
    for mask, score in (("documents of rows", "alibi"), ("pairs", "softcap")):
        case = Case(score_mods(data)[score][0], mask_mods(data)[mask][0], sizes, batch=sizes.batch)
        record, results = trained(case)
        assert record.status == "replaced", record
        assert_exact(results, case)


def test_options() -> None:
    case = Case(mask_mod=causal, options=(("scale", 0.5),))
    record, results = trained(case)
    assert record.site is not None
    assert record.site.spec.scale == 0.5
    assert_exact(results, case)
    case = Case(mask_mod=causal, options=(("kernel_options", {"BLOCK_M": 64, "BACKEND": "TRITON"}),))
    record, results = trained(case)
    assert record.detail == "kernel_options are not used: BLOCK_M=64, BACKEND=TRITON"
    assert_exact(results, case)


def test_without_a_block_mask() -> None:
    case = Case()
    record, results = trained(case)
    assert (record.status, record.mask) == ("replaced", "full")
    assert_exact(results, case)


def test_masks_put_together() -> None:
    window = MASKS["window"][0]
    for mod, expected in (
        (and_masks(causal, window, noop_mask), "band(0,6)"),
        (or_masks(causal, window), "causal"),
        (and_masks(or_masks(causal, noop_mask), MASKS["validity"][0]), "causal & keys(0)"),
    ):
        record, results = trained(Case(mask_mod=mod, batch=SIZES.batch))
        assert record.mask == expected
        assert_exact(results, Case(mask_mod=mod))


def test_a_block_mask_of_one_batch_element() -> None:
    """It broadcasts: `b` is the batch element of the query all the same."""
    mod = MASKS["documents"][0]
    for batch in (None, 1, SIZES.batch):
        record, results = trained(Case(mask_mod=mod, batch=batch))
        assert record.mask == "causal & segments(0,0)"
        assert_exact(results, Case(mask_mod=mod))


# ---- Dynamic lengths


@pytest.mark.parametrize(
    ("name", "score", "marked"),
    [
        ("", "", True),
        ("", "of distances", False),
        ("causal", "alibi", False),
        ("window", "softcap", False),
        ("documents of rows", "", False),
        ("torchtitan", "", False),
        ("dilated", "alibi", False),
    ],
)
def test_dynamic_lengths(name: str, score: str, marked: bool) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, mod: Mod | None) -> Tensor:
        return flex_attention(q, k, v, score_mod=mod, block_mask=mask, enable_gqa=True)

    with training() as graphs:
        function = graphs.compile(program, dynamic=None if marked else True)
        for length in (40, 56, 33):
            sizes = Sizes(q_len=length, kv_len=length + 3)
            data = Data.of(Sizes(q_len=60, kv_len=60))
            mask_mod = mask_mods(data)[name][0] if name else None
            score_mod = score_mods(data)[score][0] if score else None
            query, key, value, grad = sizes.tensors()
            if marked:
                for tensor in (query, key, value):
                    torch._dynamo.mark_dynamic(tensor, 2)
            mask = block_mask(mask_mod, sizes, batch=sizes.batch)
            output = function(query, key, value, mask, score_mod)
            found = [output.detach(), *torch.autograd.grad(output, (query, key, value), grad)]
            assert_exact(found, Case(score_mod, mask_mod, sizes))
    assert {record.status for record in sites()} == {"replaced"}
    assert any(record.site is not None and record.site.q_len is None for record in sites())


def test_gradients_of_tensors_of_dynamic_sizes() -> None:
    """As the Forgetting Transformer: sums of gates, whose gradients are scattered into zeros of a dynamic size."""

    def program(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        def forget(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + decay[b, h, i] - decay[b, h, j]

        return flex_attention(q, k, v, score_mod=forget, enable_gqa=True)

    with training() as graphs:
        function = graphs.compile(program, dynamic=True)
        for length in (40, 56):
            sizes = Sizes(q_len=length, kv_len=length)
            decay = torch.randn(sizes.batch, sizes.heads, length, generator=torch.Generator().manual_seed(2))
            *inputs, grad = sizes.tensors()
            inputs.append(decay.cumsum(-1).requires_grad_())
            output = function(*inputs)
            found = [output.detach(), *torch.autograd.grad(output, inputs, grad)]
            doubles = [t.detach().double().requires_grad_() for t in inputs]
            true = exact(*doubles[:3], lambda s, b, h, i, j, at=doubles[3]: s + at[b, h, i] - at[b, h, j])
            wanted = [true.detach(), *torch.autograd.grad(true, doubles, grad.double())]
            for ours, theirs in zip(found, wanted, strict=True):
                assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max().clamp(min=1.0)
    assert {record.status for record in sites()} == {"replaced"}


# ---- Graphs


def joint_graphs(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[GraphModule]:
    """The graphs with FlexAttention that a compile makes, before any pass."""
    found: list[GraphModule] = []

    def see(graph: Graph) -> None:
        if any(op_name(node).startswith(FLEX) for node in graph.nodes):
            assert graph.owning_module is not None
            found.append(copy.deepcopy(graph.owning_module))

    with training() as graphs, inductor_config.patch(joint_custom_pre_pass=see):
        graphs.compile(function)(*inputs)
    return found


def joint(case: Case) -> GraphModule:
    found = joint_graphs(case.function(), case.sizes.tensors()[:3])
    clear_sites()
    return found[0]


def test_a_replaced_call_leaves_nothing_behind() -> None:
    with config.patch(cpu="reference"):
        graph, record = rewritten(joint(Case(SCORES["softcap"][0], MASKS["documents"][0])))
    assert record.status == "replaced"
    assert not [node for node in graph.nodes if op_name(node).startswith(FLEX) or node.op == "get_attr"]


def test_block_masks_of_other_versions() -> None:
    """Those of torch 2.11 have no orders of writes for dq."""
    module = joint(Case(mask_mod=MASKS["torchtitan"][0], batch=SIZES.batch))
    for node in module.graph.nodes:
        if op_name(node).startswith(FLEX):
            args = list(node.args)
            (place,) = (i for i, arg in enumerate(args) if isinstance(arg, tuple) and len(arg) > 10)
            args[place] = (*args[place][:10], *args[place][-3:])
            assert len(args[place]) == 13
            node.args = tuple(args)
    with config.patch(cpu="reference"):
        _, record = rewritten(module)
    assert record.mask == "causal & interval(0,none,none)"


def test_arguments_that_are_not_known() -> None:
    module = joint(Case(mask_mod=causal))
    for node in module.graph.nodes:
        if op_name(node) == FLEX_BACKWARD:
            node.args = node.args[:9]
    with config.patch(cpu="reference"):
        _, record = rewritten(module)
    assert record.reason is Reason.FLEX_ATTENTION
    assert record.detail.startswith("its arguments are not those that are known: missing a required argument")


@pytest.mark.parametrize("number", [1, 4, 9, 15, 19, 22])
def test_an_error_leaves_the_graph_as_it_was(number: int) -> None:
    with config.patch(cpu="reference"):
        case = Case(SCORES["alibi"][0], MASKS["torchtitan"][0], batch=SIZES.batch, wanted=(DATA.slopes,))
        DATA.slopes.requires_grad_()
        assert_not_replaced_after_an_error(joint(case), number)


def test_a_fallback_call_leaves_the_graph_as_it_was() -> None:
    """Its mask has been written into the graph before it is known that there is no kernel for it."""
    module = joint(Case(mask_mod=MASKS["documents"][0], sizes=Sizes(dim=24)))
    before = str(module.graph)
    with config.patch(cpu="reference", forward="keep"):
        graph, record = rewritten(module)
    assert (record.reason, record.mask) == (Reason.FORWARD_FALLBACK, "causal & segments(0,0)")
    assert str(graph) == before


def two_layers(first: Case, second: Case) -> dict[str, int]:
    one, two = first.function(), second.function()
    query, key, value, _ = first.sizes.tensors()
    with training() as graphs:
        graphs.compile(lambda q, k, v: two(one(q, k, v), k, v))(query, key, value)
    assert [record.status for record in sites()] == ["replaced"] * 2
    return dict(graphs.after[-1])


def test_layers_share() -> None:
    """Vectors, masks and biases that are computed in the same way are computed once."""
    data = mask_mods(DATA)
    for mod in ("torchtitan", "windows of heads"):
        case = Case(SCORES["alibi"][0], data[mod][0], batch=SIZES.batch)
        alone = two_layers(Case(), case)
        del alone["aten::full"]  # of the block mask that PyTorch makes
        assert two_layers(case, case) == alone


def test_checkpointed() -> None:
    case = Case(SCORES["softcap"][0], MASKS["torchtitan"][0], batch=SIZES.batch)
    function = case.function()
    query, key, value, grad = SIZES.tensors()
    with training() as graphs:
        layer = graphs.compile(
            lambda q, k, v: checkpoint(lambda x: function(x.sin(), k, v), q, use_reentrant=False) * 1.0
        )
        output = layer(query, key, value)
        found = [output.detach(), *torch.autograd.grad(output, (query, key, value), grad)]
    (record,) = sites()
    assert record.status == "replaced"
    doubles = [t.detach().double().requires_grad_() for t in (query, key, value)]
    true = exact(doubles[0].sin(), doubles[1], doubles[2], case.score_mod, case.mask_mod)
    for ours, theirs in zip(found, [true, *torch.autograd.grad(true, doubles, grad.double())], strict=True):
        assert torch.allclose(ours.double(), theirs, atol=1e-5)


@pytest.mark.parametrize("name", ["causal", "torchtitan", "pairs"])
def test_forwards_alone(name: str) -> None:
    case = Case(SCORES["softcap, then alibi"][0], MASKS[name][0], batch=SIZES.batch)
    query, key, value, _ = (t.detach() for t in SIZES.tensors())
    with capture() as graphs:
        output = graphs.compile(case.function())(query, key, value)
    (record,) = sites()
    assert (record.status, record.kind, record.op) == ("replaced", FORWARD_ONLY, FLEX)
    assert graphs.count(FORWARD) == 1
    assert graphs.count(FLEX) == 0
    true = exact(*(t.double() for t in (query, key, value)), case.score_mod, case.mask_mod)
    assert torch.allclose(output.double(), true, atol=1e-5)


def test_inductor_compiles_it() -> None:
    """The whole of Inductor, on the CPU, where the reference executor runs."""
    case = Case(SCORES["alibi"][0], MASKS["documents of rows"][0], batch=SIZES.batch, wanted=(DATA.slopes,))
    DATA.slopes.requires_grad_()
    inputs = SIZES.tensors()
    with training():
        output = torch.compile(case.function())(*inputs[:3])
        gradients = torch.autograd.grad(output, [*inputs[:3], DATA.slopes], inputs[3])
    (record,) = sites()
    assert record.status == "replaced"
    assert_exact([output.detach(), *gradients], case)


@pytest.mark.parametrize("name", ["documents of rows", "torchtitan", "validity", "pairs", "of places"])
def test_a_program_that_writes_to_its_tensors(name: str) -> None:
    """Between forward and backward: the backward has the values of before, or autograd says that they are gone."""
    data = Data.of(SIZES)
    case = Case(*((score_mods(data)[name][0], causal) if name in SCORES else (None, mask_mods(data)[name][0])), batch=2)
    inputs = SIZES.tensors()
    true = case.exact(inputs)
    with training() as graphs:
        output = graphs.compile(case.function())(*inputs[:3])
    assert [record.status for record in sites()] == ["replaced"]
    for tensor in vars(data).values():
        tensor.zero_()
    try:
        gradients = torch.autograd.grad(output, inputs[:3], inputs[3])
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017  # either is right
    else:
        for ours, theirs in zip(gradients, true[1:], strict=True):
            assert torch.allclose(ours.double(), theirs, atol=1e-5)


# ---- What is not replaced


def drawn(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (torch.rand_like(q, dtype=torch.float32) < 0.9)


WEIGHTS = torch.rand(4)
PLANE = torch.rand(40, 40)

FALLBACK_SCORES: dict[str, tuple[Mod, str]] = {
    "by a tensor of queries and keys": (lambda s, b, h, q, k: s * PLANE[q, k], "which depends on both q and kv"),
    "by a tensor of heads and keys": (
        lambda s, b, h, q, k: s * PLANE[h, k], "[h, kv] of head and key, and heads share keys"
    ),
    "a sum by a tensor": (lambda s, b, h, q, k: (s + q) * WEIGHTS[h], "[h], which is no known number"),
    "hidden scores by a tensor": (
        lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf) * WEIGHTS[h], "is none of the forms that are read"
    ),
    "of the score": (lambda s, b, h, q, k: s * s, "score * score multiplies the score by something else"),
    "the bound outside": (
        lambda s, b, h, q, k: torch.tanh(s + WEIGHTS[h]), "[h]) is none of the forms"
    ),
    "a function": (lambda s, b, h, q, k: torch.sigmoid(s), "sigmoid(score) is none of the forms that are read"),
    "a negative factor": (lambda s, b, h, q, k: -2.0 * s, "score * -2.0 multiplies by -2.0"),
    "subtracted": (lambda s, b, h, q, k: WEIGHTS[h] - s, "[h] - score subtracts the score"),
    "chosen": (
        lambda s, b, h, q, k: torch.where(q > k, s, 2 * s),
        "where(q > kv, score, score * 2) chooses otherwise than between the score and minus infinity",
    ),
    "hidden by a small number": (
        lambda s, b, h, q, k: torch.where(q >= k, s, -1e4),
        "full([], -10000.0)) chooses otherwise than between the score and minus infinity, or -1e+09 or less",
    ),
    "bound by a tensor": (
        lambda s, b, h, q, k: WEIGHTS[0] * torch.tanh(s / WEIGHTS[0]), "multiplies a softcap by"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FALLBACK_SCORES)
def test_scores_that_are_not_replaced(name: str) -> None:
    mod, detail = FALLBACK_SCORES[name]
    case = Case(mod, causal)
    record, results = trained(case)
    assert (record.status, record.reason) == ("fallback", Reason.FLEX_ATTENTION)
    assert record.detail.startswith("score_mod: ")
    assert detail in record.detail
    assert_exact(results, case)


FILLS: dict[str, Callable[[Tensor], float]] = {
    "minus infinity": lambda s: -math.inf, "a large number": lambda s: -1e9,
    "the lowest number": lambda s: torch.finfo(s.dtype).min,
}  # fmt: skip


@pytest.mark.parametrize("added", [False, True], ids=["", "added"])
@pytest.mark.parametrize("fill", FILLS)
def test_masks_in_score_mods(fill: str, added: bool) -> None:
    """A score_mod hides scores by minus infinity, or by a number that no score comes near, as a mask_mod does.

    A bias that is data may come near it: all visible scores of a query could be as low as the hidden ones.
    """

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        visible = s + DATA.slopes[h] * (q - k) if added else s
        return torch.where((q >= k) & (q - k < 9), visible, FILLS[fill](s))

    record, results = trained(Case(mod))
    if added and fill != "minus infinity":
        assert record.status == "fallback"
        assert "which may be as low as -" in record.detail
    else:
        assert (record.status, record.mask) == ("replaced", "band(0,8)" + " + bias" * added)
    assert_exact(results, Case(mod))


@pytest.mark.parametrize(
    ("visible", "mask_mod", "detail"),
    [
        (lambda b, q, k: q < k, None, "may hide all keys of a query by a finite value"),
        (lambda b, q, k: DATA.valid[b, k], None, "no bias where all keys of a query are hidden"),
        (lambda b, q, k: q >= k, causal, "hides scores by -1000000000.0, others are hidden by -inf"),
    ],
    ids=["a query without keys", "data", "beside a mask_mod"],
)  # fmt: skip
def test_numbers_that_may_hide_all_keys_of_a_query(visible: Any, mask_mod: Mod | None, detail: str) -> None:
    """Such a query sees all keys alike, which is no mask."""
    case = Case(lambda s, b, h, q, k: torch.where(visible(b, q, k), s, -1e9), mask_mod, batch=SIZES.batch)
    record, _ = trained(case)
    assert record.status == "fallback"
    assert detail in record.detail


PAIRS = SIZES.q_len * SIZES.kv_len


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize(
    ("score", "mask", "size", "kept"),
    [
        ("alibi", None, 4 * SIZES.heads * PAIRS, "bias"),
        (None, "union", PAIRS, "mask"),
        (None, "heads", SIZES.heads * PAIRS, "mask"),
        (None, "windows of heads", 0, ""),
        ("bias with a gradient", None, 0, ""),
        (None, "causal", 0, ""),
    ],
)
def test_large_tensors_of_all_pairs_are_not_stored(
    score: str | None, mask: str | None, size: int, kept: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention stores none: a program that fits into memory with it must not end for want of memory."""
    table = torch.randn(SIZES.heads, SIZES.q_len, SIZES.kv_len, requires_grad=True)
    scores = {"alibi": SCORES["alibi"][0], "bias with a gradient": lambda s, b, h, q, k: s + table[h, q, k]}
    masks: dict[str, Mod] = {
        "union": lambda b, h, q, k: (q >= k) | (q % 5 == k % 3),
        "heads": lambda b, h, q, k: (q >= k) & ((h % 2 == 0) | (q % 5 == k % 3)),
        "windows of heads": lambda b, h, q, k: (q >= k) & ((h % 2 == 0) | (q - k < 9)),
        "causal": causal,
    }
    case = Case(
        None if score is None else scores[score], None if mask is None else masks[mask],
        wanted=(table,) if score == "bias with a gradient" else (),
    )  # fmt: skip
    monkeypatch.setattr(checks, "MOST_PAIR_BYTES", size if fits else size - 1)
    record, results = trained(case)
    if fits or not kept:
        assert record.status == "replaced"
    else:
        assert (record.status, record.reason) == ("fallback", Reason.FLEX_ATTENTION)
        assert f"its {kept} of all pairs would take" in record.detail
    assert_exact(results, case)


def test_masks_that_are_not_replaced() -> None:
    mask = block_mask(causal, SIZES)
    mask.mask_mod = drawn  # PyTorch makes no block mask of it
    with training() as graphs:
        graphs.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=True))(*SIZES.tensors()[:3])
    (record,) = sites()
    assert record.reason is Reason.FLEX_ATTENTION
    assert "draws random numbers, in (q >= kv) & (" in record.detail

    def of_many(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (DATA.valid[b] & (torch.arange(SIZES.kv_len) == k)).any() & (q >= k)

    record, _ = trained(Case(mask_mod=of_many, batch=SIZES.batch))
    assert record.reason is Reason.FLEX_ATTENTION
    assert "[b] gives something else than one number, in any(" in record.detail


def test_blocks_that_hide_more_than_the_mask_mod() -> None:
    """Where mask_mod hides nothing, the blocks may be what hides: PyTorch's kernels leave out what they do not list."""
    counts, places = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    sizes = Sizes(q_len=256, kv_len=256)
    mask = BlockMask.from_kv_blocks(counts, places)
    inputs = sizes.tensors()
    with training() as graphs:
        graphs.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=True))(*inputs[:3])
    (record,) = sites()
    assert record.reason is Reason.FLEX_ATTENTION
    assert record.detail.startswith(
        "its mask_mod hides nothing, and its block mask may: PyTorch's compiled kernels skip"
    )
    assert record.detail.endswith("give it a mask_mod")


@pytest.mark.parametrize("detached", [False, True])
def test_a_log_sum_exp_that_the_program_uses(detached: bool) -> None:
    """Natural, with its gradient, which the operators have in base 2."""
    tensors = SIZES.tensors()
    mask = create_block_mask(causal, None, None, SIZES.q_len, SIZES.kv_len, "cpu")

    def used(output: Tensor, lse: Tensor) -> Tensor:
        return output * (lse.detach() if detached else lse)[..., None]

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output, more = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return used(output, more.lse)

    with training() as graphs:
        output = graphs.compile(program)(*tensors[:3])
        gradients = torch.autograd.grad(output, tensors[:3], tensors[3])
    (record,) = sites()
    assert (record.status, record.mask) == ("replaced", "causal")
    query, key, value = leaves = [t.detach().double().requires_grad_() for t in tensors[:3]]
    k, v = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
    scores = (query @ k.mT * query.shape[-1] ** -0.5).masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
    true = used(scores.softmax(-1) @ v, scores.logsumexp(-1))
    exact = [true, *torch.autograd.grad(true, leaves, tensors[3].double())]
    for ours, wanted in zip((output, *gradients), exact, strict=True):
        assert (ours - wanted).abs().max() <= 5e-6 * wanted.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("detached", [False, True])
def test_maxima_that_the_program_uses(detached: bool) -> None:
    query, key, value, _ = SIZES.tensors()
    mask = create_block_mask(causal, None, None, SIZES.q_len, SIZES.kv_len, "cpu")

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        request = AuxRequest(max_scores=True)
        output, more = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=request)
        return output * (more.max_scores.detach() if detached else more.max_scores)[..., None]

    with training() as graphs, allowing_maxima():
        graphs.compile(program)(query, key, value)
    (record,) = sites()
    assert record.reason is Reason.FLEX_ATTENTION
    assert record.detail == "the program uses the maximum of its scores"


def allowing_maxima() -> Any:
    """PyTorch gives the maximum of the scores on a GPU alone."""
    plain = flex._apply_kernel_options

    def options(query: Tensor, key: Tensor, value: Tensor, lse: bool, given: Any, aux: Any = None) -> Any:
        found = plain(query, key, value, lse, given, None)
        return {**found, "OUTPUT_MAX": True, "OUTPUT_LOGSUMEXP": True}

    return mock.patch.object(flex, "_apply_kernel_options", options)


def test_a_result_that_nothing_uses() -> None:
    query, key, value, _ = SIZES.tensors()
    with training() as graphs:
        graphs.compile(lambda q, k, v: flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True))[0])(
            query, key, value
        )
    assert [record.status for record in sites()] == ["replaced"]


def test_the_cpu_is_off_by_default() -> None:
    query, key, value, _ = (t.detach() for t in SIZES.tensors())
    for mod in (SCORES["alibi"][0], FALLBACK_SCORES["of the score"][0]):
        with capture(cpu="off") as graphs:
            graphs.compile(Case(mod, causal).function())(query, key, value)
        assert [record.reason for record in sites()] == [Reason.CPU_OFF]
        assert graphs.count(FLEX) == 1


def test_other_shapes_are_not_replaced() -> None:
    """One key and value for all batch elements, and a type that no kernel has."""
    sizes = Sizes()
    query, key, value, _ = sizes.tensors()
    mask = create_block_mask(causal, sizes.batch, None, sizes.q_len, sizes.kv_len, "cpu")
    with training() as graphs:
        graphs.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=True))(
            query, key[:1].detach(), value[:1].detach()
        )
    assert [record.reason for record in sites()] == [Reason.SHAPE]
    with training() as graphs:
        graphs.compile(lambda q, k, v: flex_attention(q, k, v, enable_gqa=True))(
            *(t.detach().double() for t in (query, key, value))
        )
    (record,) = sites()
    assert (record.reason, record.detail) == (
        Reason.DTYPE,
        "query: torch.float64, key: torch.float64, value: torch.float64",
    )


def nodes_of(graph: Graph, name: str) -> list[Node]:
    return [node for node in graph.nodes if op_name(node) == name]


def test_forward_and_backward_with_other_masks() -> None:
    """A graph that is made by hand may have them; autograd's has not."""
    one, other = joint(Case(mask_mod=causal)), joint(Case(mask_mod=MASKS["window"][0]))
    (backward,) = nodes_of(one.graph, FLEX_BACKWARD)
    (theirs,) = nodes_of(other.graph, FLEX_BACKWARD)
    (place,) = (i for i, arg in enumerate(theirs.args) if isinstance(arg, tuple) and len(arg) > 10)
    name = str(backward.args[place][-1].target)  # type: ignore[index, union-attr]
    setattr(one, name, getattr(other, str(theirs.args[place][-1].target)))  # type: ignore[index, union-attr]
    before = str(one.graph)
    with config.patch(cpu="reference"):
        graph, record = rewritten(one)
    assert (record.reason, record.detail) == (Reason.FORWARD_FALLBACK, "forward and backward have different masks")
    assert str(graph) == before
