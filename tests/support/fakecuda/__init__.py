"""Autograd and F.scaled_dot_product_attention on fake CUDA tensors, without a GPU: graphs come out as on an H100.

`install` builds a small C++ library (20 seconds the first time, kept in the user's cache folder) and changes the whole
process; `choose` sets which backend attention takes.  Works with the CPU build of PyTorch and with a CUDA build that
finds no GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from enum import IntEnum
from pathlib import Path

import torch
from torch.utils import cpp_extension

_SOURCE = Path(__file__).with_name("fakecuda.cpp")


class Backend(IntEnum):
    """``at::SDPBackend``."""

    MATH = 0
    FLASH = 1
    EFFICIENT = 2
    CUDNN = 3


def compiler() -> str | None:
    """The C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "c++"))


def install() -> None:
    """Make this process trace CUDA tensors that do not exist.  Needs `compiler`."""
    ctypes.CDLL(str(_built())).fakecuda_install()


def choose(backend: Backend) -> None:
    """The backend of attention from here on; FLASH (the default) leaves calls with a mask, or with
    another head dimension of value, to EFFICIENT.
    """
    ctypes.CDLL(str(_built())).fakecuda_choose(int(backend))


def _built() -> Path:
    """The compiled library, for this PyTorch and this source."""
    command = [compiler() or "c++", "-shared", "-fPIC", "-O1", "-std=c++20"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = Path(torch.__file__).parent / "lib"
    link = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"]
    key = hashlib.sha256("\0".join([torch.__version__, *command, *link, _SOURCE.read_text()]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dash_inductor"
    library = cache / f"fakecuda-{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, str(_SOURCE), "-o", str(unfinished), *link], check=True)
        unfinished.replace(library)  # at once, whoever else builds it
    return library
