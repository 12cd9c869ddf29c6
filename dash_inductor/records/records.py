"""The records of what the passes did in each compiled graph, and why: one for every attention and other rewrite."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from ..model.attention_spec import AttentionSpec
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
    "Sites",
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
"""Whether the graph contains the backward of an attention, too."""
FULL: Kind = "forward and backward"
FORWARD_ONLY: Kind = "forward only"


@dataclass(frozen=True)
class Tensors:
    """Shapes, dtype and device of the query, key and value of a site, replaced or not.

    Attributes:
        query, key, value: the shapes of the operator's arguments, [batch, heads, length, head dim] or, for packed
            (varlen) attention, [tokens, heads, head dim]; None is a dynamic size.
        dtype: the dtype of the query, for example "bfloat16".
        device: their device, for example "cuda:0".
    """

    query: tuple[int | None, ...]
    key: tuple[int | None, ...]
    value: tuple[int | None, ...]
    dtype: str
    device: str

    def __str__(self) -> str:
        """A text like ``q 2x16x8192x128, k and v 2x4x8192x128, bfloat16``; ``?`` is a dynamic size."""
        query, key, value = (_by(shape) for shape in (self.query, self.key, self.value))
        if query == key == value:
            shapes = f"q, k and v {query}"
        elif key == value:
            shapes = f"q {query}, k and v {key}"
        else:
            shapes = f"q {query}, k {key}, v {value}"
        return f"{shapes}, {self.dtype}"

    def as_dict(self) -> dict[str, object]:
        """The shapes, dtype and device as lists and strings, for JSON; `from_dict` is the inverse."""
        shapes = {name: list(getattr(self, name)) for name in ("query", "key", "value")}
        return {**shapes, "dtype": self.dtype, "device": self.device}

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> Tensors:
        """Makes a `Tensors` from the result of `as_dict`."""
        query, key, value = (tuple(given[name]) for name in ("query", "key", "value"))
        return Tensors(query, key, value, given["dtype"], given["device"])


@dataclass(frozen=True)
class SiteRecord:
    """The record of one attention: a backward with its forward, or a forward without a backward.

    Attributes:
        name: the name of the backward's node in its graph, or of the forward's if there is no backward; the new
            operators have it, with the module, as argument `site`.
        op: the operator of that node, for example ``aten::_scaled_dot_product_flash_attention_backward``.
        status: "replaced", or "fallback" (left to PyTorch).
        reason: why it is not replaced; None for a replaced site.
        detail: more about the reason, or about how the site was matched; may be empty.
        site: the facts given to the planner; None if they could not be established.
        plan: the plan that runs; None for a site that is not replaced.
        forward: which forward runs: the plan's forward, or "not replaced" with the cause.
        mask: the mask in normal form (``str(Mask)``, with ``+ bias`` if one is added); "" if unknown.
        line: the model's source line, ``file:line``; "" if the graph does not contain it.
        module: the path of the module in the model, ``layers.0.attn``; "" if the graph does not contain it.
        tensors: shapes, dtype and device; None if the graph does not contain them.
        inputs: the model's arguments, parameters and buffers from which the mask is computed, by their names in the
            model: ``attention_mask``, ``self.embedding.weight``; may be empty.
        recognised: in words, how the mask tensor was recognised and verified; "" without a mask tensor.
        arch: the architecture for which the site was planned, "sm_90" or "cpu"; "" if planning was not reached.
        predicted_us: the predicted time of the backward, in microseconds; None if there is no prediction.
        kind: "forward and backward", or "forward only" if the graph has no backward of it: under `no_grad`, in
            evaluation, or in the first run of a reentrant checkpoint.
    """

    name: str
    op: str
    status: Literal["replaced", "fallback"]
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
        """The name of the pass that made the record, as `Record.rewrite`: always "attention"."""
        return "attention"

    @property
    def source(self) -> str:
        """The model's source line and module, ``file:line in module.path``; "" if the graph does not contain it."""
        return f"{self.line} in {self.module}" if self.line and self.module else self.line

    @property
    def shape(self) -> str:
        """The shape and dtype as `shape_text` formats them, or as `Tensors` prints them if no `Site` is known."""
        if self.site is None and self.tensors is not None:
            return str(self.tensors)
        return shape_text(self.site)

    @property
    def summary(self) -> str:
        """The record as two short lines: its module and line; status, shape, mask, and the kernel or the reason.

        The second line is for example ``replaced: 2x16(4)x8192x128 bfloat16, causal, hopper fold``.
        """
        where = " at ".join(filter(None, (self.module, _short(self.line)))) or self.name
        if self.reason is None:
            status, runs = "replaced", f"{self.plan.kernel} {self.plan.schedule}" if self.plan else ""
        else:
            status, runs = "not replaced", f"{self.reason.value} ({self.detail or self.reason.explanation})"
        kind = "" if self.kind == FULL else self.kind
        facts = ", ".join(filter(None, (self.shape, self.mask and f"mask {self.mask}", kind, runs)))
        return f"{where}\n  {status}: {facts}"

    def as_dict(self) -> dict[str, object]:
        """The record as lists, strings and numbers, for JSON; `from_dict` is the inverse."""
        site = None
        if self.site is not None:
            site = {field.name: getattr(self.site, field.name) for field in dataclasses.fields(Site)}
            site["spec"] = str(self.site.spec)
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
        """Makes the record from the result of `as_dict`.

        Raises:
            KeyError, TypeError, ValueError: `given` was not made by `as_dict`.
        """
        site, plan, reason = given["site"], given["plan"], given["reason"]
        return SiteRecord(
            **{name: given[name] for name in _PLAIN},
            reason=Reason(reason) if reason else None,
            site=Site(**{**site, "spec": AttentionSpec.parse(site["spec"])}) if site else None,
            plan=dataclasses.replace(Plan.parse(plan["text"]), **{n: plan[n] for n in _OF_PLAN}) if plan else None,
            tensors=Tensors.from_dict(given["tensors"]) if given["tensors"] else None,
            inputs=tuple(given["inputs"]),
        )

    def __str__(self) -> str:
        """The record as one line for the log."""
        where = f" at {self.source}" if self.source else ""
        note = f" ({self.detail})" if self.detail else ""
        alone = f"{FORWARD_ONLY}, " if self.kind == FORWARD_ONLY else ""
        if self.reason is not None:
            return f"{self.name}: {alone}not replaced, {self.reason.value}: {self.reason.explanation}{note}{where}"
        return f"{self.name}: {alone}replaced, mask {self.mask}, plan {self.plan}, forward {self.forward}{note}{where}"


