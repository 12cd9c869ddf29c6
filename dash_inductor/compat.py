"""Every difference between versions of torch and triton that the package meets, and the probe of unknown versions.

Tested: torch 2.11 with triton 3.6, torch 2.13 with triton 3.7.  Imported once Inductor has been imported.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

TESTED = ("2.11", "2.13")  # minor versions of torch

# module, names in it, and what we need them for
_NAMES = (
    ("torch._inductor.fx_passes.joint_graph", "pass_patterns", "the list of joint-graph passes"),
    ("torch._inductor.config", "pattern_matcher use_joint_graph_passes", "whether joint-graph passes run"),
    ("torch._inductor.codecache", "FxGraphHashDetails", "the key of FxGraphCache"),
    ("torch._functorch._aot_autograd.autograd_cache", "AOTAutogradCacheDetails", "the key of AOTAutogradCache"),
    ("torch._dynamo.package", "CompilePackage SystemInfo", "the entries of the precompile cache"),
    ("torch._inductor.lowering", "register_lowering fallback_handler empty_strided lowerings", "lowerings"),
    ("torch._inductor.select_algorithm", "TritonTemplate SymbolicGridFn autotune_select_algorithm", "templates"),
    ("torch._inductor.codegen.common", "WorkspaceArg WorkspaceZeroMode", "the semaphores' workspace"),
    ("torch._inductor.ir", "ExternKernel FixedLayout TensorBox", "lowerings"),
    ("torch._inductor.virtualized", "V", "lowerings"),
)

# operator, and the arguments that we bind by name beside those that all of them have
_COMMON = "query key value out logsumexp dropout_p is_causal scale"
_OPERATORS = (
    ("_scaled_dot_product_flash_attention_backward", "grad_out"),
    ("_scaled_dot_product_efficient_attention_backward", "grad_out_ attn_bias"),
    ("_scaled_dot_product_cudnn_attention_backward", "grad_out attn_bias"),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", "grad_out attn_mask"),
)


def probe() -> list[str]:
    """What this torch and triton lack of the things we rely on; empty in a version that can be used."""
    return [*_probe_names(), *_probe_shapes(), *_probe_operators(), *_probe_triton()]


def _probe_names() -> Iterator[str]:
    return _missing(_NAMES)


def _missing(needed: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """The (module, names, purpose) that cannot be imported, and the names that a module lacks."""
    for module, names, purpose in needed:
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            yield f"{module} ({purpose}): {error}"
            continue
        yield from (f"{module}.{name} ({purpose})" for name in names.split() if not hasattr(found, name))


def _probe_shapes() -> Iterator[str]:
    """Names that exist, but are not what they were."""
    from torch._dynamo import package as dynamo_package
    from torch._functorch._aot_autograd import autograd_cache
    from torch._inductor import codecache
    from torch._inductor.fx_passes import joint_graph

    passes = getattr(joint_graph, "pass_patterns", [])
    if not (isinstance(passes, list) and all(callable(getattr(p, "apply", None)) for p in passes)):
        yield "joint_graph.pass_patterns as a list of objects with apply(graph)"
    package = getattr(dynamo_package, "CompilePackage", None)
    if package is not None and not (hasattr(package, "initialize") and hasattr(package, "cache_entry")):
        yield "CompilePackage with initialize and cache_entry"
    system = getattr(dynamo_package, "SystemInfo", None)
    if system is not None and not (dataclasses.is_dataclass(system) and hasattr(system, "check_compatibility")):
        yield "SystemInfo as a dataclass with check_compatibility"
    base = getattr(codecache, "FxGraphHashDetails", None)
    derived = getattr(autograd_cache, "AOTAutogradCacheDetails", None)
    if base is None or derived is None:
        return
    if list(inspect.signature(base.__init__).parameters)[:2] != ["self", "gm"]:
        yield "FxGraphHashDetails(gm, ...)"
    if not issubclass(derived, base):
        yield "AOTAutogradCacheDetails as a subclass of FxGraphHashDetails"


def _probe_operators() -> Iterator[str]:
    for name, own in _OPERATORS:
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:
            yield f"aten::{name}"
            continue
        found = {argument.name for argument in packet.default._schema.arguments}
        missing = [argument for argument in f"{_COMMON} {own}".split() if argument not in found]
        if missing:
            yield f"aten::{name}({', '.join(missing)})"


def _probe_triton() -> Iterator[str]:
    version = triton_version()
    if version is None:
        yield "triton, which is not installed"
    elif tuple(int(part) for part in version.split(".")[:2]) < (3, 6):
        yield f"triton >= 3.6, found {version}"
    else:
        yield from _probe_gluon()


def _probe_gluon() -> Iterator[str]:
    """What the Hopper kernel needs; on other architectures nothing imports it, but plans must not depend on luck."""
    gluon, purpose = "triton.experimental.gluon", "the Hopper kernel"
    return _missing(
        (
            (gluon, "jit constexpr_function", purpose),
            (f"{gluon}.language", "warp_specialize allocate_shared_memory NVMMASharedLayout", purpose),
            (
                f"{gluon}.language.nvidia.hopper",
                "mbarrier tma warpgroup_mma warpgroup_mma_wait fence_async_shared",
                purpose,
            ),
            (f"{gluon}._runtime", "GluonASTSource", purpose),
            (f"{gluon}.language._core", "builtin", purpose),
            ("triton.language.core", "_aggregate", purpose),
            ("triton._C.libtriton.ir", "DESCRIPTOR_REDUCE_KIND", purpose),
            ("triton.language.extra.cuda", "gdc_launch_dependents gdc_wait", purpose),
        )
    )


def triton_version() -> str | None:
    """Version of the installed triton, None without one."""
    try:
        triton = importlib.import_module("triton")
    except ImportError:
        return None
    return str(triton.__version__)


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def joint_passes() -> list[Any]:
    """Inductor's list of joint-graph passes; an entry is any object with ``apply(graph) -> int``."""
    from torch._inductor.fx_passes import joint_graph

    passes: list[Any] = joint_graph.pass_patterns
    return passes


