"""The roles of the Hopper forward as plain Python, on numbers: what a launch writes, and who waits for what.

The source of `kernels/hopper/forward` runs as it stands, every role of every CTA in a thread of its own, one at a time
in an order drawn from a seed (`hopper_glue.Simulation`).  Stand-ins take the place of Triton: barriers count phases,
bytes and arrivals as the hardware does; a copy by TMA arrives some time after it was issued, and reads zeros outside
its tensor; matmuls are in flight until they are waited for.  Tiles hold numbers, so that out and log-sum-exp can be
compared with attention; `Fault` is raised for what would be a race or a hang on a GPU.
"""

from __future__ import annotations

import math
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor.kernels.common import score as score_room
from dash_inductor.kernels.common.device import score_gluon
from dash_inductor.kernels.common.device.relations.form import read_by
from dash_inductor.kernels.hopper.forward import arguments, build
from dash_inductor.kernels.hopper.forward.data import ForwardData
from dash_inductor.kernels.hopper.forward.device import (
    consumer,
    documents,
    dropout,
    entry,
    half_tile,
    listed,
    producer,
    seen,
    shared_memory,
    sinks,
    steps,
    sums,
    tile_work,
)
from dash_inductor.kernels.hopper.shared import arguments as shared
from dash_inductor.kernels.hopper.shared.device import clear, seen_bits, varlen_layout
from dash_inductor.kernels.reference import dropout as reference_dropout
from dash_inductor.model import dropout as definition
from dash_inductor.schedule import document_tiles
from dash_inductor.schedule.codegen import python_functions
from dash_inductor.schedule.table_tile_schedule import FORWARD_UNSEEN, seen_words

from . import bounded_scores, compared, hopper_glue
from .hopper_dropout import bound_of
from .hopper_glue import (
    AGGREGATES,
    Barrier,
    Fault,
    NamedBarrier,
    Role,
    Simulation,
    as_arguments,
    as_python,
    changed,
    definitions,
    source,
    with_forms,
)

LAYOUT = SimpleNamespace()


class Value:
    """A tensor in registers; `matmul` is what it is the result of, if that may still be in flight."""

    def __init__(self, tensor: Tensor, matmul: Matmul | None = None) -> None:
        self.tensor, self.matmul = tensor, matmul
        self.type = SimpleNamespace(layout=LAYOUT)

    @property
    def shape(self) -> list[int]:
        return list(self.tensor.shape)

    def read(self) -> Tensor:
        if self.matmul is not None and not self.matmul.done:
            raise Fault("the result of a matmul is used before it is waited for")
        return self.tensor

    def to(self, dtype: DType) -> Value:
        return Value(self.read().to(dtype.torch))

    def _with(self, other: Any, operation: Callable[[Tensor, Any], Tensor]) -> Value:
        return Value(operation(self.read(), number(other)))

    def __add__(self, other: Any) -> Value:
        return self._with(other, torch.add)

    def __sub__(self, other: Any) -> Value:
        return self._with(other, torch.sub)

    def __rsub__(self, other: Any) -> Value:
        return self._with(other, lambda a, b: b - a)

    def __mul__(self, other: Any) -> Value:
        return self._with(other, torch.mul)

    def __rtruediv__(self, other: Any) -> Value:
        return self._with(other, lambda a, b: b / a)

    def __and__(self, other: Any) -> Value:
        return self._with(other, torch.bitwise_and)

    __rand__ = __and__

    def __lshift__(self, other: Any) -> Value:
        return self._with(other, torch.bitwise_left_shift)

    def __rrshift__(self, other: Any) -> Value:
        return self._with(other, lambda a, b: b >> a)

    def __ne__(self, other: Any) -> Value:  # type: ignore[override]  # element by element
        return self._with(other, torch.ne)

    def __mod__(self, other: Any) -> Value:
        return self._with(other, torch.remainder)

    def __lt__(self, other: Any) -> Value:
        return self._with(other, torch.lt)

    def __le__(self, other: Any) -> Value:
        return self._with(other, torch.le)

    def __ge__(self, other: Any) -> Value:
        return self._with(other, torch.ge)

    def __eq__(self, other: Any) -> Value:  # type: ignore[override]  # element by element
        return self._with(other, torch.eq)

    def __neg__(self) -> Value:
        return Value(-self.read())

    def reshape(self, shape: list[int]) -> Value:
        return Value(self.read().reshape(shape))

    def permute(self, order: list[int]) -> Value:
        return Value(self.read().permute(order))

    __radd__, __rmul__ = __add__, __mul__
    __hash__ = None  # type: ignore[assignment]  # as of any class with its own equality


