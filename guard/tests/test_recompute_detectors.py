"""Detectors of recomputes, and the diagnosis: pure functions of messages, with healthy messages for every fault."""

from __future__ import annotations

from typing import Any

import pytest

from dash_guard.checks.cross_rank_recompute import place
from dash_guard.checks.same_rank_recompute import chosen
from dash_guard.detectors.at_rest import SINCE
from dash_guard.detectors.cross_rank_recompute import PATIENCE, WAIT, CrossRankRecomputeDetector
from dash_guard.detectors.detector import Job
from dash_guard.detectors.diagnosis import Diagnosis
from dash_guard.detectors.same_rank_recompute import SameRankRecomputeDetector
from dash_guard.report.findings import Finding
from dash_guard.shared.votes import classes, first_difference, groups, minority
from dash_guard.transport.messages import Message

EQUAL = ["mul", "in blocks.0 at train.py:7", "aa", "bb", "0"]


def report(
    value: str, again: str = "", operator: list[str] | None = None, purpose: str = "scheduled", **body: Any
) -> dict[str, Any]:
    """What a rank sends where ranks differ."""
    digests = [[["activation", "ln", "00"], ["activation", "up", each]] for each in (value, again or value)]
    found = {"purpose": purpose, "of": 0, "work": "", "count": 9, "repeats": True, "first": 5, "start": 4}
    found |= {"once": digests[0], "again": digests[1]}
    return {**found, **({} if operator is None else {"operator": operator}), **body}


def detected(bodies: list[dict[str, Any]], job: Job | None = None, step: int = 7) -> list[Finding]:
    detector = CrossRankRecomputeDetector(job or Job(len(bodies)))
    for rank, body in enumerate(bodies):
        detector.take(Message("cross_rank_recompute", rank, step, body), 0.0)
    return detector.detect(0.0) + detector.detect(WAIT)


def wrong(*operator: str) -> list[str]:
    return [given or equal for given, equal in zip(operator, EQUAL, strict=True)]


BAD = wrong("", "", "", "cc", "")
"""The same operator with equal inputs has another result."""


@pytest.mark.parametrize(
    ("bad", "severity", "cause", "words"),
    [
        (report("x", operator=BAD), "confirmed", "machine", "it repeats: a defect of this machine"),
        (report("x", again="y", operator=BAD), "confirmed", "machine", "this machine is unstable"),
        (report("x", again="g", operator=EQUAL), "suspect", "machine", "it did not repeat"),
        (report("x", operator=wrong("", "", "dd", "cc", "1")), "confirmed", "machine", "it repeats"),
        (
            report("x", operator=wrong("", "", "dd", "cc", "0")),
            "suspect",
            "unknown",
            "the program runs other operators",
        ),
        (report("x", operator=wrong("add", "", "", "", "")), "suspect", "unknown", "the program runs other operators"),
    ],
    ids=["repeats", "unstable", "once", "changed in memory", "other values", "other operators"],
)
def test_the_minority_is_named(bad: dict[str, Any], severity: str, cause: str, words: str) -> None:
    good = report("g", operator=EQUAL)
    job = Job(4, hosts={2: "node2"}, gpus={2: "GPU-7"})
    (found,) = detected([good, good, bad, good], job)
    assert (found.kind, found.severity, found.ranks, found.step, found.cause) == (
        "cross_rank_recompute", severity, (2,), 7, cause,
    )  # fmt: skip
    assert found.sentence.startswith(
        "rank 2 (node2, GPU-7) computes activation up wrongly: 3 of 4 ranks agree with each other; "
    )
    assert words in found.sentence
    assert (found.stage, found.tensor, found.groups) == ("activation", "up", ((0, 1, 3), (2,)))
    assert not job.orders


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("operator", [[EQUAL, BAD], [None, None]], ids=["seen", "not seen"])
@pytest.mark.parametrize("phrase", ["", "its settings.mkldnn differs", "its AdamW.0 lr differs"])
def test_a_machine_is_accused_only_where_the_operator_was_seen_and_nothing_else_explains_it(
    world: int, operator: list[list[str] | None], phrase: str
) -> None:
    job = Job(world)
    if phrase:
        job.explain(1, phrase)
    bodies = [report("g", operator=operator[0])] * world
    bodies[1] = report("x", operator=operator[1])
    (found,) = detected(bodies, job)
    machine = operator[0] is not None and not phrase
    assert found.cause == ("machine" if machine else "unknown")
    assert (found.severity == "confirmed") == (machine and world > 2)
    assert "machine" not in found.advice or machine
    assert phrase in found.sentence
    if world > 2 and not machine:
        assert "defect" not in found.sentence
        assert "the program or the machine may do it" in found.sentence or phrase

    diagnosis = Diagnosis(job, raises=True)
    for fact in (suspect("bits", 1), found):
        diagnosis.observe(fact, 0.0)
    confirmed = diagnosis.detect(0.0)
    if phrase:
        assert confirmed == []
    assert all(each.cause == ("machine" if machine else "unknown") for each in confirmed)


