"""Backwards in shared libraries: what one is handed, and what the benchmark says of one that does not fit.

The library is made here from the header in docs/benchmarks.md; it computes nothing, and writes down what it was given.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import backward, contenders, forward, library
from benchmarks.common import NotRun
from benchmarks.contenders import DASH_FORK, FA3
from benchmarks.library import Arguments
from benchmarks.shapes import CAUSAL, FULL, WINDOW, Shape
from benchmarks.timing import Timing
from dash_inductor.model import Band

from ..support.snippets import ROOT, snippets

STREAM = 0x5EED
PLAIN = Shape("test", 2, 4, 4, 40, 64, 64, FULL)
SOURCE = """
#include "attention.h"

struct attention_backward seen;
struct attention_forward seen_forward;

int64_t attention_forward_workspace(const struct attention_forward *call) {
    seen_forward = *call;
    return call->head_dim == 64 ? 8 : -1;
}

int32_t attention_forward(const struct attention_forward *call) {
    seen_forward = *call;
    for (int64_t i = 0; i < call->q_heads * call->tokens; i++) call->lse[i] = 5;
    return call->scale < 0 ? 77 : 0;
}

int64_t attention_backward_workspace(const struct attention_backward *call) {
    seen = *call;
    return call->head_dim == 64 ? 1000 * call->q_heads + call->deterministic : -1;
}

int32_t attention_backward(const struct attention_backward *call) {
    seen = *call;
    struct strided gradients[] = {call->dq, call->dk, call->dv};
    int64_t heads[] = {call->q_heads, call->kv_heads, call->kv_heads};
    for (int i = 0; i < 3; i++)
        for (int64_t b = 0; b < call->batch; b++)
            for (int64_t s = 0; s < call->q_len; s++)
                for (int64_t h = 0; h < heads[i]; h++)
                    for (int64_t d = 0; d < 64; d++) { /* 1.0, 2.0 and 3.0 in bf16 */
                        const struct strided *g = &gradients[i];
                        uint16_t value[] = {0x3f80, 0x4000, 0x4040};
                        ((uint16_t *)g->data)[b * g->batch + s * g->length + h * g->head + d] = value[i];
                    }
    for (int64_t i = 0; i < 1000 * call->q_heads; i++) ((char *)call->workspace)[i] = 1;
    return call->scale < 0 ? 77 : 0;
}
"""
VERSION = 'const char *version(void) { return "nothing 0123abc"; }'
Build = Callable[..., str]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compiles C below the documented header; returns the library's path."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    (header,) = [snippet for snippet in snippets(page) if snippet.language == "c"]

    def compiled(*sources: str) -> str:
        folder = tmp_path_factory.mktemp("library")
        (folder / header.argument).write_text(header.code, encoding="utf-8")
        (folder / "it.c").write_text("\n".join(sources), encoding="utf-8")
        command = ["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", "libit.so", "it.c"]
        subprocess.run(command, cwd=folder, check=True)
        return str(folder / "libit.so")

    return compiled


@pytest.fixture(scope="session")
def whole(build: Build) -> str:
    return build(SOURCE, VERSION)


@pytest.fixture
def named(whole: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """FA3's library is the one above; forwards and streams need no GPU.  It returns what the library saw last."""
    monkeypatch.setenv(FA3, whole)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(contenders, "forward", fake_forward)
    yield lambda: Arguments.in_dll(ctypes.CDLL(whole), "seen")
    library._load.cache_clear()


LAST: dict[str, Tensor] = {}


