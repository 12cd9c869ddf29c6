"""The line of the model that a record names: of the stack of a node, the innermost frame that is the model's."""

from __future__ import annotations

import contextlib
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from dash_inductor.graph.model_line import line_of_program, model_line

LIB = sysconfig.get_path("purelib")
TORCH = f"{LIB}/torch/nn/attention/__init__.py", 9, "flex_attention"
HELPER = f"{LIB}/transformers/integrations/sdpa_attention.py", 182, "sdpa_attention_forward"
LAYER = f"{LIB}/transformers/models/llama/modeling_llama.py", 258, "forward"
PROCESSOR = f"{LIB}/diffusers/models/transformer_flux.py", 118, "__call__"
DISPATCH = f"{LIB}/diffusers/models/attention_dispatch.py", 381, "dispatch_attention_fn"
FLASH = f"{LIB}/flash_attn/flash_attn_interface.py", 839, "forward"
FLASH_3 = f"{LIB}/flash_attn_3/hopper/flash_attn_interface.py", 839, "forward"
MINE = "/home/me/model.py", 12, "attend"
MODULE = "/home/me/model.py", 30, "forward"


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ([MODULE, MINE], MINE),
        ([MODULE, MINE, TORCH], MINE),
        ([MODULE, MINE, FLASH], MINE),
        ([MODULE, FLASH_3], MODULE),
        ([LAYER, HELPER], LAYER),
        ([MODULE, LAYER, HELPER], LAYER),
        ([LAYER, HELPER, FLASH], LAYER),
        ([PROCESSOR, DISPATCH, HELPER], PROCESSOR),
        ([MODULE, HELPER], MODULE),
        ([HELPER], HELPER),
        ([FLASH], FLASH),
        ([TORCH], TORCH),
    ],
)
def test_line(stack: list[tuple[str, int, str]], expected: tuple[str, int, str]) -> None:
    assert model_line([called_at(*stack)]) == (f"{expected[0]}:{expected[1]}", "")


def called_at(*stack: tuple[str, int, str]) -> Node:
    """A node with this stack: file, line and function of each frame."""
    node = Graph().call_function(torch.add)
    frames = (f'  File "{file}", line {line}, in {function}\n    code\n' for file, line, function in stack)
    node.meta["stack_trace"] = "".join(frames)
    return node


def named(*folders: object) -> list[str]:
    """For each folder, the line of a helper in it that a model calls, or that of the model if the helper is a
    library's."""
    helpers = [(f"{folder}/package/attention.py", 3, "attend") for folder in folders]
    return [model_line([called_at(MODULE, helper)])[0] for helper in helpers]


MODEL = f"{MODULE[0]}:{MODULE[1]}"


def test_folders_of_packages() -> None:
    folders = [*map(sysconfig.get_path, ("purelib", "platlib")), *site.getsitepackages(), site.getusersitepackages()]
    assert named(*folders, *(Path(folder).resolve() for folder in folders)) == [MODEL] * 2 * len(folders)


@pytest.mark.parametrize("name", ["site-packages", "dist-packages"])
def test_a_project_in_a_folder_named_as_those_of_packages(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / name
    project.mkdir()
    beside = f"{sysconfig.get_path('purelib')}-of-mine"
    for path in (sys.path, [str(project), *sys.path], ["", *sys.path]):
        monkeypatch.setattr(sys, "path", path)
        monkeypatch.chdir(project)
        expected = [f"{folder}/package/attention.py:3" for folder in (project, project / "mine", beside)]
        assert named(project, project / "mine", beside) == expected


def test_packages_elsewhere_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of `pip install --target`, or of an environment below another one."""
    target, link = tmp_path / "target", tmp_path / "link"
    (target / "package-1.0.dist-info").mkdir(parents=True)
    link.symlink_to(target)
    assert named(target, link) == [f"{folder}/package/attention.py:3" for folder in (target, link)]
    monkeypatch.setattr(sys, "path", [*sys.path, str(link)])
    assert named(target, link) == [MODEL] * 2


def test_nodes_without_a_stack() -> None:
    assert model_line([Graph().call_function(torch.add)]) == ("", "")


@pytest.mark.parametrize("folder", ["torchvision", "torch_extras"])
def test_a_package_whose_name_begins_like_a_librarys_is_a_program(folder: str) -> None:
    file = str(Path(torch.__file__).parent.parent / folder / "model.py")
    namespace: dict[str, Any] = {"line_of_program": line_of_program}
    exec(compile("def call():\n    return line_of_program()", file, "exec"), namespace)
    assert namespace["call"]() == f"{file}:2"


def test_a_context_manager_as_a_decorator_is_no_program() -> None:
    @contextlib.contextmanager
    def nothing() -> Iterator[None]:
        yield

    file = str(Path(torch.__file__).parent / "made_up.py")
    namespace: dict[str, Any] = {"line_of_program": line_of_program}
    exec(compile("def call():\n    return line_of_program()", file, "exec"), namespace)
    assert nothing()(namespace["call"])().startswith(f"{__file__}:")