def test_equal_ranks_are_healthy() -> None:
    healthy = {"purpose": "scheduled", "of": 0, "work": "", "count": 9, "repeats": True}
    assert detected([healthy] * 4) == []
    assert detected([{**healthy, "purpose": "preflight"}] * 4) == []


def test_what_ranks_legitimately_compute_differently_is_not_compared() -> None:
    shards = [report(value, work=f"{n % 2} of 2") for n, value in enumerate("abab")]
    assert detected(shards) == []
    shards[3] = report("x", work="1 of 2")
    (found,) = detected(shards)
    assert (found.severity, found.ranks) == ("suspect", (1, 3))
    assert "no majority" in found.sentence


@pytest.mark.parametrize(
    "bodies",
    [
        [
            report(
                v, repeats=False, purpose="preflight", unrepeated=[wrong("rand", "", "", each, "") for each in (v, "z")]
            )
            for v in "abcd"
        ],
        [report(v, operator=EQUAL, purpose="preflight") for v in "abcd"],
        [report(v, operator=wrong("", "", f"i{v}", "", ""), purpose="preflight") for v in "aaab"],
    ],
    ids=["no rank repeats its bits", "all differ", "one is given other values"],
)
def test_a_program_that_is_not_deterministic_blames_nobody(bodies: list[dict[str, Any]]) -> None:
    job = Job(4)
    detector = CrossRankRecomputeDetector(job)
    for step in (1, 9):
        for rank, body in enumerate(bodies):
            detector.take(Message("cross_rank_recompute", rank, step, body), 0.0)
    (found,) = detector.detect(0.0)
    assert (found.kind, found.severity, found.ranks, found.cause) == ("nondeterminism", "note", (), "program")
    assert "dash-inductor doctor" in found.advice
    assert ("rand in blocks.0" if not bodies[0]["repeats"] else "mul in blocks.0 at train.py:7") in found.sentence
    assert [(ranks, message.kind) for ranks, message in job.orders] == [
        ((0, 1, 2, 3), "cross_rank_recompute"), ((0, 1, 2, 3), "same_rank_recompute"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pair", "random", "kind", "words"),
    [
        ([EQUAL, BAD], False, "nondeterminism", "the program is not deterministic: "),
        ([EQUAL, BAD], True, "guard", "mul in blocks.0 at train.py:7 draws random numbers"),
        (
            [EQUAL, wrong("", "", "dd", "cc", "")],
            False,
            "guard",
            "cannot be run again: mul in blocks.0 at train.py:7 is",
        ),
        ([EQUAL, wrong("add", "", "", "", "")], False, "guard", "cannot be run again: "),
        ([], False, "nondeterminism", "which of them is not known"),
    ],
    ids=["operator", "random", "changed", "other operator", "not seen"],
)
def test_what_is_not_repeated_is_not_deterministic_or_cannot_be_run_again(
    pair: list[list[str]], random: bool, kind: str, words: str
) -> None:
    more: dict[str, Any] = {"unrepeated": pair, "random": random}
    bodies = [report(v, repeats=False, purpose="preflight", **more) for v in "abcd"]
    (across,) = detected(bodies, job := Job(4))
    detector = SameRankRecomputeDetector(Job(4))
    detector.take(
        Message("same_rank_recompute", 0, 7, {"off": "on most ranks", "phase": "x", "tensor": "y", **more}), 0.0
    )
    (same,) = detector.detect(0.0)
    for found in (across, same):
        assert (found.kind, found.severity, found.ranks, found.cause) == (kind, "note", (), "program")
        assert words in found.sentence
    assert len(job.orders) == 2  # checks are off


@pytest.mark.parametrize("reasons", [["a", "another rank cannot"], ["a", "a", "b"]])
def test_that_nothing_checks_the_forward_is_said_once(reasons: list[str]) -> None:
    detector = CrossRankRecomputeDetector(Job(len(reasons)))
    for rank, why in enumerate(reasons):
        assert detector.detect(0.0) == []
        detector.take(Message("cross_rank_recompute", rank, 1, {"cannot": why}), 0.0)
    (found,) = [*detector.detect(0.0), *detector.detect(1.0)]
    assert (found.severity, found.step) == ("note", 1)
    assert found.sentence == "nothing checks the forward and the backward here: a"


def test_one_rank_that_contradicts_itself_is_no_fault_of_the_program() -> None:
    good = report("g", purpose="preflight", operator=EQUAL)
    bad = report("x", again="y", purpose="preflight", repeats=False, operator=BAD)
    (found,) = detected([good, bad, good, good])
    assert (found.kind, found.ranks, found.cause) == ("cross_rank_recompute", (1,), "machine")


@pytest.mark.parametrize("at", [0, 1, None])
@pytest.mark.parametrize("purpose", ["preflight", "scheduled"])
@pytest.mark.parametrize("apart", [False, True])
def test_of_two_replicas_the_one_that_contradicts_itself_is_named(at: int | None, purpose: str, apart: bool) -> None:
    """Also after their parameters have parted; what else differs then is an effect."""
    other = wrong("", "", "dd", "cc", "0") if apart else BAD
    of = [{"contradicts": ["gradient of activation", "down", "9"]} if n == at else {} for n in (0, 1)]
    bodies = [report("ab"[n], operator=[EQUAL, other][n], purpose=purpose, **of[n]) for n in (0, 1)]
    detector = CrossRankRecomputeDetector(Job(2))
    if apart:
        detector.observe(TIE, 0.0)
    for rank, body in enumerate(bodies):
        detector.take(Message("cross_rank_recompute", rank, 7, body), 0.0)
    findings = detector.detect(0.0)
    if at is None and apart:
        assert findings == []
        return
    (found,) = findings
    severity = "confirmed" if at is not None and not apart else "suspect"
    assert (found.severity, found.ranks) == (severity, (0, 1) if at is None else (at,))
    assert found.cause == "machine"
    if at is not None:
        assert (found.stage, found.tensor) == ("gradient of activation", "down")
        assert "it repeats: a defect of this machine" in found.sentence


@pytest.mark.parametrize("compiled", [False, True])
def test_a_contradiction_in_compiled_code_accuses_no_machine(compiled: bool) -> None:
    healthy = {"purpose": "scheduled", "of": 0, "count": 9, "repeats": True, **({"compiled": True} if compiled else {})}
    bodies = [{**healthy, "work": f"{rank} of 2"} for rank in range(2)]
    bodies[1]["contradicts"] = ["activation", "up", "7"]
    (alone,) = detected(bodies)
    (peers,) = detected([report("a"), report("b", contradicts=bodies[1]["contradicts"], **healthy | {"work": ""})])
    for found in (alone, peers):
        assert (found.ranks, found.cause) == ((1,), "unknown" if compiled else "machine")


@pytest.mark.parametrize(
    ("at", "named"), [({1: "7"}, (1,)), ({1: "7", 3: "9"}, (1,)), ({1: "7", 3: "7"}, ()), ({}, ())], ids=str
)
def test_without_peers_the_rank_that_contradicts_itself_first_is_a_suspect(
    at: dict[int, str], named: tuple[int, ...]
) -> None:
    healthy = {"purpose": "scheduled", "of": 0, "count": 9, "repeats": True}
    bodies = [{**healthy, "work": f"{rank} of 4"} for rank in range(4)]
    for rank, number in at.items():
        bodies[rank]["contradicts"] = ["activation", f"up{number}", number]
    found = detected(bodies)
    assert [(each.severity, each.ranks, each.tensor, each.cause) for each in found] == (
        [("suspect", named, "up7", "machine")] if named else []
    )


def test_missing_ranks_are_waited_for_and_findings_are_reported_once() -> None:
    detector = CrossRankRecomputeDetector(Job(4))
    bodies = [report("g"), report("x"), report("g")]
    for rank, body in enumerate(bodies):
        detector.take(Message("cross_rank_recompute", rank, 7, body), 1.0)
    assert detector.detect(2.0) == []
    (found,) = [*detector.detect(2.0 + PATIENCE), *detector.detect(2.0 + PATIENCE + WAIT)]
    assert found.ranks == (1,)
    assert found.evidence["ranks that reported"] == 3
    for rank, body in enumerate(bodies):
        detector.take(Message("cross_rank_recompute", rank, 107, body), 99.0)
    assert detector.finish(99.0) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"purpose": "x"},
        {"once": 3},
        {"once": [["a"]]},
        {"unrepeated": 3},
        {"unrepeated": ["a"]},
        {"contradicts": "up"},
        {"contradicts": ["activation", "up", "-1"]},
        {"operator": ["a"]},
        {"operator": [*EQUAL[:4], "-1"]},
        {"first": "1"},
        {"repeats": 1},
        {"work": 1},
    ],
)
def test_messages_that_somebody_else_wrote_are_left_out(changed: dict[str, Any]) -> None:
    detector = CrossRankRecomputeDetector(Job(2))
    detector.take(Message("cross_rank_recompute", 0, 7, {**report("a"), **changed}), 0.0)
    assert detector.finish(99.0) == []


