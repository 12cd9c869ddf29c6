"""The faults that the doctor sees while a program runs, each in a program with it and in one without any."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dash_inductor import cli
from dash_inductor.doctor import Severity
from dash_inductor.doctor.looking import original
from dash_inductor.doctor.unwritten import reads_unwritten

aten = torch.ops.aten

OPENING = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
Q = torch.randn(1, 2, 64, 16, requires_grad=True)

def attend(q, dropout_p=0.0):
    return F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=dropout_p)

def step(fn, *args):
    fn(*args).sum().backward()

"""

CHECKS = ("eager_attention", "flag_inside_a_forward", "seed", "drawn_again")


def found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], program: str, opening: str = OPENING
) -> dict[str, list[dict[str, str]]]:
    """The findings of the checks of this file, by check; `HERE` stands for the program's line with that comment."""
    script = tmp_path / "train.py"
    text = opening + program
    script.write_text(text)
    here = [f"{script}:{number}" for number, line in enumerate(text.splitlines(), start=1) if line.endswith("# here")]
    status = cli.main(["doctor", "--json", str(script)])
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == status
    problems: dict[str, list[dict[str, str]]] = {}
    for finding in document["findings"]:
        assert finding["check"] != "program", finding  # it ran to its end
        if finding["check"] in CHECKS:
            assert finding["advice"]
            finding["what"] = finding["what"].replace(here[0], "HERE") if here else finding["what"]
            problems.setdefault(finding["check"], []).append(finding)
    return problems


def the_only(problems: dict[str, list[dict[str, str]]], check: str, severity: Severity) -> str:
    """The text of the only finding."""
    assert list(problems) == [check], problems
    (finding,) = problems[check]
    assert finding["severity"] == severity.name.lower()
    return finding["what"]


NOTHING_WRONG = {
    "compiled": "step(torch.compile(attend), Q)",
    "compiled module": """
class Model(nn.Module):
    def forward(self, q):
        return attend(q)
model = torch.compile(Model())
step(model, Q)
with torch.no_grad():
    model(Q)
""",
    "eager, computed by dash_inductor": """
import dash_inductor
from dash_inductor.eager.sdpa import in_place

class Model(nn.Module):
    def forward(self, q):
        return attend(q)

dash_inductor.config.cpu = "reference"
model = Model()
in_place([model])
step(model, Q)
assert [record.status for record in dash_inductor.sites()] == ["replaced"]
""",
    "eager without the flag": """
torch.use_deterministic_algorithms(False)
step(attend, Q)
""",
    "eager evaluation": """
with torch.no_grad():
    attend(Q)
torch.use_deterministic_algorithms(False)
attend(Q.detach())
""",
    "the flag outside of a forward": """
torch.use_deterministic_algorithms(False)
step(nn.Linear(16, 16), Q)
torch.use_deterministic_algorithms(True)
step(torch.compile(attend), Q)
""",
    "the flag as it is, inside a forward": """
class Model(nn.Module):
    def forward(self, q):
        torch.use_deterministic_algorithms(True)
        return q * 2
step(Model(), Q)
step(torch.compile(Model()), Q)
""",
    "dropout": "step(torch.compile(lambda q: F.dropout(attend(q), 0.1)), Q)",
    "dropout that is recomputed": """
step(torch.compile(lambda q: checkpoint(lambda q: F.dropout(attend(q), 0.1), q, use_reentrant=False)), Q)
""",
    "a budget without dropout": """
with torch._functorch.config.patch(activation_memory_budget=0.0):
    step(torch.compile(lambda q: attend(q).sin().cos()), Q)
""",
}


