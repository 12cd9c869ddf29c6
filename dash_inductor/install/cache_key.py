"""The entries that dash_inductor adds to the keys of Inductor's caches, so that no cached code is ever stale.

Two caches are concerned, and both hash one object of details:
* AOTAutogradCache looks its key up before the joint graph is rewritten: it gets our entry where the graph is
  looked at, be it only to record that no pass runs.
* FxGraphCache hashes the final graph: it gets our entry when the graph contains one of our operators.  The backward may
  be compiled later than the forward, in another thread and under another flag, so only its graph tells what it needs.
  A graph on a GPU gets it, too, where we choose the blocks of its kernels: that is where its code is generated.

Everything else gets no entry at all, so that its keys are those of a PyTorch without dash_inductor.  Inductor's own
extension point (a pass object in `custom_backend_passes`) always leaves a trace in the key and does not see the graph.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..config import config
from ..errors import DashError
from ..observers import active
from ..upstream import seams, toolchain
from ..version import __version__

_PACKAGE = __name__.partition(".")[0]
_MAPPED = ("lowering", "kernels")  # sub-packages whose source folder may lie outside the package's own
_SUFFIXES = (".py", ".json", ".jinja")


def entry() -> str:
    """Our part of a cache key: version, every source of the package, every setting of it and of the compiler.

    A graph that is compiled while an observer watches graphs has operators more, of the package that inserts them.
    """
    settings = f"{config.cache_key()!r} {toolchain.settings()}".rstrip()
    observed = ""
    if active.graphs is not None and active.watching_graphs():
        observed = f" observed by {active.graphs.package} {sources_digest(active.graphs.package)}"
    return f"dash_inductor {__version__} {sources_digest()} {settings}{observed}"


@functools.cache
def sources_digest(package: str = _PACKAGE) -> str:
    """SHA-256 (hex) of all sources of a package, the same for every kind of installation."""
    digest = hashlib.sha256()
    for name, path in sorted(_sources(package).items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _sources(package: str = _PACKAGE) -> dict[str, Path]:
    """Files by their name inside the installed package."""
    files: dict[str, Path] = {}
    for prefix in ("", *(_MAPPED if package == _PACKAGE else ())):
        name = ".".join(filter(None, (package, prefix)))
        spec = importlib.util.find_spec(name)
        folders = spec.submodule_search_locations if spec else None
        if not folders:
            raise DashError(f"the sources of {name} are not found: install the package")
        for path in Path(folders[0]).rglob("*"):
            if path.suffix in _SUFFIXES:
                files["/".join((prefix, *path.relative_to(folders[0]).parts)).lstrip("/")] = path
    if not files:
        raise DashError(f"the sources of {package} cannot be read, so its cache keys would not be safe")
    return files


def has_our_ops(gm: torch.nn.Module | None) -> bool:
    """Whether a graph, or one nested in it, calls an operator of ours, or of the package that observes graphs."""
    modules = () if gm is None else gm.modules()
    namespaces = ("dash_inductor.",) if active.graphs is None else ("dash_inductor.", f"{active.graphs.package}.")
    return any(
        str(node.target).startswith(namespaces)  # dash_inductor.attention_backward.default
        for module in modules
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function"
    )


def _on_gpu(gm: torch.nn.Module | None) -> bool:
    """Whether a graph computes something on a GPU."""
    nodes = gm.graph.nodes if isinstance(gm, torch.fx.GraphModule) else ()
    values = (node.meta.get("val") for node in nodes)
    return any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)


def install(looked_at: Callable[[], bool]) -> None:
    """Add our entry to the details that both caches hash.  `looked_at` says whether a graph compiled now will be."""
    from ..upstream.caches import AOTAutogradCacheDetails

    def around(plain: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, gm: Any, *args: Any, **kwargs: Any) -> None:
            plain(self, gm, *args, **kwargs)
            is_whole = isinstance(self, AOTAutogradCacheDetails)
            if has_our_ops(gm) or ((is_whole or _on_gpu(gm)) and looked_at()):
                self.dash_inductor = entry()

        return init

    # an error keeps a graph out of the caches, as it should: no key would say what the graph depends on
    seams.CACHE_DETAILS.wrap(around, let_through=Exception)
