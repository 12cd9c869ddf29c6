"""The records: what rewrites did with every compiled graph, of every attention above all, and why."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from ..model.call import Call
from ..model.plan import Plan
from ..model.reasons import Reason
from ..model.site import Site

__all__ = [
    "FORWARD_ONLY",
    "FULL",
    "AnyRecord",
    "GraphRecord",
    "Kind",
    "Reason",
    "Record",
    "SiteRecord",
    "Tensors",
    "add",
    "all_records",
    "clear_sites",
    "format_table",
    "graphs",
    "replace_graph",
    "sites",
]

Kind = Literal["forward and backward", "forward only"]
"""The parts of an attention that are in its graph."""
FULL: Kind = "forward and backward"
FORWARD_ONLY: Kind = "forward only"


@dataclass(frozen=True)
class Tensors:
    """The facts that the graph tells of the query, key and value of a site, whether it is replaced or kept.

    Attributes:
        query, key, value: shapes as the operator has them, [batch, heads, length, head dim], or, where documents are
            packed, [tokens, heads, head dim]; None is a dynamic size.
        dtype: of the query, for example "bfloat16".
        device: where they are, for example "cuda:0".
    """

    query: tuple[int | None, ...]
    key: tuple[int | None, ...]
    value: tuple[int | None, ...]
    dtype: str
    device: str

    def __str__(self) -> str:
        """For example ``q 2x16x8192x128, k and v 2x4x8192x128, bfloat16``; ``?`` is a dynamic size."""
        query, key, value = (_by(shape) for shape in (self.query, self.key, self.value))
        if query == key == value:
            shapes = f"q, k and v {query}"
        elif key == value:
            shapes = f"q {query}, k and v {key}"
        else:
            shapes = f"q {query}, k {key}, v {value}"
        return f"{shapes}, {self.dtype}"

    def as_dict(self) -> dict[str, object]:
        """Plain lists, strings and numbers only, for JSON."""
        shapes = {name: list(getattr(self, name)) for name in ("query", "key", "value")}
        return {**shapes, "dtype": self.dtype, "device": self.device}

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> Tensors:
        """Inverse of `as_dict`."""
        query, key, value = (tuple(given[name]) for name in ("query", "key", "value"))
        return Tensors(query, key, value, given["dtype"], given["device"])


@dataclass(frozen=True)
class SiteRecord:
    """The record of one attention: a backward with its forward, or a forward alone.

    Attributes:
        name: the name of the backward's node in its graph, or of the forward's where that is alone; the new operators
            have it, with the module, as `site`.
        op: the operator of that node, for example ``aten::_scaled_dot_product_flash_attention_backward``.
        status: "replaced", or "kept" as PyTorch had it.
        reason: why it is kept; None for a replaced site.
        detail: more about the reason, or about how the site was matched; may be empty.
        site: the facts given to the planner; None if they could not be established.
        plan: the plan that runs; None for a kept site.
        forward: the outcome of the forward: the plan's forward, or "kept" with the cause.
        mask: the mask in normal form (``str(Mask)``, with ``+ bias`` where one is added), "" if unknown.
        line: the model's source line, ``file:line``; "" if the graph does not tell.
        module: the path of the module in the model, ``layers.0.attn``; "" if the graph does not tell.
        tensors: shapes, dtype and device, as far as the graph tells; None where it does not.
        inputs: the model's arguments, parameters and buffers from which the mask is computed, by the names that they
            have in the model: ``attention_mask``, ``self.embedding.weight``; empty where it reads none.
        recognised: in words, from what the mask was recognised and how that was verified; "" without a mask tensor.
        arch: the architecture for which the site was planned, "sm_90" or "cpu"; "" if that was not reached.
        predicted_us: the predicted time of the backward, in microseconds; None where nothing predicts it.
        kind: "forward and backward", or "forward only" where the graph has no backward of it: under `no_grad`, in an
            evaluation, in the first run of a reentrant checkpoint.
    """

    name: str
    op: str
    status: Literal["replaced", "kept"]
    reason: Reason | None
    detail: str
    site: Site | None
    plan: Plan | None
    forward: str
    mask: str
    line: str = ""
    module: str = ""
    tensors: Tensors | None = None
    inputs: tuple[str, ...] = ()
    recognised: str = ""
    arch: str = ""
    predicted_us: float | None = None
    kind: Kind = FULL

    @property
    def rewrite(self) -> str:
        """The rewrite that left the record, as `Record.rewrite`."""
        return "attention"

    @property
    def source(self) -> str:
        """The model's source line and module, ``file:line in module.path``; "" if the graph does not tell."""
        return f"{self.line} in {self.module}" if self.line and self.module else self.line

    @property
    def shape(self) -> str:
        """As `shape_text` where the facts could be established, else as far as the tensors are known."""
        if self.site is None and self.tensors is not None:
            return str(self.tensors)
        return shape_text(self.site)

    def as_dict(self) -> dict[str, object]:
        """Plain lists, strings and numbers only, for JSON; `from_dict` reads it back."""
        site = None
        if self.site is not None:
            site = {field.name: getattr(self.site, field.name) for field in dataclasses.fields(Site)}
            site["call"] = str(self.site.call)
        plan = None
        if self.plan is not None:
            plan = {"text": str(self.plan), **{name: getattr(self.plan, name) for name in _OF_PLAN}}
        return {
            "name": self.name,
            "op": self.op,
            "status": self.status,
            "reason": self.reason.value if self.reason else None,
            "explanation": self.reason.explanation if self.reason else None,
            "detail": self.detail,
            "mask": self.mask,
            "shape": self.shape,
            "site": site,
            "plan": plan,
            "forward": self.forward,
            "line": self.line,
            "module": self.module,
            "tensors": self.tensors.as_dict() if self.tensors else None,
            "inputs": list(self.inputs),
            "recognised": self.recognised,
            "arch": self.arch,
            "predicted_us": self.predicted_us,
            "kind": self.kind,
        }

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> SiteRecord:
        """Inverse of `as_dict`.

        Raises:
            KeyError, TypeError, ValueError: `given` was not made by `as_dict`.
        """
        site, plan, reason = given["site"], given["plan"], given["reason"]
        return SiteRecord(
            **{name: given[name] for name in _PLAIN},
            reason=Reason(reason) if reason else None,
            site=Site(**{**site, "call": Call.parse(site["call"])}) if site else None,
            plan=dataclasses.replace(Plan.parse(plan["text"]), **{n: plan[n] for n in _OF_PLAN}) if plan else None,
            tensors=Tensors.from_dict(given["tensors"]) if given["tensors"] else None,
            inputs=tuple(given["inputs"]),
        )

    def __str__(self) -> str:
        """One line, as it is logged."""
        where = f" at {self.source}" if self.source else ""
        note = f" ({self.detail})" if self.detail else ""
        alone = f"{FORWARD_ONLY}, " if self.kind == FORWARD_ONLY else ""
        if self.reason is not None:
            return f"{self.name}: {alone}kept, {self.reason.value}: {self.reason.explanation}{note}{where}"
        return f"{self.name}: {alone}replaced, mask {self.mask}, plan {self.plan}, forward {self.forward}{note}{where}"


