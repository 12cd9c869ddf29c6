"""Checks of the machine: versions, GPU, compilers and caches, and whether dash_inductor is loaded into torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import _dash_inductor_state as state

from .. import _switch
from ..model.architectures import SAME_AS, WORKERS
from ..upstream import compat, probe
from ..upstream.defects import DEFECTS
from ..upstream.seams import SEAMS
from ..version import __version__
from .findings import Check, Seen, Severity
from .libraries import attention_libraries

OK, NOTE, WARNING, ERROR = Severity

LEAST_SPACE = 2 << 30
"""The free space in bytes that caches should have: a large model fills several hundred MiB."""

NOEXEC = getattr(os, "ST_NOEXEC", 8)


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees: its name, and its architecture such as "sm_90"."""

    name: str
    arch: str


def gpus() -> tuple[Gpu, ...]:
    """The CUDA devices that torch sees, by index; empty if CUDA cannot be initialized."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        found.append(Gpu(torch.cuda.get_device_name(index), f"sm_{major}{minor}"))
    return tuple(found)


def driver() -> str | None:
    """The version of the NVIDIA driver; None if there is none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
        if asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.split()[0]
    return None


def package() -> Iterator[Seen]:
    """Reports the version of dash_inductor, and checks that pip's metadata agrees."""
    yield OK, f"dash_inductor {__version__} in {Path(__file__).parents[1]}, Python {sys.version.split()[0]}", ""
    try:
        installed = importlib.metadata.version("dash-inductor")
    except importlib.metadata.PackageNotFoundError:
        return  # reported by `entry_point`
    if installed != __version__:
        what = f"the installed package says that it is version {installed}, its source says {__version__}"
        yield WARNING, what, "Install it again: pip install --force-reinstall --no-deps dash-inductor"


def torch_version() -> Iterator[Seen]:
    """Checks whether this version of torch has been tested."""
    minor = ".".join(torch.__version__.split(".")[:2])
    if minor in compat.TESTED:
        yield OK, f"torch {torch.__version__}", ""
        return
    tested = ", ".join(compat.TESTED)
    yield WARNING, f"torch {torch.__version__} is not tested", f"Tested are {tested}; bits may differ from theirs."


def triton_version() -> Iterator[Seen]:
    """Checks whether triton is installed in the version that torch requires."""
    version = compat.triton_version()
    if version is None:
        yield ERROR, "triton is not installed", "pip install 'triton>=3.6,<3.10'"
        return
    wanted = [re.match(r"triton\s*==\s*([\d.]+)", line) for line in importlib.metadata.requires("torch") or ()]
    asked = {match[1].rstrip(".") for match in wanted if match}
    if asked and version.split("+")[0] not in asked:
        what = f"triton {version} is installed, and this torch asks for {' or '.join(sorted(asked))}"
        yield WARNING, what, f"pip install triton=={min(asked)}"
        return
    yield OK, f"triton {version}", ""


def probes() -> Iterator[Seen]:
    """Checks for features of torch and triton that dash_inductor relies on and the installed versions lack."""
    missing = probe.probe()
    if missing:
        tested = ", ".join(compat.TESTED)
        yield ERROR, f"torch or triton lacks: {'; '.join(missing)}", f"Use a tested version of torch ({tested})."
    else:
        yield OK, "torch and triton have everything that dash_inductor relies on", ""


def entry_point() -> Iterator[Seen]:
    """Checks whether `import torch` loads dash_inductor."""
    found = importlib.metadata.entry_points(group="torch.backends")
    if not any(point.value.startswith("_dash_inductor_autoload") for point in found):
        what = "the entry point of dash_inductor is not registered, so `import torch` does not load it"
        yield ERROR, what, "Install the package with pip; a bare PYTHONPATH registers no entry points."
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        what = "torch loads no extensions: TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set"
        yield WARNING, what, "Unset it, or add `import dash_inductor` to the program."
    else:
        yield OK, "`import torch` loads dash_inductor", ""


def hook() -> Iterator[Seen]:
    """Checks whether dash_inductor is installed in Inductor, and its passes and lowerings can be loaded."""
    if state.off_by_environment():
        value = os.environ["DASH_INDUCTOR"]
        yield WARNING, f"dash_inductor is off: DASH_INDUCTOR={value} is set", "Unset the variable to use it."
        return
    compat.load_inductor()  # the hook installs now, at the latest
    from ..install import installation

    if state.failure is None:
        installation.lower_operators()  # loads passes and lowerings, as the first compile does
    reason = _switch.off_reason()
    if reason is not None:
        yield ERROR, f"dash_inductor is inactive: {reason}", "Mend what the message names; see docs/troubleshooting.md."
    elif not any(isinstance(entry, installation.JointPass) for entry in compat.joint_passes()):
        what = "dash_inductor is not among the passes of Inductor"
        yield ERROR, what, "Something has replaced torch._inductor.fx_passes.joint_graph.pass_patterns: remove it."
    else:
        yield OK, "installed into Inductor, and all of it loads", ""
        yield OK, f"takes part in PyTorch at {', '.join(seam.attribute for seam in SEAMS)}", ""


