"""Matches the steps of two recordings, one of which may be resumed or may count its steps differently, and their calls.

A call of a module has the number of calls of this module in this mode before it. So a run that makes one call more
gives other numbers to those after it; `paired` finds out which calls are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from dash_inductor.observers import phases

from ..observation.labels import EVALUATION, uncounted
from .file import Entry, Name
from .segments import Segments

_MOST = 1 << 20
"""The largest product of the numbers of calls in both runs that are matched by fingerprints; others are in order."""

Values = dict[str, bytes]
"""Fingerprints of parameters, by name."""


@dataclass
class Step:
    """A step of one rank in both runs.

    Attributes:
        number: the number of the step in run a.
        rank: the rank.
        a, b: the entries of the step in each run; None for a run that does not have the step.
        before: whether the run that lacks the step had not begun yet.
    """

    number: int
    rank: int
    a: list[Entry] | None
    b: list[Entry] | None
    before: bool = False


def shift(a: Segments, b: Segments) -> int:
    """The number to add to the step numbers of b so that they match those of a.

    It is found by comparing parameters: those at the beginning of one run are looked for in the other run, at its
    beginning and after each step. If none match, it is 0.
    """
    first_a, first_b = (next(Segments(run.paths).steps(), None) for run in (a, b))
    if first_a is None or first_b is None:
        return 0
    (of_a, entries_a), (of_b, entries_b) = first_a, first_b
    begins_a, begins_b = _values(entries_a, phases.INITIAL), _values(entries_b, phases.INITIAL)
    if not begins_a or not begins_b:
        return 0
    if begins_a == begins_b:
        return of_a - of_b
    if (found := _after(a, begins_b)) is not None:
        return found + 1 - of_b
    if (found := _after(b, begins_a)) is not None:
        return of_a - (found + 1)
    return 0


def aligned(rank: int, a: Segments, b: Segments, shifted: int) -> Iterator[Step]:
    """Yields the steps of two recordings of a rank in pairs of equal number, counted as in recording a.

    The initial parameters of a run are matched with the parameters that the other run had after the step before.

    Args:
        rank: the rank.
        a, b: its recordings.
        shifted: what is added to b's step numbers, see `shift`.
    """
    streams = a.steps(), ((number + shifted, entries) for number, entries in b.steps())
    heads = [next(each, None) for each in streams]
    begun, parameters = [False, False], [Values(), Values()]
    while heads[0] is not None or heads[1] is not None:
        number = min(head[0] for head in heads if head is not None)
        present = [head[1] if head is not None and head[0] == number else None for head in heads]
        for which in (0, 1):
            mine, theirs = present[which], present[1 - which]
            if mine is not None and theirs is not None and not begun[which] and begun[1 - which]:
                present[which], present[1 - which] = _with_initial(mine, theirs, parameters[1 - which])
        waits = not all(begun[which] or present[which] is not None for which in (0, 1))
        yield Step(number, rank, present[0], present[1], waits)
        for which in (0, 1):
            entries = present[which]
            if entries is not None:
                begun[which] = True
                parameters[which] = _values(entries, phases.PARAMETER) if waits else Values()
                heads[which] = next(streams[which], None)


def paired(a: list[Entry], b: list[Entry]) -> Iterator[tuple[Entry | None, Entry | None]]:
    """Yields the entries of a step of run a, each with the same entry of run b, then those that only b has.

    Entries of one phase, module and mode are matched in order; if one run has more of them, by their fingerprints.
    """
    calls_a, calls_b = _calls(a), _calls(b)
    found: dict[int, Entry | None] = {}
    left: list[Entry] = []
    for key in dict.fromkeys((*calls_a, *calls_b)):
        mine, theirs = calls_a.get(key, []), calls_b.get(key, [])
        pairs = list(zip(mine, theirs, strict=False)) if len(mine) == len(theirs) else _matched(mine, theirs)
        found.update((id(one), other) for one, other in pairs)
        taken = {id(other) for _, other in pairs}
        left += [other for other in theirs if id(other) not in taken]
    yield from ((entry, found.get(id(entry))) for entry in a)
    yield from ((None, entry) for entry in left)


def _calls(entries: list[Entry]) -> dict[tuple[str, str], list[Entry]]:
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        found.setdefault((entry.name.phase, uncounted(entry.name.tensor)), []).append(entry)
    return found


def _matched(a: list[Entry], b: list[Entry]) -> list[tuple[Entry, Entry]]:
    """Pairs of calls of one module, of which the runs have made different numbers; those that differ stay in order."""
    if len(a) * len(b) > _MOST:
        return list(zip(a, b, strict=False))
    of_a, of_b = ([(entry.name.description, entry.fingerprint) for entry in each] for each in (a, b))
    pairs: list[tuple[Entry, Entry]] = []
    for kind, a1, a2, b1, b2 in SequenceMatcher(None, of_a, of_b, autojunk=False).get_opcodes():
        if kind in ("equal", "replace"):
            pairs += zip(a[a1:a2], b[b1:b2], strict=False)
    return pairs


def _with_initial(mine: list[Entry], theirs: list[Entry], before: Values) -> tuple[list[Entry], list[Entry]]:
    """The first step of a run and the same step of the other run, to which `before` is added as initial parameters."""
    initial = [entry for entry in mine if entry.name.phase == phases.INITIAL]
    known = [
        Entry(Name(phases.INITIAL, entry.name.tensor, entry.name.description), before[entry.name.tensor])
        for entry in initial
        if entry.name.tensor in before
    ]
    names = {entry.name.tensor for entry in known}
    kept = [entry for entry in mine if entry.name.phase != phases.INITIAL or entry.name.tensor in names]
    return kept, known + theirs


def inputs_of(entries: list[Entry]) -> list[tuple[str, bytes]]:
    """What the training is given in a step: dtype, shape and fingerprint of each tensor."""
    return [
        (entry.name.description, entry.fingerprint)
        for entry in entries
        if entry.name.phase == phases.INPUT and EVALUATION not in entry.name.tensor
    ]


def step_given(run: Segments, inputs: list[tuple[str, bytes]]) -> int | None:
    """The first step in which a run is given these inputs; None if there is no such step."""
    return next((number for number, entries in Segments(run.paths).steps() if inputs_of(entries) == inputs), None)


def _values(entries: list[Entry], phase: str) -> Values:
    return {entry.name.tensor: entry.fingerprint for entry in entries if entry.name.phase == phase}


def _after(run: Segments, values: Values) -> int | None:
    """The first step after which a run has these parameters."""
    for number, entries in Segments(run.paths).steps():
        if _values(entries, phases.PARAMETER) == values:
            return number
    return None
