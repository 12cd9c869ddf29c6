"""Checks of PyTorch's determinism flag: whether and when a program sets it, and which operators it affects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .findings import Check, Seen, Severity
from .flag import Flag
from .listed import CONVOLUTION, Under
from .reading import Ran, Reading

OK, NOTE, WARNING, ERROR = Severity

MOST = 12
"""The maximum number of operators or places of one kind that are listed individually."""

_SET = "Call torch.use_deterministic_algorithms(True) before the model is made"


@dataclass
class _Set:
    """The first time that a program switches the flag on: the line, and what had happened before."""

    line: str
    before: tuple[str, ...]


class Heard:
    """Records when a program sets PyTorch's determinism flag; the doctor's `checks` say whether it was in time.

    Args:
        reading: the dispatch mode that records the operators that the program runs.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._before: dict[str, None] = {}
        self._set: _Set | None = None
        self._on_before = Flag.now() is not Flag.OFF
        self._trained = False
        self.checks: tuple[Check, ...] = (self.flag, self.flag_at_operators)

    def happened(self, what: str) -> None:
        """Records an event before which the flag should have been set; `what` is worded to follow "after"."""
        if self._set is None:
            self._before.setdefault(what)

    def trained(self) -> None:
        """Records that a backward of the program has run."""
        self._trained = True

    def switched(self, line: str, on: bool) -> None:
        """Records a call of the program that sets the determinism flag.

        Args:
            line: the source line of the call.
            on: whether the flag is on afterwards.
        """
        if on and self._set is None:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                self.happened("a process group was made")
            self._set = _Set(line, tuple(self._before))

    def flag(self) -> Iterator[Seen]:
        """Checks whether the program has set the flag, and whether it did so before anything that reads it."""
        if self._set is not None:
            if self._set.before and not self._on_before:
                what = f"deterministic algorithms were set at {self._set.line}, after {' and '.join(self._set.before)}"
                yield WARNING, what, f"{_SET}: what was made, compiled or run before has not heard it."
        elif self._trained and not self._on_before:
            yield WARNING, f"the program trains and never sets deterministic algorithms{_cudnn()}", f"{_SET}."

    def flag_at_operators(self) -> Iterator[Seen]:
        """Checks whether the flag affected each operator that ran and is in PyTorch's list of nondeterministic ones."""
        reading = self._reading
        if reading.failed:
            yield NOTE, f"whether operators have heard the flag is unknown: {reading.failed}", "Please report it."
        deaf = [(ran, said) for ran in reading.ran if (said := _deaf(ran))]
        for ran, (what, advice) in deaf[:MOST]:
            yield WARNING, f"{_named(ran)} {what}{_times(reading.ran[ran])}", advice
        if len(deaf) > MOST:
            rest = Counter(ran.operator.listed for ran, _ in deaf[MOST:])
            what = f"there are {len(deaf) - MOST} more places at which the flag was not heard: {_counted(rest)}"
            yield WARNING, what, "Mend the others first."
        unsure = [ran for ran in reading.ran if not _deaf(ran) and _unsure(ran)]
        for ran in unsure[:MOST]:
            what = f"{_named(ran)} was compiled under the flag; whether the generated code is deterministic is unknown"
            yield NOTE, what, "dash_inductor.all_records() tells whether it was rewritten; running it twice tells more."
        reached = Counter(ran.operator.listed for ran in reading.ran if not _deaf(ran) and not _unsure(ran))
        seen = "" if reading.complete else f" (of the first {reading.seen} that ran)"
        if reached:
            what = f"operators that PyTorch lists as nondeterministic, and that the flag has reached{seen}"
            yield OK, f"{what}: {_counted(reached)}", ""
        elif not reading.ran and not reading.failed and self._trained:
            yield OK, f"no operator that PyTorch lists as nondeterministic was seen in the first step{seen}", ""

    def at(self, module: str) -> list[str]:
        """Describes the uses of operators in PyTorch's list of nondeterministic ones in a module or its submodules.

        Args:
            module: the name of the module, from `frames.name_of`.

        Returns:
            A line of text for each use: the operator's name, its source line and the state of the determinism flag.
        """
        return [
            f"{ran.operator.listed} at {ran.place.line} (the flag was {ran.flag.value})"
            for ran in self._reading.ran
            if ran.place.inside(module)
        ]


def _cudnn() -> str:
    """A note about `torch.backends.cudnn.deterministic`, if the program sets it instead of the flag; else ""."""
    if not torch.backends.cudnn.deterministic:
        return ""
    return (
        ". It sets torch.backends.cudnn.deterministic, which reaches cuDNN's convolutions and its CTC loss, and "
        "nothing else: no attention, no index_add, scatter or interpolation, no other operator and no compiled graph"
    )


def _deaf(ran: Ran) -> tuple[str, str] | None:
    """The finding and advice for an operator that ran without the effect of the flag; None if it had its effect."""
    operator, done = ran.operator, "was compiled" if ran.compiled else "ran"
    if ran.flag is Flag.OFF:
        if operator is CONVOLUTION and torch.backends.cudnn.deterministic:
            return None
        known = "its kernel does not ask for the flag" if operator.under is Under.NOTHING else operator.under.value
        return f"{done} without deterministic algorithms; under them {known}", f"{_SET}."
    if operator.under is Under.NOTHING and not ran.compiled:
        what = f"{done} with the flag {ran.flag.value}, which it does not hear: its backward adds in no fixed order"
        advice = "torch.use_deterministic_algorithms(True), without warn_only, makes PyTorch choose another kernel; "
        return what, f"{advice}torch.backends.cuda.enable_cudnn_sdp(False) switches this one off."
    keeps = operator.under is Under.STRICT or (operator.under is Under.RAISES and not ran.compiled)
    if ran.flag is Flag.WARN_ONLY and keeps:
        what = f"{done} with warn_only=True and kept its nondeterministic kernel"
        return what, "torch.use_deterministic_algorithms(True), without warn_only, or another operator."
    if operator.under is Under.STRICT and uses_composable_kernel():
        what = f"{done} by Composable Kernel, which PyTorch does not tell of the flag"
        return what, 'torch.backends.cuda.preferred_rocm_fa_library("aotriton")'
    return None


def _unsure(ran: Ran) -> bool:
    """Whether a compiled operator would raise in eager mode: Inductor or a pass of ours replaces its kernel."""
    return ran.compiled and ran.operator.under in (Under.RAISES, Under.NOTHING)


def uses_composable_kernel() -> bool:
    """Whether PyTorch's FlashAttention uses Composable Kernel (on ROCm)."""
    if torch.version.hip is None:
        return False
    return "ck" in str(torch.backends.cuda.preferred_rocm_fa_library()).lower().split(".")[-1]


def _named(ran: Ran) -> str:
    return f"{ran.operator.listed} {ran.place}"


def _times(count: int) -> str:
    return f" ({count} times)" if count > 1 else ""


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{name} ({count} places)" if count > 1 else name for name, count in names.items())
