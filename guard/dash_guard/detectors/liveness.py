"""Finds ranks that hang, have died, are stopped or run another program.

It uses heartbeats, shutdown notices and the states of processes. A rank that waits in a collective is innocent. So the
detector follows the waiting ranks, from group to group, to the ranks that they wait for, until it arrives at ranks that
wait for nobody. If such a rank works, as in an evaluation or a checkpoint of its own, it is busy, and no suspect.
"""

from __future__ import annotations

import os
import signal
import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..report.findings import Cause, Finding, Severity
from ..shared.heartbeat import PERIOD
from ..shared.processes import DISK, ENDED, STOPPED, words
from ..transport.messages import Message
from ..upstream.group_names import OWN
from . import wording
from .detector import Detector, Job
from .roster import KINDS, SILENT, Place, Roster, State, Waits

CERTAIN = 60.0
"""Seconds without any work after which a hang is confirmed; a rank that reads slowly may come back earlier."""
PATIENCE = {"compile": 900.0, "checkpoint": 1800.0}
"""Seconds that a known phase may take; any other phase that the program names may take as long as a checkpoint."""

_TOGETHER = 0.5  # seconds within which several deaths are evaluated together
_AT_ONCE = 0.1  # seconds between the first and the last of several deaths that are causes
_HARD = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
_ASKED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}  # with which launchers end the others
_SAME_OPERANDS = ("all_reduce", "allreduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base")
_NOTHING = (0,)  # entered in a group
_LOOK = 0.5  # seconds between two searches for hangs
_LISTED = 512  # ranks of one list
_COMMANDS = 4  # in an advice
_SHOWN = 64  # edges of a graph that are kept as evidence


Edges = dict[int, dict[Place, tuple[int, ...]]]
"""Which ranks others wait for: by waiting rank and collective, the members that have not entered it."""