def number(x: Any) -> Any:
    return x.read() if isinstance(x, Value) else x


@dataclass(frozen=True)
class DType:
    torch: torch.dtype

    @property
    def primitive_bitwidth(self) -> int:
        return self.torch.itemsize * 8


@dataclass(eq=False)
class Matmul:
    """A matmul in flight reads its operands in shared memory until it is done."""

    operands: list[Tile]
    done: bool = False


class Tile:
    """A tile in shared memory.

    copies: to it, under way; readers: matmuls and stores that may still read it; unfenced: written by threads, not yet
    visible to matmuls and TMA.
    """

    def __init__(self, simulation: ForwardSimulation, name: str, shape: Sequence[int], dtype: DType) -> None:
        self.simulation, self.name, self.shape, self.dtype = simulation, name, list(shape), dtype
        self.tensor = torch.full(self.shape, float("nan")).to(dtype.torch)
        self.copies, self.readers, self.unfenced = 0, list[Any](), False

    def permute(self, order: Any) -> Transposed:
        assert order == (1, 0)
        return Transposed(self)

    def contents(self) -> Tensor:
        if self.copies:
            raise Fault(f"{self.name} is read before it is full")
        return self.tensor

    def by_async_proxy(self) -> Tensor:
        """The contents that matmuls and TMA read."""
        if self.unfenced:
            raise Fault(f"{self.name} is read before a fence and a barrier made it visible")
        return self.contents()

    def check_free(self) -> None:
        if self.readers:
            raise Fault(f"{self.name} is overwritten while it is in use")

    def store(self, value: Value) -> None:
        self.check_free()
        if self.copies:
            raise Fault(f"{self.name} is overwritten while a copy to it is under way")
        assert value.shape == self.shape
        self.tensor, self.unfenced = value.read().clone(), True
        role = self.simulation.current
        written = self.simulation.written_before if role is None else role.written
        written.append(self)  # type: ignore[arg-type]  # like the tiles of the other simulation

    def load(self, _: Any) -> Value:
        return Value(self.contents())

    def slice(self, first: int, length: int) -> Slice:
        return Slice(self, first, length)


@dataclass
class Slice:
    """Some rows of a tile."""

    tile: Tile
    first: int
    length: int

    def load(self, _: Any) -> Value:
        return Value(self._of(self.tile.contents()))

    def permute(self, order: Any) -> Transposed:
        assert order == (1, 0)
        return Transposed(self.tile, self._of)

    def _of(self, tensor: Tensor) -> Tensor:
        return tensor[self.first : self.first + self.length]


@dataclass(frozen=True)
class Rows:
    """64 columns of four rows of a tile, as words."""

    tile: Tile
    row: int
    column: int

    def _at(self) -> tuple[slice, slice]:
        return slice(self.row, self.row + 4), slice(self.column, self.column + 64)

    def load(self, _: Any) -> Value:
        return Value(self.tile.contents()[self._at()].contiguous().view(torch.int32))

    def store(self, words: Value) -> None:
        contents = self.tile.contents().clone()
        contents[self._at()] = words.read().to(torch.int32).view(contents.dtype)
        self.tile.store(Value(contents))


