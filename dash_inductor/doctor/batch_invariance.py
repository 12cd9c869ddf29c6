"""Names the operators of compiled graphs whose bits may depend on the number of rows: batch size, number of tokens."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..graph.model_line import model_line
from ..graph.nodes import is_elementwise, op_name
from ..kernels.families import family
from ..records.records import SiteRecord, sites
from ..upstream import configs
from ..upstream.dispatch import OpOverload
from .batch_operators import Depends, depends
from .findings import Seen, Severity
from .reading import Place

OK, NOTE, _WARNING, _ERROR = Severity

_SHAPES = "Compare rows of calls with equal numbers of rows: docs/training-and-inference.md."
_ADVICE = {
    Depends.PRODUCT: _SHAPES,
    Depends.ROW: _SHAPES,
    Depends.ATTENTION: "docs/troubleshooting.md says for each reason what to do.",
    Depends.FUSION: (
        'torch.compile(model, options={"emulate_precision_casts": True}) rounds all: what is fused may differ between '
        "numbers of rows, and with and without gradients."
    ),
    Depends.CHOICE: "Values are the same; indices are, too, of a sort with stable=True.",
    Depends.RANKS: _SHAPES,
    Depends.RANDOM: "Switch dropout off where rows are compared.",
    Depends.UNKNOWN: "Run them with one row and with many, and compare the bits.",
}


class _Fate(enum.Enum):
    """What the bits of attention that is replaced depend on."""

    INVARIANT = ", and are batch invariant"
    FEW = ", and split the keys for few queries, by the numbers of queries and keys"
    DROPS = ", and drop other pairs at other places in the batch"

    @classmethod
    def of(cls, record: SiteRecord) -> _Fate | None:
        """That of a site; None if its forward is not replaced."""
        if record.site is None or record.plan is None or record.plan.forward == "keep":
            return None
        if record.site.dropout is not None:
            return cls.DROPS
        splits = record.plan.split_kv and family(record.plan.forward).splits_keys(record.site)
        return cls.FEW if splits else cls.INVARIANT


@dataclass
class _Uses:
    """The uses of an operator in forwards and backwards, and the place of the first that has one."""

    count: Counter[str] = field(default_factory=Counter)
    first: Place | None = None

    def __str__(self) -> str:
        counts = ", ".join(f"{count} in {kind}" for kind, count in self.count.items())
        return f"{counts}; first {self.first}" if self.first else counts


class BatchInvariance:
    """Reads compiled graphs for the check `batch_invariance`."""

    def __init__(self) -> None:
        self._uses: dict[tuple[Depends, str], _Uses] = {}
        self._graphs: Counter[str] = Counter()
        self._invariant = 0

    def compiled(self, graph: GraphModule, is_backward: bool) -> None:
        """Records the operators of a graph that Inductor is about to compile, and of its subgraphs."""
        kind = "backwards" if is_backward else "forwards"
        self._graphs[kind] += 1
        for module in graph.modules():
            for node in module.graph.nodes if isinstance(module, GraphModule) else ():
                found, name = depends(node), _name(node)
                if found is Depends.NOTHING and (dtype := _rounded(node)):
                    found, name = Depends.FUSION, dtype
                if found is Depends.NOTHING:
                    self._invariant += 1
                elif found is not None:
                    uses = self._uses.setdefault((found, name), _Uses())
                    uses.count[kind] += 1
                    uses.first = uses.first or _place(node)

    def batch_invariance(self) -> Iterator[Seen]:
        """Names the operators whose bits may depend on the number of rows, and counts the others."""
        if not self._graphs:
            yield NOTE, "no graph was compiled, and operators outside of graphs are not read", ""
            return
        graphs = " and ".join(f"{count} of {kind}" for kind, count in self._graphs.items())
        what = f"operators of the compiled graphs ({graphs}) that are batch invariant, besides attention"
        yield OK, f"{what}: {self._invariant}", ""
        yield from _attention()
        for found in Depends:
            named = [f"{name} ({uses})" for (kind, name), uses in self._uses.items() if kind is found]
            if named:
                yield NOTE, "\n  ".join([f"{found.value}:", *named]), _ADVICE.get(found, "")


def _attention() -> Iterator[Seen]:
    """Says what the bits of attention that is replaced depend on."""
    fates = [(_Fate.of(record), record) for record in sites()]
    for fate in _Fate:
        records = [record for found, record in fates if found is fate]
        what = f"attention sites that are replaced{fate.value}: {len(records)}"
        if records and fate is _Fate.INVARIANT:
            yield OK, what, ""
        elif records:
            first = f"; first at {records[0].source}" if records[0].source else ""
            yield NOTE, what + first, "See docs/determinism.md."


def _name(node: Node) -> str:
    """The name of the operator from which PyTorch has made a node, such as `_softmax` for its sum, or its own name."""
    original, own = node.meta.get("original_aten"), op_name(node)
    if isinstance(original, OpOverload) and not own.startswith("dash_inductor::"):
        own = original._schema.name
    return own.removeprefix("aten::") or str(node.target)


def _rounded(node: Node) -> str:
    """The 16-bit dtype of what an elementwise operator computes, if rounding to it is left to fusion; else ""."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not is_elementwise(node) or configs.inductor.emulate_precision_casts:
        return ""
    return str(value.dtype).removeprefix("torch.") if value.dtype in (torch.bfloat16, torch.float16) else ""


def _place(node: Node) -> Place | None:
    line, module = model_line([node, *node.users])
    return Place(line or "an unknown line", module) if line or module else None