def gpu() -> Iterator[Seen]:
    """Reports the GPUs, and checks whether kernels exist for them."""
    if torch.version.hip is not None:
        yield ERROR, "this torch is for ROCm, where attention is left to PyTorch", "Use an NVIDIA GPU."
        return
    found, version = gpus(), driver()
    if not found:
        if version is not None:
            with_cuda = torch.version.cuda is not None
            seen = "torch sees no GPU" if with_cuda else "this torch is built without CUDA"
            advice = "Look at CUDA_VISIBLE_DEVICES, and whether the driver is new enough for this torch."
            what = f"NVIDIA driver {version} is there, but {seen}"
            yield WARNING, what, advice if with_cuda else "Install a CUDA build of torch."
        else:
            yield OK, "no GPU: PyTorch's CPU attention is deterministic, and is left alone by default", ""
        return
    known = {*WORKERS, *SAME_AS} - {"cpu"}
    for one in dict.fromkeys(found):
        count = found.count(one)
        libraries = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        yield OK, f"{count} x {one.name} ({one.arch}), driver {version or 'unknown'}, {libraries}", ""
        if one.arch not in known:
            what = f"there are no kernels for {one.arch} ({one.name}): its attention is left to PyTorch"
            yield ERROR, what, f"Kernels exist for {', '.join(sorted(known))}."
    if len({one.arch for one in found}) > 1:
        what = "the GPUs are of several architectures, and bits differ between architectures"
        yield WARNING, what, "Run all processes of one program, and both runs of a comparison, on one kind."


def compilers() -> Iterator[Seen]:
    """Checks for what Inductor and Triton need to compile: a compiler and Python's headers."""
    needed = {"CXX": ("g++", "clang++")}
    if gpus():
        needed["CC"] = ("gcc", "clang")
    for variable, usual in needed.items():
        names = (os.environ[variable],) if os.environ.get(variable) else usual
        found = [path for path in map(shutil.which, names) if path]
        if not found:
            what = f"no {'C++' if variable == 'CXX' else 'C'} compiler: {' and '.join(names)} are not found"
            yield ERROR, what, f"Install one (on Debian or Ubuntu: apt-get install g++), or set {variable}."
        else:
            yield OK, f"{variable}: {found[0]}", ""
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        yield ERROR, f"{header} does not exist: neither Inductor nor Triton can compile", "Install python3-dev."


def caches() -> Iterator[Seen]:
    """Checks whether the cache folders are writable, have free space, and allow executables."""
    from ..upstream.caches import cache_dir

    folders = {"TORCHINDUCTOR_CACHE_DIR": cache_dir()}
    if os.environ.get("TRITON_CACHE_DIR"):  # else Inductor puts it into its own
        folders["TRITON_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"]
    for variable, folder in folders.items():
        advice = f"Set {variable} to a folder on a local disk."
        there = Path(folder).absolute()
        while not there.exists():
            there = there.parent
        free = shutil.disk_usage(there).free
        if not os.access(there, os.W_OK | os.X_OK):
            yield ERROR, f"{folder} cannot be written to", advice
        elif os.statvfs(there).f_flag & NOEXEC:
            yield ERROR, f"{folder} is on a file system that runs no programs (noexec)", advice
        elif free < LEAST_SPACE:
            yield WARNING, f"{folder} has {free / 2**20:.0f} MiB left", advice
        else:
            yield OK, f"{folder}, {free / 2**30:.0f} GiB free", ""


def pytorch_defects() -> Iterator[Seen]:
    """Reports known silent errors of the installed PyTorch's compiler, and what dash_inductor does about them."""
    found = [defect for defect in DEFECTS if defect.applies]
    if not found:
        yield OK, f"no silent error is known of the compiler of torch {torch.__version__}", ""
    for defect in found:
        reports = ", ".join(f"pytorch#{number}" for number in defect.reports)
        what = f"torch {torch.__version__} has a silent error ({reports}). {defect.what}"
        yield OK, what, f"Nothing: under deterministic algorithms dash_inductor keeps out of it. {defect.remedy}"


CHECKS: tuple[Check, ...] = (
    package, torch_version, triton_version, pytorch_defects, probes, entry_point, hook, gpu, compilers, caches,
    attention_libraries,
)  # fmt: skip