def joint_passes_run() -> bool:
    """Whether Inductor's settings let it run the list of joint-graph passes."""
    from torch._inductor import config

    return bool(config.pattern_matcher and config.use_joint_graph_passes)


def make_template(*, name: str, grid: Callable[..., Any], source: str) -> Any:
    """A `TritonTemplate` whose layouts stay as they are, because its source has strides built in."""
    from torch._inductor.select_algorithm import TritonTemplate

    # 2.13 may change an output's layout after the choice unless told not to; 2.11 never does and has no such argument.
    accepted = inspect.signature(TritonTemplate.__init__).parameters
    frozen: dict[str, Any] = {"always_freeze_layout": True} if "always_freeze_layout" in accepted else {}
    return TritonTemplate(name=name, grid=grid, source=source, **frozen)


def autotune_select(name: str, choices: Sequence[Any], inputs: Sequence[Any], layout: Any) -> Any:
    """The output of the only choice.

    Raises:
        ValueError: not exactly one choice.  Several would be timed, so that the result would depend on the clock.
    """
    from torch._inductor.select_algorithm import autotune_select_algorithm

    if len(choices) != 1:
        raise ValueError(f"{name}: exactly one choice is allowed, got {len(choices)}")
    result: Any = autotune_select_algorithm(name, list(choices), list(inputs), layout)
    return result[0] if isinstance(result, tuple) else result  # 2.13 returns (output, choice), 2.11 the output


def gluon_barrier() -> Any:
    """Gluon's barrier among the warps of a partition."""
    from triton.experimental.gluon import language

    return language.barrier if hasattr(language, "barrier") else language.thread_barrier  # 3.7 renamed it