class Liveness(Detector):
    """A detector that reports one finding for each cause (hanging, dead or stopped ranks), and none for its effects."""

    kinds = KINDS

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job, **settings)
        self._roster = Roster(job)
        self._lost: set[int] = set()  # dead or stopped ranks that were reported, or followed from these
        self._reported: set[object] = set()
        self._missing: dict[Place, tuple[int, ...]] = {}  # of the current call of `detect`
        self._looked = 0.0

    def take(self, message: Message, now: float) -> None:
        """Update what is known of a rank from a heartbeat, a notice of joining or leaving, a group, or a process's
        state.
        """
        if message.kind == "joined":
            self._lost.discard(message.rank)
            if not self._roster.states.get(message.rank, State(0)).there():  # a restart: all begin anew
                self._reported.clear()
        self._roster.take(message, now)

    def detect(self, now: float) -> list[Finding]:
        """Return new findings about deaths, stopped processes and hangs."""
        if self._roster.ending:
            return []
        return [*self._deaths(now), *self._stops(now), *self._hangs(now)]

    def states(self) -> list[State]:
        """The states of all ranks that have not left and whose processes have not ended."""
        return [state for state in self._roster.states.values() if state.there()]

    def finish(self, now: float) -> list[Finding]:
        """Return findings about ranks that have died at the end of the run."""
        return [] if self._roster.ending else self._deaths(now + _TOGETHER)

    def _deaths(self, now: float) -> list[Finding]:
        gone = [state for state in self._roster.states.values() if state.gone is not None and _died(state)]
        new = [state for state in gone if state.rank not in self._lost]
        if not new or min(_gone(state) for state in new) + _TOGETHER > now:
            return []
        if len(new) < len(gone):  # they follow from a death that was named
            self._lost.update(state.rank for state in new)
            return []
        asked = [state for state in new if _signal(state) not in _ASKED] or new
        hard = [state for state in asked if _signal(state) in _HARD or state.status is None] or asked
        first = min(_gone(state) for state in hard)
        causes = sorted((state for state in hard if _gone(state) <= first + _AT_ONCE), key=lambda state: state.rank)
        self._lost.update(state.rank for state in new)
        return [self._death(causes, now)]

    def _death(self, causes: list[State], now: float) -> Finding:
        ends = Counter(_how(state) for state in causes)
        ranks = tuple(state.rank for state in causes)
        how = ", ".join(ends)
        exited = all(state.status is not None and os.WIFEXITED(state.status) for state in causes)
        killed = any(_signal(state) == signal.SIGKILL for state in causes)
        where = f" in {causes[0].frame}" if causes[0].frame and len(causes) == 1 else ""
        evidence = {
            "process": {str(s.rank): words(s.status) for s in causes[:_SHOWN] if s.status is not None},
            "followed": sum(1 for s in self._roster.states.values() if s.gone is not None) - len(causes),
        }
        return Finding(
            "dead",
            "confirmed",
            f"{wording.ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} died ({how}), last seen in step "
            f"{causes[0].step}{where}",
            f"SIGKILL often comes from the kernel when memory runs out, {_on(causes[0])}: dmesg -T | grep -i killed"
            if killed
            else "",
            ranks=ranks,
            step=causes[0].step or None,
            cause="program" if exited else "unknown",
            evidence=evidence,
            latency_s=round(now - min(_gone(state) for state in causes), 2),
        )

    def _stops(self, now: float) -> list[Finding]:
        states = [state for state in self._roster.states.values() if state.there()]
        stopped = [s for s in states if s.process == STOPPED and now - s.heartbeat > SILENT - PERIOD / 2]
        new = [state for state in stopped if state.rank not in self._lost]
        if not new or len(stopped) == len(states) > 1:  # somebody has stopped the whole job
            self._lost -= {state.rank for state in states if not state.process and now - state.heartbeat < SILENT}
            return []
        self._lost.update(state.rank for state in new)
        ranks = tuple(sorted(state.rank for state in new))
        return [
            Finding(
                "stopped",
                "confirmed",
                f"{wording.ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} stopped (state T) in step {new[0].step}, "
                f"since {now - new[0].heartbeat:.1f} s",
                "Somebody has sent SIGSTOP, or a debugger holds it. To let it go on, "
                + "; ".join(f"{_on(state)}: kill -CONT {state.pid}" for state in new[:_COMMANDS]),
                ranks=ranks,
                step=new[0].step or None,
                evidence={"pids": [state.pid for state in new[:_SHOWN]], "frame": new[0].frame},
                latency_s=round(now - new[0].heartbeat, 2),
            )
        ]

    def _hangs(self, now: float) -> list[Finding]:
        if now - self._looked < _LOOK:
            return []
        self._looked = now
        states = self._roster.states
        self._missing.clear()
        stuck = {r: s for r, s in states.items() if now - s.changed > s.limit and s.there()}
        edges: Edges = {}
        alike: dict[int, dict[Place, tuple[int, ...]]] = {}  # of ranks that wait in the same collectives
        for rank, state in stuck.items():
            if state.pairs:
                edges[rank] = self._waits(state)
            elif state.open:
                waits = alike.get(id(state.open))
                edges[rank] = alike.setdefault(id(state.open), self._waits(state)) if waits is None else waits
        if not edges:
            return []
        desync = self._desync(edges, now)
        if desync:
            return desync
        distinct = {id(waits): waits for waits in edges.values()}
        held = {key for key, waits in distinct.items() if any(waits.values())}
        blocked = {rank for rank, waits in edges.items() if id(waits) in held}
        lists = {id(others): others for waits in distinct.values() for others in waits.values()}
        awaited = set[int]().union(*lists.values())
        if not awaited:
            return self._transport(edges, now)
        culprits = sorted(awaited - blocked)
        if self._lost.intersection(culprits):
            return []
        if not culprits:
            return self._circle(edges, now)
        if any(rank in states and states[rank].there() and rank not in stuck for rank in culprits):
            return []  # the rank still makes progress, and may come
        return self._culprits(culprits, edges, now)

    def _waits(self, state: State) -> dict[Place, tuple[int, ...]]:
        """The open collectives of a rank, with the members that have not entered them."""
        found: dict[Place, tuple[int, ...]] = {}
        for place, *_ in state.open:
            others = self._missing.get(place)
            if others is None:
                members, number = self._roster.sets[place.members], place.number
                others = tuple(m for m in members if self._entered(m, place.group) < number)
                self._missing[place] = others
            found[place] = others
        for group, way, peer in state.pairs:
            at = state.members.get(group)
            if at is None or peer >= len(self._roster.sets[at]):
                continue
            members = self._roster.sets[at]
            other = self._roster.states.get(members[peer])
            answers = other is not None and any(
                (g, members[p] if p < len(members) else -1) == (group, state.rank) and w != way
                for g, w, p in other.pairs
            )
            found[Place(f"{group} ({way})", at, 0)] = () if answers else (members[peer],)
        return found

    def _entered(self, rank: int, group: str) -> int:
        state = self._roster.states.get(rank)
        entered: int = state.groups.get(group, _NOTHING)[0] if state is not None else 0
        return entered

    def _operation(self, place: Place, ranks: Iterable[int]) -> str:
        names = Counter(str(self._roster.states[r].groups.get(place.group, ("", "", ""))[2]) for r in ranks)
        return names.most_common(1)[0][0] if names else ""

    def _culprits(self, culprits: list[int], edges: Edges, now: float) -> list[Finding]:
        states = self._roster.states
        of = set(culprits)
        awaiting = {place for place, others in self._missing.items() if not of.isdisjoint(others)}
        pairs = [waits for rank, waits in edges.items() if states[rank].pairs]
        awaiting |= {p for waits in pairs for p, others in waits.items() if not p.number and of & set(others)}
        places = Counter[Place]()
        distinct = {id(waits): waits for waits in edges.values()}
        for key, times in Counter(map(id, edges.values())).items():
            places.update(dict.fromkeys(awaiting.intersection(distinct[key]), times))
        place = max(places, key=lambda place: (place.group != OWN, places[place]))  # those of the program come first
        waiting = sorted(rank for rank, waits in edges.items() if waits.get(place))
        members = set(self._roster.sets[place.members])
        accused = [rank for rank in culprits if rank in members and self._entered(rank, place.group) < place.number]
        accused = accused or culprits
        busy = [rank for rank in accused if rank in states and states[rank].works(now)]
        if len(busy) == len(accused):
            return self._busy(accused, place, waiting, now)
        accused = [rank for rank in accused if rank not in busy]
        first = states.get(accused[0])
        moved = max(first.changed, first.worked) if first is not None else min(states[r].changed for r in waiting)
        since = now - moved
        phases = {states[rank].phase for rank in accused if rank in states} - {""}
        phase = sorted(phases)[0] if phases else ""
        is_phase = bool(phase) and since < PATIENCE.get(phase, PATIENCE["checkpoint"])
        doing, facts = self._doing(first, now)
        silent = first is None or now - first.heartbeat > SILENT
        sure = since > CERTAIN and ("process" in facts or not silent)
        severity: Severity = "note" if is_phase else "confirmed" if sure else "suspect"
        if not self._is_new(("hang", tuple(accused), place, severity)):
            return []
        where = place.words(self._operation(place, waiting))
        only = "has" if len(accused) == 1 else "have"
        verb = "waits" if len(waiting) == 1 else "wait"
        sentence = (
            f"{wording.ranks(accused)} {only} not entered {where}, "
            f"in which {wording.count(waiting, 'rank')} {verb}: {doing}, since {since:.1f} s"
        )
        note = f" (a known phase: {phase})" if is_phase else ""
        return [
            Finding(
                "hang",
                severity,
                sentence + note,
                ""
                if is_phase or first is None or not first.there()
                else f"Look at its stack, {_on(first)}: py-spy dump --pid {first.pid}",
                ranks=tuple(accused),
                step=max(states[rank].step for rank in waiting) or None,  # it may not have begun that step
                collective="" if place.group == OWN else where,
                cause="program" if first is not None and first.left else "unknown",
                evidence={**facts, "waits": self._graph(edges, place), "pid": first.pid if first is not None else 0},
                latency_s=round(since, 2),
            )
        ]

    def _busy(self, ranks: list[int], place: Place, waiting: list[int], now: float) -> list[Finding]:
        """A note about ranks that work while others wait for them; none yet if that may be the end of their work."""
        states = [self._roster.states[rank] for rank in ranks]
        if all(state.worked - state.changed < SILENT for state in states) or not self._is_new(
            ("busy", tuple(ranks), place)
        ):
            return []
        first, where = self._roster.states[ranks[0]], place.words(self._operation(place, waiting))
        since = now - first.changed
        verb = "waits" if len(waiting) == 1 else "wait"
        return [
            Finding(
                "hang",
                "note",
                f"{wording.ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} busy in {first.busy or first.frame}, for "
                f"{since:.0f} s; {wording.count(waiting, 'rank')} {verb} in {where}",
                ranks=tuple(ranks),
                step=max(self._roster.states[rank].step for rank in waiting) or None,
                collective="" if place.group == OWN else where,
                cause="program",
                evidence={"frame": first.frame, "pid": first.pid},
                latency_s=round(since, 2),
            )
        ]

    def _doing(self, state: State | None, now: float) -> tuple[str, dict[str, Any]]:
        if state is None:
            return "it has never joined", {}
        if not state.there():
            how = words(state.status) if state.status is not None else "regularly"
            return f"it has left ({how})", {"process": ENDED}
        if now - state.heartbeat > SILENT:
            disk = f" and is {DISK}" if state.process == DISK else ""
            facts = {"silent_s": round(now - state.heartbeat, 1)}
            text = f"it sends no heartbeats{disk}: it is stopped, or its interpreter lock is held; it was last in "
            return text + state.frame, {**facts, "process": DISK} if disk else facts
        return f"it is in {state.frame or 'no Python code'}", {"frame": state.frame}

    def _desync(self, edges: Edges, now: float) -> list[Finding]:
        """Findings about ranks that have entered different collectives under the same number."""
        states = self._roster.states
        alike: dict[int, tuple[Waits, list[int]]] = {}
        for rank in edges:
            waits = states[rank].open
            alike.setdefault(id(waits), (waits, []))[1].append(rank)
        at: dict[Place, dict[tuple[str, str], list[int]]] = {}
        for waits, ranks in alike.values():
            for place, operation, operands in waits:
                same = operands if operation in _SAME_OPERANDS else operands.partition("[")[0]
                at.setdefault(place, {}).setdefault((operation, same), []).extend(ranks)
        for place, kinds in at.items():
            if len(kinds) < 2 or place.group == OWN or not self._is_new(("desync", place)):
                continue
            sides = sorted(kinds.items(), key=lambda side: (-len(side[1]), side[1]))
            clear = len(sides[0][1]) > sum(len(ranks) for _, ranks in sides[1:])
            accused = sorted(rank for _, ranks in sides[1 if clear else 0 :] for rank in ranks)
            texts = [
                f"{wording.ranks(sorted(ranks))} in {operation} of {operands or 'nothing'} at "
                f"{states[ranks[0]].frame or 'an unknown line'}"
                for (operation, operands), ranks in sides[:3]
            ]
            return [
                Finding(
                    "desync",
                    "confirmed",
                    f"collective {place.number} of group {place.group} differs between ranks: {'; '.join(texts)}",
                    "The program takes different ways on these ranks: compare the two lines.",
                    ranks=tuple(accused[:_LISTED]),
                    step=states[accused[0]].step or None,
                    collective=f"{place.number} of group {place.group}",
                    groups=tuple(tuple(sorted(ranks)[:_LISTED]) for _, ranks in sides[:4]),
                    cause="program",
                    evidence={"waits": self._graph(edges)},
                    latency_s=round(now - min(states[rank].changed for rank in edges), 2),
                )
            ]
        return []

    def _circle(self, edges: Edges, now: float) -> list[Finding]:
        rank = min(edges, key=lambda rank: (not any(edges[rank].values()), rank))
        way: list[int] = []
        while rank not in way and rank in edges and any(edges[rank].values()):
            way.append(rank)
            rank = min(other for others in edges[rank].values() for other in others)
        circle = way[way.index(rank) :] if rank in way else way
        if not self._is_new(("circle", tuple(sorted(circle)))):
            return []
        texts = []
        for member in circle[:4]:
            place = next(place for place, others in edges[member].items() if others)
            operation = self._operation(place, [member])
            texts.append(f"rank {member} waits in {place.words(operation)} at {self._roster.states[member].frame}")
        return [
            Finding(
                "desync",
                "confirmed",
                f"{wording.ranks(sorted(circle))} wait for each other in a circle: {'; '.join(texts)}",
                "The program enters collectives of several groups in different orders: give them one order.",
                ranks=tuple(sorted(circle)),
                step=self._roster.states[circle[0]].step or None,
                cause="program",
                evidence={"waits": self._graph(edges)},
                latency_s=round(now - min(self._roster.states[rank].changed for rank in circle), 2),
            )
        ]

    def _transport(self, edges: Edges, now: float) -> list[Finding]:
        """Findings about collectives that all members have entered and that do not end, after twice the usual time."""
        states = self._roster.states
        waiting = [rank for rank in edges if now - states[rank].changed > 2 * states[rank].limit]
        places = Counter(place for rank in waiting for place in edges[rank])
        if not places or self._lost:
            return []
        place, number = places.most_common(1)[0]
        members = self._roster.sets[place.members]
        if number < len(members) or not self._is_new(("transport", place)):
            return []
        where = place.words(self._operation(place, waiting))
        hosts = tuple(dict.fromkeys(states[rank].host for rank in members if rank in states))
        cause: Cause = "network"
        return [
            Finding(
                "hang",
                "suspect",
                f"all {len(members)} ranks have entered {where}, and it does not end: its transport hangs, "
                f"between {', '.join(hosts[:8])}",
                "Look at the network between these hosts, and at NCCL_DEBUG=INFO",
                step=states[members[0]].step or None,
                collective=where,
                hosts=hosts[:_SHOWN],
                cause=cause,
                evidence={"waits": self._graph(edges)},
                latency_s=round(now - statistics.median(states[rank].changed for rank in waiting), 2),
            )
        ]

    def _graph(self, edges: Edges, first: Place | None = None) -> list[list[Any]]:
        """Edges of the wait graph: waiting rank, awaited rank and collective; those of one collective first."""
        found: list[list[Any]] = []
        for rank in sorted(edges, key=lambda rank: (first not in edges[rank], rank)):
            for place, others in edges[rank].items():
                found += [[rank, other, place.words(self._operation(place, [rank]))] for other in others[:4]]
            if len(found) >= _SHOWN:
                break
        return found[:_SHOWN]

    def _is_new(self, what: object) -> bool:
        if what in self._reported:
            return False
        self._reported.add(what)
        return True


def _on(state: State) -> str:
    return f"on {state.host}" if state.host else "there"


def _gone(state: State) -> float:
    return 0.0 if state.gone is None else state.gone


def _died(state: State) -> bool:
    """Whether a process has ended with an error, or without a shutdown notice."""
    return state.status != 0 if state.status is not None else not state.left


def _how(state: State) -> str:
    if state.status is not None:
        return words(state.status)
    return "its process has ended"


def _signal(state: State) -> int | None:
    return os.WTERMSIG(state.status) if state.status is not None and os.WIFSIGNALED(state.status) else None
