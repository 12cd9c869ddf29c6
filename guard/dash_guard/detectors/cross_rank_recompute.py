"""Finds ranks that compute a micro-batch differently from the others, and the cause: the machine or the program.

| second result of the accused ranks | meaning |
|---|---|
| the majority's bits                | a transient fault |
| the same wrong bits                | a defect that persists |
| other wrong bits                   | an unstable machine |

If ranks differ everywhere, or most of them do not repeat their own bits, the program is not deterministic.

A machine is accused only if an operator was seen to compute wrongly there, or the input of one to change, and if
nothing else explains it (`Job.explanations`). Operators of compiled code are not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ..report.findings import Cause, Finding, Severity
from ..shared.roots import FROZEN
from ..shared.votes import classes, groups, minority
from ..transport.messages import Message
from .detector import Detector, Job
from .wording import explained, machine_advice, named, placed
from .wording import ranks as listed_ranks

Asked = Literal["equal", "changed", "different", "unknown"]

Call = tuple[int, int]
"""The step of a recompute, and its number in the step, from 1."""

PATIENCE = 30.0
"""Seconds after the first message about a recompute, after which it is evaluated without the missing messages.
"""

WAIT = 10.0
"""Seconds for which a finding waits that may be an effect of a fault that other detectors have not reported yet."""

DOCTOR = (
    "From now on, no recompute accuses a machine. Run dash-inductor doctor on the program to find what is "
    "not deterministic."
)
AGAIN = "From now on, nothing is run again. Keep what a forward changes in buffers or attributes of its modules."
COMPARE = "Look for what the program, its environment or its compiled code does on this rank only."
_CONTRADICTS = "its results contradict each other, which those of no other rank do"


class CrossRankRecomputeDetector(Detector):
    """A detector that evaluates each cross-rank recompute when all ranks have reported their digests."""

    kinds = frozenset({"cross_rank_recompute"})

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job, **settings)
        self._reported: dict[Call, dict[int, dict[str, Any]]] = {}  # by rank
        self._since: dict[Call, float] = {}
        self._evaluated: set[Call] = set()
        self._cannot: dict[int, tuple[int, str]] = {}  # by rank: the step, and why it could run no forward again
        self._said = False
        self._off = False
        self._named: set[tuple[Any, ...]] = set()  # what was found already
        self._apart: set[int] = set()  # ranks whose state is known to differ
        self._finished = False
        self._waiting: list[tuple[float, Finding]] = []  # for other findings about ranks whose state differs

    def take(self, message: Message, now: float) -> None:
        """Store a rank's report about a cross-rank recompute, for the detector to evaluate."""
        if isinstance(message.body.get("cannot"), str):
            self._cannot[message.rank] = message.step, message.body["cannot"]
        elif not self._off and _sound(message.body):
            call = message.step, int(message.body.get("call", 1))
            if call not in self._evaluated:
                self._reported.setdefault(call, {})[message.rank] = message.body
                self._since.setdefault(call, now)

    def observe(self, finding: Finding, now: float) -> None:
        """Note the ranks that a finding accuses of a differing state: their recomputes differ because of it."""
        differs = finding.severity != "note" or finding.stage == FROZEN
        if finding.kind in ("bits", "at_rest") and differs:
            self._apart.update(finding.ranks)

    def detect(self, now: float) -> list[Finding]:
        """Return findings about recomputes that all ranks have reported, or that have timed out."""
        done = [
            call
            for call, reported in self._reported.items()
            if len(reported) == self.job.world or now > self._since[call] + PATIENCE
        ]
        return self._detect(done, now, wait=not self._finished)

    def finish(self, now: float) -> list[Finding]:
        """Return findings about all recomputes, except those that may be effects of other faults.

        These wait for the next `detect`, when other detectors have returned their last findings.
        """
        self._finished = True
        return self._detect(list(self._reported), now, wait=True)

    def _detect(self, calls: list[Call], now: float, wait: bool) -> list[Finding]:
        for call in sorted(calls):
            self._evaluated.add(call)
            self._since.pop(call)
            finding = evaluate(call[0], self._reported.pop(call), self.job)
            if finding is not None:
                self._waiting.append((now, finding))
        found = []
        if not self._said and 0 < self.job.world <= len(self._cannot):
            self._said = True
            found.append(_unchecked(self._cannot))
        waiting, self._waiting = self._waiting, []
        for since, finding in waiting:
            if self._is_known(finding):
                self.job.coverage.unseen("cross_rank_recompute", "ranks whose state is known to differ compute with it")
            elif may_be_effect(finding) and wait and (self._finished or now - since < WAIT):
                self._waiting.append((since, finding))
            elif is_effect(finding) and now - since < WAIT:
                self.job.coverage.unseen(
                    "cross_rank_recompute", "the run ended before it was known whether ranks are equal"
                )
            elif not self._off and (finding.ranks, finding.stage, finding.operator) not in self._named:
                self._named.add((finding.ranks, finding.stage, finding.operator))
                found.append(finding)
                self._look_at_program(finding)
        return found

    def _look_at_program(self, finding: Finding) -> None:
        """Switch off all recomputes if the program is not deterministic."""
        if finding.kind == "nondeterminism" or finding.advice == AGAIN:
            self._off, ranks = True, tuple(range(self.job.world))
            for check in ("cross_rank_recompute", "same_rank_recompute"):
                body = {"off": "the program is not deterministic"}
                self.job.orders.append((ranks, Message(check, 0, finding.step or 0, body)))

    def _is_known(self, finding: Finding) -> bool:
        """Whether a finding is explained by a rank whose state is known to differ, or by ranks that gather its
        parameters.

        Then one group contains none of these ranks, and no other group is larger; or all groups contain some, because
        no majority said which of them are right.
        """
        if not may_be_effect(finding):
            return False
        untouched = [group for group in finding.groups if self._apart.isdisjoint(group)]
        largest = max(map(len, finding.groups), default=0)
        return not untouched or (len(untouched) == 1 and len(untouched[0]) == largest)


