"""The contents of a recording of a training program, eager and compiled, and that recording changes nothing."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dash_guard
import dash_inductor
from dash_guard.fingerprints.fingerprint import digest, fingerprint
from dash_guard.recorder import recorder
from dash_guard.recorder.steps import FromGraphs, StepWriter
from dash_guard.recordings.compare import compare
from dash_guard.recordings.file import Appender, path_of
from dash_guard.recordings.recording import Recording
from dash_inductor.config import config
from dash_inductor.errors import ArgumentError, DashError
from dash_inductor.install import cache_key
from dash_inductor.observers import active, phases
from tests.support.blocks import Model, inputs, plain, train
from tests.support.global_hooks import global_hooks

from .support.recordings import environment


def read(folder: Path) -> list[tuple[int, dict[str, str]]]:
    recording = Recording(path_of(folder, 0))
    steps = [
        (step, {str(e.name): e.fingerprint.hex() for e in entries if e.name.phase in phases.STAGES})
        for step, entries in recording.steps()
    ]
    assert recording.ended
    return steps


def names(folder: Path, step: int = 1) -> list[str]:
    return list(dict(read(folder))[step])


BLOCK = ["qkv", "out", ""]
PARAMETERS = [f"blocks.{n}.{name}.{kind}" for n in (0, 1) for name in ("qkv", "out") for kind in ("weight", "bias")]


def test_eager_code_shows_modules_gradients_and_parameters(tmp_path: Path) -> None:
    with dash_guard.record(tmp_path):
        model = train(plain)
    results = [f"blocks.{n}.{part}".rstrip(".") for n in (0, 1) for part in BLOCK] + ["Model"]
    behind = ["input Model", *(f"activation {name}" for name in results)]
    back = [f"gradient of activation {name}" for name in ("Model", *reversed(results[:-1]))]
    back[1:] = sorted(back[1:], key=lambda name: (-int(name.split(".")[1]), name.count("."), "qkv" in name))
    ends = [f"{phase} {name}" for phase in ("gradient", "parameter") for name in PARAMETERS]
    assert names(tmp_path, 1) == [f"initial parameter {name}" for name in PARAMETERS] + behind + back + ends
    assert names(tmp_path, 2) == behind + back + ends
    last = read(tmp_path)[-1][1]
    for name, parameter in model.named_parameters():
        assert last[f"parameter {name}"] == fingerprint(parameter)
    assert last["input Model"] == fingerprint(inputs(2))


def test_a_recording_changes_no_bit_of_eager_code(tmp_path: Path) -> None:
    without = train(plain)
    with dash_guard.record(tmp_path):
        recorded = train(plain)
    assert all(map(torch.equal, without.parameters(), recorded.parameters()))


def test_compiled_code_shows_its_border_and_gradients_of_attention(tmp_path: Path, deterministic: None) -> None:
    config.cpu = "reference"
    without = train(torch.compile)
    torch._dynamo.reset()
    with dash_guard.record(tmp_path / "a"):
        recorded = train(lambda model: torch.compile(model, fullgraph=True))  # no hook breaks the graph
    assert all(map(torch.equal, without.parameters(), recorded.parameters()))
    attention = [f"gradient of attention blocks.{n} {part}" for n in (1, 0) for part in ("dQ", "dK", "dV")]
    border = ["input Model", "activation Model", "gradient of activation Model"]
    ends = [f"{phase} {name}" for phase in ("gradient", "parameter") for name in PARAMETERS]
    assert names(tmp_path / "a", 2) == border + attention + ends
    # Code compiled while recording runs as before without a recording, and shows itself to the next one.
    again = Recording(path_of(tmp_path / "a", 0))
    list(again.steps())
    assert again.facts["numerics_keys"] == sorted({r.plan.numerics_key for r in dash_inductor.sites() if r.plan})


def test_a_graph_that_observes_is_another_one_for_the_caches(tmp_path: Path) -> None:
    before = cache_key.entry()
    with dash_guard.record(tmp_path):
        assert cache_key.entry() != before
    assert cache_key.entry() == before


def test_graphs_compiled_without_a_recording_observe_nothing(tmp_path: Path, deterministic: None) -> None:
    config.cpu = "reference"
    torch.manual_seed(0)
    model = Model(head_dim=16)
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        compiled(torch.ones(2, 16, 32)).backward()
        optimizer.step()

    step()
    with dash_guard.record(tmp_path):
        step()
    assert not any("attention" in name for name in names(tmp_path))
    assert len(names(tmp_path)) == 3 * len(PARAMETERS) + 3


def test_gradients_of_attention_have_the_values_of_the_graph(tmp_path: Path) -> None:
    """The operator itself, without a compiler: it hashes what it is given, and returns nothing."""
    tensors = [torch.randn(2, 3), torch.randn(4).expand(5, 4)]
    with dash_guard.record(tmp_path) as recorder:
        scratch = torch.zeros(2, dtype=torch.int64)
        assert torch.ops.dash_guard.observe(tensors, ["a dQ", "a dK"], scratch) is None
        torch.ops.dash_guard.observe(tensors[:1], ["a dQ"], scratch)
        recorder.step()
    torch.ops.dash_guard.observe(tensors, ["a dQ", "a dK"], scratch)  # nobody records
    assert read(tmp_path) == [
        (1, {
            "gradient of attention a dQ": fingerprint(tensors[0]),
            "gradient of attention a dK": fingerprint(tensors[1]),
            "gradient of attention a dQ (call 2)": fingerprint(tensors[0]),
        })
    ]  # fmt: skip


def test_every_skips_whole_steps(tmp_path: Path) -> None:
    with dash_guard.record(tmp_path / "a"):
        train(plain, steps=5)
    with dash_guard.record(tmp_path / "b", every=2):
        train(plain, steps=5)
    every = dict(read(tmp_path / "a"))
    assert dict(read(tmp_path / "b")) == {step: every[step] for step in (1, 3, 5)}


def test_micro_batches_are_calls_of_one_step(tmp_path: Path) -> None:
    with dash_guard.record(tmp_path):
        train(plain, steps=1, micro_batches=3)
    found = [name for name in names(tmp_path) if name.startswith("activation Model")]
    assert found == ["activation Model", "activation Model (call 2)", "activation Model (call 3)"]


def test_two_optimizers_share_a_step(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    for given in (None, optimizers, optimizers[0]):
        folder = tmp_path / f"{given is None}{given is optimizers}"
        with dash_guard.record(folder, optimizer=given):
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
                for optimizer in optimizers:
                    optimizer.step()
        steps = read(folder)
        counted = 2 if given is optimizers[0] else 4
        assert [step for step, _ in steps] == [1, 2, 3]
        assert all(sum(name.startswith("parameter") for name in step) == counted for _, step in steps)


def test_wrappers_and_their_order_do_not_change_names(tmp_path: Path) -> None:
    with dash_guard.record(tmp_path / "a", activations=False):
        train(plain)
    with dash_guard.record(tmp_path / "b", activations=False):
        train(lambda model: nn.DataParallel(torch.compile(model, backend="eager")))
    assert read(tmp_path / "a") == read(tmp_path / "b")


def test_parameters_are_named_without_any_call_of_a_module(tmp_path: Path) -> None:
    gc.collect()
    with dash_guard.record(tmp_path):
        model = train(lambda model: torch.compile(lambda x: model(x), backend="eager"))
        list(model.parameters())
    assert names(tmp_path, 2) == [f"{phase} {name}" for phase in ("gradient", "parameter") for name in PARAMETERS]


def test_tensors_of_no_module_are_named_by_their_place(tmp_path: Path) -> None:
    tensor = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([tensor], lr=0.1)
    with dash_guard.record(tmp_path):
        tensor.sum().backward()
        optimizer.step()
    assert names(tmp_path) == ["initial parameter SGD.0.0", "gradient SGD.0.0", "parameter SGD.0.0"]


def test_what_has_no_fingerprint_is_said(tmp_path: Path) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with dash_guard.record(tmp_path):
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    recording = Recording(path_of(tmp_path, 0))
    list(recording.steps())
    assert recording.unseen == {"gradient weight": "it is a tensor of layout torch.sparse_coo"}


def test_a_journal_that_overflows_is_said(tmp_path: Path) -> None:
    file = Appender(tmp_path / "f")
    file.json(environment())
    numbers = [5, *(0, 1, 2), *(1, 3, 4), *(0, 5, 6)]  # five entries, of which three had room
    journal = FromGraphs([("a dQ", "float32 [2]"), ("a dK", "float32 [2]")], lambda: [numbers])
    StepWriter().write(file, 1, [], {}, [journal])
    recording = Recording(tmp_path / "f")
    ((_, entries),) = recording.steps()
    assert [entry.name.tensor for entry in entries] == ["a dQ", "a dK", "a dQ (call 2)"]
    assert entries[0].fingerprint == digest(1, 2, "float32 [2]")
    assert recording.unseen == {
        "every gradient of attention": "in step 1, CUDA graphs computed 5 of them, and 3 have room"
    }


def test_a_journal_to_which_nothing_was_appended_is_no_step(tmp_path: Path) -> None:
    file, writer = Appender(tmp_path / "f"), StepWriter()
    file.json(environment())
    for step, numbers in ((1, [1, *(0, 1, 2)]), (2, [0, *(0, 1, 2)])):
        writer.write(file, step, [], {}, [FromGraphs([("a dQ", "float32 [2]")], lambda numbers=numbers: [numbers])])
    assert [step for step, _ in Recording(tmp_path / "f").steps()] == [1]


def test_compiled_optimizers_and_inference_are_recorded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    with dash_guard.record(tmp_path):
        with torch.inference_mode():
            model(torch.ones(1, 2))
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            step()
    assert [number for number, _ in read(tmp_path)] == [1, 2]
    assert [name for name in names(tmp_path, 2) if name.startswith("param")] == ["parameter weight", "parameter bias"]
    here = "test_compiled_optimizers_and_inference_are_recorded"
    assert [name for name in names(tmp_path, 1) if name.startswith("activation Linear")] == [
        f"activation Linear (evaluation in {here})", "activation Linear"
    ]  # fmt: skip


def test_an_exception_in_a_module_leaves_the_recording_sound(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
    with dash_guard.record(tmp_path) as recorder:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(torch.ones(1, 2))
        model[0](torch.ones(1, 2))
        recorder.step()
    assert names(tmp_path) == ["activation 0", "activation 0 (call 2)", "input 0", "activation 0 (call 3)"]


def test_more_tensors_than_fit_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with dash_guard.record(tmp_path / "a"):
        train(plain)
    for module in ("fingerprints.lane_buffer", "recorder.recorder"):
        monkeypatch.setattr(f"dash_guard.{module}.CAPACITY", 5)
    with dash_guard.record(tmp_path / "b"):
        train(plain)
    assert [(step, set(e)) for step, e in read(tmp_path / "a")] == [(step, set(e)) for step, e in read(tmp_path / "b")]
    assert read(tmp_path / "a") == read(tmp_path / "b")


def test_one_recording_at_a_time_and_nothing_is_overwritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with dash_guard.record(tmp_path):
        with pytest.raises(DashError, match="a recording is on already"), dash_guard.record(tmp_path / "b"):
            pass
        train(plain, steps=1)
    before = path_of(tmp_path, 0).read_bytes()
    with dash_guard.record(tmp_path):
        train(plain, steps=1)
    assert not active.observers
    assert path_of(tmp_path, 0).read_bytes() == before
    assert path_of(tmp_path, 0, 1).exists()
    assert "this one is rank00000.1.dash" in caplog.text


def test_hooks_that_stay_do_nothing(tmp_path: Path) -> None:
    """Graphs guard global hooks, which therefore stay; none stays on a module or a parameter."""
    with dash_guard.record(tmp_path / "a", local_gradients=True):
        model = train(plain, steps=1)
    assert any("local gradient" in name for name in names(tmp_path / "a"))
    assert not model._forward_hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    counts = [len(kind) for kind in global_hooks()]
    assert counts == [1] * len(global_hooks())
    with dash_guard.record(tmp_path / "b"):
        train(plain, steps=1)
    assert [len(kind) for kind in global_hooks()] == counts
    before = {path: path.stat().st_size for path in tmp_path.rglob("*.dash")}
    train(plain, steps=1)
    assert {path: path.stat().st_size for path in tmp_path.rglob("*.dash")} == before


def test_a_second_recording_sees_what_the_first_has_compiled(tmp_path: Path, deterministic: None) -> None:
    config.cpu = "reference"
    model = Model(head_dim=16)
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        compiled(inputs(1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    with dash_guard.record(tmp_path / "a"):
        step()
    with torch.compiler.set_stance("fail_on_recompile"):
        step()
        with dash_guard.record(tmp_path / "b"):
            step()
    assert any("gradient of attention" in name for name in names(tmp_path / "a"))
    assert read(tmp_path / "a") == read(tmp_path / "b")


def test_a_recording_may_begin_inside_of_a_module(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            with dash_guard.record(tmp_path) as recorder:
                result: Tensor = self.part(x)
                recorder.step()
            return result

    Outer()(torch.ones(1, 2))
    assert names(tmp_path) == ["input Linear", "activation Linear"]


def test_bad_arguments(tmp_path: Path) -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"folder": None}, {"folder": 3}, {"folder": ""}, {"every": None}, {"every": "x"}, {"every": 1.5},
        {"model": "x"}, {"optimizer": "x"}, {"optimizer": 3}, {"optimizer": []}, {"optimizer": [nn.Linear(1, 1)]},
        {"activations": "x"}, {"optimizer_state": None}, {"local_gradients": 3},
    )  # fmt: skip
    for arguments in wrong:
        with pytest.raises(ArgumentError, match=next(iter(arguments))):
            dash_guard.record(**{"folder": tmp_path, **arguments})
    with pytest.raises(ArgumentError, match="every=0"):
        dash_guard.record(tmp_path, every=0)
    with pytest.raises(ArgumentError, match="replicas='explode'"):
        dash_guard.record(tmp_path, replicas="explode")  # type: ignore[arg-type]
    for step in (0, True, 1 << 32):
        with pytest.raises(ArgumentError, match="first_step"):
            dash_guard.record(tmp_path, first_step=step)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def test_a_resumed_run_goes_on_with_the_numbers_of_its_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: str, steps: range, state: Any, kind: Any = adam, **settings: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = kind(model)
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        with dash_guard.record(tmp_path / folder, **settings):
            for step in steps:
                generator = torch.Generator().manual_seed(step)
                model(torch.randn(3, 2, generator=generator)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def numbers(folder: str) -> list[int]:
        return [number for number, _ in read(tmp_path / folder)]

    run("whole", range(1, 9), None, optimizer_state=True)
    saved = run("half", range(1, 5), None)
    run("resumed", range(5, 9), saved, optimizer_state=True)
    assert numbers("resumed") == [5, 6, 7, 8]
    result = compare(tmp_path / "whole", tmp_path / "resumed")
    assert (result.verdict, result.steps, result.last_step) == ("equal", 4, 8)
    assert result.reasons == ["b begins later, and has no step 1"]
    recorded = names(tmp_path / "whole")
    assert [name for name in recorded if name.startswith("optimizer state 0.weight")] == [
        f"optimizer state 0.weight {key}" for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    assert "buffer 1.running_mean" in recorded
    # Another step follows than the one that was saved: initial parameters say so.
    run("wrong", range(5, 9), run("other", range(2, 6), None))
    assert str(compare(tmp_path / "whole", tmp_path / "wrong").first).startswith("step 5, rank 0: initial parameter")

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    run("counted", range(1, 9), None, sgd)
    saved = run("counted half", range(1, 5), None, sgd)
    run("counted from 1", range(5, 9), saved, sgd)
    assert numbers("counted from 1") == [1, 2, 3, 4]
    for a, b in (("counted", "counted from 1"), ("counted from 1", "counted")):
        result = compare(tmp_path / a, tmp_path / b)
        assert (result.verdict, result.steps) == ("equal", 4)
    run("argument", range(5, 9), saved, sgd, first_step=5, every=3)
    assert numbers("argument") == [5, 7]  # the first step, then steps 1, 4, 7
    monkeypatch.setenv("DASH_GUARD_FIRST_STEP", "5")
    run("variable", range(5, 9), saved, sgd)
    assert numbers("variable") == [5, 6, 7, 8]
    monkeypatch.setenv("DASH_GUARD_FIRST_STEP", "five")
    with pytest.raises(ArgumentError, match="DASH_GUARD_FIRST_STEP='five'"):
        dash_guard.record(tmp_path / "never")


def test_a_step_that_a_scaler_skips_is_a_step(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    with dash_guard.record(tmp_path):
        for step in range(1, 6):
            factor = float("inf") if step in (1, 3, 4) else 1.0
            scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    steps = dict(read(tmp_path))
    assert list(steps) == [1, 2, 3, 4, 5]
    assert [any(name.startswith("parameter") for name in steps[step]) for step in steps] == [
        False, True, False, False, True,
    ]  # fmt: skip
    assert not any("(call 2)" in name for step in steps.values() for name in step)


class Deaf(torch.optim.SGD):
    """Calls no closure."""

    def step(self, closure: Any = None) -> None:
        super().step()


def of_closure(optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor]) -> None:
    optimizer.step(closure)


def of_named_closure(optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor]) -> None:
    optimizer.step(closure=closure)


def before(optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor]) -> None:
    with torch.enable_grad():
        closure()
    optimizer.step(lambda: None) if isinstance(optimizer, Deaf) else optimizer.step()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, Deaf])
@pytest.mark.parametrize("step", [of_closure, of_named_closure])
def test_gradients_that_a_closure_computes(step: Callable[..., None], optimizer: Any, tmp_path: Path) -> None:
    """They are recorded as the optimizer uses them: as where they are computed before its step."""
    for name, how in (("a", before), ("b", before if optimizer is Deaf else step)):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        by = optimizer(model.parameters(), lr=0.1)

        def closure(model: nn.Module = model, by: torch.optim.Optimizer = by) -> Tensor:
            by.zero_grad()
            loss: Tensor = model(torch.ones(3, 4)).square().mean()
            loss.backward()
            return loss

        with dash_guard.record(tmp_path / name):
            for _ in range(3):
                how(by, closure)
    assert read(tmp_path / "a") == read(tmp_path / "b")
    assert "gradient weight" in names(tmp_path / "b", 3)
    assert compare(tmp_path / "a", tmp_path / "b").verdict == "equal"


def test_a_closure_that_is_called_several_times(tmp_path: Path) -> None:
    """All that its calls compute is of one step."""
    model, calls = nn.Linear(4, 2), 0
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss: Tensor = (model(torch.ones(3, 4)) - 1).square().mean()
        loss.backward()
        return loss

    with dash_guard.record(tmp_path):
        optimizer.step(closure)
        first, calls = calls, 0
        optimizer.step(closure)
    assert [step for step, _ in read(tmp_path)] == [1, 2]
    for step, times in ((1, first), (2, calls)):
        assert sum(name.startswith("activation Linear") for name in names(tmp_path, step)) == times > 1
        assert names(tmp_path, step).count("gradient weight") == 1


def test_a_recorder_that_fails_ends_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without = train(plain, steps=3)
    with dash_guard.record(tmp_path / "a"):
        train(plain, steps=3)
    real, calls = recorder.LaneBuffer.add, 0

    def add(self: Any, tensors: Any) -> range:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise torch.OutOfMemoryError("no memory for lanes")
        return real(self, tensors)

    monkeypatch.setattr(recorder.LaneBuffer, "add", add)
    with dash_guard.record(tmp_path / "b"):
        recorded = train(plain, steps=3)
    assert all(map(torch.equal, without.parameters(), recorded.parameters()))
    assert len([record for record in caplog.records if "no memory for lanes" in record.message]) == 1
    result = compare(tmp_path / "a", tmp_path / "b")
    assert result.verdict == "not comparable"
    assert any("the recorder has failed" in reason for reason in result.reasons)


def without_gradients(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def in_evaluation_mode(model: nn.Module, x: Tensor) -> None:
    model.eval()
    model(x)
    model.train()


def in_inference_mode(model: nn.Module, x: Tensor) -> None:
    model.eval()
    with torch.inference_mode():
        model(x)
    model.train()


EVALUATIONS = (without_gradients, in_evaluation_mode, in_inference_mode)


def recorded(folder: Path, evaluate: Callable[..., None], at: dict[int, int], wrong: int = 0) -> Path:
    """A short training run with so many evaluations before steps, and other inputs in one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dash_guard.record(folder):
        for step in range(1, 8):
            for number in range(at.get(step, 0)):
                evaluate(model, torch.ones(3, 4) * number)
            if step == 7:
                break
            x = torch.full((3, 4), step + (0.5 if step == wrong else 0.0))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return folder


