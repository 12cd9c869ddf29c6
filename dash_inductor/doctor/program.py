"""Checks inside a program: whether it asked for determinism when it compiled, and what became of its attention."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import _switch
from ..model.reasons import Reason
from ..observe.fresh import every_graph_compiled
from ..observe.records import sites
from . import settings
from .findings import Check, Finding, Seen, Severity, run

OK, NOTE, WARNING, ERROR = Severity

LIBRARIES = ("flash_attn", "flash_attn_interface", "sageattention", "transformer_engine", "xformers")
"""Libraries with attention of their own, which dash_inductor does not see."""


def deterministic_algorithms() -> Iterator[Seen]:
    """Whether deterministic algorithms are on, and how."""
    if not torch.are_deterministic_algorithms_enabled():
        what = "a graph was compiled without deterministic algorithms: dash_inductor left it alone"
        yield WARNING, what, "Call torch.use_deterministic_algorithms(True) before the first call of the model."
        return
    if torch.is_deterministic_algorithms_warn_only_enabled():
        what = "warn_only=True: operators of PyTorch without a deterministic kernel run, and only warn"
        yield WARNING, what, "torch.use_deterministic_algorithms(True), without warn_only."
    if torch._C._get_deterministic_fill_uninitialized_memory():
        what = "memory of torch.empty is filled with NaN first, which costs a write of all of it"
        advice = "torch.utils.deterministic.fill_uninitialized_memory = False saves it: what is written keeps its bits."
        yield NOTE, what, advice


def switch() -> Iterator[Seen]:
    """Whether dash_inductor was switched off where a graph was compiled."""
    reason = _switch.off_reason()
    if reason is not None:
        yield WARNING, f"a graph was compiled without dash_inductor: {reason}", "Compile it with dash_inductor on."


def attention() -> Iterator[Seen]:
    """What became of every attention backward."""
    fates = Counter(record.reason for record in sites())
    if not fates:
        loaded = [name for name in LIBRARIES if name in sys.modules]
        what = "no attention backward was compiled"
        if loaded:
            what += f"; the program has loaded {', '.join(loaded)}, whose attention is not PyTorch's"
        advice = (
            "See docs/troubleshooting.md, `sites()` is empty; models of transformers take attn_implementation='sdpa'."
        )
        yield WARNING, what, advice
    for reason, count in fates.items():
        if reason is None:
            yield OK, f"attention backwards that are replaced: {count}", ""
        elif reason is Reason.CPU_OFF:
            yield OK, f"attention backwards on the CPU, left to PyTorch, which is deterministic there: {count}", ""
        else:
            what = f"attention backwards that stay as PyTorch has them: {count}. {reason.value}: {reason.explanation}"
            yield WARNING, what, f"docs/troubleshooting.md says what to do about `{reason.value}`."


COMPILING: tuple[Check, ...] = (deterministic_algorithms, switch, *settings.CHECKS)
"""Run whenever a graph is compiled, so that they see the settings of `torch.compile(model, mode=..., options=...)`."""

AFTERWARDS: tuple[Check, ...] = (attention,)


@contextmanager
def watching(found: dict[Finding, None]) -> Iterator[None]:
    """Run the checks of `COMPILING` whenever a graph is compiled inside the block, and add what they find to `found`.

    No graph is taken from a cache meanwhile, because it would not be compiled.
    """
    from torch._inductor import compile_fx

    generate = compile_fx.fx_codegen_and_compile  # compile_fx looks it up by this name whenever it calls it

    @functools.wraps(generate)
    def look_and_generate(*args: Any, **kwargs: Any) -> Any:
        found.update(dict.fromkeys(run(COMPILING)))
        return generate(*args, **kwargs)

    compile_fx.fx_codegen_and_compile = look_and_generate
    try:
        with every_graph_compiled():
            yield
    finally:
        compile_fx.fx_codegen_and_compile = generate
