"""Records of sites: text forms, the table, and the places where they are published."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline
from torch._dynamo.utils import counters
from torch._guards import CompileContext, CompileId, TracingContext, compile_context, tracing
from torch._logging._internal import trace_log

import dash_inductor
from dash_inductor.model.mask import Band
from dash_inductor.model.plan import Plan, Tiles
from dash_inductor.model.reasons import Reason
from dash_inductor.model.site import Site
from dash_inductor.records import records
from dash_inductor.records.publication import finish, publish
from dash_inductor.records.records import GraphRecord, SiteRecord, Tensors, clear_sites, format_table, graphs, sites
from tests.support.calls import spec_of

SITE = Site("cuda", "bfloat16", 2, 16, 4, 8192, 8192, 128, 128, spec_of(Band(0, None), 0.0883))
PLAN = Plan("portable", "descending", "keep", Tiles(64, 128, 8, 2), numerics_key="v1/portable")
REPLACED = SiteRecord(
    name="flash_backward",
    op="aten::_scaled_dot_product_flash_attention_backward",
    status="replaced",
    reason=None,
    detail="",
    site=SITE,
    plan=PLAN,
    forward="hopper",
    mask="causal",
    line="model.py:12",
    module="layers.0.attn",
)
FALLBACK = SiteRecord(
    name="flash_backward_1",
    op="aten::_scaled_dot_product_flash_attention_backward",
    status="fallback",
    reason=Reason.DROPOUT,
    detail="dropout_p=0.1",
    site=None,
    plan=None,
    forward="not replaced",
    mask="",
)
FAILED = SiteRecord("x", "aten::x", "fallback", Reason.INTERNAL_ERROR, "ValueError: no", None, None, "not replaced", "")


@pytest.fixture
def recorded() -> Iterator[None]:
    clear_sites()
    records.add(GraphRecord("0/0", "joint", "compiled", (REPLACED, FALLBACK, replace(FAILED, kind="forward only"))))
    yield
    clear_sites()


def test_sites_print_as_two_short_lines(recorded: None) -> None:
    assert_expected_inline(
        str(sites()),
        """\
layers.0.attn at model.py:12
  replaced: 2x16(4)x8192x128 bfloat16, mask causal, portable descending
flash_backward_1
  not replaced: dropout (dropout_p=0.1)
x
  not replaced: forward only, internal_error (ValueError: no)""",
    )
    assert repr(sites()) == str(sites())
    assert sites() == (REPLACED, FALLBACK, sites()[2])


def test_verbose_sites_print_as_the_log_does(recorded: None) -> None:
    assert str(sites(verbose=True)).splitlines() == [str(site) for site in sites()]


def test_a_project_below_a_folder_of_this_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are relative to the current folder, and to the innermost folder of packages."""
    project = tmp_path / "site-packages" / "project"
    project.mkdir(parents=True)
    monkeypatch.chdir(project)
    for file, shown in (
        ("model.py", "model.py"),
        (".venv/lib/site-packages/timm/x.py", "timm/x.py"),
        ("../other/x.py", "other/x.py"),
    ):
        record = replace(REPLACED, line=f"{os.path.normpath(project / file)}:3")
        assert record.summary.splitlines()[0] == f"layers.0.attn at {shown}:3"


def test_no_sites_say_so() -> None:
    clear_sites()
    assert str(sites()) == str(sites(verbose=True)) == "no attention was compiled"


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("/opt/lib/site-packages/transformers/models/x.py", "transformers/models/x.py"),
        ("/usr/lib/python3/dist-packages/timm/x.py", "timm/x.py"),
        (f"{os.getcwd()}/models/x.py", "models/x.py"),
        ("/elsewhere/x.py", "/elsewhere/x.py"),
    ],
)
def test_files_are_short_where_it_is_clear_where_they_are(file: str, shown: str) -> None:
    assert replace(REPLACED, line=f"{file}:3").summary.splitlines()[0] == f"layers.0.attn at {shown}:3"


def test_one_line_per_record() -> None:
    assert_expected_inline(
        f"{REPLACED}\n{FALLBACK}",
        """\
flash_backward: replaced, mask causal, plan portable/descending/dkdv=64x128w8s2/head_chunk=1/forward=keep, forward hopper at model.py:12 in layers.0.attn
flash_backward_1: not replaced, dropout: Dropout is replaced only together with its forward, by kernels that have it; the detail says what is missing. (dropout_p=0.1)""",  # noqa: E501  # one line each is the point
    )


def test_table_counts_equal_decisions_at_one_line() -> None:
    assert_expected_inline(
        format_table([REPLACED, replace(REPLACED, module="layers.1.attn"), FALLBACK, FALLBACK]),
        """\
sites  status    shape                      mask    plan or reason                                                 forward       source
-----  --------  -------------------------  ------  -------------------------------------------------------------  ------------  ----------------------------
2      replaced  2x16(4)x8192x128 bfloat16  causal  portable/descending/dkdv=64x128w8s2/head_chunk=1/forward=keep  hopper        model.py:12 in layers.*.attn
2      fallback                                     dropout                                                        not replaced""",  # noqa: E501  # a table as it is printed
    )


