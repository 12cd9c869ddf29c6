"""The seams: every place in PyTorch at which dash_inductor takes part in a compile.

One table, for three readers: the probe asks for each place before anything is changed, `install` puts functions of ours
there, and the doctor prints it.  PyTorch looks each name up whenever it needs it, so that another object under the same
name is what it calls.
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
"""Makes, of a function of PyTorch, the function that is put in its place and calls it."""


@dataclass(frozen=True)
class Seam:
    """A function of PyTorch around which one of ours is put, or a table of PyTorch's in which we make an entry.

    Attributes:
        module: where PyTorch has it.
        attribute: its name there; dotted for a method of a class.
        purpose: what dash_inductor needs it for.
    """

    module: str
    attribute: str
    purpose: str

    @property
    def probed(self) -> tuple[str, str, str]:
        """The row of the probe: module, name in it, purpose.  A constructor is there where its class is."""
        return self.module, self.attribute.removesuffix(".__init__"), self.purpose

    def value(self) -> Any:
        """The function or table, as PyTorch finds it now."""
        return getattr(*self._place())

    def wrap(self, around: Around, *, let_through: type[Exception] | tuple[()] = ()) -> None:
        """Put `around(function)` in the place of the function, for good.

        An error of ours around PyTorch's function changes nothing: a call gives what PyTorch's function gives (see
        `failures`).

        Args:
            let_through: errors that ours raises on purpose.
        """
        owner, name = self._place()
        guarded = _guarded(getattr(owner, name), around, self.purpose, let_through)
        setattr(owner, name, _like(inspect.getattr_static(owner, name), guarded))

    def wrapped(self, around: Around) -> AbstractContextManager[None]:
        """Put `around(function)` in the place of the function inside a block."""
        owner, name = self._place()
        return replaced(owner, {name: _like(inspect.getattr_static(owner, name), around(getattr(owner, name)))})

    def _place(self) -> tuple[Any, str]:
        path, _, name = self.attribute.rpartition(".")
        owner: Any = importlib.import_module(self.module)
        return operator.attrgetter(path)(owner) if path else owner, name


class _Plain:
    """A function of PyTorch, and what its last call has given."""

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
    """`around(function)`, and after an error of ours the function alone."""

    def run(*args: Any, **kwargs: Any) -> Any:
        plain = _Plain(function)
        try:
            return around(plain)(*args, **kwargs)
        except Exception as error:
            if plain.error is not None and plain.error is not error:
                raise plain.error from error
            if plain.error is error or isinstance(error, let_through):
                raise
            failures.caught(purpose, error)
            return plain.result if plain.has_run else function(*args, **kwargs)

    return run


def _like(plain: Any, ours: Callable[..., Any]) -> Any:
    """Our function with name and docstring of PyTorch's, static where that is, or is bound to its class already."""
    if isinstance(plain, (staticmethod, classmethod)):
        return staticmethod(functools.wraps(plain.__func__)(ours))
    return functools.wraps(plain)(ours)


_COMPILE_FX = "torch._inductor.compile_fx"
_AUTOGRAD = "torch._functorch._aot_autograd"
_RECORDS = "records of cached graphs"

