"""Losses in recordings: their values however they are differentiated, what they cost, and the curves of the page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.utils.checkpoint import checkpoint

import dash_guard
from dash_guard.cli import main
from dash_guard.recordings import curves
from dash_guard.recordings.compare import compare
from dash_guard.recordings.curves import Curve
from dash_guard.recordings.file import MAGIC, READ, Appender, path_of
from dash_guard.recordings.losses import losses, sections
from dash_guard.recordings.recording import Recording

from .support.recordings import environment

Loss = Callable[[nn.Module, Tensor], Tensor]
Backward = Callable[[Tensor], float]
"""Differentiates a loss, and returns what the recording must have of it."""


def of_double(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).double().square().mean()


def of_float(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def of_bfloat16(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean().bfloat16()


def in_one_row(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean().view(1, 1)


def of_checkpoint(model: nn.Module, x: Tensor) -> Tensor:
    """What the checkpoint differentiates inside of the backward is no loss, although it has one element."""
    x = x.clone().requires_grad_()
    inner: Tensor = checkpoint(lambda y: model(y).square().mean(), x, use_reentrant=True)
    return inner * 2


LOSSES = (of_double, of_float, of_bfloat16, in_one_row, of_checkpoint)


def by_method(loss: Tensor) -> float:
    loss.backward()
    return loss.item()


def by_function(loss: Tensor) -> float:
    torch.autograd.backward(each for each in [loss, 2 * loss])
    return loss.item() + (2 * loss).item()


def twice(loss: Tensor) -> float:
    for _ in range(2):
        loss.backward(retain_graph=True)
    return 2 * loss.item()


def and_written_later(loss: Tensor) -> float:
    loss.backward()
    value = loss.item()
    loss.detach().zero_()
    return value


def by_scaler(loss: Tensor) -> float:
    torch.amp.GradScaler("cpu", init_scale=512.0).scale(loss).backward()
    return loss.item()


def of_an_infinite_number(loss: Tensor) -> float:
    (loss * math.inf).backward()
    return (loss * math.inf).item()


def with_its_gradient(loss: Tensor) -> float:
    """As a stage of a pipeline does."""
    loss.backward(torch.ones_like(loss))
    return math.nan


def by_gradients(loss: Tensor) -> float:
    parameters = [node for node in _leaves(loss) if node.requires_grad]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    return math.nan


BACKWARDS = (by_method, by_function, twice, and_written_later, by_scaler, of_an_infinite_number)
NO_LOSS = (with_its_gradient, by_gradients)


def _leaves(loss: Tensor) -> list[Tensor]:
    found, nodes = list[Tensor](), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            leaf = getattr(node, "variable", None)
            found += [] if leaf is None else [leaf]
            nodes += [after for after, _ in node.next_functions]
    return found


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def train(loss_of: Loss, backward: Backward, steps: int = 3, parts: int = 1) -> tuple[nn.Module, list[float]]:
    """The trained model, and the expected loss of each step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for step in range(1, steps + 1):
        x = torch.full((parts, 3, 4), float(step))
        expected.append(sum(backward(loss_of(model, part)) for part in x))
        optimizer.step()
        optimizer.zero_grad()
    return model, expected


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("loss_of", LOSSES)
def test_the_loss_of_each_step(loss_of: Loss, backward: Backward, parts: int, tmp_path: Path) -> None:
    """The sum over its backwards, in double precision; recording it changes no bit."""
    plain, _ = train(loss_of, backward, parts=parts)
    with dash_guard.record(tmp_path):
        recorded, expected = train(loss_of, backward, parts=parts)
    found = losses(tmp_path)
    assert list(found) == [1, 2, 3]
    assert list(found.values()) == pytest.approx(expected, rel=1e-15, nan_ok=True)
    bits = ([parameter.detach().view(torch.int32) for parameter in model.parameters()] for model in (plain, recorded))
    assert all(map(torch.equal, *bits))


@pytest.mark.parametrize("backward", NO_LOSS)
def test_what_is_no_loss(backward: Backward, tmp_path: Path) -> None:
    with dash_guard.record(tmp_path / "a"):
        train(of_float, backward)
    assert losses(tmp_path / "a") == {}
    with dash_guard.record(tmp_path / "b"):
        train(of_float, by_method)
    assert compare(tmp_path / "a", tmp_path / "b").verdict == "equal"


