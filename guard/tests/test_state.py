"""The state of training in recordings: which state differs, when it does, and what `compare` says about it."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import dash_guard
from dash_guard.observation import generators
from dash_guard.observation.state import generators_now
from dash_guard.recordings import page, report
from dash_guard.recordings.compare import Comparison, compare
from dash_guard.recordings.file import Entry, Name
from dash_guard.recordings.state import States
from dash_inductor.errors import ArgumentError
from dash_inductor.observers import phases

STEPS = 4


class Loader(DataLoader[Any]):
    """A data loader that knows where it is."""

    read = 0

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read, "workers": [{"seed": b"x" * self.read}]}


class Training:
    """A small training whose every state can be changed before a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=1000)
        data = TensorDataset(torch.randn(16, 4))
        self.sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=False)
        self.loader = Loader(data, batch_size=4, sampler=self.sampler)

    def step(self, number: int) -> None:
        x = torch.full((2, 4), float(number)) + random.random() + float(np.random.rand())
        self.scaler.scale(self.model(x).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def run(folder: Path, change: Callable[[Training], object] | None = None, at: int = 0, **settings: Any) -> Path:
    training = Training()
    with dash_guard.record(folder, **settings):
        for number in range(1, STEPS + 1):
            if number == at and change is not None:
                change(training)
            training.step(number)
    return folder


def draws_of_the_cpu(training: Training) -> None:
    torch.rand(1)


def three_draws_of_random(training: Training) -> None:
    random.getrandbits(96)


def a_draw_of_numpy(training: Training) -> None:
    np.random.randint(0, 2**32, dtype=np.uint32)


def seed_of_numpy(training: Training) -> None:
    np.random.seed(7)


def scale(training: Training) -> None:
    training.scaler.load_state_dict({**training.scaler.state_dict(), "scale": 65536.0})


def lr(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = 0.02


def steps(training: Training) -> None:
    for state in training.optimizer.state.values():
        state["step"] += 5


def epoch(training: Training) -> None:
    training.sampler.set_epoch(3)


def position(training: Training) -> None:
    training.loader.read += 7


CHANGES: dict[Callable[[Training], object], tuple[str, str]] = {
    draws_of_the_cpu: ("activation", "generator of the CPU is one draw later than in a"),
    three_draws_of_random: ("input", "generator of random is 3 draws later than in a"),
    a_draw_of_numpy: ("input", "generator of numpy is one draw later than in a"),
    seed_of_numpy: ("input", "generator of numpy has another seed than in a, or is more than 4194304 draws away"),
    scale: ("gradient of activation", "loss scale 65536 instead of 512"),
    lr: ("parameter", "AdamW.0 lr 0.02 instead of 0.01"),
    steps: ("parameter", "steps of AdamW"),
    epoch: ("", "epoch of DistributedSampler 3 instead of 0"),
    position: ("", "data of Loader read 7 instead of 0"),
}


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_state_that_differs_is_named(change: Callable[[Training], object], at: int, tmp_path: Path) -> None:
    if change is steps and at == 1:
        pytest.skip("it has counted no step yet")
    phase, words = CHANGES[change]
    result = compare(run(tmp_path / "a"), run(tmp_path / "b", change, at))
    if not phase:  # the training does not depend on it
        assert (result.verdict, result.first) == ("equal", None)
        assert [(each.step, each.what) for each in result.state if each.what == words] == [(at, words)]
        assert words in report.text(result).replace("\n  ", " ")
        assert words in page.html(result)
        return
    assert result.first is not None
    assert (result.first.step, result.first.phase) == (at, phase)
    assert words in result.conclusion
    assert all(each.step == at for each in result.state if each.what.startswith(words))


@pytest.mark.parametrize("used", [False, True])
def test_generators_come_last_if_nothing_is_known_of_their_use(used: bool) -> None:
    states, names = States(0), ("generator of random", "AdamW.0 lr")
    before = [[Entry(Name(phases.STATE, name, ""), b"", 0) for name in names]] * 2
    if used:  # the run a has drawn between two steps
        states.step(1, *before)
    drawn, other = ([Entry(Name(phases.STATE, name, ""), b"", value) for name in names] for value in (1, 2))
    states.step(1 + used, drawn, other)
    found = [each.name for each in states.differing(phases.PARAMETER)]
    assert found == (list(names) if used else list(reversed(names)))


@pytest.mark.parametrize("change", [draws_of_the_cpu, three_draws_of_random, scale, lr], ids=lambda c: c.__name__)
def test_what_comes_later_is_not_to_blame(change: Callable[[Training], object], tmp_path: Path) -> None:
    """The inputs differ, and no other state but generators decides about inputs."""

    def both(training: Training) -> None:
        np.random.rand()
        change(training)

    result = compare(run(tmp_path / "a"), run(tmp_path / "b", both, 3))
    assert result.first is not None
    assert result.first.phase == phases.INPUT
    assert "generator of numpy is 2 draws later" in result.conclusion
    blamed = any(CHANGES[change][1] == each.what for each in result.state)
    assert blamed is CHANGES[change][1].startswith("generator")


def test_generators_that_nothing_draws_from_are_not_named(tmp_path: Path) -> None:
    def without_random(folder: Path, seed: int) -> Path:
        torch.manual_seed(0)
        random.seed(seed)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if folder.name != "c" else 0.2)
        with dash_guard.record(folder):
            for _ in range(3):
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
        return folder

    a, b, c = (without_random(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 2), ("c", 3)))
    result = compare(a, b)
    assert (result.verdict, result.state) == ("equal", [])
    found = compare(a, c)
    assert found.first is not None
    assert (found.first.step, found.first.phase) == (1, phases.PARAMETER)
    assert "SGD.0 lr 0.2 instead of 0.1" in found.conclusion


