"""`register` offers the implementation, and nothing else does."""

from __future__ import annotations

import pytest

import dash_inductor

from ..support.processes import run_python


def test_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="the models come from the extra 'hf'")
    dash_inductor.register()
    dash_inductor.register()
    assert "dash_inductor" in transformers.AttentionInterface().valid_keys()
    assert "dash_inductor" in transformers.AttentionMaskInterface().valid_keys()


def test_nothing_is_registered_by_an_import() -> None:
    """Transformers is not imported either."""
    run_python("""
        import sys
        import torch, dash_inductor
        assert "transformers" not in sys.modules
        assert "dash_inductor.eager" not in sys.modules
    """)


def test_without_transformers() -> None:
    """Not installed: nothing is said.  Installed and broken, or without its registers: a warning names the cause."""
    run_python("""
        import importlib.machinery, sys, warnings
        from importlib.abc import MetaPathFinder

        class Missing(MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == "transformers":
                    raise ModuleNotFoundError("No module named 'transformers'", name=name)

        import torch, dash_inductor
        import importlib.util
        from dash_inductor.eager import registration

        warnings.simplefilter("error")
        found = registration.find_spec
        registration.find_spec = lambda name: None
        dash_inductor.register()
        registration.find_spec = found

        sys.modules["transformers"] = None
        registration.find_spec = lambda name: object()
        try:
            dash_inductor.register()
        except RuntimeWarning as warning:
            assert "not offered to transformers" in str(warning), warning
        else:
            raise AssertionError("no warning")
    """)
