"""Simulated messages of ranks with a planted fault, as input for detectors."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from dash_guard.detectors.all import BITS
from dash_guard.detectors.at_rest import AtRest
from dash_guard.detectors.collective_checksums import CollectiveChecksums
from dash_guard.detectors.data import SameData
from dash_guard.detectors.detector import Detector, Job
from dash_guard.detectors.foreign import Foreign
from dash_guard.detectors.gathered_parameters import GatheredParameters
from dash_guard.detectors.liveness import Liveness
from dash_guard.detectors.replicas import Replicas
from dash_guard.detectors.slow import OF, Slow
from dash_guard.report.findings import Finding
from dash_guard.shared.class_names import spelled
from dash_guard.shared.heartbeat import packed
from dash_guard.shared.roots import STAGES, WHICH
from dash_guard.transport.messages import Message

_TENSOR = 8  # ranks of a tensor-parallel group
_STEP = 300.0  # milliseconds
_TRANSFER = 0.5  # milliseconds of a collective on GPUs
_VARIABLES = 60  # of the environment
_LOST = 0.001  # share of messages
_ALL: tuple[type[Detector], ...] = (Liveness, Slow, Foreign, SameData, *BITS)
_NOISE, _OF_RANK, _SPIKES = 0.03, 0.01, 0.002
_POINTS = 4
_SLOW = 1.2


class Trial:
    """One detector, and when it detects the fault."""

    def __init__(self, detector: Detector) -> None:
        self.detector, self.found, self.slowest = detector, list[Finding](), 0.0

    def take(self, messages: Iterable[Message], now: float) -> None:
        """Passes messages to the detector."""
        for message in messages:
            self.detector.take(message, now)

    def turn(self, now: float) -> None:
        """Lets the detector examine the messages received so far."""
        began = time.process_time()  # of this process: others run at the same time
        self.found += self.detector.detect(now)
        self.slowest = max(self.slowest, 1000 * (time.process_time() - began))


def joined(world: int) -> list[Message]:
    """Returns the messages with which all ranks join, eight per node."""
    return [
        Message("joined", r, 0, {"world": world, "host": f"node{r // 8}", "node": f"n{r // 8}", "pid": 1000 + r})
        for r in range(world)
    ]


def groups(world: int) -> list[Message]:
    """Returns the groups of all ranks: the default one, a tensor-parallel and a data-parallel one."""
    found = []
    for r in range(world):
        tensor = [q for q in range(r - r % _TENSOR, r - r % _TENSOR + _TENSOR) if q < world]
        for name, ranks in (("0", [0, world - 1, 1]), (f"t{r // _TENSOR}", packed(tensor))):
            found.append(Message("groups", r, 0, {"name": name, "ranks": ranks}))
        data = list(range(r % _TENSOR, world, _TENSOR))
        found.append(Message("groups", r, 0, {"name": f"d{r % _TENSOR}", "ranks": packed(data)}))
    return found


def heartbeat(
    rank: int, step: int, tensor: tuple[int, int], data: tuple[int, int], operation: str = "all_reduce"
) -> Message:
    """Returns a heartbeat: last entered and last completed collective of the tensor- and the data-parallel group."""
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
    return Message("heartbeat", rank, step, body)


def stalled(world: int, bad: int, kind: str) -> Trial:
    """Simulates ranks that wait for one rank: its tensor-parallel group at once, all others for that group."""
    trial = Trial(Liveness(Job(world)))
    trial.take(joined(world), 0.0)
    trial.take(groups(world), 0.0)
    trial.take((heartbeat(r, 20, (80, 80), (40, 40)) for r in range(world)), 10.0)
    trial.turn(10.2)
    for second in range(1, 6):
        now = 10.0 + second
        messages = []
        for r in range(world):
            if kind == "clean":
                messages.append(heartbeat(r, 20 + second, (80 + second, 80 + second), (40 + second, 40 + second)))
            elif r == bad and kind == "desync":
                messages.append(heartbeat(r, 21, (81, 81), (41, 40), "all_gather"))
            elif kind == "desync" and r % _TENSOR == bad % _TENSOR:
                messages.append(heartbeat(r, 21, (81, 81), (41, 40)))
            elif kind == "desync":
                messages.append(heartbeat(r, 21, (81, 81), (41, 41)))
            elif r == bad:
                messages += [heartbeat(r, 20, (80, 80), (40, 40))] if kind == "hang" else []
            elif r // _TENSOR == bad // _TENSOR:
                messages.append(heartbeat(r, 21, (81, 80), (40, 40)))
            else:
                messages.append(heartbeat(r, 21, (81, 81), (41, 40)))
        trial.take(messages, now)
        if kind in ("stopped", "dead") and second == 1:
            body = {"node": f"n{bad // 8}", "pid": 1000 + bad}
            state = {"state": "ended", "status": 9} if kind == "dead" else {"state": "stopped"}
            trial.take([Message("process", 0, 0, {**body, **state})], now)
        trial.turn(now + 0.1)
        trial.turn(now + 0.7)
    return trial


def speeds(generator: np.random.Generator, world: int) -> Any:
    """Draws the step times of healthy ranks, as factors, [ranks]."""
    return 1 + _OF_RANK * generator.standard_normal(world, dtype=np.float32)


def came(generator: np.random.Generator, of_ranks: Any, steps: int = 1) -> Any:
    """Draws when healthy ranks enter the collectives of steps, [steps, ranks, collectives], in milliseconds."""
    shape = (steps, len(of_ranks), _POINTS)
    parts = 1 + _NOISE * np.sqrt(_POINTS) * generator.standard_normal(shape, dtype=np.float32)
    parts *= of_ranks[None, :, None]
    whole = 1 + 0.5 * (generator.random((steps, len(of_ranks), 1), dtype=np.float32) < _SPIKES)
    return np.cumsum(parts * whole * (_STEP / _POINTS), axis=2)


def slow(world: int, bad: int, kind: str, generator: np.random.Generator) -> Trial:
    """Simulates steps of ranks with equal work, one of which is slow."""
    trial = Trial(Slow(Job(world)))
    of_ranks = speeds(generator, world)
    if kind == "slow":
        of_ranks[bad] = _SLOW
    for step, times in enumerate(came(generator, of_ranks, OF), 1):
        rows = times.tolist()
        body = ({"shape": "s", "own": row, "total": _STEP, "kernels": []} for row in rows)
        trial.take((Message("times", r, step, each) for r, each in enumerate(body)), float(step))
        trial.turn(step + 0.5)
    return trial


def on_gpus(generator: np.random.Generator, of_ranks: Any, step: int, links: Any) -> list[dict[str, Any]]:
    """Returns reports of two collectives of a step on GPUs, one in the tensor- and one in the data-parallel group.

    Args:
        links: factor of the transfer time in each tensor-parallel group.
    """
    world = len(of_ranks)
    when = came(generator, of_ranks)[0]
    rows: list[list[list[Any]]] = [[] for _ in range(world)]
    for data in (False, True):
        by_group = when[:, -1 if data else 1].reshape(world // _TENSOR, _TENSOR)
        by_group = by_group.T if data else by_group
        transfer = _TRANSFER * (1 + _NOISE * generator.random(by_group.shape)) * (1 if data else links[:, None])
        durations = np.round(by_group.max(axis=1, keepdims=True) - by_group + transfer, 3)
        for r, duration in enumerate((durations.T if data else durations).ravel().tolist()):
            group = f"d{r % _TENSOR}" if data else f"t{r // _TENSOR}"
            rows[r].append([group, step, duration])
    total = round(float(when.max()), 2)  # all wait for the last one
    return [{"shape": "s", "own": [], "total": total, "kernels": of} for of in rows]


def slow_on_gpus(world: int, bad: int, kind: str, generator: np.random.Generator) -> Trial:
    """Simulates `slow` with durations of collectives, or slow links in a tensor-parallel group."""
    trial = Trial(Slow(Job(world)))
    of_ranks = speeds(generator, world)
    links = np.ones(world // _TENSOR)
    if kind == "slow":
        of_ranks[bad] = _SLOW
    elif kind == "link":
        links[bad // _TENSOR] = 2.0
    for step in range(1, OF + 1):
        bodies = on_gpus(generator, of_ranks, step, links)
        trial.take((Message("times", r, step, body) for r, body in enumerate(bodies)), float(step))
        trial.turn(step + 0.5)
    return trial


def foreign(world: int, bad: int) -> Trial:
    """Simulates one rank with another version."""
    trial = Trial(Foreign(Job(world)))
    environment = {f"NCCL_{number}": "1" for number in range(_VARIABLES)}
    for r in range(world):
        versions = {"torch": "2.12.0" if r == bad else "2.13.0", "python": "3.11"}
        facts = {"versions": versions, "settings": {"a": True}, "environment": {**environment, "CPUS": f"{r % 7}"}}
        trial.take([Message("facts", r, 0, {"facts": facts})], 1.0)
    trial.turn(1.5)
    return trial


def data(world: int, bad: int) -> Trial:
    """Simulates one rank that reads the data of its neighbour."""
    trial = Trial(SameData(Job(world)))
    for step in (1, 2, 3):
        messages = []
        for r in range(world):
            of = bad ^ 1 if r == bad else r
            messages.append(Message("data", r, step, {"digest": f"{of}.{step}", "peers": [0, world - 1, 1]}))
        trial.take(messages, float(step))
        trial.turn(step + 0.5)
    return trial


def roots(of: str, step: int, wrong: str = "") -> dict[str, dict[str, list[str]]]:
    """Returns the digest roots of a rank's last four steps, with a wrong gradient in the last one."""
    steps = {
        str(number): [f"{stage:0{WHICH}d}{number:016d}" for stage in range(len(STAGES))]
        for number in range(max(1, step - 3), step + 1)
    }
    if wrong:
        steps[str(step)][1] = f"{1:0{WHICH}d}{wrong}"
    return {of: steps}


