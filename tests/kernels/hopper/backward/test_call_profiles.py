"""The host side of stamps without a GPU: what a stamped kernel is given, and which kernels run."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor.config import config
from dash_inductor.kernels import registry
from dash_inductor.kernels.common import call_launches, launcher
from dash_inductor.kernels.hopper.backward import build, launch
from dash_inductor.kernels.hopper.backward.device import entry
from dash_inductor.kernels.hopper.shared import prepared
from dash_inductor.lowering import ahead
from dash_inductor.model import Band, Plan, Site
from dash_inductor.planning import plan
from dash_inductor.records import profiles
from dash_inductor.upstream import compat

from ....support import hopper_calls
from ....support.call_launches import packing
from ....support.calls import backward_spec, spec_of
from ....support.hopper_builds import TILES

PLAN = Plan("hopper", "spt", "keep", TILES[64, 64])
PROPERTIES = SimpleNamespace(name="a GPU", multi_processor_count=132)
CONSTANTS = [name for name in inspect.signature(entry.hopper_backward.fn).parameters if name.isupper()]


@dataclass
class Launches:
    """The launches that would have been made: (kernel, arguments after the addresses of descriptors)."""

    calls: list[tuple[str, list[Any]]] = field(default_factory=list)
    compiled_for: list[build.Specialisation] = field(default_factory=list)

    @property
    def about_stamps(self) -> Any:
        """The last argument but one of the last launch of the main kernel: table and heads, or None."""
        name, arguments = self.calls[-2]
        assert name == "main"
        assert len(arguments) == len(entry.hopper_backward.arg_names) - len(CONSTANTS) - 9
        return arguments[-2]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """A device on which nothing runs; profiles have tables on the CPU."""
    seen = Launches()

    def kernel(compiled: str, grid: int, descriptors: Sequence[Any] = ()) -> Any:
        return SimpleNamespace(pack=lambda stream, addresses, *arguments: ((compiled, list(arguments)),))

    def kernels(of: build.Specialisation, device: int) -> Any:
        seen.compiled_for.append(of)
        return SimpleNamespace(of=of, prepare="prepare", main="main", finish="finish", columns=64, value_columns=64)

    monkeypatch.setattr(launcher, "KernelLauncher", kernel)
    packing(monkeypatch, seen.calls.extend)
    monkeypatch.setattr(launch, "kernels", kernels)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: PROPERTIES)
    monkeypatch.setattr(prepared, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(call_launches, "raw_stream", lambda device: 7)
    monkeypatch.setattr(
        compat, "empty_cuda", lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype)
    )
    begin = profiles.begin

    def noted(*arguments: Any) -> profiles.ProfileRun | None:
        seen.calls.append(("begin", []))
        return begin(*arguments)

    monkeypatch.setattr(profiles, "begin", noted)
    monkeypatch.setattr(profiles.atexit, "register", lambda function: None)
    hopper_calls.forget()
    profiles.clear_profile_runs()
    yield seen
    hopper_calls.forget()
    profiles.clear_profile_runs()
    profiles._announce.cache_clear()


def tensors(q_len: int = 300, kv_len: int = 200) -> tuple[Tensor, ...]:
    q, do = (torch.zeros(2, 4, q_len, 64, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.zeros(2, 2, kv_len, 64, dtype=torch.bfloat16) for _ in range(2))
    return do, q, k, v, do, torch.zeros(2, 4, q_len)


def run(site: str = "site", q_len: int = 300) -> None:
    hopper_calls.backward(*tensors(q_len), backward_spec(Band(0), 0.125), PLAN, site=site)


def test_a_profiled_call(launches: Launches) -> None:
    """The kernel is given the table of the call, in which there is an entry for every tile pair."""
    with config.patch(profile=True):
        run()
    (found,) = profiles.profile_runs()
    assert [name for name, _ in launches.calls] == ["begin", "prepare", "main", "finish"]  # the last three overlap
    assert launches.about_stamps == (found.table.data_ptr(), 8)
    assert found.table.shape == (2 * 4, 2, 1 + 3, 4)  # kv tiles and q tiles of 128
    assert launches.compiled_for[-1].stamped
    meta = found.to_dict()["meta"]
    shape = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 300, "kv_len": 200, "head_dim": 64, "value_dim": 64}
    assert meta["shape"] == shape
    assert (meta["site"], meta["plan"], meta["mask"]) == ("site", str(PLAN), "causal")
    assert (meta["gpu"], meta["sms"], meta["tiles"]) == ("a GPU", 132, {"q": 128, "kv": 128})


def test_calls_that_are_not_profiled(launches: Launches) -> None:
    """Without the setting another kernel runs, which has no such arguments; later calls stamp no head."""
    run()
    assert launches.about_stamps is None
    assert not launches.compiled_for[-1].stamped
    assert profiles.profile_runs() == ()
    with config.patch(profile=True):
        for _ in range(profiles.CALLS):
            run()
        assert launches.about_stamps[1] == 8
        run()
        assert launches.about_stamps == (0, 0)
        run(q_len=400)  # another shape of the site
        assert launches.about_stamps[1] == 8
    run()
    assert launches.about_stamps is None
    assert len(profiles.profile_runs()) == profiles.CALLS + 1


def test_a_graph_is_not_profiled(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with config.patch(profile=True):
        run()
    assert launches.about_stamps == (0, 0)
    assert profiles.profile_runs() == ()


def test_the_name_of_the_site_comes_from_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(launch, "prepare", lambda *args: names.append(args[-1]))
    given: Any = [SimpleNamespace(is_cuda=True)] * 6
    registry.backward(given, [], backward_spec(Band(0), 0.125), PLAN, "attention_3")
    assert names == ["attention_3"]


HOPPER = Site("cuda", "bfloat16", 4, 8, 2, 512, 512, 64, 64, spec_of(Band(0), 0.125))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[build.Specialisation]]:
    found: list[build.Specialisation] = []

    def kernels(of: build.Specialisation, device: int) -> Any:
        found.append(of)
        return SimpleNamespace(**dict.fromkeys(("prepare", "main", "finish"), SimpleNamespace(metadata=None)))

    monkeypatch.setattr(build, "kernels", kernels)
    monkeypatch.setattr(ahead, "_check_shared_memory", lambda metadata, device: None)
    ahead._attempt.cache_clear()
    yield found
    ahead._attempt.cache_clear()


def test_the_kernel_of_the_setting_is_compiled_before_the_graph_is_rewritten(compiled: list[Any]) -> None:
    chosen = Plan("hopper", "spt", "keep", TILES[64, 64])
    for setting in (False, True, False, True):
        with config.patch(profile=setting):
            ahead.compile_kernels(HOPPER, chosen, torch.device("cuda", 0))
    assert [of.stamped for of in compiled] == [False, True]


def test_other_kernels_say_that_they_are_not_profiled(caplog: pytest.LogCaptureFixture) -> None:
    profiles.warn.cache_clear()
    site = Site("cpu", "float32", 1, 2, 2, 64, 64, 32, 32, spec_of(Band(0), 0.125))
    with config.patch(cpu="reference"):
        chosen = plan(site, "cpu")
        assert isinstance(chosen, Plan)
        for setting in (False, True, True):
            with config.patch(profile=setting):
                ahead.compile_kernels(site, chosen, torch.device("cpu"))
    assert caplog.messages == ["sites of the reference kernel are not profiled: the hopper kernel alone is"]