def _unchecked(cannot: Mapping[int, tuple[int, str]]) -> Finding:
    """The note that no forward runs again, with the reason of most ranks that have one of their own."""
    reasons = Counter(why for _, why in cannot.values() if why != "another rank cannot")
    why = reasons.most_common(1)[0][0] if reasons else "another rank cannot"
    return Finding(
        "guard",
        "note",
        f"nothing checks the forward and the backward here: {why}",
        "Ranks that hold different parts of a model can compare a function that all of them call: "
        "Guard.cross_rank_recompute(fn). same_rank_recompute=10 repeats some steps on the same rank.",
        step=min(step for step, _ in cannot.values()),
        cause="program",
    )


def may_be_effect(finding: Finding) -> bool:
    """Whether ranks may differ in a recompute only because their state differs, a fault for other detectors to find."""
    return _given(finding) in ("different", "unknown")


def is_effect(finding: Finding) -> bool:
    """Whether a finding is an effect of differing state or programs, not of a fault in the first differing operator.

    It is one if, where ranks first differ, they already ran different operators or gave the operator different inputs.
    """
    return _given(finding) == "different"


def _given(finding: Finding) -> Asked | None:
    """How the inputs of the first operator that differs compare; None where it does not matter."""
    evidence = finding.evidence
    if not finding.groups or evidence.get("contradicts itself"):
        return None
    given: Asked | None = evidence.get("inputs of the operator")
    return given