@pytest.mark.parametrize("evaluate", EVALUATIONS)
@pytest.mark.parametrize("others", [{}, {3: 1}, {3: 5}, {2: 2, 5: 1}], ids=str)
def test_evaluations_between_steps_do_not_move_calls_of_the_training(
    evaluate: Callable[..., None], others: dict[int, int], tmp_path: Path
) -> None:
    """The runs evaluate at other times, or as often with more batches."""
    a = recorded(tmp_path / "a", evaluate, {3: 2})
    result = compare(a, recorded(tmp_path / "b", evaluate, others))
    assert (result.verdict, result.first) == ("equal", None)
    assert any(f"(evaluation in {evaluate.__name__}" in reason for reason in result.reasons), result.reasons
    found = compare(a, recorded(tmp_path / "c", evaluate, others, wrong=4)).first
    assert found is not None
    assert (found.step, found.phase, found.tensor) == (4, phases.INPUT, "Sequential")


@pytest.mark.parametrize("evaluate", EVALUATIONS)
def test_what_evaluations_of_both_runs_compute_is_compared(evaluate: Callable[..., None], tmp_path: Path) -> None:
    def another(model: nn.Module, x: Tensor) -> None:
        evaluate(model, x + 1)

    a, b = (recorded(tmp_path / name, function, {3: 1}) for name, function in (("a", evaluate), ("b", another)))
    found = compare(a, b).first
    assert found is not None
    assert (found.step, found.tensor) == (3, f"Sequential (evaluation in {evaluate.__name__})")


