"""Nothing in a graph is chosen by timing, whoever switched deterministic algorithms on and on whichever thread."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.graph import GraphLowering

import dash_inductor
from dash_inductor.config import config
from dash_inductor.install.no_autotune import MARK
from dash_inductor.upstream import compat, seams

from ..support.fakecuda import compiler
from ..support.forks import FAKE_GPU, run_forked

Seen = list[tuple[bool, bool, bool]]

SWITCHES: dict[str, Callable[[], None]] = {
    "algorithms": partial(torch.use_deterministic_algorithms, True),
    "warn only": partial(torch.use_deterministic_algorithms, True, warn_only=True),
    "debug mode": partial(torch.set_deterministic_debug_mode, "error"),
    "off": partial(torch.use_deterministic_algorithms, False),
}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Inductor's settings in joint passes and while it generates code: deterministic, timed pointwise kernels, and
    padded matmuls.
    """
    found: Seen = []
    compile_to_module = GraphLowering.compile_to_module

    def settings() -> None:
        triton = inductor_config.triton
        found.append((bool(inductor_config.deterministic), triton.autotune_pointwise, inductor_config.shape_padding))

    class Look:
        def apply(self, graph: object) -> int:
            settings()
            return 0

    def ask(graph: GraphLowering) -> object:
        settings()
        return compile_to_module(graph)

    monkeypatch.setattr(GraphLowering, "compile_to_module", ask)
    look = Look()
    compat.joint_passes().append(look)
    yield found
    compat.joint_passes().remove(look)
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()


def step(on_a_thread: bool) -> None:
    x = torch.ones(4, requires_grad=True)
    torch._dynamo.reset()
    unlike_others = random.random()  # no cache has its graph
    loss = torch.compile(lambda x: x.cos() * unlike_others)(x).sum()
    if on_a_thread:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(loss.backward).result()
    else:
        loss.backward()


@pytest.mark.parametrize("on_a_thread", [False, True], ids=["", "thread"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_settings_of_every_compile(switch: str, on_a_thread: bool, seen: Seen) -> None:
    """The joint graph, the forward, and the backward."""
    inductor_config.deterministic = False
    SWITCHES[switch]()
    step(on_a_thread)
    assert seen == ([(False, True, True)] if switch == "off" else [(True, False, False)]) * 3
    assert inductor_config.triton.autotune_pointwise  # the settings do not stay
    assert inductor_config.shape_padding


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("rewrites", ["all", "attention"])
def test_inductor_pads_where_the_rewrite_does_not(rewrites: str, forced: bool, seen: Seen) -> None:
    torch.use_deterministic_algorithms(True)
    with config.patch(rewrites=rewrites), inductor_config.patch(force_shape_pad=forced):
        step(False)
    assert seen == [(True, False, forced or rewrites == "attention")] * 3


def test_switched_off_nothing_is_changed(seen: Seen) -> None:
    inductor_config.deterministic = False
    torch.set_deterministic_debug_mode("error")
    with dash_inductor.disabled():
        step(False)
    assert seen[:2] == [(False, True, True)] * 2  # then Dynamo restores the state of before, and switches all of it on


def test_first_that_fits() -> None:
    autotuner = SimpleNamespace(inductor_meta={MARK: True}, launchers=["first", "second"])
    assert seams.TIME_CONFIGURATIONS.value()(autotuner) == {"first": 0.0, "second": 1.0}


PROGRAM = """
    import contextlib, json

    import torch
    import torch._inductor.compile_fx
    import torch._inductor.config
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    import dash_inductor
    from tests.support.autotuned import row_sums

    code = []
    GraphLowering.save_output_code = staticmethod(code.append)
    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.joint_graph_constant_folding = False

    def scanned(x):
        return x.cumsum(1)

    def counted(x):
        return x.int().cumsum(1)

    found = []
    for active in (True, False):
        for program in (scanned, counted, row_sums):
            torch.use_deterministic_algorithms(True)
            torch._dynamo.reset()
            with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"), contextlib.ExitStack() as stack:
                if not active:
                    stack.enter_context(dash_inductor.disabled())
                with contextlib.suppress(Exception):
                    torch.compile(program)(torch.empty(2, 1 << 20))
            text = code.pop()
            records = [record.as_dict() for record in dash_inductor.all_records()]
            found.append(["heuristics.split_scan(" in text, "dash_inductor_first" in text, records])
            dash_inductor.clear_sites()
    print(json.dumps(found))
"""


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_scans_and_kernels_of_the_program() -> None:
    output = run_forked(FAKE_GPU, PROGRAM).stdout
    scanned, counted, summed, *plain = json.loads(output.splitlines()[-1])
    assert scanned == [False, False, []]
    assert counted[0] is not compat.scans_stay_whole()  # integers have no order
    assert [found[:2] for found in plain] == [[not compat.scans_stay_whole(), False]] * 2 + [[False, False]]
    assert all(not records for *_, records in plain)
    split, marked, (record,) = summed
    assert (split, marked, record["rewrite"], record["op"]) == (False, True, "user_kernels", "add_row")
    assert "first of 2 configurations" in record["detail"]
    assert "BLOCK: 64" in record["facts"]["configurations"][0]
