"""The probe of torch and triton names what is missing; differences between versions are hidden."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
from torch._functorch._aot_autograd import autograd_cache
from torch._inductor import codecache, select_algorithm
from torch._inductor.fx_passes import joint_graph

from dash_inductor import _install, compat
from dash_inductor.errors import UnsupportedVersionError


def test_this_version_has_everything() -> None:
    assert compat.probe() == []


def test_missing_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(select_algorithm, "TritonTemplate")
    monkeypatch.delattr(codecache, "FxGraphHashDetails")
    assert compat.probe() == [
        "torch._inductor.codecache.FxGraphHashDetails (the key of FxGraphCache)",
        "torch._inductor.select_algorithm.TritonTemplate (templates)",
    ]


def test_missing_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_NAMES", (("torch._inductor.gone", "x", "nothing"),))
    assert compat.probe() == ["torch._inductor.gone (nothing): No module named 'torch._inductor.gone'"]


def test_changed_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Details:
        def __init__(self, graph: object) -> None: ...

    monkeypatch.setattr(joint_graph, "pass_patterns", [object()])
    monkeypatch.setattr(codecache, "FxGraphHashDetails", Details)
    assert autograd_cache.AOTAutogradCacheDetails is not Details
    assert compat.probe() == [
        "joint_graph.pass_patterns as a list of objects with apply(graph)",
        "FxGraphHashDetails(gm, ...)",
        "AOTAutogradCacheDetails as a subclass of FxGraphHashDetails",
    ]


def test_changed_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_OPERATORS", (("relu", "grad_out"), ("no_such_operator", "")))
    first, second = compat.probe()
    assert first == "aten::relu(query, key, value, out, logsumexp, dropout_p, is_causal, scale, grad_out)"
    assert second == "aten::no_such_operator"


@pytest.mark.parametrize(
    ("version", "missing"),
    [
        ("3.6.0", []),
        ("4.0.0+git1", []),
        ("3.5.1", ["triton >= 3.6, found 3.5.1"]),
        (None, ["triton, which is not installed"]),
    ],
)
def test_triton(version: str | None, missing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "triton_version", lambda: version)
    assert compat.probe() == missing


def test_changed_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
    monkeypatch.delattr(hopper, "warpgroup_mma_wait")
    assert compat.probe() == [f"{hopper.__name__}.warpgroup_mma_wait (the Hopper kernel)"]


def test_nothing_is_installed_where_the_probe_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "probe", lambda: ["this", "that"])
    passes, init = list(joint_graph.pass_patterns), codecache.FxGraphHashDetails.__init__
    with pytest.raises(
        UnsupportedVersionError, match=r"lacks what dash_inductor relies on: this; that \(tested: torch 2"
    ):
        _install.install.__wrapped__()
    assert joint_graph.pass_patterns == passes
    assert codecache.FxGraphHashDetails.__init__ is init


def test_installing_again_changes_nothing() -> None:
    _install.install()
    before = list(joint_graph.pass_patterns)
    _install.install()
    assert joint_graph.pass_patterns == before


@pytest.mark.parametrize("choices", [[], [SimpleNamespace(), SimpleNamespace()]])
def test_several_choices_are_refused(choices: list[object]) -> None:
    with pytest.raises(ValueError, match=f"dash_x: exactly one choice is allowed, got {len(choices)}"):
        compat.autotune_select("dash_x", choices, [], None)


@pytest.mark.parametrize("result", ["output", ("output", "choice")])
def test_output_of_the_only_choice(result: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select_algorithm, "autotune_select_algorithm", lambda *args: result)
    assert compat.autotune_select("dash_x", ["choice"], [], None) == "output"


def test_templates_keep_their_layouts() -> None:
    template = compat.make_template(name="dash_test", grid=lambda meta: (1, 1, 1), source="")
    assert getattr(template, "always_freeze_layout", True) is True