def test_steps_that_are_recorded_have_their_own_loss(tmp_path: Path) -> None:
    """Without any module, and between them those that are not recorded; the last backward belongs to no step."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    expected = {}
    with dash_guard.record(tmp_path, every=2):
        for step in range(1, 6):
            loss = weight.square().sum()
            loss.backward()
            if step % 2:
                expected[step] = loss.item()
            optimizer.step()
            optimizer.zero_grad()
    assert losses(tmp_path) == expected


@pytest.mark.parametrize(
    "by", [lambda loss: loss.backward(), lambda loss: torch.autograd.backward(loss)], ids=["method", "function"]
)
def test_a_backward_in_a_function_that_is_compiled(by: Callable[[Tensor], object], tmp_path: Path) -> None:
    """Dynamo compiles nothing of what observes it, and so nothing anew when the dtype of a loss changes."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    model, losses_of_steps = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend=backend, dynamic=True)
    def differentiate(loss: Tensor) -> None:
        by(loss * 1)

    with dash_guard.record(tmp_path):
        for step, dtype in enumerate([torch.float32, torch.float32, torch.float64]):
            loss = of_float(model, torch.ones(3, 4) * step).to(dtype)
            differentiate(loss)
            losses_of_steps.append(loss.item())
            optimizer.step()
    assert list(losses(tmp_path).values()) == losses_of_steps
    assert len(compiled) == 2


class Wrapped(Tensor):
    """PyTorch hands a call of `backward` on to it."""


@pytest.mark.parametrize("backward", [by_method, by_function])
def test_a_loss_of_another_class(backward: Backward, tmp_path: Path) -> None:
    """Counts once, although its class calls `backward` again."""
    with dash_guard.record(tmp_path):
        _, expected = train(lambda model, x: of_float(model, x).as_subclass(Wrapped), backward)
    assert list(losses(tmp_path).values()) == pytest.approx(expected, rel=1e-15)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Replicate(), Partial()], ids=str)
def test_a_loss_that_is_a_dtensor(placement: Placement, mesh: DeviceMesh, tmp_path: Path) -> None:
    """A part of one is told, and is not taken for the loss."""
    weight = nn.Parameter(torch.ones(2))
    with dash_guard.record(tmp_path):
        loss = DTensor.from_local(weight.square().sum(), mesh, [placement])
        loss.backward()
        torch.optim.SGD([weight]).step()
    recording = Recording(path_of(tmp_path, 0))
    assert len(list(recording.steps())) == 1
    told = {} if placement.is_replicate() else {"loss": "it is a DTensor of which this rank has a part"}
    assert recording.unseen == told
    assert losses(tmp_path) == ({1: 2.0} if placement.is_replicate() else {})


def test_a_loss_that_differs_where_results_are_equal_is_named(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 2.0)):
        with dash_guard.record(tmp_path / name):
            train(lambda model, x, factor=factor: of_float(model, x) * factor, by_method)
    result = compare(tmp_path / "a", tmp_path / "b")
    (a, *_), (b, *_) = (losses(tmp_path / name).values() for name in "ab")
    assert b == 2 * a
    assert result.conclusion == (
        f"All results of the forward that were recorded are equal, and the loss is {b!r} instead of {a!r}. "
        "The difference arises in the loss, or in what the program multiplies it by."
    )


# ---------------------------------------------------------------------------------------------------- the page


def recording(folder: Path, *ranks: dict[int, float | str]) -> Path:
    """Recordings with these losses by step, of each rank."""
    for rank, values in enumerate(ranks):
        file = Appender(path_of(folder, rank))
        file.json(environment(rank, len(ranks)))
        file.json({"type": "names", "names": [("gradient", "w", "int8 []")]})
        for step, loss in values.items():
            file.json({"type": "loss", "step": step, "value": loss})
            file.step(step, [(0, str(loss).encode()[:16].ljust(16))])
        file.json({"type": "end"})
        file.close()
    return folder


def test_the_loss_of_a_run_is_the_mean_over_ranks(tmp_path: Path) -> None:
    folder = recording(tmp_path, {1: 1.0, 2: 3, 4: 5.0}, {1: 2.0, 2: "nan"})
    found = losses(folder)
    assert (found[1], found[4]) == (1.5, 5.0)
    assert math.isnan(found[2])