_PLAIN = (  # fields that are the same in JSON
    "name", "op", "status", "detail", "forward", "mask", "line", "module", "recognised", "arch", "predicted_us",
    "kind",
)  # fmt: skip
_OF_PLAN = ("numerics_key", "critical_path", "schedule_note")  # fields of a plan that are not part of its text


@dataclass(frozen=True)
class Record:
    """The record of one place of a graph that another rewrite than that of attention has looked at.

    Attributes:
        rewrite: which one: "embeddings", the gradients of embeddings.
        name: the name of the node in its graph.
        op: the operator of that node, for example ``aten::embedding_dense_backward``.
        status: "replaced", or "kept" as PyTorch had it.
        reason: why it is kept; None for a replaced one.
        detail: what runs instead, or more about the reason.
        line: the model's source line, ``file:line``; "" if the graph does not tell.
        module: the path of the module in the model; "" if the graph does not tell.
        facts: what the rewrite knows of the place: plain lists, strings and numbers, by name.
    """

    rewrite: str
    name: str
    op: str
    status: Literal["replaced", "kept"]
    reason: Reason | None
    detail: str
    line: str = ""
    module: str = ""
    facts: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of_attempt(error: str, **facts: Any) -> Record:
        """The record of a place that a rewrite has replaced, or left as it was after an error.

        Args:
            error: what went wrong; "" if nothing did.
            facts: the other attributes; the detail is of the replacement.
        """
        if error:
            return Record(**{**facts, "detail": error}, status="kept", reason=Reason.INTERNAL_ERROR)
        return Record(**facts, status="replaced", reason=None)

    def as_dict(self) -> dict[str, object]:
        """Plain lists, strings and numbers only, for JSON; `from_dict` reads it back."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**plain, "reason": self.reason.value if self.reason else None, "facts": dict(self.facts)}

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> Record:
        """Inverse of `as_dict`.

        Raises:
            KeyError, TypeError, ValueError: `given` was not made by `as_dict`.
        """
        return Record(**{**given, "reason": Reason(given["reason"]) if given["reason"] else None})

    def __str__(self) -> str:
        """One line, as it is logged."""
        where = f" at {self.line}" + (f" in {self.module}" if self.module else "") if self.line else ""
        note = f" ({self.detail})" if self.detail else ""
        kept = f", {self.reason.value}: {self.reason.explanation}" if self.reason is not None else ""
        return f"{self.name}: {self.rewrite}, {self.status}{kept}{note}{where}"


AnyRecord = SiteRecord | Record
"""The record of an attention, or of what another rewrite looks at."""


@dataclass(frozen=True)
class GraphRecord:
    """One compiled graph with records in it, or one from a cache that does not tell whether it has any.

    Attributes:
        compile_id: which compile it is, as tlparse and the log lines of PyTorch name it: "0/0", "0/0_1" (a restarted
            one) or "!1/0/0" (compiled autograd); the forward and the backward have the same one.  "" for a graph that
            was compiled or loaded outside of Dynamo.
        kind: "joint", a forward with its backward, or "inference", a graph without one; "" if that is not known.
        origin: "compiled" in this process, "eager" for a call in a program that is not compiled, or the cache that the
            graph is from: "AOTAutogradCache" or "precompile".
        sites: in the order in which the forward runs them; the sites of nested graphs first.
        missing: the graph is from a cache whose entry has no records; `sites` is empty then.
        others: the records of other rewrites than that of attention, in the order of the graph.
    """

    compile_id: str
    kind: Literal["joint", "inference", ""]
    origin: str
    sites: tuple[SiteRecord, ...]
    missing: bool = False
    others: tuple[Record, ...] = ()

    @property
    def records(self) -> tuple[AnyRecord, ...]:
        """All records of the graph, those of attention first."""
        return (*self.sites, *self.others)

    def joined(self, later: GraphRecord) -> GraphRecord:
        """`later` with the records of this graph, which is nested in it, in front of its own."""
        sites, others = (*self.sites, *later.sites), (*self.others, *later.others)
        return dataclasses.replace(later, kind=later.kind or self.kind, sites=sites, others=others)

    def as_dict(self) -> dict[str, object]:
        """Plain lists, strings and numbers only, for JSON; `from_dict` reads it back."""
        return {
            "compile_id": self.compile_id,
            "kind": self.kind,
            "origin": self.origin,
            "missing": self.missing,
            "sites": [site.as_dict() for site in self.sites],
            "others": [record.as_dict() for record in self.others],
        }

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> GraphRecord:
        """Inverse of `as_dict`.

        Raises:
            KeyError, TypeError, ValueError: `given` was not made by `as_dict`.
        """
        sites = tuple(map(SiteRecord.from_dict, given["sites"]))
        others = tuple(map(Record.from_dict, given.get("others", ())))  # entries of before have none
        return GraphRecord(given["compile_id"], given["kind"], given["origin"], sites, given["missing"], others)

    def to_json(self) -> str:
        """`as_dict` as text."""
        return json.dumps(self.as_dict())

    @staticmethod
    def from_json(text: str) -> GraphRecord:
        """Inverse of `to_json`; raises as `from_dict` does."""
        return GraphRecord.from_dict(json.loads(text))

    def __str__(self) -> str:
        """A headline, without the sites: ``graph 0/0 (joint, compiled): 6 sites, 5 replaced``."""
        number = f"graph {self.compile_id}" if self.compile_id else "graph"
        if self.missing:
            return f"{number}: from a cache ({self.origin}), without records"
        replaced = sum(site.status == "replaced" for site in self.sites)
        sites = f"{len(self.sites)} site" + ("" if len(self.sites) == 1 else "s")
        origin = self.origin if self.origin in ("compiled", "eager") else f"from a cache ({self.origin})"
        beside = "".join(
            f"; {rewrite}: {sum(record.status == 'replaced' for record in self.others if record.rewrite == rewrite)}"
            " replaced"
            for rewrite in dict.fromkeys(record.rewrite for record in self.others)
        )
        return f"{number} ({', '.join(filter(None, (self.kind, origin)))}): {sites}, {replaced} replaced{beside}"


_graphs: list[GraphRecord] = []
_aside: ContextVar[list[GraphRecord] | None] = ContextVar("dash_inductor_records", default=None)
_lock = threading.Lock()  # graphs may be compiled on several threads


def add(graph: GraphRecord) -> None:
    """Append the record of a graph."""
    with _lock:
        _here().append(graph)


def replace_graph(old: GraphRecord, new: GraphRecord) -> None:
    """Put `new` in the place of `old`, the same object that was added; at the end where it was cleared."""
    with _lock:
        graphs = _here()
        for place, graph in enumerate(graphs):
            if graph is old:
                graphs[place] = new
                return
        graphs.append(new)


@contextmanager
def aside() -> Iterator[list[GraphRecord]]:
    """The records of graphs that are compiled in the block, in this thread; the program's own records do not grow."""
    found: list[GraphRecord] = []
    token = _aside.set(found)
    try:
        yield found
    finally:
        _aside.reset(token)


