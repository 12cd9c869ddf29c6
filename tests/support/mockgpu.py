"""A machine with one H100, as far as code generation can tell: sm_90 code is emitted, nothing can be launched.

`install_driver` gives Triton a driver for sm_90; it has to come before the first import of ``torch._inductor``.
`install_torch` answers the questions that Inductor asks ``torch.cuda``.  Both change the whole process: give them their
own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

CAPABILITY = (9, 0)


@dataclass(frozen=True)
class H100Properties:
    """The ``torch.cuda.get_device_properties`` of an H100 SXM that code generation reads; sizes in bytes."""

    name: str = "NVIDIA H100 80GB HBM3"
    major: int = CAPABILITY[0]
    minor: int = CAPABILITY[1]
    multi_processor_count: int = 132
    total_memory: int = 80 << 30
    L2_cache_size: int = 50 << 20
    warp_size: int = 32
    max_threads_per_block: int = 1024
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 1 << 16
    shared_memory_per_block: int = 48 << 10
    shared_memory_per_block_optin: int = 227 << 10
    shared_memory_per_multiprocessor: int = 228 << 10
    gcnArchName: str = ""


PROPERTIES = H100Properties()


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    raise RuntimeError("the GPU of tests.support.mockgpu is not real: nothing can be loaded, launched or timed on it")


class _Utils:
    load_binary = staticmethod(_refuse)

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {
            "max_shared_mem": PROPERTIES.shared_memory_per_block_optin,
            "multiprocessor_count": PROPERTIES.multi_processor_count,
            "warpSize": PROPERTIES.warp_size,
        }


class MockDriver(DriverBase):  # type: ignore[misc]  # triton is untyped
    """The part of a driver that Triton needs while it compiles."""

    utils = _Utils
    get_benchmarker = get_device_interface = get_empty_cache_for_benchmark = _refuse

    def __init__(self) -> None:  # the base class would ask for benchmarking functions
        pass

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], PROPERTIES.warp_size)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return CAPABILITY

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def clear_cache(self, cache: object) -> None:
        pass


def install_driver() -> None:
    """Make Triton compile for the H100 from here on."""
    driver.set_active(MockDriver())


def install_torch() -> None:
    """Make ``torch.cuda``, Dynamo's device interface and fake tensors see the H100 from here on."""
    import torch
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses import fake_tensor

    def always(value: object) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    seen_by_all: dict[str, Callable[..., Any]] = {
        "is_available": always(True),
        "device_count": always(1),
        "current_device": always(0),
        "get_device_properties": always(PROPERTIES),
        "is_bf16_supported": always(True),
        "synchronize": always(None),
        "set_device": always(None),
    }
    seen_in_torch_cuda: dict[str, Callable[..., Any]] = {
        "is_initialized": always(False),
        "is_current_stream_capturing": always(False),
        "is_tf32_supported": always(True),
        "get_device_capability": always(CAPABILITY),
        "get_device_name": always(PROPERTIES.name),
        "get_rng_state": lambda *args, **kwargs: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": always(None),
        "init": always(None),
        "_lazy_init": always(None),
        "_exchange_device": always(0),
        "_maybe_exchange_device": always(0),
    }
    for name, function in (seen_by_all | seen_in_torch_cuda).items():
        setattr(torch.cuda, name, function)
    for name, function in (seen_by_all | {"get_compute_capability": always(90)}).items():
        setattr(CudaInterface, name, staticmethod(function))
    for name in ("get_device_properties", "current_device"):
        setattr(CudaInterface.Worker, name, staticmethod(seen_by_all[name]))
    fake_tensor.init_gpu_context = always(None)
    fake_tensor.FakeTensorMode.avoid_device_init = property(always(True))  # type: ignore[assignment,method-assign]  # a patch


def fold_constants_on_cpu() -> None:
    """Let Inductor's folding of constants, which computes on the device, compute on the CPU from here on.

    Without it generated code is not that of a real GPU: other values are kept in memory, and reused.
    """
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch.utils._python_dispatch import TorchDispatchMode

    class OnCpu(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = dict(kwargs or {})
            return func(*args, **(given | {"device": "cpu"} if "device" in given else given))

    deduce = UniformValueConstantFolder._deduce_value

    def deduced(self: Any, node: Any) -> Any:
        with OnCpu():
            return deduce(self, node)

    UniformValueConstantFolder._deduce_value = deduced
