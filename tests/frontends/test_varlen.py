"""Packed operators: how documents and windows are read, what the graph then computes, and which are not replaced."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nested._internal.sdpa as nested_sdpa
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from dash_inductor.config import config
from dash_inductor.frontends import varlen as packed
from dash_inductor.graph.nodes import op_name, origin
from dash_inductor.model.mask import ALIGNMENT, MAX_LENGTH, Band
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import clear_sites, sites

from ..support.graphs import (
    BACKWARD,
    FORWARD,
    assert_not_replaced_after_an_error,
    capture,
    op_counts,
    planes,
    rewrite_on,
    rewritten,
    step,
    tensors,
    trace,
)
from ..support.packed import GROUPED, documents, packed_attention

aten = torch.ops.aten
torch_attn = torch.ops.torch_attn
pytestmark = pytest.mark.usefixtures("deterministic")

TOKENS, HEADS, DIM = 128, 8, 64
MASK = "segments(0,1):varlen(2,3)"
WINDOWS = {"full": (-1, -1), "causal": (-1, 0), "window": (5, 0), "both sides": (3, 2), "to the right": (-1, 4)}
"""Arguments of `varlen_attn`: how many tokens a query sees to the left and to the right; -1 is all."""


# ---- numbers, on the CPU: the operators have no kernels there, so that only a replaced graph can run ----


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("window", list(WINDOWS))
def test_values(window: str, dynamic: bool) -> None:
    """Output and gradients are the same as of every document alone; tokens behind the last one have zeros."""
    starts = documents(0, 7, 7, 8, 30, 44)
    inputs = tensors((50, 4, 16), (50, 2, 16), (50, 2, 16))
    with capture(strict=True) as graphs:
        compiled = graphs.compile(attend(WINDOWS[window]), dynamic=dynamic)
        results = step(lambda *t: compiled(*t, starts), inputs)
    (record,) = sites()
    assert record.mask == {"full": MASK, "causal": f"causal & {MASK}"}.get(window, record.mask)
    assert_exact(results, inputs, starts, WINDOWS[window])
    assert not any(result[44:].any() for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_documents(dtype: torch.dtype) -> None:
    """Documents of all tokens, of one token, empty ones; tokens behind the last, and none in any; by one graph."""
    inputs = tensors(*[(50, 2, 16)] * 3, dtype=dtype)
    with capture(strict=True) as graphs:
        compiled = graphs.compile(attend((-1, 0)))
        for places in ((0, 50, 50, 50), (0, 1, 2, 50), (0, 0, 50, 50), (0, 20, 20, 41), (0, 0, 0, 0)):
            starts = documents(*places)
            assert_exact(step(lambda *t, starts=starts: compiled(*t, starts), inputs), inputs, starts, (-1, 0))
    assert len(graphs.after) == 1


def test_another_number_of_documents_compiles_no_other_graph_than_pytorch_would() -> None:
    """The second number makes the size dynamic, and all others run that code."""
    inputs = tensors(*[(50, 2, 16)] * 3)
    with capture(strict=True) as graphs:
        compiled = graphs.compile(attend((-1, 0)))
        for ends in ((50,), (20, 50), (7, 9, 50), (1, 2, 3, 4, 50)):
            starts = documents(0, *ends)
            assert_exact(step(lambda *t, starts=starts: compiled(*t, starts), inputs), inputs, starts, (-1, 0))
    assert len(graphs.after) == 2


def test_bits_are_those_of_attention_with_a_mask_of_documents() -> None:
    """All tokens are one batch element, whose documents are data too; each document begins with a tile."""
    tokens = 2 * ALIGNMENT
    inputs, starts = tensors(*[(tokens, 2, 16)] * 3), documents(0, ALIGNMENT, ALIGNMENT, tokens)
    ids = torch.bucketize(torch.arange(tokens), starts, right=True)

    def masked(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        place = torch.arange(tokens)
        keep = (place <= place[:, None]) & (ids == ids[:, None])
        heads_first = (t[None].transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, attn_mask=keep[None, None]).transpose(1, 2)[0]

    found = []
    for function, data in ((attend((-1, 0)), starts), (masked, ids)):
        with capture(strict=True) as graphs:
            compiled = graphs.compile(function)
            found.append(step(lambda *t, data=data, compiled=compiled: compiled(*t, data), inputs))
        assert [record.mask for record in sites()] == ["causal & segments(0,0)" if data is ids else f"causal & {MASK}"]
    assert all(map(torch.equal, *found))


def test_tokens_behind_the_last_document_change_nothing_of_others() -> None:
    inputs = tensors(*[(50, 2, 16)] * 3)
    filled = [t.detach().clone() for t in inputs]
    for t in filled:
        t[44:] = 1e4
    with capture(strict=True) as graphs:
        compiled = graphs.compile(attend((-1, 0)))
        starts = documents(0, 30, 44)
        results = step(lambda *t: compiled(*t, starts), inputs)
        again = step(lambda *t: compiled(*t, starts), [t.requires_grad_() for t in filled])
    assert all(torch.equal(a[:44], b[:44]) for a, b in zip(results, again, strict=True))


@pytest.mark.parametrize(("checkpointed", "dynamic"), [(False, False), (True, False), (False, True), (True, True)])
def test_compiled_code(checkpointed: bool, dynamic: bool) -> None:
    """Two layers through all of Inductor, at two lengths."""

    def block(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        for window in ((-1, 0), (9, 0)):
            q = attend(window)(q.sin(), k, v, starts)
        return q

    def layers(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        return checkpoint(block, q, k, v, starts, use_reentrant=False) if checkpointed else block(q, k, v, starts)

    def exact(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        for window in ((-1, 0), (9, 0)):
            q = packed_attention(q.sin(), k, v, starts, window)
        return q

    compiled = torch.compile(layers, dynamic=dynamic, fullgraph=True)
    for tokens in (50, 61):
        starts, inputs = documents(0, 30, 30, tokens - 9), tensors(*[(tokens, 2, 16)] * 3)
        with config.patch(cpu="reference", strict=True):
            results = step(lambda *t, starts=starts: compiled(*t, starts), inputs)
        true = step(lambda *t, starts=starts: exact(*t, starts), [t.detach().double().requires_grad_() for t in inputs])
        assert all((ours - theirs).abs().max() < 1e-5 for ours, theirs in zip(results, true, strict=True))


def test_symbols_for_tokens_of_query_and_key_may_differ() -> None:
    """They are equal for the tensors at hand; a guard says so, and the same code serves other numbers."""
    apart = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with apart, capture(strict=True) as graphs:
        compiled = graphs.compile(attend((-1, 0)), dynamic=True)
        for tokens in (50, 61):
            inputs, starts = tensors(*[(tokens, 2, 16)] * 3), documents(0, 30, tokens)
            assert_exact(step(lambda *t, starts=starts: compiled(*t, starts), inputs), inputs, starts, (-1, 0))
    assert len(graphs.after) == 1


def test_numbers_of_tokens_that_depend_on_data() -> None:
    """Padding is taken out of a batch in the graph."""

    def unpadded(q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
        valid_tokens = valid.flatten().nonzero().squeeze(-1)
        q, k, v = (t[valid_tokens] for t in (q, k, v))
        starts = F.pad(valid.sum(1).cumsum(0), (1, 0)).int()
        found: Tensor = varlen_attn(q, k, v, starts, starts, 25, 25, window_size=(-1, 0))
        return found

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        valid_tokens = torch.cat([torch.arange(20), torch.arange(25, 34)])
        return packed_attention(q[valid_tokens], k[valid_tokens], v[valid_tokens], documents(0, 20, 29), (-1, 0))

    inputs = tensors(*[(50, 2, 16)] * 3)
    valid = torch.arange(25) < torch.tensor([[20], [9]])
    captured = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with captured, config.patch(cpu="reference", strict=True):
        compiled = torch.compile(unpadded, fullgraph=True)
        results = step(lambda *t: compiled(*t, valid), inputs)
    assert [record.mask for record in sites()] == [f"causal & {MASK}"]
    true = step(exact, [t.detach().double().requires_grad_() for t in inputs])
    assert all((ours - theirs).abs().max() < 1e-5 for ours, theirs in zip(results, true, strict=True))


@pytest.mark.parametrize("made_inside", [False, True])
def test_nested_tensors(made_inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jagged tensors reach the operator of ATen where PyTorch chooses flash attention, which it does not on a CPU."""
    monkeypatch.setattr(nested_sdpa, "_select_sdp_backend", lambda *args: SDPBackend.FLASH_ATTENTION)
    starts = documents(0, 30, 31, 51, 61)
    (x,), ws = tensors((61, 32)), tensors(*[(32, 32)] * 3)

    def jagged(x: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(x.detach(), starts.long(), min_seqlen=1, max_seqlen=30)

    def attention(x: Tensor, *ws: Tensor) -> Tensor:
        x = jagged(x) if made_inside else x
        q, k, v = (F.linear(x, w).unflatten(-1, (4, 8)).transpose(1, 2) for w in ws)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).values()

    def exact(*ws: Tensor) -> Tensor:
        q, k, v = (F.linear(x.double(), w).unflatten(-1, (4, 8)) for w in ws)
        return packed_attention(q, k, v, starts, (-1, 0))

    with capture(strict=True) as graphs:
        compiled = graphs.compile(attention)
        results = step(lambda *ws: compiled(x if made_inside else jagged(x), *ws), ws)
    (record,) = sites()
    assert (record.op, record.mask) == ("aten::_flash_attention_backward", f"causal & {MASK}")
    true = step(exact, [w.detach().double().requires_grad_() for w in ws])
    for ours, theirs in zip(results, true, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def attend(window: tuple[int, int]) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        found: Tensor = varlen_attn(q, k, v, starts, starts, 64, 64, window_size=window, **GROUPED)
        return found

    return attention


def assert_exact(results: Sequence[Tensor], inputs: Sequence[Tensor], starts: Tensor, window: tuple[int, int]) -> None:
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    true = step(lambda *t: packed_attention(*t, starts, window), doubles)
    for ours, theirs, given in zip(results, true, (inputs[0], *inputs), strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (given.shape, given.dtype, given.stride())
        tolerance = 16 * torch.finfo(ours.dtype).eps
        assert (ours - theirs).abs().max() <= tolerance * max(1.0, theirs.abs().max().item())


# ---- windows ----


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", list(itertools.product((-1, 0, 1, 3, 99), repeat=2)), ids=str)
def test_windows_are_bands(window: tuple[int, int], is_causal: bool) -> None:
    """Against the definition of both operators: how far a query sees to the left and to the right."""
    left, right = window
    place = torch.arange(9)
    distance = place[:, None] - place
    keep = torch.ones(9, 9, dtype=torch.bool)
    if left >= 0:
        keep &= distance <= left
    if right >= 0 or is_causal:
        keep &= -distance <= (0 if is_causal else right)
    for spelled in ({"window_size": list(window)}, {"window_size_left": left, "window_size_right": right}):
        band = packed.band(spelled | {"is_causal": is_causal})
        assert [[band.visible(i, j, 9, 9) for j in range(9)] for i in range(9)] == keep.tolist()


def test_windows_that_are_not_given_or_too_wide_have_no_end() -> None:
    assert packed.band({"window_size": None, "is_causal": False}) == Band()
    assert packed.band({"window_size_left": None, "window_size_right": None, "is_causal": True}) == Band(0)
    assert packed.band({"window_size": [MAX_LENGTH + 1, 0], "is_causal": False}) == Band(0)


# ---- graphs, on a GPU that need not exist ----


def varlen(
    *,
    layers: int = 1,
    window: Sequence[int] | None = (-1, 0),
    starts: Callable[[Tensor], Tensor] = lambda starts: starts,
    key_starts: Callable[[Tensor], Tensor] = lambda starts: starts,
    kv_heads: int = HEADS,
    kv_tokens: int = TOKENS,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> GraphModule:
    """A joint graph with layers of the operator of `varlen_attn`."""

    def model(q: Tensor, k: Tensor, v: Tensor, do: Tensor, given: Tensor) -> tuple[Any, ...]:
        first, saved = starts(given), []
        facts = (first, key_starts(first), 64, 64)
        for _ in range(layers):
            shape = None if window is None else list(window)
            out, lse, rng = torch_attn._varlen_attn(q, k, v, *facts, window == (-1, 0), 0.125, shape, **options)
            saved.append((q, aten.alias(out), lse, rng))
            q = out
        grads = []
        for query, out, lse, rng in reversed(saved):
            found = torch_attn._varlen_attn_backward(
                do, query, k, v, out, lse, *facts, window == (-1, 0), rng, 0.125, shape
            )
            grads += found
            do = found[0]
        return q, *grads

    def inputs() -> list[Tensor]:
        shapes = (TOKENS, HEADS, DIM), *[(kv_tokens, kv_heads, DIM)] * 2, (TOKENS, HEADS, DIM)
        given = torch.empty(5, dtype=torch.int32, device="cuda")
        return [*(torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes), given]

    return trace(model, inputs)


def nested(
    *, causal: bool = True, dropout: float = 0.0, window: tuple[int | None, int | None] = (None, None), **forward: Any
) -> GraphModule:
    """A joint graph of the operator that nested tensors call, whose starts are cast once for each operand."""

    def model(q: Tensor, k: Tensor, v: Tensor, do: Tensor, offsets: Tensor) -> tuple[Any, ...]:
        starts = [offsets.to(torch.int32) for _ in range(2)]
        facts = (*starts, 64, 64, dropout, causal)
        sides = {"window_size_left": window[0], "window_size_right": window[1]}
        made = {name: make(q) for name, make in forward.items()}
        out, lse, rng, unused, _ = aten._flash_attention_forward(q, k, v, *facts, False, scale=0.125, **sides, **made)
        backward = aten._flash_attention_backward
        return out, *backward(do, q, k, v, out, lse, *facts, rng, unused, scale=0.125, **sides)

    def inputs() -> list[Tensor]:
        given = [torch.empty(TOKENS, HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        return [*given, torch.empty(5, dtype=torch.int64, device="cuda")]

    return trace(model, inputs)


def nested_in_float32() -> GraphModule:
    """A joint graph of the operator that nested tensors call where FlashAttention has no kernel for their dtype."""

    def model(q: Tensor, k: Tensor, v: Tensor, do: Tensor, starts: Tensor) -> tuple[Any, ...]:
        facts = (starts, starts, 64, 64)
        out, lse, seed, offset, *_ = aten._efficient_attention_forward(q, k, v, None, *facts, 0.0, 0, True)
        backward = aten._efficient_attention_backward
        return out, *backward(do, q, k, v, None, out, *facts, lse, 0.0, seed, offset, 0, False)

    def inputs() -> list[Tensor]:
        given = [torch.empty(1, TOKENS, HEADS, DIM, device="cuda") for _ in range(4)]
        return [*given, torch.empty(5, dtype=torch.int32, device="cuda")]

    return trace(model, inputs)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_layers_share_what_is_made_of_the_documents(kv_heads: int, capability: tuple[int, int]) -> None:
    module = varlen(layers=3, kv_heads=kv_heads)
    results = [node.meta["val"] for node in module.graph.output_node().all_input_nodes]
    assert rewrite_on(module.graph, capability)
    by_tables = capability == (9, 0)
    assert [(record.status, record.mask) for record in sites()] == [("replaced", f"causal & {MASK}")] * 3
    assert {record.plan and record.plan.kernel for record in sites()} == {"hopper" if by_tables else "portable"}
    counts = op_counts(module.graph)
    assert (counts[FORWARD], counts[BACKWARD]) == (3, 3)
    assert (counts["aten::bucketize"], counts["prims::iota"], counts["dash_inductor::mask_tables"]) == (2, 2, by_tables)
    assert (counts["aten::cumsum"], counts["aten::constant_pad_nd"]) == (1, 2)
    assert not [name for name in counts if "varlen" in name]
    assert planes(module.graph, TOKENS) == []
    for old, new in zip(results, (n.meta["val"] for n in module.graph.output_node().all_input_nodes), strict=True):
        assert (old.shape, old.stride(), old.dtype) == (new.shape, new.stride(), new.dtype)


@pytest.mark.parametrize(
    ("graph", "mask"),
    [
        (lambda: varlen(window=None), MASK),
        (lambda: varlen(window=(9, 0)), f"band(0,9) & {MASK}"),
        (lambda: varlen(window=(9, 4)), f"band(-4,9) & {MASK}"),
        (lambda: varlen(dtype=torch.float16), f"causal & {MASK}"),
        (lambda: nested(), f"causal & {MASK}"),
        (lambda: nested(causal=False), MASK),
        (lambda: nested(causal=True, window=(9, -1)), f"band(0,9) & {MASK}"),
    ],
)
def test_masks(graph: Callable[[], GraphModule], mask: str) -> None:
    rewrote, record = rewritten(graph())
    assert (record.status, record.mask, record.detail) == ("replaced", mask, "")
    assert record.site is not None
    facts = record.site.batch, record.site.q_len, record.site.kv_len, record.site.q_heads, record.site.head_dim
    rows = (TOKENS + 5 * (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT  # of four documents and what is behind them
    assert facts == (1, rows, rows, HEADS, DIM)
    assert record.plan is not None
    assert "segments(0,1):placed(2,3)" in record.plan.numerics_key  # its text never changes under equal bits
    counts = op_counts(rewrote)
    assert (counts[FORWARD], counts[BACKWARD], counts["aten::bucketize"]) == (1, 1, 2)


@pytest.mark.parametrize("name", ["num_splits", "enable_gqa"])
def test_options_that_decide_nothing_are_ignored(name: str) -> None:
    operator = {"num_splits": aten._flash_attention_forward, "enable_gqa": torch_attn._varlen_attn}[name].default
    if name not in {argument.name for argument in operator._schema.arguments}:
        pytest.skip("another version has it")
    _, record = rewritten(nested(num_splits=lambda query: 1) if name == "num_splits" else varlen(enable_gqa=True))
    assert record.status == "replaced"


def test_no_query_key_or_value_is_copied() -> None:
    """The operators read the program's own tensors, and the backward the output that the program gets."""
    graph, _ = rewritten(varlen())
    forward, backward = (node for node in graph.nodes if op_name(node) in (FORWARD, BACKWARD))
    inputs = graph.find_nodes(op="placeholder")
    assert list(forward.args[:3]) == inputs[:3]
    assert list(backward.args[1:4]) == inputs[:3]
    assert origin(backward.args[4]).args == (forward, 0)
    assert backward.args[4].meta["val"].shape == (TOKENS, HEADS, DIM)
    assert backward.args[4].meta["val"].is_contiguous()


SAME = "calls with one tensor for both are replaced"
AS_MANY = "calls with as many of both are replaced"
PACKED = "torch_attn::_varlen_attn and aten::_flash_attention_forward are replaced"
STARTS = "int32 or int64 [documents + 1] on cuda:0 is read"


@pytest.mark.parametrize(
    ("graph", "detail"),
    [
        (
            lambda: varlen(key_starts=shifted),
            "cu_seq_q and cu_seq_k are not the same tensor; " + SAME,
        ),
        (
            lambda: varlen(kv_tokens=64),
            "there are 128 tokens of query and 64 of key; " + AS_MANY,
        ),
        (lambda: varlen(starts=lambda starts: starts.short()), "cu_seq_q is torch.int16 (5,) on cuda:0; " + STARTS),
        (lambda: varlen(starts=lambda starts: starts.cpu()), "cu_seq_q is torch.int32 (5,) on cpu; " + STARTS),
        (
            lambda: varlen(starts=lambda starts: starts.unsqueeze(1)),
            "cu_seq_q is torch.int32 (5, 1) on cuda:0; " + STARTS,
        ),
        (
            lambda: varlen(starts=lambda starts: starts.narrow(0, 0, 0)),
            "cu_seq_q is torch.int32 (0,) on cuda:0; " + STARTS,
        ),
        (lambda: nested(dropout=0.1), "it has dropout_p=0.1; with 0.0 it is replaced"),
        (lambda: nested_in_float32(), "aten::_efficient_attention_backward; " + PACKED),
        (lambda: nested(seqused_k=counts), "its forward has seqused_k; without that it is replaced"),
        (lambda: nested(alibi_slopes=slopes), "its forward has alibi_slopes; without that it is replaced"),
    ],
)
def test_fallback_calls_say_what_would_be_replaced(graph: Callable[[], GraphModule], detail: str) -> None:
    module = graph()
    text = str(module.graph)
    fallback, record = rewritten(module)
    assert (record.reason, record.detail, str(fallback)) == (Reason.VARLEN, detail, text)


def shifted(starts: Tensor) -> Tensor:
    return starts + 1


def counts(query: Tensor) -> Tensor:
    return query.new_empty(4, dtype=torch.int32)


def slopes(query: Tensor) -> Tensor:
    return query.new_empty(HEADS, dtype=torch.float32)


def test_a_call_without_documents_is_not_replaced() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
        out, lse, rng, unused, _ = aten._flash_attention_forward(q, k, v, None, None, 64, 64, 0.0, True, False)
        none: Any = None
        backward = aten._flash_attention_backward
        return out, *backward(do, q, k, v, out, lse, none, none, 64, 64, 0.0, True, rng, unused)

    def inputs() -> list[Tensor]:
        return [torch.empty(2, 64, HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(4)]

    _, record = rewritten(trace(model, inputs))
    assert record.reason is Reason.VARLEN
    assert record.detail.startswith("it has no cu_seq_q and cu_seq_k")


@pytest.mark.parametrize("result", [1, 2])
def test_results_that_are_used(result: int) -> None:
    """The program gets a log-sum-exp of ours; with a random state the call is not replaced."""
    module = varlen()
    (forward,) = (node for node in module.graph.nodes if op_name(node) == "torch_attn::_varlen_attn")
    (found,) = (user for user in forward.users if user.args[1] == result)
    with module.graph.inserting_after(found):
        used = module.graph.call_function(aten.alias.default, (found,))
    used.meta = dict(found.meta)
    output = module.graph.output_node()
    output.args = ([*output.args[0], used],)
    _, record = rewritten(module)
    if result == 1:
        assert (record.status, record.forward) == ("replaced", "hopper")
        return
    cause = "its random state or another result has other users"
    assert (record.reason, record.detail) == (Reason.FORWARD_FALLBACK, cause)


def test_a_fallback_forward_leaves_the_call() -> None:
    with config.patch(forward="keep"):
        _, record = rewritten(varlen())
    assert (record.reason, record.detail) == (Reason.FORWARD_FALLBACK, "by the setting forward='keep'")


def test_starts_are_the_same_only_if_all_that_makes_them_is() -> None:
    """The same operators on the same tensors, but nothing random and nothing that is not written."""
    for make, same in (
        (lambda starts: starts.long().int(), False),
        (lambda starts: aten.alias(starts), True),
        (lambda starts: torch.empty_like(starts), False),
        (lambda starts: torch.randint_like(starts, 9), False),
    ):
        clear_sites()
        rewrite_on(varlen(key_starts=make).graph)
        assert [record.status for record in sites()] == ["replaced" if same else "fallback"]

    def compare(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> bool:
        module = trace(lambda t: (first(t), second(t)), lambda: [torch.empty(5, dtype=torch.int64)])
        a, b = module.graph.output_node().args[0]
        return packed._same_value(a, b)

    assert compare(lambda t: t.cumsum(0).int(), lambda t: t.cumsum(0).int())
    assert compare(lambda t: t.cumsum(0), lambda t: t.cumsum(0).view(-1))
    assert not compare(lambda t: t[:4], lambda t: t[:4].view(2, 2).view(4).flip(0))
    assert not compare(lambda t: t.cumsum(0), lambda t: t.cumsum(0).view(torch.float64))
    assert not compare(lambda t: t.cumsum(0).int(), lambda t: t.cumsum(0).short())
    assert not compare(lambda t: t[1:].int(), lambda t: t[:-1].int())
    assert not compare(lambda t: torch.bernoulli(t.double()), lambda t: torch.bernoulli(t.double()))
    assert not compare(lambda t: torch.empty_like(t), lambda t: torch.empty_like(t))
    assert compare(lambda t: torch.cat([t, t.cumsum(0)]), lambda t: torch.cat([t, t.cumsum(0)]))
    assert not compare(lambda t: torch.cat([t, t.cumsum(0)]), lambda t: torch.cat([t.cumsum(0), t]))


@pytest.mark.parametrize("number", range(1, 50, 6))
def test_an_error_in_any_step_leaves_the_graph_as_it_was(number: int) -> None:
    assert_not_replaced_after_an_error(varlen(), number)