def test_votes() -> None:
    assert groups({0: "a", 1: "b", 2: "a"}) == ((0, 2), (1,))
    assert minority([(0, 2), (1,)]) == (1,)
    assert minority([(0,), (1,)]) == ()
    assert minority([(0, 1), (2,), (3,)]) == (), "half is no majority"
    assert minority([(0, 1, 2)]) == ()
    assert classes({0: "a", 1: "b", 2: "a"}) == [[0, 2], [1]]
    rows = {0: [1, 2, 3], 1: [1, 2, 3], 2: [1, 5, 3], 3: [1, 5]}
    assert first_difference(rows, [[0, 1], [2, 3]]) == 2
    assert first_difference(rows, [[0, 1, 2, 3]]) == 1
    assert first_difference(rows, [[0, 1], [2], [3]]) is None


def test_every_window_has_one_step_and_every_share_its_steps() -> None:
    places = [place(0, window, 100) for window in range(200)]
    assert set(places) <= set(range(100))
    assert len(set(places)) > 50
    assert place(1, 0, 100) == place(1, 0, 100)
    assert all(chosen(0, step, 100) for step in range(1, 500))
    assert not any(chosen(0, step, 0) for step in range(1, 500))
    assert 300 < sum(chosen(0, step, 10) for step in range(1, 4001)) < 500


