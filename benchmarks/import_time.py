"""How much slower does dash_inductor make `import torch`?

    python -m benchmarks.import_time

Two environments that differ in dash_inductor alone, made of links to the packages of this one; fresh processes, one
of each in turn, after one unmeasured run of each.  Two numbers, both medians:

* what the entry point takes (finding and importing its module, arming the hook), clocked inside the process;
* the whole `import torch` with and without dash_inductor, and the difference within each pair of processes with its
  quartiles: on a busy machine it is mostly noise, so the verdict is about the first number.

Writes `benchmarks/results/import_time.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "import_time.json"
LIMIT_MS = 5.0

PROGRAM = """
import sys, time
sys.path.append(sys.argv[1])
import importlib.metadata as metadata
spent = 0.0
load = metadata.EntryPoint.load

def timed(entry_point):
    def step(f, *args):
        global spent
        start = time.perf_counter()
        result = f(*args)
        spent += time.perf_counter() - start
        return result
    loaded = step(load, entry_point)
    return lambda: step(loaded)

metadata.EntryPoint.load = timed
start = time.perf_counter()
import torch
total = time.perf_counter() - start
assert ("_dash_inductor_autoload" in sys.modules) == (sys.argv[2] == "with")
assert "torch._inductor" not in sys.modules
print(total * 1e3, spent * 1e3)
"""


def environment(folder: Path, installed: Path | None) -> Path:
    """Makes an environment of links to all packages but dash_inductor, and to the copy in `installed` if one is
    given.
    """
    folder.mkdir()
    for source in (Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib")), installed):
        for entry in source.iterdir() if source else ():
            link = folder / entry.name
            if not link.exists() and (source == installed or "dash_inductor" not in entry.name):
                link.symlink_to(entry)
    return folder


def measure(folder: Path, label: str) -> tuple[float, float]:
    """(`import torch`, the entry point) in ms, in a fresh process without this environment's own packages."""
    command = [sys.executable, "-S", "-c", PROGRAM, str(folder), label]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=env).stdout
    total, spent = map(float, output.split())
    return total, spent


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of `import torch` with and without dash_inductor.")
    parser.add_argument("--runs", type=int, default=20, help="measured processes of each kind (default: 20)")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--target", str(root / "installed"), str(Path(__file__).parents[1])], check=True)
        folders = {
            "without": environment(root / "without", None),
            "with": environment(root / "with", root / "installed"),
        }
        times: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
        for run in range(runs + 1):
            for label in sorted(folders, reverse=run % 2 == 0):  # neither is always the first of its pair
                result = measure(folders[label], label)
                if run:
                    times[label].append(result)
    totals = {label: statistics.median(total for total, _ in found) for label, found in times.items()}
    own = statistics.median(spent for _, spent in times["with"])
    pairs = zip(times["with"], times["without"], strict=True)
    quartiles = statistics.quantiles((ours[0] - theirs[0] for ours, theirs in pairs), n=4)
    report = {
        "conditions": {
            "python": platform.python_version(),
            "torch": version("torch"),
            "cpu": cpu(),
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 2),
            "runs": runs,
        },
        "entry_point_ms": round(own, 2),
        "import_torch_ms": {label: round(total, 1) for label, total in totals.items()},
        "difference_quartiles_ms": [round(quartile, 1) for quartile in quartiles],
        "limit_ms": LIMIT_MS,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    if own > LIMIT_MS:
        sys.exit(f"the entry point takes {own:.2f} ms: more than {LIMIT_MS} ms")


if __name__ == "__main__":
    main()
