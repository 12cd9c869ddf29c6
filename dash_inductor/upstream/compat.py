"""All differences between torch and triton versions that the package has to handle.

`probe` checks whether an installed version has everything.  This module is imported once Inductor has been imported.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from . import seams

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")  # minor versions of torch, each with its required triton

_VERSION: str = torch.__version__
TORCH = tuple(int(part) for part in _VERSION.split(".")[:2])

_GLUON = "triton.experimental.gluon.language"

# Names that versions of Triton spell differently: a module, and the spellings from the newest to the oldest.  The first
# one that exists is the one to use: an old one may stay, and raise when it is called.
BARRIER = (_GLUON, "barrier|thread_barrier")  # 3.7
REINTERPRET = (_GLUON, "shared_memory_descriptor.reinterpret|shared_memory_descriptor._reinterpret")  # 3.9
COPY = (f"{_GLUON}.nvidia.hopper", "async_copy.async_load|async_copy.async_copy_global_to_shared")  # 3.9
TMA_LOAD = (f"{_GLUON}.nvidia.hopper.tma", "async_load|async_copy_global_to_shared")  # 3.8
TMA_STORE = (f"{_GLUON}.nvidia.hopper.tma", "async_store|async_copy_shared_to_global")  # 3.8


def triton_version() -> str | None:
    """The version of the installed triton; None if it is not installed."""
    try:
        triton = importlib.import_module("triton")
    except ImportError:
        return None
    return str(triton.__version__)


def computes_early() -> bool:
    """Whether Triton computes operand descriptors (see `assembling`) and element indices as early as it can, where they
    occupy registers needed for matmuls.
    """
    return _triton_since(3, 9)


def waits_meet() -> bool:
    """Whether Gluon's wait for matmuls synchronizes all warps of a partition, as it does since Triton 3.9.

    With the attribute `warpGroupLocal`, each warpgroup waits for its own matmuls only, as before.
    """
    return _triton_since(3, 9)


def sums_in_new_order() -> bool:
    """Whether `tl.sum` adds elements in the order introduced with Triton 3.9."""
    return _triton_since(3, 9)


def arrivals_meet() -> bool:
    """Whether all warps of a warp-specialized partition synchronize before one of them arrives at an mbarrier."""
    return _triton_since(3, 9)


@functools.cache
def scans_stay_whole() -> bool:
    """Whether Inductor keeps scans unsplit under deterministic algorithms (pytorch 191714), as 2.14.1 and 2.15 do."""
    scan = resolve("torch._inductor.ir", "Scan")
    return "are_deterministic_algorithms_enabled" in inspect.getsource(scan.create)


def _triton_since(*version: int) -> bool:
    installed = triton_version()
    return installed is not None and tuple(map(int, installed.split(".")[: len(version)])) >= version


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def load_inductor() -> None:
    """Imports Inductor as the first compile does, which installs dash_inductor into it."""
    importlib.import_module("torch._inductor.compile_fx")


def joint_passes() -> list[Any]:
    """Inductor's list of joint-graph passes; an entry is any object with ``apply(graph) -> int``."""
    passes: list[Any] = seams.JOINT_PASSES.value()
    return passes


def settings_that_stop_passes() -> list[str]:
    """The names of the settings that are off now and thereby keep Inductor from running its joint-graph passes."""
    from torch._inductor import config

    return [name for name in ("pattern_matcher", "use_joint_graph_passes") if not getattr(config, name)]


def times_products() -> bool:
    """Whether the program lets Inductor autotune matmuls."""
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm)


def without_autotuning(shape_padding: bool) -> AbstractContextManager[Any]:
    """A context manager that switches autotuning off: Inductor then generates pointwise kernels in one configuration.

    `torch.use_deterministic_algorithms` switches Inductor's deterministic mode on only for the thread that calls it
    (2.13 and later), and `torch.set_deterministic_debug_mode` never does, so both settings are made here for every
    compile.

    Args:
        shape_padding: whether Inductor may pad unaligned matmuls as the program's settings say.  In deterministic mode
            it times nothing, but from 2.13 on it pads by a learned heuristic, which differs between GPUs.
    """
    from torch._inductor import config

    settings = {"triton.autotune_pointwise": False, "deterministic": True}
    if not shape_padding and not config.force_shape_pad:
        settings["shape_padding"] = False
    patch: AbstractContextManager[Any] = config.patch(settings)
    return patch


def of_order(autotuner: Any) -> dict[Any, float]:
    """Returns a fake time for each launcher of an Inductor autotuner, so that the first of them is chosen.

    The time of a launcher is its position in the list; configurations that do not fit have no launcher.
    """
    return {launcher: float(place) for place, launcher in enumerate(autotuner.launchers)}


def make_template(*, name: str, grid: Callable[..., Any], source: str) -> Any:
    """A `TritonTemplate` whose output layout Inductor does not change, because strides are built into its source."""
    from torch._inductor.select_algorithm import TritonTemplate

    # 2.13 may change an output's layout after the choice, unless this is set; 2.11 never does and lacks the argument.
    accepted = inspect.signature(TritonTemplate.__init__).parameters
    frozen: dict[str, Any] = {"always_freeze_layout": True} if "always_freeze_layout" in accepted else {}
    return TritonTemplate(name=name, grid=grid, source=source, **frozen)


def autotune_select(name: str, choices: Sequence[Any], inputs: Sequence[Any], layout: Any) -> Any:
    """Returns the output of a kernel generated from a Triton template, given its only choice; nothing is timed.

    Raises:
        ValueError: there is not exactly one choice.  Several would be timed, so that the result would depend on timing.
    """
    from torch._inductor.select_algorithm import autotune_select_algorithm

    if len(choices) != 1:
        raise ValueError(f"{name}: exactly one choice is allowed, got {len(choices)}")
    result: Any = autotune_select_algorithm(name, list(choices), list(inputs), layout)
    return result[0] if isinstance(result, tuple) else result  # 2.13 returns (output, choice), 2.11 the output


def resolve(module: str, spellings: str) -> Any:
    """The first object that exists among several names of a module.

    Args:
        module: the name of the module.
        spellings: names separated by ``|``; a dotted one is an attribute of an object in the module.

    Raises:
        AttributeError: none of them exists.
    """
    root = importlib.import_module(module)
    for name in spellings.split("|"):
        try:
            return operator.attrgetter(name)(root)
        except AttributeError:
            continue
    raise AttributeError(f"{module} has none of {spellings.split('|')}")


def reads_only() -> dict[str, bool]:
    """The keyword arguments with which Gluon's `tma.store_wait` waits only until shared memory has been read."""
    store_wait = resolve(f"{_GLUON}.nvidia.hopper.tma", "store_wait")
    # Since 3.9 it can also wait for the writes; before, it waits only for reads.
    return {"read_only": True} if "read_only" in inspect.signature(store_wait).parameters else {}


def _missing(*_: object) -> NoReturn:
    raise RuntimeError("this torch has no torch._C._dynamo.guards._empty_strided_cuda")


_guards: Any = torch._C._dynamo.guards  # where Inductor's code takes it from
empty_cuda: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = getattr(
    _guards, "_empty_strided_cuda", _missing
)
"""A function (shape, strides, dtype) -> uninitialized tensor on the current CUDA device; Inductor's code uses it, too.

`torch.empty` fills memory with NaN while deterministic algorithms are on; here every element is written later anyway.
"""
