"""The possible orders of instructions in PTX: the text of a loop need not stand in the order in which it runs."""

from __future__ import annotations

import re
from collections.abc import Mapping


def _statements(ptx: str) -> list[str]:
    body = ptx[ptx.index(".entry") :]
    lines = (line.split("//")[0].strip() for line in body.splitlines())
    return [
        re.sub(r"\s+", " ", line) for line in lines if line and not line.startswith((".loc", ".b8", ".b32", ".b64"))
    ]


def following(ptx: str, events: Mapping[str, str], first: str, last: str) -> dict[str, set[str]]:
    """For each event between `first` and `last`, the events that can be the next one; "end" is the kernel's end.

    Args:
        events: name -> regular expression of its instruction.  Instructions that are no event are passed over, and so
            are jumps to labels inside inline assembly (a spin loop is one event).
        first, last: paths begin at every `first`; what comes after a `last` is not looked at.
    """
    lines = _statements(ptx)
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\$L__BB\w+:", line)}
    tables = {
        name: re.findall(r"\$L__BB\w+", targets)
        for name, targets in re.findall(r"^\s*(\$L_brx_\w+):\s*\.branchtargets([^;]*);", ptx, re.MULTILINE)
    }
    names = [next((name for name, pattern in events.items() if re.search(pattern, line)), None) for line in lines]

    def successors(i: int) -> list[int]:
        line = lines[i]
        if re.match(r"(ret|exit|trap);", line):
            return []
        jump = re.search(r"\bbra(\.uni)? (\$L__BB\w+);", line)
        if jump:
            return [labels[jump[2]], *([i + 1] if line.startswith("@") else [])]
        switch = re.search(r"\bbrx\.idx \S+, (\$L_brx_\w+);", line)
        return [labels[label] for label in tables[switch[1]]] if switch else [i + 1]

    def next_events(start: int) -> set[int | None]:
        found: set[int | None] = set()
        seen, todo = set(), successors(start)
        while todo:
            i = todo.pop()
            if i in seen:
                continue
            seen.add(i)
            if names[i] is not None:
                found.add(i)
            else:
                after = successors(i)
                found |= set() if after else {None}
                todo += after
        return found

    result: dict[str, set[str]] = {}
    done: set[int] = set()
    todo = [i for i, name in enumerate(names) if name == first]
    while todo:
        here = todo.pop()
        name = names[here]
        if here in done or name is None or name == last:
            continue
        done.add(here)
        reached = next_events(here)
        result.setdefault(name, set()).update(names[i] or "" if i is not None else "end" for i in reached)
        todo += [i for i in reached if i is not None]
    return result
