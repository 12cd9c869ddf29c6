"""One record per attention backward that was seen while compiling: what was decided and why."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..model.plan import Plan
from ..model.reasons import Reason
from ..model.site import Site

__all__ = ["Reason", "SiteRecord", "add", "clear_sites", "format_table", "sites"]


@dataclass(frozen=True)
class SiteRecord:
    """What happened to one attention backward.

    Attributes:
        name: the backward node's name in its joint graph; replaced sites carry it as the op's `site` argument.
        op: the backward operator that was found, for example ``aten::_scaled_dot_product_flash_attention_backward``.
        status: "replaced", or "kept" as PyTorch had it.
        reason: why it is kept; None for a replaced site.
        detail: more about the reason, or about how the site was matched; may be empty.
        site: the facts given to the planner; None if they could not be established.
        plan: what runs; None for a kept site.
        forward: what became of the forward: the plan's forward, or "kept" with the cause.
        mask: the mask in normal form (``str(Band)``), "" if unknown.
        source: the model's source line, ``file:line in module.path``; "" if the graph does not tell.
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
    source: str

    def as_dict(self) -> dict[str, object]:
        """Plain strings and numbers only, for JSON."""
        return {
            "name": self.name,
            "op": self.op,
            "status": self.status,
            "reason": self.reason.value if self.reason else None,
            "detail": self.detail,
            "mask": self.mask,
            "shape": shape_text(self.site),
            "plan": str(self.plan) if self.plan else None,
            "numerics_key": self.plan.numerics_key if self.plan else None,
            "forward": self.forward,
            "source": self.source,
        }

    def __str__(self) -> str:
        """One line, as it is logged."""
        where = f" at {self.source}" if self.source else ""
        note = f" ({self.detail})" if self.detail else ""
        if self.reason is not None:
            return f"{self.name}: kept, {self.reason.value}: {self.reason.explanation}{note}{where}"
        return f"{self.name}: replaced, mask {self.mask}, plan {self.plan}, forward {self.forward}{note}{where}"


_records: list[SiteRecord] = []
_lock = threading.Lock()  # graphs may be compiled on several threads


def add(records: Iterable[SiteRecord]) -> None:
    """Append records, oldest first."""
    with _lock:
        _records.extend(records)


def sites() -> tuple[SiteRecord, ...]:
    """Every attention backward that was compiled in this process since `clear_sites`, oldest first.

    Graphs that Inductor takes from a cache are not compiled and leave no record; with
    ``TORCHINDUCTOR_FORCE_DISABLE_CACHES=1`` every graph is compiled.
    """
    with _lock:
        return tuple(_records)


def clear_sites() -> None:
    """Forget all records."""
    with _lock:
        _records.clear()


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
        row = (r.status, shape_text(r.site), r.mask, decision, r.forward, re.sub(r"\.\d+(?=\.|$)", ".*", r.source))
        groups.setdefault(row, []).append(r)
    rows: list[tuple[str, ...]] = [header]
    for (*cells, pattern), group in groups.items():
        source = group[0].source if len({r.source for r in group}) == 1 else pattern
        rows.append((str(len(group)), *cells, source))
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