@dataclass(frozen=True)
class Words:
    """A tile as `operations.as_words` sees it."""

    tile: Tile

    @property
    def shape(self) -> list[int]:
        rows, columns = self.tile.shape
        return [rows * columns // 64 // 4, 4, 64 * self.tile.dtype.primitive_bitwidth // 32]

    def index(self, i: int) -> Rows:
        block, row = divmod(4 * i, self.tile.shape[0])
        return Rows(self.tile, row, block * 64)


@dataclass
class Transposed:
    """A tile, or some rows of it, as the right operand of a matmul with its transpose."""

    tile: Tile
    part: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def by_async_proxy(self) -> Tensor:
        return self.part(self.tile.by_async_proxy()).T


class Ring:
    def __init__(self, entries: Sequence[Any], shape: Sequence[int], dtype: DType) -> None:
        self.entries, self.shape, self.dtype = entries, list(shape), dtype

    def index(self, i: int) -> Any:
        return self.entries[i]


@dataclass(frozen=True)
class Descriptor:
    """A tensor [batch, heads, rows, columns] as TMA sees it; blocks have 64 columns."""

    tensor: Tensor

    @property
    def dtype(self) -> DType:
        return DType(self.tensor.dtype)

    def read(self, b: int, h: int, row: int, column: int, rows: int) -> Tensor:
        """A block, with zeros outside the tensor."""
        block = torch.zeros(rows, 64, dtype=self.tensor.dtype)
        length, width = self.tensor.shape[2:]
        first, end, last = max(row, 0), min(row + rows, length), min(column + 64, width)
        if first < end and column < last:
            block[first - row : end - row, : last - column] = self.tensor[b, h, first:end, column:last]
        return block


@dataclass
class Output:
    """A tensor that is written: every element once, and no other."""

    tensor: Tensor
    writes: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.tensor.fill_(float("nan"))
        self.writes = torch.zeros_like(self.tensor, dtype=torch.int32)

    @property
    def dtype(self) -> DType:
        return DType(self.tensor.dtype)


@dataclass(frozen=True)
class Input:
    """A tensor that is read by pointers."""

    tensor: Tensor


def _memory(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


@dataclass
class Pointer:
    output: Output | Input
    offsets: Tensor | int = 0

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.output, self.offsets + number(other))


class ForwardSimulation(Simulation):
    """One launch of the main kernel.

    Args:
        constants: the kernel's compile-time constants, schedule functions as Python.
        arguments: its other arguments by name.
        ctas: how many there are.
        resident: how many may run at the same time; all by default.
        rows: queries of a row block.
        seed, late: the order of events, see `Simulation`.
        edits: replacements in the source, for controls that must fail.

    After `run`, `tile_schedules` has the (kv tile, whether it was masked) of every (batch element, query head, row
    block), and `half_tiles` how many of the kv tiles were computed by half.
    """

    def __init__(
        self, constants: dict[str, Any], arguments: dict[str, Any], ctas: int, *, rows: int,
        resident: int | None = None, seed: int = 0, late: bool = False, edits: tuple[tuple[str, str], ...] = (),
    ) -> None:  # fmt: skip
        self.constants, self.arguments = constants, arguments
        self.ctas, self.resident = ctas, resident or ctas
        self.late, self.random = late, random.Random(seed)
        self.tile_schedules: dict[tuple[int, int, int], list[tuple[int, bool]]] = defaultdict(list)
        self.begun = self.draws = 0  # CTAs, tiles
        self.half_tiles = 0
        self.drawers: set[int] = set()
        self.barriers: list[Barrier] = []
        self.named: dict[tuple[int, int], NamedBarrier] = {}
        self.copies: list[Callable[[], None]] = []
        self.written_before: list[Tile] = []
        self.roles: list[Role] = []
        self.current: Role | None = None
        self.main = threading.Semaphore(0)
        self.abandoned = False
        self.kernel = _kernel(self, rows, edits)

    def _more_roles(self) -> bool:
        self.roles = [role for role in self.roles if not role.over]
        while self.begun < self.ctas and len({role.cta for role in self.roles}) < self.resident:
            self.current, self.begun = None, self.begun + 1
            self.kernel(**(self.arguments | with_forms(self.constants, self.kernel)))  # it ends with `specialise`
        return bool(self.roles)


def constants_of(problem: build.Specialisation, **values: Any) -> dict[str, Any]:
    """Compile-time constants of the main kernel, as `build` has them, with the schedule's functions as Python.

    Args:
        values: constants that have other values.
    """
    found: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "compile_kernel", lambda _f, _s, constants, *_: found.append(constants))
        _ = build.Kernels(problem).main
    band = problem.traits.band
    band = document_tiles.document_band(band.hi is not None) if problem.traits.varlen else band
    f = python_functions("two_pass", band)
    return changed(found[0], **hopper_glue.python_functions(found[0]["SCHEDULE"], f), **values)


