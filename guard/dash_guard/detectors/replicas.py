"""Finds ranks that differ from their replicas, in the earliest step, its earliest stage, and the first tensor in order.

Optimizer settings are compared among ranks that had agreed on them before, see `promises`.

With three or more copies, the minority is accused. With two copies, or two halves, both sides are suspects, unless the
check of state at rest or of a collective has already accused ranks of one side alone. After the first difference in a
class of ranks, later ones count as its effects, until the ranks are equal again or another rank differs too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..report.findings import Finding
from ..shared.class_names import LEARNED, members
from ..shared.roots import FROZEN, SETTING, STAGES, WHICH
from ..transport.messages import Message
from .detector import Detector, Job
from .promises import Promises
from .wording import named
from .wording import ranks as ranks_in_words

PATIENCE = 30.0
"""Seconds after which the detector no longer waits for missing roots."""

ANSWER = 20.0
"""Seconds in which ranks must answer what is below a root; they answer between two steps."""

WAIT = 4.0
"""Seconds for which a tie between two halves waits for findings of other detectors."""

_AT_ONCE = 8192  # roots of ranks that one call of `detect` compares; the next call follows in a fifth of a second
_WAITING = 64  # steps of classes that may wait for it
_LATER = 8  # later steps of a class that were compared before an incomplete one is given up
_REMEMBERED = 256  # steps
_WRITES = (
    "DDP keeps frozen parameters equal only at its start. If the program writes them, it must write the same on all "
    "ranks, for example after an all-reduce."
)
_ADVICE = "Look at what sets it there: all ranks must update in the same steps, and schedule by what all of them have."
_ASKED = 2  # ranks of each group
_GROUPS = 3


@dataclass
class _Case:
    """A difference whose first tensor is being searched.

    Attributes:
        of: the class of ranks.
        groups: ranks with equal roots, the largest group first.
        path: the module path below which the difference lies.
        answers: answers of the ranks that were asked, for this path.
        agreed: whether these ranks had to be equal; if not, nobody is accused.
    """

    of: str
    step: int
    stage: str
    groups: list[tuple[int, ...]]
    since: float
    path: str = ""
    asked: float = 0.0
    ranks: tuple[int, ...] = ()
    answers: dict[int, dict[str, str] | None] = field(default_factory=dict)
    tensor: str = ""
    agree: bool = False
    agreed: bool = True
    done: bool = False

    def key(self) -> tuple[int, int]:
        return self.step, STAGES.index(self.stage)


class Replicas(Detector):
    """A detector that compares the root digests of the ranks of each class, and finds the first tensor that differs."""

    kinds = frozenset({"bits"})

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job)
        self._accused_by: dict[int, set[int]] = {}  # ranks that other detectors accuse, by step: they break ties
        self._members: dict[str, frozenset[int]] = {}
        self._roots: dict[tuple[int, str], dict[int, tuple[str, ...]]] = {}
        self._since: dict[tuple[int, str], float] = {}
        self._compared: dict[str, dict[int, None]] = {}  # steps of each class
        self._apart: dict[str, set[int]] = {}  # ranks of a class that are known to differ
        self._settings_apart: dict[str, set[int]] = {}  # the same for optimizer settings, which no state explains
        self._frozen_apart: dict[str, set[int]] = {}  # the same for frozen parameters, which explain no other state
        self._writes_frozen = False  # whether the program writes frozen parameters
        self._cases: list[_Case] = []
        self._promises = Promises()
        self._finished = False

    def take(self, message: Message, now: float) -> None:
        """Store a rank's root digests, or its answer to a request for the digests below a module."""
        body = message.body
        if isinstance(body.get("roots"), dict):
            self._writes_frozen |= bool(body.get("frozen_writes"))
            for of, steps in body["roots"].items():
                self._take_roots(message.rank, of, steps, now)
        elif "path" in body:
            below = body.get("below")
            for case in self._cases:
                if (case.of, case.step, case.stage, case.path) == tuple(
                    body.get(key) for key in ("class", "of", "stage", "path")
                ) and message.rank in case.ranks:
                    case.answers[message.rank] = _digests(below)

    def observe(self, finding: Finding, now: float) -> None:
        """Note ranks that a finding about state at rest, a collective or a setting accuses; these break ties."""
        accuses = finding.kind in ("at_rest", "collective") or (finding.stage == SETTING and not _are_all(finding))
        if accuses and finding.severity != "note" and finding.step is not None:
            self._accused_by.setdefault(finding.step, set()).update(finding.ranks)
            while len(self._accused_by) > _REMEMBERED:
                del self._accused_by[min(self._accused_by)]

    def detect(self, now: float) -> list[Finding]:
        """Return findings about differences, once the first tensor that differs is known or the time for it is up."""
        return self._detect(now, last=self._finished, wait=not self._finished)

    def finish(self, now: float) -> list[Finding]:
        """Return the last findings, without waiting for ranks whose hashes are missing.

        A tie between two sides is held back until the next `detect`: by then another detector may have accused
        one side.
        """
        self._finished = True
        return self._detect(now, last=True, wait=True)

    def _take_roots(self, rank: int, of: str, steps: Any, now: float) -> None:
        if of not in self._members and len(self._members) < 1 << 16:
            self._members[of] = frozenset(members(of, self.job.world) or ())
        if rank not in self._members.get(of, ()) or not isinstance(steps, dict):
            return
        for text, roots in steps.items():
            if not (text.isdecimal() and len(text) < 16 and isinstance(roots, list) and len(roots) == len(STAGES)):
                continue
            step = int(text)
            if all(isinstance(root, str) for root in roots) and step not in self._compared.get(of, {}):
                self._roots.setdefault((step, of), {})[rank] = tuple(roots)
                self._since.setdefault((step, of), now)

    def _detect(self, now: float, last: bool, wait: bool) -> list[Finding]:
        left = _AT_ONCE
        for step, of in sorted(self._roots):
            if left <= 0 and not last and len(self._roots) < _WAITING:
                break
            ranks, here = self._members[of], self._roots[step, of]
            compared = self._compared.setdefault(of, {})
            missing = [rank for rank in ranks if rank not in here] if len(here) < len(ranks) else []
            late = last or now - self._since[step, of] > PATIENCE or max(compared, default=0) >= step + _LATER
            if missing and not late:
                continue
            if missing:
                why = f"roots of {len(missing)} of {len(ranks)} ranks of a class have not arrived"
                self.job.coverage.unseen("bits", why)
            self._compare(step, of, here, now)
            left -= len(here)
            del self._roots[step, of], self._since[step, of]
            compared[step] = None
            while len(compared) > _REMEMBERED:
                del compared[min(compared)]
        return self._conclude(now, last, wait)

    def _compare(self, step: int, of: str, roots: Mapping[int, tuple[str, ...]], now: float) -> None:
        self.job.coverage.count("bits", compared=len(roots))
        everyone = len(roots) == len(self._members[of])
        for number, stage in enumerate(STAGES):
            here = {rank: roots[rank][number] for rank in sorted(roots)}
            ordered = self._groups(here)
            if stage == SETTING:
                self._compare_settings(_Case(of, step, stage, ordered, now), here, everyone)
            elif stage == FROZEN:
                case = _Case(of, step, stage, ordered, now)
                self._compare_apart(self._frozen_apart, case, len(ordered) > 1, everyone)
            elif len(ordered) > 1:
                known = set().union(*self._apart.values(), *self._settings_apart.values())
                effect = _known_odd(ordered, known)
                self._apart[of] = effect or set(_odd(ordered))
                if not effect:
                    self._open(_Case(of, step, stage, ordered, now))
                return
        if everyone:
            self._apart.pop(of, None)

    def _compare_settings(self, case: _Case, roots: Mapping[int, str], everyone: bool) -> None:
        """Compare optimizer settings; `case` is opened if ranks differ."""
        promise = self._promises.see(case.of, roots.values(), everyone)
        if promise == "never":
            self.job.coverage.unseen("bits", "optimizer settings that each rank sets by itself")
            case.agreed = False
            self._open(case)
        else:
            self._compare_apart(self._settings_apart, case, promise == "broken", everyone)

    def _compare_apart(self, apart: dict[str, set[int]], case: _Case, differ: bool, everyone: bool) -> None:
        """Keep in `apart` which ranks differ; `case` is opened if they did not differ before."""
        if differ:
            odd, known = set(_odd(case.groups)), set().union(*apart.values())
            apart[case.of] = odd
            if not odd <= known:
                self._open(case)
        elif everyone:
            apart.pop(case.of, None)

    def _groups(self, roots: Mapping[int, str]) -> list[tuple[int, ...]]:
        """Groups of ranks with equal roots, among ranks with the same tensors; the largest group first."""
        by_tensors: dict[str, dict[str, list[int]]] = {}
        for rank, root in roots.items():
            by_tensors.setdefault(root[:WHICH], {}).setdefault(root, []).append(rank)
        if len(by_tensors) > 1:
            self.job.coverage.unseen("bits", "ranks of a class that have different tensors of a stage")
        different = [groups for groups in by_tensors.values() if len(groups) > 1]
        groups = max(different, key=lambda groups: sum(map(len, groups.values())), default={})
        return sorted((tuple(group) for group in groups.values()), key=lambda group: (-len(group), group))

    def _open(self, case: _Case) -> None:
        self._cases.append(case)
        self._ask(case, case.since)

    def _ask(self, case: _Case, now: float) -> None:
        case.asked, case.answers = now, {}
        case.ranks = tuple(rank for group in case.groups[:_GROUPS] for rank in group[:_ASKED])
        body = {"step": case.step, "class": case.of, "stage": case.stage, "path": case.path}
        self.job.orders.append((case.ranks, Message("bits", 0, case.step, body)))

    def _conclude(self, now: float, last: bool, wait: bool) -> list[Finding]:
        for case in self._cases:
            if not case.done and (last or len(case.answers) == len(case.ranks) or now - case.asked > ANSWER):
                self._descend(case, now)
        found: list[Finding] = []
        self._cases.sort(key=_Case.key)
        named_: set[int] = set()
        while self._cases and (self._cases[0].done or last):
            case = self._cases[0]
            ranks, how = self._accused(case)
            if how == "tie" and case.agreed and wait and (last or now - case.since < WAIT):
                break
            self._cases.pop(0)
            if case.agreed and found and set(ranks) <= named_:
                continue  # another class shows the same ranks
            named_ |= set(ranks) if case.agreed and case.stage != FROZEN else set()
            found.append(finding := self._finding(case, ranks, how))
            self.observe(finding, now)  # it may decide the next case
        return found

    def _descend(self, case: _Case, now: float) -> None:
        case.done = True
        answers = [{rank: case.answers.get(rank) for rank in group if rank in case.ranks} for group in case.groups]
        sides = [[below for below in group.values() if below is not None] for group in answers]
        sides = [side for side in sides if side]
        if len(sides) < 2:
            return
        firsts = [side[0] for side in sides]
        child = next(
            (
                name
                for first in firsts
                for name in first
                if any(name not in o or o[name] != first[name] for o in firsts)
            ),
            None,
        )
        if child is None:
            case.agree = not case.path
        elif child.endswith("."):
            case.path, case.done = child[:-1], False
            self._ask(case, now)
        else:
            case.tensor = child

    def _accused(self, case: _Case) -> tuple[tuple[int, ...], str]:
        """The accused ranks, and how they were found."""
        if case.agree:
            return (), "agree"
        if _is_majority(case.groups):
            return _odd(case.groups), "minority"
        others = {rank for step in (case.step - 1, case.step) for rank in self._accused_by.get(step, ())}
        sides = [group for group in case.groups if others & set(group)]
        if len(sides) == 1 and len(sides) < len(case.groups):
            return tuple(sorted(others & set(sides[0]))), "other checks"
        return tuple(sorted(rank for group in case.groups for rank in group)), "tie"

    def _finding(self, case: _Case, ranks: tuple[int, ...], how: str) -> Finding:
        what = named(case.stage, case.tensor) if case.tensor else case.stage
        apart = " and ".join(ranks_in_words(group) for group in case.groups[:4])
        declared = not case.of.startswith(LEARNED)
        evidence = {
            "copies": sum(map(len, case.groups)), "agree": len(case.groups[0]), "found by": how,
            "replicas": "declared" if declared else "equal in all steps before",
        }  # fmt: skip
        common: dict[str, Any] = {
            "step": case.step, "stage": case.stage, "tensor": case.tensor,
            "groups": tuple(case.groups[:16]), "evidence": evidence,
        }  # fmt: skip
        if how == "agree":
            sentence = f"roots of {case.stage} differ between {apart}, and all digests below them agree"
            return Finding("guard", "note", f"{sentence}: a message of the guard was damaged", **common)
        if how == "tie":
            sentence = f"{apart} differ from each other in {what}; no majority says which is right"
        else:
            differ = "differs" if len(ranks) == 1 else "differ"
            others = tuple(sorted(rank for group in case.groups for rank in group if rank not in ranks))
            sentence = f"{ranks_in_words(ranks)} {differ} from {ranks_in_words(others)} in {what}"
            if how == "other checks":
                sentence += ", and another check accuses it too"
        if not case.agreed:
            return Finding("bits", "note", f"{sentence}, from the beginning", ranks=ranks, cause="program", **common)
        if case.stage == SETTING:
            return Finding("bits", "suspect", sentence, _ADVICE, ranks, cause="program", **common)
        if case.stage == FROZEN and self._writes_frozen:
            sentence += "; the program writes frozen parameters"
            return Finding("bits", "note", sentence, _WRITES, ranks, cause="program", **common)
        return Finding("bits", "suspect", sentence, ranks=ranks, **common)


def _are_all(finding: Finding) -> bool:
    """Whether a finding names all ranks that differ from each other."""
    return sum(map(len, finding.groups)) == len(finding.ranks)


def _odd(groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The ranks outside the majority; all ranks if there is no majority."""
    return tuple(sorted(rank for group in (groups[1:] if _is_majority(groups) else groups) for rank in group))


def _known_odd(groups: Sequence[tuple[int, ...]], known: set[int]) -> set[int]:
    """The ranks outside the majority, or of all groups but one, if they are known to differ; otherwise none."""
    odd = set(_odd(groups))
    if odd <= known or _is_majority(groups):
        return odd if odd <= known else set()
    sides = [set(group) for group in groups]
    there = [side for side in sides if side <= known]
    return set().union(*there) if len(there) == len(sides) - 1 else set()


def _is_majority(groups: Sequence[tuple[int, ...]]) -> bool:
    """Whether the first group, which is the largest, has more than half of all ranks."""
    return 2 * len(groups[0]) > sum(map(len, groups))


def _digests(raw: Any) -> dict[str, str] | None:
    if not isinstance(raw, dict):
        return None
    return {name: value for name, value in raw.items() if isinstance(value, str)}