def evaluate(step: int, reported: Mapping[int, Mapping[str, Any]], job: Job) -> Finding | None:
    """The finding of one cross-rank recompute; None if ranks with the same work have reported equal digests.

    Args:
        step: the step.
        reported: by rank, the body of the message of `checks.cross_rank_recompute`.
        job: the job of these ranks.
    """
    if not any("first" in body for body in reported.values()):
        return _without_peers(step, reported, job)
    preflight = any(body["purpose"] == "preflight" for body in reported.values())
    once, again = (_values(reported, name) for name in ("once", "again"))
    peers = [ranks for ranks in classes({rank: body["work"] for rank, body in reported.items()}) if len(ranks) > 1]
    split = {tuple(ranks): groups({rank: once[rank] for rank in ranks}) for ranks in peers}
    differing = [of for of in split.values() if len(of) > 1]
    unsteady = tuple(sorted(rank for rank, body in reported.items() if preflight and not body["repeats"]))
    if not differing and not unsteady:
        return None
    phase, tensor = _name(reported)
    common: dict[str, Any] = {
        "step": step,
        "stage": phase,
        "tensor": tensor,
        "groups": tuple(group for of in differing for group in of),
        "evidence": {
            "purpose": next(iter(reported.values()))["purpose"],
            "micro-batch of rank": next(iter(reported.values()))["of"],
            "ranks that reported": len(reported),
            "ranks": job.world,
        },
    }
    if unsteady and (2 * len(unsteady) >= len(reported)):
        first = next((reported[rank] for rank in unsteady if reported[rank].get("unrepeated")), {})
        return not_repeated(f"two runs of step {step} on the same rank differ", first, common)
    accused = unsteady or tuple(sorted(rank for of in differing for rank in minority(of)))
    contradicts = () if accused else _contradicts(reported, differing)
    if contradicts:
        phase, tensor, _ = reported[contradicts[0]]["contradicts"]
        common |= {"stage": phase, "tensor": tensor}
        common["evidence"]["contradicts itself"] = True
    asked = _asked(reported, accused or contradicts, differing)
    common["operator"] = _operator(reported, accused or contradicts or tuple(reported))
    why = explained(accused or contradicts or tuple(rank for of in common["groups"] for rank in of), job)
    if why:
        common["evidence"]["explained by"] = why
    common["evidence"]["inputs of the operator"] = asked
    could_vote = any(sum(map(len, of)) > 2 for of in differing)
    if preflight and not unsteady and could_vote and (not accused or asked == "different"):
        reason = f"ranks compute the same micro-batch of step {step} differently, though each repeats its bits"
        if any(body.get("drawn") for body in reported.values()):
            return _drawn(common["operator"], reason, {**common, "groups": ()})
        return _program(reason, common["operator"], common)
    if not accused and not contradicts:
        suspects = tuple(sorted(rank for of in differing for group in of for rank in group))
        sentence = (
            f"{' and '.join(listed_ranks(group) for of in differing for group in of)} differ in "
            f"{named(phase, tensor)} on the same micro-batch; no majority says which is right{why and '; '}{why}"
        )
        cause = _cause(asked, why)
        return Finding(
            "cross_rank_recompute", "suspect", sentence, _advice(cause, suspects, job), suspects, cause=cause, **common
        )
    # Three runs are three votes: the run, its repetition, and the operators of a third run.
    given_equal = asked != "different"
    if contradicts and (asked != "unknown" or _in_eager_code(reported, contradicts)):
        asked = "equal"  # other inputs on other ranks do not matter for a contradiction
    repeated = "same" if contradicts else _again(accused, again, once, differing, bool(unsteady))
    common["evidence"]["again"] = repeated
    sentence = _sentence(step, placed(accused or contradicts, job), len(accused or contradicts), named(phase, tensor))
    meaning = _meaning(repeated, asked, why)
    sentence += "; ".join(filter(None, (_agreement(reported, differing, contradicts), meaning)))
    cause = _cause(asked, why)
    sure = repeated != "right" and differing and given_equal and cause == "machine"
    severity: Severity = "confirmed" if sure else "suspect"
    return Finding("cross_rank_recompute", severity, sentence, _advice(cause, accused or contradicts, job),
                   accused or contradicts, cause=cause, **common)  # fmt: skip


def _sentence(step: int, who: str, count: int, what: str) -> str:
    return f"{who} compute{'s' * (count == 1)} {what} wrongly: "


def _agreement(
    reported: Mapping[int, Any], differing: list[tuple[tuple[int, ...], ...]], contradicts: tuple[int, ...]
) -> str:
    if contradicts:
        return _CONTRADICTS
    return f"{max(len(of[0]) for of in differing)} of {len(reported)} ranks agree with each other" if differing else ""


def _meaning(repeated: str, asked: Asked, why: str) -> str:
    if asked == "different":
        return "the program runs other operators on this rank, or gives them other inputs"
    if why or asked == "unknown":
        often = {"same": "it repeats", "other": "it computes something else each time", "right": "it did not repeat"}
        unseen = "no operator that was seen differs, so that the program or the machine may do it"
        return f"{often[repeated]}, and {why or unseen}"
    return {
        "same": "it repeats: a defect of this machine",
        "other": "it computes something else each time: this machine is unstable",
        "right": "it did not repeat",
    }[repeated]


