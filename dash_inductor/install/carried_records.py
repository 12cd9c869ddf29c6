"""Stores records in cache entries, so that a graph loaded from a cache has the records of its original compile.

AOTAutogradCache, the precompile cache and saved functions store AOTAutograd's result for a whole graph.  The records of
the graph are added to this result as text, so that processes without dash_inductor can load it, too.  The result is
made when the backward has been compiled, which may be much later and on another thread; until then, the text is an
attribute of the compiled forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..upstream import seams

ATTRIBUTE = "dash_inductor_records"
"""The attribute of AOTAutograd's result and of the compiled forward that holds the text.  "" means that the graph has
no records or was compiled while dash_inductor was off; a missing attribute means that its records are unknown."""


def install(active: Callable[[], bool]) -> None:
    """Makes AOTAutograd store each graph's records in its cache entry, and publishes them when an entry is loaded.

    Args:
        active: returns whether dash_inductor's passes look at graphs that are compiled now.
    """
    seams.FINISH_GRAPH.wrap(lambda plain: _noting(plain, active))
    seams.MAKE_ENTRY.wrap(_carrying)
    seams.LOAD_ENTRY.wrap(lambda plain: _publishing(plain, active))


def _noting(post_compile: Callable[..., None], active: Callable[[], bool]) -> Callable[..., None]:
    """Wraps the last step of a graph's compile or load, to attach the text to the compiled forward."""

    def noted(self: Any, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        post_compile(self, example_inputs, constants, graph_kwargs)
        if not graph_kwargs.get("is_backward"):  # records are made in the joint pass, before the forward is compiled
            setattr(self, ATTRIBUTE, _made() if active() else "")

    return noted


def _carrying(make_entry: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the making of AOTAutograd's result, to copy the text of the compiled forward into it."""

    def made(compiled_fw_func: Any, *args: Any, **kwargs: Any) -> Any:
        entry = make_entry(compiled_fw_func, *args, **kwargs)
        forward = compiled_fw_func
        while not hasattr(forward, ATTRIBUTE) and hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        if hasattr(forward, ATTRIBUTE):
            setattr(entry, ATTRIBUTE, getattr(forward, ATTRIBUTE))
        return entry

    return made


def _publishing(load: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Wraps the loading of a result, to publish its records."""

    def loaded(self: Any, args: Any, aot_config: Any, fx_config: Any) -> Any:
        result = load(self, args, aot_config, fx_config)
        text = getattr(self, ATTRIBUTE, None)
        if text or (text is None and active()):
            from ..records.publication import restore

            # only a result that is loaded outside of a compile is given its own configuration
            restore(text, "precompile" if aot_config is self.sanitized_aot_config else "AOTAutogradCache")
        return result

    return loaded


def _made() -> str:
    from ..records.publication import finish

    return finish()