def arguments_of(**values: Any) -> dict[str, Any]:
    """The arguments of the main kernel by name: groups as mappings or tuples, None for those that are not given."""
    groups = {
        "problem": arguments.PROBLEM, "data": arguments.DATA, "elements": arguments.ELEMENTS,
        "dropout": arguments.DROPOUT,
        "documents": arguments.DOCUMENTS, "target": shared.target("bf16"), "bound": score_room.BOUND,
        "sinks": arguments.SINKS,
    }  # fmt: skip
    found = dict.fromkeys(groups) | values
    for name, group in groups.items():
        given = found[name]
        if given is not None:
            found[name] = as_arguments(group, group.values(**given) if isinstance(given, dict) else given)
    return found


def data_arguments(data: ForwardData, tables: int) -> dict[str, Any]:
    """The arguments about a mask that is data, with so many tables of a batch element."""
    pointers = {name: None if t is None else Pointer(Input(t)) for name, t in data._asdict().items()}
    return {name: pointers.get(name.removesuffix("_ptr")) for name in arguments.DATA.names} | {"tables": tables}


_MODULES = (
    score_gluon,
    clear,
    varlen_layout,
    listed,
    tile_work,
    sums,
    shared_memory,
    producer,
    dropout,
    seen_bits,
    seen,
    steps,
    half_tile,
    sinks,
    documents,
    consumer,
    entry,
)


def _kernel(s: ForwardSimulation, rows: int, edits: tuple[tuple[str, str], ...]) -> Callable[..., None]:
    """`hopper_forward` of the modules' source without their imports."""
    stand_ins = _stand_ins(s)
    namespace: dict[str, Any] = {"__name__": __name__, **stand_ins}
    left = dict(edits) | {"ROWS = gl.constexpr(64)": f"ROWS = {rows}"}
    for module in _MODULES:
        # a Python integer has no type to change
        text = source(module).replace(".to(gl.int64)", "").replace(".to(gl.uint32)", "")
        for old in [old for old in left if old in text]:
            text = text.replace(old, left.pop(old))
        code, names = definitions(text, module.__file__ or "")
        assert not names & (set(namespace) - set(stand_ins)), "two definitions of one name"
        exec(code, namespace)
        namespace.update(stand_ins)
    if left:
        raise ValueError(f"not in the source: {list(left)}")
    _record_tile_schedules(s, namespace)
    namespace["read_by"] = as_python(read_by, namespace)
    kernel: Callable[..., None] = namespace["hopper_forward"]
    return kernel


def _record_tile_schedules(s: ForwardSimulation, namespace: dict[str, Any]) -> None:
    names = "first_step", "half_tile_step", "next_step", "store_out"
    first_step, half_tile_step, next_step, store_out = (namespace[name] for name in names)
    tile_schedules: dict[Role, list[tuple[int, bool]]] = defaultdict(list)

    def role() -> Role:
        assert s.current is not None
        return s.current

    def first(work: Any, data: Any, *rest: Any) -> Any:
        kv, masks = rest[5:7]
        can_mask = work.HAS_LO or work.HAS_HI or not work.EVEN_KV or data.GIVEN
        tile_schedules[role()].append((kv, bool(masks and can_mask)))
        return first_step(work, data, *rest)

    def half(work: Any, data: Any, shared: Any, scale: float, here: Any, kv: int, *rest: Any) -> Any:
        tile_schedules[role()].append((kv, True))
        s.half_tiles += 1
        return half_tile_step(work, data, shared, scale, here, kv, *rest)

    def later(work: Any, data: Any, *rest: Any) -> Any:
        tile_schedules[role()].append(rest[6:8])
        return next_step(work, data, *rest)

    def store(shared: Any, desc: Any, target: Any, b: int, head: int, row: int, token: int, *rest: Any) -> None:
        place = b, head, row // namespace["ROWS"] if target is None else (token, row // namespace["ROWS"])
        if place in s.tile_schedules:
            raise Fault(f"{place} is computed twice")
        s.tile_schedules[place] = tile_schedules.pop(role())
        store_out(shared, desc, target, b, head, row, token, *rest)

    namespace.update(first_step=first, half_tile_step=half, next_step=later, store_out=store)


