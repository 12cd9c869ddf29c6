"""How kernels are launched: the driver is given what Triton's own launcher gives it, whatever the version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .support.processes import run_python
from .support.stubcuda import compiler

PROGRAM = """
    import json

    from tests.support import stubcuda

    stub = stubcuda.install()
    import torch
    from triton import knobs

    torch.cuda.current_device = lambda: 0
    from dash_inductor.errors import DashError, LaunchError
    from dash_inductor.kernels import launcher
    from dash_inductor.kernels.hopper import build
    from dash_inductor.kernels.hopper_forward import build as forward_build
    from dash_inductor.model import Band, Call, Mask, Site
    from dash_inductor.planning import plan

    FOUR = [2, 4, 300, 64], [76800, 64, 256, 1]

    class Descriptor:  # as Triton wants it
        padding, round_f32_to_tf32 = "zero", False
        element_strides = pixel_box_lower_corner = pixel_box_upper_corner = None

        def __init__(self, address, shape, strides):
            self.base, self.data_ptr, self.shape, self.strides = self, lambda: address, shape, strides

    def arguments_of(compiled, descriptors):
        # distinct numbers, negative ones where they may be
        kinds, numbers = list(compiled.src.signature.values())[len(descriptors) :], []
        for i, kind in enumerate(kinds):
            of = {"constexpr": None, "fp32": 0.3 * i, "i32": -7 * i, "i64": -(5 << 33) * i}
            numbers.append(of.get(kind, (1 << 40) + 16 * i))
        return numbers

    def compared(compiled, descriptors):
        kernel = launcher.KernelLauncher(compiled, 33, descriptors)
        sizes = [128 if n == "128s" else struct_size(n) for n in codes(kernel)]
        stubcuda.expect(stub, sizes)
        addresses = [(1 << 44) + 4096 * i for i, _ in enumerate(descriptors)]
        arguments = arguments_of(compiled, descriptors)
        launcher.launch(kernel.pack(77, addresses, *arguments))
        ours = stubcuda.last_launch(stub, sizes)
        given = [Descriptor(a, *d) for a, d in zip(addresses, descriptors)]
        head = 33, 1, 1, 77, compiled.function, compiled.packed_metadata, None, None, None
        compiled.run(*head, *given, *arguments)
        return ours == stubcuda.last_launch(stub, sizes), len(sizes), any(ours[1]), [value.hex() for value in ours[2]]

    def codes(kernel):
        return [code.split("x")[1] for code in kernel._layout.values.format[1:].replace("x", " x").split(" ") if "x" in code]

    def struct_size(code):
        import struct
        return struct.calcsize("=" + code)

    results = {}
    chosen = plan(Site(Mask(Band(0)), "bfloat16", 64, group=2), "sm_90")
"""


@pytest.mark.skipif(compiler() is None, reason="the stub of the driver needs a C compiler")
def test_x() -> None:
    pass