def fake_forward(shape: Shape, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Out and a log-sum-exp whose addresses a test can ask for; out has a row of its own layout."""
    out = torch.zeros(shape.batch, shape.q_heads, shape.length, shape.value_dim + 8, dtype=torch.bfloat16)
    LAST["out"] = out[..., : shape.value_dim]
    LAST["lse"] = torch.zeros(shape.batch, shape.q_heads, shape.length)
    return LAST["out"], LAST["lse"], torch.empty(0), torch.empty(0)


def inputs(shape: Shape, contiguous: bool = False) -> tuple[Tensor, ...]:
    """q, k, v, do, heads interleaved or not."""
    sizes = [shape.q_heads, shape.kv_heads, shape.kv_heads, shape.q_heads]
    dims = [shape.head_dim, shape.head_dim, shape.value_dim, shape.value_dim]
    tensors = [
        torch.zeros(shape.batch, shape.length, h, d, dtype=torch.bfloat16).transpose(1, 2)
        for h, d in zip(sizes, dims, strict=True)
    ]
    return tuple(t.contiguous() if contiguous else t for t in tensors)


def strided(tensor: Tensor) -> tuple[int, ...]:
    batch, head, length, _ = tensor.stride()
    return tensor.data_ptr(), batch, length, head


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_pointers_strides_and_sizes(named: Callable[[], Any], kv_heads: int, contiguous: bool) -> None:
    shape = Shape("test", 2, 4, kv_heads, 40, 64, 64, FULL)
    tensors = inputs(shape, contiguous)
    gradients = contenders.CONTENDERS["FA3 nondet"](shape, tensors)()
    seen = named()
    names = ("q", "k", "v", "dout", "dq", "dk", "dv", "out")
    for name, tensor in zip(names, (*tensors, *gradients, LAST["out"]), strict=True):
        got = getattr(seen, name)
        assert (got.data, got.batch, got.length, got.head) == strided(tensor), name
    assert seen.lse == LAST["lse"].data_ptr()
    assert seen.workspace
    assert seen.stream == STREAM
    assert seen.scale == shape.scale
    assert (seen.batch, seen.q_heads, seen.kv_heads, seen.q_len, seen.kv_len) == (2, 4, kv_heads, 40, 40)
    assert (seen.head_dim, seen.value_dim) == (64, 64)
    for value, gradient, like in zip((1, 2, 3), gradients, tensors[:3], strict=True):
        assert gradient.shape == like.shape
        assert bool((gradient == value).all())


@pytest.mark.parametrize("packed", [False, True])
def test_a_forward(named: Callable[[], Any], whole: str, packed: bool) -> None:
    """Of sequences as `benchmarks.forward` asks for it, and of packed documents as `benchmarks.masks` does."""
    shape = Shape("test", 1, 4, 2, 40, 64, 64, CAUSAL)
    q, k, v, do = inputs(shape)
    if packed:
        starts = torch.tensor([0, 10, 40], dtype=torch.int32)
        call = library.named(FA3).forward((q, k, v), CAUSAL, shape.scale, "documents", starts, 30)
    else:
        call = forward.CONTENDERS["FA3"](shape, (q, k, v, do))
    out, lse = call()
    seen = library.ForwardArguments.in_dll(ctypes.CDLL(whole), "seen_forward")
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        got = getattr(seen, name)
        assert (got.data, got.batch, got.length, got.head) == strided(tensor), name
    assert out.shape == q.shape
    assert bool((lse == 5).all())
    assert (seen.lse, seen.stream, seen.scale) == (lse.data_ptr(), STREAM, shape.scale)
    length, number = (30, 2) if packed else (40, 1)
    assert (seen.batch, seen.q_heads, seen.kv_heads, seen.q_len, seen.kv_len) == (number, 4, 2, length, length)
    assert (seen.head_dim, seen.value_dim, seen.tokens, seen.window_left, seen.window_right) == (64, 64, 40, length, 0)
    assert (seen.starts is not None) == packed
    with pytest.raises(NotRun, match="takes no forward of wide"):
        library.named(FA3).forward(tuple(t.repeat(1, 1, 1, 2) for t in (q, k, v)), FULL, 1.0, "wide")
    with pytest.raises(RuntimeError, match="a forward of negative ended with error 77"):
        library.named(FA3).forward((q, k, v), FULL, -1.0, "negative")()


@pytest.mark.parametrize(
    ("mask", "left", "right"),
    [(FULL, 40, 40), (CAUSAL, 40, 0), (WINDOW, 1023, 0), (Band(-3, 5), 5, 3), (Band(2), 40, -2)],
)
def test_windows(named: Callable[[], Any], mask: Band, left: int, right: int) -> None:
    shape = Shape("test", 1, 2, 2, 40, 64, 64, mask)
    contenders.CONTENDERS["FA3 det"](shape, inputs(shape))()
    assert (named().window_left, named().window_right) == (left, right)
    visible = {(i, j) for i in range(40) for j in range(40) if mask.visible(i, j, 40, 40)}
    assert visible == {(i, j) for i in range(40) for j in range(40) if i - left <= j <= i + right}


@pytest.mark.parametrize(("name", "deterministic"), [("FA3 nondet", 0), ("FA3 det", 1), ("DASH fork det", 1)])
def test_deterministic(
    named: Callable[[], Any], whole: str, monkeypatch: pytest.MonkeyPatch, name: str, deterministic: int
) -> None:
    monkeypatch.setenv(DASH_FORK, whole)
    contenders.CONTENDERS[name](PLAIN, inputs(PLAIN))()
    assert named().deterministic == deterministic


def test_calls_share_no_memory(named: Callable[[], Any]) -> None:
    """The results of one call stay as they are while others run."""
    call = contenders.CONTENDERS["FA3 det"](PLAIN, inputs(PLAIN))
    first, second = call(), call()
    assert not {t.data_ptr() for t in first} & {t.data_ptr() for t in second}


def refusal(name: str, shape: Shape = PLAIN) -> str:
    with pytest.raises(NotRun) as caught:
        contenders.CONTENDERS[name](shape, inputs(shape))
    return str(caught.value)


@pytest.mark.usefixtures("named")
def test_what_is_not_there(build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is told in words: no name, no file, no library, and a library without the functions."""
    monkeypatch.delenv(DASH_FORK, raising=False)
    assert refusal("DASH fork det") == f"{DASH_FORK} names no library; docs/benchmarks.md has the interface"
    monkeypatch.setenv(FA3, str(tmp_path / "libnone.so"))
    assert re.match(r"libnone.so cannot be loaded: .*No such file", refusal("FA3 det"))
    (tmp_path / "libtext.so").write_text("no library")
    monkeypatch.setenv(FA3, str(tmp_path / "libtext.so"))
    assert re.match(r"libtext.so cannot be loaded: .*(invalid ELF header|too short)", refusal("FA3 det"))
    for there, missing in (
        ("attention_backward_workspace", "attention_backward"),
        ("attention_backward", "attention_backward_workspace"),
    ):
        monkeypatch.setenv(FA3, build(f"int {there}(const void *call) {{ return 0; }}"))
        assert refusal("FA3 det") == f"libit.so has no function {missing}; docs/benchmarks.md has the interface"


@pytest.mark.usefixtures("named")
def test_what_it_does_not_take() -> None:
    shape = Shape("test", 1, 2, 2, 40, 128, 128, CAUSAL)
    for name, kind in (("FA3 nondet", "non-deterministic"), ("FA3 det", "deterministic")):
        assert refusal(name, shape) == f"libit.so (nothing 0123abc) takes no {kind} backward of {shape.name}"
    by_dims = Shape("test", 1, 2, 2, 40, 64, 64, CAUSAL)
    *rest, do = inputs(by_dims)
    with pytest.raises(NotRun, match=re.escape("last stride is 1, but one has strides (10240, 128, 256, 2)")):
        contenders.CONTENDERS["FA3 det"](
            by_dims, (*rest, torch.zeros(1, 40, 2, 128, dtype=do.dtype).transpose(1, 2)[..., ::2])
        )


@pytest.mark.usefixtures("named")
def test_error_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shape, "scale", -1.0)
    call = contenders.CONTENDERS["FA3 det"](PLAIN, inputs(PLAIN))
    with pytest.raises(RuntimeError, match=re.escape(f"a deterministic backward of {PLAIN.name} ended with error 77")):
        call()


