"""A rank that trains on where others update ends its group, and no other rank does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed

from dash_guard.process import group, lonely
from dash_guard.process.lonely import Lonely
from dash_guard.upstream.collectives import Board

from .campaign import score
from .support import planted
from .support.planted import Trial

TICK = 0.01


class Group:
    ended, meetings, waited_for = "", 7, True

    def end(self, why: str) -> None:
        self.ended = why

    def tell(self) -> None:
        pass

    def others_wait(self) -> bool:
        return self.waited_for


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Lonely, Group]]:
    """A rank that has made a step with two forwards."""
    for name, seconds in (("_TICK", TICK), ("EXTRA", 0.1), ("USUAL", 0.1)):
        monkeypatch.setattr(lonely, name, seconds)
    group = Group()
    watched = Lonely(group)  # type: ignore[arg-type]
    watched.start()
    watched.forward_begins()
    watched.forward_begins()
    watched.updates()
    watched.step_done()
    yield watched, group
    watched.close()


def ends(group: Group, seconds: float = 2.0) -> bool:
    deadline = time.monotonic() + seconds
    while not group.ended and time.monotonic() < deadline:
        time.sleep(TICK)
    return bool(group.ended)


@pytest.mark.parametrize("forwards", [2, 3])
def test_a_rank_that_has_begun_all_forwards_and_does_nothing(watched: tuple[Lonely, Group], forwards: int) -> None:
    for _ in range(forwards):
        watched[0].forward_begins()
    assert ends(watched[1])


@pytest.mark.parametrize("met", [False, True])
def test_a_step_with_more_forwards_is_in_doubt_before_ranks_have_met_again(
    watched: tuple[Lonely, Group], met: bool
) -> None:
    rank, group = watched
    for _ in range(3):
        rank.forward_begins()
    rank.updates()
    rank.step_done()
    group.meetings += met
    assert ends(group, 0.5) == (not met)


@pytest.mark.parametrize("what", ["waits for others", "has not begun all", "is busy", "has ended", "is not missed"])
def test_a_rank_that_others_need_not_leave(watched: tuple[Lonely, Group], what: str) -> None:
    rank, group = watched
    rank.event()
    rank.forward_begins()
    if what != "has not begun all":
        rank.forward_begins()
    if what == "waits for others":
        rank.updates()
    if what == "has ended":
        rank.close()
    if what == "is not missed":
        group.waited_for = False
    for _ in range(10):
        assert not ends(group, 0.03)
        if what == "is busy":
            rank.event()


def test_a_rank_knows_that_others_wait_in_its_next_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of a short wait, not in another meeting, not of one that has ended, and not from a store that is gone."""
    monkeypatch.setattr(group, "LONG", 0.0)
    waits, other = group.Group(), group.Group()
    waits._board = other._board = Board(torch.distributed.HashStore())
    waits.tell()
    assert not other.others_wait()
    with waits._waiting():
        monkeypatch.setattr(group, "LONG", 60.0)
        waits.tell()
        assert not other.others_wait()
        monkeypatch.setattr(group, "LONG", 0.0)
        time.sleep(TICK)
        waits.tell()
    assert other.others_wait()
    other.meetings += 1
    assert not other.others_wait()
    waits.meetings += 1
    waits.tell()
    assert not other.others_wait()
    other._board = Board(None)
    assert not other.others_wait()


@pytest.mark.full
@pytest.mark.parametrize(("mode", "same_rank_recompute"), [("fsdp", 100), ("ddp", 100), ("ddp", 0)])
def test_ranks_do_not_wait_for_one_that_has_not_updated(tmp_path: Path, mode: str, same_rank_recompute: int) -> None:
    trial = Trial(
        mode, "missed update", 1, settings={"same_rank_recompute": same_rank_recompute, "cross_rank_recompute": 4}
    )
    (result,) = planted.run([trial], tmp_path, seconds=120)
    found = score(result)
    assert (found.named, found.false) == (True, 0)
    assert result["off"] == (
        ["same_rank_recompute", "cross_rank_recompute"] if same_rank_recompute else ["cross_rank_recompute"]
    )
    assert all(finding["severity"] != "confirmed" for finding in result["findings"])
