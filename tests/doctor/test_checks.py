"""Every check of the doctor: a healthy machine is quiet, and whoever breaks the thing sees the finding."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config as inductor
import torch.nn.functional as F
import torch.utils.deterministic
from expecttest import assert_expected_inline

import _dash_inductor_state as state
import dash_inductor
from dash_inductor import cli, doctor
from dash_inductor.config import config
from dash_inductor.doctor import Finding, Severity, findings, libraries, machine, program, report, settings
from dash_inductor.doctor.libraries import attention_libraries
from dash_inductor.doctor.machine import Gpu
from dash_inductor.eager.determinism import DETERMINISTIC
from dash_inductor.upstream import compat, probe
from dash_inductor.upstream.defects import Defect

OK, NOTE, WARNING, ERROR = Severity
H100 = Gpu("NVIDIA H100", "sm_90")


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU and without any variable that a check reads."""
    for name in list(os.environ):
        if name.startswith(("NCCL", "CUBLAS", "DASH_INDUCTOR", "TRITON_I", "PYTORCH", "NVIDIA_TF32")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(machine, "gpus", lambda: ())
    monkeypatch.setattr(machine, "driver", lambda: None)


def seen(check: findings.Check) -> list[Finding]:
    return list(findings.run([check]))


def worst(check: findings.Check) -> Finding:
    return max(seen(check), key=lambda finding: finding.severity)


def test_healthy_machine_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # no matter of ours
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    found = doctor.diagnose()
    assert [finding for finding in found if finding.severity > OK] == []
    assert {finding.check for finding in found} == {check.__name__ for check in machine.CHECKS}
    assert doctor.exit_code(found) == 0


BREAKS: dict[str, tuple[findings.Check, Severity, str, Callable[[pytest.MonkeyPatch], object]]] = {}


def breaks(check: findings.Check, severity: Severity, words: str) -> Callable[[Any], Any]:
    """Register a way to break what `check` looks at: the worst finding then has this severity and these words.

    A function that breaks a setting of torch.compile returns the context in which it is broken.
    """

    def register(function: Callable[[pytest.MonkeyPatch], object]) -> Callable[[pytest.MonkeyPatch], object]:
        BREAKS[function.__name__] = check, severity, words, function
        return function

    return register


@breaks(machine.package, WARNING, "says that it is version 0.0.1")
def stale_metadata(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(importlib.metadata, "version", lambda name: "0.0.1")


@breaks(machine.torch_version, WARNING, "torch 2.99.0 is not tested")
def unknown_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "__version__", "2.99.0")


@breaks(machine.pytorch_defects, OK, "has a silent error (pytorch#17). It loses sums.")
def a_defect(patch: pytest.MonkeyPatch) -> None:
    known = Defect("lost", ((2, 10), (2, 99)), (17,), "It loses sums.", "They are kept.")
    patch.setattr(machine, "DEFECTS", (known, replace(known, versions=((2, 0), (2, 1)))))


@breaks(machine.triton_version, ERROR, "triton is not installed")
def no_triton(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compat, "triton_version", lambda: None)


@breaks(machine.triton_version, WARNING, "asks for 3.1.4")
def wrong_triton(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(importlib.metadata, "requires", lambda name: ["sympy", 'triton==3.1.4; platform_system == "Linux"'])


@breaks(machine.probes, ERROR, "lacks: torch._ops.no_such_name (a test)")
def missing_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(probe, "TORCH", (("torch._ops", "no_such_name", "a test"),))


@breaks(machine.entry_point, ERROR, "does not load it")
def no_entry_point(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(importlib.metadata, "entry_points", lambda group: ())


@breaks(machine.entry_point, WARNING, "TORCH_DEVICE_BACKEND_AUTOLOAD=0")
def no_autoload(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


@breaks(machine.hook, WARNING, "DASH_INDUCTOR=off is set")
def off(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("DASH_INDUCTOR", "off")


@breaks(machine.hook, ERROR, "dash_inductor is inactive: ArgumentError: a reason")
def inactive(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state, "failure", "ArgumentError: a reason")


@breaks(machine.hook, ERROR, "not among the passes")
def no_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compat, "joint_passes", list)


@breaks(machine.gpu, WARNING, "driver 570.1 is there, but this torch is built without CUDA")
def cpu_build(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.version, "cuda", None)
    patch.setattr(machine, "driver", lambda: "570.1")


@breaks(machine.gpu, WARNING, "driver 570.1 is there, but torch sees no GPU")
def hidden_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(machine, "driver", lambda: "570.1")


@breaks(machine.gpu, ERROR, "ROCm")
def rocm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.version, "hip", "7.0")


@breaks(machine.gpu, ERROR, "no kernels for sm_61")
def old_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "gpus", lambda: (Gpu("Tesla P40", "sm_61"),))


@breaks(machine.gpu, WARNING, "several architectures")
def mixed_gpus(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "gpus", lambda: (H100, Gpu("NVIDIA A100", "sm_80")))


@breaks(machine.compilers, ERROR, "no C++ compiler: no-such-compiler")
def no_compiler(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("CXX", "no-such-compiler")


@breaks(machine.compilers, ERROR, "no C compiler: no-such-compiler")
def no_c_compiler_for_triton(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "gpus", lambda: (H100,))
    patch.setenv("CC", "no-such-compiler")


@breaks(machine.compilers, ERROR, "Python.h does not exist")
def no_headers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine.sysconfig, "get_path", lambda name: "/nowhere")


@breaks(machine.caches, ERROR, "cannot be written to")
def read_only_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine.os, "access", lambda path, mode: False)


@breaks(machine.caches, ERROR, "noexec")
def noexec_cache(patch: pytest.MonkeyPatch) -> None:
    blocks = dict.fromkeys(("f_bavail", "f_bfree", "f_blocks"), 1 << 30)
    there = types.SimpleNamespace(f_flag=machine.NOEXEC, f_frsize=4096, **blocks)
    patch.setattr(machine.os, "statvfs", lambda path: there)


@breaks(machine.caches, WARNING, "has 5 MiB left")
def full_disk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=5 << 20))


