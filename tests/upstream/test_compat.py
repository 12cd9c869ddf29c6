"""The probe of torch and triton names what is missing; differences between versions are hidden."""

from __future__ import annotations

import importlib
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch._functorch import partitioners
from torch._functorch._aot_autograd import autograd_cache
from torch._inductor import codecache, select_algorithm
from torch._inductor.fx_passes import joint_graph

import _dash_inductor_autoload
import _dash_inductor_state
from dash_inductor.errors import UnsupportedVersionError
from dash_inductor.install import installation
from dash_inductor.upstream import compat, probe

from ..support.processes import run_python
from .names_used import names_used

TABLES = (*probe.TORCH, *probe.TRITON, *(probe.CUDA if torch.version.cuda else ()))
NAMES = [(module, name, purpose) for module, names, purpose in TABLES for name in names.split()]


class Without:
    """An object that lacks one attribute."""

    def __init__(self, original: object, lacking: str) -> None:
        self.original, self.lacking = original, lacking

    def __getattr__(self, name: str) -> object:
        if name == self.lacking:
            raise AttributeError(name)
        return getattr(self.original, name)


def remove(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    """Take a (dotted) name out of a module, if it is there."""
    owner = importlib.import_module(module)
    *path, last = name.split(".")
    if not path:
        monkeypatch.delattr(owner, last, raising=False)
        return
    *path, parent = path
    place = operator.attrgetter(".".join(path))(owner) if path else owner
    if hasattr(place, parent):
        monkeypatch.setattr(place, parent, Without(getattr(place, parent), last))


def joint_passes() -> list[str]:
    return [type(entry).__name__ for entry in getattr(joint_graph, "pass_patterns", [])]


@pytest.fixture
def uninstalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hook would install again, as in a new process; nothing may change.

    The probe has run before: a module that it imports first while another lacks a name would be missing as well.
    """
    probe.probe()
    monkeypatch.setattr(_dash_inductor_state, "failure", None)
    monkeypatch.setattr(installation, "install", installation.install.__wrapped__)
    passes, details = joint_passes(), getattr(codecache, "FxGraphHashDetails", None)
    init = details and details.__init__
    yield
    assert joint_passes() in (passes, [])
    assert details is None or details.__init__ is init


def test_this_version_has_everything() -> None:
    assert probe.probe() == []


@pytest.mark.parametrize(("module", "name", "purpose"), NAMES, ids=[f"{m}.{n}" for m, n, _ in NAMES])
@pytest.mark.usefixtures("uninstalled")
def test_a_missing_name_is_one_warning(module: str, name: str, purpose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever name a version lacks: dash_inductor says which, once, and stays inactive."""
    for spelling in name.split("|"):
        remove(monkeypatch, module, spelling)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _dash_inductor_autoload._install()
        _dash_inductor_autoload._install()
    (warning,) = [w for w in caught if w.category is RuntimeWarning]
    assert str(warning.message).startswith("dash_inductor is inactive, attention is compiled as plain PyTorch compiles")
    assert f"lacks what dash_inductor relies on: {module}.{name} ({purpose})" in str(warning.message)
    assert _dash_inductor_state.failure is not None
    assert installation.rewriter() is None


@pytest.mark.parametrize("module", sorted({module for module, _, _ in NAMES} - {"torch", "triton"}))
def test_a_missing_module(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    tables = [table for table in (probe.TORCH, probe.TRITON, probe.CUDA) if any(row[0] == module for row in table)]
    found = [line for table in tables for line in probe._missing(table)]
    assert found
    assert all(line.startswith(f"{module} (") for line in found)


UNPROBED = {
    "torch._inductor.config.patch": "Inductor itself cannot do without it",
    "torch._dynamo.config.patch": "PyTorch itself cannot do without it",
    "torch._functorch.config.patch": "AOTAutograd itself cannot do without it",
    "triton.__version__": "asked for by `triton_version`",
    "triton.language.extra.cuda.globaltimer": "profiles alone need it; what does not compile is kept",
    "triton.language.extra.cuda.smid": "as `globaltimer`",
}
VALUES = {
    "torch._inductor.virtualized.V.graph.sizevars": "torch._inductor.sizevars.SizeVarAllocator",
    "torch._inductor.virtualized.ops": "torch._inductor.ops_handler.OpsHandler",
}
"""The classes of values that names are bound to while a graph is compiled."""
TOOLS = (
    "dash_inductor/doctor/",
    "guard/",
    "dash_inductor/explanations/elsewhere/",
    "dash_inductor/upstream/devices.py",
)
"""No compile needs what is used here alone: without it a check of the doctor, or an explanation for a GPU
that is not there says what it misses."""


def test_every_name_in_use_is_probed() -> None:
    """A name of torch's internals or of triton that the sources use, and no row of the tables asks for."""
    tables = (*probe.TORCH, *probe.TRITON, *probe.CUDA)
    probed = {f"{module}.{spelling}" for module, names, _ in tables for spelling in re.split(r"[ |]", names)}
    probed |= {row[0] for row in tables}
    probed |= {".".join(name.split(".")[:end]) for name in probed for end in range(1, name.count(".") + 1)}
    unprobed = {}
    for used, files in names_used().items():
        for bound, stands_for in VALUES.items():
            used = re.sub(rf"^{re.escape(bound)}(?=\.|$)", stands_for, used)
        known = used in probed or used in UNPROBED or used.startswith("torch._inductor.virtualized.V.")
        if not known and not all(file.startswith(TOOLS) for file in files):
            unprobed[used] = sorted(files)
    assert not unprobed, "add these to the tables of dash_inductor/upstream/probe.py"


def test_the_reading_of_sources_sees_what_is_used() -> None:
    used = names_used()
    assert {
        "torch._inductor.codecache.PyCodeCache.load",
        "triton.language.dot",
        "triton.experimental.gluon.language.warp_specialize",
        "triton.experimental.gluon.language.nvidia.hopper.mbarrier.wait",
        "triton.language.pointer_type",
    } <= set(used)
    assert (
        "kernels/hopper/shared/device/steps.py"
        in used["triton.experimental.gluon.language.nvidia.hopper.warpgroup_mma"]
    )


def test_the_newest_spelling_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.9 kept the names of 3.6 as functions that raise."""
    module = SimpleNamespace(new="new", old="old", nested=SimpleNamespace(old="nested"))
    monkeypatch.setitem(sys.modules, "dash_test_module", module)  # type: ignore[arg-type]  # stands for a module
    assert compat.resolve("dash_test_module", "newest|new|old") == "new"
    assert compat.resolve("dash_test_module", "nested.new|nested.old") == "nested"
    with pytest.raises(AttributeError, match=re.escape("dash_test_module has none of ['a', 'b.c']")):
        compat.resolve("dash_test_module", "a|b.c")


def test_reads_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a wait can be for writes too, its default must not decide."""
    tma = importlib.import_module(compat.TMA_STORE[0])
    monkeypatch.setattr(tma, "store_wait", lambda pendings, _semantic=None: None)
    assert compat.reads_only() == {}
    monkeypatch.setattr(tma, "store_wait", lambda pendings, read_only=False, _semantic=None: None)
    assert compat.reads_only() == {"read_only": True}


def test_changed_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Details:
        def __init__(self, graph: object) -> None: ...

    monkeypatch.setattr(joint_graph, "pass_patterns", [object()])
    monkeypatch.setattr(codecache, "FxGraphHashDetails", Details)
    assert autograd_cache.AOTAutogradCacheDetails is not Details
    assert probe.probe() == [
        "joint_graph.pass_patterns as a list of objects with apply(graph)",
        "FxGraphHashDetails(gm, ...)",
        "AOTAutogradCacheDetails as a subclass of FxGraphHashDetails",
    ]


def test_a_changed_partitioner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioners, "_size_of", lambda node, fallback: 0)
    monkeypatch.setattr(partitioners.OpTypes, "is_compute_intensive", lambda self, node: node.target in self.view_ops)
    assert probe.probe() == [
        "partitioners._size_of(node)",
        "partitioners.OpTypes.is_compute_intensive that calls get_aten_target",
    ]


def test_changed_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_OPERATORS", (("aten::relu", "grad_out"), ("aten::no_such_operator", "")))
    first, second = probe.probe()
    assert first == "aten::relu(query, key, value, is_causal, scale, grad_out)"
    assert second == "aten::no_such_operator"


@pytest.mark.parametrize(
    ("version", "missing"),
    [
        ("3.6.0", []),
        ("4.0.0+git1", []),
        ("3.5.1", ["triton >= 3.6, found 3.5.1"]),
        (None, ["triton, which is not installed"]),
    ],
)
def test_triton(version: str | None, missing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "triton_version", lambda: version)
    assert probe.probe() == missing


def test_nothing_is_installed_where_the_probe_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "probe", lambda: ["this", "that"])
    passes, init = list(joint_graph.pass_patterns), codecache.FxGraphHashDetails.__init__
    with pytest.raises(
        UnsupportedVersionError, match=r"lacks what dash_inductor relies on: this; that \(tested: torch 2"
    ):
        installation.install.__wrapped__()
    assert joint_graph.pass_patterns == passes
    assert codecache.FxGraphHashDetails.__init__ is init