def validate(model: nn.Module, x: Tensor) -> None:
    in_evaluation_mode(model.eval(), x)


def another_model(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        copy.deepcopy(model).eval()(x)


def a_part_without_backward(model: nn.Module, x: Tensor) -> None:
    assert isinstance(model, nn.Sequential)
    model[0](x)


def some_parts_without_backward(model: nn.Module, x: Tensor) -> None:
    assert isinstance(model, nn.Sequential)
    model[:2](x)


def the_model_without_backward(model: nn.Module, x: Tensor) -> None:
    model(x)


OF_MODELS = validate, another_model, the_model_without_backward
OF_PARTS = a_part_without_backward, some_parts_without_backward  # before the first step, they take the model's names
ASIDE = [
    *((evaluate, at) for evaluate in OF_MODELS for at in ({1: 1}, {4: 2}, {7: 1}, {1: 1, 7: 1})),
    *((evaluate, at) for evaluate in OF_PARTS for at in ({4: 2}, {7: 1}, {4: 1, 7: 1})),
]


@pytest.mark.parametrize(("evaluate", "at"), ASIDE, ids=lambda each: getattr(each, "__name__", str(each)))
def test_calls_aside_of_the_training_are_no_divergence(
    evaluate: Callable[..., None], at: dict[int, int], tmp_path: Path
) -> None:
    """Before the first step, between steps and after the last one; of the model, a copy of it, and parts of it."""
    a, b = (recorded(tmp_path / name, evaluate, when) for name, when in (("a", {}), ("b", at)))
    for result in (compare(a, b), compare(b, a)):
        assert (result.verdict, result.first, result.steps) == ("equal", None, 6)
        assert any(reason.startswith("only ") for reason in result.reasons), result.reasons
    found = compare(a, recorded(tmp_path / "c", evaluate, at, wrong=4)).first
    assert found is not None
    assert (found.step, found.phase) == (4, phases.INPUT)


def test_a_further_call_with_a_backward_is_training(tmp_path: Path) -> None:
    def and_backward(model: nn.Module, x: Tensor) -> None:
        (model(x) * 0).sum().backward()

    result = compare(*(recorded(tmp_path / name, and_backward, at) for name, at in (("a", {}), ("b", {3: 1}))))
    assert result.verdict == "not comparable"


def test_a_model_that_is_only_evaluated_takes_no_names(tmp_path: Path) -> None:
    recorded(tmp_path, another_model, {1: 1})
    found = names(tmp_path)
    assert "activation Sequential.0 (evaluation in another_model)" in found
    assert {"activation 0", "gradient 0.weight", "parameter 2.bias"} <= set(found)
    assert not any("Sequential" in name for name in found if name.startswith(("gradient 0", "buffer")))