@pytest.mark.parametrize(
    ("third", "words"), [("b", "struck once"), ("a", "in the repetition"), ("c", "this machine is unstable")]
)
def test_same_rank_recomputes(third: str, words: str) -> None:
    detector = SameRankRecomputeDetector(Job(4))
    body = {"phase": "activation", "tensor": "up", "once": "a", "again": "b", "third": third, "off": "", "call": 1}
    detector.take(Message("same_rank_recompute", 2, 9, body), 0.0)
    detector.take(Message("same_rank_recompute", 3, 9, {**body, "tensor": 3}), 0.0)
    (found,) = detector.detect(0.0)
    assert (found.kind, found.severity, found.ranks, found.step, found.tensor) == (
        "same_rank_recompute",
        "suspect",
        (2,),
        9,
        "up",
    )
    assert words in found.sentence
    assert found.cause == "machine"
    detector.job.explain(2, "its settings.mkldnn differs")
    for step, more in ((10, {}), (11, {"compiled": True})):
        detector.take(Message("same_rank_recompute", 2, step, {**body, **more}), 0.0)
        (explained,) = detector.detect(0.0)
        assert explained.cause == "unknown"
        detector.job.explanations.clear()
    for rank in range(4):
        detector.take(Message("same_rank_recompute", rank, 10, {**body, "off": "differs on most ranks"}), 0.0)
    (found,) = detector.detect(0.0)
    assert (found.kind, found.ranks) == ("nondeterminism", ())


@pytest.mark.parametrize(("accused", "named"), [(2, [2]), (None, []), (0, [])])
def test_ranks_that_share_what_has_changed_are_not_accused_of_it(accused: int | None, named: list[int]) -> None:
    """Rank 0 has not differed, or is not here any more."""
    job = Job(4)
    detector = SameRankRecomputeDetector(job)
    body = {"phase": "activation", "tensor": "up", "once": "a", "again": "b", "third": "b", "alike": 3}
    for rank in (1, 2, 3):
        detector.take(Message("same_rank_recompute", rank, 9, body), 0.0)
    detector.take(Message("same_rank_recompute", 1, 9, {**body, "alike": "3"}), 0.0)
    assert [finding.ranks for finding in detector.detect(0.0)] == [(1,)], "no number: a rank alone"
    if accused is not None:
        detector.observe(suspect("at_rest", accused), 1.0)
    found = detector.detect(1.0) or [*detector.finish(2.0), *detector.detect(2.0)]
    assert [rank for finding in found for rank in finding.ranks] == named
    assert [finding.severity for finding in found] == ([] if accused == 0 else ["suspect" if named else "note"])


