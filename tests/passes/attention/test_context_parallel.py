"""Attention whose keys are on several ranks: operators for parts of the keys, whose results are merged."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from dash_inductor.config import config
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import FORWARD_ONLY, FULL, SiteRecord, sites

from ...support.distribution import ROOT
from ...support.graphs import BACKWARD, FORWARD, op_counts, rewrite_on, trace
from ...support.processes import run_python

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("deterministic")
PROGRAM = "import runpy, sys; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
Facts = dict[str, list[dict[str, Any]]]


def facts_of(device: str, world: int, repeats: int, *cases: str) -> Facts:
    """What the program of `tests.passes.attention.context_parallel` found, by case and rank."""
    arguments = ("tests.passes.attention.context_parallel", device, str(world), str(repeats), *cases)
    no_cache = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    lines = run_python(PROGRAM, *arguments, path=ROOT, **no_cache).stdout.splitlines()
    ranks = [json.loads(line) for line in lines if line.startswith('{"')]
    assert len(ranks) == world
    return {case: [rank[case] for rank in ranks] for case in cases}


def digests(ranks: list[dict[str, Any]]) -> list[Any]:
    return [facts["digests"] for facts in ranks]


def check(found: Facts, tolerance: float) -> None:
    """Everything is replaced, right, the same in all runs, and depends on the split of the keys alone."""
    for case, ranks in found.items():
        for facts in ranks:
            assert facts["error"] < tolerance, case
            assert facts["equal"], case
            assert {(r["status"], r["forward"].startswith("not replaced")) for r in facts["records"]} == {
                ("replaced", False)
            }
            assert all("context_parallel.py:" in r["line"] for r in facts["records"])  # no file of PyTorch
    whole = digests(found["two"])
    for facts in found["two apart"]:
        assert facts["digests"] == [whole[facts["rank"]][facts["group"]]]
    for one, other in (("two", "two turned"), ("four", "four turned")):
        assert one not in found or other not in found or digests(found[one]) == digests(found[other])
    for other in found.keys() & {"two in order", "four"}:
        assert digests(found[other]) != whole


def test_four_processes() -> None:
    found = facts_of("cpu", 4, 1, "two", "two turned", "two apart", "four turned", "four in order")
    check(found, 1e-6)
    expected = [(FULL, "causal"), (FULL, "full"), (FORWARD_ONLY, "causal"), (FORWARD_ONLY, "full")]
    assert [(r["kind"], r["mask"]) for r in found["two"][0]["records"]] == expected
    # In the order of tokens, a rank has what is before its own; the first has itself, as without context parallel.
    assert [len(facts["records"]) for facts in found["four in order"]] == [1, 4, 6, 8]


@pytest.mark.full
def test_other_ways() -> None:
    check(facts_of("cpu", 4, 2, "two", "two apart", "two in order", "two full", "four", "four turned"), 1e-6)


def merged(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, dropout: float = 0.0, last: float | None = None
) -> tuple[Tensor, ...]:
    """Output and gradients of attention to two parts of the keys, as context parallel leaves them on one rank.

    Args:
        last: the dropout of the last backward; that of all others by default.
    """
    keys, values = k.chunk(2, 2), v.chunk(2, 2)
    out = lse = state = None
    for key, value in zip(keys, values, strict=True):
        part, part_lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            q, key, value, dropout, False, scale=0.125
        )
        state, part, part_lse = (cq, ck, mq, mk, seed, offset), part.float(), part_lse.unsqueeze(-1)
        if out is not None and lse is not None:
            part = out - torch.sigmoid(part_lse - lse) * (out - part)
            part_lse = torch.logaddexp(lse, part_lse)
        out, lse = part, part_lse
    assert out is not None
    assert lse is not None
    assert state is not None
    out, lse = out.to(q.dtype), lse.squeeze(-1)
    found = []
    for number, (key, value) in enumerate(zip(keys, values, strict=True)):
        p = dropout if last is None or number == 0 else last
        backward = aten._scaled_dot_product_flash_attention_backward
        found += backward(do, q, key, value, aten.alias(out), lse, *state[:4], p, False, *state[4:], scale=0.125)
    return out, *found


def rewritten(**options: Any) -> tuple[Graph, tuple[SiteRecord, ...]]:
    def inputs() -> list[Tensor]:
        return [torch.empty(2, 4, 256, 64, dtype=torch.bfloat16, device="cuda") for _ in range(4)]

    module = trace(lambda *tensors: merged(*tensors, **options), inputs)
    rewrite_on(module.graph)
    return module.graph, tuple(sites())


def test_forwards_have_records_of_their_own() -> None:
    graph, records = rewritten()
    assert (op_counts(graph)[FORWARD], op_counts(graph)[BACKWARD]) == (2, 2)
    assert sorted(r.kind for r in records) == [FULL, FULL, FORWARD_ONLY, FORWARD_ONLY]
    assert {(r.status, r.forward) for r in records} == {("replaced", "hopper")}
    names = ", ".join(r.name for r in records if r.kind == FORWARD_ONLY)
    for record in records:
        if record.kind == FULL:
            assert "bits depend on how keys are split" in record.detail
            assert names in record.detail
            assert record.plan is not None
            assert "keep" not in record.plan.numerics_key


def test_forwards_that_stay() -> None:
    with config.patch(forward="keep"):
        graph, records = rewritten()
    assert (op_counts(graph)[FORWARD], op_counts(graph)[BACKWARD]) == (0, 2)
    names = ", ".join(r.name for r in records if r.kind == FORWARD_ONLY)
    for record in records:
        assert record.reason is (Reason.FORWARD_OFF if record.kind == FORWARD_ONLY else None)
        if record.plan is not None:
            assert record.forward == f"not replaced: {names}"
            assert "forward=keep:aten::_scaled_dot_product_flash_attention" in record.plan.numerics_key


def test_dropout_stays() -> None:
    """No backward could know what our forwards drop."""
    graph, records = rewritten(dropout=0.1)
    assert not op_counts(graph)[FORWARD]
    assert {record.reason for record in records} == {Reason.DROPOUT}


def test_random_state_that_is_read() -> None:
    """The last forward stays where a backward, which stays too, reads its random state."""
    graph, records = rewritten(last=0.1)
    assert (op_counts(graph)[FORWARD], op_counts(graph)[BACKWARD]) == (1, 1)
    fallback = {record.kind: record.reason for record in records if record.status == "fallback"}
    assert fallback == {FULL: Reason.DROPOUT, FORWARD_ONLY: Reason.FORWARD_RESULTS}
    (replaced,) = (record for record in records if record.kind == FULL and record.status == "replaced")
    assert replaced.forward == "not replaced: _scaled_dot_product_flash_attention_1"