def _program(reason: str, operator: str, common: dict[str, Any]) -> Finding:
    what = f"{common['stage']} {common['tensor']}"
    first = f", first by {operator}" if operator else ""
    sentence = f"the program is not deterministic: {reason}, in {what}{first}"
    return Finding(
        "nondeterminism", "note", sentence, DOCTOR, cause="program", **{**common, "operator": operator, "groups": ()}
    )


def not_repeated(reason: str, body: Mapping[str, Any], common: dict[str, Any]) -> Finding:
    """The note that ranks do not repeat their bits, and why: the program is not deterministic, or cannot be run again.

    Args:
        reason: what was seen, in words.
        body: the message of a rank, with the first operator whose two runs differ, if one was seen.
        common: other fields of the finding.
    """
    pair = body.get("unrepeated", [])
    if len(pair) != 2:
        sentence = (
            f"{reason}, in {common['stage']} {common['tensor']}: the program is not deterministic, or a run changes "
        )
        sentence += "what the next one reads; which of them is not known, because no operator was seen to differ"
        return Finding("nondeterminism", "note", sentence, DOCTOR, cause="program", **{**common, "groups": ()})
    operator = " ".join(pair[0][:2])
    common = {**common, "operator": operator, "groups": ()}
    if body.get("random"):
        return _drawn(operator, reason, common)
    if pair[0][0] == pair[1][0] and pair[0][2] == pair[1][2]:
        return _program(f"{reason}, and the operator gives other results for equal inputs", operator, common)
    sentence = f"the step cannot be run again: {operator} is given other inputs then, which a run has changed"
    return Finding("guard", "note", f"{sentence} ({reason})", AGAIN, cause="program", **common)


def _drawn(operator: str, reason: str, common: dict[str, Any]) -> Finding:
    sentence = f"the step cannot be run again: {operator} draws random numbers from a generator of the program's own"
    return Finding("guard", "note", f"{sentence} ({reason})", AGAIN, cause="program", **common)


def _cause(asked: Asked, why: str) -> Cause:
    return "machine" if asked in ("equal", "changed") and not why else "unknown"


def _advice(cause: Cause, ranks: tuple[int, ...], job: Job) -> str:
    return machine_advice(ranks, job) if cause == "machine" else COMPARE


def _in_eager_code(reported: Mapping[int, Mapping[str, Any]], ranks: Iterable[int]) -> bool:
    return not any(reported[rank].get("compiled") for rank in ranks)


def _values(reported: Mapping[int, Mapping[str, Any]], name: str) -> dict[int, str]:
    """By rank, the digest at the first place that differs; "" for a rank that has computed fewer digests."""
    found = {}
    for rank, body in reported.items():
        place = body.get("first", 0) - body.get("start", 0)
        digests = body.get(name, [])
        found[rank] = "" if not 0 <= place < len(digests) else " ".join(digests[place])
    return found


def _name(reported: Mapping[int, Mapping[str, Any]]) -> tuple[str, str]:
    names: Counter[tuple[str, str]] = Counter()
    for body in reported.values():
        place = body.get("first", 0) - body.get("start", 0)
        if 0 <= place < len(body.get("once", [])):
            names[body["once"][place][0], body["once"][place][1]] += 1
    return names.most_common(1)[0][0] if names else ("", "")


def _again(
    accused: tuple[int, ...],
    again: Mapping[int, str],
    once: Mapping[int, str],
    differing: list[tuple[tuple[int, ...], ...]],
    unsteady: bool,
) -> str:
    if unsteady:
        return "other"
    right = {rank: once[of[0][0]] for of in differing for group in of for rank in group}
    kinds = {
        "right" if again[rank] == right[rank] else "same" if again[rank] == once[rank] else "other" for rank in accused
    }
    return next(kind for kind in ("other", "same", "right") if kind in kinds)


