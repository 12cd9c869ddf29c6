"""A graph as an SVG drawing: nodes in layers, every edge downwards, crossings few.

The layout is Sugiyama's: layers by the longest path, edges across several layers through bends of their own, the order
within a layer by the mean place of the neighbours, then places along the layer that keep edges straight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

from .snapshot import Item, Snapshot

HEIGHT, GAP_Y, GAP_X, MARGIN = 40, 34, 18, 12
CHARACTER, PADDING, WIDEST = 6.7, 22, 42
"""Width of a character of a label, extra width of a box beside its label, and the most characters that a label has."""

STYLE = """
svg.drawing { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: transparent }
.drawing rect { fill: #f4f4f2; stroke: #a3a3a0; rx: 6px }
.drawing text { fill: #1d1d1f } .drawing .note { fill: #6a6a70; font-size: 10.5px }
.drawing path { fill: none; stroke: #9a9aa2; stroke-width: 1.3 } .drawing .head { fill: #9a9aa2; stroke: none }
.drawing .input rect { fill: #e8f0fb; stroke: #7aa5dd } .drawing .attention rect { fill: #fde9d9; stroke: #dd8a47 }
.drawing .ours rect { fill: #dcf3e4; stroke: #3f9e66 } .drawing .centre rect { stroke-width: 2.6 }
.drawing .more rect { stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) {
  .drawing rect { fill: #2a2a2e; stroke: #66666c } .drawing text { fill: #ececf0 } .drawing .note { fill: #a0a0a8 }
  .drawing path { stroke: #77777f } .drawing .head { fill: #77777f }
  .drawing .input rect { fill: #1d2c40; stroke: #4f7fbd } .drawing .attention rect { fill: #42290f; stroke: #c97e3d }
  .drawing .ours rect { fill: #16351f; stroke: #46a86c }
}
"""


def svg(whole: Snapshot, shown: Snapshot, centres: Sequence[str], title: str) -> str:
    """The nodes of `shown` as a drawing.

    Args:
        whole: the graph that they are from: a node some of whose inputs are not shown has a dashed border.
        centres: the names of the nodes to emphasise.
    """
    layout = _Layout(shown)
    parts = [_edge(layout, source, item.name) for item in shown.items.values() for source in item.inputs
             if source in shown.items]  # fmt: skip
    for item in shown.items.values():
        cut = any(source not in shown.items for source in whole.items[item.name].inputs)
        parts.append(_node(layout, item, centre=item.name in centres, cut=cut))
    width, height = layout.size
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="img" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}"><title>{escape(title)}</title><style>{STYLE}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


@dataclass
class _Place:
    """A node, or a bend of an edge where `item` is None: its layer, its width and its centre along the layer."""

    layer: int
    width: float
    item: Item | None = None
    x: float = 0.0
    above: list[_Place] = field(default_factory=list)
    below: list[_Place] = field(default_factory=list)


class _Layout:
    """Places of nodes, and of the bends of edges."""

    def __init__(self, shown: Snapshot) -> None:
        layers = _layers(shown.items)
        self.places = {name: _Place(layers[name], _width(item), item) for name, item in shown.items.items()}
        self.bends: dict[tuple[str, str], list[_Place]] = {}
        everything = list(self.places.values())
        for name, item in shown.items.items():
            for source in item.inputs:
                if source in self.places:
                    everything += self._connect(source, name)
        self.rows = [
            [p for p in everything if p.layer == layer] for layer in range(1 + max(layers.values(), default=0))
        ]
        _order(self.rows)
        _spread(self.rows)
        left = min((p.x - p.width / 2 for p in everything), default=0.0)
        for place in everything:
            place.x += MARGIN - left

    def _connect(self, source: str, target: str) -> list[_Place]:
        first, last = self.places[source], self.places[target]
        bends = [_Place(layer, 8.0) for layer in range(first.layer + 1, last.layer)]
        chain = [first, *bends, last]
        for upper, lower in itertools.pairwise(chain):
            upper.below.append(lower)
            lower.above.append(upper)
        self.bends[source, target] = bends
        return bends

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the drawing."""
        width = max((p.x + p.width / 2 for row in self.rows for p in row), default=0.0) + MARGIN
        return width, 2 * MARGIN + len(self.rows) * (HEIGHT + GAP_Y) - GAP_Y


def _layers(items: dict[str, Item]) -> dict[str, int]:
    """The row of each node: below all that it reads; if it reads nothing shown, right above its first reader."""
    layers: dict[str, int] = {}
    for name, item in items.items():  # a graph's order is topological
        layers[name] = 1 + max((layers[source] for source in item.inputs if source in layers), default=-1)
    readers: dict[str, list[str]] = {}
    for name, item in items.items():
        for source in item.inputs:
            readers.setdefault(source, []).append(name)
    for name in reversed(items):
        if name in readers and not any(source in layers for source in items[name].inputs):
            layers[name] = min(layers[reader] for reader in readers[name]) - 1
    return layers


def _order(rows: list[list[_Place]]) -> None:
    """Order the rows by the mean place of the neighbours, down and up in turns."""
    for turn in range(12):
        down = turn % 2 == 0
        for row in rows if down else reversed(rows):
            place = {id(p): i for other in rows for i, p in enumerate(other)}
            keys = {id(p): _mean([place[id(q)] for q in (p.above if down else p.below)], place[id(p)]) for p in row}
            row.sort(key=lambda p: keys[id(p)])


def _spread(rows: list[list[_Place]]) -> None:
    """Give places along the rows: near the mean of the neighbours, in the order of the row, without overlaps."""
    for row in rows:
        _put(row, [0.0] * len(row))
    for turn in range(16):
        for row in rows if turn % 2 == 0 else reversed(rows):
            _put(row, [_mean([q.x for q in (*p.above, *p.below)], p.x) for p in row])


def _put(row: list[_Place], wanted: Sequence[float]) -> None:
    """Places as near to the wanted ones as the order and the widths allow: the mean of packing from either side."""
    left = _packed(row, wanted)
    right = [-x for x in reversed(_packed(row[::-1], [-x for x in reversed(wanted)]))]
    for place, a, b in zip(row, left, right, strict=True):
        place.x = (a + b) / 2


def _packed(row: Sequence[_Place], wanted: Sequence[float]) -> list[float]:
    found: list[float] = []
    for i, place in enumerate(row):
        least = found[-1] + (row[i - 1].width + place.width) / 2 + GAP_X if found else wanted[i]
        found.append(max(least, wanted[i]))
    return found


def _mean(values: Iterable[float], otherwise: float) -> float:
    found = list(values)
    return sum(found) / len(found) if found else otherwise


def _width(item: Item) -> float:
    return PADDING + CHARACTER * min(WIDEST, max(len(item.label), round(0.88 * len(item.note))))


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _y(layer: int) -> float:
    return MARGIN + layer * (HEIGHT + GAP_Y)


def _node(layout: _Layout, item: Item, *, centre: bool, cut: bool) -> str:
    place = layout.places[item.name]
    x, y = place.x - place.width / 2, _y(place.layer)
    classes = " ".join([item.kind, *(["centre"] if centre else []), *(["more"] if cut else [])])
    note = f'<text class="note" x="{place.x:.1f}" y="{y + 31:.1f}" text-anchor="middle">' + escape(
        _shortened(item.note, 48)
    )
    return (
        f"<g class={quoteattr(classes)} data-node={quoteattr(item.name)}><title>{escape(item.line)}</title>"
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{place.width:.1f}" height="{HEIGHT}"/>'
        f'<text x="{place.x:.1f}" y="{y + (17 if item.note else 24):.1f}" text-anchor="middle">'
        f"{escape(_shortened(item.label, WIDEST))}</text>" + (f"{note}</text>" if item.note else "") + "</g>"
    )


def _edge(layout: _Layout, source: str, target: str) -> str:
    """A curve from node to node through its bends."""
    first, last = layout.places[source], layout.places[target]
    points = [(first.x, _y(first.layer) + HEIGHT)]
    for bend in layout.bends[source, target]:
        points += [(bend.x, _y(bend.layer)), (bend.x, _y(bend.layer) + HEIGHT)]
    points.append((last.x, _y(last.layer) - 5))
    path = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        middle = (y0 + y1) / 2
        path += f" C{x0:.1f},{middle:.1f} {x1:.1f},{middle:.1f} {x1:.1f},{y1:.1f}"
    x, y = points[-1][0], points[-1][1] + 5
    head = f"M{x - 4:.1f},{y - 7:.1f} L{x + 4:.1f},{y - 7:.1f} L{x:.1f},{y:.1f} Z"
    return f'<path d="{path}"/><path class="head" d="{head}"/>'
