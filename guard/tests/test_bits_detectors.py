"""Detectors of bits, by messages that are made up: who is named, who is not, and what nobody can say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dash_guard.checks.digests import Labels, Leaves
from dash_guard.detectors import all as all_detectors
from dash_guard.detectors.detector import Job
from dash_guard.detectors.diagnosis import independent
from dash_guard.detectors.gathered_parameters import _held
from dash_guard.detectors.promises import AGREED
from dash_guard.report.findings import Finding
from dash_guard.shared.class_names import members, spelled
from dash_guard.shared.roots import REDUCTIONS, SETTING, STAGES, WHICH
from dash_guard.transport.messages import Message, decode


class Detectors:
    """Detectors of a made-up run, and what they say."""

    def __init__(self, world: int) -> None:
        self.world, self.job, self.now, self.found = world, Job(world), 0.0, list[Finding]()
        self.detectors = [kind(self.job) for kind in all_detectors.BITS]

    def send(self, *messages: Message) -> None:
        for message in messages:
            message = decode(message.encode(), self.world)
            for detector in self.detectors:
                if message.kind in detector.kinds:
                    detector.take(message, self.now)

    def turn(self, seconds: float = 1.0) -> list[Finding]:
        self.now += seconds
        found = [finding for detector in self.detectors for finding in detector.detect(self.now)]
        self.found += found
        for finding in found:
            for detector in self.detectors:
                detector.observe(finding, self.now)
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
    group = Detectors(4)
    group.send(*(roots(rank, 7, "bad" if rank == 2 else "") for rank in range(4)))
    assert group.turn() == []
    ((ranks, order),) = group.asked()
    assert set(ranks) == {0, 1, 2}
    assert order.body == {"step": 7, "class": "0-3", "stage": "parameter", "path": ""}
    for rank in ranks:
        group.send(leaves(rank, 7, {"a": "1", "b": "9" if rank == 2 else "2", "c": "8" if rank == 2 else "3"}))
    (found,) = group.turn()
    assert (found.kind, found.severity, found.ranks, found.step) == ("bits", "suspect", (2,), 7)
    assert (found.stage, found.tensor, found.groups) == ("parameter", "b", ((0, 1, 3), (2,)))
    for step in (8, 9):  # effects of what is known
        group.send(*(roots(rank, step, "bad" if rank == 2 else "") for rank in range(4)))
        assert group.turn() == []
    group.send(*(roots(rank, 10, "bad" if rank in (1, 2) else "") for rank in range(4)))
    assert group.turn() == []  # of 2 and 2
    (found,) = group.turn(60.0)
    assert found.ranks == (0, 1, 2, 3)


def test_frozen_parameters_that_differ_are_named_once_and_explain_no_later_fault() -> None:
    """A note where the program writes them; what else differs on the same ranks is a fault of its own."""
    group = Detectors(2)

    def send(step: int, bad: str, writes: int) -> None:
        for rank in range(2):
            message = roots(rank, step, "bad" if rank else "", bad, "0-1")
            message.body["frozen_writes"] = writes
            group.send(message)
        for rank in range(2):
            group.send(leaves(rank, step, {"w": str(rank)}, bad, "0-1"))

    send(2, "frozen parameter", 1)
    group.turn()
    send(2, "frozen parameter", 1)
    (found,) = group.turn(60.0)
    assert (found.severity, found.stage, found.tensor, found.cause) == ("note", "frozen parameter", "w", "program")
    assert "the program writes frozen parameters" in found.sentence
    send(3, "frozen parameter", 2)
    assert group.turn(60.0) == []
    send(4, "gradient", 2)
    group.turn(60.0)
    send(4, "gradient", 2)
    (found,) = group.turn(60.0)
    assert (found.severity, found.stage, found.ranks) == ("suspect", "gradient", (0, 1))


def test_frozen_parameters_that_nobody_writes_are_suspect() -> None:
    group = Detectors(3)
    group.send(*(roots(rank, 2, "bad" if rank == 2 else "", "frozen parameter", "0-2") for rank in range(3)))
    group.turn()
    group.send(*(leaves(rank, 2, {"w": str(rank == 2)}, "frozen parameter", "0-2") for rank in range(3)))
    (found,) = group.turn()
    assert (found.severity, found.ranks, found.tensor) == ("suspect", (2,), "w")


def test_the_largest_group_is_no_majority() -> None:
    group = Detectors(4)
    group.send(*(roots(rank, 7, ["", "", "bad", "worse"][rank]) for rank in range(4)))
    group.turn()
    (found,) = group.turn(60.0)
    assert (found.ranks, found.groups) == ((0, 1, 2, 3), ((0, 1), (2,), (3,)))


def test_a_stage_before_another_and_a_step_before_another() -> None:
    group = Detectors(4)
    for step in (4, 3):  # messages of several steps come together
        for rank in range(4):
            group.send(roots(rank, step, "bad" if rank == 1 else "", "gradient" if step == 3 else "buffer"))
    group.turn()
    (found,) = group.turn(60.0)
    assert (found.step, found.stage, found.ranks, found.tensor) == (3, "gradient", (1,), "")


def test_a_node_is_followed_down_to_its_leaf() -> None:
    group = Detectors(4)
    group.send(*(roots(rank, 2, "bad" if rank == 0 else "") for rank in range(4)))
    names = tuple(f"layers.{layer}.w{n}" for layer in range(30) for n in range(30))
    rows = [bytes([n % 251]) * 16 for n in range(len(names))]
    wrong = rows[:]
    wrong[777] = bytes(16)
    tables = [Leaves(Labels(names, ("float32 [2]",) * len(names)), b"".join(each)) for each in (wrong, rows)]
    assert tables[0].root() != tables[1].root()
    for _ in range(3):
        group.turn()
        for ranks, order in group.asked():
            for rank in ranks:
                below = tables[min(rank, 1)].below(order.body["path"])
                body = {**order.body, "of": 2, "below": below}
                group.send(Message("bits", rank, 3, body))
    (found,) = group.found
    assert (found.ranks, found.tensor) == ((0,), names[777])


@pytest.mark.parametrize("accused", [None, 0, 2])
def test_two_copies_are_a_tie_unless_state_at_rest_decides(accused: int | None) -> None:
    group = Detectors(4)
    if accused is not None:
        body = {"when": "begin", "tensors": 9, "changed": [["parameter", "w"]], "changes": 1, "one_bit": True}
        group.send(
            *(Message("at_rest", r, 5, body if r == accused else {"when": "begin", "tensors": 9}) for r in range(4))
        )
        (found,) = group.turn()
        assert (found.kind, found.ranks, found.tensor, found.stage) == ("at_rest", (accused,), "parameter w", "at rest")
    group.send(*(roots(rank, 5, "bad" if rank == 2 else "", of="0-2:2") for rank in (0, 2)))
    group.turn()
    (found,) = group.turn(60.0)
    assert found.ranks == ((accused,) if accused is not None else (0, 2))
    assert ("no majority" in found.sentence) is (accused is None)


def test_roots_that_differ_over_equal_leaves_name_nobody() -> None:
    group = Detectors(4)
    group.send(*(roots(rank, 7, "bad" if rank == 2 else "") for rank in range(4)))
    group.turn()
    group.send(*(leaves(rank, 7, {"a": "1"}) for rank in range(4)))
    (found,) = group.turn()
    assert (found.kind, found.severity, found.ranks) == ("guard", "note", ())


def test_ranks_with_different_tensors_are_not_compared() -> None:
    """Optimizers that divide their state among replicas."""
    group = Detectors(4)
    for rank in range(4):
        mine = [f"{0:06x}{9:016x}"] * (len(STAGES) - 1) + [f"{rank:06x}{rank:016x}"]
        group.send(Message("bits", rank, 3, {"roots": {"0-3": {"3": mine}}}))
    assert group.turn() == []
    assert group.asked() == []
    assert "ranks of a class that have different tensors of a stage" in group.job.coverage.to_dict()["bits"]["unseen"]


def test_a_gap_is_unverified() -> None:
    group = Detectors(4)
    group.send(*(roots(rank, 3) for rank in range(3)))
    assert group.turn() == []
    assert group.job.coverage.to_dict() == {}
    group.turn(60.0)
    unseen = group.job.coverage.to_dict()["bits"]["unseen"]
    assert unseen == {"roots of 1 of 4 ranks of a class have not arrived": 1}
    assert group.found == []


def settings(rank: int, step: int, value: str = "", which: str = "0" * WHICH, of: str = "0-3") -> Message:
    """Roots of optimizer settings alone."""
    mine = [which + (value or "5").rjust(16, "0") if stage == SETTING else "" for stage in STAGES]
    return Message("bits", rank, step, {"roots": {of: {str(step): mine}}})


def test_who_has_agreed_must_go_on_to_agree() -> None:
    group = Detectors(4)
    for step in range(1, AGREED + 1):
        group.send(*(settings(rank, step) for rank in range(4)))
        assert group.turn() == []
    group.send(*(settings(rank, 3, "9" if rank == 1 else "") for rank in range(4)))
    group.turn()
    assert len(group.asked()) == 1
    for rank in (0, 1, 2):
        group.send(leaves(rank, 3, {"SGD.0 lr": str(rank == 1), "SGD.0 momentum": "0"}, SETTING))
    (found,) = group.turn()
    assert (found.severity, found.ranks, found.stage, found.tensor) == ("suspect", (1,), SETTING, "SGD.0 lr")
    assert found.advice
    for step in (4, 5):  # known
        group.send(*(settings(rank, step, "9" if rank == 1 else "") for rank in range(4)))
        assert group.turn() == []
    group.send(*(settings(rank, 6) for rank in range(4)))
    group.send(*(settings(rank, 7, "9" if rank == 3 else "") for rank in range(4)))
    group.turn()
    (found,) = group.turn(60.0)
    assert (found.ranks, found.step) == ((3,), 7)


@pytest.mark.parametrize("first", [1, 2])
def test_who_has_never_agreed_is_not_accused(first: int) -> None:
    group = Detectors(4)
    for step in range(1, first):
        group.send(*(settings(rank, step) for rank in range(4)))
    for step in range(first, 6):
        group.send(*(settings(rank, step, str(step * rank)) for rank in range(4)))
        group.turn()
    (found,) = [*group.found, *group.turn(60.0)][:1]
    assert (found.severity, found.cause, found.step) == ("note", "program", first)
    assert [finding for finding in group.found if finding.severity != "note"] == []
    assert len(group.found) == 1
    assert "optimizer settings that each rank sets by itself" in group.job.coverage.to_dict()["bits"]["unseen"]


def test_other_settings_must_be_agreed_on_anew() -> None:
    """A second optimizer steps for the first time in step 4, and has other settings on each rank."""
    group = Detectors(4)
    for step in range(1, 4):
        group.send(*(settings(rank, step) for rank in range(4)))
    group.send(*(settings(rank, 4, str(rank), "f" * WHICH) for rank in range(4)))
    group.send(*(settings(rank, 5, "", "ab"[rank % 2] * WHICH) for rank in range(4)))  # ranks have different ones
    group.turn()
    group.turn(60.0)
    assert [finding.severity for finding in group.found] == ["note"]


@pytest.mark.parametrize("pair_first", [True, False])
def test_what_an_setting_of_an_optimizer_explains_what_two_copies_have(pair_first: bool) -> None:
    group = Detectors(4)
    for step in range(1, 4):
        wrong = "9" if step == 3 else ""
        shards = [
            roots(rank, step, wrong if rank == 0 else "", of="0,2" if rank % 2 == 0 else "1,3") for rank in range(4)
        ]
        setting_ = [settings(rank, step, wrong if rank == 0 else "") for rank in range(4)]
        group.send(*(shards if pair_first else setting_))
        group.turn()
        group.send(*(setting_ if pair_first else shards))
        group.turn()
    for _ in range(3):
        group.turn(30.0)
    assert {finding.ranks for finding in group.found} == {(0,)}
    assert group.found[0].stage == SETTING


def test_what_an_setting_of_an_optimizer_is_no_fact_about_a_machine() -> None:
    setting_ = Finding("bits", "suspect", "", ranks=(1,), step=7, stage=SETTING, groups=((0, 2, 3), (1,)))
    collective = Finding("collective", "suspect", "", ranks=(1,), step=7, stage="gradient")
    assert not independent(setting_, collective)
    assert independent(replace(setting_, stage="gradient"), collective)


def test_of_two_copies_one_that_is_known_to_differ_explains_it() -> None:
    group = Detectors(4)
    group.send(*(roots(rank, 3, "bad" if rank == 2 else "", "optimizer state") for rank in range(4)))
    group.send(*(roots(rank, 4, "bad" if rank == 2 else "", of="0,2") for rank in (0, 2)))
    for _ in range(3):
        group.turn(30.0)
    assert [finding.ranks for finding in group.found] == [(2,)]
    group.send(*(roots(rank, 5, "bad" if rank == 1 else "", of="1,3") for rank in (1, 3)))
    for _ in range(3):
        group.turn(30.0)
    assert [finding.ranks for finding in group.found] == [(2,), (1, 3)]


def at_rest(
    rank: int, step: int, kind: str, ranks: tuple[int, ...], number: int = 1, when: str = "begin", **more: Any
) -> Message:
    """What a rank says of a moment; kind "one bit": a change of a single bit."""
    name = kind.replace("one bit", "changed")
    tensors = [["parameter", f"w{n}" if n else "w"] for n in range(number)]
    mine = {name: tensors, {"changed": "changes", "written": "writes"}[name]: number} if rank in ranks else {}
    mine |= {"one_bit": True} if kind == "one bit" and mine else {}
    return Message("at_rest", rank, step, {"when": when, "tensors": 20, **mine, **more})


def end_of(step: int, world: int, **more: Any) -> list[Message]:
    return [Message("at_rest", rank, step, {"when": "update", "tensors": 20, **more}) for rank in range(world)]


@pytest.mark.parametrize(
    ("kind", "world", "ranks", "severity", "named", "cause"),
    [
        ("one bit", 4, (3,), "suspect", (3,), "machine"),
        ("changed", 4, (3,), "suspect", (3,), "unknown"),
        ("one bit", 4, (0, 1, 2), "note", (), "program"),
        ("changed", 4, (0, 1, 2, 3), "note", (), "program"),
        ("written", 4, (0, 1, 2, 3), "note", (), "program"),
        ("written", 4, (1,), "suspect", (1,), "program"),
        ("written", 1, (0,), "note", (), "program"),
        ("one bit", 1, (0,), "suspect", (0,), "machine"),
        ("changed", 1, (0,), "suspect", (0,), "unknown"),
    ],
)
def test_state_at_rest(
    kind: str, world: int, ranks: tuple[int, ...], severity: str, named: tuple[int, ...], cause: str
) -> None:
    group = Detectors(world)
    group.send(*(at_rest(rank, 2, kind, ()) for rank in range(world)))
    assert group.turn() == []
    *others, last = (at_rest(rank, 3, kind, ranks) for rank in range(world))
    group.send(*others)
    if world > 1:
        assert group.turn() == []  # it may be that all ranks did so
    group.send(last)
    if kind != "one bit":
        assert group.turn() == []  # it may be restored
        group.send(*end_of(3, world))
    (found,) = group.turn()
    assert (found.severity, found.ranks, found.cause, found.step) == (severity, named, cause, 3)
    assert ("machine" in found.advice + found.sentence) == (severity == "suspect" and kind != "written")
    group.send(*(at_rest(rank, 4, kind, ranks) for rank in range(world)), *end_of(4, world))
    assert len(group.turn()) == (severity == "suspect")  # a note is made once


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", ["changed", "one bit"])
def test_what_one_rank_writes_in_every_step_is_the_program_unless_it_is_a_single_bit(world: int, kind: str) -> None:
    group = Detectors(world)
    for step in range(2, 7):
        group.send(*(at_rest(rank, step, kind, (0,)) for rank in range(world)), *end_of(step, world))
        group.turn()
    severities = [found.severity for found in group.found if found.kind == "at_rest"]
    assert severities == (["suspect"] * 5 if kind == "one bit" else ["suspect", "suspect", "note"])


@pytest.mark.parametrize("kind", ["changed", "written"])
@pytest.mark.parametrize("restored", [False, True])
def test_what_a_rank_exchanges_and_restores_before_it_is_trained_is_a_note(kind: str, restored: bool) -> None:
    """As in an evaluation with averaged weights on rank 0."""
    group = Detectors(4)
    more = {"restored": True} if restored else {}
    for step in (3, 6):
        group.send(*(at_rest(rank, step, kind, (0,), 6) for rank in range(4)))
        assert group.turn() == []
        group.send(at_rest(0, step, kind, (0,), 6, "update", **more), *end_of(step, 4)[1:])
        group.turn()
    if restored:
        (found,) = group.found
        assert (found.severity, found.cause) == ("note", "program")
        assert "exchanged on rank 0" in found.sentence
    else:
        assert {found.ranks for found in group.found} == {(0,)}


@pytest.mark.parametrize(("number", "severity"), [(3, "suspect"), (14, "note")])
def test_more_than_half_of_the_tensors_do_not_change_in_memory(number: int, severity: str) -> None:
    group = Detectors(4)
    group.send(*(at_rest(rank, 3, "changed", (0,), number) for rank in range(4)), *end_of(3, 4))
    (found,) = group.turn()
    assert found.severity == severity


@pytest.mark.parametrize(
    ("wrong", "named"), [({1: (0,)}, (1,)), ({0: (2,), 1: (2,), 2: (2,), 3: (2,)}, (2,)), ({}, ())], ids=str
)
def test_what_was_gathered_is_what_the_owners_hold(wrong: dict[int, tuple[int, ...]], named: tuple[int, ...]) -> None:
    own = [f"{rank:032x}" for rank in range(4)]
    group = Detectors(4)
    for rank in range(4):
        mine = ["f" * 32 if owner in wrong.get(rank, ()) else own[owner] for owner in range(4)]
        group.send(Message("gathered_parameters", rank, 6, {"groups": {"0-3": {"6": [_held(mine), own[rank]]}}}))
    assert group.turn() == []
    for ranks, order in group.asked():
        for rank in ranks:
            mine = ["f" * 32 if owner in wrong[rank] else own[owner] for owner in range(4)]
            group.send(
                Message("gathered_parameters", rank, 7, {"of": order.body["step"], "group": "0-3", "segments": mine})
            )
    found = group.turn()
    assert [each.ranks for each in found] == ([named] if named else [])
    assert all((each.kind, each.step, each.cause) == ("collective", 6, "unknown") for each in found)


@pytest.mark.parametrize("tensor", [f"SGD {REDUCTIONS}", "SGD.0 lr"])
def test_ranks_that_count_steps_differently_are_not_compared_step_by_step(tensor: str) -> None:
    group = Detectors(4)
    setting_ = Finding(
        "bits", "suspect", "", ranks=(1,), step=5, stage=SETTING, tensor=tensor, groups=((0, 2, 3), (1,))
    )
    for detector in group.detectors:
        detector.observe(setting_, 0.0)
    for rank in range(4):
        group.send(
            Message("gathered_parameters", rank, 6, {"groups": {"0-3": {"6": [_held(["f" * 32] * 4), f"{rank:032x}"]}}})
        )
        group.send(
            Message("collective_checksums", rank, 6, {"checksums": {"all_reduce 0-3": {"6": [str(rank == 1), ""]}}})
        )
    group.turn()
    group.turn(60.0)
    assert {finding.kind for finding in group.found} == (set() if REDUCTIONS in tensor else {"collective"})


def learn(rank: int, step: int, values: dict[str, str]) -> Message:
    body: dict[str, Any] = {"stage": "parameter", "first": 0, "values": "".join(values.values())}
    return Message("bits", rank, step, {**body, "names": list(values)} if step == 1 else body)


def test_classes_are_learned_from_values_that_change() -> None:
    group = Detectors(4)
    for step in range(1, 9):
        for rank in range(4):
            group.send(learn(rank, step, {
                "equal": f"{step:08x}", "pairs": f"{step:04x}{rank // 2:04x}", "own": f"{step:04x}{rank:04x}",
                "constant": "0" * 8, "late": f"{step if step > 6 else 0:08x}",
            }))  # fmt: skip
        group.turn()
    learned = [(ranks, order.body["classes"]) for ranks, order in group.asked()]
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
    group = Detectors(4)
    group.send(*(Message(kind, 1, 1, body) for kind in ("bits", "at_rest", "gathered_parameters")))
    group.turn()
    assert group.turn(60.0) == []
