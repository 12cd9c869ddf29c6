"""When dash_inductor is active: switched on, and deterministic algorithms on while the graph is compiled."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F

import _dash_inductor_autoload
import dash_inductor
from dash_inductor import _install, _switch
from dash_inductor._install import active


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
        dash_inductor.observe.records.clear_sites()
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


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("setting", ["pattern_matcher", "use_joint_graph_passes"])
def test_settings_under_which_no_pass_runs_are_named_once(
    setting: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install._warn_that_nothing_runs.cache_clear()
    monkeypatch.setattr("torch._functorch.aot_autograd.should_use_local_autograd_cache", lambda: True)
    with inductor_config.patch({setting: False, "fx_graph_cache": True}):
        assert seen() == 0
        assert [r.levelname for r in caplog.records if setting in r.message] == ["WARNING"]
        assert seen() == 0
        assert not active()
    assert len([r for r in caplog.records if setting in r.message]) == 1
    assert active()


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
    monkeypatch.setattr(_dash_inductor_autoload, "failure", "RuntimeError: broken")
    assert _switch.off_reason() == "RuntimeError: broken"
    assert not dash_inductor.is_enabled()
    monkeypatch.setenv("DASH_INDUCTOR", "0")
    assert _switch.off_reason() == "DASH_INDUCTOR=0 is set"
    torch.use_deterministic_algorithms(True)
    assert not active()