@pytest.mark.parametrize("name", NOTHING_WRONG)
def test_nothing_wrong(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert found(tmp_path, capsys, NOTHING_WRONG[name]) == {}


def test_attention_is_as_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.nn.functional.scaled_dot_product_attention, torch.use_deterministic_algorithms, torch.manual_seed
    found(tmp_path, capsys, "step(attend, Q)")
    after = torch.nn.functional.scaled_dot_product_attention, torch.use_deterministic_algorithms, torch.manual_seed
    assert after == before
    assert [original(function) for function in after] == list(before)


EAGER = {
    "eager": ("step(lambda q: F.scaled_dot_product_attention(q, q, q), Q)  # here", ""),
    "packed": (
        """
from torch.nn.attention.varlen import varlen_attn
try:
    q, bounds = torch.zeros(4, 1, 16, requires_grad=True), torch.tensor([0, 4])
    varlen_attn(q, q, q, bounds, bounds, 4, 4)  # here
except Exception:  # it runs on GPUs alone
    pass
""",
        "",
    ),
    "module of PyTorch": (
        """
model = nn.MultiheadAttention(16, 2, batch_first=True)
x = torch.randn(1, 8, 16)
step(lambda x: model(x, x, x, need_weights=False)[0], x)  # here
""",
        "",
    ),
    "graph break": (
        """
def broken(q):
    for _ in range(2):
        torch._dynamo.graph_break()  # in a loop, so that all of the function is left out
        q = F.scaled_dot_product_attention(q, q, q)  # here
    return q
step(torch.compile(broken), Q)
""",
        ", behind a graph break of a compiled function",
    ),
    "disabled": (
        """
@torch._dynamo.disable
def disabled(q):
    return F.scaled_dot_product_attention(q, q, q)  # here
step(torch.compile(lambda q: disabled(q * 2)), Q)
""",
        ", inside torch._dynamo.disable",
    ),
}


@pytest.mark.parametrize("name", EAGER)
def test_attention_in_eager_mode(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, around = EAGER[name]
    what = the_only(found(tmp_path, capsys, program), "eager_attention", Severity.WARNING)
    module = ", in MultiheadAttention" if name == "module of PyTorch" else ""
    assert what.startswith(f"the attention at HERE ran in eager mode{around}{module}: dash_inductor did not see it.")


LIBRARIES = {
    "flash_attn/__init__.py": """
import torch
class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        return q * k * v
    @staticmethod
    def backward(ctx, do):
        return do, do, do
class LayerNormFn(FlashAttnFunc): pass
FlashAttnFunc.__module__ = LayerNormFn.__module__ = "flash_attn.flash_attn_interface"
def flash_attn_func(q, k, v):
    return FlashAttnFunc.apply(q, k, v)
def layer_norm(q):
    return LayerNormFn.apply(q, q, q)
""",
    "flash_attn/cute.py": """
import torch
from . import FlashAttnFunc as Two
class FlashAttnFunc(Two): pass
@torch._dynamo.disable
def flash_attn_func(q, k, v):
    return FlashAttnFunc.apply(q, k, v)
""",
    "xformers.py": """
import flash_attn
class _fMHA(flash_attn.FlashAttnFunc): pass
_fMHA.__module__ = __name__
def memory_efficient_attention(q, k, v):
    return _fMHA.apply(q, k, v)
""",
    "transformer_engine.py": """
import torch, flash_attn
class DotProductAttention(torch.nn.Module):
    @torch._dynamo.disable
    def forward(self, q):
        return flash_attn.flash_attn_func(q, q, q)
class MultiheadAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.core = DotProductAttention()
        self.projection = torch.nn.Linear(16, 16)
    def forward(self, q):
        return self.core(self.projection(q))
class TransformerLayer(MultiheadAttention):
    def forward(self, q):
        return F.silu(super().forward(q))
F = torch.nn.functional
""",
}
"""Stand-ins: the names of the libraries, and no attention."""

OUTSIDE = """
from flash_attn import FlashAttnFunc, flash_attn_func, layer_norm
from flash_attn.cute import flash_attn_func as flash_attn_4
from transformer_engine import MultiheadAttention, TransformerLayer
from xformers import memory_efficient_attention

class MyAttention(FlashAttnFunc): pass
@torch.library.custom_op("my_library::attn_forward", mutates_args=())
def operator(q: torch.Tensor) -> torch.Tensor:
    return q * 2
operator.register_fake(torch.empty_like)
operator.register_autograd(lambda ctx, do: do * 2)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = MultiheadAttention()
    def forward(self, q):
        return self.attend(q * 2)  # layer
class Four(nn.Module):
    def forward(self, q):
        return flash_attn_4(q * 2, q, q)  # four
X = Q.detach()
step(nn.Sequential(Block(), nn.ReLU()), X)
step(nn.Sequential(Block(), nn.ReLU()), X)
compiled = torch.compile(TransformerLayer())
step(lambda q: compiled(q), X)  # compiled layer
step(lambda q: flash_attn_func(q, q, q), Q)  # two
step(torch.compile(Four()), Q)
step(lambda q: memory_efficient_attention(q, q, q), Q)  # xformers
step(lambda q: MyAttention.apply(q, q, q), Q)  # mine
step(lambda q: operator(q), Q)  # operator
# None of the rest is attention in eager mode, with gradients.
step(torch.compile(lambda q: operator(flash_attn_func(q, q.clone(), q.clone()))), Q)
step(layer_norm, Q)
with torch.no_grad():
    flash_attn_func(Q, Q, Q)
torch.use_deterministic_algorithms(False)
step(flash_attn_func, Q, Q, Q)
"""

TOLD = {
    "two": ("flash_attn.flash_attn_interface.FlashAttnFunc", "", "deterministic=True", "deterministic=True"),
    "four": (
        "flash_attn.cute.FlashAttnFunc",
        ", inside torch._dynamo.disable, in Four",
        "deterministic=True",
        "Dynamo cannot trace it",
    ),
    "xformers": ("xformers._fMHA", "", "depends on the kernel", "F.scaled_dot_product_attention"),
    "mine": ("__main__.MyAttention", "", "is not known", "F.scaled_dot_product_attention"),
    "operator": ("my_library_attn_forward_default", "", "is not known", "F.scaled_dot_product_attention"),
    "layer": (
        "transformer_engine.MultiheadAttention",
        ", in Sequential.0.attend (MultiheadAttention)",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
        "before the model is made",
    ),
    "compiled layer": (
        "transformer_engine.TransformerLayer",
        ", behind a graph break of a compiled function, in TransformerLayer",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
        "before the model is made",
    ),
}
"""Line, and what is told of it: what runs, what is around it, what is known, and what to do."""


@pytest.fixture
def libraries(tmp_path: Path) -> Iterator[None]:
    """Stand-ins for `LIBRARIES` beside the program; none of them stays loaded."""
    for name, source in LIBRARIES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    yield
    roots = {Path(name).parts[0].removesuffix(".py") for name in LIBRARIES}
    for name in [name for name in sys.modules if name.split(".")[0] in roots]:
        del sys.modules[name]


def test_attention_of_libraries(libraries: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problems = found(tmp_path, capsys, OUTSIDE)
    lines = (OPENING + OUTSIDE).splitlines()
    texts = {finding["what"]: finding["advice"] for finding in problems.pop("eager_attention")}
    assert problems == {}
    for place, (name, around, known, advice) in TOLD.items():
        (number,) = (n for n, line in enumerate(lines, start=1) if line.endswith(f"# {place}"))
        begins = f"the attention {name} at {tmp_path / 'train.py'}:{number} ran in eager mode{around}: dash_inductor"
        (what,) = (text for text in texts if text.startswith(begins))
        assert known in what
        assert advice in texts[what]
        assert f"`{lines[number - 1].strip()}`: " in texts[what]
    assert len(texts) == len(TOLD), list(texts)


def test_a_line_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = found(tmp_path, capsys, "for _ in range(3): step(attend, Q)")["eager_attention"]
    assert f"train.py:{OPENING[: OPENING.index('is_causal')].count(chr(10)) + 1} " in one["what"]


SWITCHED = """
class Model(nn.Module):
    def forward(self, q):
        torch.use_deterministic_algorithms(False)  # EAGER
        q = q.sin()  # COMPILED
        torch.use_deterministic_algorithms(True)
        return q
"""


def test_the_flag_inside_a_forward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problems = found(tmp_path, capsys, SWITCHED.replace("EAGER", "here") + "step(Model(), Q)")
    off, on = [finding["what"] for finding in problems.pop("flag_inside_a_forward")]
    assert off == "HERE switches deterministic algorithms off inside the forward of Model"
    assert on.endswith(" switches deterministic algorithms on inside the forward of Model")
    assert problems == {}


@pytest.mark.parametrize("model", ["Model()", "nn.Sequential(Model())"])
def test_the_flag_inside_a_compiled_forward(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = SWITCHED.replace("COMPILED", "here") + f"step(torch.compile({model}), Q)"
    problems = found(tmp_path, capsys, program)
    assert [finding["what"] for finding in problems.pop("flag_inside_a_forward")] == [
        "a compiled function switches deterministic algorithms off before HERE",
        "a compiled function switches deterministic algorithms on before its end",
    ]
    assert problems == {}


WITHOUT_A_SEED = OPENING.replace("torch.manual_seed(0)\n", "")
SEEDED: dict[str, tuple[str, bool]] = {
    "not at all": ("", False),
    "manual_seed": ("torch.manual_seed(1)", True),
    "manual_seed of its module": ("torch.random.manual_seed(1)", True),
    "a state that was saved": ("torch.set_rng_state(torch.Generator().manual_seed(1).get_state())", True),
    "another generator": ("torch.Generator().manual_seed(1)", False),
    "numpy alone": ("import numpy; numpy.random.seed(0)", False),
    "what PyTorch puts back": ("checkpoint(lambda q: q.sin(), Q, use_reentrant=False).sum().backward()", False),
}


@pytest.mark.parametrize("name", SEEDED)
def test_seed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, seeded = SEEDED[name]
    problems = found(tmp_path, capsys, program, WITHOUT_A_SEED)
    if seeded:
        assert problems == {}
    else:
        what = the_only(problems, "seed", Severity.WARNING)
        assert (
            what == f"{tmp_path / 'train.py'} draws random numbers and seeds no generator: they are others in every run"
        )


def test_a_program_without_random_numbers_needs_no_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opening = WITHOUT_A_SEED.replace("torch.randn(1, 2, 64, 16", "torch.ones(1, 2, 64, 16")
    assert found(tmp_path, capsys, "step(torch.compile(attend), Q)", opening) == {}


DRAWN_AGAIN = """
def layer(q):
    q = F.dropout(q @ q.mT @ q, 0.1)  # here
    return attend(q)
torch._functorch.config.activation_memory_budget = {budget}
step(torch.compile(layer), Q)
"""


@pytest.mark.parametrize("budget", ["0.0", "1.0"])
def test_dropout_that_the_backward_draws_again(budget: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        problems = found(tmp_path, capsys, DRAWN_AGAIN.format(budget=budget))
    if budget == "1.0":
        assert problems == {}
        return
    what = the_only(problems, "drawn_again", Severity.ERROR)
    assert what.startswith("the backward draws the random numbers of HERE again")
    assert "activation_memory_budget=0.0" in what


def test_exit_status_of_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    compiled = "import dash_inductor\ndash_inductor.config.cpu = 'reference'\n" + OPENING
    programs = {
        0: "step(torch.compile(attend), Q)",
        1: "step(torch.compile(attend), Q); step(attend, Q)",
        2: DRAWN_AGAIN.format(budget="0.0"),
    }
    for status, program in programs.items():
        script.write_text(compiled + program)
        with torch._functorch.config.patch(activation_memory_budget=1.0):
            assert cli.main(["doctor", "--json", str(script)]) == status
        capsys.readouterr()


@pytest.mark.parametrize("seed", ["", "SEED(0)", "SEED(STATE)"])
@pytest.mark.parametrize("generator", ["random", "numpy.random"])
def test_other_generators(
    generator: str, seed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CHECKS", ("other_seeds", "data_loader_workers"))
    put, get = ("setstate", "getstate") if generator == "random" else ("set_state", "get_state")
    seeding = seed.replace("SEED(STATE)", f"{generator}.{put}({generator}.{get}())").replace(
        "SEED", f"{generator}.seed"
    )
    program = f"import numpy, random\n{seeding}\nstep(torch.compile(attend), Q * {generator}.uniform(1, 2))\n"
    problems = found(tmp_path, capsys, program)
    if seed:
        assert problems == {}
    else:
        assert f"draws from {generator} and does not seed it" in the_only(problems, "other_seeds", Severity.WARNING)


OWN_GENERATORS = {
    "default_rng()  # here": True,
    "default_rng(None)  # here": True,
    "default_rng(3)": False,
    "default_rng(seed=3)": False,
}


@pytest.mark.parametrize("call", OWN_GENERATORS)
def test_generators_of_numpy_without_a_seed(
    call: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CHECKS", ("other_seeds",))
    problems = found(tmp_path, capsys, f"import numpy\nrng = numpy.random.{call}\nstep(torch.compile(attend), Q)\n")
    if OWN_GENERATORS[call]:
        what = the_only(problems, "other_seeds", Severity.WARNING)
        assert what == "HERE makes a generator of NumPy without a seed: its numbers are others in every run"
    else:
        assert problems == {}


WORKERS = {
    "num_workers=1": True,
    "num_workers=0": False,
    "num_workers=1, generator=torch.Generator().manual_seed(0)": False,
    "num_workers=1, worker_init_fn=torch.manual_seed": False,
}


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("arguments", WORKERS)
def test_workers_of_data_loaders(
    arguments: str, seeded: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CHECKS", ("data_loader_workers",))
    program = f"""
loader = torch.utils.data.DataLoader([1.0, 2.0], {arguments})
for x in loader:  # here
    step(torch.compile(attend), Q * x)
"""
    problems = found(tmp_path, capsys, program, OPENING if seeded else WITHOUT_A_SEED)
    if WORKERS[arguments] and not seeded:
        assert "HERE reads data by workers" in the_only(problems, "data_loader_workers", Severity.WARNING)
    else:
        assert problems == {}


@pytest.mark.parametrize(
    ("before", "inside", "severity"),
    [(None, "", Severity.NOTE), (None, "0", Severity.WARNING), ("0", "", None), ("random", "", Severity.NOTE)],
)
def test_hashes_of_strings(
    before: str | None, inside: str, severity: Severity | None, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys.modules[__name__], "CHECKS", ("string_hashes",))
    monkeypatch.setenv("PYTHONHASHSEED", "1")  # so that the end of the test undoes what the program sets
    monkeypatch.delenv("PYTHONHASHSEED")
    if before is not None:
        monkeypatch.setenv("PYTHONHASHSEED", before)
    program = f"import os\nos.environ['PYTHONHASHSEED'] = {inside!r}\n" if inside else ""
    problems = found(tmp_path, capsys, program + "step(torch.compile(attend), Q)\n")
    if severity is None:
        assert problems == {}
    else:
        the_only(problems, "string_hashes", severity)


READ = {
    "torch.empty(64, 16)": "is read by mul at HERE",
    "torch.empty_like(q)": "is read by mul at HERE",
    "F.pad(q[..., :8], (0, 8))": "",
    "torch.empty_like(q).copy_(q)": "",
    "torch.empty_like(q).fill_(2.0)": "",
    "torch.empty_like(q).normal_()": "",
    "torch.empty_like(q).zero_() + 1": "",
    "part(q, slice(0, 8))": "is read by mul at HERE",
    "part(q, slice(0, 16))": "",
    "part(q, slice(0, 8), slice(8, 16))": "",
    "part(q, slice(0, 8), slice(9, 16))": "is read by mul at HERE",
    "part(q, slice(0, 8))[..., :8].repeat(1, 1, 1, 2)": "",
    "part(q, slice(0, 8))[..., 4:12].repeat(1, 1, 1, 2)": "is read by repeat at HERE",
}


@pytest.mark.parametrize("bound", ["size", "shape"])
def test_dynamic_sizes_are_not_followed(bound: str) -> None:
    """Which part is read is not known: that is no finding, and the size gets no guard."""
    size, graph = ShapeEnv().create_unbacked_symint(), Graph()
    given, made = graph.placeholder("given"), graph.call_function(aten.empty.memory_format, ([4],))
    made.meta["val"] = torch.empty(4, device="meta")
    if bound == "size":
        given.meta["val"] = size
        part = graph.call_function(aten.slice.Tensor, (made, 0, 0, given))
    else:
        with FakeTensorMode(shape_env=size.node.shape_env):
            given.meta["val"] = torch.empty(size)
        part = graph.call_function(aten.cat.default, ([given, made],))
    graph.output(graph.call_function(aten.mul.Tensor, (part, 2)))
    assert [how for _, how in reads_unwritten(graph)] == []


@pytest.mark.parametrize("made", READ)
def test_compiled_memory_that_is_read_unwritten(
    made: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CHECKS", ("memory_that_is_not_written", "fill"))
    program = f"""
def part(q, *parts):
    x = torch.empty_like(q)
    for columns in parts:
        x[..., columns] = q.detach()[..., columns]
    return x

def layer(q):
    return attend(q) * ({made})  # here
step(torch.compile(layer), Q)
"""
    problems = found(tmp_path, capsys, program)
    if READ[made]:
        findings = problems.pop("memory_that_is_not_written")
        assert any(READ[made] in finding["what"] for finding in findings)
        assert problems == {}  # no advice to switch the fill off
    else:
        assert the_only(problems, "fill", Severity.NOTE)
