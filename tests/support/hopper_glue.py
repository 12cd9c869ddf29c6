"""The roles of the Hopper kernel as plain Python: which tile goes where, and who waits for what.

The source of `kernels/hopper` runs as it stands, every role of every CTA in a thread of its own, the consumers in two,
one for each warpgroup, one at a time in an order drawn from a seed.  Stand-ins take the place of Triton: barriers count
phases, bytes and arrivals as the hardware does; a copy by TMA arrives some time after it was issued; matmuls are in
flight until they are waited for.  A warpgroup writes its half of a tile, and its matmuls read whole tiles; what one
thread does for all consumers, arrivals at mbarriers and TMA stores, the first one does at its own time.  A value says
only what it was computed from: `Value.parts`.  `Fault` is raised for whatever would be wrong on a GPU: tiles that
are read before they are full, overwritten while in use or not visible yet, turns out of order, and roles that wait for
ever.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

from triton.runtime.jit import JITFunction

from dash_inductor.kernels.common.arguments import Group
from dash_inductor.kernels.common.device import score_gluon
from dash_inductor.kernels.common.device.relations.form import Form, read_by
from dash_inductor.kernels.hopper.backward.device import (
    closed_form,
    consumer,
    entry,
    group,
    producer,
    reducer,
    split_loops,
    stamps,
    table_tile_schedule,
    work_ids,
)
from dash_inductor.kernels.hopper.shared.device import (
    clear,
    dropout,
    head_work,
    operations,
    packed_tiles,
    shared_memory,
    step_signals,
    steps,
    varlen_layout,
)
from dash_inductor.model import dropout as definition
from dash_inductor.schedule.table_tile_schedule import TILE_BITS

AGGREGATES: dict[str, Any] = {
    "aggregate": functools.partial(dataclass, eq=False),
    "replace": replace,
    "group": None,
}
"""Stand-ins for `kernels.common.device.aggregates`."""


def changed(constants: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """Groups of compile-time constants with other values."""
    assert values.keys() <= {name for group in constants.values() for name in group._fields}
    return {
        name: group._replace(**{field: values[field] for field in group._fields if field in values})
        for name, group in constants.items()
    }


def grouped(types: Mapping[str, Any], **values: Mapping[str, Any]) -> dict[str, Any]:
    """Groups of arguments by name, and named tuples of them, None for those that are absent."""
    groups = {name: kind for name, kind in types.items() if not isinstance(kind, str)}
    found: dict[str, Any] = {}
    for name, kind in groups.items():
        if isinstance(kind, Mapping):
            found[name] = SimpleNamespace(**grouped(kind, **values.get(name, {})))
        else:
            found[name] = kind and as_arguments(kind, kind.values(**values[name]))
    given = {name for name, kind in groups.items() if isinstance(kind, Group)}
    assert given <= values.keys() <= groups.keys()
    return found


def as_arguments(group: Group, values: Sequence[Any]) -> Any:
    """The values of a group of arguments as device code sees them."""
    return SimpleNamespace(**dict(zip(group.names, values, strict=True)))


def python_functions(schedule: Any, functions: Any) -> dict[str, Any]:
    """The functions of a group of constants by name, as these Python functions."""
    return {name: getattr(functions, f.__name__) for name, f in schedule._asdict().items() if callable(f)}


class Fault(AssertionError):
    """A fault that would be a wrong result or a hang on a GPU."""


class DType(NamedTuple):
    primitive_bitwidth: int


class Value:
    """A tensor in registers: its shape, and what it was computed from.

    parts: of an element-wise result the parts of its operands; of a sum of matmuls one (left, right) pair per matmul,
    in their order.
    first: of consecutive numbers the first one.
    """

    def __init__(
        self, shape: Sequence[int], parts: tuple[Any, ...] = (), matmul: Matmul | None = None, first: int | None = None
    ) -> None:
        self.shape, self.parts, self.matmul, self.first = list(shape), parts, matmul, first
        self.type = SimpleNamespace(layout=None)
        self.dtype = None

    def read(self) -> tuple[Any, ...]:
        if self.matmul is not None and not self.matmul.done:
            raise Fault("the result of a matmul is used before it is waited for")
        return self.parts

    def _with(self, other: Any) -> Value:
        parts, shape = self.read(), self.shape
        if isinstance(other, Value):
            parts += tuple(part for part in other.read() if part not in parts)
            shape = shape if math.prod(shape) >= math.prod(other.shape) else other.shape
        return Value(shape, parts)

    def __add__(self, other: Any) -> Value:
        found = self._with(other)
        found.first = self.first + other if self.first is not None and isinstance(other, int) else None
        return found

    __radd__ = __add__
    __mul__ = __rmul__ = __sub__ = __mod__ = __and__ = __rand__ = __lt__ = __ge__ = __le__ = __eq__ = __ne__ = _with  # type: ignore[assignment]  # all alike
    __hash__ = None  # type: ignore[assignment]  # as of any class with its own equality

    def to(self, _: Any = None) -> Value:
        return Value(self.shape, self.read())

    __neg__ = to

    def reshape(self, shape: Sequence[int]) -> Value:
        assert math.prod(shape) == math.prod(self.shape)
        return Value(shape, self.read())

    def permute(self, order: Sequence[int]) -> Value:
        return Value([self.shape[i] for i in order], self.read())


@dataclass(eq=False)
class Matmul:
    """A matmul in flight reads its operands in shared memory until it is done."""

    operands: list[Tile]
    done: bool = False


@dataclass(eq=False)
class Write:
    """A write of threads to a tile: the roles whose matmuls and TMA may read it, or all of them."""

    roles: list[Role] = field(default_factory=list)
    by_all: bool = False


class Tile:
    """A tile in shared memory, in blocks as descriptors see them.

    blocks: what each holds, None while a copy is under way; readers: matmuls and bulk stores that may still read it;
    in_halves: the blocks are the two warpgroups', which hold the same if they belong together; writes: the last one of
    threads to each block; first: as of a `Value`; work id: of the role that wrote it, which the roles to whom it tells
    something have, too; results: the tiles that lie in it.
    """

    def __init__(self, simulation: Simulation, name: str, shape: Sequence[int], dtype: DType) -> None:
        self.simulation, self.name, self.shape, self.dtype = simulation, name, list(shape), dtype
        self.blocks: dict[int, tuple[Any, ...] | None] = {}
        self.readers: list[Any] = []
        self.in_halves = False
        self.writes: dict[int, Write] = {}
        self.first: int | None = None
        self.work_id = -1
        self.layout = None
        self.results: dict[int, Part] = {}

    def permute(self, _: Any) -> Tile:
        return self

    def reinterpret(self, _dtype: Any, shape: Sequence[int], _layout: Any) -> Ring:
        return Ring([(self, i) for i in range(shape[0])], shape)

    def contents(self) -> tuple[Any, ...]:
        """The values that it holds.  A role that reads before anything was written must not use the result."""
        found: tuple[Any, ...] = ()
        for block in self.blocks.values():
            if block is None:
                raise Fault(f"{self.name} is read before it is full")
            found += block
        if self.in_halves:
            if len(self.blocks) < 2 or self.blocks[0] != self.blocks[1]:
                raise Fault(f"{self.name} is read before both warpgroups have written it")
            return self.blocks[0] or ()
        return found if self.blocks else (("uninitialised", self.name),)

    def by_async_proxy(self) -> tuple[Any, ...]:
        """The contents that matmuls and TMA read."""
        reader = self.simulation.current
        if not all(write.by_all or reader in write.roles for write in self.writes.values()):
            raise Fault(f"{self.name} is read before a fence and a barrier made it visible")
        return self.contents()

    def check_free(self, *blocks: int) -> None:
        """Raises Fault if one of these blocks, or any if none is named, must not be written."""
        if self.readers or any(part.readers for part in self.results.values()):
            raise Fault(f"{self.name} is overwritten while it is in use")
        if None in [self.blocks.get(i, ()) for i in blocks or self.blocks]:
            raise Fault(f"{self.name} is overwritten while a copy to it is under way")

    def store(self, value: Value) -> None:
        assert math.prod(value.shape) == math.prod(self.shape), (value.shape, self.shape)
        self.simulation.pause()
        self.check_free()
        self.put(value)
        self.was_written()

    def put(self, value: Value) -> None:
        """Replace what it holds, or its half of a warpgroup."""
        role = self.simulation.current
        assert role is not None
        if role.other is None or not self.in_halves:
            self.blocks, self.writes, self.in_halves = {}, {}, role.other is not None
        self.blocks[role.half] = value.read()
        self.first, self.work_id = value.first, role.work_id

    def was_written(self) -> None:
        role = self.simulation.current
        assert role is not None
        self.writes[role.half] = Write()
        role.written.append(self.writes[role.half])

    def begin_copy(self, block: int) -> None:
        self.check_free(block)
        if self.in_halves:
            self.blocks, self.writes, self.in_halves = {}, {}, False
        self.blocks[block] = None

    def land(self, block: int, name: str, coordinates: Sequence[int]) -> None:
        """A copy to a block has ended: of what is at these coordinates of a tensor."""
        self.blocks[block], self.writes = ((name, *coordinates),), {}

    def load(self, _: Any) -> Value:
        if self.first is not None:
            assert self.simulation.current is not None
            self.simulation.current.work_id = self.work_id
        return Value(self.shape, self.contents(), first=self.first)


class Part(Tile):
    """A tile that lies in another one, its buffer: who uses the buffer uses all of its parts."""

    def __init__(self, buffer: Tile, name: str, tile: Tile) -> None:
        super().__init__(buffer.simulation, f"{buffer.name} as {name}", tile.shape, tile.dtype)
        self.buffer = buffer

    def check_free(self, *blocks: int) -> None:
        if self.buffer.readers:
            raise Fault(f"{self.name} is overwritten while its buffer is in use")
        super().check_free(*blocks)

    def store(self, value: Value) -> None:
        super().store(value)
        self.buffer.put(value)


class Longer:
    """A tile of which the pieces lie one behind the other; copies go to it, and what they bring is read in pieces."""

    def __init__(self, pieces: Sequence[Tile]) -> None:
        self.pieces, self.dtype = pieces, pieces[0].dtype
        self.shape = [sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:]]

    def begin_copy(self, block: int) -> None:
        for piece in self.pieces:
            piece.begin_copy(block)

    def land(self, block: int, name: str, coordinates: Sequence[int]) -> None:
        *outer, row = coordinates[: len(coordinates) - len(self.shape) + 1]
        for piece in self.pieces:
            piece.land(block, name, (*outer, row, *coordinates[len(outer) + 1 :]))
            row += piece.shape[0]


class Ring:
    def __init__(self, entries: Sequence[Any], shape: Sequence[int]) -> None:
        self.entries, self.shape = entries, list(shape)
        self.dtype = getattr(entries[0], "dtype", None) if entries else None

    def index(self, i: int) -> Any:
        return self.entries[i]


class Barrier:
    """An mbarrier: a phase ends when its arrivals and its bytes are all there."""

    def __init__(self) -> None:
        self.phase, self.arrivals, self.bytes, self.count = 0, 0, 0, 0

    def arrive(self, number: int) -> None:
        self.arrivals -= number
        if self.arrivals < 0:
            raise Fault("more arrivals at a barrier than a phase has")
        self.end()

    def end(self) -> None:
        if self.arrivals == 0 and self.bytes == 0:
            self.phase, self.arrivals = self.phase + 1, self.count


@dataclass
class NamedBarrier:
    """A barrier for a number of threads, who arrive in roles; it is as new when all are there.

    there: the roles, and whether they wait; writes: what they had written and fenced; phase: how often all have come.
    """

    threads: int = 0
    there: dict[Role, bool] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)
    phase: int = 0

    def come(self, role: Role, threads: int, waits: bool) -> None:
        if self.there and threads != self.threads:
            raise Fault("a named barrier for two numbers of threads")
        if role in self.there:
            raise Fault(f"{role.name} comes to a named barrier again before the others have come")
        self.threads, self.there[role] = threads, waits
        self.writes += role.fenced
        missing = threads - sum(r.threads for r in self.there)
        if missing < 0:
            raise Fault("more threads come to a named barrier than it has")
        if missing == 0:
            for write in self.writes:
                write.roles += [r for r, stays in self.there.items() if stays]
            self.there, self.writes, self.phase = {}, [], self.phase + 1


@dataclass(frozen=True)
class Pointer:
    name: str
    offset: int = 0

    def __add__(self, other: Any) -> Pointer:
        offset = other if isinstance(other, int) else other.first or 0
        return Pointer(self.name, self.offset + offset)


@dataclass(frozen=True)
class Descriptor:
    name: str
    shape: tuple[int, ...]
    dtype: DType
    layout: Any = None

    @property
    def block_type(self) -> Any:
        return SimpleNamespace(shape=list(self.shape))


@dataclass(eq=False)
class Role:
    """A role of a CTA, or a warpgroup of the consumers: a thread that runs when it is its turn.

    work_id: the one that it works on; half, other: which of two warpgroups it is, and the other one; met: how often it
    has come to a barrier with the other.
    """

    cta: int
    name: str
    run: Callable[[], None]
    work_id: int = -1
    half: int = 0
    other: Role | None = None
    met: int = 0
    ready: Callable[[], bool] = lambda: True
    waits_for: str = ""
    over: bool = False
    error: BaseException | None = None
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    matmuls: list[Matmul] = field(default_factory=list)
    written: list[Write] = field(default_factory=list)
    fenced: list[Write] = field(default_factory=list)
    storing: list[Tile] = field(default_factory=list)
    copying: list[tuple[Tile, Pointer]] = field(default_factory=list)

    @property
    def threads(self) -> int:
        return 32 if self.other is None else 128


class Store(NamedTuple):
    """A tile, or a block of one, on its way to global memory, for this work id: "store", "add", "some rows".

    Of some rows of a tile the coordinates are head, first token, first column, and how many.
    """

    how: str
    descriptor: str
    coordinates: tuple[int, ...]
    parts: tuple[Any, ...]
    work_id: int
    time: int = 0


class _Abandoned(BaseException):
    """Ends the threads of a simulation that is over."""


class Simulation:
    """One launch of the main kernel.

    Args:
        constants: the kernel's groups of compile-time constants, schedule functions as Python.
        arguments: its other arguments by name.
        ctas: how many there are; its arguments say how many work ids they take.
        memory: the numbers behind pointers, by their names; any others are loaded as values that are called so.
        resident: how many may run at the same time.
        seed: of the order in which roles and copies take turns.
        late: copies arrive when nothing else can happen; otherwise at any time.
        edits: replacements in the source, for controls that must fail.

    After `run`, `stores` is what went to global memory, in this order, `sums` what grouped heads added there by
    pointer and warpgroup, `semaphores` the final counts by pointer, `stamps` the numbers that were written by pointer,
    and `cleared` of the tiles whose rows were cleared what they had, and what said which rows.  Each look at the clock
    finds it one later; the SM of a CTA is its number + 1000.  `taken` is which CTA took a work id, `passed` what the
    clock showed when a semaphore was set after the wait for a rank, and `arrived` at which named barriers a warpgroup
    arrived when, by work id.
    """

    def __init__(
        self, constants: dict[str, Any], arguments: dict[str, Any], ctas: int, *, resident: int, seed: int = 0,
        memory: Mapping[str, Sequence[int]] | None = None, late: bool = False, edits: tuple[tuple[str, str], ...] = (),
    ) -> None:  # fmt: skip
        self.constants, self.arguments, self.ctas, self.resident = constants, arguments, ctas, resident
        self.late, self.random, self.memory = late, random.Random(seed), memory or {}
        self.stores: list[Store] = []
        self.sums: dict[tuple[Pointer, int], Value] = {}
        self.semaphores: dict[Pointer, int] = defaultdict(int)
        self.stamps: dict[Pointer, int] = {}
        self.time = 0
        self.passed: dict[tuple[Pointer, int], int] = {}
        self.arrived: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.cleared: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
        self.taken: list[int] = []
        self.begun = 0  # CTAs
        self.barriers: list[Barrier] = []
        self.named: dict[tuple[int, int], NamedBarrier] = defaultdict(NamedBarrier)
        self.copies: list[Callable[[], None]] = []
        self.roles: list[Role] = []
        self.current: Role | None = None
        self.main = threading.Semaphore(0)
        self.abandoned = False
        self.kernel = _kernel(_stand_ins(self), edits)

    def run(self) -> None:
        """Raises Fault."""
        try:
            while self._more_roles():
                role = self._next()
                if role is not None:
                    self._resume(role)
                    if role.error is not None:
                        raise role.error
        finally:
            self.abandoned = True
            for role in self.roles:
                self._resume(role)
        if self.copies:
            raise Fault("copies arrive after the end")
        for barrier in self.barriers:
            if (barrier.arrivals, barrier.bytes) != (barrier.count, 0):
                raise Fault("a barrier is left in the middle of a phase")
        if any(barrier.there for barrier in self.named.values()):
            raise Fault("a named barrier is left with somebody there")

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Let others run until `ready`; now and then also if it is."""
        role = self.current
        assert role is not None
        if not ready() or self.random.random() < 0.2:
            role.ready, role.waits_for = ready, what
            self._yield(role)

    def pause(self) -> None:
        """Let others run now and then."""
        self.wait(lambda: True, "nothing")

    def _more_roles(self) -> bool:
        self.roles = [role for role in self.roles if not role.over]
        while self.begun < self.ctas and len({role.cta for role in self.roles}) < self.resident:
            self.current, self.begun = None, self.begun + 1
            self.kernel(**self.arguments, **with_forms(self.constants, self.kernel))  # it ends with `specialise`
        return bool(self.roles)

    def specialise(self, partitions: Sequence[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
        for function, arguments in partitions:
            role = Role(self.begun - 1, function.__name__, lambda f=function, a=arguments: f(*a))  # type: ignore[misc]  # binds now
            threading.Thread(target=self._thread, args=(role,), daemon=True).start()
            self.roles.append(role)

    def _thread(self, role: Role) -> None:
        role.turn.acquire()
        try:
            if not self.abandoned:
                role.run()
                if role.matmuls and not role.matmuls[-1].done:
                    raise Fault("a role ends with a matmul in flight")
        except _Abandoned:
            pass
        except BaseException as error:
            role.error = error
        role.over = True
        self.main.release()

    def _yield(self, role: Role) -> None:
        self.main.release()
        role.turn.acquire()
        if self.abandoned:
            raise _Abandoned

    def _resume(self, role: Role) -> None:
        if not role.over:
            self.current = role
            role.turn.release()
            self.main.acquire()

    def _next(self) -> Role | None:
        """A role that can go on; or None, when a copy has arrived instead."""
        ready = [role for role in self.roles if role.ready()]
        if self.copies and (not ready or (not self.late and self.random.random() < 0.5)):
            self.copies.pop(self.random.randrange(len(self.copies)))()
            return None
        if not ready:
            waits = [f"{role.name} of CTA {role.cta} for {role.waits_for}" for role in self.roles]
            raise Fault(f"everybody waits: {'; '.join(waits)}")
        return self.random.choice(ready)


_MODULES = (
    score_gluon, operations, step_signals, clear, varlen_layout, head_work, packed_tiles, shared_memory, work_ids,
    closed_form, table_tile_schedule, dropout, steps, split_loops,
    group, stamps, producer, consumer, reducer, entry,
)  # fmt: skip


source = functools.cache(inspect.getsource)


@functools.cache
def definitions(text: str, file: str) -> tuple[CodeType, frozenset[str]]:
    """The code of a module's text without its imports, and the names of the functions and classes that it defines."""
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return compile(tree, file, "exec"), frozenset(names)


def _kernel(stand_ins: dict[str, Any], edits: tuple[tuple[str, str], ...]) -> Callable[..., None]:
    """`hopper_backward` of the modules' source without their imports; `stand_ins` replace what they import."""
    namespace: dict[str, Any] = {"__name__": __name__}
    left = dict(edits)
    namespace.update(stand_ins)
    for module in _MODULES:
        text = source(module).replace(".to(gl.int64)", "")  # a Python integer has no type to change
        for old in [old for old in left if old in text]:
            text = text.replace(old, left.pop(old))
        code, names = definitions(text, module.__file__ or "")
        allowed = module in (score_gluon, operations, clear, varlen_layout, packed_tiles) or not names & set(namespace)
        assert allowed, "two definitions of one name"
        exec(code, namespace)
        namespace.update(stand_ins)
    if left:
        raise ValueError(f"not in the source: {list(left)}")
    namespace["read_by"] = as_python(read_by, namespace)
    kernel: Callable[..., None] = namespace["hopper_backward"]
    return kernel


def as_python(function: Any, namespace: dict[str, Any]) -> Callable[..., Any]:
    """A device function whose globals are these."""
    return FunctionType(function.fn.__code__, namespace)


def with_forms(constants: dict[str, Any], kernel: Callable[..., None]) -> dict[str, Any]:
    """The constants, with Python functions in the forms of relations, which call those of the kernel's namespace."""
    mask = constants["MASK"]

    def form(of: Form) -> SimpleNamespace:
        namespace: dict[str, Any] = {}
        module = of.keep.fn.__globals__
        namespace.update({name: as_python(f, namespace) for name, f in module.items() if isinstance(f, JITFunction)})
        namespace.update(kernel.__globals__)
        functions = {name: as_python(getattr(of, name), namespace) for name in ("test", "keep")}
        return SimpleNamespace(**vars(of) | functions)

    return constants | {"MASK": mask._replace(FORMS=tuple(map(form, mask.FORMS)))}


def _stand_ins(simulation: Simulation) -> dict[str, Any]:
    """By name, what the modules import, and the functions of inline assembly."""
    s = simulation

    def current() -> Role:
        assert s.current is not None
        return s.current

    def allocate(dtype: DType, shape: list[int], layout: Any) -> Any:
        if layout == "barriers":
            s.barriers += (ring := [Barrier() for _ in range(shape[0])])
            return Ring(ring, shape)
        name = f"{dtype.primitive_bitwidth}-bit tile {shape}"
        if len(shape) == 3 or layout == "rows":
            return Ring([Tile(s, f"{name} stage {i}", shape[1:], dtype) for i in range(shape[0])], shape)
        return Tile(s, name, shape, dtype)

    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.arrivals = count

    def arrive(barrier: Barrier, count: int) -> None:
        if current().half == 0:
            barrier.arrive(count)

    def arrive_at(number: int, threads: int) -> None:
        s.pause()
        s.arrived[current().work_id].append((number, s.time))
        s.named[current().cta, number].come(current(), threads, waits=False)

    def meet_at(number: int, threads: int) -> None:
        barrier = s.named[current().cta, number]
        phase = barrier.phase
        barrier.come(current(), threads, waits=True)
        s.wait(lambda: barrier.phase > phase, f"named barrier {number}")

    def expect(barrier: Barrier, number: int) -> None:
        barrier.bytes += number
        barrier.arrive(1)

    def wait(barrier: Barrier, parity: int) -> None:
        s.wait(lambda: barrier.phase & 1 != parity, f"parity {parity} of a barrier in phase {barrier.phase}")

    def copy_in(desc: Descriptor, coordinates: Sequence[int], barrier: Barrier, target: Any) -> None:
        tile, i = target if isinstance(target, tuple) else (target, 0)
        tile.begin_copy(i)
        number = math.prod(desc.shape) * desc.dtype.primitive_bitwidth // 8

        def arrive() -> None:
            tile.land(i, desc.name, coordinates)
            barrier.bytes -= number
            if barrier.bytes < 0:
                raise Fault("a barrier expects fewer bytes than arrive")
            barrier.end()

        s.copies.append(arrive)

    def copy_in_threads(tile: Tile, pointer: Pointer) -> None:
        tile.check_free()
        tile.begin_copy(0)
        current().copying.append((tile, pointer))

    def arrive_with_copies(barrier: Barrier) -> None:
        begun = list(current().copying)
        current().copying.clear()
        barrier.arrivals += 1

        def arrive() -> None:
            for tile, pointer in begun:
                tile.blocks = {0: ((pointer.name, pointer.offset),)}
            barrier.arrive(1)

        s.copies.append(arrive)

    def copy_out(how: str) -> Callable[..., None]:
        def copy(desc: Descriptor, coordinates: Sequence[int], source: tuple[Tile, int]) -> None:
            if current().half:
                return
            tile = source[0]
            s.stores.append(Store(how, desc.name, tuple(coordinates), tile.by_async_proxy(), current().work_id, s.time))
            tile.readers.append(current())
            current().storing.append(tile)

        return copy

    def store_first(target: Any, _b: int, h: int, token: int, count: int, tile: Tile, _warps: int, column: int) -> None:
        """`varlen_layout._store_first`, of which the simulation of the forward runs the source."""
        s.pause()
        coordinates = h, token, column, count
        store = Store("some rows", target.ptr.name, coordinates, tile.contents(), current().work_id)
        if current().half == 0:
            s.stores.append(store)

    def store_wait(number: int = 0, _semantic: Any = None) -> None:
        assert number == 0
        for tile in current().storing:
            tile.readers.remove(current())
        current().storing.clear()

    def matmul(left: Any, right: Any, total: Value, *, use_acc: bool = True, is_async: bool = False) -> Value:
        operands = [x for x in (left, right) if isinstance(x, Tile)]
        pair = tuple(x.by_async_proxy() if isinstance(x, Tile) else x.read() for x in (left, right))
        m = Matmul(operands)
        for tile in operands:
            tile.readers.append(m)
        current().matmuls.append(m)
        if not is_async:
            matmul_wait(0)
        return Value(total.shape, (total.parts if use_acc else ()) + (pair,), m)

    def matmul_wait(number: int, deps: tuple[Value, ...] = ()) -> Any:
        s.pause()
        matmuls = current().matmuls
        for m in matmuls[: len(matmuls) - number]:
            m.done = True
            for tile in m.operands:
                tile.readers.remove(m)
        del matmuls[: len(matmuls) - number]
        return deps[0] if len(deps) == 1 else deps

    def fence() -> None:
        if s.current is not None:  # the one before roles part has nothing to fence
            current().fenced += current().written
            current().written.clear()

    def meet() -> None:
        role, other = current(), current().other
        role.met += 1
        met = role.met
        if other is None or other.met == met:
            for one in (role, other or role):
                for write in one.fenced:
                    write.by_all = True
                one.fenced.clear()
        if other is not None:
            s.wait(lambda: other.met >= met, "the other warpgroup")

    def wait_semaphore(semaphore: Pointer, rank: int) -> None:
        s.wait(lambda: s.semaphores[semaphore] == rank, f"rank {rank} of {semaphore}")

    def release(semaphore: Pointer, value: int, _before: str, _register: str) -> None:
        if current().half == 0:
            if s.semaphores[semaphore] != value - 1:
                raise Fault(f"{semaphore} is released out of order")
            s.semaphores[semaphore] = value
            s.passed[semaphore, value - 1] = s.time

    def add(pointer: Pointer, what: Any, sem: str) -> Any:
        assert sem == "relaxed"
        if pointer.name == "work_id":
            assert what == 1
            current().work_id = len(s.taken)
            s.taken.append(current().cta)
            return current().work_id
        s.pause()
        s.sums[pointer, current().half] = Value(what.shape, load(pointer, ".cg").parts + what.read())
        return None

    def load(
        pointer: Pointer, cache_modifier: str = "", mask: Any = None, other: int | None = None, volatile: bool = False
    ) -> Any:
        if pointer.name in s.memory:
            return other if mask is False else s.memory[pointer.name][pointer.offset]
        if mask is not None:  # an operand of the mask
            return Value(mask.shape, ((pointer.name, pointer.offset, other), *mask.parts))
        assert cache_modifier == ".cg"  # the first cache is not coherent
        if (pointer, current().half) not in s.sums:
            raise Fault(f"{pointer} is read before it is written")
        return s.sums[pointer, current().half]

    def store(pointer: Pointer, value: Value | int, mask: bool = True) -> None:
        if isinstance(value, Value):
            s.sums[pointer, current().half] = Value(value.shape, value.read())
        elif mask:
            if pointer in s.stamps:
                raise Fault(f"{pointer} is stamped twice")
            s.stamps[pointer] = value

    def globaltimer() -> int:
        s.time += 1
        return s.time

    def unseen_keys(keys_seen: Pointer, row: int, kv: int, kv_len: int, block_kv: int) -> Value:
        begin, first = row * kv_len, kv * block_kv
        seen = s.memory[keys_seen.name][begin + first : begin + min(first + block_kv, kv_len)]
        return Value([1], first=int(not all(seen)))

    def within_band(keep: Value, _work: Any, q_row: int, _columns: Value, rows: Value, _mask: Any) -> Value:
        return Value(keep.shape, (("band", q_row, rows.first), *keep.parts))

    def blind_queries(lse: Tile) -> Value:
        return Value(lse.shape, lse.contents())

    def cleared(tile: Tile, hidden: Value) -> None:
        tile.check_free()
        s.cleared.append((tile.contents(), hidden.parts))
        tile.was_written()

    def as_tiles(buffer: Tile, tile: Tile, count: int) -> Ring:
        for i in range(count):
            buffer.results.setdefault(i, Part(buffer, f"tile {i}", tile))
        return Ring([buffer.results[i] for i in range(count)], [count, *tile.shape])

    def as_longer(ring: Ring, count: int) -> Ring:
        each = len(ring.entries) // count
        if each == 1:
            return ring
        longer = [Longer(ring.entries[i * each : (i + 1) * each]) for i in range(count)]
        return Ring(longer, [count, *longer[0].shape])

    def where(condition: Any, a: Any, b: Any) -> Any:
        if isinstance(condition, Value):
            return condition * a * b
        return a if condition else b

    def minimum(a: Any, b: Any) -> Any:
        return a if isinstance(a, Value) else min(a, b)

    def largest(value: Value, axis: int) -> int:
        if value.shape != [1] or value.first is None:
            raise Fault("a packed tile id is read before it is written")
        return value.first

    def specialise(partitions: Any, warps: list[int], registers: list[int]) -> None:
        assert len(partitions) - 1 == len(warps) == len(registers)
        s.specialise([partitions[0], *partitions])
        first, second = s.roles[-1 - len(partitions) :][:2]
        first.other, second.other, second.half = second, first, 1

    def static_assert(condition: bool) -> None:
        assert condition

    def same(x: Any, *_: Any, **__: Any) -> Any:
        return x

    gl = SimpleNamespace(
        tensor=None, shared_memory_descriptor=None, constexpr=same, static_range=range, static_assert=static_assert,
        int1=DType(1), int32=DType(32), int64=DType(64), float32=DType(32), num_warps=lambda: 8, maximum=max,
        minimum=minimum,
        where=where, max=largest, full=lambda shape, number, *_: Value(shape, first=number),
        BlockedLayout=lambda *_: None, SwizzledSharedLayout=lambda *_: "rows",
        SliceLayout=lambda *_: None, NVMMADistributedLayout=lambda *_: None, DotOperandLayout=lambda *_: None,
        NVMMASharedLayout=_SharedLayout, allocate_shared_memory=allocate, warp_specialize=specialise,
        zeros=lambda shape, *_: Value(shape), arange=lambda first, end, _: Value([end - first], first=first), exp2=same,
        to_tensor=same, expand_dims=same, convert_layout=same, join=lambda a, b: Value([*a.shape, 2], (a + b).parts),
        atomic_add=add, store=store, load=load, fma=lambda a, b, c: a,
    )  # fmt: skip

    def powers_and_slopes(v: Value, far: Any, factor: float, shift: Value) -> tuple[Value, Value]:
        return v + shift, v

    renamed = SimpleNamespace(
        BARRIER=(meet,), COPY=(copy_in_threads,), REINTERPRET=(Tile.reinterpret,), TMA_LOAD=(copy_in,),
        TMA_STORE=(copy_out("store"),),
        resolve=same, reads_only=dict, waits_meet=lambda: False, arrivals_meet=lambda: False,
        computes_early=lambda: False,
    )  # fmt: skip
    return {
        "math": math, "ir": None, "compat": renamed, "builtin": same, "store_wait": store_wait,
        "gluon": SimpleNamespace(jit=same, constexpr_function=same), "gl": gl, **AGGREGATES,
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: "barriers", init=init, expect=expect, wait=wait,
            arrive=arrive,
        ),
        "async_reduce_add": copy_out("add"), "fence_async_shared": fence, "warpgroup_mma": matmul,
        "wait_for_matmuls": matmul_wait, "gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None,
        "globaltimer": globaltimer, "smid": lambda: 1000 + current().cta,
        "async_copy": SimpleNamespace(mbarrier_arrive=arrive_with_copies),
        "unseen_keys": unseen_keys, "within_band": within_band, "blind_queries": blind_queries, "clear": cleared,
        "TILE_BITS": TILE_BITS, "definition": definition, "here": same,
        "as_tiles": as_tiles, "as_longer": as_longer,
        "_store_first": store_first, "wait_semaphore": wait_semaphore, "_release": release,
        "_begun": lambda s, slope: (s, None), "_powers_and_slopes": powers_and_slopes,
        "arrive_at": arrive_at, "meet_at": meet_at, "wait_for_own_stores": store_wait, "hold_back": same,
        "not_before": same,
    }  # fmt: skip


class _SharedLayout:
    """Gluon's layout of shared memory, as far as it says what is allocated."""

    def __new__(cls, *_: Any, rank: int) -> Any:
        return "rows"

    @staticmethod
    def get_default_for(shape: Sequence[int], dtype: DType) -> str:
        return "tiles"