def bits(world: int, bad: int) -> Trial:
    """Simulates a gradient of one rank that differs from those of its data-parallel replicas in one step."""
    trial = Trial(Replicas(job := Job(world)))
    classes = [spelled(range(first, world, _TENSOR)) for first in range(_TENSOR)]
    for step in (1, 2, 3, 4):
        wrong = {bad: "f" * 16} if step == 3 else {}
        bodies = ({"roots": roots(classes[r % _TENSOR], step, wrong.get(r, ""))} for r in range(world))
        trial.take((Message("bits", r, step, body) for r, body in enumerate(bodies)), float(step))
        trial.turn(step + 0.2)
        for ranks, order in job.orders:
            asked = {"of": order.step, **{key: order.body[key] for key in ("class", "stage", "path")}}
            answers = ({**asked, "below": {"w": "2" if r == bad else "1"}} for r in ranks)
            trial.take((Message("bits", r, step, body) for r, body in zip(ranks, answers, strict=True)), step + 0.4)
        job.orders.clear()
        trial.turn(step + 0.6)
    return trial


def at_rest(world: int, bad: int) -> Trial:
    """Simulates a parameter of one rank that changes between two steps."""
    trial = Trial(AtRest(Job(world)))
    for step in (1, 2, 3, 4):
        for when in ("begin", "update"):
            for r in range(world):
                changed = [["parameter", "w"]] if (r, step, when) == (bad, 3, "begin") else []
                counts = {"changes": len(changed), "writes": 0, "tensors": 100}
                body = {"when": when, "changed": changed, "written": [], **counts}
                trial.take([Message("at_rest", r, step, body)], float(step))
            trial.turn(step + 0.5)
    return trial


