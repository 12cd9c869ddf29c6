"""The compiler's settings: multiply-adds are fused whatever the environment says, all else is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dash_inductor.install import cache_key
from dash_inductor.kernels.hopper.backward import build
from dash_inductor.kernels.portable import standalone
from dash_inductor.model import Band, Site
from dash_inductor.planning import plan
from dash_inductor.upstream import compat, toolchain
from tests.support.calls import spec_of

SITE = Site("cuda", "bfloat16", 1, 2, 2, 256, 256, 64, 64, spec_of(Band(0), 0.125))


def hopper_ptx() -> list[str]:
    kernels = build.Kernels(build.Specialisation.of_site(SITE, plan(SITE, "sm_90")))
    return [kernel.asm["ptx"] for kernel in (kernels.prepare, kernels.main, kernels.finish)]


def portable_ptx() -> list[str]:
    rendered = standalone.render(plan(SITE, "sm_80"), SITE)
    return [standalone.compile_for(kernel, "sm_80")[0].asm["ptx"] for kernel in rendered]


@pytest.mark.parametrize("ptx", [hopper_ptx, portable_ptx])
def test_multiply_adds_are_fused_whatever_the_environment_says(
    ptx: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = ptx()
    assert any("fma.rn" in text for text in fused)
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    assert ptx() == fused


def test_settings_are_named_with_their_values() -> None:
    assert toolchain.settings({}) == ""
    assert toolchain.settings(dict.fromkeys(toolchain.VARIABLES, "0")) == ""
    assert toolchain.settings({"TRITON_CACHE_DIR": "a", "TRITON_DEFAULT_FP_FUSION": "0"}) == ""
    used = toolchain.settings({"PTXAS_OPTIONS": "--fmad=false, -O1", "DISABLE_LLVM_OPT": "1"})
    assert used == "DISABLE_LLVM_OPT=1,PTXAS_OPTIONS=--fmad%3Dfalse%2C%20-O1"
    assert re.fullmatch(r"[^/ ]*", used)


@pytest.mark.parametrize(("version", "order"), [("3.6.0", ""), ("3.8.1", ""), ("3.9.0", "sums=triton3.9")])
@pytest.mark.parametrize("options", ["", "-O1"])
def test_numerics_keys_name_the_order_of_sums(
    version: str, order: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "triton_version", lambda: version)
    monkeypatch.setenv("PTXAS_OPTIONS", options)
    named = [f"PTXAS_OPTIONS={options}"] * bool(options) + [order] * bool(order)
    assert toolchain.numerics() == ",".join(named)


@pytest.mark.parametrize("name", toolchain.VARIABLES)
def test_every_setting_reaches_the_cache_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cache_key.entry()
    monkeypatch.setenv(name, "1")
    assert cache_key.entry() != plain


def test_every_variable_by_which_triton_invalidates_its_cache_is_known() -> None:
    """Triton lists the variables that change what it compiles; those that only print are not listed by us."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    harmless = re.compile(
        r"AMDGCN_.*|TRITON_HIP_.*|.*DUMP.*|.*TIMING|.*DIAGNOSTICS|TRITON_DISABLE_LINE_INFO|USE_IR_LOC|.*DEBUG.*"
        r"|.*REPRODUCER.*|LLVM_EXTRACT_DI_LOCAL_VARIABLES|MLIR_DISABLE_MULTITHREADING|.*STACKTRACE|TRITON_F32_DEFAULT"
        r"|TRITON_DEFAULT_FP_FUSION|.*_SCHEDULING_.*|TRITON_PLUGIN_VERSION_CHECK"
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in candidates():
            patch.setenv(name, "1")
        found = set(get_cache_invalidating_env_vars())
    assert len(found) > 5
    assert {name for name in found if not harmless.fullmatch(name)} <= set(toolchain.VARIABLES)


def candidates() -> set[str]:
    """Everything in Triton's compiler that looks like the name of an environment variable."""
    from triton._C import libtriton

    binary = Path(libtriton.__file__).read_bytes()
    words = re.findall(
        rb"\x00((?:TRITON|MLIR|LLVM|DISABLE|ENABLE|NVPTX|AMDGCN|USE|ALLOW|PTXAS)_[A-Z0-9_x]+)(?=\x00)", binary
    )
    return {word.decode() for word in words} | set(toolchain.VARIABLES)
