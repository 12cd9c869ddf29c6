"""Ranks that agree before each update, as threads of one process: what ends training, and what does not."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from dash_guard.checks.replicas import Replicas
from dash_guard.checks.state import Entry, State
from dash_guard.checks.stop import Stop
from dash_guard.errors import FaultConfirmedError
from dash_guard.process.rank import Rank
from dash_guard.transport.channel import Local
from dash_guard.transport.messages import Message

WORLD = 3
EVERYONE = tuple(range(WORLD))


class Together:
    """A group of threads."""

    def __init__(self) -> None:
        self.barrier, self.rows = threading.Barrier(WORLD, timeout=20), dict[int, list[int]]()

    def end(self, rank: int) -> Any:
        together = self

        class End:
            settings = ""

            def gather_padded(self, numbers: Sequence[int]) -> list[list[int]]:
                together.barrier.wait()
                together.rows[rank] = list(numbers)
                together.barrier.wait()
                return [together.rows[other] for other in range(WORLD)]

            def highest(self, numbers: Sequence[int]) -> list[int]:
                return [max(of) for of in zip(*self.gather_padded(numbers), strict=True)]

        return End()


def run(tell: Callable[[int, Stop, list[torch.Tensor], Replicas], None]) -> list[tuple[str, dict[str, Any]]]:
    """What the optimizer's step raises on each rank ("" for nothing), and coverage, after something has happened."""
    together = Together()

    def work(number: int) -> tuple[str, dict[str, Any]]:
        rank = Rank(number, WORLD, Local().end(number))
        rank.group = together.end(number)
        stop = Stop(rank, replicas := Replicas(rank))
        tensors = [torch.arange(4.0) + n for n in range(3)]
        entries = [
            Entry(stage, name, weakref.ref(tensor), ranks)
            for stage, name, tensor, ranks in zip(
                ("gradient", "parameter", "parameter"), "gpq", tensors, (EVERYONE, EVERYONE, ()), strict=True
            )
        ]
        replicas._keep(State.of(rank).hash("bits", entries))
        tell(number, stop, tensors, replicas)
        optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
        try:
            stop.before_optimizer(optimizer)
            stop.before_optimizer(optimizer)  # of the same step
        except FaultConfirmedError as error:
            stop.before_optimizer(optimizer)  # is not stopped again
            return str(error), rank.coverage.to_dict()
        return "", rank.coverage.to_dict()

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(work, EVERYONE))


def hashed_again(replicas: Replicas) -> None:
    """Hash what was kept again."""
    kept = replicas.taken()
    entries = [entry for part in kept for entry in part.entries]
    replicas._keep(State.of(replicas.rank).hash("bits", entries))


def test_equal_ranks_go_on_and_what_one_rank_alone_has_does_not_matter() -> None:
    def own(number: int, stop: Stop, tensors: list[torch.Tensor], replicas: Replicas) -> None:
        tensors[2] += number
        hashed_again(replicas)

    assert [raised for raised, _ in run(own)] == [""] * WORLD


@pytest.mark.parametrize(("place", "words"), [(0, "gradient g"), (1, "parameter p")])
def test_ranks_that_differ_end_all_with_the_same_words(place: int, words: str) -> None:
    def wrong(number: int, stop: Stop, tensors: list[torch.Tensor], replicas: Replicas) -> None:
        tensors[place][3] += number == 1
        hashed_again(replicas)

    sentence = f"step 1: rank 1 and ranks 0 and 2 must be equal, and differ in {words}"
    assert [raised for raised, _ in run(wrong)] == [sentence] * WORLD


def test_a_hash_that_was_wrong_once_ends_nothing() -> None:
    def wrong(number: int, stop: Stop, tensors: list[torch.Tensor], replicas: Replicas) -> None:
        if number == 1 and replicas.kept:
            replicas.kept[0].lanes[0, 0] += 1

    for raised, coverage in run(wrong):
        assert raised == ""
        assert coverage["stop"]["unseen"] == {"ranks that differed at first and agree in a second hash": 1}


def test_ranks_without_the_same_tensors_are_not_compared() -> None:
    def fewer(number: int, stop: Stop, tensors: list[torch.Tensor], replicas: Replicas) -> None:
        if number == 1:
            replicas.taken()

    for raised, coverage in run(fewer):
        assert raised == ""
        assert len(coverage["stop"]["unseen"]) == 2


def test_a_confirmed_fault_that_one_rank_knows_ends_all() -> None:
    def confirmed(number: int, stop: Stop, tensors: list[torch.Tensor], replicas: Replicas) -> None:
        if number == 2:
            stop.order(Message("stop", 0, 1, {"sentence": "rank 0 computes wrongly"}))

    others = "step 1: another rank received a confirmed finding"
    assert [raised for raised, _ in run(confirmed)] == [others, others, "rank 0 computes wrongly"]