@pytest.mark.usefixtures("named")
def test_versions(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DASH_FORK, raising=False)
    assert contenders.versions().get(FA3) == "nothing 0123abc"
    assert DASH_FORK not in contenders.versions()
    monkeypatch.setenv(DASH_FORK, build(SOURCE))
    assert contenders.versions()[DASH_FORK] == "no version"


def test_without_flash_attention_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert refusal("FA4 det").startswith("FlashAttention-4 (the package flash-attn-4) is not there: ")
    with pytest.raises(NotRun, match="the package flash-attn-4"):
        forward.CONTENDERS["FA4"](PLAIN, inputs(PLAIN))


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(0, 9)], ids=str)
def test_flash_attention_4(mask: Band, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function gets tensors, mask and scale as it wants them; it stands in the place of the package here."""
    asked = []

    def flash_attn_func(
        q: Any, k: Any, v: Any, *, causal: bool, window_size: Any, softmax_scale: float, **rest: Any
    ) -> Any:
        asked.append(rest)
        i, j = torch.arange(40)[:, None], torch.arange(40)
        left, right = (40 if side is None else side for side in window_size)
        hidden = (causal & (j > i)) | (i - j > left) | (j - i > right)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = ((q @ k.transpose(2, 3)).float() * softmax_scale).masked_fill(hidden, -math.inf)
        return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2), scores.logsumexp(-1)

    module = types.ModuleType("flash_attn.cute")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    shape = Shape("test", 1, 2, 2, 40, 64, 64, mask)
    q, k, v, do = (t.float() for t in inputs(shape))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    seen = torch.tensor([[mask.visible(a, b, 40, 40) for b in range(40)] for a in range(40)])
    a, b, c = leaves
    expected = torch.nn.functional.scaled_dot_product_attention(a, b, c, seen, scale=shape.scale)
    gradients = torch.autograd.grad(expected, leaves, do)
    for name in ("FA4 nondet", "FA4 det"):
        torch.testing.assert_close(contenders.CONTENDERS[name](shape, (q, k, v, do))(), gradients)
    out, _ = forward.CONTENDERS["FA4"](shape, (q, k, v, do))()
    torch.testing.assert_close(out, expected)
    assert [rest["deterministic"] for rest in asked] == [False, True, False]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`backward.measure` of contenders of the test's own, by name, without a GPU: all gradients 1, in 10 ms ± 1 %."""
    tensors = (torch.ones(4),) * 3
    contestants: dict[str, Any] = {
        "FA3 det": lambda shape, inputs: lambda: tensors,
        "dash": lambda shape, inputs: lambda: tensors,
    }
    monkeypatch.setattr(backward, "CONTENDERS", contestants)
    monkeypatch.setattr(backward, "take_turns", lambda runs, device: {name: Timing(10.0, 9.9, 10.1) for name in runs})
    monkeypatch.setattr(backward.common, "watchdog", lambda seconds: None)
    monkeypatch.setattr(backward, "arch", lambda: "sm_90")
    monkeypatch.setattr(Shape, "tensors", lambda self: inputs(self))
    return contestants


def test_row(on_cpu: dict[str, Any]) -> None:
    row = backward.measure(PLAIN, ["FA3 det", "dash"])
    assert row["vs FA3 det"] == 1
    assert row["equal"] is True
    assert row["difference"] == 0
    assert row["quartiles"]["FA3 det"] == (9.9, 10.1)
    assert backward.cell(row, "FA3 det") == f"{PLAIN.flops / 1e10:.1f} ±1.0%"
    assert backward.cell(row, "vs FA3 det") == 1
    assert backward.faults([row]) == []


@pytest.mark.parametrize(("wrong", "shown"), [(1.5, "0.5"), (math.nan, "nan")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_wrong_gradients_are_seen(on_cpu: dict[str, Any], wrong: float, shown: str, place: int) -> None:
    gradients = [torch.ones(4) for _ in range(3)]
    gradients[place] *= wrong
    on_cpu["FA3 nondet"] = lambda shape, inputs: lambda: tuple(gradients)
    row = backward.measure(PLAIN, ["FA3 det", "FA3 nondet", "dash"])
    assert backward.faults([row]) == [f"{PLAIN.name}: the gradients of FA3 nondet differ from dash's by {shown}"]
    assert row["difference"] == pytest.approx(row["differences"]["FA3 nondet"], nan_ok=True)


def test_other_bits_are_seen_where_the_same_are_promised(on_cpu: dict[str, Any]) -> None:
    calls = iter(range(100))
    noisy = lambda shape, inputs: lambda: (torch.ones(4) + 1e-6 * next(calls),) * 3  # noqa: E731
    on_cpu["FA3 det"] = on_cpu["FA3 nondet"] = noisy
    row = backward.measure(PLAIN, ["FA3 nondet", "FA3 det", "dash"])
    assert row["same bits"] == {"FA3 det": False, "dash": True}
    assert backward.faults([row]) == [f"{PLAIN.name}: FA3 det is not deterministic"]


def test_dash_that_does_not_run_is_seen(on_cpu: dict[str, Any]) -> None:
    def fails(shape: Shape, inputs: Any) -> Any:
        raise AssertionError

    on_cpu["dash"] = fails
    row = backward.measure(PLAIN, ["FA3 det", "dash"])
    assert row["not run"] == {"dash": "AssertionError: no message"}
    assert row["difference"] is None
    assert backward.faults([row]) == [f"{PLAIN.name}: dash did not run"]


def test_table_and_results(
    on_cpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Facts common to all shapes are said once; a contender that ran nowhere has no column; wrong ones end it."""

    def absent(shape: Shape, inputs: Any) -> Any:
        raise NotRun("it is not there")

    def only_full(shape: Shape, inputs: Any) -> Any:
        if shape.mask != FULL:
            raise NotRun("full only")
        return lambda: (torch.zeros(4),) * 3

    on_cpu.update({"FA4 det": absent, "flex": only_full})
    monkeypatch.setattr(Shape, "tensors", lambda self: ())
    monkeypatch.setattr(backward.lowering, "register", lambda: None)
    monkeypatch.setattr(backward.common, "RESULTS", tmp_path)
    monkeypatch.setattr(backward, "versions", lambda: {FA3: "nothing 0123abc"})
    only = [f"regular:d64:{mask}:b16h32:s1024" for mask in ("full", "causal")]
    monkeypatch.setattr(sys, "argv", ["backward", "--name", "it", "--only", *only, "--columns", *on_cpu])
    with pytest.raises(SystemExit) as ended:
        backward.main()
    assert str(ended.value) == f"{only[0]}: the gradients of flex differ from dash's by 1"
    printed = capsys.readouterr().out.splitlines()
    assert f"flex not run at ['{only[1]}']: NotRun: full only" in printed
    assert [line for line in printed if line.startswith("FA4 det")] == ["FA4 det not run: NotRun: it is not there"]
    (head,) = [line for line in printed if line.startswith("shape ")]
    assert re.split("  +", head) == ["shape", "equal", "FA3 det", "dash", "flex", "vs FA3 det", "vs flex", "difference"]
    assert printed[printed.index(head) + 1].count("±1.0%") == 3
    results = json.loads((tmp_path / "it.json").read_text())
    assert results["conditions"]["libraries"] == {FA3: "nothing 0123abc"}
    assert [row["quartiles"]["dash"] for row in results["rows"]] == [[9.9, 10.1]] * 2
    assert [row["differences"] for row in results["rows"]] == [{"FA3 det": 0.0, "flex": 1.0}, {"FA3 det": 0.0}]
