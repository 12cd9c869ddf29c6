"""Patches ``torch.cuda`` to answer as on a machine with one GPU of a given architecture, as far as tracing needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ...upstream import arch as machine
from ...upstream import configs, devices
from ...upstream.dynamo import CudaInterface
from ...upstream.fake import FakeTensorMode
from ...upstream.patches import replaced
from . import sdpa, stand_in


@dataclass(frozen=True)
class Properties:
    """A stand-in for ``torch.cuda.get_device_properties`` with the fields that follow from the architecture.

    Reading another field raises an error.
    """

    name: str
    major: int
    minor: int
    warp_size: int = 32


@contextmanager
def pretended(arch: str) -> Iterator[FakeTensorMode]:
    """A context manager in which ``torch.cuda`` reports one GPU of the architecture `arch`.

    Yields:
        The mode to which the fake tensors on that GPU belong.

    Raises:
        UnsupportedVersionError: this build of PyTorch cannot record gradients of these tensors.
    """
    devices.trace_patterns()  # traces Inductor's patterns for the real machine first
    devices.let_autograd_know_cuda()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    settings = {"joint_graph_constant_folding": False, "shape_padding": False}  # both compute on the device
    with ExitStack() as stack:
        for owner, values in _answers(arch):
            stack.enter_context(replaced(owner, values))
        stack.enter_context(machine.asked_about(arch))
        stack.enter_context(sdpa.chosen_for(arch))
        stack.enter_context(stand_in.flex_attention_there())
        stack.enter_context(configs.inductor.patch(settings))
        stack.enter_context(_autocast())
        stack.enter_context(mode)
        yield mode


def _answers(arch: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields the modules and classes to patch, with the replaced attributes."""
    number = int(arch.removeprefix("sm_"))
    properties = Properties(f"a GPU of {arch}", number // 10, number % 10)
    capability = (properties.major, properties.minor)
    facts: dict[str, Callable[..., Any]] = {
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: number >= 80,
    }
    if not torch.cuda.is_available():
        state = torch.zeros(16, dtype=torch.uint8)
        facts |= {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "synchronize": lambda device=None: None,
            "is_current_stream_capturing": lambda: False,
        }
        yield torch.cuda, {"get_rng_state": lambda device=None: state, "set_rng_state": lambda new, device=None: None}
        yield FakeTensorMode, {"avoid_device_init": property(lambda mode: True)}
        # In torch 2.11, making a fake GPU tensor makes a real one first if `is_available` is true.
        yield devices.fake_tensor, {"init_gpu_context": lambda device: None}
        yield torch.accelerator, {"is_available": lambda: False}  # Dynamo would ask it for a stream
    yield torch.cuda, facts
    yield CudaInterface, {name: staticmethod(answer) for name, answer in facts.items() if hasattr(CudaInterface, name)}


def _autocast() -> AbstractContextManager[Any]:
    """Switches CUDA autocast on if CPU autocast is on, because the program would have used its device's autocast."""
    on = torch.is_autocast_enabled("cpu")
    return torch.autocast("cuda", torch.get_autocast_dtype("cpu")) if on else nullcontext()