PAGES: dict[str, tuple[dict[int, float | str], dict[int, float | str], int, str]] = {
    "equal": ({1: 1.0, 2: 0.5}, {1: 1.0, 2: 0.5}, 2, "The losses of all 2 steps that both runs have are equal."),
    "no loss": ({}, {}, 0, ""),
    "one without": ({1: 1.0, 2: 0.5}, {}, 1, "Only a has losses."),
    "nothing in common": ({1: 1.0}, {2: 1.0}, 2, "No step has a loss in both runs."),
    "different": (
        {1: 1.0, 2: 0.5, 3: 0.5}, {1: 1.0, 2: 0.75, 3: 1.5}, 3,
        "The losses differ first in step 2, by 0.25, and most in step 3, by 1.",
    ),
    "infinite": (
        {1: 1.0, 2: "inf", 3: "inf"}, {1: 1.0, 2: 0.5, 3: "inf"}, 2,
        "by inf, and most in step 2, by inf.</p><p>The loss of a is not finite in 2 steps, first in step 2.",
    ),
    "no number": ({1: "nan", 2: "nan"}, {1: "nan", 2: "nan"}, 0, "The loss of b is not finite in 2 steps"),
    "huge": ({1: 1e308, 2: -1e308}, {1: 1.0, 2: 1e-320}, 1, "The loss of a is not finite in 2 steps, first in step 1."),
}  # fmt: skip
"""Losses of both runs, how many curves there are, and what is said."""


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("layouts", [False, True])
def test_the_curves_of_both_runs(name: str, layouts: bool) -> None:
    of_a, of_b, polylines, words = PAGES[name]
    a, b = ({step: float(loss) for step, loss in of.items()} for of in (of_a, of_b))
    shown = "".join(sections(a, b, first=0 if layouts else 2))
    assert bool(shown) is bool(a or b)
    assert words in shown
    assert shown.count("<polyline") == polylines
    assert "nan" not in shown
    assert ("dashed" in shown) is ("<svg" in shown and not layouts)


def test_the_page_of_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that are equal or differ, one that is resumed, and recordings from before there were losses."""
    page = tmp_path / "page.html"
    for name, steps, factor in (("a", 6, 1.0), ("b", 6, 1.5)):
        with dash_guard.record(tmp_path / name):
            train(lambda model, x, factor=factor: of_float(model, x) * factor, by_method, steps)
    path = path_of(recording(tmp_path / "old", {}), 0)
    path.write_bytes(path.read_bytes().replace(MAGIC, READ[1]))
    for a, b, curves_ in (("a", "a", 2), ("a", "b", 3), ("a", "old", 1), ("old", "old", 0)):
        main(["compare", str(tmp_path / a), str(tmp_path / b), "--html", str(page)])
        html = page.read_text()
        assert html.count("<polyline") == curves_
        assert ("<h2>Loss</h2>" in html) is bool(curves_)
        assert not any(word in html for word in ("http:", "https:", "src=", "href=", "<script", "@import", "url("))
    capsys.readouterr()


def test_steps_of_a_run_that_counts_from_one_again_are_shifted(tmp_path: Path) -> None:
    page, model = tmp_path / "page.html", network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(folder: Path, of: range) -> None:
        with dash_guard.record(folder, model=model):
            for step in of:
                of_float(model, torch.full((3, 4), float(step))).backward()
                optimizer.step()
                optimizer.zero_grad()

    steps(tmp_path / "first", range(1, 4))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(network().state_dict())
    steps(tmp_path / "whole", range(1, 7))
    model.load_state_dict(saved)
    steps(tmp_path / "rest", range(4, 7))
    assert main(["compare", str(tmp_path / "whole"), str(tmp_path / "rest"), "--html", str(page)]) == 0
    assert "The losses of all 3 steps that both runs have are equal." in page.read_text()


POINTS = st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=40).map(
    lambda values: [(7 * number, value) for number, value in enumerate(values, 1) if curves.is_drawn(value)]
)


@given(points=POINTS, logarithmic=st.booleans(), repeated=st.sampled_from([1, 50]))
def test_every_curve_is_drawn_inside_of_its_picture(
    points: list[curves.Point], logarithmic: bool, repeated: int
) -> None:
    """However large its values are; of many points, the lowest and the highest are among those that are drawn."""
    if logarithmic:
        points = [(step, abs(value)) for step, value in points if value]
    points = [(step * repeated + number, value) for step, value in points for number in range(repeated)]
    shown = curves.svg("t", [Curve("c", "--good", points)], "l", logarithmic, mark=9)
    if not points:
        assert shown == ""
        return
    (path,) = re.findall('<polyline points="([^"]*)"', shown)
    places = [tuple(map(float, place.split(","))) for place in path.split()]
    assert 0 < len(places) <= 302
    assert all(60 <= x <= 640 and 9.9 <= y <= 160.1 for x, y in places)
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    values, heights = sorted(value for _, value in points), [y for _, y in places]
    if values[-1] - values[0] > abs(values[-1]) / 100 and not logarithmic:
        assert min(heights) < max(heights)
    assert shown.count("<line") <= 12
