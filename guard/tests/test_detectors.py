"""The detectors of hangs, deaths, slowness, foreign ranks and equal data, on planted messages."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.simulated_job import simulate
from dash_guard.detectors.data import STEPS, SameData
from dash_guard.detectors.detector import Detector, Job
from dash_guard.detectors.foreign import Foreign
from dash_guard.detectors.liveness import Liveness
from dash_guard.detectors.roster import SPINS, START
from dash_guard.detectors.slow import LAST, OF, Slow, lateness
from dash_guard.monitor.clock import Clock
from dash_guard.process import flight
from dash_guard.report.findings import Finding, from_json
from dash_guard.shared.heartbeat import packed, unpacked
from dash_guard.transport.messages import Message
from dash_guard.upstream.group_names import OWN

WORLD = 4
Open = Sequence[Any]


class Stage:
    """A liveness detector, four ranks on it, and the time."""

    def __init__(self, groups: dict[str, list[int]] | None = None) -> None:
        self.detector, self.now, self.found = Liveness(Job(WORLD)), 0.0, list[Finding]()
        self.pids = {rank: 100 + rank for rank in range(WORLD)}
        for rank, pid in self.pids.items():
            self.send(Message("joined", rank, 0, {"world": WORLD, "host": f"h{rank}", "node": "n", "pid": pid}))
            for name, ranks in (groups or {"0": list(range(WORLD))}).items():
                if rank in ranks:
                    self.send(Message("groups", rank, 0, {"name": name, "ranks": packed(ranks)}))

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.detector.take(message, self.now)

    def heartbeat(self, rank: int, step: int, groups: dict[str, Open], pairs: Open = (), **body: Any) -> None:
        words = {"frame": f"f{rank} (train.py:{rank})", "phase": "", "median": 0.1, "idle": 0.0, "pairs": pairs, **body}
        full = {name: [*of, "all_reduce", "Float[8]"] if len(of) == 2 else list(of) for name, of in groups.items()}
        self.send(Message("heartbeat", rank, step, {"groups": full, **words}))

    def pass_time(
        self,
        seconds: float,
        heartbeats: Iterable[tuple[int, int, dict[str, Open]]] = (),
        work: dict[int, str] | None = None,
        **body: Any,
    ) -> None:
        """Ranks send a heartbeat once a second, always the same, and the detector runs twice.

        Args:
            seconds: that pass.
            heartbeats: rank, step and groups of each.
            work: what ranks do meanwhile, by rank.
            body: other fields of all heartbeats.
        """
        heartbeats = list(heartbeats)
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            if self.now % 1 == 0:
                for rank, step, groups in heartbeats:
                    does = {"work": (work or {}).get(rank, ""), "busy": f"evaluate (train.py:9{rank})"}
                    self.heartbeat(rank, step, groups, **does | body)
            self.found += self.detector.detect(self.now)

    def process(self, rank: int, state: str, status: int | None = None) -> None:
        self.send(Message("process", 0, 0, {"node": "n", "pid": self.pids[rank], "state": state, "status": status}))


def test_who_ends_while_the_monitor_is_away_has_not_died() -> None:
    """Nobody has seen how its process ended; with a status it is known, and later it counts again."""
    for status, seconds, died in ((None, 0.5, False), (signal.SIGKILL.value, 0.5, True), (None, 10.0, True)):
        stage = Stage()
        stage.pass_time(3, [(rank, 5, {"0": (7, 7)}) for rank in range(WORLD)])
        stage.send(Message("process", 0, 0, {"away": True}))
        stage.pass_time(seconds, [(rank, 6, {"0": (8, 8)}) for rank in range(WORLD)])
        stage.process(1, "ended", status)
        stage.pass_time(3)
        assert [finding.kind for finding in stage.found] == ["dead"] * died
        for found in stage.found:  # it may have gone on since
            assert re.search(r"rank 1 has died \(.*\), last seen in step [56]", found.sentence)


def test_the_clock_stands_still_while_the_monitor_is_away() -> None:
    times = iter([0.0, 0.2, 0.4, 60.4, 60.6, 62.4, 70.0])
    clock = Clock(lambda: next(times))
    assert [round(clock.now(), 3) for _ in range(6)] == [0.2, 0.4, 0.4, 0.6, 2.4, 2.4]
    assert clock.gaps == 2


def waiting(bad: int, step: int = 9) -> list[tuple[int, int, dict[str, Open]]]:
    """All but one wait in collective 8."""
    return [(rank, step, {"0": (7, 7) if rank == bad else (8, 7)}) for rank in range(WORLD)]


def names(found: Sequence[Finding]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(finding.kind, finding.severity, finding.ranks) for finding in found]


@pytest.mark.parametrize("bad", range(WORLD))
def test_a_rank_that_others_wait_for_is_named_once(bad: int) -> None:
    stage = Stage()
    stage.pass_time(10, waiting(bad))
    assert names(stage.found) == [("hang", "suspect", (bad,))]
    (finding,) = stage.found
    assert f"rank {bad} has not entered all_reduce 8 of group 0, in which 3 ranks wait" in finding.sentence
    assert f"f{bad} (train.py:{bad})" in finding.sentence
    waits = [[rank, bad, "all_reduce 8 of group 0"] for rank in range(WORLD) if rank != bad]
    assert finding.evidence["waits"] == waits
    assert finding.latency_s is not None
    assert 3 <= finding.latency_s <= 5
    assert from_json(finding.to_json().encode()) == finding
    stage.pass_time(60, waiting(bad))
    assert names(stage.found)[1:] == [("hang", "confirmed", (bad,))]


@pytest.mark.parametrize("work", ["stack", "modules", "input and output", "computation", "disk"])
def test_a_rank_that_works_alone_is_busy_and_a_suspect_only_when_it_does_nothing(work: str) -> None:
    """Others wait for rank 1, which evaluates, and then hangs."""
    stage = Stage()
    stage.pass_time(100, waiting(1), {1: work})
    assert names(stage.found) == [("hang", "note", (1,))]
    assert stage.found[0].sentence.startswith("rank 1 is busy in evaluate (train.py:91), for ")
    assert "3 ranks wait in all_reduce 8 of group 0" in stage.found[0].sentence
    assert stage.found[0].cause == "program"
    stage.pass_time(8, waiting(1))
    assert names(stage.found)[1:] == [("hang", "suspect", (1,))]
    stage.pass_time(40, waiting(1))
    assert len(stage.found) == 2
    stage.pass_time(20, waiting(1))
    assert names(stage.found)[2:] == [("hang", "confirmed", (1,))]


@pytest.mark.parametrize(("work", "ever"), [("computation", True), ("disk", True), ("stack", False)])
def test_what_may_be_a_loop_without_end_is_a_suspect_in_the_end(work: str, ever: bool) -> None:
    stage = Stage()
    stage.pass_time(SPINS + 10, waiting(1), {1: work})
    assert names(stage.found) == [("hang", "note", (1,)), *([("hang", "suspect", (1,))] if ever else [])]


@pytest.mark.parametrize("work", ["stack", "modules", "computation"])
def test_a_rank_that_worked_until_it_hung_was_not_busy(work: str) -> None:
    stage = Stage()
    stage.pass_time(1, waiting(1), {1: work})
    stage.pass_time(5, waiting(1))
    assert names(stage.found) == [("hang", "suspect", (1,))]
    assert stage.found[0].latency_s is not None
    assert stage.found[0].latency_s <= 4


def test_of_several_awaited_ranks_those_that_work_are_innocent() -> None:
    stage = Stage()
    stage.pass_time(8, [(rank, 9, {"0": (8, 7) if rank > 1 else (7, 7)}) for rank in range(WORLD)], {0: "modules"})
    assert names(stage.found) == [("hang", "suspect", (1,))]


def test_the_advice_names_host_and_process_and_can_be_pasted() -> None:
    hung, stopped, dead = Stage(), Stage(), Stage()
    hung.pass_time(6, waiting(1))
    assert hung.found[0].advice == "Look at its stack, on h1: py-spy dump --pid 101"
    stopped.pass_time(2, [(rank, 9, {"0": (8, 8)}) for rank in range(WORLD)])
    stopped.process(1, "stopped")
    stopped.pass_time(6, [each for each in waiting(1) if each[0] != 1])
    assert stopped.found[0].advice.endswith("on h1: kill -CONT 101")
    dead.process(2, "ended", signal.SIGKILL)
    dead.pass_time(2)
    assert dead.found[0].advice.endswith("on h2: dmesg -T | grep -i killed")


@pytest.mark.parametrize("also", [False, True])
def test_collectives_of_the_guard_are_not_named_as_those_of_the_program(also: bool) -> None:
    stage = Stage({"0": list(range(WORLD)), OWN: list(range(WORLD))})
    mine: dict[str, Open] = {OWN: (3, 2, "all_gather", "Long[1]"), "0": (8, 8)}
    groups = {0: mine, 1: {OWN: (2, 2), "0": (7, 7) if also else (8, 8)}, 2: mine, 3: mine}
    if also:
        groups[2] = groups[3] = {OWN: (2, 2), "0": (8, 7)}
    stage.pass_time(6, [(rank, 9, of) for rank, of in groups.items()])
    (finding,) = stage.found
    assert finding.ranks == (1,)
    assert "all_gather" not in finding.sentence + finding.collective
    assert finding.collective == ("all_reduce 8 of group 0" if also else "")
    assert ("an exchange of the guard between two steps" in finding.sentence) != also
    other: dict[str, Open] = {OWN: (3, 2, "all_reduce", "Long[9]")}
    apart = Stage({OWN: list(range(WORLD))})
    apart.pass_time(6, [(rank, 9, other if rank else {OWN: mine[OWN]}) for rank in range(WORLD)])
    assert not [found for found in apart.found if found.kind == "desync"]


def test_no_hang_without_a_wait_or_in_the_first_step_or_while_work_goes_on() -> None:
    idle, start, busy = Stage(), Stage(), Stage()
    idle.pass_time(30, [(rank, 9, {"0": (8, 8)}) for rank in range(WORLD)])
    start.pass_time(START - 2, waiting(1, step=1))
    for number in range(10):  # the awaited rank enters collectives of another group
        heartbeats = waiting(1)
        busy.pass_time(
            1, [(r, s, {**groups, "x": (number, number)} if r == 1 else groups) for r, s, groups in heartbeats]
        )
    assert idle.found == start.found == busy.found == []


def test_the_one_for_whom_all_wait_is_found_across_groups() -> None:
    """0 and 1 are a tensor-parallel pair, 0 and 2 data-parallel: 1 waits for 0, and 3 for 1."""
    stage = Stage({"tp": [0, 1], "tp2": [2, 3], "dp": [0, 2], "dp2": [1, 3]})
    heartbeats: list[tuple[int, int, dict[str, Open]]] = [
        (0, 9, {"tp": (5, 5), "dp": (3, 3)}),
        (1, 9, {"tp": (6, 5), "dp2": (3, 3)}),
        (2, 9, {"tp2": (6, 6), "dp": (4, 3)}),
        (3, 9, {"tp2": (6, 6), "dp2": (4, 3)}),
    ]
    stage.pass_time(8, heartbeats)
    assert names(stage.found) == [("hang", "suspect", (0,))]
    waits = stage.found[0].evidence["waits"]
    assert sorted(waits) == [
        [1, 0, "all_reduce 6 of group tp"], [2, 0, "all_reduce 4 of group dp"], [3, 1, "all_reduce 4 of group dp2"]
    ]  # fmt: skip
    assert waits[0][1] == 0  # those of the collective that the finding names come first


def test_a_circle_and_different_operations_are_faults_of_the_program() -> None:
    circle, other, size = Stage({"a": [0, 1], "b": [0, 1]}), Stage(), Stage()
    circle.pass_time(6, [(0, 9, {"a": (5, 4), "b": (2, 2)}), (1, 9, {"a": (4, 4), "b": (3, 2)})])
    assert names(circle.found) == [("desync", "confirmed", (0, 1))]
    assert circle.found[0].cause == "program"
    entered = (8, 7, "all_reduce", "Float[8]")
    for stage, wrong in ((other, (8, 7, "broadcast", "Float[8]")), (size, (8, 7, "all_reduce", "Float[9]"))):
        stage.pass_time(6, [(rank, 9, {"0": wrong if rank == 2 else entered}) for rank in range(WORLD)])
        assert names(stage.found) == [("desync", "confirmed", (2,))]
        assert "train.py:0" in stage.found[0].sentence
        assert "train.py:2" in stage.found[0].sentence


def test_a_collective_that_all_have_entered_is_the_transport() -> None:
    stage = Stage()
    stage.pass_time(10, [(rank, 9, {"0": (8, 7)}) for rank in range(WORLD)])
    assert names(stage.found) == [("hang", "suspect", ())]
    assert stage.found[0].cause == "network"
    assert stage.found[0].hosts == ("h0", "h1", "h2", "h3")


@pytest.mark.parametrize(("phase", "seconds"), [("checkpoint", 1800), ("compile", 900), ("evaluation", 1800)])
def test_a_known_phase_is_a_note_until_its_limit(phase: str, seconds: int) -> None:
    stage = Stage()
    stage.pass_time(8, waiting(0), phase=phase)
    assert names(stage.found) == [("hang", "note", (0,))]
    stage.pass_time(seconds - 10, waiting(0), phase=phase)
    assert len(stage.found) == 1
    stage.pass_time(8, waiting(0), phase=phase)
    assert names(stage.found)[1:] == [("hang", "confirmed", (0,))]


def test_sends_and_receives() -> None:
    stage = Stage()
    for _ in range(6):
        stage.now += 1
        for rank in range(WORLD):
            stage.heartbeat(rank, 9, {"0": (8, 8)}, pairs=[["0", "recv", 3]] if rank == 2 else [])
        stage.found += stage.detector.detect(stage.now)
    assert names(stage.found) == [("hang", "suspect", (3,))]


def test_the_dead_are_named_and_not_those_who_die_of_it() -> None:
    stage = Stage()
    stage.pass_time(3, [(rank, 9, {"0": (8, 8)}) for rank in range(WORLD)])
    stage.process(1, "ended", signal.SIGKILL)
    stage.now += 0.2
    stage.process(0, "ended", 1 << 8)
    stage.pass_time(2)
    stage.process(2, "ended", signal.SIGTERM)
    stage.pass_time(20)
    assert names(stage.found) == [("dead", "confirmed", (1,))]
    assert "SIGKILL" in stage.found[0].sentence


def test_an_exit_with_an_error_is_the_program_and_a_regular_end_is_nothing() -> None:
    failed, ended, vanished = Stage(), Stage(), Stage()
    for stage in (failed, ended, vanished):
        stage.pass_time(2, [(rank, 9, {"0": (8, 8)}) for rank in range(WORLD)])
    failed.send(Message("left", 3))
    failed.process(3, "ended", 1 << 8)
    for rank in range(WORLD):
        ended.send(Message("left", rank))
        ended.process(rank, "ended", 0 if rank else None)
    vanished.process(2, "ended", None)  # nobody knows how, and it has not said that it ends
    for stage in (failed, ended, vanished):
        stage.pass_time(4)
    assert names(failed.found) == [("dead", "confirmed", (3,))]
    assert failed.found[0].cause == "program"
    assert ended.found == []
    assert names(vanished.found) == [("dead", "confirmed", (2,))]


def test_a_stopped_rank_is_named_once_its_heartbeats_are_missing_too() -> None:
    stage = Stage()
    everyone = [(rank, 9, {"0": (8, 8)}) for rank in range(WORLD)]
    stage.pass_time(2, everyone)
    stage.process(1, "stopped")
    stage.pass_time(1, everyone)
    assert stage.found == []
    stage.pass_time(6, [heartbeat for heartbeat in waiting(1) if heartbeat[0] != 1])
    assert names(stage.found) == [("stopped", "confirmed", (1,))]
    stage.process(1, "")
    stage.pass_time(2, everyone)  # it goes on, and is stopped again
    stage.process(1, "stopped")
    stage.pass_time(6, [heartbeat for heartbeat in waiting(1) if heartbeat[0] != 1])
    assert names(stage.found[1:]) == [("stopped", "confirmed", (1,))]


def test_silence_alone_is_a_suspicion_and_an_asked_end_is_nothing() -> None:
    silent, asked = Stage(), Stage()
    for stage in (silent, asked):
        stage.pass_time(2, [(rank, 9, {"0": (7, 7)}) for rank in range(WORLD)])
    silent.pass_time(7, [heartbeat for heartbeat in waiting(1) if heartbeat[0] != 1])
    assert names(silent.found) == [("hang", "suspect", (1,))]
    assert "it sends no heartbeats" in silent.found[0].sentence
    asked.send(Message("process", 0, 0, {"ending": True}))
    asked.process(1, "ended", signal.SIGTERM)
    asked.pass_time(9, waiting(2))
    assert asked.found == []


def steps(
    detector: Detector, of: int, own: dict[int, list[float]], first: int = 1, kernels: Any = (), load: Any = (0.5, 8)
) -> list[Finding]:
    found: list[Finding] = []
    for step in range(first, first + of):
        for rank, times in own.items():
            body = {
                "shape": "s",
                "own": times,
                "total": 100.0,
                "kernels": kernels[rank] if kernels else [],
                "load": load,
            }
            detector.take(Message("times", rank, step, body), float(step))
        found += detector.detect(step + 0.1)
    return found


@pytest.mark.parametrize("world", [2, 4, 64])
def test_a_slow_rank_is_named_after_six_steps_and_a_little_slow_one_never(world: int) -> None:
    own = {rank: [40.0, 60.0, 80.0 + rank % 2] for rank in range(world)}
    slow, little = Slow(Job(world)), Slow(Job(world))
    assert steps(little, 20, {**own, 1: [40.0, 66.0, 87.0]}) == []
    late = {**own, 1: [40.0, 80.0, 100.0]}
    assert steps(slow, LAST - 1, late) == []
    assert names(steps(slow, 6, late, first=LAST)) == [("slow", "suspect", (1,))]
    detector = Slow(Job(world))
    now_and_then = [steps(detector, 1, late if step % 2 else own, first=step) for step in range(1, 40)]
    assert now_and_then == [[]] * 39


@pytest.mark.parametrize(
    ("load", "said"),
    [((40.2, 8), "40.2 on 8 processors"), ([0.3, 8], "0.3 on 8 processors"), (None, ""), ("x", ""), ([1, "2"], "")],
)
def test_a_rank_that_is_late_is_reported_with_the_load_of_its_machine(load: Any, said: str) -> None:
    own = {rank: [50.0] for rank in range(4)}
    (finding,) = steps(Slow(Job(4)), LAST, {**own, 1: [60.0]}, load=load)
    assert (finding.ranks, "1.20 times" in finding.sentence) == ((1,), True)
    assert ("the load of its machine is" in finding.sentence) == bool(said)
    assert said in finding.sentence
    assert ("more processes want a processor" in finding.advice) == said.startswith("40")


def test_lateness_where_ranks_wait_between_collectives_and_where_they_do_not() -> None:
    flowing = np.array([[10.0, 20, 30], [10, 20, 30], [10, 20, 30], [10, 26, 36]])
    waited = np.array([[10.0, 20, 36], [10, 20, 36], [10, 20, 36], [10, 26, 36]])  # all wait for the last one's second
    for came in (flowing, waited):
        late, where = lateness(came)
        assert late.tolist() == [0, 0, 0, 6]
        assert where[3] == 1


def test_half_of_the_ranks_and_other_work_are_not_slow() -> None:
    half, other = Slow(Job(4)), Slow(Job(4))
    assert steps(half, 20, {0: [50.0], 1: [50.0], 2: [80.0], 3: [80.0]}) == []
    for step in range(1, 20):
        for rank in range(4):
            body = {"shape": "st"[rank == 3], "own": [90.0 if rank == 3 else 50.0], "total": 100.0, "kernels": []}
            other.take(Message("times", rank, step, body), float(step))
        assert other.detect(step + 3.0) == []


def test_on_gpus_the_shortest_duration_came_last_and_slow_links_are_named() -> None:
    late = {rank: [["0", 1, 26.0 if rank != 2 else 0.5]] for rank in range(4)}
    assert names(steps(Slow(Job(4)), OF, {rank: [] for rank in range(4)}, kernels=late)) == [("slow", "suspect", (2,))]
    even = {rank: [["0", 1, 0.5 + 0.01 * rank]] for rank in range(4)}
    assert steps(Slow(Job(4)), OF, {rank: [] for rank in range(4)}, kernels=even) == []
    pairs = {rank: [[f"d{rank // 2}", 1, 3.0 if rank // 2 == 1 else 1.0]] for rank in range(8)}
    job = Job(8, hosts={rank: f"h{rank // 2}" for rank in range(8)})
    (finding,) = steps(Slow(job), OF, {rank: [] for rank in range(8)}, kernels=pairs)
    assert (finding.kind, finding.cause, finding.groups, finding.hosts) == ("link", "network", ((2, 3),), ("h1",))


def facts(rank: int, **changes: Any) -> dict[str, Any]:
    base = {"versions": {"torch": "2.13"}, "settings": {"initial_seed": rank, "deterministic_algorithms": True}}
    environment = {"CUDA_VISIBLE_DEVICES": str(rank), "NCCL_SOCKET_IFNAME": f"e{rank}"}
    return {"facts": {**base, "environment": {**environment, **changes}, "rank": rank}, "device": "GPU"}


def test_foreign_ranks_are_named_and_what_ranks_have_for_themselves_is_not() -> None:
    clean, one, two = Foreign(Job(4)), Foreign(Job(4)), Foreign(Job(2))
    for rank in range(4):
        clean.take(Message("facts", rank, 0, facts(rank)), 1.0)
        one.take(Message("facts", rank, 0, facts(rank, **({"NCCL_ALGO": "Tree"} if rank == 3 else {}))), 1.0)
    for rank in range(2):
        two.take(Message("facts", rank, 0, facts(rank, OMP_NUM_THREADS=str(rank))), 1.0)
    assert clean.detect(2.0) == []
    (finding,) = one.detect(2.0)
    assert (finding.kind, finding.ranks) == ("foreign", (3,))
    assert finding.evidence == {"environment.NCCL_ALGO": ["Tree", "nothing"]}
    assert names(two.detect(2.0)) == [("foreign", "suspect", (0, 1))]


@pytest.mark.parametrize(("hashes", "named", "between"), [
    ("aa", None, ""), ("aaaa", None, ""), ("ab", (), "ranks 0 and 1"), ("abcd", (), "ranks 0, 1, 2 and 3"),
    ("aabb", (), "ranks 0, 1, 2 and 3"), ("aaba", (2,), "rank 2 and all others"),
    ("abaca", (1, 3), "ranks 1 and 3 and all others"),
])  # fmt: skip
@pytest.mark.parametrize("flag", [True, False])
def test_string_hashes_that_differ_are_a_note_where_bits_are_wanted(
    hashes: str, named: tuple[int, ...] | None, between: str, flag: bool
) -> None:
    """Once, and they explain no bits of a rank: they differ in most jobs."""
    detector, found = Foreign(job := Job(len(hashes))), []
    for step in (1, 5):
        for rank, value in enumerate(hashes):
            body = facts(rank) | {"string_hashes": ord(value)}
            body["facts"]["settings"]["deterministic_algorithms"] = flag
            detector.take(Message("facts", rank, step, body), float(step))
        found += detector.detect(10.0 * step)
    assert [(each.kind, each.severity, each.ranks) for each in found] == (
        [("foreign", "note", named)] if named is not None and flag else []
    )
    assert all(f"hashes differ between {between}, and with them the order of sets" in each.sentence for each in found)
    assert not job.explanations


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_setting_that_changes_later_is_compared_when_all_ranks_may_have_changed_it(
    world: int, all_of_them: bool
) -> None:
    detector = Foreign(job := Job(world))
    for rank in range(world):
        detector.take(Message("facts", rank, 1, facts(rank)), 1.0)
    assert detector.detect(1.0) == []
    for rank in range(world):
        if rank == 1 or all_of_them:
            detector.take(Message("facts", rank, 7, facts(rank, NCCL_ALGO="Tree")), 2.0 + rank)
            assert detector.detect(2.0 + rank) == []
    assert list(job.explanations) == ([] if all_of_them else [0, 1] if world == 2 else [1])
    found = [*detector.detect(3.0), *detector.detect(12.0), *detector.detect(20.0)]
    assert [finding.ranks for finding in found] == ([] if all_of_them else [(0, 1) if world == 2 else (1,)])
    assert all(finding.step == 7 for finding in found if world > 2)


def test_what_the_program_does_on_a_rank_explains_what_the_rank_computes() -> None:
    detector = Foreign(job := Job(4))
    common: dict[str, Any] = {"ranks": (2,), "cause": "program", "step": 3}
    detector.observe(Finding("bits", "suspect", "x", stage="optimizer setting", tensor="AdamW.0 lr", **common), 0.0)
    detector.observe(Finding("data", "suspect", "x", **common), 0.0)
    detector.observe(Finding("desync", "suspect", "x", tensor="parameter w", **common), 0.0)
    detector.observe(Finding("desync", "suspect", "x", collective="8 of group 0", **common), 0.0)
    detector.observe(Finding("data", "suspect", "x", **common | {"ranks": (0, 1, 2, 3)}), 0.0)
    detector.observe(Finding("bits", "suspect", "x", **common | {"cause": "unknown", "ranks": (1,)}), 0.0)
    assert {rank: len(phrases) for rank, phrases in job.explanations.items()} == {2: 3}


def test_other_kernels_are_compared_among_ranks_of_one_stage() -> None:
    for shapes, named in (("ssss", [(3,)]), ("ssst", [])):
        detector = Foreign(Job(4))
        for rank in range(4):
            detector.take(Message("times", rank, 2, {"shape": shapes[rank]}), 1.0)
            detector.take(Message("keys", rank, 2, {"keys": ["a", "b" if rank == 3 else "c"]}), 1.0)
        assert detector.detect(2.0) == []
        assert [finding.ranks for finding in detector.detect(9.0)] == named


def read(detector: Detector, digests: str, peers: Sequence[int], of: int = STEPS) -> list[tuple[int, ...]]:
    found = []
    for step in range(1, of + 1):
        for rank, digest in enumerate(digests):
            detector.take(Message("data", rank, step, {"digest": f"{digest}{step}", "peers": list(peers)}), float(step))
        found += [finding.ranks for finding in detector.detect(step + 0.1)]
    return found


def test_equal_data_is_named_where_each_rank_has_its_own() -> None:
    assert read(SameData(Job(4)), "abcd", [0, 3, 1], of=9) == []
    assert read(SameData(Job(4)), "abca", [0, 3, 1]) == [(0, 3)]
    assert read(SameData(Job(4)), "aaaa", [0, 3, 1]) == [(0, 1, 2, 3)]
    assert read(SameData(Job(4)), "abca", [0, 3, 1], of=STEPS - 1) == []
    assert read(SameData(Job(4)), "aabb", [], of=9) == []  # tensor parallelism over pairs
    assert read(SameData(Job(4)), "aabc", []) == [(0, 1)]


def test_a_batch_that_is_fixed_is_a_note() -> None:
    """It becomes a suspicion if the inputs change later and are still the same on both ranks."""
    detector, found = SameData(Job(2)), []
    for step in range(1, 3 * STEPS):
        digest = f"{max(step, 2 * STEPS)}"
        for rank in range(2):
            detector.take(Message("data", rank, step, {"digest": digest, "peers": [0, 1]}), float(step))
        found += [(finding.severity, finding.ranks, finding.step) for finding in detector.detect(step + 0.1)]
    assert found == [("note", (), STEPS), ("suspect", (0, 1), 2 * STEPS + 1)]


GENERATOR = "generator of numpy"


def parts(told: dict[str, str], noise: str, of: int = STEPS, peers: Sequence[int] = (0, 2, 1)) -> list[Finding]:
    """The findings about three ranks; a letter for each rank, or a digit for what does not change between steps."""
    detector, found = SameData(Job(3)), []
    for step in range(1, of + 1):
        for rank in range(3):
            letters = {name: digests[rank] for name, digests in (*told.items(), (GENERATOR, noise))}
            now = {name: each if each.isdigit() else f"{each}{step}" for name, each in letters.items()}
            body = {
                "digest": f"{rank} {step}",
                "peers": list(peers),
                "noise": {GENERATOR: now.pop(GENERATOR)},
                "tensors": now,
            }
            detector.take(Message("data", rank, step, body), float(step))
        found += detector.detect(step + 0.1)
    return found


PARTS: dict[str, tuple[dict[str, str], str, list[tuple[str, tuple[int, ...]]]]] = {
    "each its own": ({"ids": "abc", "mask": "abc"}, "abc", []),
    "a tensor of two": ({"ids": "aba", "mask": "abc"}, "abc", [("suspect", (0, 2))]),
    "a tensor of all": ({"ids": "aaa", "mask": "abc"}, "abc", [("note", ())]),
    "a tensor that does not change": ({"ids": "abc", "mask": "111"}, "abc", []),
    "the same noise": ({"ids": "abc"}, "aab", [("note", ())]),
    "a generator that draws nothing": ({"ids": "abc"}, "111", []),
    "a tensor and the noise": ({"ids": "aab"}, "abb", [("suspect", (0, 1)), ("note", ())]),
}


@pytest.mark.parametrize("name", PARTS)
def test_tensors_and_noise_that_data_parallel_ranks_share(name: str) -> None:
    told, noise, expected = PARTS[name]
    assert [(finding.severity, finding.ranks) for finding in parts(told, noise, of=9)] == expected
    assert parts(told, noise, of=STEPS - 1) == []
    assert parts(told, noise, of=9, peers=()) == []  # tensor-parallel ranks share tensors and noise


def test_entries_of_the_flight_recorder() -> None:
    def entry(number: int, at: int, done: bool = True, **more: Any) -> dict[str, Any]:
        base = {"process_group": ["0", "default"], "collective_seq_id": number, "profiling_name": "gloo:all_reduce"}
        kinds = {"input_dtypes": ["Float"], "input_sizes": [[4, 2]], "retired": done, "state": "scheduled"}
        return {**base, **kinds, "time_created_ns": at, **more}

    entries = [entry(1, 10), entry(2, 20, done=False), entry(3, 30, done=False)]
    assert flight.waits(entries) == {"0": [3, 1, "all_reduce", "Float[4,2]"]}
    assert flight.waits(entries[:1]) == {"0": [1, 1, "all_reduce", "Float[4,2]"]}
    pair = entry(0, 40, done=False, is_p2p=True, profiling_name="nccl:recv 0<-1")
    assert flight.waits([pair]) == {}
    assert flight.pairs([*entries, pair]) == [["0", "recv", 1]]
    step = flight.step(7, 10, 30, entries)
    assert step is not None
    assert step.own == (0.0, 0.0)
    assert flight.step(7, 10, 30, [entry(2, 20, done=False, profiling_name="nccl:all_reduce")]) is None
    timed = flight.step(7, 10, 30, [entry(2, 20, duration_ms=1.5)])
    assert timed is not None
    assert (timed.own, timed.kernels) == ((), (("0", 2, 1.5),))
    own = entry(9, 25, process_group=[OWN, ""])
    assert flight.step(7, 10, 30, [*entries, own]) == step
    many = [flight.Step(n, "s", (1.0,), 1.0) for n in range(101, 164)]
    assert [each.step for each in flight.sampled(many, 4)] == [112, 128, 144, 160]
    for ranks in ([3], [0, 1, 2], [1, 3, 5], [0, 1, 5], [5, 1]):
        assert list(unpacked(packed(ranks))) == ranks


def test_a_thousand_simulated_ranks() -> None:
    result = simulate(1000, trials=1, rank_steps=200_000, of_all=5_000)
    assert result["exact"] == 1.0, result
    assert result["false_names"] == 0
    assert result["findings"] == []
