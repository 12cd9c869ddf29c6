"""Records travel with cached graphs: a graph that comes from a cache has the records of the one that was compiled.

AOTAutogradCache, the precompile cache and saved functions store, and load, AOTAutograd's result for a whole graph; so
the records of a graph are written into it as text, which any process can read back, also one without dash_inductor.
The result is made when the backward has been compiled, which may be much later and on another thread; until then the
compiled forward keeps the text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..upstream import seams

ATTRIBUTE = "dash_inductor_records"
"""The text, as an attribute of AOTAutograd's result and of the compiled forward.  "" says that the graph has no
records, or that it was compiled while dash_inductor was off; without the attribute nothing is known."""


def install(active: Callable[[], bool]) -> None:
    """Write records into results, and publish the records of results that are loaded.

    Args:
        active: whether a graph compiled now is looked at.
    """
    seams.FINISH_GRAPH.wrap(lambda plain: _noting(plain, active))
    seams.MAKE_ENTRY.wrap(_carrying)
    seams.LOAD_ENTRY.wrap(lambda plain: _publishing(plain, active))


def _noting(post_compile: Callable[..., None], active: Callable[[], bool]) -> Callable[..., None]:
    """Keeps the text in the compiled forward; every graph, compiled or cached, gets here."""

    def noted(self: Any, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        post_compile(self, example_inputs, constants, graph_kwargs)
        if not graph_kwargs.get("is_backward"):  # records are made when a joint graph is read, before its forward
            setattr(self, ATTRIBUTE, _made() if active() else "")

    return noted


def _carrying(make_entry: Callable[..., Any]) -> Callable[..., Any]:
    """Writes the text of the compiled forward into the result."""

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
    """Publishes the records of a result that is loaded."""

    def loaded(self: Any, args: Any, aot_config: Any, fx_config: Any) -> Any:
        result = load(self, args, aot_config, fx_config)
        text = getattr(self, ATTRIBUTE, None)
        if text or (text is None and active()):
            from ..records.publication import restore

            # only what is loaded by itself, outside of a compile, has no other configuration than its own
            restore(text, "precompile" if aot_config is self.sanitized_aot_config else "AOTAutogradCache")
        return result

    return loaded


def _made() -> str:
    from ..records.publication import finish

    return finish()
