"""Checks that run inside a program: whether it compiled deterministically, and what became of its attention."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node
from torch.nn.attention import current_flash_attention_impl, list_flash_attention_impls

from .. import _switch
from ..eager.determinism import DETERMINISTIC
from ..eager.registration import NAME
from ..graph.model_line import model_line
from ..graph.nodes import bind
from ..model.reasons import Reason
from ..records.records import sites
from ..upstream import seams
from ..upstream.dispatch import OpOverload
from ..upstream.fresh import every_graph_compiled
from . import settings
from .findings import Check, Finding, Seen, Severity, run
from .libraries import PACKAGES
from .running import Running
from .unwritten import reads_unwritten

if TYPE_CHECKING:
    from .batch_invariance import BatchInvariance

OK, NOTE, WARNING, ERROR = Severity


def deterministic_algorithms() -> Iterator[Seen]:
    """Checks whether deterministic algorithms are on, and in which mode."""
    if not torch.are_deterministic_algorithms_enabled():
        what = "a graph was compiled without deterministic algorithms: dash_inductor left it alone"
        yield WARNING, what, "Call torch.use_deterministic_algorithms(True) before the first call of the model."
        return
    if torch.is_deterministic_algorithms_warn_only_enabled() and not DETERMINISTIC.switched_on:
        what = "warn_only=True: operators of PyTorch without a deterministic kernel run, and only warn"
        yield WARNING, what, "torch.use_deterministic_algorithms(True), without warn_only."


def fill() -> Iterator[Seen]:
    """Reports that memory is filled; not in a program that reads memory that it has not written."""
    what = "memory of torch.empty outside of compiled graphs is filled with NaN first, which costs a write of it"
    advice = "torch.utils.deterministic.fill_uninitialized_memory = False saves it: what is written keeps its bits."
    yield NOTE, what, advice


def switch() -> Iterator[Seen]:
    """Checks whether dash_inductor was switched off when a graph was compiled."""
    reason = _switch.off_reason()
    if reason is not None:
        yield WARNING, f"a graph was compiled without dash_inductor: {reason}", "Compile it with dash_inductor on."


def attention() -> Iterator[Seen]:
    """Reports whether each attention was replaced, and whether dash_inductor overrides PyTorch's FlashAttention."""
    if NAME in list_flash_attention_impls():
        active = "and active" if current_flash_attention_impl() == NAME else "and not active"
        yield OK, f"attention of programs that are not compiled: registered {active} for PyTorch's FlashAttention", ""
    fates = Counter(record.reason for record in sites())
    if not fates:
        loaded = [name for name in PACKAGES if name in sys.modules]
        what = "no attention was compiled"
        if loaded:
            what += f"; the program has loaded {', '.join(loaded)}, whose attention is not PyTorch's"
        advice = (
            "See docs/troubleshooting.md, `sites()` is empty; models of transformers take attn_implementation='sdpa'."
        )
        yield WARNING, what, advice
    for reason, count in fates.items():
        if reason is None:
            yield OK, f"attention sites that are replaced: {count}", ""
        elif reason is Reason.CPU_OFF:
            yield OK, f"attention sites on the CPU, left to PyTorch, which is deterministic there: {count}", ""
        else:
            what = f"attention sites that stay as PyTorch has them: {count}. {reason.value}: {reason.explanation}"
            yield WARNING, what, f"docs/troubleshooting.md says what to do about `{reason.value}`."


COMPILING: tuple[Check, ...] = (deterministic_algorithms, switch, *settings.CHECKS)
"""The checks that run at each compile, so that they see the settings of `torch.compile(model, mode=...,
options=...)`.
"""

AFTERWARDS: tuple[Check, ...] = (attention,)