def test_shapes() -> None:
    dynamic = Site("cpu", "float32", None, 4, 4, None, None, 64, 64, spec_of(Band(), 0.125))
    lengths = Site("cpu", "float32", 1, 4, 4, 17, 48, 64, 64, spec_of(Band(), 0.125))
    assert [records.shape_text(s) for s in (SITE, dynamic, lengths, None)] == [
        "2x16(4)x8192x128 bfloat16",
        "?x4x?x64 float32",
        "1x4x17/48x64 float32",
        "",
    ]


@pytest.fixture
def artifacts() -> Iterator[list[dict[str, Any]]]:
    """The artifacts that reach PyTorch's structured trace."""
    seen: list[dict[str, Any]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append({"metadata": getattr(record, "metadata", {}), "payload": getattr(record, "payload", None)})

    handler, level = Handler(), trace_log.level
    trace_log.addHandler(handler)
    trace_log.setLevel(logging.DEBUG)
    yield seen
    trace_log.removeHandler(handler)
    trace_log.setLevel(level)


def test_published_everywhere(artifacts, caplog) -> None:
    counters["dash_inductor"].clear()
    with caplog.at_level(logging.INFO, logger="dash_inductor"):
        publish([REPLACED, FALLBACK, FAILED], "joint")
    assert sites() == dash_inductor.sites() == (REPLACED, FALLBACK, FAILED)
    lines = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "dash_inductor"]
    assert lines == [("INFO", str(REPLACED)), ("INFO", str(FALLBACK)), ("WARNING", str(FAILED))]
    assert counters["dash_inductor"] == {
        "replaced": 1,
        "fallback": 2,
        "fallback_dropout": 1,
        "fallback_internal_error": 1,
    }
    (artifact,) = (a for a in artifacts if a["metadata"].get("artifact", {}).get("name") == "dash_sites")
    assert artifact["metadata"]["artifact"]["encoding"] == "json"
    assert json.loads(artifact["payload"]) == graphs()[0].as_dict()
    assert GraphRecord.from_json(artifact["payload"]) == GraphRecord(
        "", "joint", "compiled", (REPLACED, FALLBACK, FAILED)
    )


def test_every_field_survives_a_cache() -> None:
    """A cache keeps the JSON of a record."""
    full = replace(
        REPLACED,
        detail="a note",
        tensors=Tensors((2, 16, None, 128), (2, 4, None, 128), (2, 4, None, 64), "bfloat16", "cuda:1"),
        inputs=("attention_mask",),
        recognised="read back",
        arch="sm_90",
        predicted_us=12.5,
        plan=replace(PLAN, critical_path=3.5, schedule_note="a note"),
    )
    assert all(getattr(full, field.name) not in (None, "", ()) for field in fields(full) if field.name != "reason")
    for record in (full, FALLBACK, FAILED):
        graph = GraphRecord("0/1", "joint", "compiled", (record,))
        assert GraphRecord.from_json(graph.to_json()) == graph
    assert str(full.tensors) == "q 2x16x?x128, k 2x4x?x128, v 2x4x?x64, bfloat16"


def test_graphs_are_told_apart_by_their_compiles() -> None:
    """A graph and those nested in it are one record; another compile, and one after a forward was made, another."""

    def under(context: TracingContext, compile_id: str, record: SiteRecord) -> None:
        with tracing(context), compile_context(CompileContext(CompileId.from_string(compile_id))):
            publish([record], "joint")

    first, second = TracingContext(None), TracingContext(None)
    under(first, "0/0", REPLACED)
    under(second, "!1/0/0", FALLBACK)
    under(first, "0/0", FALLBACK)
    with tracing(first), compile_context(CompileContext(CompileId.from_string("0/0"))):
        fallback = GraphRecord.from_json(finish())
        assert finish() == ""
    under(first, "0/0", FAILED)
    assert [(graph.compile_id, graph.sites) for graph in graphs()] == [
        ("0/0", (REPLACED, FALLBACK)),
        ("!1/0/0", (FALLBACK,)),
        ("0/0", (FAILED,)),
    ]
    assert fallback == graphs()[0]


def test_headlines() -> None:
    sites = (REPLACED, FALLBACK)
    assert [
        str(GraphRecord(*graph))
        for graph in (("0/0_1", "joint", "compiled", sites), ("", "inference", "precompile", (FALLBACK,)))
    ] == [
        "graph 0/0_1 (joint, compiled): 2 sites, 1 replaced",
        "graph (inference, from a cache (precompile)): 1 site, 0 replaced",
    ]


def test_clear() -> None:
    records.add(GraphRecord("0/0", "joint", "compiled", (REPLACED,)))
    clear_sites()
    assert sites() == ()
