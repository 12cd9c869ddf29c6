"""Judges roll calls: who has computed something else than the others, and whether that is the machine or the program.

| accused ranks, again  | meaning |
|---|---|
| the majority's bits   | a transient fault |
| the same wrong bits   | a defect that persists |
| other wrong bits      | an unstable machine |

If honest ranks differ everywhere, or most do not repeat their own bits, the program is not deterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ..report.findings import Cause, Finding, Severity
from ..shared.votes import classes, groups, minority
from ..transport.messages import Message
from .judge import Job, Judge
from .wording import named, placed
from .wording import ranks as listed_ranks

Asked = Literal["equal", "changed", "different", "unknown"]

PATIENCE = 30.0
"""Seconds after the first rank's message, after which a roll call is judged without those that are missing."""

BESIDE = 10.0
"""Seconds for which a finding waits that may be an effect of what other checks have not said yet; they wait as well."""

DOCTOR = (
    "Nothing is blamed on a machine by repetition from now on. Run dash-inductor doctor on the program to find what is "
    "not deterministic."
)
_CONTRADICTS = "what it computes there contradicts what it computes elsewhere, and no other rank does so"
MACHINE = "Run dcgmi diag -r 3 there, and take the machine out of service if it fails."


class RollCallJudge(Judge):
    """Judges each roll call when all ranks have told of it."""

    kinds = frozenset({"roll_call"})

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job, **settings)
        self._told: dict[int, dict[int, dict[str, Any]]] = {}  # by step and rank
        self._since: dict[int, float] = {}
        self._judged: set[int] = set()
        self._off = False
        self._named: set[tuple[Any, ...]] = set()  # what was found already
        self._apart: set[int] = set()  # ranks whose state is known to differ
        self._finished = False
        self._waiting: list[tuple[float, Finding]] = []  # for what others say of ranks whose state differs

    def take(self, message: Message, now: float) -> None:
        """A rank has told of a roll call."""
        if not self._off and message.step not in self._judged and _sound(message.body):
            self._told.setdefault(message.step, {})[message.rank] = message.body
            self._since.setdefault(message.step, now)

    def heed(self, finding: Finding, now: float) -> None:
        """Replicas or memory accuse ranks: from then on these have other parameters than the others."""
        if finding.kind in ("bits", "rest") and finding.severity != "note":
            self._apart.update(finding.ranks)

    def judge(self, now: float) -> list[Finding]:
        """Findings about roll calls that are complete, or that nobody will complete."""
        done = [
            step
            for step, told in self._told.items()
            if len(told) == self.job.world or now > self._since[step] + PATIENCE
        ]
        return self._judge(done, now, wait=not self._finished)

    def finish(self, now: float) -> list[Finding]:
        """Findings about all roll calls; what may be an effect waits for `judge`, after other checks have spoken."""
        self._finished = True
        return self._judge(list(self._told), now, wait=True)

    def _judge(self, steps: list[int], now: float, wait: bool) -> list[Finding]:
        for step in sorted(steps):
            self._judged.add(step)
            self._since.pop(step)
            finding = judged(step, self._told.pop(step), self.job)
            if finding is not None:
                self._waiting.append((now, finding))
        found = []
        waiting, self._waiting = self._waiting, []
        for since, finding in waiting:
            if self._is_known(finding):
                self.job.coverage.unseen("roll_call", "ranks whose state is known to differ compute with it")
            elif may_be_effect(finding) and wait and (self._finished or now - since < BESIDE):
                self._waiting.append((since, finding))
            elif is_effect(finding) and now - since < BESIDE:
                self.job.coverage.unseen("roll_call", "the run has ended before it was known whether ranks are equal")
            elif not self._off and (finding.ranks, finding.stage, finding.operator) not in self._named:
                self._named.add((finding.ranks, finding.stage, finding.operator))
                found.append(finding)
                self._look_at_program(finding)
        return found

    def _look_at_program(self, finding: Finding) -> None:
        """If it is not deterministic, nothing is run again."""
        if finding.kind == "nondeterminism":
            self._off, ranks = True, tuple(range(self.job.world))
            for check in ("roll_call", "replay"):
                body = {"off": "the program is not deterministic"}
                self.job.orders.append((ranks, Message(check, 0, finding.step or 0, body)))

    def _is_known(self, finding: Finding) -> bool:
        """Whether a rank whose state is known to differ, and ranks that gather its parameters, compute with these.

        Then one group has none of them, and no other is larger; or all groups have some, because no majority said which
        of them are right.
        """
        if not may_be_effect(finding):
            return False
        untouched = [group for group in finding.groups if self._apart.isdisjoint(group)]
        largest = max(map(len, finding.groups), default=0)
        return not untouched or (len(untouched) == 1 and len(untouched[0]) == largest)


