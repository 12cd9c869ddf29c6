"""Results of analysing an attention: `Match` if it can be replaced, and `SiteFacts` for its record."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from ...frontends.attention import Attention
from ...frontends.biases import FoundBias
from ...masks.normal_form import Components
from ...model.plan import Fallback, Plan
from ...model.site import Site
from ...records.records import Tensors
from .operands import Operands


@dataclass(frozen=True)
class Match:
    """An attention that can be replaced: a backward, or a forward without one in its graph.

    Attributes:
        attention: the attention, as its frontend found it.
        site, plan: the facts that the planner was given, and its answer.
        operands: the query, key and value that the new operators read, and the layouts of the gradients.
        components: the mask, with the nodes from which the call's extra operands are computed.
        bias: the bias that is added to the scores in addition to the mask; None for none.
        note: why a mask tensor is added as a bias instead of being read as a mask; "" if that is not the case.
    """

    attention: Attention
    site: Site
    plan: Plan
    operands: Operands
    components: Components
    bias: FoundBias | None = None
    note: str = ""

    @property
    def node(self) -> Node:
        """The backward's node, or the forward's if the graph has no backward of it."""
        return self.attention.node

    @property
    def device(self) -> torch.device:
        """The device on which the site runs."""
        return device_of(self.node)

    @property
    def needs_our_forward(self) -> bool:
        """Whether the backward can run only together with our forward.

        That is the case if it does not read a saved log-sum-exp, or if the call has operands for the forward: the
        forward reads the same tensors (and, for dropout, the same seed).
        """
        backward = self.attention.backward
        return bool(self.site.call.of_forward.operands) or (backward is not None and backward.logsumexp is None)

    @property
    def detail(self) -> str:
        """The text for the record's `detail`: how the site was matched."""
        dropout = "" if self.site.dropout is None else f"dropout with probability {self.site.dropout.p}"
        about = dropout, self.attention.note, self.operands.detail, self.note, self.plan.schedule_note
        return "; ".join(filter(None, about))


@dataclass(frozen=True)
class SiteFacts:
    """The facts about a site, replaced or not, that go into its record; fields as in `SiteRecord`."""

    site: Site | None = None
    mask: str = ""
    tensors: Tensors | None = None
    inputs: tuple[str, ...] = ()
    recognised: str = ""
    arch: str = ""


@dataclass(frozen=True)
class Analysis:
    """The outcome of analysing one attention; exactly one of `match`, `fallback` and `error` is set.

    Attributes:
        facts: what the analysis found before it ended.
        match: the match, if the attention can be replaced.
        fallback: the reason why it is not, if it cannot be.
        error: the unexpected exception (a dash_inductor bug) that ended the analysis.
    """

    facts: SiteFacts
    match: Match | None = None
    fallback: Fallback | None = None
    error: Exception | None = None


def device_of(node: Node) -> torch.device:
    """The device on which an operator runs: that of its first tensor argument.

    Raises:
        ValueError: no argument is a tensor with a value in its metadata.
    """
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if isinstance(value, Tensor):
            return value.device
    raise ValueError(f"no tensor argument of {node.format_node()} has a value")