JOINT_PASSES = Seam("torch._inductor.fx_passes.joint_graph", "pass_patterns", "the list of joint-graph passes")
"""Objects with ``apply(graph) -> int``, which Inductor applies to a joint graph one after the other."""
RUN_JOINT_PASSES = Seam(_COMPILE_FX, "_recursive_joint_graph_passes", "whether joint-graph passes run")
RUN_PRE_GRAD_PASSES = Seam(_COMPILE_FX, "_recursive_pre_grad_passes", "calls that only their layout keeps from fusion")
GENERATE = Seam(_COMPILE_FX, "fx_codegen_and_compile", "kernels that are not chosen by timing")
"""Generates the code of one graph, and compiles it."""
SCAN_SPLITS = Seam("torch._inductor.ir", "Scan.num_splits", "sums along few long rows in one order")
"""How many CTAs share a row of a scan; they pass sums on in an order that depends on timing (pytorch 190946)."""
GENERATE_KERNEL = Seam("torch._inductor.codegen.triton", "TritonKernel.codegen_kernel", "blocks of kernels by a rule")
"""Writes the code of one kernel, with the configurations that it is tried in."""
READ_BUFFER = Seam(
    "torch._inductor.codegen.triton", "TritonKernel.load", "kernels that wait for what they have written"
)
"""Writes the line that reads a buffer in the loop of a kernel that is being generated."""
ALERT = Seam("torch._prims_common", "alert_not_deterministic", "operators that raise, made deterministic")
"""Raises PyTorch's error under deterministic algorithms where it computes shapes, by the name that the error has."""
DEFINE_USER_KERNEL = Seam(
    "torch._inductor.codegen.wrapper",
    "PythonWrapperCodegen.define_user_defined_triton_kernel",
    "kernels of the program that are not chosen by timing",
)
KERNEL_META = Seam("torch._inductor.codegen.triton", "TritonKernel.inductor_meta_common", DEFINE_USER_KERNEL.purpose)
"""Facts about a kernel that are written into the generated code."""
TIME_CONFIGURATIONS = Seam(
    "torch._inductor.runtime.triton_heuristics", "CachingAutotuner.benchmark_all_configs", DEFINE_USER_KERNEL.purpose
)
COMPILE_GRAPH = Seam(_COMPILE_FX, "compile_fx", "names of the model's arguments")
"""Compiles a graph of Dynamo."""
DECOMPOSITIONS = Seam("torch._inductor.decomposition", "decompositions", "gradients of embeddings")
"""Inductor's decompositions, by operator."""
CACHE_DETAILS = Seam("torch._inductor.codecache", "FxGraphHashDetails.__init__", "the key of FxGraphCache")
"""Makes the object that FxGraphCache hashes, and of a subclass the one that AOTAutogradCache hashes."""
MAKE_ENTRY = Seam(f"{_AUTOGRAD}.autograd_cache", "AOTAutogradCache.make_entry", _RECORDS)
LOAD_ENTRY = Seam(f"{_AUTOGRAD}.aot_autograd_result", "GenericAOTAutogradResult.wrap_post_compile", _RECORDS)
FINISH_GRAPH = Seam("torch._inductor.output_code", "CompiledFxGraph.post_compile", _RECORDS)
FINISH_FUNCTION = Seam(f"{_AUTOGRAD}.runtime_wrappers", "RuntimeWrapper.post_compile", "zeros without fill")
"""Puts the outermost wrapper around what runs a graph, an autograd function where that has a backward."""
LOAD_PACKAGE = Seam("torch._dynamo.package", "CompilePackage.initialize", "the precompile cache")
STORE_PACKAGE = Seam("torch._dynamo.package", "CompilePackage.cache_entry", "the precompile cache")
FUSE_MIXED_ORDER = Seam("torch._inductor.scheduler", "MixOrderReduction.can_fuse", "sums that Inductor would lose")
"""Whether two reductions of the scheduler become one kernel, along rows and along columns."""
FUSE_MORE = Seam("torch._inductor.scheduler", "FusedMixOrderReductions.can_fuse_with", FUSE_MIXED_ORDER.purpose)
"""Whether a node joins such a kernel."""
REGISTER_PATTERN = Seam("torch._inductor.pattern_matcher", "register_replacement", "attention that Inductor mistakes")
"""Registers what Inductor searches for in graphs, and what it puts there."""
PARTITIONED_TARGET = Seam("torch._functorch.partitioners", "get_aten_target", "what a backward computes again")
"""The operator of a node, by which the partitioner decides."""
PARTITIONED_SIZE = Seam("torch._functorch.partitioners", "_size_of", "what a backward computes again")
"""The bytes of a node's value."""

SEAMS = (
    JOINT_PASSES, RUN_JOINT_PASSES, RUN_PRE_GRAD_PASSES, GENERATE, SCAN_SPLITS, GENERATE_KERNEL, READ_BUFFER,
    ALERT, DEFINE_USER_KERNEL, KERNEL_META, TIME_CONFIGURATIONS, COMPILE_GRAPH, DECOMPOSITIONS, CACHE_DETAILS,
    MAKE_ENTRY, LOAD_ENTRY, FINISH_GRAPH, FINISH_FUNCTION, LOAD_PACKAGE, STORE_PACKAGE, FUSE_MIXED_ORDER,
    FUSE_MORE, REGISTER_PATTERN, PARTITIONED_TARGET, PARTITIONED_SIZE,
)  # fmt: skip
