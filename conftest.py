"""Set-up shared by all tests: private Inductor caches, the `gpu` marker, fresh settings and records for every test."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported: no cache of another run may answer, and every graph in this process is really compiled.
# Only what the C++ compiler makes is shared: "force disable caches" would build its headers anew for every graph.
_CACHE = "" if "PYTEST_XDIST_WORKER" in os.environ else tempfile.mkdtemp(prefix="dash-inductor-tests-")
if _CACHE:  # else this is one of several processes, and the first one has set all of this
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _CACHE
    os.environ["TRITON_CACHE_DIR"] = os.path.join(_CACHE, "triton")
    os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT"] = "0"
    os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
    os.environ["TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO"] = "0"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # else every new cache folder compiles a dozen probes of the processor
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: more threads only wait for each other
    for _name in [name for name in os.environ if name.startswith(("DASH_INDUCTOR", "DASH_GUARD"))]:
        del os.environ[_name]

from dash_inductor.config import config  # noqa: E402  # only after the environment is set
from dash_inductor.records.records import clear_sites  # noqa: E402
from tests.support.distribution import build_wheel, copy_sources, install_wheel  # noqa: E402
from tests.support.global_hooks import no_global_hooks_stay  # noqa: E402, F401  # a fixture of every file
from tests.support.left_behind import nothing_left_behind, seed  # noqa: E402
from tests.support.processes import LARGE_HEAP  # noqa: E402
from tests.support.slices import Cases, durations  # noqa: E402

gc.set_threshold(*LARGE_HEAP)

with contextlib.suppress(ImportError):  # a GPU machine may lack it
    from hypothesis import HealthCheck, settings

    # The same examples in every run, and however long they take on a machine that does something else too.
    settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "all (default); few: some cases of functions that take long; K/N: these and a slice of the others"
    parser.addoption("--cases", default="all", metavar="all|few|K/N", help=text)


def pytest_sessionfinish() -> None:
    if _CACHE:
        shutil.rmtree(_CACHE, ignore_errors=True)


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay to the end: the collector need not look at them again


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    full = {item.nodeid for item in items if item.get_closest_marker("full")}
    chosen = Cases.parse(config.getoption("--cases")).chosen([item.nodeid for item in items], durations(), full)
    left_out = [item for item in items if item.nodeid not in chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in chosen]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Settings, records, compiled functions, random numbers and the determinism flag of one test do not reach the next.

    If a test leaves a change that it has to undo itself, that is an error.
    """
    seed()
    with nothing_left_behind():
        with config.patch():
            clear_sites()
            yield
        clear_sites()
        torch = sys.modules.get("torch")  # tests of dash_inductor.schedule do not import it
        if torch is not None:
            torch.use_deterministic_algorithms(False)
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()
        seed()  # also for the fixtures of the next file


@pytest.fixture
def deterministic() -> None:
    """Deterministic algorithms are on during the test."""
    import torch

    torch.use_deterministic_algorithms(True)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel of this source tree."""
    folder = tmp_path_factory.mktemp("wheel")
    return build_wheel(copy_sources(folder / "source"), folder)


@pytest.fixture(scope="session")
def installed_package(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an installed copy of the package, byte code and all; nobody changes it."""
    return install_wheel(wheel, tmp_path_factory.mktemp("installed") / "site")


@pytest.fixture
def copied_package(installed_package: Path, tmp_path: Path) -> Path:
    """A directory with an installed copy of the package that the test may break; to be put on PYTHONPATH."""
    return shutil.copytree(installed_package, tmp_path / "site")
