"""README and docs agree with the code: tables, quoted messages, links and code blocks."""

from __future__ import annotations

import ast
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dash_inductor.config import SETTINGS, config
from dash_inductor.kernels.hopper.kernel_configs import CANDIDATES as HOPPER
from dash_inductor.kernels.hopper.prediction import ARCH
from dash_inductor.kernels.portable.family import LIMIT, LIMIT_OF_16_BITS
from dash_inductor.model.architectures import SAME_AS, WORKERS
from dash_inductor.model.reasons import Reason
from dash_inductor.passes.attention.checks import DTYPES
from dash_inductor.upstream.compat import TESTED

from ..support.distribution import ROOT

DOCS = ROOT / "docs"
GUARD = ROOT / "guard"
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "guard/README")),
    *sorted(DOCS.rglob("*.md")),
    *sorted((GUARD / "docs").glob("*.md")),
]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of all table rows between a heading and the next one."""
    section = re.split(r"^#+ ", text.split(f"{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]


def code_blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text_of(name), re.MULTILINE | re.DOTALL)


def test_every_reason_is_listed_with_its_explanation() -> None:
    listed = {cells[0].strip("`"): cells[1] for cells in rows(text_of("docs/replaced.md"), "## Reasons")}
    assert {reason.value: listed.get(reason.value) for reason in Reason} == {r.value: r.explanation for r in Reason}


def test_properties_are_the_limits_of_the_code() -> None:
    listed = {cells[0]: cells[1] for cells in rows(text_of("docs/replaced.md"), "## Properties")}
    assert max(dims[0] for dims in HOPPER) <= LIMIT_OF_16_BITS
    expected = f"all up to {LIMIT}, and up to {LIMIT_OF_16_BITS} for float16 and bfloat16; v may "
    assert listed["head dimension"].startswith(expected)
    assert all(str(dtype).removeprefix("torch.") in listed["dtype"] for dtype in DTYPES)
    assert set(re.findall(r"sm_\d+", listed["device"])) == {*WORKERS, *SAME_AS} - {"cpu"}


def test_versions_and_gpus_are_those_of_the_code() -> None:
    versions = rows(text_of("docs/versions.md"), "## torch, triton and Python")[2:]
    assert tuple(cells[0] for cells in versions) == TESTED
    listed = {cells[0]: cells[2] for cells in rows(text_of("docs/versions.md"), "## GPUs")[2:]}
    assert listed.keys() == {*WORKERS, *SAME_AS} - {"cpu"}
    assert {arch for arch, kernels in listed.items() if kernels == "Hopper kernels"} == {ARCH}
    tables = {arch: kernels.partition(", tables of ")[2] for arch, kernels in listed.items()}
    assert tables == {arch: SAME_AS.get(arch, "") for arch in listed}


def test_the_table_of_models_is_that_of_the_golden_file() -> None:
    """If this fails, run ``python tools/model_tables.py``."""
    tool = runpy.run_path(str(ROOT / "tools" / "model_tables.py"))
    page = text_of("docs/replaced.md")
    lines = [json.loads(text_of(f"tests/golden/{name}.json")) for name in ("models", "programs")]
    assert tool["filled"](page, *lines) == page


def test_tables_of_models_name_versions_and_what_differs() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "model_tables.py"))
    ours = {"Llama plain": "2 causal", "Llama right": "2 causal & keys(0)", "Bert plain": "2 full"}
    other = {"cpu": {"Bert plain": "2 not replaced: math_path"}, "cuda": {}}
    none: dict[str, dict[str, str]] = {"cpu": {}, "cuda": {}}
    lines = {"versions": {"torch": "1", "transformers": "3"}, "cpu": ours, "cuda": ours}
    program = {"versions": {"shop": "7"}, "lines": {"shop Two words flex, packed": "1 causal"}}
    page = "".join(tool[name] for name in ("BEGIN", "END", "PROGRAMS_BEGIN", "PROGRAMS_END"))
    shown = tool["filled"](page, lines | {tool["OTHERS"]: {"1": other, "2": none}}, program)
    assert "\n| shop 7 | Two words | flex, packed | causal |\n" in shown
    assert "\nThis is with torch 1 and transformers 3.\n" in shown
    assert "\n| Llama | causal | causal & keys |  |\n| Bert | full |  |  |\n" in shown
    assert "\nWith transformers 2 all lines are the same.\n" in shown
    assert "\n| 1 | Bert | full (CPU: not replaced: math_path) |  |  |\n" in shown
    assert "| 1 | Llama" not in shown


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md", "docs/whole-step.md"])
def test_tables_of_results_are_those_of_the_files(page: str) -> None:
    """If this fails, run ``python tools/result_tables.py``."""
    text = text_of(page)
    assert "written by tools/result_tables.py" in text
    assert runpy.run_path(str(ROOT / "tools" / "result_tables.py"))["filled"](text) == text


def test_what_is_no_commit_is_not_named_as_one() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "result_tables.py"))
    for text in ("d7d3ba5", "d7d3ba5" + 33 * "0"):
        assert tool["commit"]({"conditions": {"commit": text}}) == text
    for text in ("work", "unknown", "", "d7d3ba", "d7d3ba5-dirty", "D7D3BA5", "d7d3ba5\n"):
        assert tool["commit"]({"conditions": {"commit": text}}) == "not recorded", text


def test_settings_are_those_of_the_code() -> None:
    listed = {
        name.strip("`"): (variable.strip("`"), re.findall(r"`(\w+)`", values))
        for name, variable, values, _ in rows(text_of("docs/adoption.md"), "## Settings")[2:]
    }
    assert listed == {name: (setting.env, list(setting.allowed or ())) for name, setting in SETTINGS.items()}
    choices = {name: setting for name, setting in SETTINGS.items() if setting.allowed}
    assert all(setting.allowed[listed[name][1][0]] == setting.default for name, setting in choices.items())


def test_troubleshooting_has_advice_for_every_reason() -> None:
    listed = rows(text_of("docs/troubleshooting.md"), "## A site is not replaced")[2:]
    assert listed == [[f"`{reason.value}`", reason.advice] for reason in Reason]


@pytest.mark.parametrize(
    "message",
    [
        "dash_inductor is inactive, attention is compiled as plain PyTorch compiles it.",
        "lacks what dash_inductor relies on:",
        " are not found",
        "dash_inductor.enable() has no effect: DASH_INDUCTOR=0 is set",
        "is not allowed: expected ",
        "attention is compiled as plain PyTorch compiles it: torch._inductor.config has ",
        "dash_inductor has no setting ",
        "autograd cannot differentiate through them",
    ],
)
def test_quoted_messages_exist(message: str) -> None:
    assert message in text_of("docs/troubleshooting.md")
    sources = [*ROOT.glob("_dash_inductor_*.py")]
    sources += [
        path for folder in ("dash_inductor", "kernels", "guard/dash_guard") for path in (ROOT / folder).rglob("*.py")
    ]
    assert any(message in literal for path in sources for literal in literals(path))


def literals(path: Path) -> list[str]:
    """String constants; of f-strings the constant parts."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def links(text: str) -> list[tuple[str, str]]:
    """Targets and anchors of links to other files, or to this one (""): in the text, and defined at its end."""
    return [
        (target, anchor)
        for link in re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
        for target, _, anchor in ["".join(link).partition("#")]
        if not target.startswith("https://")
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    missing = [target for target, _ in links(page.read_text(encoding="utf-8")) if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_anchors_of_links_are_headings(page: Path) -> None:
    slug = runpy.run_path(str(ROOT / "tools" / "docs_site.py"))["slug"]

    def anchors(target: str) -> set[str]:
        text = ((page.parent / target) if target else page).read_text(encoding="utf-8")
        return {slug(heading) for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE)}

    found = links(page.read_text(encoding="utf-8"))
    assert not [(target, anchor) for target, anchor in found if anchor and anchor not in anchors(target)]


def test_evidence_is_defined_and_used() -> None:
    text = text_of("docs/log/facts.md")
    defined = re.findall(r"^\[([^\]]+)\]: ", text, re.MULTILINE)
    used = re.findall(r"\[([^\]\n]+)\](?![(:])", text)
    assert len(defined) == len(set(defined))
    assert set(defined) == set(used)


def test_index_names_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w/-]+\.md)\)", text_of("docs/index.md")))
    assert linked == {page.name for page in DOCS.glob("*.md")} - {"index.md"} | {"log/index.md"}