def gathered_shards(world: int, step: int, wrong: int | None = None) -> list[dict[str, Any]]:
    """Returns the reports of an all-gather in groups of eight, by rank: digests of all segments, and of its own."""
    found = []
    for first in range(0, world, _TENSOR):
        own = [f"{step * world + r:032x}" for r in range(first, min(world, first + _TENSOR))]
        whole = hashlib.blake2b(bytes.fromhex("".join(own)), digest_size=8).hexdigest()
        where = f"{first}-{first + len(own) - 1}"
        for number, lanes in enumerate(own):
            segments = "0" * 16 if first + number == wrong else whole
            found.append({"groups": {where: {str(step): [segments, lanes]}}})
    return found


def gathered(world: int, bad: int) -> Trial:
    """Simulates one rank that has gathered other parameters than its group."""
    trial = Trial(GatheredParameters(job := Job(world)))
    for step in (1, 2, 3):
        bodies = gathered_shards(world, step, bad if step == 2 else None)
        trial.take((Message("gathered_parameters", r, step, body) for r, body in enumerate(bodies)), float(step))
        trial.turn(step + 0.2)
        for ranks, order in job.orders:
            asked = {"of": order.step, "group": order.body["group"], "segments": [f"{1:032x}"] * _TENSOR}
            trial.take((Message("gathered_parameters", r, step, asked) for r in ranks), step + 0.4)
        job.orders.clear()
        trial.turn(step + 0.6)
    return trial


def reduction(world: int, bad: int) -> Trial:
    """Simulates one rank with another all-reduce result than its data-parallel group."""
    trial = Trial(CollectiveChecksums(Job(world)))
    classes = [spelled(range(first, world, _TENSOR)) for first in range(_TENSOR)]
    for step in (1, 2, 3):
        for r in range(world):
            result = "f" * 16 if (r, step) == (bad, 2) else f"{step:016d}"
            body = {"checksums": {f"all_reduce {classes[r % _TENSOR]}": {str(step): [result, ""]}}}
            trial.take([Message("collective_checksums", r, step, body)], float(step))
        trial.turn(step + 0.2)
    return trial


