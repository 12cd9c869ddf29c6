"""The host side of the Hopper backward without a GPU: what calls share, and what each is given anew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.common import call_launches, launcher, score
from dash_inductor.kernels.hopper.backward import launch
from dash_inductor.kernels.hopper.shared import prepared
from dash_inductor.model import AttentionSpec, Band, Dropout, Operand, Plan
from dash_inductor.upstream import compat

from ....support import hopper_calls
from ....support.call_launches import packing
from ....support.calls import backward_spec
from ....support.hopper_builds import TILES

PLAN = Plan("hopper", "spt", "keep", TILES[64, 64])
SPEC = backward_spec(Band(0), 0.125)
Packed = tuple[str, int, tuple[int, ...], tuple[Any, ...]]
"""Kernel, stream, addresses of descriptors, and other arguments."""


@dataclass
class Device:
    """A device on which nothing runs."""

    stream: int = 7
    current: int | None = None  # the index of the device of tensors on the CPU
    memory: dict[Any, Tensor] = field(default_factory=dict)
    packed: list[Packed] = field(default_factory=list)
    launched: list[Packed] = field(default_factory=list)
    devices: list[int | None] = field(default_factory=list)  # the current one at every allocation
    compiled_for: list[Any] = field(default_factory=list)
    grids: dict[str, int] = field(default_factory=dict)
    properties: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(name="a GPU", multi_processor_count=132)
    )
    kept: Any = None

    def empty(self, *facts: Any) -> Tensor:
        """The same memory for the same tensor of every call, as the caching allocator gives it to step after step."""
        self.devices.append(self.current)
        key = len(self.devices) % 4, facts  # a call allocates four
        if key not in self.memory:
            self.memory[key] = torch.empty_strided(*facts[:2], dtype=facts[2])
        return self.memory[key]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    found = Device()

    def kernel(compiled: str, grid: int, descriptors: Sequence[Any] = ()) -> Any:
        found.grids[compiled] = grid

        def pack(stream: int, addresses: Sequence[int], *arguments: Any) -> Any:
            found.packed.append((compiled, stream, tuple(addresses), arguments))
            return (found.packed[-1],)

        return SimpleNamespace(pack=pack)

    def kernels(of: Any, device: int) -> Any:
        found.compiled_for.append(of)
        return SimpleNamespace(of=of, prepare="prepare", main="main", finish="finish", columns=64, value_columns=64)

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        before, found.current = found.current, device.index
        yield
        found.current = before

    monkeypatch.setattr(launcher, "KernelLauncher", kernel)
    packing(monkeypatch, found.launched.extend)
    monkeypatch.setattr(launch, "kernels", kernels)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found.properties)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(prepared, "current_device", lambda: found.current)
    monkeypatch.setattr(call_launches, "raw_stream", lambda device: found.stream)
    monkeypatch.setattr(compat, "empty_cuda", found.empty)
    hopper_calls.forget()
    yield found
    hopper_calls.forget()


def tensors(length: int = 300) -> dict[str, Tensor]:
    q, do, out = (torch.zeros(2, 4, length, 64, dtype=torch.bfloat16) for _ in range(3))
    k, v = (torch.zeros(2, 2, 200, 64, dtype=torch.bfloat16) for _ in range(2))
    return {"grad_out": do, "query": q, "key": k, "value": v, "out": out, "logsumexp": torch.zeros(2, 4, length)}


def run(
    given: dict[str, Tensor], spec: AttentionSpec = SPEC, plan: Plan = PLAN, **more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return hopper_calls.backward(**given, spec=spec, plan=plan, **more)  # type: ignore[return-value]


def test_a_call_launches_three_kernels(device: Device) -> None:
    given = tensors()
    for _ in range(3):
        run(given)
    assert [name for name, *_ in device.launched] == ["prepare", "main", "finish"] * 3
    assert device.launched[:3] == device.launched[3:6] == device.launched[6:]


@pytest.mark.parametrize("length", [256, 300])
def test_delta_is_what_prepare_writes(device: Device, length: int) -> None:
    """A part of the workspace, or a copy of it where rows do not fill their tiles."""
    given, rows = tensors(length), -(-length // PLAN.dkdv.block_q) * PLAN.dkdv.block_q
    *_, delta = hopper_calls.backward(**given, spec=replace(SPEC, delta=True), plan=PLAN)
    assert (delta.shape, delta.stride()) == ((2, 4, length), (4 * length, length, 1))
    address = device.launched[0][3][4]
    (workspace,) = (
        t for t in device.memory.values() if t.data_ptr() <= address < t.data_ptr() + t.numel() * t.element_size()
    )
    filled = workspace[address - workspace.data_ptr() :][: 4 * 8 * rows].view(torch.float32)
    filled.copy_(torch.arange(8 * rows))
    *_, delta = hopper_calls.backward(**given, spec=replace(SPEC, delta=True), plan=PLAN)
    assert (delta.data_ptr() == filled.data_ptr()) == (length == rows)
    assert torch.equal(delta.flatten(0, 1), torch.arange(8.0 * rows).view(8, rows)[:, :length])


def test_bounded_scores(device: Device) -> None:
    """The bound is a number: another one needs no other kernels."""
    for softcap in (50.0, 30.0):
        run(tensors(), replace(SPEC, softcap=softcap))
        (arguments,) = (arguments for name, _, _, arguments in device.packed[-3:] if name == "main")
        assert arguments[1][-2:] == pytest.approx((0.125, softcap * 1.4426950408889634))
        assert arguments[-1] == pytest.approx((score.ARGUMENT * 0.125 / softcap,))
    first, second = device.compiled_for
    assert first == second
    assert first.traits.modifiers == ("softcap",)


@pytest.mark.parametrize(("sms", "grid"), [(5, 5), (15, 15), (16, 16), (17, 16), (132, 16)])
def test_as_many_ctas_as_sms_and_work_ids(device: Device, sms: int, grid: int) -> None:
    """8 heads of 2 kv tiles; the kernel is told of all 16 work ids whatever the grid is."""
    device.properties.multi_processor_count = sms
    run(tensors())
    assert device.grids["main"] == grid
    (arguments,) = (arguments for name, *_, arguments in device.packed if name == "main")
    assert arguments[1][0] == 16  # of `PROBLEM`, behind the workspace


def test_co_resident_schedules_have_a_cta_for_every_work_id_or_are_refused(device: Device) -> None:
    plan, spec = replace(PLAN, schedule="shift"), backward_spec(Band(), 0.125)
    device.properties.multi_processor_count = 16
    run(tensors(), spec, plan)
    assert device.grids["main"] == 16
    device.properties.multi_processor_count = 15
    hopper_calls.forget()
    with pytest.raises(ArgumentError, match="16 CTAs do not fit 15 SMs at once"):
        run(tensors(), spec, plan)


SEED = torch.zeros(1, dtype=torch.int64)
WITH_DROPOUT = replace(SPEC, dropout=Dropout(0.1, Operand(0)))


def _move(name: str) -> Callable[[Device, dict[str, Any]], None]:
    def move(device: Device, given: dict[str, Any]) -> None:
        given[name] = given[name].clone()

    return move


def _take_another_stream(device: Device, given: dict[str, Any]) -> None:
    device.stream = 8


def _take_other_memory(device: Device, given: dict[str, Any]) -> None:
    device.kept, device.memory = device.memory, {}  # alive, so that no address recurs


CHANGES: dict[str, Callable[[Device, dict[str, Any]], None]] = {
    **{name: _move(name) for name in tensors()},
    "stream": _take_another_stream,
    "results": _take_other_memory,
    "seed": _move("dropout"),
    "gradient": _move("grad_logsumexp"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_call_is_given_anew_is_what_it_launches_with(device: Device, change: str) -> None:
    given: dict[str, Any] = tensors() | {"dropout": SEED, "grad_logsumexp": torch.zeros(2, 4, 300)}
    spec = replace(WITH_DROPOUT, grad_logsumexp=Operand(1))
    run(given, spec)
    CHANGES[change](device, given)
    run(given, spec)
    assert len(device.launched) == 6
    assert device.launched[:3] != device.launched[3:]


def addresses(device: Device) -> list[tuple[int, ...]]:
    """The addresses of query, key, value and grad_out in every main kernel."""
    return [places[:4] for name, _, places, _ in device.launched if name == "main"]


def test_descriptors_are_those_of_the_call(device: Device) -> None:
    first, second = tensors(), tensors()
    for given in (first, second, first):
        run(given)
    expected = [tuple(given[n].data_ptr() for n in ("query", "key", "value", "grad_out")) for given in (first, second)]
    assert addresses(device) == [*expected, expected[0]]


@pytest.mark.parametrize(
    "other", [{"spec": backward_spec(Band(0), 0.25)}, {"spec": backward_spec(Band(), 0.125)},
              {"plan": replace(PLAN, head_chunk=3)}, {"plan": replace(PLAN, schedule="ascending")}], ids=str
)  # fmt: skip
def test_calls_and_plans_are_told_apart(device: Device, other: dict[str, Any]) -> None:
    given = tensors()
    for how in ({}, other, {}, other, {"spec": replace(SPEC), "plan": replace(PLAN)}):
        run(given, **how)
    assert len(device.compiled_for) == 2  # equal ones are one
    mains = [arguments for name, *_, arguments in device.launched if name == "main"]
    assert mains[0] == mains[2] == mains[4]
    assert mains[1] == mains[3]
    assert (mains[0], device.compiled_for[0]) != (mains[1], device.compiled_for[1])


def test_strides_are_told_apart(device: Device) -> None:
    """Views of equal addresses, whose sizes are equal too."""
    given = tensors()
    wide = torch.zeros(2, 4, 300, 128, dtype=torch.bfloat16)
    for view in (wide[..., :64], wide.view(2, 4, 600, 64)[:, :, :300], wide[..., :64]):
        run(given | {"out": view})
    prepares = [arguments for name, *_, arguments in device.launched if name == "prepare"]
    assert prepares[0] == prepares[2] != prepares[1]
    assert prepares[0][0] == prepares[1][0] == wide.data_ptr()


@pytest.mark.parametrize("name", ["query", "key", "value", "grad_out", "out"])
@pytest.mark.parametrize("how", ["unaligned", "strided", "dense"])
def test_what_tma_cannot_read_is_copied(device: Device, name: str, how: str) -> None:
    given = tensors()
    run(given)
    old = given[name]
    odd = {
        "unaligned": torch.zeros(old.numel() + 1, dtype=old.dtype)[1:].view(old.shape),
        "strided": torch.zeros(*old.shape[:3], 128, dtype=old.dtype)[..., ::2],
        "dense": torch.zeros_like(old),
    }[how]
    run(given | {name: odd})
    read = [device.launched[i][2][:4] + device.launched[i - 1][3][:1] for i in (1, 4)]
    assert (odd.data_ptr() in read[1]) == (how == "dense")
    assert sum(a != b for a, b in zip(*read, strict=True)) == 1


def test_head_dims_that_tma_cannot_read(device: Device) -> None:
    """They are an error whatever the strides: the family leaves them to the portable kernels."""
    given = {name: t[..., :20] if t.ndim == 4 else t for name, t in tensors().items()}
    for layout in (given, {name: t.contiguous() for name, t in given.items()}):
        with pytest.raises(ArgumentError, match=r"20.* is not allowed: expected .*multiple"):
            run(layout)


def test_a_call_on_another_device(device: Device) -> None:
    """States are made, and kernels launched, where the tensors are; afterwards the device is the one before."""
    device.current = 3
    run(tensors())
    assert device.devices == [None] * 4
    assert device.current == 3


READY_SPECS = {
    "plain": SPEC,
    "dropout": WITH_DROPOUT,
    "gradient": replace(SPEC, grad_logsumexp=Operand(0)),
    "both": replace(SPEC, dropout=Dropout(0.1, Operand(0)), grad_logsumexp=Operand(1)),
}


@pytest.mark.parametrize("name", READY_SPECS)
def test_a_prepared_call_launches_with_the_addresses_of_its_extras(device: Device, name: str) -> None:
    given, spec = tensors(), READY_SPECS[name]
    extras = ([SEED] if spec.dropout else []) + ([torch.zeros(2, 4, 300)] if spec.grad_logsumexp else [])
    found = launch.prepare([*given.values()], extras, spec, PLAN)
    for _ in range(2):
        found((*given.values(), extras))
    first = device.launched[:3]
    assert device.launched[3:] == first
    other = [torch.ones_like(extra) for extra in extras]
    found((*given.values(), other))
    assert (device.launched[6:] == first) == (not extras)
    main, prepare = device.launched[7][3], device.launched[6][3]
    dropout = spec.dropout
    assert main[3] == (None if dropout is None else (other[0].data_ptr(), dropout.threshold, dropout.rescale))
    assert prepare[-1] == (None if spec.grad_logsumexp is None else (other[-1].data_ptr(), 1200, 300, 1))


def test_extras_that_are_unaligned(device: Device) -> None:
    """A seed may be any element of a tensor of seeds."""
    given, seed = tensors(), torch.zeros(3, dtype=torch.int64)[1:2]
    run(given | {"dropout": seed}, WITH_DROPOUT)
    assert device.launched[1][3][3][0] == seed.data_ptr()


def test_wrong_operands_are_refused(device: Device) -> None:
    given = [*tensors().values()]
    with pytest.raises(ArgumentError, match=r"int64 \(1,\)"):
        launch.prepare(given, [torch.zeros(1)], WITH_DROPOUT, PLAN)
    spec = replace(SPEC, grad_logsumexp=Operand(0))
    for shape in ((2, 4, 299), (2, 4, 1), (2, 4)):
        with pytest.raises(ArgumentError, match="grad_logsumexp"):
            launch.prepare(given, [torch.zeros(shape)], spec, PLAN)
