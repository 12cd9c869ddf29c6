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


def html(result: Comparison) -> str:
    """The HTML page about a comparison."""
    parts = [_runs(result)]
    if result.first is not None:
        parts.append(_first(result, result.first))
    elif result.conclusion:
        parts.append(_section("What this means", f"<p>{_text(result.conclusion)}</p>"))
    if result.state:
        parts.append(_section("State with which the step begins", _list(map(state, result.state))))
    if result.others:
        rows = [(str(other.rank), other.phase, _mono(other.tensor)) for other in result.others]
        rows += [("", "...", "")] * (result.others_count > len(result.others))
        parts.append(_section(f"{others(result)} in this step", _table(("rank", "what", "tensor"), rows)))
    if result.findings:
        found = (f"{run}, step {finding['step']}: {sentence(finding)}" for run, finding in result.findings)
        parts.append(_section("What the runs themselves have found", _list(found)))
    if result.reasons:
        parts.append(_section("Notes about the recordings", _list(result.reasons)))
    if result.facts:
        facts = [(_mono(name), _mono(shown(a)), _mono(shown(b))) for name, a, b in result.facts]
        parts.append(_section("Facts that differ", _table(("fact", "a", "b"), facts)))
    elif result.steps:
        same = "Versions, GPU, driver, settings, numerics keys and environment of the runs are equal."
        parts.append(_section("Facts that differ", f"<p>{same}</p>"))
    verdict = f'<div class="verdict">{_text(result.verdict)}</div><h1>{_text(headline(result))}</h1>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(headline(result))}</title>"
        f"<style>{_STYLE}:root {{ --verdict: var({_COLOURS[result.verdict]}); }}</style></head>"
        f"<body><main><header>{verdict}</header>{''.join(parts)}</main></body></html>\n"
    )


def _runs(result: Comparison) -> str:
    first = result.first
    equal = result.steps - (first is not None)
    bar = f'<span style="flex: {equal} 1 0"></span>{"<i></i>" if first is not None else ""}'
    words = f"{equal} of {result.steps} compared steps are equal" if result.steps else "no step was compared"
    rows = [("a", _mono(result.a)), ("b", _mono(result.b)), ("ranks", str(result.ranks))]
    table = _table(("", "recording"), rows)
    return _section("Runs", f'{table}<div class="steps">{bar}</div><div class="soft">{words}</div>')


def _first(result: Comparison, first: Difference) -> str:
    rows = [
        ("step", str(first.step)),
        ("rank", str(first.rank)),
        ("what", _text(first.phase)),
        ("tensor", _mono(first.tensor)),
        ("in a", f'<span class="differs">{_mono(first.a)}</span>'),
        ("in b", f'<span class="differs">{_mono(first.b)}</span>'),
        ("equal just before", _mono(first.before) if first.before else '<span class="soft">nothing</span>'),
    ]
    return _section("The first tensor that differs", f"{_table((), rows)}<p>{_text(result.conclusion)}</p>")


def _section(title: str, content: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{content}</section>"


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Cells are HTML."""
    head = f"<tr>{''.join(f'<th>{_text(cell)}</th>' for cell in header)}</tr>" if header else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{head}{body}</table></div>'


def _list(sentences: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(each)}</li>' for each in sentences)}</ul>"


def _mono(text: str) -> str:
    return f"<code>{_text(text)}</code>"


def _text(text: str) -> str:
    return escape(printable(text))