def suspect(kind: Any, rank: int, step: int | None = 9, **more: Any) -> Finding:
    return Finding(kind, "suspect", "x", ranks=(rank,), step=step, **more)


TIE = Finding("bits", "suspect", "x", ranks=(0, 1), step=9, groups=((0,), (1,)), stage="parameter", tensor="w")

GIVEN_OTHERS = {"inputs of the operator": "different"}
OF_ONE_DIGEST = [suspect("bits", 1, 8, stage="parameter"), suspect("at_rest", 1, evidence={SINCE: 8})]


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ([suspect("bits", 1, groups=((0, 2, 3), (1,)))], None),
        ([suspect("bits", 1), suspect("bits", 1, 10)], None),
        ([suspect("bits", 1), suspect("cross_rank_recompute", 1, 20, cause="machine")], 1),
        ([suspect("bits", 1), suspect("cross_rank_recompute", 2, 20)], None),
        ([suspect("bits", 1), suspect("cross_rank_recompute", 1, 500)], None),
        ([suspect("at_rest", 2, cause="machine"), suspect("collective", 2)], 2),
        ([suspect("hang", 3, None), suspect("dead", 3, None)], 3),
        ([suspect("hang", 3, None), suspect("bits", 3)], None),
        ([suspect("slow", 3), suspect("bits", 3)], None),
        ([TIE], None),
        ([TIE, suspect("at_rest", 1, 9, cause="machine")], 1),
        ([TIE, TIE], None),
    ],
)
def test_two_independent_facts_confirm_a_fault(facts: list[Finding], named: int | None) -> None:
    diagnosis = Diagnosis(Job(4), raises=True)
    for fact in facts:
        diagnosis.observe(fact, 0.0)
    found = diagnosis.detect(0.0)
    assert [finding.ranks for finding in found] == ([] if named is None else [(named,)])
    assert all(finding.severity == "confirmed" for finding in found)
    orders = [message.kind for _, message in diagnosis.job.orders]
    assert orders.count("cross_rank_recompute") == sum(
        fact.kind in ("bits", "at_rest", "collective", "same_rank_recompute") for fact in facts
    )
    for finding in found:
        diagnosis.observe(finding, 1.0)
        diagnosis.observe(facts[0], 1.0)  # nothing new
        assert diagnosis.detect(1.0) == []
        stops = [message for _, message in diagnosis.job.orders if message.kind == "stop"]
        assert [message.body["sentence"] for message in stops] == (
            [f"step {finding.step}: {finding.sentence}"] if finding.kind not in ("hang", "dead") else []
        )


