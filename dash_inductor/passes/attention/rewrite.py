"""The attention pass, which replaces each attention by dash_inductor's operators or records why it does not."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from ... import failures
from ...config import Config, config
from ...errors import described
from ...frontends.all import attentions
from ...frontends.attention import Attention, Found, Refusal
from ...graph import arguments, temporaries
from ...graph.model_line import model_line
from ...graph.undo import Undo
from ...masks import recognition
from ...model.plan import Fallback, Plan
from ...model.reasons import Reason
from ...model.site import Site
from ...planning.planner import keeping
from ...planning.prediction import predicted_us
from ...records.records import FORWARD_ONLY, FULL, SiteRecord
from ..base.rewrite import Result
from .combinations import SPLIT, Split, keep_whole, split
from .forward_order import NodeOrder
from .forwards import cause_of_fallback
from .match import Match, SiteFacts, device_of
from .replace import replace
from .rotations import share_rotations
from .saved import watch
from .seeds import draw_at_once
from .sites import analyse

log = logging.getLogger("dash_inductor")

CompileKernels = Callable[[Site, Plan, torch.device, bool], None]
"""A function that compiles the kernels of a site: arguments are site, plan, device, and whether it has a backward."""

_ASKED_FOR = (Reason.CPU_OFF, Reason.FORWARD_OFF)
"""Reasons that are settings of the program: a site not replaced for one of them is no error under `config.strict`."""

_RECORDED = "dash_inductor_recorded"  # in node.meta of a fallback, because the pass may see the same graph again


@dataclass(frozen=True)
class AttentionRewrite:
    """The pass (see `base.rewrite.Rewrite`) that replaces attention by dash_inductor's operators.

    Args:
        compile_kernels: called with site, plan, device and whether there is a backward, for every attention that can be
            replaced, before the graph is changed; if it raises, the attention is not replaced and its record has the
            reason COMPILE_FAILED.  None compiles nothing in advance.
    """

    compile_kernels: CompileKernels | None = None
    name: ClassVar[str] = "attention"

    def is_on(self, config: Config) -> bool:
        return True

    def apply(self, graph: Graph) -> Sequence[Result]:
        causes: dict[str, Fallback] = {}
        while True:
            undo = Undo(graph)
            splits = _split(graph, undo)
            readings = self._replace(graph)
            present = set(graph.nodes)
            failed = [each for each in splits if not present.isdisjoint(each.products)]
            if not failed:
                _tell_splits(readings, splits, causes)
                return _results(readings)
            for each in failed:
                causes |= dict.fromkeys((node.name for node in each.softmaxes), _cause(each, readings))
            undo.restore()
            keep_whole(graph, failed)

    def _replace(self, graph: Graph) -> list[_Reading]:
        """Replaces the attentions of a graph that have not been recorded yet; returns what became of them."""
        readings = _read(graph)
        if self.compile_kernels is not None:
            for reading in readings:
                reading.compile(self.compile_kernels)
        for group in _by_forward(readings):
            _replace_group(graph, group, _lone_forwards(readings))
        _tell_forwards(readings)
        if readings:  # even if nothing was merged on this rank: all ranks must send in the same order
            share_rotations(graph)
        temporaries.erase(graph)
        if any(reading.reason is None for reading in readings):
            watch(graph)
            draw_at_once(graph)
        return readings

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        undo = Undo(graph)
        splits = _split(graph, undo)
        readings = _read(graph)
        temporaries.erase(graph)
        for reading in readings:
            if reading.reason is None:
                reading.fall_back(Reason.PASSES_OFF, cause)
        results = _results(readings)
        if splits:
            recorded = {node.name for node in graph.nodes if _RECORDED in node.meta}
            undo.restore()
            keep_whole(graph, splits)
            recorded |= {node.name for part in splits for node in part.softmaxes}
            for node in graph.nodes:
                if node.name in recorded:
                    node.meta[_RECORDED] = True
        return results


def _split(graph: Graph, undo: Undo) -> list[Split]:
    """Splits products of combined probabilities; after an error, restores the graph, and none is split."""
    try:
        return split(graph)
    except Exception as error:
        failures.caught("the split of products of probabilities", error)
        undo.restore()
        return []


def _read(graph: Graph) -> list[_Reading]:
    """Finds and analyses the attentions of a graph that have not been recorded yet."""
    order = NodeOrder(graph)
    readings = [
        _Reading(found, order.of_forward(found)) for found in attentions(graph) if _RECORDED not in found.node.meta
    ]
    try:
        for reading in readings:
            reading.read()
    finally:
        recognition.forget(graph)
    return readings


def _results(readings: list[_Reading]) -> list[Result]:
    """The results of the sites, in the order of the forward; nodes that are not replaced are marked as recorded."""
    for reading in readings:
        if reading.reason is not None:
            reading.node.meta[_RECORDED] = True
    readings = sorted(readings, key=lambda reading: reading.place)
    return [Result(reading.record(), reading.was_asked_for()) for reading in readings]


@dataclass
class _Reading:
    """The state of one site during the pass, from which its record is made.

    Attributes:
        found: the attention as its frontend found it.
        place: the position of its forward in the graph.
        match: set as long as the site is to be replaced.
        reason, detail: why it is not replaced, or how it was matched.
        forward_fallback: why the forward of a replaced backward is left to PyTorch; "" if it is replaced.
        facts: what is known for the record.
    """

    found: Found
    place: int
    match: Match | None = None
    reason: Reason | None = None
    detail: str = ""
    forward_fallback: str = ""
    facts: SiteFacts = field(default_factory=SiteFacts)

    def __post_init__(self) -> None:
        self.node, self.op, self.has_backward = self.found.node, self.found.op, self.found.has_backward
        self.name, self.graph = self.node.name, self.node.graph
        self.line, self.module = model_line(self.found.lines)

    def read(self) -> None:
        try:
            analysis = analyse(self.found)
            self.facts, self.match = analysis.facts, analysis.match
            if analysis.fallback is not None:
                self.fall_back(analysis.fallback.reason, analysis.fallback.detail)
            if analysis.error is not None:
                self.fail(analysis.error)
            if self.match is not None:
                self.detail = self.match.detail
                if log.isEnabledFor(logging.DEBUG):
                    log.debug("site %s: %s", self.name, "; ".join(self._steps(self.match)))
        except Exception as error:
            self.fail(error)

    def _steps(self, match: Match) -> Iterator[str]:
        """The steps by which the site was matched, in words, for the debug log."""
        attention, operands = match.attention, match.operands
        if attention.backward is not None:
            found = "in no graph that is seen here" if attention.forward is None else attention.forward.node
            yield f"backward of {attention.forward_op}, whose forward is {found}"
        else:
            yield f"{attention.forward_op} without a backward"
        yield f"query {operands.query.node}, key {operands.key.node}, value {operands.value.node}"
        if operands.repeats is not None:
            yield "key and value are read from {} and {}, without their repeats".format(
                *(repeat.base for repeat in operands.repeats)
            )
        yield f"mask {self.facts.mask}: {self.facts.recognised or 'told by the operator'}"
        yield f"planned for {self.facts.arch}: {match.plan}"

    def compile(self, compile_kernels: CompileKernels) -> None:
        if self.match is None:
            return
        try:
            compile_kernels(self.match.site, self.match.plan, self.match.device, self.has_backward)
        except Exception as error:
            log.debug("site %s", self.name, exc_info=error)
            text = " ".join(str(error).split())  # compiler errors may quote whole programs
            text = text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"
            self.fall_back(Reason.COMPILE_FAILED, f"{type(error).__name__}: {text}")

    def needs_our_forward(self, cause: str) -> bool:
        """Whether the backward needs our forward although `cause` leaves it to PyTorch; if so, the site falls back."""
        if self.match is None or not self.match.needs_our_forward:
            return False
        self.fall_back(Reason.FORWARD_FALLBACK if self.match.site.dropout is None else Reason.DROPOUT, cause)
        return True

    def is_read_in_vain(self) -> bool:
        """Whether other forwards' backwards take this forward's random state but, without dropout, do not use it."""
        return (
            isinstance(self.found, Attention) and self.found.forward is not None and bool(self.found.forward.not_read)
        )

    def merges(self) -> tuple[Node, ...]:
        """The forwards whose outputs and log-sum-exps are merged into what the backward reads (ring attention)."""
        backward = self.found.backward if isinstance(self.found, Attention) else None
        return () if backward is None else backward.merged

    def fall_back(self, reason: Reason, detail: str) -> None:
        self.match, self.reason, self.detail = None, reason, detail

    def was_asked_for(self) -> bool:
        """Whether the site, if it is not replaced, is not replaced because of a setting of the program."""
        if isinstance(self.found, Refusal) and config.cpu == "off" and device_of(self.node).type == "cpu":
            return True
        return self.reason in _ASKED_FOR

    def fail(self, error: Exception) -> None:
        log.debug("site %s", self.name, exc_info=error)
        self.fall_back(Reason.INTERNAL_ERROR, described(error))

    def _backward_elsewhere(self) -> str:
        """A note about a forward whose gradient is wanted but whose backward is in no compiled graph; may be ""."""
        wanting = "" if self.has_backward else arguments.wanting_a_gradient()
        if not wanting:
            return ""
        return f"{wanting} wants a gradient and the graph gives none: a backward of it runs outside of compiled graphs"

    def record(self) -> SiteRecord:
        plan, facts, graph = self.match.plan if self.match else None, self.facts, self.graph
        forward = ": ".join(filter(None, ("not replaced", self.forward_fallback)))
        if plan and not self.forward_fallback:
            forward = plan.forward
        return SiteRecord(
            name=self.name,
            op=self.op,
            status="fallback" if self.reason else "replaced",
            reason=self.reason,
            detail=arguments.in_words("; ".join(filter(None, (self.detail, self._backward_elsewhere()))), graph),
            site=facts.site,
            plan=plan,
            forward=forward,
            mask=facts.mask,
            line=self.line,
            module=self.module,
            tensors=facts.tensors,
            inputs=facts.inputs,
            recognised=facts.recognised,
            arch=facts.arch,
            predicted_us=predicted_us(plan, facts.site, facts.arch)
            if plan and facts.site and self.has_backward
            else None,
            kind=FULL if self.has_backward else FORWARD_ONLY,
        )


def _by_forward(readings: list[_Reading]) -> list[list[_Reading]]:
    """Groups the sites to replace by their forward, in the order in which the forward runs them.

    Forwards whose results other backwards take without reading them (`is_read_in_vain`) come last: once those
    backwards are replaced, nothing takes the results any more.
    """
    groups: dict[Node, list[_Reading]] = {}
    for reading in sorted(readings, key=lambda reading: (reading.is_read_in_vain(), reading.place)):
        if reading.match is not None:
            groups.setdefault(reading.found.place or reading.node, []).append(reading)
    return list(groups.values())


def _lone_forwards(readings: list[_Reading]) -> set[Node]:
    """The forwards without a backward of their own that are still to be replaced, or have been."""
    return {reading.node for reading in readings if reading.match is not None and not reading.has_backward}


def _tell_forwards(readings: list[_Reading]) -> None:
    """Sets `forward_fallback` of backwards of merged results to the names of merged forwards that are not replaced."""
    ours = _lone_forwards(readings)
    for reading in readings:
        fallback = [part.name for part in reading.merges() if part not in ours]
        if reading.match is not None and reading.merges():
            reading.forward_fallback = ", ".join(fallback)


def _cause(part: Split, readings: list[_Reading]) -> Fallback:
    """The reason why attentions of a split product are not replaced."""
    own = {*part.softmaxes, *part.products}
    found = [reading for reading in readings if own & {reading.node, reading.found.place}]
    kept = [(reading.reason, reading.detail) for reading in found if reading.reason is not None]
    details = dict.fromkeys(detail for _, detail in kept) if kept else {"something else reads what is between": None}
    return Fallback(kept[0][0] if kept else Reason.UNSUPPORTED_OP, f"{SPLIT} is kept, too: {'; '.join(details)}")


def _tell_splits(readings: list[_Reading], splits: list[Split], causes: Mapping[str, Fallback]) -> None:
    """Adds to records that a product was split, and why one that was split on trial is not replaced."""
    of_splits = {node for part in splits for node in part.products}
    for reading in readings:
        if reading.reason is None and reading.found.place in of_splits:
            reading.detail += f"; {SPLIT}"
        if reading.reason is not None and reading.name in causes:
            reading.fall_back(causes[reading.name].reason, causes[reading.name].detail)


def _replace_group(graph: Graph, group: list[_Reading], lone_forwards: Set[Node]) -> None:
    try:
        matches = [reading.match for reading in group if reading.match is not None]
        forward = matches[0].attention.forward
        cause = cause_of_fallback(forward, matches)
        if cause and not group[0].has_backward:
            group[0].fall_back(Reason.FORWARD_RESULTS, cause)
            return
        if cause:
            group = [reading for reading in group if not reading.needs_our_forward(cause)]
            matches = [match for match in matches if not match.needs_our_forward]
            if not group or not group[0].merges() or not lone_forwards >= set(group[0].merges()):
                matches = [
                    dataclasses.replace(match, plan=keeping(match.plan, match.attention.forward_op))
                    for match in matches
                ]
        replace(graph, None if cause else forward, matches)
    except Exception as error:
        for reading in group:
            reading.fail(error)
        return
    for reading, match in zip(group, matches, strict=True):
        reading.match, reading.forward_fallback = match, cause
