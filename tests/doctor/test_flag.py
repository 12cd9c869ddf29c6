"""Whether the flag is heard: by operators, by attention of other libraries, and by what ran before it was set."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dash_inductor import cli
from dash_inductor.doctor import heard, listed
from dash_inductor.doctor.flag import Flag, kept
from dash_inductor.doctor.listed import OPERATORS, Under
from dash_inductor.doctor.reading import Place, Ran

OPENING = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)

class Take(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
    def forward(self, x):
        return (x * self.weight)[[0, 1, 1]]  # here

def step(model, x):
    model(x).square().sum().backward()

X = torch.randn(8, 4)
"""
PUT = "index_put with accumulate=True"
NEVER = "the program trains and never sets deterministic algorithms"


@pytest.fixture(autouse=True)
def flags_as_before() -> Iterator[None]:
    with kept():
        yield
    torch.backends.cudnn.deterministic = False


def found(tmp_path: Path, capsys: pytest.CaptureFixture[str], program: str) -> dict[str, list[tuple[str, str]]]:
    """Severities and texts of the checks of the flag, by check; `HERE` is the line of the program with that comment."""
    script = tmp_path / "train.py"
    text = OPENING + program
    script.write_text(text)
    lines = text.splitlines()
    marks = {f"{script}:{n}": line.split("# ")[1] for n, line in enumerate(lines, start=1) if "  # " in line}
    torch.use_deterministic_algorithms(False)
    cli.main(["doctor", "--json", "--once", "--stop-after", "0", str(script)])
    said: dict[str, list[tuple[str, str]]] = {}
    for one in json.loads(capsys.readouterr().out)["findings"]:
        what = one["what"]
        assert one["check"] != "program", what  # it ran to its end
        for place, mark in marks.items():
            what = what.replace(f"{place},", f"{mark.upper()},").replace(f"{place} ", f"{mark.upper()} ")
        if one["check"] in ("flag", "flag_at_operators", "flag_at_attention"):
            assert one["advice"] or one["severity"] == "ok"
            said.setdefault(one["check"], []).append((one["severity"], what))
    return said


def test_never_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = found(tmp_path, capsys, "step(Take(), X)")
    assert said == {
        "flag": [("warning", NEVER)],
        "flag_at_operators": [
            (
                "warning",
                f"{PUT} at HERE, in Take ran without deterministic algorithms; under them {Under.VARIANT.value}",
            )
        ],
    }


def test_cudnn_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((severity, what),) = found(tmp_path, capsys, "torch.backends.cudnn.deterministic = True\nstep(Take(), X)")["flag"]
    assert severity == "warning"
    assert what.startswith(f"{NEVER}. It sets torch.backends.cudnn.deterministic, which reaches cuDNN's convolutions")
    assert "no attention, no index_add, scatter or interpolation" in what


