"""What the analysis of an attention returns: a `Match` if it can be replaced, and `SiteFacts` for its record."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from ...frontends.attention import Attention
from ...frontends.biases import FoundBias
from ...frontends.factors import FactorGradient
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
        site: what the planner was told about the attention.
        plan: the kernel, schedule and tile shapes that the planner chose.
        operands: the query, key and value that the new operators read, and the nodes of their gradients.
        components: the mask, with the nodes from which the tensors that it reads are computed.
        bias: the bias that is added to the scores in addition to the mask; None for none.
        factor_gradients: the gradients of tensors from which factors of the scores are computed.
        note: why a mask tensor is added as a bias instead of being read as a mask; "" if that is not the case.
    """

    attention: Attention
    site: Site
    plan: Plan
    operands: Operands
    components: Components
    bias: FoundBias | None = None
    factor_gradients: tuple[FactorGradient, ...] = ()
    note: str = ""

    @property
    def node(self) -> Node:
        """The node of the attention's backward, or of its forward if the graph has no backward."""
        return self.attention.node

    @property
    def device(self) -> torch.device:
        """The device on which the attention runs."""
        return device_of(self.node)

    @property
    def needs_our_forward(self) -> bool:
        """Whether the backward can be replaced only if its forward is replaced, too.

        That is the case if the backward does not read a saved log-sum-exp, or if the attention has optional operands
        that the forward reads: both must read the same tensors (for dropout, the same seed).
        """
        backward = self.attention.backward
        return bool(self.site.spec.of_forward.operands) or (backward is not None and backward.logsumexp is None)

    @property
    def detail(self) -> str:
        """The text for the record's `detail`: how the site was matched."""
        dropout = "" if self.site.dropout is None else f"dropout with probability {self.site.dropout.p}"
        factors = self.attention.inputs.factors.text
        about = dropout, self.attention.note, factors, self.operands.detail, self.note, self.plan.schedule_note
        return "; ".join(filter(None, about))


@dataclass(frozen=True)
class SiteFacts:
    """What was found out about an attention, replaced or not, for its record.

    Attributes:
        site: what the planner is told; None if the analysis ended before that.
        mask: the mask in normal form, in words; "" if it is unknown.
        tensors: shapes, dtype and device of query, key and value; None if the graph does not contain them.
        inputs: the names, in the model, of the graph inputs from which the mask is computed.
        recognised: in words, how the mask tensor was recognised; "" without a mask tensor.
        arch: the GPU architecture, such as "sm_90", or "cpu"; "" if the analysis ended before that.
    """

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
