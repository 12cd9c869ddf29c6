"""Launches by our launcher and by Triton's own on a stub of the CUDA driver, as a program that prints what differs.

python -m tests.kernels.common.launched
"""

from __future__ import annotations

import ctypes
import itertools
import json
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ...support import stubcuda

GRID, STREAM = (33, 2, 5), 77
POINTERS = 1 << 40
"""All addresses among arguments are behind it."""
FOUR = [2, 4, 300, 64], [76800, 64, 256, 1]
DESCRIPTORS = {
    "hopper_backward": [*[FOUR] * 6, ([4096, 32], [32, 1]), ([512], [1]), ([512], [1])],
    "hopper_forward": [FOUR] * 4,
}


class Descriptor:
    """A TMA descriptor as Triton's launcher wants it."""

    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, address: int, shape: list[int], strides: list[int]) -> None:
        self.base, self.shape, self.strides = self, shape, strides
        self.data_ptr = lambda: address


def distinct_arguments(compiled: Any, descriptors: int) -> list[Any]:
    """Arguments of all kinds, negative ones too; None for constants."""
    kinds = list(compiled.src.signature.values())[descriptors:]
    numbers: dict[str, Callable[[int], Any]] = {
        "constexpr": lambda i: None,
        "fp32": lambda i: 0.3 * i,
        "i32": lambda i: -7 * i,
        "i64": lambda i: -5 * i << 33,
    }
    counted = itertools.count()

    def argument(kind: Any) -> Any:
        if isinstance(kind, tuple):
            return tuple(map(argument, kind))
        i = next(counted)
        return numbers[kind](i) if kind in numbers else POINTERS + 16 * i

    return [*map(argument, kinds)]


def changed(arguments: Any, number: float) -> Any:
    """The arguments with another one in the place of this number."""
    if isinstance(arguments, (list, tuple)):
        return type(arguments)(changed(argument, number) for argument in arguments)
    return number + 1 if arguments == number else arguments


def with_addresses(arguments: Any, number: int) -> Any:
    """The arguments with an `Address` of this tensor in the place of each address."""
    from dash_inductor.kernels.common.call_launches import Address

    if isinstance(arguments, (list, tuple)):
        return tuple(with_addresses(argument, number) for argument in arguments)
    is_address = isinstance(arguments, int) and arguments >= POINTERS
    return Address(number, arguments - POINTERS) if is_address else arguments


