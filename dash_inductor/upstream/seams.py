"""The seams: every function or table of PyTorch that dash_inductor wraps or extends to take part in compiles.

The table has three users: the probe checks that each place exists before anything is changed, `install` wraps the
functions, and the doctor prints it.  PyTorch looks each name up whenever it uses it, so it calls what is assigned
there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from .. import failures
from .patches import replaced

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function that takes a PyTorch function and returns the wrapper that replaces it and calls it."""


@dataclass(frozen=True)
class Seam:
    """A function of PyTorch that is wrapped, or a table of PyTorch to which an entry is added.

    Attributes:
        module: the name of its module.
        attribute: its name in the module; dotted for a method of a class.
        purpose: what dash_inductor needs it for.
    """

    module: str
    attribute: str
    purpose: str

    @property
    def probed(self) -> tuple[str, str, str]:
        """The row (module, name, purpose) with which `probe` checks that the function or table exists.

        For a constructor, the name is that of its class.
        """
        return self.module, self.attribute.removesuffix(".__init__"), self.purpose

    def value(self) -> Any:
        """Returns the function or table that PyTorch has at this place now, wrapped or not."""
        return getattr(*self._place())

    def wrap(self, around: Around, *, let_through: type[Exception] | tuple[()] = ()) -> None:
        """Replaces the function by `around(function)` permanently.

        An error in our wrapper changes nothing: the call returns the result of PyTorch's function (see `failures`).

        Args:
            around: makes the wrapper.
            let_through: exceptions that the wrapper raises on purpose.
        """
        owner, name = self._place()
        guarded = _guarded(getattr(owner, name), around, self.purpose, let_through)
        setattr(owner, name, _like(inspect.getattr_static(owner, name), guarded))

    def wrapped(self, around: Around) -> AbstractContextManager[None]:
        """Returns a context manager that replaces the function by `around(function)`."""
        owner, name = self._place()
        return replaced(owner, {name: _like(inspect.getattr_static(owner, name), around(getattr(owner, name)))})

    def _place(self) -> tuple[Any, str]:
        path, _, name = self.attribute.rpartition(".")
        owner: Any = importlib.import_module(self.module)
        return operator.attrgetter(path)(owner) if path else owner, name


