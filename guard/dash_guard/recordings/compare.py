"""Compares two recordings: finds the first step, rank and tensor that differ, with one step of each in memory."""

from __future__ import annotations

import heapq
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dash_inductor import arguments as _arguments
from dash_inductor.observers import phases

from ..errors import RecordingError
from ..observation.labels import EVALUATION
from .alignment import Step, aligned, inputs_of, paired, shift, step_given
from .file import Entry
from .limits import FINDINGS
from .run import Run
from .segments import Segments
from .state import StateDifference, States, sentence

Verdict = Literal["equal", "diverged", "not comparable"]
EXIT_CODES: dict[Verdict, int] = {"equal": 0, "diverged": 1, "not comparable": 2}
_LISTED = 20  # differences after the first


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between two runs.

    Attributes:
        step, rank: the step, from 1, and the rank, from 0.
        phase: one of `phases.STAGES`.
        tensor: its name.
        a, b: dtype, shape and fingerprint (hexadecimal) in either run.
        before: the equal tensor that this rank observed just before it; "" for the first tensor of a step.
    """

    step: int
    rank: int
    phase: str
    tensor: str
    a: str
    b: str
    before: str

    def __str__(self) -> str:
        return f"step {self.step}, rank {self.rank}: {self.phase} {self.tensor}"


@dataclass
class Comparison:
    """The result of `compare`.

    Attributes:
        a, b: the folders.
        verdict: "diverged" if a tensor differs that both runs have, or if one run has more steps than the other; "not
            comparable" if everything that both have is equal, but something is missing, such as the file of a rank or
            the end of a file; otherwise "equal", also if only one run has evaluated in some step, or called a module
            without a backward.
        reasons: why the runs are not comparable, or what else their recordings lack, in words.
        first: the first difference; None if there is none.
        conclusion: where the first difference arose, in words.
        state: what differs of the state with which the last compared step begins: what can explain the first
            difference, or what differs in runs whose tensors are equal; at most 20 values.
        others: further tensors that differ in the same step, in order, at most 20; others_count: the number of all such
            tensors.
        steps: the number of compared steps, including the one that differs; last_step: the last of them, 0 for none.
        shift: what is added to numbers of steps of b, so that they are those of a.
        ranks: the number of ranks with a file in both recordings.
        facts: facts about the runs that differ, as (name, in a, in b).
        findings: what either run has itself found about ranks that must be equal, as ("a" or "b", finding); the first
            100 of each run.
    """

    a: str
    b: str
    verdict: Verdict = "equal"
    reasons: list[str] = field(default_factory=list)
    first: Difference | None = None
    conclusion: str = ""
    state: list[StateDifference] = field(default_factory=list)
    others: list[Difference] = field(default_factory=list)
    others_count: int = 0
    steps: int = 0
    last_step: int = 0
    shift: int = 0
    ranks: int = 0
    facts: list[tuple[str, Any, Any]] = field(default_factory=list)
    findings: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """The exit status of the command for this verdict: 0 equal, 1 diverged, 2 not comparable."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """The comparison as lists, strings and numbers, for JSON."""
        content = vars(self) | {"exit_code": self.exit_code}
        content["first"] = None if self.first is None else vars(self.first)
        content["state"] = [vars(difference) for difference in self.state]
        content["others"] = [vars(difference) for difference in self.others]
        content["facts"] = [{"name": name, "a": a, "b": b} for name, a, b in self.facts]
        content["findings"] = [{"run": run, **finding} for run, finding in self.findings]
        return content


def compare(a: str | os.PathLike[str], b: str | os.PathLike[str], resumed: bool = False) -> Comparison:
    """Find the first tensor in which two recordings differ.

    Within a step, tensors from before the exchange of gradients between ranks come before those from after it.

    Args:
        a, b: folders that `dash_guard.record` has filled.
        resumed: whether b continues from a checkpoint of a. Then only its first step is compared, and the state with
            which it begins must be equal, too: generators that a draws from, settings and counters of optimizers, the
            scale of the loss, the position in the data.

    Returns:
        The result, whose `verdict` is "equal", "diverged" or "not comparable".

    Raises:
        ArgumentError: a folder is no path, or has no recording.
        RecordingError: a file cannot be read, is no recording of this version, or exceeds `limits`; or the files of a
            folder do not belong to one run.
    """
    first, second = _arguments.path("a", a), _arguments.path("b", b)
    result = Comparison(str(first), str(second))
    try:
        _compare(result, resumed, Run(first), Run(second))
    except MemoryError as error:
        raise RecordingError(result.a, f"it and {result.b} do not fit into memory", "more memory") from error
    return result


def _compare(result: Comparison, resumed: bool, *runs: Run) -> None:
    sizes = [run.world_size for run in runs]
    if None not in sizes and len(set(sizes)) > 1:
        result.reasons.append(f"a is a run of {_ranks(sizes[0])}, b of {_ranks(sizes[1])}")
        result.conclusion = "compare --layouts compares such runs, if record --values has written their values."
        result.verdict = "not comparable"
        return
    for label, run in zip("ab", runs, strict=True):
        if gaps := run.missing():
            of = "" if run.world_size is None else f", of {_ranks(run.world_size)}"
            result.reasons.append(f"{label} has no file of {_listed(gaps)}{of}")
    a, b = (run.recordings for run in runs)
    pairs = {rank: (a[rank], b[rank]) for rank in a if rank in b}
    result.ranks = len(pairs)
    _Walk(result, pairs, complete=not result.reasons, resumed=resumed).run()


@dataclass
class _Walk:
    result: Comparison
    pairs: dict[int, tuple[Segments, Segments]]
    complete: bool  # every rank has a file in both runs
    resumed: bool  # only the first step that both runs have is compared
    unmatched: dict[str, tuple[str, bool]] = field(default_factory=dict)  # the run, and whether the training lacks it
    later: dict[str, int] = field(default_factory=dict)  # the first step before a run has begun
    missing: dict[tuple[int, str], int] = field(default_factory=dict)  # the first step that a run of a rank lacks
    states: dict[int, States] = field(default_factory=dict)

    def run(self) -> None:
        shifted = self.result.shift = shift(*next(iter(self.pairs.values()))) if self.pairs else 0
        if shifted:
            later, sooner = ("b", "a") if shifted > 0 else ("a", "b")
            self.result.reasons.append(
                f"by the parameters that runs begin with, step 1 of {later} is step {1 + abs(shifted)} of {sooner}"
            )
        self.states = {rank: States(rank) for rank in self.pairs}
        streams = [aligned(rank, *pair, shifted) for rank, pair in self.pairs.items()]
        merged = heapq.merge(*streams, key=lambda step: step.number)
        for number, of_ranks in itertools.groupby(merged, key=lambda step: step.number):
            steps = list(of_ranks)
            differences = [found for step in steps for found in self._differences(step)]
            if all(step.a is not None and step.b is not None for step in steps):
                self.result.steps += 1
                self.result.last_step = number
            if differences:
                self._diverged(steps, sorted(differences, key=lambda found: found[0]))
            if differences or (self.resumed and self.result.steps):
                break
        self._look_at_runs()

    def _differences(self, step: Step) -> Iterator[tuple[tuple[int, int, int], Difference]]:
        """The differences in a step of a rank, with sort keys for all ranks."""
        self.states[step.rank].step(step.number, step.a, step.b)
        if step.before:
            self.later.setdefault("a" if step.a is None else "b", step.number)
            return
        if step.a is None or step.b is None:
            present, label = (step.a, "a") if step.b is None else (step.b, "b")
            tensors = _tensors(present or [])
            if all(entry.name.phase in _FORWARD for entry in tensors):  # after the last step of the training
                self.unmatched.update({str(entry.name): (label, True) for entry in tensors})
            else:
                self.missing.setdefault((step.rank, "b" if label == "a" else "a"), step.number)
            return
        if step.a == step.b:
            return
        before = ""
        alone: dict[str, list[Entry]] = {"a": [], "b": []}
        for place, (entry, other) in enumerate(paired(_tensors(step.a), _tensors(step.b))):
            if entry is None or other is None:
                alone["a" if other is None else "b"] += filter(None, (entry, other))
            elif (entry.name.description, entry.fingerprint) == (other.name.description, other.fingerprint):
                before = str(entry.name)
            else:
                phase, tensor = entry.name[:2]
                found = Difference(step.number, step.rank, phase, tensor, str(entry), str(other), before)
                yield (phases.STAGES[phase], place, step.rank), found
        self._only("a", alone["a"], alone["b"], step.b)
        self._only("b", alone["b"], alone["a"], step.a)

    def _only(self, label: str, entries: list[Entry], others: list[Entry], step: list[Entry]) -> None:
        """Note entries of a step that only one run has, and whether the training has nothing to do with them.

        Nor has it with a further call of a module without a backward, whose gradients would be in one run only, too. It
        is a further one if the step of the other run has calls, and `others`, which only that run has, are none.
        """
        known, strange = ({entry.name.phase for entry in each} for each in (step, others))
        further = (known - strange).intersection(_FORWARD)
        for entry in entries:
            aside = EVALUATION in entry.name.tensor or entry.name.phase in further
            self.unmatched.setdefault(str(entry.name), (label, aside))

    def _diverged(self, steps: list[Step], differences: list[tuple[Any, Difference]]) -> None:
        found = [difference for _, difference in differences]
        result, first = self.result, found[0]
        result.verdict, result.first = "diverged", first
        result.others, result.others_count = found[1 : 1 + _LISTED], len(found) - 1
        result.state = self._state(first)
        result.conclusion = " ".join(
            filter(
                None,
                (
                    _NOT_RESUMED if self.resumed and "b" not in self.later else "",
                    sentence(result.state),
                    _conclusion(first, found, steps),
                    self._read_before(first, steps),
                ),
            )
        )
        if not self.complete:
            result.conclusion += (
                " Ranks without a file in both runs were not compared; the difference may have arisen there."
            )

    def _state(self, first: Difference | None) -> list[StateDifference]:
        """What differs in the state of the rank that differs first, or else of all ranks."""
        phase = None if first is None else first.phase
        mine = [] if first is None else self.states[first.rank].differing(phase)
        return (mine or [each for states in self.states.values() for each in states.differing(phase)])[:_LISTED]

    def _read_before(self, first: Difference, steps: list[Step]) -> str:
        """Whether run b is given what run a was given in another step, in words; "" if not."""
        ((_, b),) = [(step.a, step.b) for step in steps if step.rank == first.rank]
        inputs = inputs_of(b or []) if first.phase == phases.INPUT else []
        number = step_given(self.pairs[first.rank][0], inputs) if inputs else None
        return "" if number is None else f"In this step b is given what a is given in step {number}."

    def _look_at_runs(self) -> None:
        result = self.result
        facts: dict[str, tuple[Any, Any]] = {}
        reasons: dict[str, None] = {}  # each once, however many ranks it applies to
        for rank, (a, b) in self.pairs.items():
            for name, values in _differing(a.facts, b.facts):
                facts.setdefault(name, values)
            for label, run in (("a", a), ("b", b)):
                reasons.update(
                    (f"{label} has no fingerprint of {name}: {why}", None) for name, why in run.unseen.items()
                )
                if self.resumed:
                    continue  # was not read to its end
                if result.first is None and run.torn is not None:
                    reasons[f"{label} was cut off: rank {rank} ends at byte {run.torn} of {run.path.name}"] = None
                elif result.first is None and not run.ended:
                    reasons[f"{label} was cut off: rank {rank} has not ended its recording"] = None
        result.reasons += reasons
        result.reasons += [f"{label} begins later, and has no step {step}" for label, step in self.later.items()]
        result.facts = [(name, *values) for name, values in facts.items()]
        for label, runs in zip("ab", zip(*self.pairs.values(), strict=True), strict=False):
            self._take_findings(label, runs)
        by_run = {label: [name for name, (run, _) in self.unmatched.items() if run == label] for label in "ab"}
        for label, names in by_run.items():
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                result.reasons.append(f"only {label} has {names[0]}{more}")
        self._conclude()

    def _take_findings(self, label: str, runs: Sequence[Segments]) -> None:
        """Take the findings that a run has made itself: every rank has written them, so each finding is taken once."""
        found = {json.dumps(finding, sort_keys=True): finding for run in runs for finding in run.findings}
        self.result.findings += [(label, finding) for finding in found.values()][:FINDINGS]
        if len(found) > FINDINGS or any(run.findings_count > FINDINGS for run in runs):
            self.result.reasons.append(f"{label} has more findings than the {FINDINGS} that are listed")

    def _conclude(self) -> None:
        result = self.result
        if not self.pairs:
            result.reasons.append("no rank has a file in both recordings")
        if result.first is not None:
            return
        result.state = self._state(None)
        cut_off = not self.resumed and any(
            run.torn is not None or not run.ended for pair in self.pairs.values() for run in pair
        )
        rhythms = any(a.facts.get("every") != b.facts.get("every") for a, b in self.pairs.values())
        for (rank, label), step in () if rhythms or self.resumed else self.missing.items():
            result.reasons.append(f"{label} has no step {step} of rank {rank}")
            if not cut_off:
                result.verdict = "diverged"
                result.conclusion = "All steps that both runs have are equal, but one has more of them."
        if result.steps == 0:
            result.reasons.append("no step is in both recordings")
            result.verdict = "not comparable"
        of_training = [name for name, (_, aside) in self.unmatched.items() if not aside]
        if result.verdict == "equal" and self.resumed and result.state:
            result.verdict = "diverged"
            result.conclusion = f"All tensors that both runs have in this step are equal. {sentence(result.state)}"
        elif result.verdict == "equal" and (cut_off or of_training or not self.complete):
            result.verdict = "not comparable"


def _tensors(entries: list[Entry]) -> list[Entry]:
    """The entries of a step that are fingerprints: neither state nor the loss."""
    return [entry for entry in entries if entry.name.phase in phases.STAGES]


def _conclusion(first: Difference, found: list[Difference], steps: list[Step]) -> str:
    ranks = sorted({difference.rank for difference in found if difference.phase in _SENTENCES_BEFORE_EXCHANGE})
    alone = f"Before gradients are exchanged, only rank {first.rank} differs. " if ranks == [first.rank] else ""
    if first.phase == phases.ACTIVATION_GRADIENT and (losses := _losses(first.rank, steps)):
        return f"{_FORWARD_EQUAL}, and the loss is {losses[1]!r} instead of {losses[0]!r}. {_IN_LOSS}"
    if first.phase != phases.GRADIENT:
        return (alone if len(steps) > 1 else "") + _SENTENCES[first.phase]
    local = (phases.LOCAL_GRADIENT, first.tensor)
    recorded = all(any(entry.name[:2] == local for entry in step.a or ()) for step in steps)
    if recorded:
        return (
            "Before gradients are exchanged, every rank's gradient of this tensor is equal in both runs. The "
            "difference arises in the exchange, or in what the program does to gradients after it."
        )
    return "The difference arises in the backward, or in what the program does to gradients after it."


def _losses(rank: int, steps: list[Step]) -> tuple[float, float] | None:
    """The losses of a rank in both runs; None if they are equal, or a run has none."""
    (step,) = (step for step in steps if step.rank == rank)
    a, b = ([entry.value for entry in each or () if entry.name.phase == phases.LOSS] for each in (step.a, step.b))
    return (a[0], b[0]) if a and b and repr(a[0]) != repr(b[0]) else None


_FORWARD_EQUAL = "All results of the forward that were recorded are equal"
_IN_LOSS = "The difference arises in the loss, or in what the program multiplies it by."
_SENTENCES = {
    phases.INITIAL: "The runs start from different parameters: another seed, another checkpoint, or another order of "
    "random numbers.",
    phases.INPUT: "The runs are given different data.",
    phases.ACTIVATION: "What the model was given is equal, so that the difference arises in the forward.",
    phases.ACTIVATION_GRADIENT: f"{_FORWARD_EQUAL}, so that the difference arises in the backward.",
    phases.ATTENTION_GRADIENT: f"{_FORWARD_EQUAL}, so that the difference arises in the backward, in this attention or "
    "in what runs before it.",
    phases.LOCAL_GRADIENT: "The difference arises in the backward of this rank, or in what is added to the gradient.",
    phases.PARAMETER: "Its gradient is equal, so that the difference arises in the optimizer: in its state or its "
    "settings.",
    phases.OPTIMIZER_STATE: "Parameters are equal after the step, so that the difference arises in the optimizer's "
    "state, in this step or since the last one, and reaches parameters in the next.",
    phases.BUFFER: "Parameters are equal after the step, so that the difference arises where this buffer is written.",
}
_NOT_RESUMED = "Run b begins where run a begins: it has loaded no checkpoint, or not the parameters in it."
_FORWARD = (phases.INPUT, phases.ACTIVATION)
_SENTENCES_BEFORE_EXCHANGE = [phase for phase, stage in phases.STAGES.items() if stage <= 1]


def _differing(a: Any, b: Any, name: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            yield from _differing(a.get(key), b.get(key), f"{name}.{key}" if name else key)
    elif isinstance(a, list) and isinstance(b, list):
        if a != b:
            of_a, of_b = set(a), set(b)
            yield name, ([each for each in a if each not in of_b], [each for each in b if each not in of_a])
    elif a != b:
        yield name, (a, b)


def _ranks(count: int | None) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _listed(gaps: list[range]) -> str:
    """Ranks in words: ``rank 3``, ``ranks 1, 4 to 7``; of more than 20 gaps the first ones."""
    words = [str(gap[0]) if len(gap) == 1 else f"{gap[0]} to {gap[-1]}" for gap in gaps[:_LISTED]]
    more = ", ..." if len(gaps) > _LISTED else ""
    return f"rank{'s' * (sum(map(len, gaps)) > 1)} {', '.join(words)}{more}"