def test_data_that_are_read_again_are_named(tmp_path: Path) -> None:
    def read(folder: Path, rows: list[int], epochs: list[int]) -> Path:
        torch.manual_seed(0)
        model = nn.Linear(1, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.arange(8.0).unsqueeze(1)
        loader = DataLoader(TensorDataset(data), sampler=DistributedSampler(range(8), 1, 0))  # type: ignore[arg-type]
        with dash_guard.record(folder):
            for row, number in zip(rows, epochs, strict=True):
                assert isinstance(loader.sampler, DistributedSampler)
                loader.sampler.set_epoch(number)
                model(data[row]).sum().backward()
                optimizer.step()
        return folder

    a = read(tmp_path / "a", [0, 1, 2, 3], [1, 1, 2, 2])
    b = read(tmp_path / "b", [0, 1, 0, 1], [1, 1, 1, 1])
    result = compare(a, b)
    assert result.first is not None
    assert (result.first.step, result.first.phase) == (3, phases.INPUT)
    assert "epoch 1 is read again" in result.conclusion
    assert "In this step b is given what a is given in step 1." in result.conclusion


def test_an_explicit_object_has_its_state_recorded(tmp_path: Path) -> None:
    class Position:
        def __init__(self, at: int) -> None:
            self.at = at

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "table": torch.full((3,), self.at), "nested": {"name": "x"}}

    a, b = (run(tmp_path / name, data=Position(at)) for name, at in (("a", 1), ("b", 2)))
    found = {each.name: each.what for each in compare(a, b).state}
    assert found["data of Position at"] == "data of Position at 2 instead of 1"
    assert set(found) == {"data of Position at", "data of Position table"}
    with pytest.raises(ArgumentError, match="data=3"):
        dash_guard.record(tmp_path, data=3)


def test_a_state_dict_that_fails_ends_nothing(tmp_path: Path) -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("no state yet")

    a, b = (run(tmp_path / name, data=[Broken()]) for name in "ab")
    assert compare(a, b).verdict == "equal"


def test_reading_the_state_changes_no_bit(tmp_path: Path) -> None:
    def losses(record: bool) -> Tensor:
        training = Training()
        found = []
        if record:
            run(tmp_path)
            training = Training()
        for number in range(1, STEPS + 1):
            training.step(number)
            found.append(training.model[0].weight.detach().clone())
        return torch.stack(found)

    assert torch.equal(losses(False), losses(True))
    states = [torch.get_rng_state(), torch.tensor(random.getstate()[1])]
    run(tmp_path / "again")
    assert all(map(torch.equal, states, [torch.get_rng_state(), torch.tensor(random.getstate()[1])]))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("before", [0, 1, 623, 624, 625, 5000])
@pytest.mark.parametrize("draws", [0, 1, 7, 624, 100_000])
def test_the_distance_of_generators_is_found(seed: int, before: int, draws: int) -> None:
    def state(count: int) -> str:
        twister = random.Random(seed)
        for _ in range(count):
            twister.getrandbits(32)
        _, (*words, index), _ = twister.getstate()
        return generators.mt19937(words, index)

    a, b = state(before), state(before + draws)
    count = "one draw" if draws == 1 else f"{draws} draws"
    later, earlier = (f"is {count} {word} than in a" for word in ("later", "earlier"))
    assert generators.difference(a, b) == (later if draws else "keeps another normal number than in a")
    assert generators.difference(b, a) == (earlier if draws else "keeps another normal number than in a")


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ((3, 0), (3, 4), "is one draw later than in a"),
        ((3, 40), (3, 36), "is one draw earlier than in a"),
        ((3, 0), (3, 12), "is 3 draws later than in a"),
        ((3, 4), (5, 4), "has the seed 5 instead of 3"),
    ],
)
def test_generators_of_gpus(a: tuple[int, int], b: tuple[int, int], words: str) -> None:
    assert generators.difference(generators.philox(*a), generators.philox(*b)) == words