def _stand_ins(s: ForwardSimulation) -> dict[str, Any]:
    """By name, what the modules import, and the functions of inline assembly."""

    def current() -> Any:
        assert s.current is not None
        return s.current

    def allocate(dtype: DType, shape: list[int], layout: Any) -> Any:
        if layout == "barriers":
            s.barriers += (ring := [Barrier() for _ in range(shape[0])])
            return Ring(ring, shape, dtype)
        name = f"tile {shape} of {dtype.torch}"
        if len(shape) == 1:
            return Tile(s, name, shape, dtype)
        return Ring([Tile(s, f"{name}, stage {i}", shape[1:], dtype) for i in range(shape[0])], shape, dtype)

    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.arrivals = count

    def expect(barrier: Barrier, number: int) -> None:
        barrier.bytes += number
        barrier.arrive(1)

    def wait(barrier: Barrier, parity: int) -> None:
        s.wait(lambda: barrier.phase & 1 != parity, f"parity {parity} of a barrier in phase {barrier.phase}")

    def load_rows(desc: Descriptor, b: int, h: int, row: int, full: Barrier, tile: Tile, column: int = 0) -> None:
        for i in range(0, tile.shape[1], 64):
            tile.check_free()
            tile.copies += 1

            def arrive(i: int = i) -> None:
                block = desc.read(b, h, row, column + i, tile.shape[0])
                tile.tensor = torch.cat([tile.tensor[:, :i], block, tile.tensor[:, i + 64 :]], 1)
                tile.copies, tile.unfenced = tile.copies - 1, False
                full.bytes -= block.numel() * block.element_size()
                if full.bytes < 0:
                    raise Fault("a barrier expects fewer bytes than arrive")
                full.end()

            s.copies.append(arrive)

    def store_rows(output: Output, b: int, h: int, row: int, tile: Tile, column: int = 0) -> None:
        block = tile.by_async_proxy()
        length, width = output.tensor.shape[2:]
        assert column == 0
        if row < 0:
            raise Fault("a store that begins at a negative row, which is an illegal instruction")
        end, columns = min(row + tile.shape[0], length), min(width, tile.shape[1])
        if row < end:
            output.tensor[b, h, row:end, :columns] = block[: end - row, :columns]
            output.writes[b, h, row:end, :columns] += 1
        tile.readers.append(current())
        current().storing.append(tile)

    def wait_until_read() -> None:
        for tile in current().storing:
            tile.readers.remove(current())
        current().storing.clear()

    def matmul(left: Any, right: Any, total: Value, *, use_acc: bool = True, is_async: bool = False) -> Value:
        tiles = [x.tile if isinstance(x, Transposed) else x for x in (left, right) if not isinstance(x, Value)]
        a = left.read() if isinstance(left, Value) else left.by_async_proxy()
        b = right.by_async_proxy()
        assert is_async
        m = Matmul(tiles)
        for tile in tiles:
            tile.readers.append(m)
        current().matmuls.append(m)
        product = (a.double() @ b.double()).float()  # an element does not depend on the other columns
        return Value(total.tensor + product if use_acc else product, m)  # matmuls follow one another: no wait between

    def matmul_wait(number: int, deps: tuple[Value, ...]) -> Any:
        matmuls = current().matmuls
        for m in matmuls[: len(matmuls) - number]:
            m.done = True
            for tile in m.operands:
                tile.readers.remove(m)
        del matmuls[: len(matmuls) - number]
        return deps[0] if len(deps) == 1 else deps

    def fence() -> None:
        if s.current is None:  # roles part behind it, which is a barrier
            for tile in s.written_before:
                tile.unfenced = False
            s.written_before.clear()
        else:
            s.current.fenced += s.current.written
            s.current.written.clear()

    def meet() -> None:
        for tile in current().fenced:
            tile.unfenced = False
        current().fenced.clear()

    def gdc_wait() -> None:
        s.drawers.add(current().cta)

    def draw(_: Any, what: int, sem: str) -> int:
        if current().cta not in s.drawers:
            raise Fault("a CTA draws before the counter has been set to zero")
        s.draws += what
        return s.draws - what

    def store(pointer: Pointer, value: Value, mask: Value) -> None:
        assert isinstance(pointer.offsets, Tensor)
        offsets = pointer.offsets[mask.read()]
        _memory(pointer.output.tensor)[offsets] = value.read()[mask.read()]
        _memory(pointer.output.writes)[offsets] += 1

    def load(pointer: Pointer, mask: Value | bool | None = None, other: int = 0) -> Any:
        """A number, or a tensor where the pointers are one."""
        elements, offsets = pointer.output.tensor.reshape(-1), pointer.offsets
        if not isinstance(offsets, Tensor):
            if mask is not None and not mask:
                return other
            if not 0 <= offsets < len(elements):
                raise Fault("a load outside a tensor")
            return int(elements[offsets])
        wanted = torch.as_tensor(True if mask is None else number(mask)).expand(offsets.shape)
        if not ((offsets >= 0) & (offsets < len(elements)))[wanted].all():
            raise Fault("a load outside a tensor")
        found = elements[torch.where(wanted, offsets, 0)]
        return Value(torch.where(wanted, found, torch.tensor(other, dtype=found.dtype)))

    def specialise(partitions: Any, warps: list[int], registers: list[int]) -> None:
        assert len(partitions) - 1 == len(warps) == len(registers)
        s.specialise(partitions)

    def static_assert(condition: bool) -> None:
        assert condition

    def same(x: Any, *_: Any, **__: Any) -> Any:
        return x

    def extremum(scalars: Callable[..., int], tensors: Callable[..., Tensor]) -> Callable[..., Any]:
        def of(a: Any, b: Any) -> Any:
            if not isinstance(a, Value) and not isinstance(b, Value):
                return scalars(a, b)
            return Value(tensors(torch.as_tensor(number(a)), torch.as_tensor(number(b))))

        return of

    def where(condition: Any, a: Any, b: Any) -> Any:
        if not isinstance(condition, Value):
            return a if condition else b
        return Value(torch.where(condition.read(), number(a), number(b)))

    def largest(x: Value, axis: int) -> Any:
        found = x.read().amax(axis)
        return int(found) if found.ndim == 0 else Value(found)

    def total(x: Value, axis: int) -> Any:
        found = x.read().sum(axis)
        return int(found) if found.ndim == 0 else Value(found)

    def fma(a: Value, b: Any, c: Value) -> Value:
        product = a.read().double() * (number(b).double() if isinstance(b, Value) else b)
        return Value((product + c.read().double()).float())

    def keep_between(s: Value, keys: Value, first: Value, end: Value) -> Value:
        keep = (keys.read() >= first.read()) & (keys.read() < end.read())
        return Value(torch.where(keep, s.read(), -math.inf))

    def keep_below(s: Value, keys: Value, end: Value) -> Value:
        return Value(torch.where(keys.read() < end.read(), s.read(), -math.inf))

    def keep_equal(s: Value, a: Value, b: Value) -> Value:
        return Value(torch.where(a.read() == b.read(), s.read(), -math.inf))

    def keep_progression(s: Value, keys: Value, start: Value, inverse: Value, others: Value) -> Value:
        bits = (keys.read().long() * inverse.read() + start.read()) & others.read() & 0xFFFFFFFF
        return Value(torch.where(bits == 0, s.read(), -math.inf))

    def keep_set(s: Value, words: Value, bits: Value, hidden: str) -> Value:
        assert hidden == "FF800000"
        return Value(torch.where(words.read() & bits.read() != 0, s.read(), -math.inf))

    def begun(s: Value, slope: float) -> tuple[Value, Value]:
        v, far = bounded_scores.begun(s.read(), slope)
        return Value(v), Value(far)

    def powers(v: Value, far: Value, factor: float, shift: Value, hides: bool) -> Value:
        return Value(bounded_scores.powers(v.read(), factor, shift.read(), hides)[0])

    def finite_below(v: Value) -> Value:
        return Value(v.read().clamp(min=bounded_scores.LOWEST))

    def philox(c0: Value, c1: Value, c2: int, c3: int, seed: tuple[int, int]) -> tuple[Value, ...]:
        rows, keys = torch.broadcast_tensors(c0.read(), c1.read())
        rest = (torch.full_like(rows, x) for x in (c2, c3, *seed))
        c2_, c3_, k0, k1 = (x & 0xFFFFFFFF for x in rest)
        return tuple(map(Value, reference_dropout.philox((rows & 0xFFFFFFFF, keys, c2_, c3_), (k0, k1))))

    def keep_from(p: Value, bits: Value, bound: int, threshold: int) -> Value:
        halves = bits.read() >> 16 * (torch.arange(bits.shape[1]) % 2)
        dropped, _ = compared.below(halves.numpy() & 0xFFFF, bound)
        return Value(torch.where(torch.from_numpy(dropped ^ (threshold > 1 << 15)), 0, p.read()))

    gl = SimpleNamespace(
        tensor=None, shared_memory_descriptor=None, constexpr=same, static_range=range, static_assert=static_assert,
        int32=DType(torch.int32), int64=DType(torch.int64), float32=DType(torch.float32), where=where,
        minimum=extremum(min, torch.minimum), maximum=extremum(max, torch.maximum), max=largest, fma=fma,
        sum=total, zeros_like=lambda x: Value(torch.zeros_like(x.read())),
        SliceLayout=lambda *_: None, BlockedLayout=lambda *_: None, SwizzledSharedLayout=lambda *_: None,
        NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: None), allocate_shared_memory=allocate,
        warp_specialize=specialise, zeros=lambda shape, dtype, _: Value(torch.zeros(shape, dtype=dtype.torch)),
        full=lambda shape, x, dtype, _: Value(torch.full(shape, x, dtype=dtype.torch)),
        arange=lambda first, end, _: Value(torch.arange(first, end)), convert_layout=same, atomic_add=draw, store=store,
        load=load,
        join=lambda a, b: Value(torch.stack([a.read(), b.read()], -1)),
        expand_dims=lambda x, axis: Value(x.read().unsqueeze(axis)), program_id=lambda _: current().cta,
        num_programs=lambda _: s.ctas,
    )  # fmt: skip
    return {
        "gluon": SimpleNamespace(jit=same, constexpr_function=same), "gl": gl, **AGGREGATES,
        "definition": definition, "document_tiles": document_tiles,
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: "barriers", init=init, expect=expect, wait=wait,
            arrive=lambda barrier, count: barrier.arrive(count),
        ),
        "fence_async_shared": fence, "warpgroup_mma": matmul, "warpgroup_mma_wait": matmul_wait, "gdc_wait": gdc_wait,
        "role_barrier": meet, "ARRIVALS_MEET": False, "COMPUTES_EARLY": False, "not_before": same,
        "load_rows": load_rows, "store_rows": store_rows, "wait_until_read": wait_until_read,
        "here": same, "accumulator_layout": lambda *_: None, "left_operand": lambda *_: None,
        "exp2": lambda x: Value(x.read().exp2()), "log2": lambda x: Value(x.read().log2()),
        "_begun": begun, "_powers": powers, "_finite_below": finite_below,
        "_far_share": lambda v: Value(bounded_scores.far_share(v.read())),
        "_keep_below": keep_below, "keep_between": keep_between, "keep_equal": keep_equal,
        "keep_progression": keep_progression, "keep_set": keep_set,
        "as_words": Words, "_philox": philox, "_keep_from": keep_from, "seen_words": seen_words,
        "FORWARD_UNSEEN": FORWARD_UNSEEN,
        "bound_of": lambda threshold: int(bound_of(threshold)), "_words_layout": lambda *_: None,
    }  # fmt: skip
