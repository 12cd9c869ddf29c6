"""A CUDA driver that launches nothing and keeps what it is given, so that Triton's launcher and ours can be compared.

`install` changes the whole process: give it one of its own.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_name("stubcuda.c")


def compiler() -> str | None:
    """The C compiler, or None."""
    return shutil.which(os.environ.get("CC", "cc"))


def install() -> Any:
    """The stub, which is the process's libcuda.so.1 from here on, and Triton's driver on it; before Triton is used."""
    folder = tempfile.mkdtemp(prefix="stubcuda")
    library = Path(folder) / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{library.name}"]
    subprocess.run([compiler() or "cc", *flags, str(_SOURCE), "-o", str(library)], check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    stub = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    class Driver(nvidia.CudaDriver):  # type: ignore[misc]  # triton is untyped
        def __init__(self) -> None:  # the base class asks for a GPU
            self.utils, self.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
            self.get_device_capability = lambda device=0: (9, 0)
            self.get_current_device, self.set_current_device = lambda: 0, lambda device: None

        @staticmethod
        def is_active() -> bool:
            return True

    driver.set_active(Driver())
    return stub


def last_launch(stub: Any, sizes: Sequence[int]) -> tuple[bytes, bytes, list[bytes]]:
    """Configuration, attributes and parameters, which have these sizes, of the last launch."""
    values = bytes((ctypes.c_char * (128 * 256)).in_dll(stub, "stub_values"))
    kept = [values[128 * i : 128 * i + size] for i, size in enumerate(sizes)]
    config = (ctypes.c_char * 52).in_dll(stub, "stub_config")
    attributes = (ctypes.c_char * 288).in_dll(stub, "stub_attributes")
    return bytes(config), bytes(attributes), kept


def expect(stub: Any, sizes: Sequence[int]) -> None:
    """Keep so many bytes of every parameter."""
    stub.stub_expect(len(sizes), (ctypes.c_int * len(sizes))(*sizes))


def number(stub: Any, name: str) -> int:
    """A counter of the stub."""
    return ctypes.c_int.in_dll(stub, name).value