_PLAIN = (  # fields that are the same in JSON
    "name", "op", "status", "detail", "forward", "mask", "line", "module", "recognised", "arch", "predicted_us",
    "kind",
)  # fmt: skip
_OF_PLAN = ("numerics_key", "critical_path", "schedule_note")  # fields of a plan that are not part of its text


@dataclass(frozen=True)
class Record:
    """The record of one node that a pass other than the attention pass has replaced or not replaced.

    Attributes:
        rewrite: the name of the pass, for example "embeddings" (gradients of embeddings).
        name: the name of the node in its graph.
        op: the operator of that node, for example ``aten::embedding_dense_backward``.
        status: "replaced", or "fallback" (left to PyTorch).
        reason: why it is not replaced; None if it is replaced.
        detail: what runs instead, or more about the reason.
        line: the model's source line, ``file:line``; "" if the graph does not contain it.
        module: the path of the module in the model; "" if the graph does not contain it.
        facts: further facts by name: plain lists, strings and numbers.
    """

    rewrite: str
    name: str
    op: str
    status: Literal["replaced", "fallback"]
    reason: Reason | None
    detail: str
    line: str = ""
    module: str = ""
    facts: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of_attempt(error: str, **facts: Any) -> Record:
        """Returns the record of a node that a pass has replaced, or has not replaced because of an error.

        Args:
            error: the error message, which becomes the detail; "" if the node was replaced.
            facts: the attributes of the record except `status` and `reason`; `detail` describes the replacement.
        """
        if error:
            return Record(**{**facts, "detail": error}, status="fallback", reason=Reason.INTERNAL_ERROR)
        return Record(**facts, status="replaced", reason=None)

    def as_dict(self) -> dict[str, object]:
        """The record as lists, strings and numbers, for JSON; `from_dict` is the inverse."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**plain, "reason": self.reason.value if self.reason else None, "facts": dict(self.facts)}

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> Record:
        """Makes the record from the result of `as_dict`.

        Raises:
            KeyError, TypeError, ValueError: `given` was not made by `as_dict`.
        """
        return Record(**{**given, "reason": Reason(given["reason"]) if given["reason"] else None})

    def __str__(self) -> str:
        """The record as one line for the log."""
        where = f" at {self.line}" + (f" in {self.module}" if self.module else "") if self.line else ""
        note = f" ({self.detail})" if self.detail else ""
        fallback = f", {self.reason.value}: {self.reason.explanation}" if self.reason is not None else ""
        return f"{self.name}: {self.rewrite}, {self.status}{fallback}{note}{where}"


AnyRecord = SiteRecord | Record
"""The record of an attention, or of a node that another pass replaced or not."""


@dataclass(frozen=True)
class GraphRecord:
    """The records of one compiled graph, or a note that a graph from a cache has none.

    Attributes:
        compile_id: the id of the compile, as tlparse and PyTorch's log lines show it: "0/0", "0/0_1" (restarted) or
            "!1/0/0" (compiled autograd); the same for forward and backward.  "" for a graph that was compiled or loaded
            outside of Dynamo.
        kind: "joint" (forward with backward) or "inference" (without a backward); "" if that is not known.
        origin: "compiled" in this process, "eager" for a call outside of compiled graphs, or the cache from which the
            graph was loaded: "AOTAutogradCache" or "precompile".
        sites: the records of attention, in the order in which the forward runs them; those of nested graphs first.
        missing: whether the graph is from a cache entry without records; `sites` is then empty.
        others: the records of all other passes, in graph order.
    """

    compile_id: str
    kind: Literal["joint", "inference", ""]
    origin: str
    sites: tuple[SiteRecord, ...]
    missing: bool = False
    others: tuple[Record, ...] = ()

    @property
    def records(self) -> tuple[AnyRecord, ...]:
        """All records of the graph, those of attention before those of other passes."""
        return (*self.sites, *self.others)

    def joined(self, later: GraphRecord) -> GraphRecord:
        """Returns the record `later` of an enclosing graph, with the records of this nested graph before its own."""
        sites, others = (*self.sites, *later.sites), (*self.others, *later.others)
        return dataclasses.replace(later, kind=later.kind or self.kind, sites=sites, others=others)

    def as_dict(self) -> dict[str, object]:
        """The record as lists, strings and numbers, for JSON; `from_dict` is the inverse."""
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
        """Makes the record from the result of `as_dict`.

        Raises:
            KeyError, TypeError, ValueError: `given` was not made by `as_dict`.
        """
        sites = tuple(map(SiteRecord.from_dict, given["sites"]))
        others = tuple(map(Record.from_dict, given.get("others", ())))  # cache entries of older versions have none
        return GraphRecord(given["compile_id"], given["kind"], given["origin"], sites, given["missing"], others)

    def to_json(self) -> str:
        """The record as JSON text; `from_json` is the inverse."""
        return json.dumps(self.as_dict())

    @staticmethod
    def from_json(text: str) -> GraphRecord:
        """Makes the record from the result of `to_json`; raises as `from_dict` does, or ValueError for invalid JSON."""
        return GraphRecord.from_dict(json.loads(text))

    def __str__(self) -> str:
        """A summary without the sites: ``graph 0/0 (joint, compiled): 6 sites, 5 replaced``."""
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
    """Appends the record of a graph to those of this process, or of the enclosing block of `aside`."""
    with _lock:
        _here().append(graph)


def replace_graph(old: GraphRecord, new: GraphRecord) -> None:
    """Replaces the record `old` (compared by identity) by `new`; appends `new` if `old` has been cleared."""
    with _lock:
        graphs = _here()
        for place, graph in enumerate(graphs):
            if graph is old:
                graphs[place] = new
                return
        graphs.append(new)


@contextmanager
def aside() -> Iterator[list[GraphRecord]]:
    """A context manager that collects the records of graphs compiled inside it, on this thread, in a separate list.

    These records do not enter the records of the program that `graphs` returns.

    Yields:
        The list to which the records are appended.
    """
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
    """The records of all graphs with attention that this process compiled or loaded from a cache, oldest first.

    Only records since the last `clear_sites` are returned.
    """
    with _lock:
        return with_attention(_graphs)


def with_attention(graphs: Sequence[GraphRecord]) -> tuple[GraphRecord, ...]:
    """Returns those graphs that have attention or may have it, because they come from a cache entry without records."""
    return tuple(graph for graph in graphs if graph.sites or graph.missing)


def graphs_here() -> tuple[GraphRecord, ...]:
    """Returns the records of all graphs, with or without attention.

    Inside a block of the context manager `aside`, these are only the graphs compiled there.
    """
    with _lock:
        return tuple(_here())


class Sites(tuple[SiteRecord, ...]):
    """A tuple of records of attention that prints as text: two short lines for each, or one long line if `verbose`."""

    verbose = False

    def __str__(self) -> str:
        return "\n".join(str(site) if self.verbose else site.summary for site in self) or "no attention was compiled"

    __repr__ = __str__


def sites(*, verbose: bool = False) -> Sites:
    """The records of all attentions in `graphs()`, with or without a backward, in the order in which forwards run them.

    Graphs from a cache include their records; if a cache entry has none, `GraphRecord.missing` of its graph is set.
    ``print(sites())`` says for each attention where it is in the model, and what runs.

    Args:
        verbose: whether the result prints everything about each attention, as the log does: names of nodes, plans, and
            details.
    """
    found = Sites(site for graph in graphs() for site in graph.sites)
    found.verbose = verbose
    return found


def all_records() -> tuple[AnyRecord, ...]:
    """All records of all graphs, including those of other passes and of graphs without attention.

    Each record has ``rewrite`` (the name of the pass), ``name``, ``op``, ``status``, ``reason``, ``detail``, ``line``
    and ``module``.
    """
    with _lock:
        return tuple(record for graph in _graphs for record in graph.records)


def clear_sites() -> None:
    """Deletes all records of this process."""
    with _lock:
        _graphs.clear()


def _short(line: str) -> str:
    """``file:line``, with the file relative to the folder of installed packages or to the current folder."""
    return re.sub(r"^(.*/)?(site|dist)-packages/", "", line.removeprefix(f"{os.getcwd()}/"))


def _by(shape: Sequence[int | None]) -> str:
    return "x".join("?" if n is None else str(n) for n in shape)


def shape_text(site: Site | None) -> str:
    """A site's shape and dtype as text, such as ``2x16(4)x8192x128 bfloat16``.

    The numbers are batch, query heads (kv heads), length and head dim; ``?`` is a dynamic size.
    """
    if site is None:
        return ""
    batch, q_len, kv_len = ("?" if n is None else str(n) for n in (site.batch, site.q_len, site.kv_len))
    heads = str(site.q_heads) if site.group == 1 else f"{site.q_heads}({site.kv_heads})"
    length = q_len if q_len == kv_len else f"{q_len}/{kv_len}"
    return f"{batch}x{heads}x{length}x{site.head_dim} {site.dtype}"


def format_table(records: Sequence[SiteRecord]) -> str:
    """Formats records of attention as a text table.

    Sites with the same decision and source line share a row with a count; layer numbers that differ between their
    module paths are shown as ``*``.
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