def may_be_effect(finding: Finding) -> bool:
    """Whether ranks may differ in a roll call because their state does, which other checks have to say."""
    return _given(finding) in ("different", "unknown")


def is_effect(finding: Finding) -> bool:
    """Whether ranks differ in a roll call because the state or the program does: they were given other values."""
    return _given(finding) == "different"


def _given(finding: Finding) -> Asked | None:
    """What ranks that differ from others were given; None where it does not matter."""
    evidence = finding.evidence
    if not finding.groups or evidence.get("contradicts itself"):
        return None
    given: Asked | None = evidence.get("inputs of the operator")
    return given


def judged(step: int, told: Mapping[int, Mapping[str, Any]], job: Job) -> Finding | None:
    """What a roll call shows; None if all that was told is equal.

    Args:
        told: by rank, what `checks.roll_call` sends.
        job: whose ranks these are.
    """
    if not any("first" in body for body in told.values()):
        return _without_peers(step, told, job)
    licence = any(body["purpose"] == "licence" for body in told.values())
    once, again = (_values(told, name) for name in ("once", "again"))
    peers = [ranks for ranks in classes({rank: body["work"] for rank, body in told.items()}) if len(ranks) > 1]
    split = {tuple(ranks): groups({rank: once[rank] for rank in ranks}) for ranks in peers}
    differing = [of for of in split.values() if len(of) > 1]
    unsteady = tuple(sorted(rank for rank, body in told.items() if licence and not body["repeats"]))
    if not differing and not unsteady:
        return None
    phase, tensor = _name(told)
    common: dict[str, Any] = {
        "step": step,
        "stage": phase,
        "tensor": tensor,
        "groups": tuple(group for of in differing for group in of),
        "evidence": {
            "roll call": next(iter(told.values()))["purpose"],
            "micro-batch of rank": next(iter(told.values()))["of"],
            "ranks that told": len(told),
            "ranks": job.world,
        },
    }
    if unsteady and (2 * len(unsteady) >= len(told)):
        return _program(f"two runs of step {step} on the same rank differ", _unrepeated(told, unsteady), common)
    accused = unsteady or tuple(sorted(rank for of in differing for rank in minority(of)))
    contradicts = () if accused else _contradicts(told, differing)
    if contradicts:
        phase, tensor, _ = told[contradicts[0]]["contradicts"]
        common |= {"stage": phase, "tensor": tensor}
        common["evidence"]["contradicts itself"] = True
    asked = _asked(told, accused or contradicts, differing)
    common["operator"] = _operator(told, accused or contradicts or tuple(told))
    common["evidence"]["inputs of the operator"] = asked
    could_vote = any(sum(map(len, of)) > 2 for of in differing)
    if licence and not unsteady and could_vote and (not accused or asked == "different"):
        reason = f"ranks compute the same micro-batch of step {step} differently, though each repeats its bits"
        return _program(reason, common["operator"], common)
    if not accused and not contradicts:
        suspects = tuple(sorted(rank for of in differing for group in of for rank in group))
        sentence = (
            f"{' and '.join(listed_ranks(group) for of in differing for group in of)} differ in "
            f"{named(phase, tensor)} on the same micro-batch; no majority says which is right"
        )
        return Finding("roll_call", "suspect", sentence, MACHINE, suspects, cause=_cause(asked), **common)
    # Three executions are as many votes: the run, its repetition, and the operators of a third one.
    given_equal = asked != "different"
    if contradicts:
        asked = "equal"  # to the meaning it does not matter that others have been given something else
    repeated = "same" if contradicts else _again(accused, again, once, differing, bool(unsteady))
    common["evidence"]["again"] = repeated
    sentence = _sentence(step, placed(accused or contradicts, job), len(accused or contradicts), named(phase, tensor))
    sentence += "; ".join(filter(None, (_agreement(told, differing, contradicts), _meaning(repeated, asked))))
    severity: Severity = "verdict" if repeated != "right" and differing and given_equal else "suspect"
    return Finding("roll_call", severity, sentence, MACHINE if asked != "different" else DOCTOR,
                   accused or contradicts, cause=_cause(asked), **common)  # fmt: skip


def _sentence(step: int, who: str, count: int, what: str) -> str:
    return f"{who} compute{'s' * (count == 1)} {what} wrongly: "


def _agreement(
    told: Mapping[int, Any], differing: list[tuple[tuple[int, ...], ...]], contradicts: tuple[int, ...]
) -> str:
    if contradicts:
        return _CONTRADICTS
    return f"{max(len(of[0]) for of in differing)} of {len(told)} ranks agree with each other" if differing else ""


def _meaning(repeated: str, asked: Asked) -> str:
    if asked == "different":
        return "there the program runs other operators, or gives them other values"
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


def _cause(asked: Asked) -> Cause:
    return "unknown" if asked == "different" else "machine"