def _here() -> list[GraphRecord]:
    found = _aside.get()
    return _graphs if found is None else found


def graphs() -> tuple[GraphRecord, ...]:
    """Every graph with attention that was compiled, or taken from a cache, in this process since `clear_sites`, oldest
    first.
    """
    with _lock:
        return with_attention(_graphs)


def with_attention(graphs: Sequence[GraphRecord]) -> tuple[GraphRecord, ...]:
    """The graphs that have attention, and those that do not tell."""
    return tuple(graph for graph in graphs if graph.sites or graph.missing)


def graphs_here() -> tuple[GraphRecord, ...]:
    """Every graph with records; inside `aside`, its graphs alone."""
    with _lock:
        return tuple(_here())


def sites() -> tuple[SiteRecord, ...]:
    """Every attention of `graphs`, with a backward or without, in the order in which each graph's forward runs them.

    A graph that is from a cache brings its records along; where they are missing, `graphs` says so.
    """
    return tuple(site for graph in graphs() for site in graph.sites)


def all_records() -> tuple[AnyRecord, ...]:
    """Every record of every graph: `sites`, and those of other rewrites, also of graphs without attention.

    Each has ``rewrite``, the name of the rewrite that left it, and the attributes ``name``, ``op``, ``status``,
    ``reason``, ``detail``, ``line`` and ``module``.
    """
    with _lock:
        return tuple(record for graph in _graphs for record in graph.records)