@contextmanager
def watching(found: dict[Finding, None], running: Running, operators: BatchInvariance | None = None) -> Iterator[None]:
    """A context manager that runs the checks of `COMPILING` for each graph that is compiled inside its block.

    No graph is loaded from a cache meanwhile, because it would not be compiled.

    Args:
        found: a dict used as an ordered set, to which the findings are added.
        running: receives the graphs, and the lines at which graphs switch the flag.
        operators: receives the graphs, too.
    """

    def look_at_dynamo(graph: Any, *args: Any, **kwargs: Any) -> None:
        for line, value in switches(graph.graph):
            running.toggled(line, "", value)

    filled, unwritten = False, False

    def look_at_part(graph: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal filled, unwritten
        running.step.compiled(graph.graph)
        filled = filled or (
            torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # of the module
        )
        read = list(dict.fromkeys(reads_unwritten(graph.graph)))
        unwritten = unwritten or bool(read)
        found.update(dict.fromkeys(run([unwritten_memory(read)])))
        if operators is not None:
            operators.compiled(graph, bool(kwargs.get("is_backward")))
        backward = [draws_in(graph.graph)] if kwargs.get("is_backward") else []
        found.update(dict.fromkeys(run([*COMPILING, *backward])))

    not_looking = running.step.not_looking
    whole = seams.COMPILE_GRAPH.wrapped(lambda function: _after(look_at_dynamo, function, not_looking))
    part = seams.GENERATE.wrapped(lambda function: _after(look_at_part, function, not_looking))
    with whole, part, every_graph_compiled():
        try:
            yield
        finally:
            if filled and not unwritten:
                found.update(dict.fromkeys(run([fill])))


def _after(
    look: Callable[..., None], function: Callable[..., Any], around: Callable[[], AbstractContextManager[None]]
) -> Callable[..., Any]:
    """Wraps a function so that `look` sees its arguments first, and both run inside a context."""

    def look_and_call(*args: Any, **kwargs: Any) -> Any:
        with around():
            look(*args, **kwargs)
            return function(*args, **kwargs)

    return look_and_call


def switches(graph: Graph) -> Iterator[tuple[str, bool]]:
    """Yields where a Dynamo graph switches deterministic algorithms: (source line, whether they are then on).

    Dynamo does not record the line of the switch; the line of the next operation is used instead.
    """
    now, nodes = torch.are_deterministic_algorithms_enabled(), list(graph.nodes)
    for place, node in enumerate(nodes):
        if getattr(node.target, "__name__", "") == "_set_deterministic_algorithms" and node.args[0] is not now:
            now = bool(node.args[0])
            yield model_line(nodes[place:])[0] or "its end", now


def draws_in(backward: Graph) -> Check:
    """Returns a check for a backward graph: whether it draws random numbers again instead of using the forward's."""

    def drawn_again() -> Iterator[Seen]:
        """Checks whether the backward recomputes random numbers because of `activation_memory_budget`."""
        from ..upstream import configs

        budget = configs.functorch.activation_memory_budget
        draws = [node for node in backward.nodes if _draws(node)] if budget < 1 else []
        for line in dict.fromkeys(model_line([node, *node.users])[0] or "an unknown line" for node in draws):
            what = (
                f"the backward draws the random numbers of {line} again, and they are others: with "
                f"activation_memory_budget={budget} PyTorch recomputes what draws them, and the gradients are wrong"
            )
            yield ERROR, what, "Set torch._functorch.config.activation_memory_budget to 1, or dropout to 0."

    return drawn_again


def unwritten_memory(read: list[tuple[str, str]]) -> Check:
    """Returns a check for what a graph reads of memory that it has not written, as `reads_unwritten` yields it."""

    def memory_that_is_not_written() -> Iterator[Seen]:
        """Checks whether a graph reads memory of `torch.empty` that it has not written."""
        for line, how in read:
            what = f"the memory that {line} makes is not written, or not all of it, and {how}"
            advice = (
                "Use torch.zeros, or write all of it first. It has NaN while fill_uninitialized_memory is set, and "
                "anything without, so leave that as it is."
            )
            yield WARNING, what, advice

    return memory_that_is_not_written


def _draws(node: Node) -> bool:
    """Whether a node draws from a random generator; attention without dropout does not."""
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    return bool(bind(node).get("dropout_p", 1))