def _values(told: Mapping[int, Mapping[str, Any]], name: str) -> dict[int, str]:
    """By rank, the digest at the first place that differs; "" where a rank has computed less."""
    found = {}
    for rank, body in told.items():
        place = body.get("first", 0) - body.get("start", 0)
        digests = body.get(name, [])
        found[rank] = "" if not 0 <= place < len(digests) else " ".join(digests[place])
    return found


def _name(told: Mapping[int, Mapping[str, Any]]) -> tuple[str, str]:
    names: Counter[tuple[str, str]] = Counter()
    for body in told.values():
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
    told: Mapping[int, Mapping[str, Any]], accused: tuple[int, ...], differing: list[tuple[tuple[int, ...], ...]]
) -> Asked:
    """What the first operator that differs was given on the accused ranks, compared with the others.

    "equal": the same operator, with equal inputs; "changed": inputs that no operator of this rank has computed, so that
    they have changed in memory; "different": other operators, or other values; "unknown": no operator differs.
    """
    for of in differing:
        ranks = [rank for group in of for rank in group if "operator" in told[rank]]
        if len(ranks) < 2 or (accused and not set(accused) & set(ranks)):
            continue
        name, _, inputs, _, strange = zip(*(told[rank]["operator"] for rank in ranks), strict=True)
        if len(set(zip(name, inputs, strict=True))) == 1:
            return "equal"
        theirs = {value for rank, value in zip(ranks, strange, strict=True) if rank not in accused}
        ours = {value for rank, value in zip(ranks, strange, strict=True) if rank in accused}
        more = bool(ours and theirs) and min(map(int, ours)) > max(map(int, theirs))
        return "changed" if len(set(name)) == 1 and more else "different"
    return "unknown"


def _contradicts(
    told: Mapping[int, Mapping[str, Any]], differing: list[tuple[tuple[int, ...], ...]]
) -> tuple[int, ...]:
    """Where no majority decides, the ranks that contradict themselves first; the others do not in the same place."""
    return _first_to_contradict(told, [rank for of in differing for group in of for rank in group])


def _first_to_contradict(told: Mapping[int, Mapping[str, Any]], ranks: Iterable[int]) -> tuple[int, ...]:
    places = {rank: int(told[rank]["contradicts"][2]) for rank in ranks if "contradicts" in told[rank]}
    return tuple(sorted(rank for rank, place in places.items() if place == min(places.values())))


def _without_peers(step: int, told: Mapping[int, Mapping[str, Any]], job: Job) -> Finding | None:
    """Where no rank has done the work of another: who contradicts itself alone."""
    accused = _first_to_contradict(told, told)
    if len(accused) != 1:
        return None
    body = told[accused[0]]
    phase, tensor, _ = body["contradicts"]
    sentence = _sentence(step, placed(accused, job), 1, named(phase, tensor)) + _CONTRADICTS
    evidence = {
        "roll call": body["purpose"], "micro-batch of rank": body["of"], "ranks that told": len(told),
        "ranks": job.world, "contradicts itself": True,
    }  # fmt: skip
    return Finding("roll_call", "suspect", sentence, MACHINE, accused, step, phase, tensor, cause="machine",
                   evidence=evidence)  # fmt: skip


def _operator(told: Mapping[int, Mapping[str, Any]], of: tuple[int, ...]) -> str:
    return next((" ".join(told[rank]["operator"][:2]) for rank in of if "operator" in told.get(rank, {})), "")


def _unrepeated(told: Mapping[int, Mapping[str, Any]], of: tuple[int, ...]) -> str:
    """The operator that most ranks name as the first whose two runs differ."""
    names = Counter(" ".join(told[rank]["unrepeated"][0][:2]) for rank in of if told[rank].get("unrepeated"))
    return names.most_common(1)[0][0] if names else ""


def _sound(body: Mapping[str, Any]) -> bool:
    """Whether a message has the fields of a roll call, in the types that are read here."""
    lists = [body.get(name, []) for name in ("once", "again", "unrepeated")]
    if not all(isinstance(each, list) for each in lists):
        return False
    operators = [*lists[2], *([body["operator"]] if "operator" in body else [])]
    return (
        body.get("purpose") in ("licence", "scheduled", "ordered")
        and type(body.get("of")) is int
        and isinstance(body.get("work"), str)
        and isinstance(body.get("repeats"), bool)
        and ("contradicts" not in body or _is_place(body["contradicts"]))
        and all(type(body.get(name, 0)) is int for name in ("first", "start"))
        and all(_texts(digest, 3) for digest in (*lists[0], *lists[1]))
        and all(_texts(operator, 5) and operator[4].isdecimal() and len(operator[4]) < 6 for operator in operators)
    )


def _is_place(value: Any) -> bool:
    """Phase, tensor and number of a digest."""
    return _texts(value, 3) and value[2].isdecimal() and len(value[2]) < 12


def _texts(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(isinstance(part, str) for part in value)
