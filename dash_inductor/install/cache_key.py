"""Adds dash_inductor's version and settings to the keys of Inductor's caches, so that no cached code is ever stale.

Two caches are concerned; each hashes an object with the details of a graph:
* AOTAutogradCache computes its key before the joint graph is rewritten.  The key gets our entry whenever passes look at
  the graph, even if only to record that no pass runs.
* FxGraphCache hashes the final graph.  The key gets our entry if the graph contains one of our operators: the backward
  may be compiled later than the forward, on another thread and with another deterministic flag, so only its graph shows
  what it depends on.  Graphs on a GPU get the entry while passes are active, too, because we choose their block sizes.

All other keys stay the same as in PyTorch without dash_inductor.  Inductor's own extension point (a pass object in
`custom_backend_passes`) is not used, because it always changes the key and does not see the graph.
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
    """Returns dash_inductor's part of a cache key, as text.

    It has the version, a digest of the sources, the settings that change what is compiled, and those of the compiler.
    While an observer watches graphs, its package inserts operators into them; its name and digest are then added.
    """
    settings = f"{config.cache_key()!r} {toolchain.settings()}".rstrip()
    observed = ""
    if active.graphs is not None and active.watching_graphs():
        observed = f" observed by {active.graphs.package} {sources_digest(active.graphs.package)}"
    return f"dash_inductor {__version__} {sources_digest()} {settings}{observed}"


@functools.cache
def sources_digest(package: str = _PACKAGE) -> str:
    """SHA-256 (hex) of all source files of a package; it does not depend on how the package is installed."""
    digest = hashlib.sha256()
    for name, path in sorted(_sources(package).items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _sources(package: str = _PACKAGE) -> dict[str, Path]:
    """The source files of a package by their path inside the installed package.

    Raises:
        DashError: the files cannot be found or read.
    """
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
    """Whether a graph, or one nested in it, calls an operator of dash_inductor or of the observing package."""
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
    """Whether a graph has a tensor on a CUDA device."""
    nodes = gm.graph.nodes if isinstance(gm, torch.fx.GraphModule) else ()
    values = (node.meta.get("val") for node in nodes)
    return any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)


def install(looked_at: Callable[[], bool]) -> None:
    """Adds dash_inductor's entry to the details that AOTAutogradCache and FxGraphCache hash.

    Args:
        looked_at: returns whether dash_inductor's passes look at graphs that are compiled now.
    """
    from ..upstream.caches import AOTAutogradCacheDetails

    def around(plain: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, gm: Any, *args: Any, **kwargs: Any) -> None:
            plain(self, gm, *args, **kwargs)
            is_whole = isinstance(self, AOTAutogradCacheDetails)
            if has_our_ops(gm) or ((is_whole or _on_gpu(gm)) and looked_at()):
                self.dash_inductor = entry()

        return init

    # an error here makes Inductor bypass the caches, which is right: the key would be incomplete
    seams.CACHE_DETAILS.wrap(around, let_through=Exception)
