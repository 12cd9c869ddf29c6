"""If a kernel does not compile, its site is not replaced, before the graph is touched; the program goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config

from dash_inductor.config import config
from dash_inductor.errors import ArgumentError, DashError, FallbackError
from dash_inductor.kernels.hopper.backward import build
from dash_inductor.kernels.hopper.forward import build as forward_build
from dash_inductor.kernels.portable import standalone
from dash_inductor.lowering import ahead, compile_kernels
from dash_inductor.model import Band, Plan, Site, Tiles
from dash_inductor.model.reasons import Reason
from dash_inductor.passes.all import rewrite_graph
from dash_inductor.passes.attention.rewrite import AttentionRewrite
from dash_inductor.planning import plan
from dash_inductor.records.records import sites
from dash_inductor.upstream import compat

from ..support.calls import spec_of
from ..support.fakecuda import compiler
from ..support.forks import FAKE_GPU, run_forked
from ..support.graphs import BACKWARD, Shape, cuda_inputs, flash, op_counts, trace
from .test_hopper import PROGRAM

CUDA = torch.device("cuda", 0)
HOPPER = Site("cuda", "bfloat16", 4, 8, 2, 512, 512, 64, 64, spec_of(Band(0, None), 0.125))
PORTABLE = dataclasses.replace(HOPPER, dtype="float32")


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The things that are compiled, each with 1000 bytes of shared memory; the GPU has as much as that."""
    seen: list[Any] = []

    def compiled(thing: Any) -> Any:
        seen.append(thing)
        return SimpleNamespace(metadata=SimpleNamespace(name="kernel", shared=1000))

    built = property(lambda self: compiled(self.of))
    for module, names in ((build, ("prepare", "main", "finish")), (forward_build, ("prepare", "main"))):
        monkeypatch.setattr(module, "Kernels", type("Kernels", (module.Kernels,), dict.fromkeys(names, built)))
    monkeypatch.setattr(standalone, "build", lambda kernel, arch: compiled((kernel, arch)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    limit(monkeypatch, 1000)
    ahead._attempt.cache_clear()
    build.kernels.cache_clear()
    forward_build.kernels.cache_clear()
    yield seen
    ahead._attempt.cache_clear()
    build.kernels.cache_clear()
    forward_build.kernels.cache_clear()


def limit(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The shared memory of a CTA, as Triton's driver reports it."""
    monkeypatch.setattr(ahead, "_shared_memory", lambda device: size)


def planned(site: Site) -> Plan:
    return plan(site, "sm_90")


@pytest.mark.parametrize(
    ("lengths", "even"),
    [((512, 512), [True]), ((512, 500), [False]), ((100, 500), [False]), ((None, None), [True, False])],
    ids=str,
)
def test_the_hopper_kernels_that_the_operator_will_launch(attempts: list[Any], lengths: Any, even: list[bool]) -> None:
    """The backward's, then the forward's; of dynamic lengths, those for even and uneven, short and other ones."""
    site = dataclasses.replace(HOPPER, q_len=lengths[0], kv_len=lengths[1])
    compile_kernels(site, planned(site), CUDA)
    known = [dataclasses.replace(site, kv_len=n) for n in (512, 500) if (n == 512) in even]
    backward = [build.Specialisation.of_site(s, planned(s)) for s in known]
    of_queries = [lengths[0]] if lengths[0] else [100, 512]
    forward = [forward_build.Specialisation.of_site(dataclasses.replace(s, q_len=n)) for s in known for n in of_queries]
    assert [problem.even_kv for problem in backward] == [p.even_kv for p in forward[:: len(of_queries)]] == even
    assert {problem.short for problem in forward} == {n < 128 for n in of_queries}
    assert attempts == [kernels for kernels in backward for _ in range(3)] + [f for f in forward for _ in range(2)]


def test_equal_layers_share_one_attempt(attempts: list[Any]) -> None:
    for site in (HOPPER, PORTABLE):
        attempts.clear()
        for batch, q_len in ((4, 512), (2, 512), (2, 700), (None, None)):
            assert len(attempts) in (0, 5 if site is HOPPER else 3)
            other = dataclasses.replace(site, batch=batch, q_heads=16, kv_heads=4, q_len=q_len)
            compile_kernels(other, planned(site), CUDA)
        # any number of queries may be a small one, for which the Hopper forward has two kernels of its own
        assert len(attempts) == (7 if site is HOPPER else 3)
        full = dataclasses.replace(site, spec=spec_of(Band(), 0.125))
        compile_kernels(full, planned(full), CUDA)
        assert len(attempts) == (7 + 5 if site is HOPPER else 2 * 3)


def test_the_portable_forward_is_compiled_beside_every_backward(attempts: list[Any]) -> None:
    """Once for all lengths."""
    dynamic = dataclasses.replace(HOPPER, q_len=None, kv_len=None)
    for site, kernels, forwards in ((PORTABLE, 2, 1), (HOPPER, 3, 1), (dynamic, 6, 1)):
        attempts.clear()
        compile_kernels(
            site, dataclasses.replace(planned(site), forward="portable", forward_tiles=Tiles(64, 32, 4, 2)), CUDA
        )
        rendered = [thing[0] for thing in attempts if isinstance(thing, tuple) and "attend_tile" in thing[0].text]
        assert (len(attempts), len(rendered)) == (kernels + forwards, forwards)


def test_a_failure_is_remembered_for_all_sites_of_its_class(
    attempts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(standalone, "build", lambda *args: calls.append(args) or 1 / 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            compile_kernels(PORTABLE, planned(PORTABLE), CUDA)
    assert len(calls) == 1


@pytest.mark.parametrize("site", [HOPPER, PORTABLE], ids=["hopper", "portable"])
def test_shared_memory(attempts: list[Any], monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    limit(monkeypatch, 999)
    with pytest.raises(DashError, match="kernel needs 1000 bytes of shared memory, the device has 999"):
        compile_kernels(site, planned(site), CUDA)


def test_a_setting_of_inductor_that_ordered_kernels_cannot_bear(attempts: list[Any]) -> None:
    ordered = plan(PORTABLE, "sm_90", schedule="ascending")
    with inductor_config.patch(benchmark_fusion=True):
        with pytest.raises(ArgumentError, match="benchmark_fusion=True is not allowed"):
            compile_kernels(PORTABLE, ordered, CUDA)
        compile_kernels(PORTABLE, planned(PORTABLE), CUDA)
    compile_kernels(PORTABLE, ordered, CUDA)


def test_nothing_is_compiled_for_the_reference_and_the_interpreter(
    attempts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = dataclasses.replace(PORTABLE, device="cpu")
    compile_kernels(on_cpu, plan(on_cpu, "cpu"), torch.device("cpu"))
    monkeypatch.setattr(compat, "interpreting", lambda: True)
    compile_kernels(PORTABLE, planned(PORTABLE), CUDA)
    assert attempts == []


def test_the_nominal_problem_of_a_portable_plan_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, for real: with the memory of an A10, then with less than the plan takes."""
    site = dataclasses.replace(PORTABLE, head_dim=32, value_dim=32, batch=None, q_len=None, kv_len=None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    for size, error in ((99 << 10, None), (1 << 10, DashError)):
        limit(monkeypatch, size)
        ahead._attempt.cache_clear()
        with pytest.raises(error, match="bytes of shared memory") if error else contextlib.nullcontext():
            compile_kernels(site, plan(site, "sm_86"), CUDA)
    ahead._attempt.cache_clear()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("strict", [False, True])
def test_one_site_of_two_does_not_compile(monkeypatch: pytest.MonkeyPatch, strict: bool) -> None:
    def refuse_full(site: Site, plan: Plan, device: torch.device, has_backward: bool) -> None:
        assert device.type == "cuda"
        if site.band.is_full:
            raise RuntimeError("on purpose\n" + 1000 * "x ")

    def two(q: Any, k: Any, v: Any, do: Any) -> tuple[Any, ...]:
        return *flash(q, k, v, do, causal=True), *flash(q, k, v, do, causal=False)

    module = trace(two, lambda: cuda_inputs(Shape()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with config.patch(strict=strict):
        if strict:
            with pytest.raises(FallbackError, match=r"compile_failed: .*RuntimeError: on purpose x x"):
                rewrite_graph(module.graph, [AttentionRewrite(refuse_full)])
        else:
            assert rewrite_graph(module.graph, [AttentionRewrite(refuse_full)])
    module.graph.lint()
    assert {(r.reason, r.mask) for r in sites()} == {(None, "causal"), (Reason.COMPILE_FAILED, "full")}
    assert all(len(r.detail) < 500 for r in sites())
    counts = op_counts(module.graph)
    assert (counts[BACKWARD], counts["aten::_scaled_dot_product_flash_attention_backward"]) == (1, 1)


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
@pytest.mark.parametrize("kernel", ["hopper", "portable"])
def test_a_compile_goes_on_with_pytorchs_operator(kernel: str) -> None:
    """The whole way through Inductor on a fake H100, with a compiler that fails."""
    program = PROGRAM.replace("compile = build.compile_kernel\n", "compile = None  # called, it fails\n")
    program = program.replace("strict=True", "strict=False").replace("str(site.plan)", "site.reason.value, site.detail")
    if kernel == "portable":
        program = (
            program.replace("torch.bfloat16", "torch.float32")
            .replace(
                "from dash_inductor.kernels.hopper.backward import build",
                "from dash_inductor.kernels.portable import standalone as build",
            )
            .replace("build.compile_kernel", "build.build")
            .replace("function.__name__", "function.text")
        )
    output = run_forked(FAKE_GPU, program).stdout
    reason, detail, codes, compiled = json.loads(output.splitlines()[-1])
    assert (reason, detail) == ("compile_failed", "TypeError: 'NoneType' object is not callable")
    assert len(compiled) == 1
    assert "torch.ops.dash_inductor" not in "".join(codes)
    assert "torch.ops.aten._scaled_dot_product_" in codes[1]
