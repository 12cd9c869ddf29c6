"""Writes a graph as DOT text for Graphviz."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .snapshot import Kind, Snapshot

COLOURS: dict[Kind, str] = {"input": "#e8f0fb", "attention": "#fde9d9", "ours": "#dcf3e4", "other": "#f4f4f2"}


def dot(whole: Snapshot, shown: Snapshot, centres: Sequence[str], title: str) -> str:
    """Returns a DOT digraph with the nodes of `shown` and the edges between them.

    Args:
        whole: the whole graph; a node with inputs that are not shown has a dashed border.
        shown: the part of the graph to draw.
        centres: the names of the nodes to emphasise with a thick border.
        title: the name of the digraph.
    """
    return "\n".join([f"digraph {_quoted(title)} {{", *_lines(whole, shown, centres), "}\n"])


def _lines(whole: Snapshot, shown: Snapshot, centres: Sequence[str]) -> Iterator[str]:
    yield '  node [shape=box, style="rounded,filled", fontname=monospace];'
    for item in shown.items.values():
        label = f"{item.label}\n{item.note}" if item.note else item.label
        looks = {"label": label, "tooltip": item.line, "fillcolor": COLOURS[item.kind]}
        if any(source not in shown.items for source in whole.items[item.name].inputs):
            looks["style"] = "rounded,filled,dashed"
        if item.name in centres:
            looks["penwidth"] = "3"
        yield f"  {_quoted(item.name)} [{', '.join(f'{name}={_quoted(value)}' for name, value in looks.items())}];"
    for item in shown.items.values():
        for source in item.inputs:
            if source in shown.items:
                yield f"  {_quoted(source)} -> {_quoted(item.name)};"


def _quoted(text: str) -> str:
    """A quoted DOT string that is displayed as `text`; backslashes are escaped, because they begin escapes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
