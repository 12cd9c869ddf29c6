"""Metrics for Prometheus, without its client."""

from __future__ import annotations

import re
import sys
from importlib.metadata import requires

import pytest

from dash_guard.monitor.metrics import Metrics
from dash_inductor.errors import MissingPackageError


def test_the_extra_that_the_error_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingPackageError, match=r"dash-inductor\[metrics\]"):
        Metrics(("127.0.0.1", 9464))
    needed = {name: requires(name) or [] for name in ("dash-inductor", "dash-guard")}
    assert any(re.match(r"dash-guard\[metrics\];.*metrics", each) for each in needed["dash-inductor"])
    assert any(re.match(r"prometheus.client;.*metrics", each) for each in needed["dash-guard"])
