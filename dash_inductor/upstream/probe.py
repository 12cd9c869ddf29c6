"""The probe: checks whether the installed torch and triton have everything that the package relies on.

Plans must be deterministic, so everything that kernels need is checked at installation, on any device: an unknown
version is either as good as a tested one, or dash_inductor stays inactive and says what is missing.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator, Sequence

import torch

from . import compat
from .seams import APPLY_FUNCTION, CALL_SKIPPED, SEAMS

_GLUON = "triton.experimental.gluon"
_HOPPER = f"{_GLUON}.language.nvidia.hopper"
_PORTABLE, _SM_90 = "the portable kernels", "the Hopper kernel"

# Module, names in it, and what we need them for.  A dotted name is an attribute of an object in the module; of names
# separated by | one is enough.  tests/upstream/test_compat.py holds the tables against the sources.
TORCH = (
    *(seam.probed for seam in SEAMS),
    ("torch._C._nn", "scaled_dot_product_attention", "calls that only their layout keeps from fusion"),
    ("torch._inductor.config", "pattern_matcher use_joint_graph_passes", "whether joint-graph passes run"),
    ("torch._inductor.decomposition", "select_decomp_table", "gradients of embeddings"),
    ("torch._decomp.decompositions", "_grid_sampler_2d", "the backward of grid_sample"),
    ("torch._dispatch.python", "enable_python_dispatcher", "gradients of embeddings"),
    ("torch._inductor.codecache", "PyCodeCache.load", "generated index functions"),
    ("torch._functorch._aot_autograd.autograd_cache", "AOTAutogradCacheDetails", "the key of AOTAutogradCache"),
    ("torch._dynamo.package", "SystemInfo.check_compatibility", "the precompile cache"),
    ("torch._inductor.lowering", "register_lowering fallback_handler fallbacks empty_strided lowerings", "lowerings"),
    ("torch._inductor.config", "deterministic force_shape_pad", "kernels that are not chosen by timing"),
    (
        "torch._inductor.config",
        "coordinate_descent_tuning max_autotune max_autotune_gemm max_autotune_pointwise",
        "kernels that are not chosen by timing",
    ),
    ("torch._inductor.codegen.triton", "FixedTritonConfig", "blocks by a rule"),
    (
        "torch._higher_order_ops.triton_kernel_wrap",
        "kernel_side_table.get_kernel triton_kernel_wrapper_functional triton_kernel_wrapper_mutation",
        "kernels of the program that are not chosen by timing",
    ),
    (
        "torch._C",
        "_get_deterministic_fill_uninitialized_memory _set_deterministic_fill_uninitialized_memory",
        "the fill of memory in compiled graphs",
    ),
    ("torch.autograd.graph", "Node._input_metadata", "zeros without fill"),
    ("torch._C", "_construct_storage_from_data_pointer", "zeros without memory"),
    ("torch._inductor.select_algorithm", "TritonTemplate SymbolicGridFn autotune_select_algorithm", "templates"),
    ("torch._inductor.codegen.common", "WorkspaceArg.unique_name WorkspaceZeroMode.ZERO_ON_CALL", "semaphores"),
    ("torch._inductor.config", "benchmark_fusion", "semaphores"),
    (
        "torch._inductor.ir",
        "BaseView.unwrap_view ExternKernel.require_exact_strides FixedLayout IRNode Pointwise.create",
        "lowerings",
    ),
    ("torch._inductor.ir", "ExternKernel.realize_input", "lowerings"),
    ("torch._inductor.ir", "ExternKernel.get_kernel_name FallbackKernel.create TensorBox.create", "lowerings"),
    ("torch._inductor.inductor_prims", "seed", "seeds of dropout"),
    ("torch._inductor.config", "fallback_random", "seeds of dropout"),
    ("torch._inductor.fx_passes.replace_random", "fuse_seed_creation_pass", "seeds of dropout"),
    ("torch._inductor.ir", "FlexibleLayout", "sums that Inductor would lose"),
    ("torch._inductor.scheduler", "MixOrderReduction.is_contiguous_node", "sums that Inductor would lose"),
    ("torch._inductor.pattern_matcher", "PatternExpr", "attention that Inductor mistakes"),
    ("torch._inductor.pattern_matcher", "stable_topological_sort", "attention that Inductor replaces"),
    ("torch._inductor.virtualized", "V ops", "lowerings"),
    ("torch._inductor.ops_handler", "OpsHandler.and_ OpsHandler.constant OpsHandler.eq OpsHandler.ge", "lowerings"),
    ("torch._inductor.ops_handler", "OpsHandler.add", "sums of few rows"),
    ("torch._inductor.ops_handler", "OpsHandler.indirect_indexing OpsHandler.mul OpsHandler.ne", "sums of bands"),
    ("torch._inductor.ops_handler", "OpsHandler.where", "sums of bands"),
    ("torch._inductor.ops_handler", "OpsHandler.index_expr OpsHandler.le OpsHandler.to_dtype", "lowerings"),
    ("torch._inductor.sizevars", "SizeVarAllocator.guard_int", "lowerings"),
    ("torch._inductor.sizevars", "SizeVarAllocator.statically_known_multiple_of", "lowerings"),
    ("torch._inductor.sizevars", "SizeVarAllocator.statically_known_equals", "lowerings"),
    ("torch._ops", "OpOverload OpOverloadPacket HigherOrderOperator", "reading graphs"),
    ("torch._guards", "detect_fake_mode", "new nodes of a graph"),
    ("torch._guards", "CompileContext.current_trace_id TracingContext.try_get", "records"),
    (
        "torch._dynamo.variables",
        "TensorVariable TensorVariable.call_method TensorVariable.as_proxy TensorVariable.realize",
        APPLY_FUNCTION.purpose,
    ),
    ("torch._dynamo.variables", "UserFunctionVariable UserFunctionVariable.get_function", CALL_SKIPPED.purpose),
    ("torch._dynamo.exc", "Unsupported", CALL_SKIPPED.purpose),
    ("torch._dynamo.exc", "ShortenTraceback.remove_dynamo_frames", "errors of sites that are not replaced"),
    ("torch._dynamo.config", "verbose", "errors of sites that are not replaced"),
    ("torch._dynamo.config", "recompile_limit accumulated_recompile_limit", "explanations"),
    ("torch._dynamo.pgo", "get_code_state", "explanations"),
    ("torch._prims_common", "elementwise_dtypes ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT", "reading masks"),
    ("torch._functorch.config", "activation_memory_budget", "seeds of dropout"),
    ("torch._functorch.partitioners", "OpTypes.is_compute_intensive", "what a backward computes again"),
    ("torch._subclasses.fake_tensor", "is_fake", "counting FLOPs"),
    ("torch._subclasses.fake_tensor", "unset_fake_temporarily", "indices that depend on no input"),
    ("torch.utils.flop_counter", "register_flop_formula sdpa_flop_count sdpa_backward_flop_count", "counting FLOPs"),
    ("torch.nn.attention.varlen", "varlen_attn", "packed operators, which it defines"),
    ("torch.utils.checkpoint", "CheckpointPolicy.MUST_SAVE", "seeds of dropout"),
    ("torch.utils._python_dispatch", "_disable_current_modes", "reading masks"),
    ("torch.utils._python_dispatch", "TorchDispatchMode", "operators that observers see"),
    ("torch.utils._pytree", "tree_leaves tree_map_only", "new nodes of a graph"),
    ("torch.utils._pytree", "tree_flatten tree_unflatten", "arguments of modules"),
    ("torch._C", "_current_graph_task_id _current_autograd_node", "steps that are run again"),
    ("torch.autograd.grad_mode", "_unsafe_preserve_version_counter", "steps that are run again"),
    ("torch.autograd", "Variable._execution_engine.queue_callback", "gradients at rest"),
    ("torch", "ops.aten._grouped_mm.default", "products of groups"),
    ("torch", "ops.aten._safe_softmax", "attention of programs that are not compiled"),
    ("torch.utils._sympy.functions", "CeilDiv FloorDiv PythonMod", "symbolic sizes"),
    ("torch._dynamo.utils", "counters", "records"),
    ("torch.autograd.profiler", "_is_profiler_enabled", "names of sites in profiles"),
    ("torch._C", "_len_torch_dispatch_stack", "calls of operators in compiled code"),
    ("torch._C._profiler", "_RecordFunctionFast", "names of sites in profiles"),
    ("torch._logging._internal", "trace_log.handlers trace_structured", "records"),
    ("torch", "_TorchCompileInductorWrapper", "torch.compile(backend='dash')"),
    ("torch._compile", "_disable_dynamo", "observers of training"),
    ("torch._C._distributed_c10d", "_dump_fr_trace_json|_dump_nccl_trace_json", "who waits in which collective"),
    ("torch.distributed.distributed_c10d", "_world.pg_map _world.pg_names", "who waits in which collective"),
    ("torch._C", "_functorch.is_functorch_wrapped_tensor", "observers of training"),
    ("torch", "Tensor._use_count", "observers of training"),
    ("torch", "Tensor._make_wrapper_subclass", "masks of programs that are not compiled"),
    ("torch._C", "DisableTorchFunctionSubclass", "masks of programs that are not compiled"),
    ("torch._C", "_set_deterministic_algorithms", "attention of programs that are not compiled"),
)

TRITON = (
    ("triton", "jit compile", _PORTABLE),
    ("triton.compiler", "ASTSource CompiledKernel.run CompiledKernel.launch_metadata", _SM_90),
    ("triton.backends.compiler", "GPUTarget", _SM_90),
    ("triton.knobs", "runtime.launch_enter_hook runtime.launch_exit_hook nvidia.ptxas", _SM_90),
    ("triton.compiler.compiler", "get_cache_invalidating_env_vars", _SM_90),
    ("triton.backends.nvidia.driver", "TMA_DTYPE_DEVICE_TO_HOST", _SM_90),
    ("triton.backends.nvidia.compiler", "get_ptxas CUDABackend.make_ptx", _SM_90),
    ("triton.language", "arange assume atomic_add cdiv constexpr dot float32 full inline_asm_elementwise", _PORTABLE),
    ("triton.language", "int32 int64 load math.exp2 math.fma math.log2 max maximum minimum num_programs", _PORTABLE),
    ("triton.language", "permute pointer_type program_id range reshape static_range store sum trans where", _PORTABLE),
    ("triton.language", "join philox uint32 zeros", _PORTABLE),
    ("triton.language", "cumsum debug_barrier int8 min", _PORTABLE),
    ("triton.language", "abs associative_scan broadcast_to cast device_assert", "sums by index"),
    ("triton.language", "int1 zeros_like", "tables of masks"),
    ("triton.language.extra.cuda", "gdc_launch_dependents gdc_wait", _SM_90),
    ("triton.language.core", "_aggregate base_value", _SM_90),
    ("triton.runtime.jit", "ConstexprFunction", _SM_90),
    (_GLUON, "jit constexpr_function", _SM_90),
    (f"{_GLUON}._runtime", "GluonASTSource", _SM_90),
    (f"{_GLUON}.language._core", "builtin", _SM_90),
    (f"{_GLUON}.language", "DotOperandLayout NVMMADistributedLayout SliceLayout", _SM_90),
    (
        f"{_GLUON}.language",
        "NVMMASharedLayout.get_default_for allocate_shared_memory arange atomic_add bfloat16",
        _SM_90,
    ),
    (f"{_GLUON}.language", "constexpr convert_layout exp2 expand_dims float16 float32 inline_asm_elementwise", _SM_90),
    (f"{_GLUON}.language", "int1 int32 int64 join load maximum num_warps static_assert static_range store", _SM_90),
    (f"{_GLUON}.language", "shared_memory_descriptor.index shared_memory_descriptor.load tensor", _SM_90),
    (
        f"{_GLUON}.language",
        "shared_memory_descriptor.permute shared_memory_descriptor.slice shared_memory_descriptor.store",
        _SM_90,
    ),
    (f"{_GLUON}.language", "to_tensor tuple warp_specialize where zeros zeros_like", _SM_90),
    (f"{_GLUON}.language", "BlockedLayout SwizzledSharedLayout fma full max minimum", _SM_90),
    (f"{_GLUON}.language", "DistributedLinearLayout uint16 uint32 uint64", _SM_90),
    (f"{_GLUON}.language", "num_programs program_id sum", _SM_90),
    (_HOPPER, "fence_async_shared mbarrier tma warpgroup_mma warpgroup_mma_wait", _SM_90),
    (_HOPPER, "async_copy.mbarrier_arrive", _SM_90),
    (f"{_HOPPER}.mbarrier", "MBarrierLayout arrive expect init wait", _SM_90),
    (f"{_HOPPER}.tma", "store_wait", _SM_90),
    *((*renamed, _SM_90) for renamed in (compat.BARRIER, compat.COPY, compat.REINTERPRET)),
    *((*renamed, _SM_90) for renamed in (compat.TMA_LOAD, compat.TMA_STORE)),
    ("triton._C.libtriton", "ir.value.set_attr gluon_ir.GluonOpBuilder.get_unit_attr", _SM_90),
    # adds a tile in shared memory to global memory; only newer versions of Gluon have a public name for it
    ("triton._C.libtriton", "ir.DESCRIPTOR_REDUCE_KIND.ADD gluon_ir.GluonOpBuilder.create_async_tma_reduce", _SM_90),
    (f"{_GLUON}.language._semantic", "GluonSemantic._convert_to_ir_values", _SM_90),
)

# only in CUDA builds of torch
CUDA = (
    ("torch._C", "_cuda_getCurrentRawStream _cuda_getDevice", "launching the Hopper kernel"),
    ("torch._C", "_dynamo.guards._empty_strided_cuda", "launching the Hopper kernel"),
)

# (operator, the arguments that are bound by name in addition to those that all of them have)
_COMMON = "query key value is_causal scale"
_SDPA = "aten::_scaled_dot_product_"
_OPERATORS = (
    (f"{_SDPA}flash_attention_backward", "grad_out out logsumexp dropout_p philox_seed philox_offset"),
    (f"{_SDPA}efficient_attention_backward", "grad_out_ out logsumexp attn_bias dropout_p philox_seed philox_offset"),
    (f"{_SDPA}cudnn_attention_backward", "grad_out out logsumexp attn_bias dropout_p philox_seed philox_offset"),
    (f"{_SDPA}flash_attention_for_cpu_backward", "grad_out out logsumexp attn_mask dropout_p"),
    ("torch_attn::_varlen_attn", "cu_seq_q cu_seq_k window_size"),
    ("torch_attn::_varlen_attn_backward", "grad_out out lse cu_seq_q cu_seq_k window_size"),
    ("aten::_flash_attention_forward", "cum_seq_q cum_seq_k dropout_p window_size_left window_size_right"),
    (
        "aten::_flash_attention_backward",
        "grad_out out logsumexp cum_seq_q cum_seq_k dropout_p window_size_left window_size_right",
    ),
)


def probe() -> list[str]:
    """What the package relies on and the installed torch or triton lacks, in words; empty if nothing is missing."""
    torch_names = TORCH if torch.version.cuda is None else (*TORCH, *CUDA)
    return [*_missing(torch_names), *_probe_shapes(), *_probe_operators(), *_probe_triton()]


def _missing(needed: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """Yields, for rows (module, names, purpose), the modules that cannot be imported and the names that they lack."""
    for module, names, purpose in needed:
        try:
            importlib.import_module(module)
        except ImportError as error:
            yield f"{module} ({purpose}): {error}"
            continue
        for spellings in names.split():
            try:
                compat.resolve(module, spellings)
            except AttributeError:
                yield f"{module}.{spellings} ({purpose})"


def _probe_shapes() -> Iterator[str]:
    """Yields what exists, but does not have the expected form."""
    from torch._dynamo import package
    from torch._functorch import partitioners
    from torch._functorch._aot_autograd import autograd_cache
    from torch._inductor import codecache
    from torch._inductor.fx_passes import joint_graph

    passes = getattr(joint_graph, "pass_patterns", [])
    if not (isinstance(passes, list) and all(callable(getattr(p, "apply", None)) for p in passes)):
        yield "joint_graph.pass_patterns as a list of objects with apply(graph)"
    system = getattr(package, "SystemInfo", None)
    if system is not None and not dataclasses.is_dataclass(system):
        yield "SystemInfo as a dataclass"
    for name in ("get_aten_target", "_size_of"):
        function = getattr(partitioners, name, None)
        if function is not None and list(inspect.signature(function).parameters) != ["node"]:
            yield f"partitioners.{name}(node)"
    asks = getattr(getattr(partitioners, "OpTypes", None), "is_compute_intensive", None)
    if asks is not None and "get_aten_target" not in asks.__code__.co_names:  # it is wrapped
        yield "partitioners.OpTypes.is_compute_intensive that calls get_aten_target"
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
        namespace, _, short = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), short, None)
        if packet is None:
            yield name
            continue
        found = {argument.name for argument in packet.default._schema.arguments}
        missing = [argument for argument in f"{_COMMON} {own}".split() if argument not in found]
        if missing:
            yield f"{name}({', '.join(missing)})"


def _probe_triton() -> Iterator[str]:
    version = compat.triton_version()
    if version is None:
        yield "triton, which is not installed"
    elif tuple(int(part) for part in version.split(".")[:2]) < (3, 6):
        yield f"triton >= 3.6, found {version}"
    else:
        yield from _missing(TRITON)