def empty_cuda(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory on the current CUDA device, as Inductor's own code allocates it.

    `torch.empty` fills memory with NaN while deterministic algorithms are on; every element here is written anyway.
    """
    guards: Any = torch._C._dynamo.guards  # where Inductor's code takes it from
    tensor: torch.Tensor = guards._empty_strided_cuda(tuple(shape), tuple(strides), dtype)
    return tensor


class _Descriptor:
    """What Triton's launcher reads of a host-side TMA descriptor."""

    __slots__ = ("address", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False  # read since 3.7

    def __init__(self, address: int, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.address, self.shape, self.strides = address, shape, strides

    @property
    def base(self) -> _Descriptor:
        return self

    def data_ptr(self) -> int:
        return self.address


class KernelLauncher:
    """Launches a compiled kernel whose first arguments are TMA descriptors of fixed shapes and strides.

    Triton's own launcher encodes every descriptor on every call, which takes longer than the rest of a launch.  Where
    its inner function can be reached (3.6), encoded descriptors are kept by address; elsewhere Triton encodes them.

    Args:
        compiled: Triton's compiled kernel.
        grid: number of programs.
        descriptors: (shape, strides) of each leading descriptor argument.
        constants: number of compile-time constants at the end of the argument list.
    """

    def __init__(
        self, compiled: Any, grid: int, descriptors: Sequence[tuple[Sequence[int], Sequence[int]]], constants: int
    ) -> None:
        self._compiled, self._grid = compiled, grid
        self._descriptors = [(tuple(shape), tuple(strides)) for shape, strides in descriptors]
        self._constants = (None,) * constants
        self._encoded: dict[tuple[int, int], Any] = {}
        self._launcher = compiled.run  # loads the kernel into the current device
        self._raw = _raw_launch(self._launcher) if descriptors else None
        self._runtime = importlib.import_module("triton.knobs").runtime

    def __call__(self, stream: int, addresses: Sequence[int], *arguments: Any) -> None:
        """Launch on a raw stream; one address per descriptor, then the other arguments (addresses as integers)."""
        compiled, runtime = self._compiled, self._runtime
        enter, leave = _hook(runtime.launch_enter_hook), _hook(runtime.launch_exit_hook)
        metadata = None if enter is None else compiled.launch_metadata((self._grid, 1, 1), stream, *arguments)
        head = (self._grid, 1, 1, stream, compiled.function)
        hooks = (compiled.packed_metadata, metadata, enter, leave)
        if self._raw is None:
            tiles = [_Descriptor(a, *d) for a, d in zip(addresses, self._descriptors, strict=True)]
            self._launcher(*head, *hooks, *tiles, *arguments, *self._constants)
            return
        flat: list[Any] = []
        for i, address in enumerate(addresses):
            encoded = self._encoded.get((i, address))
            if encoded is None:
                encoded = self._encode(i, address)
            flat += encoded
        launcher = self._launcher
        options = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
        self._raw(*head, *options, *hooks, *flat, *arguments, *self._constants)

    def _encode(self, i: int, address: int) -> list[Any]:
        from triton.backends.nvidia import driver

        if len(self._encoded) > 1024:  # addresses that are not used any more
            self._encoded.clear()
        descriptor = _Descriptor(address, *self._descriptors[i])
        encoded: list[Any] = driver.make_tensordesc_arg(descriptor, self._compiled.metadata.tensordesc_meta[i])
        self._encoded[i, address] = encoded
        return encoded


def _hook(hook: Any) -> Any:
    """A profiler's hook, None where nobody has registered one: an empty chain would be called on every launch."""
    return hook if getattr(hook, "calls", True) else None


def _raw_launch(launcher: Any) -> Any:
    """The function below Triton's descriptor encoding, or None where it takes other arguments than in 3.6."""
    if not str(triton_version()).startswith("3.6.") or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    closure = dict(zip(launcher.launch.__code__.co_freevars, launcher.launch.__closure__ or (), strict=True))
    return closure["launcher"].cell_contents if "launcher" in closure else None
