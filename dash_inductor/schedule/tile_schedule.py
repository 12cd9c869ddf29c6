"""`TileSchedule`: which CTA visits which tile pairs, in which order, and their ranks in the accumulation of dq tiles.

Tables, simulator, checks, reference executor and the host side of the kernels use this interface, whatever implements
it.  `ClosedForm` evaluates the expressions of a schedule, the same ones that the kernels run.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Protocol

from .codegen import python_functions
from .problem import Problem as Problem
from .schedules import define


class TileSchedule(Protocol):
    """The tile schedules of one launch.  A head is ``b * heads + h``; tiles are counted from the start of a sequence.

    Attributes:
        work_ids: number of work ids of the launch; a lower one is drawn earlier.
        parts: maximum number of kv tiles that one CTA processes, one after the other.
        shared_accumulator: whether CTAs add to one dq accumulator and wait for its semaphores.
        co_resident: whether some CTA waits for a later work id.  If not, any number of resident CTAs makes progress.
        resident: the least number of simultaneously resident CTAs with which the launch cannot hang.
    """

    @property
    def work_ids(self) -> int: ...
    @property
    def parts(self) -> int: ...
    @property
    def shared_accumulator(self) -> bool: ...
    @property
    def co_resident(self) -> bool: ...
    @property
    def resident(self) -> int: ...

    def launch(self, work_id: int) -> tuple[int, int]:
        """Return the (head, CTA index) of the CTA that holds `work_id`."""

    def kv_tile(self, head: int, cta_index: int, part: int) -> int | None:
        """Return the kv tile that a CTA processes as its `part`-th (from 0); None if there is none."""

    def visits(self, head: int, kv: int) -> int:
        """Return the number of q tiles in the tile schedule of a kv tile."""

    def q_tile(self, head: int, kv: int, step: int) -> int:
        """Return the q tile that the tile schedule of a kv tile visits in a step."""

    def rank(self, head: int, q: int, kv: int) -> int:
        """Return the position of a kv tile's contribution in the accumulation of a q tile; only for visible pairs."""

    def visible(self, head: int, q: int) -> Sequence[int]:
        """Return the kv tiles that contribute to a q tile, ascending."""

    def needs_mask(self, head: int, q: int, kv: int) -> bool:
        """Return whether some element of a visible tile pair is hidden."""

    def kind(self, head: int) -> int:
        """Return a number that identifies heads with the same tile schedules and ranks."""


def functions(name: str, problem: Problem) -> SimpleNamespace:
    """Return the generated functions of a schedule (see `codegen.SIGNATURES`) for the problem's mask, in Python."""
    return python_functions(name, problem.resolved.band)


class ClosedForm:
    """The `TileSchedule` of the schedule `name` for a band mask, computed by the expressions that define the schedule.

    Attributes:
        seen_rows, seen_keys: (first, end) of the rows that see a key, and of the keys that a row sees; ``end <= first``
            if there are none.

    Raises:
        ArgumentError: an unknown schedule or an unsupported mask.
    """

    def __init__(self, name: str, problem: Problem) -> None:
        schedule = define(name, problem.resolved.band)
        self.problem, self._f, self._tail = problem, functions(name, problem), problem.tail()
        self.work_ids = problem.batch * problem.heads * int(self._f.dash_ctas_per_head(*self._tail))
        self.parts = schedule.parts
        self.shared_accumulator = schedule.shared_accumulator
        self.co_resident = schedule.resident is not None
        self.resident = int(self._f.dash_resident(problem.batch * problem.heads, *self._tail, problem.head_chunk))
        self.seen_rows: tuple[int, int] = self._f.dash_seen_rows(*self._tail)
        self.seen_keys: tuple[int, int] = self._f.dash_seen_keys(*self._tail)

    def launch(self, work_id: int) -> tuple[int, int]:
        p = self.problem
        head, cta_index = self._f.dash_launch(work_id, p.batch * p.heads, *self._tail, p.head_chunk)
        return int(head), int(cta_index)

    def kv_tile(self, head: int, cta_index: int, part: int) -> int | None:
        kv = int(self._f.dash_kv_tile(cta_index, part, *self._tail))
        return kv if kv < self.problem.n_kv else None

    def visits(self, head: int, kv: int) -> int:
        return int(self._f.dash_visits(kv, *self._tail))

    def q_tile(self, head: int, kv: int, step: int) -> int:
        return int(self._f.dash_q_tile(kv, step, *self._tail))

    def rank(self, head: int, q: int, kv: int) -> int:
        return int(self._f.dash_rank(q, kv, *self._tail))

    def visible(self, head: int, q: int) -> range:
        first, _, _, end = self._f.dash_kv_range(q, *self._tail)
        return range(first, end)

    def needs_mask(self, head: int, q: int, kv: int) -> bool:
        _, full_first, full_end, _ = self._f.dash_kv_range(q, *self._tail)
        return not full_first <= kv < full_end

    def kind(self, head: int) -> int:
        return 0
