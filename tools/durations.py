"""Write tests/durations.json from the report of a run of all tests: how long the cases of each function take.

    make test CASES=all PYTEST_ARGS=--junitxml=build/tests.xml
    python tools/durations.py build/tests.xml

It prints where the time goes: the files of tests that take longest.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHORT = 1.5
"""Functions whose cases take less than this altogether (seconds) are not written down."""


def main(report: str) -> int:
    seconds: Counter[str] = Counter()
    cases: Counter[str] = Counter()
    for case in ET.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        parts = case.attrib["classname"].split(".")
        file = next((n for n in range(len(parts), 0, -1) if (ROOT / ("/".join(parts[:n]) + ".py")).exists()), None)
        if file is None:
            continue  # a module that could not be collected
        name = "::".join(("/".join(parts[:file]) + ".py", *parts[file:], case.attrib["name"].split("[")[0]))
        seconds[name] += float(case.attrib["time"])
        cases[name] += 1
    found = {
        name: {"cases": cases[name], "seconds": round(seconds[name], 1)}
        for name in sorted(seconds)
        if seconds[name] >= SHORT
    }
    lines = [f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in found.items()]
    (ROOT / "tests" / "durations.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    files: Counter[str] = Counter()
    for name, value in seconds.items():
        files[name.split("::")[0]] += value  # type: ignore[assignment]  # seconds are numbers with fractions
    print(f"{sum(cases.values())} tests, {sum(seconds.values()):.0f} s")
    for name, value in files.most_common(25):
        print(f"{value:7.0f} s  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
