"""Checks of this process's settings that break determinism, change bits, or stop dash_inductor.

A program's own settings are visible only inside it: `program` runs these checks whenever a graph is compiled.
"""

from __future__ import annotations

import difflib
import functools
import operator
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..upstream import compat, toolchain
from ..upstream.arch import allow_tf32
from ..upstream.attention import scaled_dot_product_attention
from ..upstream.cuda import has_tunable_op
from . import machine
from .findings import Check, Seen, Severity
from .looking import original

OK, NOTE, WARNING, ERROR = Severity


@dataclass(frozen=True)
class Timed:
    """A setting of `torch._inductor.config` under which Inductor chooses something by timing.

    Args:
        name: its name in the config.
        what: what is chosen.
        stopped: whether `torch._inductor.config.deterministic` disables it.
    """

    name: str
    what: str
    stopped: bool


TIMED = (
    Timed("max_autotune", "kernels of matmuls and convolutions, and block shapes of pointwise kernels", False),
    Timed("max_autotune_gemm", "kernels of matmuls", True),
    Timed("max_autotune_pointwise", "block shapes of pointwise kernels", False),
    Timed("coordinate_descent_tuning", "block shapes", False),
    Timed("combo_kernels", "block shapes of kernels that are put together", False),
    Timed("benchmark_combo_kernel", "which kernels are put together", True),
    Timed("benchmark_fusion", "which kernels are fused", True),
    Timed("triton.multi_kernel", "which of several kernels of a reduction runs", True),
)


def own_variables() -> Iterator[Seen]:
    """Reports unknown environment variables that begin with DASH_INDUCTOR, and settings with non-default values."""
    from ..config import SETTINGS, config  # raises if a variable has an invalid value

    known = _own_names()
    for name in sorted(os.environ):
        if name.startswith("DASH_INDUCTOR") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"Did you mean {near[0]}?" if near else f"There are {', '.join(sorted(known))}."
            yield WARNING, f"{name} is set, and nothing reads it", advice
    for name, setting in SETTINGS.items():
        value = getattr(config, name)
        if value != setting.default:
            yield NOTE, f"config.{name} is {value!r}", f"The default is {setting.default!r}."


@functools.cache
def _own_names() -> frozenset[str]:
    """All environment variables of the package, found in its sources."""
    from ..install import cache_key

    found: set[str] = set()
    for path in cache_key._sources().values():
        if path.suffix == ".py":
            found.update(re.findall(r"\bDASH_INDUCTOR(?:_[A-Z]+)*\b", path.read_text(encoding="utf-8")))
    return frozenset(found)


def joint_passes() -> Iterator[Seen]:
    """Checks whether Inductor runs its joint-graph passes; with ``mode="lite"`` it does not."""
    off = compat.settings_that_stop_passes()
    if off:
        names = " and ".join(f"torch._inductor.config.{name}" for name in off)
        yield ERROR, f"{names} is off, so that no attention is replaced", 'Switch it on; do not use mode="lite".'


def compiling() -> Iterator[Seen]:
    """Warns if torch.compile is disabled, or if `suppress_errors` makes it fall back to eager mode without an error."""
    from ..upstream.configs import dynamo

    if dynamo.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        what = "torch.compile is switched off, so that attention runs in eager mode"
        yield WARNING, what, "Unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE."
    if dynamo.suppress_errors:
        what = "torch._dynamo.config.suppress_errors is on: what does not compile runs in eager mode, without an error"
        yield WARNING, what, "Switch it off, or unset TORCHDYNAMO_SUPPRESS_ERRORS."


def _inductor_is_deterministic() -> bool:
    """Whether Inductor's own deterministic mode is on or will be: PyTorch's flag switches it on.

    A program can switch it off again; this is visible only while the flag is on, as when the doctor runs a script.
    """
    from ..upstream.configs import inductor

    return inductor.deterministic or not torch.are_deterministic_algorithms_enabled()