def test_a_cross_rank_recompute_that_was_ordered_and_finds_nothing_says_that_the_fault_struck_once() -> None:
    diagnosis = Diagnosis(Job(2))
    diagnosis.observe(TIE, 0.0)
    ((ranks, order),) = diagnosis.job.orders
    assert (ranks, order.kind, order.body) == ((0, 1), "cross_rank_recompute", {"number": 1})
    equal = {"purpose": "ordered", "of": 0, "work": "", "count": 9, "repeats": True}
    diagnosis.take(Message("cross_rank_recompute", 0, 16, equal), 0.0)
    assert diagnosis.detect(0.0) == []
    diagnosis.take(Message("cross_rank_recompute", 1, 16, equal), 0.0)
    (found,) = diagnosis.detect(0.0)
    assert (found.severity, found.step) == ("note", 16)
    assert "does not repeat" in found.sentence


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        # The state after the update of step 8 was hashed once, for both.
        ([suspect("bits", 1, 8, stage="parameter"), suspect("at_rest", 1, evidence={SINCE: 8})], False),
        ([suspect("bits", 1, 8, stage="gradient"), suspect("at_rest", 1, evidence={SINCE: 8})], True),
        ([suspect("bits", 1, 9, stage="parameter"), suspect("at_rest", 1, evidence={SINCE: 8})], True),
        ([suspect("bits", 1, 8, stage="parameter"), suspect("at_rest", 1, evidence={SINCE: None})], True),
        # One of three facts depends on another one.
        ([*OF_ONE_DIGEST, suspect("same_rank_recompute", 1)], True),
        ([*OF_ONE_DIGEST, suspect("cross_rank_recompute", 1, evidence=GIVEN_OTHERS, groups=((0, 2), (1,)))], False),
        # What a rank computes with another state is an effect of it.
        ([suspect("bits", 1), suspect("cross_rank_recompute", 1, evidence=GIVEN_OTHERS, groups=((0, 2), (1,)))], False),
        ([suspect("bits", 1), suspect("cross_rank_recompute", 1, groups=((0, 2), (1,)))], True),
        ([TIE, suspect("cross_rank_recompute", 1, evidence={**GIVEN_OTHERS, "contradicts itself": True})], True),
        # The process table was read for both.
        ([suspect("dead", 1), suspect("stopped", 1)], False),
        ([suspect("dead", 1), suspect("hang", 1)], True),
    ],
)  # fmt: skip
def test_facts_that_one_error_explains_confirm_nothing(facts: list[Finding], named: bool) -> None:
    for order in (facts, facts[::-1]):
        diagnosis = Diagnosis(Job(4))
        for fact in order:
            diagnosis.observe(fact, 0.0)
        assert [finding.ranks for finding in diagnosis.detect(0.0)] == [(1,)] * named


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_what_may_be_an_effect_waits_for_other_checks(apart: bool, ends: bool) -> None:
    detector = CrossRankRecomputeDetector(Job(4))
    good, effect = report("g", operator=EQUAL), report("x", operator=wrong("", "", "dd", "cc", "0"))
    for rank, body in enumerate([good, effect, good, good]):
        detector.take(Message("cross_rank_recompute", rank, 16, body), 0.0)
    assert detector.detect(0.0) == []
    if apart:
        detector.observe(suspect("bits", 1), 1.0)
    if ends:
        assert detector.finish(1.0) == []
    found = detector.detect(1.0 if ends else WAIT)
    assert [finding.ranks for finding in found] == [(1,)] * (not apart and not ends)
    (why,) = detector.job.coverage.to_dict().get("cross_rank_recompute", {"unseen": ["nothing"]})["unseen"]
    assert why == (
        "ranks whose state is known to differ compute with it" if apart
        else "the run ended before it was known whether ranks are equal" if ends else "nothing"
    )  # fmt: skip


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("known", [False, True])
def test_ranks_whose_state_is_known_to_differ_are_not_accused_of_the_effect(known: bool, world: int) -> None:
    good, effect = report("g", operator=EQUAL), report("x", operator=wrong("", "", "dd", "cc", "0"))
    job = Job(world)
    detector = CrossRankRecomputeDetector(job)
    if known:
        detector.observe(suspect("at_rest", 1), 0.0)
    for rank, body in enumerate([good, effect, good, good][:world]):
        detector.take(Message("cross_rank_recompute", rank, 16, body), 0.0)
    assert [finding.ranks for finding in (*detector.detect(0.0), *detector.detect(WAIT))] == (
        [] if known else [(1,) if world == 4 else (0, 1)]
    )
    assert bool(job.coverage.to_dict()) == known


@pytest.mark.parametrize(("apart", "named"), [(3, []), (2, []), (1, []), (None, [(0, 1, 2, 3)])])
def test_ranks_that_gather_parameters_of_a_rank_that_is_known_to_differ_show_the_effect_too(
    apart: int | None, named: list[tuple[int, ...]]
) -> None:
    values = [report(value, operator=wrong("", "", value, value, "0")) for value in ("gg", "gg", "xx", "xx")]
    detector = CrossRankRecomputeDetector(Job(4))
    if apart is not None:
        detector.observe(suspect("bits", apart), 0.0)
    for rank, body in enumerate(values):
        detector.take(Message("cross_rank_recompute", rank, 16, body), 0.0)
    assert [finding.ranks for finding in (*detector.detect(0.0), *detector.detect(WAIT))] == named


def test_another_rank_than_the_one_that_is_known_to_differ_is_accused() -> None:
    good, bad = report("g", operator=EQUAL), report("x", operator=wrong("", "", "dd", "cc", "0"))
    detector = CrossRankRecomputeDetector(Job(4))
    detector.observe(suspect("at_rest", 1), 0.0)
    for rank, body in enumerate([good, good, good, bad]):
        detector.take(Message("cross_rank_recompute", rank, 16, body), 0.0)
    assert [finding.ranks for finding in (*detector.detect(0.0), *detector.detect(WAIT))] == [(3,)]