def kinds(world: int, generator: np.random.Generator) -> dict[str, Callable[[int], tuple[Trial, set[int]]]]:
    """Returns, for each kind of fault, how to make a trial for a faulty rank, and which ranks must be named."""
    found: dict[str, Callable[[int], tuple[Trial, set[int]]]] = {}
    for kind in ("hang", "dead", "stopped", "desync"):
        found[kind] = lambda bad, kind=kind: (stalled(world, bad, kind), {bad})  # type: ignore[misc]
    found["clean"] = lambda bad: (stalled(world, bad, "clean"), set())
    found["slow"] = lambda bad: (slow(world, bad, "slow", generator), {bad})
    found["none slow"] = lambda bad: (slow(world, bad, "clean", generator), set())
    found["slow on GPUs"] = lambda bad: (slow_on_gpus(world, bad, "slow", generator), {bad})
    found["slow link"] = lambda bad: (
        slow_on_gpus(world, bad, "link", generator),
        set(range(bad - bad % _TENSOR, bad - bad % _TENSOR + _TENSOR)),
    )
    found["none slow on GPUs"] = lambda bad: (slow_on_gpus(world, bad, "clean", generator), set())
    found["foreign"] = lambda bad: (foreign(world, bad), {bad})
    found["data"] = lambda bad: (data(world, bad), {bad, bad ^ 1})
    found["bits"] = lambda bad: (bits(world, bad), {bad})
    found["at_rest"] = lambda bad: (at_rest(world, bad), {bad})
    found["gathered"] = lambda bad: (gathered(world, bad), {bad})
    found["reduction"] = lambda bad: (reduction(world, bad), {bad})
    return found


class Healthy:
    """Ranks without a fault that report each step to all detectors, with jitter and with lost messages."""

    def __init__(self, world: int, generator: np.random.Generator) -> None:
        self._world, self._generator, self._speeds = world, generator, speeds(generator, world)
        job = Job(world)
        self._detectors: list[Detector] = [detector(job) for detector in _ALL]
        self._gpus = Slow(job)  # half of all programs have times of kernels, the others have none

    def steps(self, number: int) -> list[Finding]:
        """Returns what detectors report in this number of steps."""
        found: list[Finding] = []
        self._send([*joined(self._world), *groups(self._world)], 0.0)
        classes = [spelled(range(first, self._world, _TENSOR)) for first in range(_TENSOR)]
        for step in range(1, number + 1):
            now = step * _STEP / 1000
            self._send(self._messages(step, classes), now)
            for detector in (*self._detectors, self._gpus):
                found += detector.detect(now)
        for detector in (*self._detectors, self._gpus):
            found += detector.finish(number * _STEP / 1000 + 1)
        return found

    def _send(self, messages: Iterable[Message], now: float) -> None:
        takers: dict[str, list[Detector]] = {}
        for detector in self._detectors:
            for kind in detector.kinds:
                takers.setdefault(kind, []).append(detector)
        for message in messages:
            for detector in takers.get(message.kind, ()):
                detector.take(message, now)

    def _messages(self, step: int, classes: list[str]) -> Iterator[Message]:
        world, draw = self._world, self._generator
        lost, ahead = draw.random((2, world)) < np.array([[_LOST], [0.5]])
        times = came(draw, self._speeds)[0].tolist()
        gathered = gathered_shards(world, step)
        gpus = on_gpus(draw, self._speeds, step, np.ones(world // _TENSOR))
        for r in draw.permutation(world).tolist():
            if not lost[r]:
                yield heartbeat(r, step, (4 * step + int(ahead[r]), 4 * step), (2 * step + int(ahead[r]), 2 * step))
                yield Message("data", r, step, {"digest": f"{r}.{step}", "peers": [r % _TENSOR, world - 1, _TENSOR]})
                yield Message("bits", r, step, {"roots": roots(classes[r % _TENSOR], step)})
                yield Message("gathered_parameters", r, step, gathered[r])
                checksums = {f"all_reduce {classes[r % _TENSOR]}": {str(step): [f"{step:016d}", ""]}}
                yield Message("collective_checksums", r, step, {"checksums": checksums})
            yield Message("times", r, step, {"shape": "s", "own": times[r], "total": _STEP, "kernels": []})
            self._gpus.take(Message("times", r, step, gpus[r]), step * _STEP / 1000)
            for when in ("begin", "update"):
                body: dict[str, Any] = {
                    "when": when,
                    "changed": [],
                    "changes": 0,
                    "written": [],
                    "writes": 0,
                    "tensors": 100,
                }
                yield Message("at_rest", r, step, body)