def autotuning() -> Iterator[Seen]:
    """Reports settings that let Inductor choose by timing, so that two compiles may differ."""
    from ..upstream.configs import inductor

    for timed in TIMED:
        if not operator.attrgetter(timed.name)(inductor) or (timed.stopped and _inductor_is_deterministic()):
            continue
        variable = f"TORCHINDUCTOR_{timed.name.split('.')[-1].upper()}"
        cause = f" ({variable}={os.environ[variable]})" if os.environ.get(variable) else ""
        advice = "Leave it off"
        if timed.stopped:
            advice += ", or leave torch._inductor.config.deterministic on, as deterministic algorithms set it"
        what = f"torch._inductor.config.{timed.name} is on{cause}: it chooses {timed.what} by timing"
        yield WARNING, what, f"{advice}. Or compile once, and let all processes use that cache."


def padding() -> Iterator[Seen]:
    """Checks whether `shape_padding` is on: Inductor then times whether padding unaligned matmuls is faster."""
    from ..upstream.configs import inductor

    if machine.gpus() and inductor.shape_padding and not _inductor_is_deterministic():
        what = (
            "torch._inductor.config.shape_padding is on: where a size of a matmul is not aligned (a multiple of 8 in "
            "16 bits), Inductor times whether padding is faster, and another choice has other bits"
        )
        advice = "Leave torch._inductor.config.deterministic on, as deterministic algorithms set it."
        yield NOTE, what, advice


def tunable_op() -> Iterator[Seen]:
    """Checks whether PyTorch's TunableOp is on, which chooses matmul kernels by timing at run time."""
    on = os.environ.get("PYTORCH_TUNABLEOP_ENABLED") == "1"
    if on or (has_tunable_op() and torch.cuda.tunable.is_enabled()):
        what = "TunableOp is on: it chooses matmul kernels by timing while the program runs"
        yield WARNING, what, "Unset PYTORCH_TUNABLEOP_ENABLED; torch.cuda.tunable.enable(False)."


def cudnn_benchmark() -> Iterator[Seen]:
    """Checks whether cuDNN chooses convolution kernels by timing (`torch.backends.cudnn.benchmark`)."""
    if torch.backends.cudnn.benchmark:
        what = "torch.backends.cudnn.benchmark is on: cuDNN chooses convolutions by timing"
        yield WARNING, what, "torch.backends.cudnn.benchmark = False"


def cublas() -> Iterator[Seen]:
    """Checks whether matmuls run under deterministic algorithms, and the value of CUBLAS_WORKSPACE_CONFIG."""
    name = "CUBLAS_WORKSPACE_CONFIG"
    value = os.environ.get(name, "")
    advice = f"export {name}=:4096:8 before the program starts, for all processes alike."
    if value and value not in (":4096:8", ":16:8"):
        yield WARNING, f"{name}={value} is not one for which cuBLAS is deterministic", advice
    if not machine.gpus():
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        square = torch.ones(16, 16, device="cuda")
        torch.mm(square, square)
    except RuntimeError as error:
        yield ERROR, f"no matmul runs under deterministic algorithms: {str(error).splitlines()[0]}", advice
        return
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    if not value:
        what = f"{name} is not set. This PyTorch gives cuBLAS a workspace of its own and does not ask for it"
        yield NOTE, what, f"Older versions of PyTorch, and other callers of cuBLAS, do: {advice}"


def tf32() -> Iterator[Seen]:
    """Reports fp32 matmuls that run in TF32: they are deterministic, but give other bits than in fp32."""
    if allow_tf32(torch.device("cuda")):
        what = "matmuls of float32 round their inputs to TF32: deterministic, with other bits than without"
        yield NOTE, what, 'Set it alike everywhere; torch.set_float32_matmul_precision("highest") switches it off.'
    value = os.environ.get("NVIDIA_TF32_OVERRIDE")
    if value:
        what = f"NVIDIA_TF32_OVERRIDE={value} overrules PyTorch in cuBLAS and cuDNN, and no numerics key names it"
        yield WARNING, what, "Unset it, and choose by torch.set_float32_matmul_precision."


