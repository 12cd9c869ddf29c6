"""Judges of bits, by messages that are made up: who is named, who is not, and what nobody can say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dash_guard.checks.digests import Labels, Leaves
from dash_guard.detectors import all as all_judges
from dash_guard.detectors.doors import _held
from dash_guard.detectors.judge import Job
from dash_guard.detectors.promises import AGREED
from dash_guard.detectors.verdicts import independent
from dash_guard.report.findings import Finding
from dash_guard.shared.class_names import members, spelled
from dash_guard.shared.roots import REDUCTIONS, SETTING, STAGES, WHICH
from dash_guard.transport.messages import Message, decode


class Court:
    """Judges of a made-up run, and what they say."""

    def __init__(self, world: int) -> None:
        self.world, self.job, self.now, self.found = world, Job(world), 0.0, list[Finding]()
        self.judges = [kind(self.job) for kind in all_judges.BITS]

    def hear(self, *messages: Message) -> None:
        for message in messages:
            message = decode(message.encode(), self.world)
            for judge in self.judges:
                if message.kind in judge.kinds:
                    judge.take(message, self.now)

    def turn(self, seconds: float = 1.0) -> list[Finding]:
        self.now += seconds
        found = [finding for judge in self.judges for finding in judge.judge(self.now)]
        self.found += found
        for finding in found:
            for judge in self.judges:
                judge.heed(finding, self.now)
        return found

    def asked(self) -> list[tuple[tuple[int, ...], Message]]:
        asked, self.job.orders[:] = list(self.job.orders), []
        return asked


def roots(rank: int, step: int, value: str = "", stage: str = "parameter", of: str = "") -> Message:
    """Equal roots, except for a stage with another value."""
    mine = ["0" * WHICH + (value if value and each == stage else f"{step:016x}") for each in STAGES]
    return Message("bits", rank, step, {"roots": {of or "0-3": {str(step): mine}}})


def leaves(rank: int, step: int, values: dict[str, str], stage: str = "parameter", of: str = "0-3") -> Message:
    body = {"of": step, "stage": stage, "path": "", "below": values, "class": of}
    return Message("bits", rank, step + 1, body)


def test_the_minority_is_named_with_the_first_tensor() -> None:
    court = Court(4)
    court.hear(*(roots(rank, 7, "bad" if rank == 2 else "") for rank in range(4)))
    assert court.turn() == []
    ((ranks, order),) = court.asked()
    assert set(ranks) == {0, 1, 2}
    assert order.body == {"step": 7, "class": "0-3", "stage": "parameter", "path": ""}
    for rank in ranks:
        court.hear(leaves(rank, 7, {"a": "1", "b": "9" if rank == 2 else "2", "c": "8" if rank == 2 else "3"}))
    (found,) = court.turn()
    assert (found.kind, found.severity, found.ranks, found.step) == ("bits", "suspect", (2,), 7)
    assert (found.stage, found.tensor, found.groups) == ("parameter", "b", ((0, 1, 3), (2,)))
    for step in (8, 9):  # effects of what is known
        court.hear(*(roots(rank, step, "bad" if rank == 2 else "") for rank in range(4)))
        assert court.turn() == []
    court.hear(*(roots(rank, 10, "bad" if rank in (1, 2) else "") for rank in range(4)))
    assert court.turn() == []  # of 2 and 2
    (found,) = court.turn(60.0)
    assert found.ranks == (0, 1, 2, 3)


def test_the_largest_group_is_no_majority() -> None:
    court = Court(4)
    court.hear(*(roots(rank, 7, ["", "", "bad", "worse"][rank]) for rank in range(4)))
    court.turn()
    (found,) = court.turn(60.0)
    assert (found.ranks, found.groups) == ((0, 1, 2, 3), ((0, 1), (2,), (3,)))


def test_a_stage_before_another_and_a_step_before_another() -> None:
    court = Court(4)
    for step in (4, 3):  # messages of several steps come together
        for rank in range(4):
            court.hear(roots(rank, step, "bad" if rank == 1 else "", "gradient" if step == 3 else "buffer"))
    court.turn()
    (found,) = court.turn(60.0)
    assert (found.step, found.stage, found.ranks, found.tensor) == (3, "gradient", (1,), "")


def test_a_node_is_followed_down_to_its_leaf() -> None:
    court = Court(4)
    court.hear(*(roots(rank, 2, "bad" if rank == 0 else "") for rank in range(4)))
    names = tuple(f"layers.{layer}.w{n}" for layer in range(30) for n in range(30))
    rows = [bytes([n % 251]) * 16 for n in range(len(names))]
    wrong = rows[:]
    wrong[777] = bytes(16)
    tables = [Leaves(Labels(names, ("float32 [2]",) * len(names)), b"".join(each)) for each in (wrong, rows)]
    assert tables[0].root() != tables[1].root()
    for _ in range(3):
        court.turn()
        for ranks, order in court.asked():
            for rank in ranks:
                below = tables[min(rank, 1)].below(order.body["path"])
                body = {**order.body, "of": 2, "below": below}
                court.hear(Message("bits", rank, 3, body))
    (found,) = court.found
    assert (found.ranks, found.tensor) == ((0,), names[777])


@pytest.mark.parametrize("accused", [None, 0, 2])
def test_two_copies_are_a_tie_unless_state_at_rest_decides(accused: int | None) -> None:
    court = Court(4)
    if accused is not None:
        body = {"when": "begin", "tensors": 9, "changed": [["parameter", "w"]], "changes": 1}
        court.hear(
            *(Message("rest", r, 5, body if r == accused else {"when": "begin", "tensors": 9}) for r in range(4))
        )
        (found,) = court.turn()
        assert (found.kind, found.ranks, found.tensor, found.stage) == ("rest", (accused,), "parameter w", "rest")
    court.hear(*(roots(rank, 5, "bad" if rank == 2 else "", of="0-2:2") for rank in (0, 2)))
    court.turn()
    (found,) = court.turn(60.0)
    assert found.ranks == ((accused,) if accused is not None else (0, 2))
    assert ("no majority" in found.sentence) is (accused is None)


def test_roots_that_differ_over_equal_leaves_name_nobody() -> None:
    court = Court(4)
    court.hear(*(roots(rank, 7, "bad" if rank == 2 else "") for rank in range(4)))
    court.turn()
    court.hear(*(leaves(rank, 7, {"a": "1"}) for rank in range(4)))
    (found,) = court.turn()
    assert (found.kind, found.severity, found.ranks) == ("guard", "note", ())


def test_ranks_with_different_tensors_are_not_compared() -> None:
    """Optimizers that divide their state among replicas."""
    court = Court(4)
    for rank in range(4):
        mine = [f"{0:06x}{9:016x}"] * (len(STAGES) - 1) + [f"{rank:06x}{rank:016x}"]
        court.hear(Message("bits", rank, 3, {"roots": {"0-3": {"3": mine}}}))
    assert court.turn() == []
    assert court.asked() == []
    assert (
        "ranks of a class that do not have the same tensors of a stage"
        in court.job.coverage.to_dict()["bits"]["unseen"]
    )


def test_a_gap_is_unverified() -> None:
    court = Court(4)
    court.hear(*(roots(rank, 3) for rank in range(3)))
    assert court.turn() == []
    assert court.job.coverage.to_dict() == {}
    court.turn(60.0)
    unseen = court.job.coverage.to_dict()["bits"]["unseen"]
    assert unseen == {"roots of 1 of 4 ranks of a class have not come": 1}
    assert court.found == []


def settings(rank: int, step: int, value: str = "", which: str = "0" * WHICH, of: str = "0-3") -> Message:
    """Roots of what optimizers are told alone."""
    mine = [which + (value or "5").rjust(16, "0") if stage == SETTING else "" for stage in STAGES]
    return Message("bits", rank, step, {"roots": {of: {str(step): mine}}})


def test_who_has_agreed_must_go_on_to_agree() -> None:
    court = Court(4)
    for step in range(1, AGREED + 1):
        court.hear(*(settings(rank, step) for rank in range(4)))
        assert court.turn() == []
    court.hear(*(settings(rank, 3, "9" if rank == 1 else "") for rank in range(4)))
    court.turn()
    assert len(court.asked()) == 1
    for rank in (0, 1, 2):
        court.hear(leaves(rank, 3, {"SGD.0 lr": str(rank == 1), "SGD.0 momentum": "0"}, SETTING))
    (found,) = court.turn()
    assert (found.severity, found.ranks, found.stage, found.tensor) == ("suspect", (1,), SETTING, "SGD.0 lr")
    assert found.advice
    for step in (4, 5):  # known
        court.hear(*(settings(rank, step, "9" if rank == 1 else "") for rank in range(4)))
        assert court.turn() == []
    court.hear(*(settings(rank, 6) for rank in range(4)))
    court.hear(*(settings(rank, 7, "9" if rank == 3 else "") for rank in range(4)))
    court.turn()
    (found,) = court.turn(60.0)
    assert (found.ranks, found.step) == ((3,), 7)


@pytest.mark.parametrize("first", [1, 2])
def test_who_has_never_agreed_is_not_accused(first: int) -> None:
    court = Court(4)
    for step in range(1, first):
        court.hear(*(settings(rank, step) for rank in range(4)))
    for step in range(first, 6):
        court.hear(*(settings(rank, step, str(step * rank)) for rank in range(4)))
        court.turn()
    (found,) = [*court.found, *court.turn(60.0)][:1]
    assert (found.severity, found.cause, found.step) == ("note", "program", first)
    assert [finding for finding in court.found if finding.severity != "note"] == []
    assert len(court.found) == 1
    assert "settings of optimizers that ranks have for themselves" in court.job.coverage.to_dict()["bits"]["unseen"]


def test_other_settings_must_be_agreed_on_anew() -> None:
    """A second optimizer steps for the first time in step 4, and is told something else on each rank."""
    court = Court(4)
    for step in range(1, 4):
        court.hear(*(settings(rank, step) for rank in range(4)))
    court.hear(*(settings(rank, 4, str(rank), "f" * WHICH) for rank in range(4)))
    court.hear(*(settings(rank, 5, "", "ab"[rank % 2] * WHICH) for rank in range(4)))  # ranks have different ones
    court.turn()
    court.turn(60.0)
    assert [finding.severity for finding in court.found] == ["note"]


@pytest.mark.parametrize("pair_first", [True, False])
def test_what_an_optimizer_was_told_explains_what_two_copies_have(pair_first: bool) -> None:
    court = Court(4)
    for step in range(1, 4):
        wrong = "9" if step == 3 else ""
        shards = [
            roots(rank, step, wrong if rank == 0 else "", of="0,2" if rank % 2 == 0 else "1,3") for rank in range(4)
        ]
        told = [settings(rank, step, wrong if rank == 0 else "") for rank in range(4)]
        court.hear(*(shards if pair_first else told))
        court.turn()
        court.hear(*(told if pair_first else shards))
        court.turn()
    for _ in range(3):
        court.turn(30.0)
    assert {finding.ranks for finding in court.found} == {(0,)}
    assert court.found[0].stage == SETTING


def test_what_an_optimizer_was_told_is_no_fact_about_a_machine() -> None:
    told = Finding("bits", "suspect", "", ranks=(1,), step=7, stage=SETTING, groups=((0, 2, 3), (1,)))
    door = Finding("door", "suspect", "", ranks=(1,), step=7, stage="gradient")
    assert not independent(told, door)
    assert independent(replace(told, stage="gradient"), door)


def test_of_two_copies_one_that_is_known_to_differ_explains_it() -> None:
    court = Court(4)
    court.hear(*(roots(rank, 3, "bad" if rank == 2 else "", "optimizer state") for rank in range(4)))
    court.hear(*(roots(rank, 4, "bad" if rank == 2 else "", of="0,2") for rank in (0, 2)))
    for _ in range(3):
        court.turn(30.0)
    assert [finding.ranks for finding in court.found] == [(2,)]
    court.hear(*(roots(rank, 5, "bad" if rank == 1 else "", of="1,3") for rank in (1, 3)))
    for _ in range(3):
        court.turn(30.0)
    assert [finding.ranks for finding in court.found] == [(2,), (1, 3)]


def rest(rank: int, step: int, world: int, kind: str, ranks: tuple[int, ...]) -> Message:
    mine = {kind: [["parameter", "w"]], {"changed": "changes", "written": "writes"}[kind]: 1} if rank in ranks else {}
    return Message("rest", rank, step, {"when": "begin", "tensors": 20, **mine})


@pytest.mark.parametrize(
    ("kind", "world", "ranks", "severity", "named", "cause"),
    [
        ("changed", 4, (3,), "suspect", (3,), "machine"),
        ("changed", 4, (0, 1, 2, 3), "note", (), "program"),
        ("written", 4, (0, 1, 2, 3), "note", (), "program"),
        ("written", 4, (1,), "suspect", (1,), "program"),
        ("written", 1, (0,), "note", (), "program"),
        ("changed", 1, (0,), "suspect", (0,), "machine"),
    ],
)
def test_state_at_rest(
    kind: str, world: int, ranks: tuple[int, ...], severity: str, named: tuple[int, ...], cause: str
) -> None:
    court = Court(world)
    court.hear(*(rest(rank, 2, world, kind, ()) for rank in range(world)))
    assert court.turn() == []
    *others, last = (rest(rank, 3, world, kind, ranks) for rank in range(world))
    court.hear(*others)
    if world > 1:
        assert court.turn() == []  # it may be that all ranks did so
    court.hear(last)
    (found,) = court.turn()
    assert (found.severity, found.ranks, found.cause, found.step) == (severity, named, cause, 3)
    court.hear(*(rest(rank, 4, world, kind, ranks) for rank in range(world)))
    assert len(court.turn()) == (severity == "suspect")  # a note is made once


def test_what_a_lone_rank_writes_in_every_step_is_the_program() -> None:
    court = Court(1)
    for step in range(2, 20):
        court.hear(rest(0, step, 1, "changed", (0,)))
        court.turn()
    assert [found.severity for found in court.found] == ["suspect", "suspect", "note"]


@pytest.mark.parametrize(
    ("wrong", "named"), [({1: (0,)}, (1,)), ({0: (2,), 1: (2,), 2: (2,), 3: (2,)}, (2,)), ({}, ())], ids=str
)
def test_what_was_gathered_is_what_the_owners_hold(wrong: dict[int, tuple[int, ...]], named: tuple[int, ...]) -> None:
    own = [f"{rank:032x}" for rank in range(4)]
    court = Court(4)
    for rank in range(4):
        mine = ["f" * 32 if owner in wrong.get(rank, ()) else own[owner] for owner in range(4)]
        court.hear(Message("doors", rank, 6, {"groups": {"0-3": {"6": [_held(mine), own[rank]]}}}))
    assert court.turn() == []
    for ranks, order in court.asked():
        for rank in ranks:
            mine = ["f" * 32 if owner in wrong[rank] else own[owner] for owner in range(4)]
            court.hear(Message("doors", rank, 7, {"of": order.body["step"], "group": "0-3", "segments": mine}))
    found = court.turn()
    assert [each.ranks for each in found] == ([named] if named else [])
    assert all((each.kind, each.step) == ("door", 6) for each in found)


@pytest.mark.parametrize("tensor", [f"SGD {REDUCTIONS}", "SGD.0 lr"])
def test_ranks_that_count_steps_differently_are_not_compared_step_by_step(tensor: str) -> None:
    court = Court(4)
    told = Finding("bits", "suspect", "", ranks=(1,), step=5, stage=SETTING, tensor=tensor, groups=((0, 2, 3), (1,)))
    for judge in court.judges:
        judge.heed(told, 0.0)
    for rank in range(4):
        court.hear(Message("doors", rank, 6, {"groups": {"0-3": {"6": [_held(["f" * 32] * 4), f"{rank:032x}"]}}}))
        court.hear(Message("wires", rank, 6, {"wires": {"all_reduce 0-3": {"6": [str(rank == 1), ""]}}}))
    court.turn()
    court.turn(60.0)
    assert {finding.kind for finding in court.found} == (set() if REDUCTIONS in tensor else {"door"})


def learn(rank: int, step: int, values: dict[str, str]) -> Message:
    body: dict[str, Any] = {"stage": "parameter", "first": 0, "values": "".join(values.values())}
    return Message("bits", rank, step, {**body, "names": list(values)} if step == 1 else body)


def test_classes_are_learned_from_values_that_change() -> None:
    court = Court(4)
    for step in range(1, 9):
        for rank in range(4):
            court.hear(learn(rank, step, {
                "equal": f"{step:08x}", "pairs": f"{step:04x}{rank // 2:04x}", "own": f"{step:04x}{rank:04x}",
                "constant": "0" * 8, "late": f"{step if step > 6 else 0:08x}",
            }))  # fmt: skip
        court.turn()
    learned = [(ranks, order.body["classes"]) for ranks, order in court.asked()]
    assert learned == [
        ((0, 1, 2, 3), {"~0-3": ["equal"]}), ((0, 1), {"~0-1": ["pairs"]}), ((2, 3), {"~2-3": ["pairs"]}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((0,), "0"), ((0, 1, 2, 3), "0-3"), ((1, 5, 9, 13), "1-13:4"), ((0, 1, 8, 9, 16, 17), "0-1,8-9,16-17"),
     ((2, 7), "2,7"), ((0, 1, 5), "0-1,5"), ((0, 2, 3, 4), "0,2-4")],
)  # fmt: skip
def test_names_of_classes(ranks: tuple[int, ...], text: str) -> None:
    assert spelled(ranks) == text
    assert members(text, 32) == ranks


@pytest.mark.parametrize("text", ["", "0-", "3-1", "0-40", "0-3:0", "a", "0,,1", "1" * 500, "-1"])
def test_names_that_are_no_class(text: str) -> None:
    assert members(text, 32) is None


@pytest.mark.parametrize("body", [
    {"roots": {"0-3": {"1": ["a"]}}}, {"roots": {"0-3": 1}}, {"roots": {"9": {"1": [""] * 4}}}, {"roots": []},
    {"path": 1}, {"stage": "parameter", "first": -1, "values": "0", "names": ["a"]}, {"values": 1}, {"below": []},
    {"groups": {"0-3": {"1": ["a", "b"]}}}, {"groups": {"x": {}}}, {"segments": [1], "of": "1"}, {"when": 3},
    {"when": "begin", "changed": [1], "changes": 1}, {"when": "begin", "changed": [["a"]], "changes": True},
])  # fmt: skip
def test_messages_that_somebody_made_up(body: dict[str, Any]) -> None:
    court = Court(4)
    court.hear(*(Message(kind, 1, 1, body) for kind in ("bits", "rest", "doors")))
    court.turn()
    assert court.turn(60.0) == []
