"""State of the process that a test must change back, because the next test would depend on which one ran before it."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """One kind of state.

    Attributes:
        read: its values, by name.
        write: sets one of them.
    """

    read: Callable[[], Mapping[str, Any]]
    write: Callable[[str, Any], object]


NOT_OURS = (
    "PYTEST_CURRENT_TEST", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "TRITON_PTXAS_PATH", "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
)  # fmt: skip
"""Variables that pytest sets for every test, and Inductor and libraries that are loaded set once."""

FOLLOWS_A_FLAG = ("deterministic",)
"""Settings of Inductor that `torch.use_deterministic_algorithms` writes, which every test finds off."""


def _environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _logger(name: str) -> Part:
    logger = logging.getLogger(name)
    return Part(
        lambda: {"level": logger.level, "handlers": list(logger.handlers), "propagate": logger.propagate},
        lambda name, value: setattr(logger, name, value),
    )


def _sys() -> dict[str, Any]:
    """But for what setuptools adds for itself when Inductor imports it."""
    return {"path": [path for path in sys.path if not path.endswith("setuptools/_vendor")], "argv": list(sys.argv)}


PROCESS = {
    "os.environ": Part(lambda: {n: v for n, v in os.environ.items() if n not in NOT_OURS}, _environment),
    "process": Part(lambda: {"working directory": os.getcwd()}, lambda name, value: os.chdir(value)),
    "sys": Part(_sys, lambda name, value: setattr(sys, name, value)),
    **{f"the logger {name}": _logger(name) for name in ("dash_inductor", "dash_guard")},
}


def _default_device(torch: Any) -> Any:
    """The default device, if one was set, be it the CPU: it is a mode through which all calls of torch go."""
    mode = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if mode is None else mode.device


def _leave(name: str, before: list[Any]) -> None:
    """Leave the modes of dispatch of a test that has not left them."""
    dispatch = sys.modules["torch.utils._python_dispatch"]
    while len(dispatch._get_current_dispatch_mode_stack()) > len(before):
        dispatch._pop_mode()


def _torch() -> dict[str, Part]:
    """The state of torch, if it has been imported: tests of dash_inductor.schedule do not import it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    functions: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default device": (lambda: _default_device(torch), torch.set_default_device),
        "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
        "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        "threads": (torch.get_num_threads, torch.set_num_threads),
        "precision of float32 matmuls": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "flash attention": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "memory efficient attention": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        "math attention": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        "cuDNN attention": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    }
    places: dict[str, tuple[Any, str]] = {
        "fill_uninitialized_memory": (torch.utils.deterministic, "fill_uninitialized_memory"),
        "cudnn.benchmark": (cudnn, "benchmark"),
        "cudnn.deterministic": (cudnn, "deterministic"),
    }
    parts = {
        "torch": Part(
            lambda: {name: read() for name, (read, _) in functions.items()},
            lambda name, value: functions[name][1](value),
        ),
        "a setting of torch": Part(
            lambda: {name: getattr(*place) for name, place in places.items()},
            lambda name, value: setattr(*places[name], value),
        ),
    }
    for name in ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config"):
        config: Any = sys.modules.get(name)
        if config is not None:
            parts[name] = Part(
                lambda config=config: {k: v for k, v in config.get_config_copy().items() if k not in FOLLOWS_A_FLAG},  # type: ignore[misc]
                lambda key, value, config=config: setattr(config, key, value),  # type: ignore[misc]
            )
    dispatch = sys.modules["torch.utils._python_dispatch"]
    parts["modes"] = Part(lambda: {"of dispatch": list(dispatch._get_current_dispatch_mode_stack())}, _leave)
    profiler = sys.modules["torch.autograd.profiler"]
    parts["the profiler"] = Part(
        lambda: {"is on": profiler._is_profiler_enabled},
        lambda name, value: setattr(profiler, "_is_profiler_enabled", value),
    )
    return parts


def _ours() -> dict[str, Part]:
    """Whether dash_inductor is on, and whether it has given up."""
    places = {"dash_inductor._switch": "_on", "_dash_inductor_state": "failure"}
    return {
        module: Part(
            lambda module=module, name=name: {name: getattr(sys.modules[module], name)},  # type: ignore[misc]
            lambda name, value, module=module: setattr(sys.modules[module], name, value),  # type: ignore[misc]
        )
        for module, name in places.items()
        if module in sys.modules
    }


def seed() -> None:
    """The same random numbers for every test, whatever ran before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """State that has been changed and not changed back within this context is changed back, and an error."""
    parts = PROCESS | _torch() | _ours()
    before = {kind: dict(part.read()) for kind, part in parts.items()}
    yield
    changed = []
    for kind, part in parts.items():
        after = part.read()
        for name in sorted(before[kind].keys() | after.keys()):
            old, new = before[kind].get(name), after.get(name)
            if old is not new and old != new:
                changed.append(f"{kind}: {name} was {old!r} and is {new!r}")
                part.write(name, old)
    assert not changed, "left behind: " + "; ".join(changed)
