"""Shows a comparison as one HTML page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from dash_inductor.untrusted import printable

from .agreement import sentence
from .compare import Comparison, Difference
from .report import headline, others, shown, state

_STYLE = """
:root { color-scheme: light dark; --ground: #f6f7f9; --card: #fff; --ink: #1b1f27; --soft: #667085; --line: #dfe3ea;
  --good: #0f7b4f; --bad: #b42318; --unsure: #93610a; --code: #eef1f5; }
@media (prefers-color-scheme: dark) { :root { --ground: #0f1217; --card: #171b22; --ink: #e6e9ef; --soft: #98a2b3;
  --line: #2a303b; --good: #4cc38a; --bad: #ff7b6e; --unsure: #e2b04a; --code: #1f252e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.55 system-ui, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 20px 64px; }
header { border-left: 6px solid var(--verdict); padding: 2px 0 2px 16px; margin-bottom: 24px; }
.verdict { color: var(--verdict); font-weight: 600; text-transform: uppercase; font-size: 12px; letter-spacing: .08em; }
h1 { font-size: 22px; line-height: 1.3; margin: 2px 0 0; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0 0 12px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin: 16px 0; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 12px; }
th, td { padding: 6px 12px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
code, .mono { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.differs { background: color-mix(in srgb, var(--bad) 14%, transparent); }
.soft { color: var(--soft); } p { margin: 8px 0; } ul { margin: 0; padding-left: 20px; }
.steps { display: flex; height: 14px; border-radius: 7px; overflow: hidden; background: var(--code);
  margin: 4px 0 6px; }
.steps span { background: var(--good); } .steps i { background: var(--bad); min-width: 6px; flex: 1 1 0; }
.scroll { overflow-x: auto; }
"""
_COLOURS = {"equal": "--good", "diverged": "--bad", "not comparable": "--unsure"}


def html(result: Comparison, measured: Sequence[str] = ()) -> str:
    """The HTML page about a comparison.

    Args:
        result: the comparison.
        measured: sections about losses and sizes of differences (`losses.sections`, `layout_page.magnitudes`), HTML.
    """
    parts = [_runs(result)]
    if result.first is not None:
        parts.append(_first(result, result.first))
    elif result.conclusion:
        parts.append(section("What this means", f"<p>{plain(result.conclusion)}</p>"))
    parts += measured
    if result.state:
        parts.append(section("State with which the step begins", items(map(state, result.state))))
    if result.others:
        rows = [(str(other.rank), other.phase, mono(other.tensor)) for other in result.others]
        rows += [("", "...", "")] * (result.others_count > len(result.others))
        parts.append(section(f"{others(result)} in this step", table(("rank", "what", "tensor"), rows)))
    if result.findings:
        found = (f"{run}, step {finding['step']}: {sentence(finding)}" for run, finding in result.findings)
        parts.append(section("What the runs themselves have found", items(found)))
    if result.reasons:
        parts.append(section("Notes about the recordings", items(result.reasons)))
    if result.facts:
        facts = [(mono(name), mono(shown(a)), mono(shown(b))) for name, a, b in result.facts]
        parts.append(section("Facts that differ", table(("fact", "a", "b"), facts)))
    elif result.steps:
        same = "Versions, GPU, driver, settings, numerics keys and environment of the runs are equal."
        parts.append(section("Facts that differ", f"<p>{same}</p>"))
    return document(result.verdict, _COLOURS[result.verdict], headline(result), parts)


def document(verdict: str, colour: str, title: str, parts: Iterable[str]) -> str:
    """A page about a comparison.

    Args:
        verdict: one word or two.
        colour: the variable of its colour.
        title: a sentence.
        parts: HTML.
    """
    head = f'<div class="verdict">{plain(verdict)}</div><h1>{plain(title)}</h1>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{plain(title)}</title>"
        f"<style>{_STYLE}:root {{ --verdict: var({colour}); }}</style></head>"
        f"<body><main><header>{head}</header>{''.join(parts)}</main></body></html>\n"
    )


def _runs(result: Comparison) -> str:
    first = result.first
    equal = result.steps - (first is not None)
    bar = f'<span style="flex: {equal} 1 0"></span>{"<i></i>" if first is not None else ""}'
    words = f"{equal} of {result.steps} compared steps are equal" if result.steps else "no step was compared"
    runs = table(("", "recording"), [("a", mono(result.a)), ("b", mono(result.b)), ("ranks", str(result.ranks))])
    return section("Runs", f'{runs}<div class="steps">{bar}</div><div class="soft">{words}</div>')


def _first(result: Comparison, first: Difference) -> str:
    rows = [
        ("step", str(first.step)),
        ("rank", str(first.rank)),
        ("what", plain(first.phase)),
        ("tensor", mono(first.tensor)),
        ("in a", f'<span class="differs">{mono(first.a)}</span>'),
        ("in b", f'<span class="differs">{mono(first.b)}</span>'),
        ("equal just before", mono(first.before) if first.before else '<span class="soft">nothing</span>'),
    ]
    return section("The first tensor that differs", f"{table((), rows)}<p>{plain(result.conclusion)}</p>")


def section(title: str, content: str) -> str:
    """A card of the page with a heading; `content` is HTML."""
    return f"<section><h2>{plain(title)}</h2>{content}</section>"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table, whose cells are HTML."""
    head = f"<tr>{''.join(f'<th>{plain(cell)}</th>' for cell in header)}</tr>" if header else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{head}{body}</table></div>'


def items(sentences: Iterable[str]) -> str:
    """A list of sentences."""
    return f"<ul>{''.join(f'<li>{plain(each)}</li>' for each in sentences)}</ul>"


def mono(text: str) -> str:
    """A name, as code."""
    return f"<code>{plain(text)}</code>"


def plain(text: str) -> str:
    """A text as HTML, without control characters."""
    return escape(printable(text))
