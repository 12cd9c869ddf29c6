"""Compiled code calls implementations; profiles, modes of dispatch and other wrappers see operators."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode

from dash_inductor import lowering
from dash_inductor.model import Band, Plan, Tiles
from dash_inductor.operators import attention as ops

from ..support.calls import backward_spec, forward_spec
from ..support.graphs import BACKWARD, FORWARD

TILES = Tiles(16, 32, 1, 1)
PLAN = str(Plan("reference", "two_pass", "reference", TILES, TILES, forward_tiles=TILES))
OF_FORWARD = str(forward_spec(Band(0), 0.1)), PLAN, "a site"
OF_BACKWARD = str(backward_spec(Band(0), 0.1)), PLAN, "a site"
Compiled = Callable[[], tuple[Tensor, ...]]


def attend(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    out, lse = ops.attention_forward(q, k, v, [], *OF_FORWARD)
    return (out, *ops.attention_backward(do, q, k, v, out, lse, [], *OF_BACKWARD))


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, 40, 2, 16, generator=generator).transpose(1, 2) for _ in range(4)]


def code_of(monkeypatch: pytest.MonkeyPatch, dynamic: bool = False, **settings: Any) -> tuple[str, Compiled]:
    """The code of `attend`, and a call of it."""
    lowering.register()
    codes: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(codes.append))
    torch._dynamo.reset()
    given, compiled = tensors(), torch.compile(attend, dynamic=dynamic)
    with inductor_config.patch(fx_graph_cache=False, **settings):
        compiled(*given)
    return codes[-1], lambda: compiled(*given)


def test_code_in_python_calls_the_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    code, run = code_of(monkeypatch)
    for name in ("forward", "backward"):
        assert code.count(f"torch.ops.dash_inductor.attention_{name}.direct(") == 1
        assert f"attention_{name}.default(" not in code
    assert all(map(torch.equal, run(), attend(*tensors())))


@pytest.mark.parametrize("dynamic", [False, True])
def test_code_tells_the_layouts_that_the_graph_knows(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of tensors: gradient of the output, query, key, value, output, log-sum-exp."""
    code, run = code_of(monkeypatch, dynamic)
    (backward,) = re.findall(r"attention_backward\.direct\(.*\)", code)
    *_, last = ast.parse(f"torch.{backward}", mode="eval").body.args  # type: ignore[attr-defined]  # a call
    if dynamic:
        assert last.value == "a site"
    else:
        tensor = "cpu float32 [1, 2, 40, 16] [1280, 16, 32, 1]"
        assert last.value.split("; ")[:4] == [tensor] * 4
        assert last.value.split("; ")[5] == "cpu float32 [1, 2, 40] [80, 40, 1]"
        assert len(last.value.split("; ")) == 6
    assert all(map(torch.equal, run(), attend(*tensors())))


def test_a_mode_sees_no_layouts() -> None:
    given = tensors()
    plain = torch.ops.dash_inductor.attention_forward.direct(*given[:3], [], *OF_FORWARD)
    with Seen() as seen:
        found = torch.ops.dash_inductor.attention_forward.direct(*given[:3], [], *OF_FORWARD, "layouts")
    assert FORWARD in seen.names
    assert all(map(torch.equal, found, plain))


def test_the_dispatcher_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does autograd, which would refuse operands that want a gradient."""
    _, run = code_of(monkeypatch)
    seen: list[str] = []
    monkeypatch.setattr(torch._ops.OpOverload, "__call__", lambda self, *args, **kwargs: seen.append(str(self)))
    run()
    assert not [name for name in seen if name.startswith("dash.")]


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_operators() -> None:
    given = tensors()
    with Seen() as seen:
        out, lse = torch.ops.dash_inductor.attention_forward.direct(*given[:3], [], *OF_FORWARD)
        torch.ops.dash_inductor.attention_backward.direct(given[3], *given[:3], out, lse, [], *OF_BACKWARD)
    assert [name for name in seen.names if name.startswith("dash")] == [FORWARD, BACKWARD]


def test_a_profile_shows_the_operators_and_their_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = code_of(monkeypatch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert (counts[FORWARD], counts[BACKWARD], counts["dash_inductor a site"]) == (1, 1, 2)


class _Stop(Exception):
    pass


def test_a_wrapper_in_cpp_calls_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward by way of Python, because it returns a list."""
    lowering.register()
    codes: list[str] = []

    def save(code: str) -> None:
        codes.append(code)
        raise _Stop  # its compilation takes a minute

    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(save))
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False, cpp_wrapper=True), contextlib.suppress(Exception):
        torch.compile(attend, dynamic=False)(*tensors())
    assert f'findSchemaOrThrow("{FORWARD}", "")' in codes[-1]
    assert f'"torch.ops.{BACKWARD.replace("::", ".")}.default"' in codes[-1]
    assert ".direct" not in codes[-1]