@pytest.mark.parametrize("capturing", [False, True])
def test_generators_of_devices_are_read(capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch tells no offset while a CUDA graph is captured."""
    generator = Mock(**{"initial_seed.return_value": 3, "get_offset.return_value": 8})
    for name, value in (("is_available", True), ("is_initialized", True), ("is_current_stream_capturing", capturing)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    found = {name: text for name, text in generators_now().items() if "device" in name}
    assert found == ({} if capturing else {"generator of device 0": "philox 3 8"})


@pytest.mark.parametrize("text", ["", "mt19937 625 AAAA", "mt19937 1 ====", "mt19937 999 " + "A" * 3328, "philox 1"])
def test_states_that_no_recorder_writes(text: str) -> None:
    sound = generators.philox(1, 2)
    assert generators.difference(sound, text) == generators.difference(text, sound) == "has another state than in a"


def test_a_resumed_run_without_its_generators_is_named(tmp_path: Path) -> None:
    """The checkpoint has the model, the optimizer and the scaler, and not the generators."""

    def resumed(folder: Path, restored: bool) -> Comparison:
        training = Training()
        for number in (1, 2):
            training.step(number)
        saved = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        other = Training()
        other.model.load_state_dict(saved[0])
        other.optimizer.load_state_dict(saved[1])
        if restored:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])
        with dash_guard.record(folder):
            for number in (3, 4):
                other.step(number)
        return compare(tmp_path / "whole", folder)

    run(tmp_path / "whole")
    exact = resumed(tmp_path / "exact", restored=True)
    assert (exact.verdict, exact.steps) == ("equal", 2)
    assert [each.name for each in exact.state] == ["steps since the loss scale grew"]  # the scaler was not restored
    result = resumed(tmp_path / "lost", restored=False)
    assert result.first is not None
    assert result.first.step == 3
    assert "generator of random is 4 draws earlier than in a" in result.conclusion
    assert "generator of numpy is 4 draws earlier than in a" in result.conclusion


RESUMED = """
import random
import sys

import numpy as np
import torch

path, lost, begin, end = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
optimizer = getattr(torch.optim, sys.argv[5])(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
if begin > 1:
    saved = torch.load(path, weights_only=False)
    for name, restore in {
        "model": model.load_state_dict, "optimizer": optimizer.load_state_dict,
        "scheduler": scheduler.load_state_dict, "scaler": scaler.load_state_dict, "torch": torch.set_rng_state,
        "random": random.setstate, "numpy": np.random.set_state,
    }.items():
        if name != lost:
            restore(saved[name])
for step in range(begin, end + 1):
    x = torch.full((2, 4), float(step)) + random.random() + float(np.random.rand())
    scaler.scale(model(x).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
    print("step", step)
    if step == 3 and begin == 1:
        torch.save({
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
            "scaler": scaler.state_dict(), "torch": torch.get_rng_state(), "random": random.getstate(),
            "numpy": np.random.get_state(),
        }, path)
"""

LOST = {
    "nothing": "",
    "torch": "generator of the CPU is",
    "random": "generator of random is 6 draws earlier than in a",
    "numpy": "generator of numpy is 6 draws earlier than in a",
    "scaler": "steps since the loss scale grew 0 instead of 3",
    "optimizer": "lr",
    "model": "Run b begins where run a begins: it has loaded no checkpoint",
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    (folder / "train.py").write_text(RESUMED, encoding="utf-8")
    for kind in ("AdamW", "SGD"):
        found = recorded(folder, kind, "nothing", 1, 6, f"whole {kind}")
        assert found.returncode == 0, found.stderr
    return folder


def recorded(folder: Path, kind: str, lost: str, begin: int, end: int, *words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "train.py", f"{kind}.pt", lost, str(begin), str(end), kind]
    command = [sys.executable, "-m", "dash_guard", "record", "--folder", *words, "--", *program]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("lost", "kind"), [*((lost, "AdamW") for lost in LOST), ("nothing", "SGD")])
def test_the_first_step_after_a_checkpoint(lost: str, kind: str, uninterrupted: Path) -> None:
    """AdamW counts its steps; those of SGD are found by the parameters of the checkpoint."""
    found = recorded(uninterrupted, kind, lost, 4, 6, f"{kind} {lost}", "--resume-check", f"whole {kind}")
    text = " ".join(found.stdout.split())
    assert found.returncode == (0 if lost == "nothing" else 1), found.stdout + found.stderr
    assert LOST[lost] in text
    assert found.stderr.count("step 4") == 1
    assert "step 5" not in found.stderr  # it has been ended
    if lost == "nothing":
        assert text.startswith("The runs are equal: 1 step of 1 rank, bit by bit")
    elif lost not in ("model", "optimizer"):  # whose steps count from 1
        assert text.startswith("The runs diverge at step 4")


def test_a_resume_check_needs_a_recording(uninterrupted: Path) -> None:
    found = recorded(uninterrupted, "SGD", "nothing", 4, 6, "never", "--resume-check", "absent")
    assert (found.returncode, found.stdout) == (2, "")
    assert "--resume-check absent is not allowed" in found.stderr
    assert not (uninterrupted / "never").exists()