def main() -> None:
    stub = stubcuda.install()
    import torch

    torch.cuda.current_device = lambda: 0
    from triton import knobs

    from dash_inductor.errors import DashError, LaunchError
    from dash_inductor.kernels.common import launcher
    from dash_inductor.kernels.common.arguments import flat
    from dash_inductor.kernels.common.call_launches import CallLaunch, CallLaunches, unknown_addresses
    from dash_inductor.kernels.hopper.forward import build as forward_build
    from dash_inductor.model import Band

    from ...support.calls import traits_of
    from ...support.hopper_builds import Case, build

    def sizes_of(kernel: Any) -> list[int]:
        codes = launcher._parameter_codes(kernel.compiled.asm["ptx"])
        return [128 if code == "map" else struct.calcsize(code) for code in codes]

    def both(compiled: Any) -> dict[str, Any]:
        descriptors = DESCRIPTORS.get(compiled.metadata.name, [])
        kernel = launcher.KernelLauncher(compiled, GRID, descriptors)
        sizes = sizes_of(kernel)
        stubcuda.expect(stub, sizes)
        addresses = [(1 << 44) + 4096 * i for i, _ in enumerate(descriptors)]
        arguments = distinct_arguments(compiled, len(descriptors))
        kernel.pack(STREAM, [3 * address for address in addresses], *arguments)
        before = stubcuda.number(stub, "stub_encoded")
        launcher.launch(kernel.pack(STREAM, addresses, *arguments))
        encoded = stubcuda.number(stub, "stub_encoded") - before
        ours = stubcuda.last_launch(stub, sizes)
        given = [Descriptor(address, *described) for address, described in zip(addresses, descriptors, strict=True)]
        head = *GRID, STREAM, compiled.function, compiled.packed_metadata, None, None, None
        compiled.run(*head, *given, *arguments)
        theirs = stubcuda.last_launch(stub, sizes)
        calls = CallLaunches(
            [CallLaunch(kernel, tuple(unknown_addresses(len(descriptors))), with_addresses(arguments, len(addresses)))]
        )
        calls.launch(STREAM + 1, [16 * n for n in range(1, len(addresses) + 2)])
        before, moved = stubcuda.number(stub, "stub_encoded"), []
        for held in (False, True, False):  # a block that another thread has is not changed
            block = calls._free.pop() if held else None
            calls.launch(STREAM, [*addresses, POINTERS])
            moved.append(stubcuda.last_launch(stub, sizes) == ours)
            if block is not None:
                calls._free.append(block)
            calls.launch(STREAM + 2, [48 * n for n in range(1, len(addresses) + 2)])
            moved.append(stubcuda.last_launch(stub, sizes) != ours)
        encoded_to_move = stubcuda.number(stub, "stub_encoded") - before
        *_, last = (number for number in flat(arguments) if number is not None)
        others = changed(arguments, last)
        launcher.launch(kernel.pack(STREAM, addresses, *others))
        return {
            "equal": ours == theirs,
            "equal to another": stubcuda.last_launch(stub, sizes) == theirs,
            "parameters": len(sizes),
            "nonzero": sum(map(any, ours[2])),
            "attributes": any(ours[1]),
            "encoded again": encoded,
            "moved": moved,
            "encoded to move": encoded_to_move,
            "blocks": len(calls._free),
        }

    backward = build.kernels(Case((64, 64), Band(0), "spt", segment_ids=True, dropout=True).specialisation(), 0)
    resident = build.kernels(Case((64, 64), Band(), "shift").specialisation(), 0)
    forward = forward_build.kernels(forward_build.Specialisation("bfloat16", 64, 64, traits_of(Band(0)), True), 0)
    kernels = {
        "prepare": backward.prepare, "main": backward.main, "finish": backward.finish, "resident": resident.main,
        "forward": forward.main, "draws": forward.prepare,
    }  # fmt: skip
    stub_mixes = ctypes.c_int.in_dll(stub, "stub_mixes")
    stub_mixes.value = 1
    found: dict[str, Any] = {"mixed": both(forward.main)}
    stub_mixes.value = 0
    found |= {name: both(compiled) for name, compiled in kernels.items()}

    kernel = launcher.KernelLauncher(backward.finish, GRID, [])
    arguments = distinct_arguments(backward.finish, 0)
    launches = kernel.pack(STREAM, (), *arguments)
    stub.stub_fail(201, 1)  # a thread without a context
    launcher.launch(launches)
    found["contexts bound"] = stubcuda.number(stub, "stub_bound")
    encoding = launcher.KernelLauncher(forward.main, GRID, DESCRIPTORS["hopper_forward"])
    stub.stub_fail(201, 1)
    encoding.pack(STREAM, [(1 << 44) + 4096 * i for i in range(4)], *distinct_arguments(forward.main, 4))
    found["contexts bound to encode"] = stubcuda.number(stub, "stub_bound") - found["contexts bound"]
    misaligned = launcher.KernelLauncher(forward.main, GRID, DESCRIPTORS["hopper_forward"])
    for address in (1 << 44, (1 << 44) + 8):
        try:
            misaligned.pack(STREAM, [address] * 4, *distinct_arguments(forward.main, 4))
        except LaunchError as error:
            found["misaligned"] = hex(address), str(error)
    stub.stub_fail(720, 1)
    try:
        launcher.launch(launches)
    except LaunchError as error:
        found["error"] = str(error)
    seen: list[str] = []
    hooks = {"before": knobs.runtime.launch_enter_hook, "after": knobs.runtime.launch_exit_hook}
    before = stubcuda.number(stub, "stub_launches")
    for name, hook in hooks.items():
        hook.add(lambda about, name=name: seen.append(f"{name} {about.get()['name']} {about.get()['stream']}"))
    CallLaunches([CallLaunch(kernel, (), with_addresses(arguments, 0))]).launch(STREAM, [POINTERS])
    found["hooks"], found["launches"] = seen, stubcuda.number(stub, "stub_launches") - before
    found["empty"] = launcher.KernelLauncher(backward.finish, (3, 0), []).pack(STREAM, (), *arguments)
    ptx = backward.finish.asm["ptx"]
    for name, more in (("more parameters", ".u32 odd"), ("another structure", ".align 4 .b8 odd[12]")):
        text = ptx.replace(".param .f32", f".param {more},\n\t.param .f32", 1)
        given = SimpleNamespace(
            metadata=backward.finish.metadata, src=backward.finish.src, asm={"ptx": text}, run=None, function=1
        )
        try:
            launcher.KernelLauncher(given, GRID, [])
        except DashError as error:
            found[name] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