def test_installing_again_changes_nothing() -> None:
    installation.install()
    before = list(joint_graph.pass_patterns)
    installation.install()
    assert joint_graph.pass_patterns == before


@pytest.mark.parametrize(
    "asked", [compat.computes_early, compat.waits_meet, compat.arrivals_meet, compat.sums_in_new_order]
)
@pytest.mark.parametrize(
    ("version", "is_so"),
    [(None, False), ("3.6.0", False), ("3.8.2", False), ("3.9.0", True), ("3.10.0+git1a2b", True), ("4.0.0", True)],
)
def test_what_triton_does_since_3_9(
    asked: Callable[[], bool], version: str | None, is_so: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "triton_version", lambda: version)
    assert asked() is is_so


@pytest.mark.parametrize("choices", [[], [SimpleNamespace(), SimpleNamespace()]])
def test_several_choices_are_refused(choices: list[object]) -> None:
    with pytest.raises(ValueError, match=f"dash_x: exactly one choice is allowed, got {len(choices)}"):
        compat.autotune_select("dash_x", choices, [], None)


@pytest.mark.parametrize("result", ["output", ("output", "choice")])
def test_output_of_the_only_choice(result: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select_algorithm, "autotune_select_algorithm", lambda *args: result)
    assert compat.autotune_select("dash_x", ["choice"], [], None) == "output"


def test_templates_keep_their_layouts() -> None:
    template = compat.make_template(name="dash_test", grid=lambda meta: (1, 1, 1), source="")
    assert getattr(template, "always_freeze_layout", True) is True


def test_a_name_that_is_missing_from_the_beginning_is_told_by_the_probe() -> None:
    """What launches take from torch once, at import, fails no import."""
    found = run_python("""
        import torch
        del torch._C._dynamo.guards._empty_strided_cuda
        torch.version.cuda = "13.0"  # builds without CUDA are not asked for it
        from dash_inductor.upstream import compat, probe
        print(*[each for each in probe.probe() if "_empty_strided_cuda" in str(each)])
        try:
            compat.empty_cuda((1,), (1,), torch.int32)
        except RuntimeError as error:
            print(error)
    """, TORCH_DEVICE_BACKEND_AUTOLOAD="0")  # fmt: skip
    first, second = found.stdout.splitlines()
    assert "launching the Hopper kernel" in first
    assert second == "this torch has no torch._C._dynamo.guards._empty_strided_cuda"