def test_index_of_the_log_names_every_day_newest_first() -> None:
    days = sorted((page.stem for page in (DOCS / "log").glob("2*.md")), reverse=True)
    assert days
    listed = [cells[0] for cells in rows(text_of("docs/log/index.md"), "# Log")[2:]]
    assert listed == [f"[{day}]({day}.md)" for day in days]


@pytest.mark.parametrize("page", sorted((DOCS / "log").glob("2*.md")), ids=lambda page: page.stem)
def test_pages_of_the_log_are_of_their_day(page: Path) -> None:
    assert page.read_text(encoding="utf-8").startswith(f"# Log of {page.stem}\n\n## ")


def test_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE))
    assert set(re.findall(r"make ([\w-]+)", text_of("README.md"))) <= targets


class Model(nn.Module):
    """A model as the README's example calls it, with one attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x = self.embedding(input_ids).unflatten(-1, (2, 16)).transpose(1, 2)
        return SimpleNamespace(loss=F.scaled_dot_product_attention(x, x, x, is_causal=True).square().mean())


def test_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = code_blocks("README.md")
    assert len(block.split("\n\n")[-1].splitlines()) + block.count("import torch") <= 6
    with config.patch(cpu="reference"):
        exec(block, {"model": Model(), "tokens": torch.arange(12).view(1, 12)})
    assert "replaced: 1x2x12x16 float32, mask causal" in capsys.readouterr().out


def test_numerics_key_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = code_blocks("docs/determinism.md")
    exec(block, {})
    assert "/bfloat16/d128/causal/group4/sm_90/" in capsys.readouterr().out