class _Plain:
    """A function of PyTorch that stores the result or error of its last call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = self.__wrapped__ = function  # the latter for `inspect.signature`
        self.has_run = False
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.result = self.function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        self.has_run = True
        return self.result


def _guarded(
    function: Callable[..., Any], around: Around, purpose: str, let_through: type[Exception] | tuple[()]
) -> Callable[..., Any]:
    """Returns `around(function)` that falls back to the plain function after an error of ours."""

    def run(*args: Any, **kwargs: Any) -> Any:
        plain = _Plain(function)
        try:
            return around(plain)(*args, **kwargs)
        except Exception as error:
            if plain.error is error or isinstance(error, let_through):
                raise
            if plain.error is not None:
                raise plain.error from error
            failures.caught(purpose, error)
            return plain.result if plain.has_run else function(*args, **kwargs)

    return run


def _like(plain: Any, ours: Callable[..., Any]) -> Any:
    """Our function with the name and docstring of PyTorch's; static if PyTorch's is static or a class method."""
    if isinstance(plain, (staticmethod, classmethod)):
        return staticmethod(functools.wraps(plain.__func__)(ours))
    return functools.wraps(plain)(ours)


_COMPILE_FX = "torch._inductor.compile_fx"
_AUTOGRAD = "torch._functorch._aot_autograd"
_RECORDS = "records of cached graphs"

JOINT_PASSES = Seam("torch._inductor.fx_passes.joint_graph", "pass_patterns", "the list of joint-graph passes")
"""Objects with ``apply(graph) -> int``, which Inductor applies to a joint graph in order."""
RUN_JOINT_PASSES = Seam(_COMPILE_FX, "_recursive_joint_graph_passes", "whether joint-graph passes run")
RUN_PRE_GRAD_PASSES = Seam(_COMPILE_FX, "_recursive_pre_grad_passes", "calls that only their layout keeps from fusion")
GENERATE = Seam(_COMPILE_FX, "fx_codegen_and_compile", "kernels that are not chosen by timing")
"""Generates the code of one graph, and compiles it."""
SCAN_SPLITS = Seam("torch._inductor.ir", "Scan.num_splits", "sums along few long rows in one order")
"""The number of CTAs that share a row of a scan; they exchange sums in an order that depends on timing
(pytorch 190946)."""
GENERATE_KERNEL = Seam("torch._inductor.codegen.triton", "TritonKernel.codegen_kernel", "blocks of kernels by a rule")
"""Generates the code of one kernel, with the configurations for autotuning."""
READ_BUFFER = Seam(
    "torch._inductor.codegen.triton", "TritonKernel.load", "kernels that wait for what they have written"
)
"""Generates the load of a buffer in the kernel that is being generated."""
ALERT = Seam("torch._prims_common", "alert_not_deterministic", "operators that raise, made deterministic")
"""Raises PyTorch's determinism error while shapes are computed; the argument is the operator's name in the error."""
DEFINE_USER_KERNEL = Seam(
    "torch._inductor.codegen.wrapper",
    "PythonWrapperCodegen.define_user_defined_triton_kernel",
    "kernels of the program that are not chosen by timing",
)
KERNEL_META = Seam("torch._inductor.codegen.triton", "TritonKernel.inductor_meta_common", DEFINE_USER_KERNEL.purpose)
"""The facts about a kernel that are written into the generated code."""
TIME_CONFIGURATIONS = Seam(
    "torch._inductor.runtime.triton_heuristics", "CachingAutotuner.benchmark_all_configs", DEFINE_USER_KERNEL.purpose
)
COMPILE_GRAPH = Seam(_COMPILE_FX, "compile_fx", "names of the model's arguments")
"""Compiles a graph of Dynamo."""
APPLY_FUNCTION = Seam(
    "torch._dynamo.variables.higher_order_ops", "AutogradFunctionApplyVariable.call_function",
    "autograd functions with a tensor that is passed twice",
)  # fmt: skip
"""Traces ``Function.apply``."""
CALL_SKIPPED = Seam(
    "torch._dynamo.variables.functions", "SkipFunctionVariable.call_function", "attention that Dynamo does not trace"
)
"""Breaks the graph at the call of a function under `torch.compiler.disable`, or of others that Dynamo skips."""
INLINE = Seam(
    "torch._dynamo.symbolic_convert", "InliningInstructionTranslator.build_inline_tracer", CALL_SKIPPED.purpose
)
"""Begins to trace a called function, or breaks the graph at methods under `torch.compiler.disable`."""
APPLY = Seam("torch._dynamo.variables.misc", "AutogradFunctionVariable.call_apply", CALL_SKIPPED.purpose)
"""Traces ``Function.apply`` with and without gradients, or breaks the graph at it."""
DECOMPOSITIONS = Seam("torch._inductor.decomposition", "decompositions", "gradients of embeddings")
"""Inductor's decompositions, by operator."""
CACHE_DETAILS = Seam("torch._inductor.codecache", "FxGraphHashDetails.__init__", "the key of FxGraphCache")
"""Makes the object that FxGraphCache hashes, or a subclass of it that AOTAutogradCache hashes."""
MAKE_ENTRY = Seam(f"{_AUTOGRAD}.autograd_cache", "AOTAutogradCache.make_entry", _RECORDS)
LOAD_ENTRY = Seam(f"{_AUTOGRAD}.aot_autograd_result", "GenericAOTAutogradResult.wrap_post_compile", _RECORDS)
FINISH_GRAPH = Seam("torch._inductor.output_code", "CompiledFxGraph.post_compile", _RECORDS)
FINISH_FUNCTION = Seam(f"{_AUTOGRAD}.runtime_wrappers", "RuntimeWrapper.post_compile", "zeros without fill")
"""Adds the outermost wrapper to a compiled graph: an autograd function if it has a backward."""
LOAD_PACKAGE = Seam("torch._dynamo.package", "CompilePackage.initialize", "the precompile cache")
STORE_PACKAGE = Seam("torch._dynamo.package", "CompilePackage.cache_entry", "the precompile cache")
FUSE_MIXED_ORDER = Seam("torch._inductor.scheduler", "MixOrderReduction.can_fuse", "sums that Inductor would lose")
"""Decides whether two reductions, along rows and along columns, are fused into one kernel."""
FUSE_MORE = Seam("torch._inductor.scheduler", "FusedMixOrderReductions.can_fuse_with", FUSE_MIXED_ORDER.purpose)
"""Decides whether a node is fused into a kernel made by `FUSE_MIXED_ORDER`."""
REGISTER_PATTERN = Seam("torch._inductor.pattern_matcher", "register_replacement", "attention that Inductor mistakes")
"""Registers a search pattern of Inductor and its replacement."""
PARTITIONED_TARGET = Seam("torch._functorch.partitioners", "get_aten_target", "what a backward computes again")
"""Returns the operator of a node, by which the partitioner decides."""
PARTITIONED_SIZE = Seam("torch._functorch.partitioners", "_size_of", "what a backward computes again")
"""Returns the size of a node's value in bytes."""

SEAMS = (
    JOINT_PASSES, RUN_JOINT_PASSES, RUN_PRE_GRAD_PASSES, GENERATE, SCAN_SPLITS, GENERATE_KERNEL, READ_BUFFER, ALERT,
    DEFINE_USER_KERNEL, KERNEL_META, TIME_CONFIGURATIONS, COMPILE_GRAPH, APPLY_FUNCTION, CALL_SKIPPED, INLINE, APPLY,
    DECOMPOSITIONS, CACHE_DETAILS, MAKE_ENTRY, LOAD_ENTRY, FINISH_GRAPH, FINISH_FUNCTION, LOAD_PACKAGE, STORE_PACKAGE,
    FUSE_MIXED_ORDER, FUSE_MORE, REGISTER_PATTERN, PARTITIONED_TARGET, PARTITIONED_SIZE,
)  # fmt: skip
