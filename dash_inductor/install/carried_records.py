"""Records travel with cached graphs: a graph that comes from a cache has the records of the one that was compiled.

AOTAutogradCache, the precompile cache and saved functions store, and load, AOTAutograd's result for a whole graph; so
the records of a graph are written into it as text, which any process can read back, also one without dash_inductor.
The result is made when the backward has been compiled, which may be much later and on another thread; until then the
compiled forward keeps the text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

ATTRIBUTE = "dash_inductor_records"
"""The text, as an attribute of AOTAutograd's result and of the compiled forward.  "" says that the graph has no
records, or that it was compiled while dash_inductor was off; without the attribute nothing is known."""


def install(active: Callable[[], bool]) -> None:
    """Write records into results, and publish the records of results that are loaded.

    Args:
        active: whether a graph compiled now is looked at.
    """
    from torch._functorch._aot_autograd.aot_autograd_result import GenericAOTAutogradResult
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
    from torch._inductor.output_code import CompiledFxGraph

    post_compile = CompiledFxGraph.post_compile
    make_entry = AOTAutogradCache.make_entry
    load = GenericAOTAutogradResult.wrap_post_compile

    @functools.wraps(post_compile)
    def noted(self: Any, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        post_compile(self, example_inputs, constants, graph_kwargs)
        if not graph_kwargs.get("is_backward"):  # records are made when a joint graph is read, before its forward
            setattr(self, ATTRIBUTE, _made() if active() else "")

    @functools.wraps(make_entry)
    def made(compiled_fw_func: Any, *args: Any, **kwargs: Any) -> Any:
        entry = make_entry(compiled_fw_func, *args, **kwargs)
        forward = compiled_fw_func
        while not hasattr(forward, ATTRIBUTE) and hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        if hasattr(forward, ATTRIBUTE):
            setattr(entry, ATTRIBUTE, getattr(forward, ATTRIBUTE))
        return entry

    @functools.wraps(load)
    def loaded(self: Any, args: Any, aot_config: Any, fx_config: Any) -> Any:
        result = load(self, args, aot_config, fx_config)
        text = getattr(self, ATTRIBUTE, None)
        if text or (text is None and active()):
            from ..records.publication import restore

            # only what is loaded by itself, outside of a compile, has no other configuration than its own
            restore(text, "precompile" if aot_config is self.sanitized_aot_config else "AOTAutogradCache")
        return result

    CompiledFxGraph.post_compile = noted  # type: ignore[method-assign]  # every graph, compiled or cached, gets here
    AOTAutogradCache.make_entry = staticmethod(made)  # type: ignore[method-assign]
    GenericAOTAutogradResult.wrap_post_compile = loaded  # type: ignore[method-assign]


def _made() -> str:
    from ..records.publication import finish

    return finish()
