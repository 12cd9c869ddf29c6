"""Planted faults of simulated ranks: how often the judges name the right rank, how often a wrong one, and how fast."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .beating import packed
from .findings import Finding
from .judge import Job, Judge
from .judges.data import SameData
from .judges.foreign import Foreign
from .judges.liveness import Liveness
from .judges.slow import OF, Slow
from .messages import Message
from .monitor import in_own_process

TRIALS = 15
"""Of each kind of fault."""
RANK_STEPS = 100_000_000
"""Of healthy ranks, among which nobody may be named slow."""

_TENSOR = 8  # ranks of a tensor-parallel group
_STEP = 300.0  # milliseconds
_NOISE, _OF_RANK, _SPIKES = 0.03, 0.01, 0.002
_POINTS = 4
_SLOW = 1.2


@dataclass
class Score:
    """What became of the trials of one kind.

    Attributes:
        exact: trials in which the rank with the fault was named, and nobody else.
        wrong: trials in which somebody else was named.
        trials: all of them.
        slowest: milliseconds of the longest judgement.
    """

    exact: int = 0
    wrong: int = 0
    trials: int = 0
    slowest: float = field(default=0.0)

    def add(self, found: Iterable[Finding], right: set[int], slowest: float) -> None:
        """Count a trial."""
        named = {rank for finding in found for rank in finding.ranks}
        self.exact += named == right
        self.wrong += bool(named - right)
        self.trials += 1
        self.slowest = max(self.slowest, slowest)


class Trial:
    """One judge, and the time that its judgements take."""

    def __init__(self, judge: Judge) -> None:
        self.judge, self.found, self.slowest = judge, list[Finding](), 0.0

    def take(self, messages: Iterable[Message], now: float) -> None:
        """Messages come."""
        for message in messages:
            self.judge.take(message, now)

    def turn(self, now: float) -> None:
        """The judge judges."""
        began = time.process_time()  # of this process: others run beside it
        self.found += self.judge.judge(now)
        self.slowest = max(self.slowest, 1000 * (time.process_time() - began))


def joined(world: int) -> list[Message]:
    """All ranks join, eight on a node."""
    return [
        Message("joined", r, 0, {"world": world, "host": f"node{r // 8}", "node": f"n{r // 8}", "pid": 1000 + r})
        for r in range(world)
    ]


def groups(world: int) -> list[Message]:
    """All ranks are in the default group, in a tensor-parallel and in a data-parallel one."""
    found = []
    for r in range(world):
        tensor = [q for q in range(r - r % _TENSOR, r - r % _TENSOR + _TENSOR) if q < world]
        for name, ranks in (("0", [0, world - 1, 1]), (f"t{r // _TENSOR}", packed(tensor))):
            found.append(Message("groups", r, 0, {"name": name, "ranks": ranks}))
        data = list(range(r % _TENSOR, world, _TENSOR))
        found.append(Message("groups", r, 0, {"name": f"d{r % _TENSOR}", "ranks": packed(data)}))
    return found


def beat(
    rank: int, step: int, tensor: tuple[int, int], data: tuple[int, int], operation: str = "all_reduce"
) -> Message:
    """A beat: the last entered and the last completed collective of the tensor- and of the data-parallel group."""
    of = {
        "0": [3, 3, "broadcast", "Float[1]"],
        f"t{rank // _TENSOR}": [*tensor, "all_reduce", "Float[64]"],
        f"d{rank % _TENSOR}": [*data, operation, "Float[4096]"],
    }
    body: dict[str, Any] = {
        "frame": "f (train.py:1)",
        "phase": "",
        "groups": of,
        "pairs": [],
        "median": _STEP / 1000,
        "idle": 0.0,
    }
    return Message("beat", rank, step, body)


def stalled(world: int, bad: int, kind: str) -> Trial:
    """Everybody waits for one rank: those of its tensor-parallel group at once, all others for these."""
    trial = Trial(Liveness(Job(world)))
    trial.take(joined(world), 0.0)
    trial.take(groups(world), 0.0)
    trial.take((beat(r, 20, (80, 80), (40, 40)) for r in range(world)), 10.0)
    trial.turn(10.2)
    for second in range(1, 6):
        now = 10.0 + second
        messages = []
        for r in range(world):
            if kind == "clean":
                messages.append(beat(r, 20 + second, (80 + second, 80 + second), (40 + second, 40 + second)))
            elif r == bad and kind == "desync":
                messages.append(beat(r, 21, (81, 81), (41, 40), "all_gather"))
            elif kind == "desync" and r % _TENSOR == bad % _TENSOR:
                messages.append(beat(r, 21, (81, 81), (41, 40)))
            elif kind == "desync":
                messages.append(beat(r, 21, (81, 81), (41, 41)))
            elif r == bad:
                messages += [beat(r, 20, (80, 80), (40, 40))] if kind == "hang" else []
            elif r // _TENSOR == bad // _TENSOR:
                messages.append(beat(r, 21, (81, 80), (40, 40)))
            else:
                messages.append(beat(r, 21, (81, 81), (41, 40)))
        trial.take(messages, now)
        if kind in ("stopped", "dead") and second == 1:
            body = {"node": f"n{bad // 8}", "pid": 1000 + bad}
            state = {"state": "ended", "status": 9} if kind == "dead" else {"state": "stopped"}
            trial.take([Message("process", 0, 0, {**body, **state})], now)
        trial.turn(now + 0.1)
        trial.turn(now + 0.7)
    return trial


def came(generator: np.random.Generator, of_ranks: Any, steps: int = 1) -> Any:
    """When healthy ranks come to the collectives of steps, [steps, ranks, collectives], in milliseconds."""
    shape = (steps, len(of_ranks), _POINTS)
    parts = 1 + _NOISE * np.sqrt(_POINTS) * generator.standard_normal(shape, dtype=np.float32)
    parts *= of_ranks[None, :, None]
    whole = 1 + 0.5 * (generator.random((steps, len(of_ranks), 1), dtype=np.float32) < _SPIKES)
    return np.cumsum(parts * whole * (_STEP / _POINTS), axis=2)


def slow(world: int, bad: int, kind: str, generator: np.random.Generator) -> Trial:
    """Steps of ranks that do the same work, one of them slowly."""
    trial = Trial(Slow(Job(world)))
    of_ranks = 1 + _OF_RANK * generator.standard_normal(world, dtype=np.float32)
    if kind == "slow":
        of_ranks[bad] = _SLOW
    for step, times in enumerate(came(generator, of_ranks, OF), 1):
        rows = times.tolist()
        body = ({"shape": "s", "own": row, "total": _STEP, "kernels": []} for row in rows)
        trial.take((Message("times", r, step, each) for r, each in enumerate(body)), float(step))
        trial.turn(step + 0.5)
    return trial


def foreign(world: int, bad: int) -> Trial:
    """One rank has another version."""
    trial = Trial(Foreign(Job(world)))
    for r in range(world):
        facts = {"versions": {"torch": "2.12.0" if r == bad else "2.13.0", "python": "3.11"}, "settings": {"a": True}}
        trial.take([Message("facts", r, 0, {"facts": facts})], 1.0)
    trial.turn(1.5)
    return trial


def data(world: int, bad: int) -> Trial:
    """One rank reads what its neighbour reads."""
    trial = Trial(SameData(Job(world)))
    for step in (1, 2, 3):
        messages = []
        for r in range(world):
            of = bad ^ 1 if r == bad else r
            messages.append(Message("data", r, step, {"digest": f"{of}.{step}", "peers": [0, world - 1, 1]}))
        trial.take(messages, float(step))
        trial.turn(step + 0.5)
    return trial


def kinds(world: int, generator: np.random.Generator) -> dict[str, Callable[[int], tuple[Trial, set[int]]]]:
    """How a trial of each kind is made for a rank with a fault, and who must be named."""
    found: dict[str, Callable[[int], tuple[Trial, set[int]]]] = {}
    for kind in ("hang", "dead", "stopped", "desync"):
        found[kind] = lambda bad, kind=kind: (stalled(world, bad, kind), {bad})  # type: ignore[misc]
    found["clean"] = lambda bad: (stalled(world, bad, "clean"), set())
    found["slow"] = lambda bad: (slow(world, bad, "slow", generator), {bad})
    found["none slow"] = lambda bad: (slow(world, bad, "clean", generator), set())
    found["foreign"] = lambda bad: (foreign(world, bad), {bad})
    found["data"] = lambda bad: (data(world, bad), {bad, bad ^ 1})
    return found


def false_names(world: int, rank_steps: int, generator: np.random.Generator) -> int:
    """How often a healthy rank is named slow in so many steps of ranks."""
    judge, named = Slow(Job(world)), 0
    peers = list(range(world))
    of_ranks = 1 + _OF_RANK * generator.standard_normal(world, dtype=np.float32)
    for step in range(max(1, rank_steps // world)):
        named += len(judge.compare(step, peers, came(generator, of_ranks)[0]))
    return named


def simulate(world: int, trials: int = TRIALS, rank_steps: int = RANK_STEPS, seed: int = 0) -> dict[str, Any]:
    """Run all of it; the scores by kind, and the false names."""
    generator = np.random.default_rng(seed)
    scores: dict[str, Score] = {}
    for kind, make in kinds(world, generator).items():
        scores[kind] = Score()
        for _ in range(trials):
            trial, right = make(int(generator.integers(world // 2) * 2))
            scores[kind].add(trial.found, right, trial.slowest)
    exact, all_ = sum(s.exact for s in scores.values()), sum(s.trials for s in scores.values())
    return {
        "ranks": world,
        "kinds": {kind: vars(score) for kind, score in scores.items()},
        "exact": exact / all_,
        "slowest_ms": round(max(score.slowest for score in scores.values()), 1),
        "rank_steps": max(1, rank_steps // world) * world,
        "false_names": false_names(world, rank_steps, generator),
    }


def show(world: int, as_json: bool) -> int:
    """Print what came of it.

    Returns:
        The exit status: 0 if at least 98 % of the trials named the right ranks and nobody else, else 1.
    """
    in_own_process()
    result = simulate(world)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{world} simulated ranks, {TRIALS} trials of each kind")
        for kind, score in result["kinds"].items():
            print(
                f"  {kind:10} named exactly {score['exact']:3} of {score['trials']}, somebody else in "
                f"{score['wrong']}, a judgement takes {score['slowest']:.1f} ms at most"
            )
        print(f"  false names of slow ranks in {result['rank_steps']:.2g} steps of ranks: {result['false_names']}")
    return 0 if result["exact"] >= 0.98 else 1