def nccl() -> Iterator[Seen]:
    """Checks the settings on which NCCL's order of additions depends."""
    if os.environ.get("NCCL_TUNER_PLUGIN", "none") != "none":
        what = f"NCCL_TUNER_PLUGIN={os.environ['NCCL_TUNER_PLUGIN']}: a plugin chooses NCCL's algorithms"
        yield WARNING, what, "Unset it, or make sure that it chooses alike in every run; set NCCL_ALGO=Ring."
    algorithms = os.environ.get("NCCL_ALGO", "")
    if algorithms and os.environ.get("NCCL_NVLS_ENABLE") != "0" and allows_nvls(algorithms):
        what = f"NCCL_ALGO={algorithms} allows NVLS: the switch adds, in an order that may change from call to call"
        yield WARNING, what, "Set NCCL_ALGO=Ring, or exclude NVLS: NCCL_ALGO=^NVLS,NVLSTree."
    elif not algorithms and max(len(machine.gpus()), int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        what = "NCCL_ALGO is not set: the order in which NCCL adds depends on its version, sizes, ranks and topology"
        advice = (
            "Call use_deterministic_algorithms before the process group is made: PyTorch excludes NVLS then. "
            "NCCL_ALGO=Ring and NCCL_PROTO=Simple, and equal machines, keep the order in other runs."
        )
        yield NOTE, what, advice


def allows_nvls(algorithms: str) -> bool:
    """Whether a value of NCCL_ALGO allows the algorithms NVLS or NVLSTree; a list after ``^`` excludes algorithms."""
    named = "nvls" in algorithms.lower()
    return not named if algorithms.startswith("^") else named


def kernel_compiler() -> Iterator[Seen]:
    """Reports settings of Triton and the assembler that change what kernels compute, or how they run."""
    if compat.interpreting():
        yield WARNING, "TRITON_INTERPRET=1: kernels run in Triton's interpreter, on the CPU", "Unset it."
    used = toolchain.settings()
    if used:
        what = f"settings of the compiler change the kernels, and their numerics keys name them: {used}"
        yield WARNING, what, "Unset them, or set them alike wherever bits are compared."


def attention_function() -> Iterator[Seen]:
    """Checks whether `scaled_dot_product_attention` is PyTorch's own, and which of its implementations are enabled."""
    found = original(torch.nn.functional.scaled_dot_product_attention)
    if found is not scaled_dot_product_attention:
        where = f"{getattr(found, '__module__', '?')}.{getattr(found, '__qualname__', '?')}"
        what = f"torch.nn.functional.scaled_dot_product_attention has been replaced by {where}"
        yield WARNING, what, "Remove the patch: dash_inductor replaces PyTorch's own function only."
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    if current is not None:
        what = f"PyTorch's flash attention is {current}, which runs wherever dash_inductor does not replace a forward"
        yield NOTE, what, "torch.nn.attention.restore_flash_attention_impl() brings PyTorch's own back."
    on = torch.backends.cuda
    if not (on.flash_sdp_enabled() or on.mem_efficient_sdp_enabled() or on.cudnn_sdp_enabled()):
        what = "all fused kernels of attention are off; what PyTorch computes as matmuls and softmax is not replaced"
        yield WARNING, what, "torch.backends.cuda.enable_flash_sdp(True), or leave sdpa_kernel(SDPBackend.MATH) out."


def disabled_caches() -> Iterator[Seen]:
    """Reports disabled compile caches, without which every process compiles anew."""
    from ..upstream.configs import inductor

    if inductor.force_disable_caches:
        what = "Inductor's caches are off: every process compiles anew"
        yield NOTE, what, "Unset TORCHINDUCTOR_FORCE_DISABLE_CACHES to start faster."


CHECKS: tuple[Check, ...] = (
    own_variables, joint_passes, compiling, autotuning, padding, tunable_op, cudnn_benchmark, cublas, tf32, nccl,
    kernel_compiler, attention_function, disabled_caches,
)  # fmt: skip
