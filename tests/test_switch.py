"""dash_inductor is active if it is switched on, and deterministic algorithms are on while the graph is compiled."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F

import _dash_inductor_state
import dash_inductor
from dash_inductor import _switch
from dash_inductor.config import config
from dash_inductor.errors import FallbackError
from dash_inductor.install import installation
from dash_inductor.model.reasons import Reason


def seen(backend: str = "inductor", **options: object) -> int:
    """How many attention backwards dash_inductor looks at when a model with one is compiled here."""
    before = len(dash_inductor.sites())
    q = torch.ones(1, 1, 8, 8, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend=backend, **options)(q).sum().backward()  # type: ignore[call-overload]  # backend is a str
    return len(dash_inductor.sites()) - before


def test_follows_the_flag_at_compile_time() -> None:
    assert seen() == 0
    torch.use_deterministic_algorithms(True)
    assert seen() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert seen() == 1


@pytest.mark.usefixtures("deterministic")
def test_one_function_follows_a_flag_that_changes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q))
    found = []
    for flag in (True, False, True):
        torch.use_deterministic_algorithms(flag)
        dash_inductor.records.records.clear_sites()
        compiled(torch.ones(1, 1, 8, 8, requires_grad=True)).sum().backward()
        found.append(len(dash_inductor.sites()))
    assert found == [1, 0, 0]  # the third call finds the first compiled code again


@pytest.mark.usefixtures("deterministic")
def test_switch_in_code() -> None:
    try:
        dash_inductor.disable()
        assert not dash_inductor.is_enabled()
        assert seen() == 0
        assert seen(backend="dash") == 1
        assert not dash_inductor.is_enabled()
    finally:
        dash_inductor.enable()
    assert dash_inductor.is_enabled()
    with dash_inductor.disabled():
        assert not dash_inductor.is_enabled()
        assert seen() == 0
        assert seen(backend="dash", options={"max_autotune": False}) == 1
    assert seen() == 1


def test_backend_follows_the_flag() -> None:
    assert seen(backend="dash") == 0


NO_PASSES = [
    ("pattern_matcher", {"options": {"pattern_matcher": False}}),
    ("use_joint_graph_passes", {"options": {"use_joint_graph_passes": False}}),
    ("use_joint_graph_passes", {"mode": "lite"}),
]
"""The setting that stops Inductor's joint-graph passes, and how a program asks for it."""


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("setting", "asked"), NO_PASSES, ids=["pattern_matcher", "use_joint_graph_passes", "lite"])
def test_settings_under_which_no_pass_runs(
    setting: str, asked: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, recorded for every attention backward, and an error with `strict`; no cache needs to be asked."""
    installation._warn_that_nothing_runs.cache_clear()
    with config.patch(cpu="reference"):
        for found in (1, 2):
            assert seen(**asked) == 1
            record = dash_inductor.sites()[-1]
            assert (record.status, record.reason, record.detail) == ("fallback", Reason.PASSES_OFF, f"{setting}=False")
            assert __file__ in record.source or "mode" in asked  # there PyTorch keeps no stack
            assert len(dash_inductor.sites()) == found
        assert [r.levelname for r in caplog.records if f"{setting} " in r.message] == ["WARNING"]
        with config.patch(strict=True), pytest.raises(FallbackError, match="passes_off"):
            seen(**asked)
        if "mode" not in asked:
            assert seen() == 1
            assert dash_inductor.sites()[-1].status == "replaced"


@pytest.mark.usefixtures("deterministic")
def test_settings_under_which_no_pass_runs_where_nothing_would_be_replaced(caplog: pytest.LogCaptureFixture) -> None:
    installation._warn_that_nothing_runs.cache_clear()
    with config.patch(strict=True):
        assert seen(mode="lite") == 1
    assert dash_inductor.sites()[-1].reason is Reason.CPU_OFF
    assert not [r for r in caplog.records if r.levelname == "WARNING" and r.name == "dash_inductor"]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.skipif(not hasattr(inductor_config, "batch_invariant"), reason="newer versions of torch have this mode")
def test_batch_invariant_mode_changes_nothing() -> None:
    with config.patch(cpu="reference"):
        assert seen(options={"batch_invariant": True}) == seen() == 1
    mode, default = dash_inductor.sites()[-2:]
    assert mode.status == "replaced"
    assert mode.as_dict() == default.as_dict()


def test_disabled_holds_for_its_thread_and_ends_with_an_error() -> None:
    elsewhere: list[bool] = []
    with dash_inductor.disabled():
        thread = threading.Thread(target=lambda: elsewhere.append(dash_inductor.is_enabled()))
        thread.start()
        thread.join()
    assert elsewhere == [True]
    with pytest.raises(ZeroDivisionError), dash_inductor.disabled():
        _ = 1 / 0
    assert dash_inductor.is_enabled()


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _switch.off_reason() is None
    with dash_inductor.disabled():
        assert _switch.off_reason() == "inside dash_inductor.disabled()"
    monkeypatch.setattr(_dash_inductor_state, "failure", "RuntimeError: broken")
    assert _switch.off_reason() == "RuntimeError: broken"
    assert not dash_inductor.is_enabled()
    monkeypatch.setenv("DASH_INDUCTOR", "0")
    assert _switch.off_reason() == "DASH_INDUCTOR=0 is set"
    torch.use_deterministic_algorithms(True)
    assert installation.rewriter() is None