@pytest.mark.parametrize(
    "line", ["torch.use_deterministic_algorithms(True)", "torch.set_deterministic_debug_mode('error')"]
)
def test_set_before_the_model(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = found(tmp_path, capsys, f"{line}\nstep(Take(), X)")
    text = f"operators that PyTorch lists as nondeterministic, and that the flag has reached: {PUT}"
    assert said == {"flag_at_operators": [("ok", text)]}


def test_set_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = """
model = torch.compile(Take())
step(model, X)
torch.use_deterministic_algorithms(True)  # late
"""
    said = found(tmp_path, capsys, program)
    ((severity, what),) = said["flag"]
    assert severity == "warning"
    assert what == "deterministic algorithms were set at LATE, after Take was called and a graph was compiled"
    ((severity, what),) = said["flag_at_operators"]
    assert severity == "warning"
    assert what.startswith(f"{PUT} at HERE")
    assert "was compiled without deterministic algorithms" in what


def test_set_after_the_model_was_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch's own modules ask when they run."""
    program = "model = Take()\ntorch.use_deterministic_algorithms(True)\nstep(model, X)"
    assert [severity for severity, _ in found(tmp_path, capsys, program)["flag_at_operators"]] == ["ok"]


def test_set_for_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = """
class Copy(nn.Module):
    def forward(self, x):
        torch.use_deterministic_algorithms(False)
        x = torch.zeros_like(x).index_copy(0, torch.arange(8), x)  # copy
        torch.use_deterministic_algorithms(True)
        return x
torch.use_deterministic_algorithms(True)
step(nn.Sequential(Copy(), Take()), X)
"""
    said = found(tmp_path, capsys, program)
    assert "flag" not in said
    deaf, reached = said["flag_at_operators"]
    assert deaf[1].startswith("index_copy at COPY, in Sequential.0 (Copy) ran without deterministic algorithms")
    assert reached == (
        "ok",
        f"operators that PyTorch lists as nondeterministic, and that the flag has reached: {PUT}",
    )


def test_off_in_the_backward_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = """
torch.use_deterministic_algorithms(True)
loss = Take()(X).sum()
torch.use_deterministic_algorithms(False)
loss.backward()
"""
    ((severity, what),) = found(tmp_path, capsys, program)["flag_at_operators"]
    assert severity == "warning"
    assert what.startswith(f"{PUT} at HERE, in Take ran without")


def test_warn_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = """
torch.use_deterministic_algorithms(True, warn_only=True)
step(Take(), X)
x = torch.zeros(4)
x.put_(torch.tensor([1, 1]), torch.tensor([2., 3.]))  # put
"""
    deaf, reached = found(tmp_path, capsys, program)["flag_at_operators"]
    text = "put_ with accumulate=False at PUT, ran with warn_only=True and kept its nondeterministic kernel"
    assert deaf == ("warning", text.replace("PUT,", "PUT"))
    assert reached[0] == "ok"


def test_compiled_under_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = found(tmp_path, capsys, "torch.use_deterministic_algorithms(True)\nstep(torch.compile(Take()), X)")
    assert [severity for severity, _ in said["flag_at_operators"]] == ["ok"]


def test_nothing_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = found(tmp_path, capsys, "torch.use_deterministic_algorithms(True)\nstep(nn.Linear(4, 4), X)")
    text = "no operator that PyTorch lists as nondeterministic was seen in the first step"
    assert said == {"flag_at_operators": [("ok", text)]}


def test_a_program_that_does_not_train_needs_no_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert found(tmp_path, capsys, "nn.Linear(4, 4)(X)") == {}


def test_modes_of_the_program_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = """
from torch.utils.flop_counter import FlopCounterMode
torch.use_deterministic_algorithms(True)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with FlopCounterMode(display=False) as flops:
    for _ in range(3):
        step(model, X)
        optimizer.step()
assert flops.get_total_flops() == 3 * 2 * 2 * 8 * 4 * 4
from torch._C import _len_torch_dispatch_stack
step(model, X)
"""
    assert [severity for severity, _ in found(tmp_path, capsys, program)["flag_at_operators"]] == ["ok"]


def test_subclasses_of_tensors_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = """
from torch.testing._internal.two_tensor import TwoTensor
torch.use_deterministic_algorithms(True)
class Named(torch.Tensor):
    pass
step(Take(), X.as_subclass(Named))
step(nn.LazyLinear(4), X)
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    step(nn.Linear(4, 4), torch.ones(2, 4))
with torch.device("meta"):
    step(nn.Linear(4, 4), torch.ones(2, 4))
two = TwoTensor(X, X.clone())
take = Take()
(take(two) * 2).sum()
assert take(X.as_subclass(Named)).shape == take(two).shape
"""
    said = found(tmp_path, capsys, program)
    assert [severity for severity, _ in said["flag_at_operators"]] == ["ok"]


FLASH = """
import torch
class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, causal, deterministic):
        ctx.deterministic = deterministic
        return q * 2
    @staticmethod
    def backward(ctx, do):
        return flash_bwd(do, ctx.deterministic), None, None
def flash_attn_func(q, causal=False, deterministic=False):
    return FlashAttnFunc.apply(q, causal, deterministic)
@torch.library.custom_op("stand_in::flash_bwd", mutates_args=())
def flash_bwd(q: torch.Tensor, deterministic: bool = False) -> torch.Tensor:
    return q * 2
"""
ENGINE = """
import torch
class DotProductAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))
    def forward(self, q):
        return q * self.scale
class TransformerLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.core = DotProductAttention()
    def forward(self, q):
        return self.core(q)
"""


@pytest.fixture
def libraries(tmp_path: Path) -> Iterator[None]:
    """Stand-ins with the names of libraries, beside the program; none of them stays loaded."""
    (tmp_path / "flash_attn.py").write_text(FLASH)
    (tmp_path / "transformer_engine.py").write_text(ENGINE)
    yield
    for name in ("flash_attn", "transformer_engine"):
        sys.modules.pop(name, None)


def test_arguments_of_flash_attn(libraries: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = """
from flash_attn import flash_attn_func, flash_bwd
torch.use_deterministic_algorithms(True)
X.requires_grad_()
class Attention(nn.Module):
    def forward(self, x):
        return flash_attn_func(x)  # default
step(Attention(), X)
step(lambda x: flash_attn_func(x, deterministic=True), X)  # told
flash_bwd(X.detach(), True)  # operator
"""
    said = found(tmp_path, capsys, program)["flag_at_attention"]
    assert [severity for severity, _ in said] == ["warning", "ok", "ok"], said
    function = "flash_attn.FlashAttnFunc"
    assert said[0][1].startswith(f"{function} at DEFAULT, in Attention was given deterministic=False: PyTorch's flag")
    assert said[1][1].startswith(f"{function} at TOLD was given deterministic=True; whether its kernel heeds that")
    assert said[2][1].startswith("stand_in::flash_bwd at OPERATOR was given deterministic=True")


def test_layers_of_transformer_engine(
    libraries: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", raising=False)
    program = """
from transformer_engine import TransformerLayer
early = TransformerLayer()  # made
torch.use_deterministic_algorithms(True)
late = TransformerLayer()
step(early, X)  # run
step(late, X)
"""
    deaf, heard_it = found(tmp_path, capsys, program)["flag_at_attention"]
    assert deaf[0] == "warning"
    assert "transformer_engine.TransformerLayer, which runs at" in deaf[1]
    assert "was made at MADE while deterministic algorithms were off" in deaf[1]
    assert heard_it == ("ok", "transformer_engine.TransformerLayer was made after its flag or PyTorch's was set")
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert [s for s, _ in found(tmp_path, capsys, program)["flag_at_attention"]] == ["ok"]


def test_every_listed_operator_exists() -> None:
    for operator in OPERATORS:
        for name in operator.names:
            assert any(hasattr(torch.ops.aten, spelled) for spelled in (name, f"{name}_")), name


def test_the_list_is_that_of_the_documentation() -> None:
    """Every entry of PyTorch's docstring has an operator here, or a reason not to."""
    text = str(torch.use_deterministic_algorithms.__doc__)
    items = text.split("In addition,")[0].split("* :")[1:]
    entries = [item.split("`")[1].rsplit(".", 1)[-1] for item in items if "MPS" not in item or "CUDA" in item]
    ours = " ".join([*(one.listed for one in OPERATORS), *(name for one in OPERATORS for name in one.names)]).lower()
    elsewhere = {
        "gather": "scatter_add",  # the operators of their backwards
        "index_select": "index_add",
        "repeat_interleave": "index_add",
        "__getitem__": "index_put",
        "resize_": "",  # of quantized tensors
        **{f"Conv{transposed}{n}d": "convolution" for transposed in ("", "Transpose") for n in (1, 2, 3)},
    }
    for entry in entries:
        plain = elsewhere.get(entry, entry.lower().rstrip("_"))
        assert plain.rstrip("123d") in ours, entry


CASES = {
    "cuDNN's attention with warn_only": (Under.NOTHING, Flag.WARN_ONLY, False, "which it does not hear"),
    "cuDNN's attention, called directly": (Under.NOTHING, Flag.ON, False, "which it does not hear"),
    "FlashAttention with warn_only": (Under.STRICT, Flag.WARN_ONLY, True, "kept its nondeterministic kernel"),
    "FlashAttention": (Under.STRICT, Flag.ON, False, None),
    "what raises, compiled": (Under.RAISES, Flag.WARN_ONLY, True, None),
    "a variant with warn_only": (Under.VARIANT, Flag.WARN_ONLY, False, None),
}


@pytest.mark.parametrize("name", CASES)
def test_operators_of_gpus(name: str) -> None:
    under, flag, compiled, words = CASES[name]
    operator = next(one for one in OPERATORS if one.under is under)
    said = heard._deaf(Ran(operator, Place("train.py:1"), flag, compiled))
    assert said is None if words is None else said is not None and words in said[0]


def test_composable_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = next(one for one in OPERATORS if one.under is Under.STRICT)
    ran = Ran(flash, Place("train.py:1"), Flag.ON)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for library, told in (("_ROCmFABackend.Ck", True), ("_ROCmFABackend.AOTriton", False)):
        monkeypatch.setattr(torch.backends.cuda, "preferred_rocm_fa_library", lambda library=library: library)
        said = heard._deaf(ran)
        assert (said is not None and "Composable Kernel" in said[0]) is told


def test_convolutions_hear_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = Ran(listed.CONVOLUTION, Place("train.py:1"), Flag.OFF)
    assert heard._deaf(ran) is not None
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert heard._deaf(ran) is None


class _Cuda:
    """What stands for a tensor on a GPU."""

    dtype = torch.float32
    is_sparse = False


def on_a_gpu(name: str, *args: object, in_graph: bool = False) -> str | None:
    packet = getattr(torch.ops.aten, name.split(".")[0])
    operator = getattr(packet, [*name.split("."), "default"][1])
    device = lambda value: "cuda" if isinstance(value, _Cuda) else ""  # noqa: E731
    entry = listed.listed(operator, args, {}, device, in_graph)
    return None if entry is None else entry.listed


def test_arguments_decide() -> None:
    x = _Cuda()
    assert on_a_gpu("scatter.value", x, 0, x, 1.0) is None
    assert on_a_gpu("scatter.src", x, 0, x, x) == "scatter of a tensor"
    assert on_a_gpu("scatter_reduce.two", x, 0, x, x, "amax") is None
    assert on_a_gpu("scatter_reduce_.two", x, 0, x, x, "mean") == "scatter_reduce"
    assert on_a_gpu("median", x) is None
    assert on_a_gpu("median.dim", x, 0) == "median with indices"
    assert on_a_gpu("index_put", x, [x], x, True) is None
    assert on_a_gpu("index_put", x, [x], x, True, in_graph=True) == PUT
    assert on_a_gpu("cumsum", x, 0) == "cumsum"
    assert on_a_gpu("bincount", x) is None
    assert on_a_gpu("mm", x, x) is None