@breaks(attention_libraries, NOTE, "flash_attn is installed: what is called outside of graphs")
def flash_attn_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(libraries, "find_spec", lambda name: object() if name == "flash_attn" else None)


@breaks(settings.own_variables, WARNING, "DASH_INDUCTOR_STRIKT is set, and nothing reads it")
def misspelt_variable(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("DASH_INDUCTOR_STRIKT", "1")


@breaks(settings.own_variables, NOTE, "config.forward is 'keep'")
def setting(patch: pytest.MonkeyPatch) -> None:
    config.forward = "keep"


@breaks(settings.joint_passes, ERROR, "use_joint_graph_passes is off")
def no_passes(patch: pytest.MonkeyPatch) -> object:
    return inductor.patch(use_joint_graph_passes=False)


@breaks(settings.compiling, WARNING, "torch.compile is switched off")
def no_compile(patch: pytest.MonkeyPatch) -> object:
    return torch._dynamo.config.patch(disable=True)


@breaks(settings.compiling, WARNING, "torch.compile is switched off")
def no_compile_by_variable(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("TORCHDYNAMO_DISABLE", "1")


@breaks(settings.compiling, WARNING, "suppress_errors is on")
def suppressed_errors(patch: pytest.MonkeyPatch) -> object:
    return torch._dynamo.config.patch(suppress_errors=True)


@breaks(settings.tunable_op, WARNING, "TunableOp is on")
def tunable_op(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PYTORCH_TUNABLEOP_ENABLED", "1")


@breaks(settings.cudnn_benchmark, WARNING, "chooses convolutions by timing")
def cudnn_benchmark(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.backends.cudnn, "benchmark", True)


@breaks(settings.cublas, WARNING, "CUBLAS_WORKSPACE_CONFIG=:4096:2 is not one")
def workspace(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2")


@breaks(settings.cublas, NOTE, "CUBLAS_WORKSPACE_CONFIG is not set")
def no_workspace(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "gpus", lambda: (H100,))
    patch.setattr(torch, "ones", lambda *size, device: torch.zeros(size))


@breaks(settings.cublas, ERROR, "no matmul runs under deterministic algorithms: Deterministic behavior")
def refused_matmul(patch: pytest.MonkeyPatch) -> None:
    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert torch.are_deterministic_algorithms_enabled()
        raise RuntimeError("Deterministic behavior was enabled\nbut ...")

    no_workspace(patch)
    patch.setattr(torch, "mm", mm)


@breaks(settings.tf32, NOTE, "TF32")
def tf32(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(settings, "allow_tf32", lambda device: True)


@breaks(settings.tf32, WARNING, "NVIDIA_TF32_OVERRIDE=0")
def tf32_override(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("NVIDIA_TF32_OVERRIDE", "0")


@breaks(settings.nccl, NOTE, "NCCL_ALGO is not set")
def several_gpus(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "gpus", lambda: (H100, H100))


@breaks(settings.nccl, NOTE, "NCCL_ALGO is not set")
def several_processes(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("WORLD_SIZE", "2")


@breaks(settings.nccl, WARNING, "allows NVLS")
def nvls(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("NCCL_ALGO", "Ring,NVLS")


@breaks(settings.nccl, WARNING, "a plugin chooses")
def nccl_plugin(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("NCCL_TUNER_PLUGIN", "libnccl-tuner.so")


@breaks(settings.padding, NOTE, "shape_padding is on")
def padding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "gpus", lambda: (H100,))
    patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    patch.setattr(inductor, "deterministic", False)


@breaks(settings.kernel_compiler, WARNING, "interpreter")
def interpreter(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("TRITON_INTERPRET", "1")


@breaks(settings.kernel_compiler, WARNING, "DISABLE_LLVM_OPT=1")
def compiler_settings(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("DISABLE_LLVM_OPT", "1")


@breaks(settings.attention_function, WARNING, "replaced by tests.doctor.test_checks.")
def patched_attention(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: None)


@breaks(settings.attention_function, NOTE, "flash attention is FA4")
def other_flash_attention(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)


@breaks(settings.attention_function, WARNING, "all fused kernels of attention are off")
def math_only(patch: pytest.MonkeyPatch) -> None:
    for name in ("flash", "mem_efficient", "cudnn"):
        patch.setattr(torch.backends.cuda, f"{name}_sdp_enabled", lambda: False)


@breaks(settings.disabled_caches, NOTE, "every process compiles anew")
def caches_off(patch: pytest.MonkeyPatch) -> object:
    return inductor.patch(force_disable_caches=True)


@breaks(program.deterministic_algorithms, WARNING, "without deterministic algorithms")
def flag_off(patch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)


@breaks(program.deterministic_algorithms, WARNING, "warn_only=True")
def warn_only(patch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)


@breaks(program.fill, NOTE, "filled with NaN")
def filled_memory(patch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(True)
    patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)


@breaks(program.switch, WARNING, "switched off by dash_inductor.disable()")
def disabled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dash_inductor._switch, "_on", False)


@breaks(program.attention, WARNING, "no attention was compiled")
def no_attention(patch: pytest.MonkeyPatch) -> None:
    dash_inductor.clear_sites()


def test_programs_that_are_not_compiled() -> None:
    """The flag of a call of their attention is none of the program."""
    with DETERMINISTIC:
        assert [finding.severity for finding in seen(program.deterministic_algorithms)] == []
    torch.use_deterministic_algorithms(True, warn_only=True)
    with DETERMINISTIC:
        assert worst(program.deterministic_algorithms).severity == WARNING


@breaks(program.attention, WARNING, "loaded flash_attn, whose attention is not PyTorch's")
def other_library(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))


@pytest.mark.parametrize("name", BREAKS)
def test_broken_thing_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, severity, words, break_it = BREAKS[name]
    broken: Any = break_it(monkeypatch)
    with broken or nullcontext():
        finding = worst(check)
    assert (finding.severity, finding.check) == (severity, check.__name__), finding
    assert words in finding.what
    assert finding.advice


def test_every_check_is_broken_by_a_test() -> None:
    checks = {*machine.CHECKS, *settings.CHECKS, *program.COMPILING, *program.AFTERWARDS}
    assert checks - {check for check, *_ in BREAKS.values()} == {settings.autotuning}  # below, setting by setting


@pytest.mark.parametrize("timed", settings.TIMED, ids=lambda timed: timed.name)
def test_timed_choices(timed: settings.Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(settings.autotuning) == []
    with inductor.patch({timed.name: True}):
        assert bool(seen(settings.autotuning)) is not timed.stopped  # the flag is off, and would stop what it stops
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        with inductor.patch(deterministic=False):
            assert timed.what in worst(settings.autotuning).what
        with inductor.patch(deterministic=True):
            assert bool(seen(settings.autotuning)) is not timed.stopped
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    with inductor.patch(max_autotune=True):
        assert "(TORCHINDUCTOR_MAX_AUTOTUNE=1)" in worst(settings.autotuning).what


def test_deterministic_inductor_pads_without_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    padding(monkeypatch)
    assert len(seen(settings.padding)) == 1
    with inductor.patch(deterministic=True):
        assert seen(settings.padding) == []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    assert seen(settings.padding) == []  # the flag would switch it on


@pytest.mark.parametrize(
    ("value", "allowed"),
    [("Ring", False), ("NVLS", True), ("tree,nvlstree", True), ("^NVLS,NVLSTree", False), ("^Tree", True)],
)
def test_nvls_of_a_list(value: str, allowed: bool) -> None:
    assert settings.allows_nvls(value) is allowed


def test_nvls_that_is_off_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    nvls(monkeypatch)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    assert seen(settings.nccl) == []


def test_supported_gpu_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: (H100, H100))
    (finding,) = seen(machine.gpu)
    assert finding.severity is OK
    assert finding.what.startswith("2 x NVIDIA H100 (sm_90)")


def test_matmul_leaves_the_flag_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    refused_matmul(monkeypatch)
    seen(settings.cublas)
    assert not torch.are_deterministic_algorithms_enabled()


def test_check_that_raises_is_an_error() -> None:
    def broken() -> Any:
        raise OSError("a reason")
        yield

    assert worst(broken).what == "the check failed: OSError: a reason"


@pytest.mark.parametrize(
    ("severities", "code"), [((), 0), ((OK, NOTE), 0), ((NOTE, WARNING), 1), ((ERROR, WARNING), 2)]
)
def test_exit_code_is_that_of_the_worst(severities: tuple[Severity, ...], code: int) -> None:
    assert doctor.exit_code([Finding("check", severity, "") for severity in severities]) == code


def test_report_fits_100_columns() -> None:
    words = " ".join(["determinism"] * 20)
    text = report.format_report([Finding("nccl", WARNING, words, words), Finding("gpu", OK, "no GPU")])
    assert max(map(len, text.splitlines())) <= 100
    assert_expected_inline(
        text,
        """\
ok       gpu                      no GPU
warning  nccl                     determinism determinism determinism determinism determinism
                                  determinism determinism determinism determinism determinism
                                  determinism determinism determinism determinism determinism
                                  determinism determinism determinism determinism determinism
                                  -> determinism determinism determinism determinism determinism
                                     determinism determinism determinism determinism determinism
                                     determinism determinism determinism determinism determinism
                                     determinism determinism determinism determinism determinism

1 warning""",
    )
    assert "\033[33mwarning" in report.format_report([Finding("nccl", WARNING, "")], colours=True)
    assert report.format_report([Finding("gpu", OK, "no GPU")]).endswith("Everything is as it should be.")


FINDINGS = [Finding("torch", OK, "torch 9"), Finding("seed", NOTE, "no seed"), Finding("gpu", OK, "no GPU")]


@pytest.mark.parametrize(
    "findings", [FINDINGS, FINDINGS[:1], FINDINGS[1:2], [*FINDINGS, Finding("attention", OK, "replaced: 2")], []]
)
def test_facts_are_folded(findings: list[Finding]) -> None:
    """One line counts them; all else is printed as before."""
    long, short = (report.format_report(findings, verbose=verbose).splitlines() for verbose in (True, False))
    facts = [line for line in long if line.startswith("ok ") and "replaced" not in line]
    assert short[bool(facts) :] == long[len(facts) :]
    if facts:
        assert short[0].startswith("ok ")
        assert short[0].endswith(f"{len(facts)} facts: `dash-inductor doctor -v` prints them")


@pytest.mark.parametrize("width", [60, 80, 160])
def test_reports_have_the_width_of_the_terminal(width: int) -> None:
    text = report.format_report([Finding("nccl", WARNING, "word " * 60, "advice " * 60)], width=width)
    assert width - 10 < max(map(len, text.splitlines())) <= width


SCRIPT = """
import sys, torch, torch.nn.functional as F
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
q = torch.randn(1, 2, 64, 16, requires_grad=True)
torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), mode=sys.argv[1])(q).sum().backward()
torch.use_deterministic_algorithms(False)
if len(sys.argv) > 2:
    raise ValueError(sys.argv[2])
"""


def diagnosed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, str]]:
    """Exit status of the command, and what it says, by check, of the settings that a test is about."""
    code = cli.main(["doctor", "--json", *words])
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code
    return code, {one["check"]: one["what"] for one in found["findings"] if one["severity"] != "ok"}


def test_settings_of_a_script_are_seen_where_it_compiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # of the module
    config.cpu = "reference"
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    try:
        code, found = diagnosed(capsys, str(script), "default")
        assert found.pop("two_runs").startswith("nothing was run twice: no module")
        assert (code, found) == (0, {"own_variables": "config.cpu is 'reference'"})
        code, found = diagnosed(capsys, str(script), "lite")
        assert code == 2
        assert set(found) == {"own_variables", "joint_passes", "attention", "two_runs"}
        assert "stay as PyTorch has them: 1. passes_off" in found["attention"]
        code, found = diagnosed(capsys, str(script), "max-autotune-no-cudagraphs", "a reason")
        assert code == 1
        assert found["program"] == "the program ended with ValueError: a reason"
        assert "coordinate_descent_tuning" in found["autotuning"]
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # of the module


def test_bad_value_of_a_variable_is_a_finding() -> None:
    command = [sys.executable, "-m", "dash_inductor", "doctor", "--json"]
    environment = os.environ | {"DASH_INDUCTOR_STRICT": "perhaps"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    found = {one["check"]: one["what"] for one in json.loads(ended.stdout)["findings"] if one["severity"] == "error"}
    assert set(found) == {"hook", "own_variables"}
    assert all("DASH_INDUCTOR_STRICT='perhaps' is not allowed: expected one of '0'" in what for what in found.values())


def test_missing_script_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "no_such.py"]) == 2
    assert "script='no_such.py' is not allowed" in capsys.readouterr().err


def test_command_prints_the_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: (Finding("nccl", WARNING, "a thing", "Mend it."),))
    assert cli.main(["doctor"]) == 1
    assert "1 warning" in capsys.readouterr().out