def _asked(
    reported: Mapping[int, Mapping[str, Any]], accused: tuple[int, ...], differing: list[tuple[tuple[int, ...], ...]]
) -> Asked:
    """How the inputs of the first operator that differs compare between the accused ranks and the others.

    Returns:
        "equal": the same operator, with equal inputs; "changed": inputs that no operator of this rank has computed, so
        that they have changed in memory; "different": other operators, or other values; "unknown": no operator differs.
    """
    for of in differing:
        ranks = [rank for group in of for rank in group if "operator" in reported[rank]]
        if len(ranks) < 2 or (accused and not set(accused) & set(ranks)):
            continue
        name, _, inputs, _, strange = zip(*(reported[rank]["operator"] for rank in ranks), strict=True)
        if len(set(zip(name, inputs, strict=True))) == 1:
            return "equal"
        theirs = {value for rank, value in zip(ranks, strange, strict=True) if rank not in accused}
        ours = {value for rank, value in zip(ranks, strange, strict=True) if rank in accused}
        more = bool(ours and theirs) and min(map(int, ours)) > max(map(int, theirs))
        return "changed" if len(set(name)) == 1 and more else "different"
    return "unknown"


def _contradicts(
    reported: Mapping[int, Mapping[str, Any]], differing: list[tuple[tuple[int, ...], ...]]
) -> tuple[int, ...]:
    """The ranks that contradict themselves at the earliest place, where no majority decides."""
    return _first_to_contradict(reported, [rank for of in differing for group in of for rank in group])


def _first_to_contradict(reported: Mapping[int, Mapping[str, Any]], ranks: Iterable[int]) -> tuple[int, ...]:
    places = {rank: int(reported[rank]["contradicts"][2]) for rank in ranks if "contradicts" in reported[rank]}
    return tuple(sorted(rank for rank, place in places.items() if place == min(places.values())))


def _without_peers(step: int, reported: Mapping[int, Mapping[str, Any]], job: Job) -> Finding | None:
    """The finding where no rank has done the work of another: a rank that alone contradicts itself."""
    accused = _first_to_contradict(reported, reported)
    if len(accused) != 1:
        return None
    body = reported[accused[0]]
    phase, tensor, _ = body["contradicts"]
    why = explained(accused, job)
    cause = _cause("equal" if _in_eager_code(reported, accused) else "unknown", why)
    sentence = _sentence(step, placed(accused, job), 1, named(phase, tensor)) + _CONTRADICTS
    sentence += f"; {_meaning('same', 'unknown', why)}" if cause == "unknown" else ""
    evidence = {
        "purpose": body["purpose"], "micro-batch of rank": body["of"], "ranks that reported": len(reported),
        "ranks": job.world, "contradicts itself": True,
    }  # fmt: skip
    return Finding("cross_rank_recompute", "suspect", sentence, _advice(cause, accused, job), accused, step, phase,
                   tensor, cause=cause, evidence=evidence)  # fmt: skip


def _operator(reported: Mapping[int, Mapping[str, Any]], of: tuple[int, ...]) -> str:
    return next((" ".join(reported[rank]["operator"][:2]) for rank in of if "operator" in reported.get(rank, {})), "")


def _sound(body: Mapping[str, Any]) -> bool:
    """Whether a message has the fields of a recompute, with the types that are read here."""
    lists = [body.get(name, []) for name in ("once", "again", "unrepeated")]
    if not all(isinstance(each, list) for each in lists):
        return False
    operators = [*lists[2], *([body["operator"]] if "operator" in body else [])]
    return (
        body.get("purpose") in ("preflight", "scheduled", "ordered")
        and type(body.get("of")) is int
        and isinstance(body.get("work"), str)
        and isinstance(body.get("repeats"), bool)
        and ("contradicts" not in body or _is_place(body["contradicts"]))
        and all(type(body.get(name, 0)) is int for name in ("first", "start", "call"))
        and all(_texts(digest, 3) for digest in (*lists[0], *lists[1]))
        and all(map(_is_operator, operators))
    )


def is_sound_pair(pair: Any) -> bool:
    """Whether a value is what ranks send of the first operator whose two runs differ."""
    return isinstance(pair, list) and len(pair) in (0, 2) and all(_is_operator(each) for each in pair)


def _is_operator(value: Any) -> bool:
    return _texts(value, 5) and value[4].isdecimal() and len(value[4]) < 6


def _is_place(value: Any) -> bool:
    """Whether a value is the phase, the tensor and the number of a digest."""
    return _texts(value, 3) and value[2].isdecimal() and len(value[2]) < 12


def _texts(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(isinstance(part, str) for part in value)