def clear_sites() -> None:
    """Forget all records."""
    with _lock:
        _graphs.clear()


def _by(shape: Sequence[int | None]) -> str:
    return "x".join("?" if n is None else str(n) for n in shape)


def shape_text(site: Site | None) -> str:
    """For example ``2x16(4)x8192x128 bfloat16``: batch, query (key/value) heads, length, head dim; ``?`` is dynamic."""
    if site is None:
        return ""
    batch, q_len, kv_len = ("?" if n is None else str(n) for n in (site.batch, site.q_len, site.kv_len))
    heads = str(site.q_heads) if site.group == 1 else f"{site.q_heads}({site.kv_heads})"
    length = q_len if q_len == kv_len else f"{q_len}/{kv_len}"
    return f"{batch}x{heads}x{length}x{site.head_dim} {site.dtype}"


def format_table(records: Sequence[SiteRecord]) -> str:
    """The records as a text table.

    Sites with the same decision at one source line share a row with a count; the layer numbers in which their module
    paths differ are shown as ``*``.
    """
    header = ("sites", "status", "shape", "mask", "plan or reason", "forward", "source")
    groups: dict[tuple[str, ...], list[SiteRecord]] = {}
    for r in records:
        decision = r.reason.value if r.reason else str(r.plan)
        row = (r.status, r.shape, r.mask, decision, r.forward, re.sub(r"\.\d+(?=\.|$)", ".*", r.source))
        groups.setdefault(row, []).append(r)
    rows: list[tuple[str, ...]] = [header]
    for (*cells, pattern), group in groups.items():
        source = group[0].source if len({r.source for r in group}) == 1 else pattern
        rows.append((str(len(group)), *cells, source))
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
