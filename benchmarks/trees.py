"""The Hopper backward or forward of several copies of the package, by turns: which changes are worth their place.

    pip install --no-deps --target trees/a .    # in a checkout, and the same for every other one
    python -m benchmarks.trees trees/a trees/b [--forward] [--only regular:d64 window] [--rounds 3]
    python -m benchmarks.trees trees/a trees/a=.venv-torch2.15    # one copy with two versions of torch and triton

Every copy runs in a process of its own, which imports it from its folder, with the interpreter of the virtual
environment behind a ``=``, or with the one that runs this program.  They build the kernels of all shapes at the
same time, and measure one after the other: direct calls without PyTorch's dispatcher, backwards with the planner's
plan.  The table has rates in TFLOP/s, the median of the rounds, and in brackets the rate relative to the first copy's.
"other bits" stands behind a rate if the results are not equal to the first copy's, where zeros of both signs count as
equal.  A copy that does not answer within --patience seconds is ended and said to hang: a kernel may wait for what
never comes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dash_inductor.model import AttentionSpec, Mask
from dash_inductor.planning import plan

from . import common, turns
from .contenders import BSHD, arch, forward
from .forward import LENGTHS
from .forward import shapes as forwards
from .shapes import SHAPES, Shape

ROOT = Path(__file__).resolve().parents[1]
WORKER = ("-c", "import sys; from benchmarks import trees; trees.work(sys.argv[1])")
"""What the process of a copy runs, as arguments of its interpreter."""


class Kind(NamedTuple):
    """A kind of measurement: its shapes by name, the operations of one, and how to prepare a direct call."""

    shapes: Mapping[str, Shape]
    flops: Callable[[Shape], float]
    prepare: Callable[[Shape], Callable[[], Sequence[Tensor]]]


def prepare_backward(shape: Shape) -> Callable[[], Sequence[Tensor]]:
    from dash_inductor.operators.attention import attention_backward

    tensors = shape.tensors()
    out, lse, _, _ = forward(shape, tensors)
    q, k, v, do = tensors
    spec = AttentionSpec(Mask(shape.mask), shape.scale, (BSHD,) * 3)
    run, texts = attention_backward.overloadpacket.direct, (str(spec), str(plan(shape.site(), arch())), "benchmark")
    return partial(run, do, q, k, v, out, lse, [], *texts)


def prepare_forward(shape: Shape) -> Callable[[], Sequence[Tensor]]:
    from dash_inductor.operators.attention import attention_forward

    q, k, v, _ = shape.tensors()
    spec = AttentionSpec(Mask(shape.mask), shape.scale, (BSHD,))
    run, texts = attention_forward.overloadpacket.direct, (str(spec), str(plan(shape.site(), arch())), "benchmark")
    return partial(run, q, k, v, [], *texts)


KINDS = {
    "backward": Kind(SHAPES, lambda shape: shape.flops, prepare_backward),
    "forward": Kind({shape.name: shape for shape in forwards(LENGTHS)}, turns.flops, prepare_forward),
}


def work(kind: str) -> None:
    """Build the shapes whose names come as lines, and measure those that come again.

    A line of JSON answers each line: {"digest", "triton"}, the same with "ms", or {"error"}.

    Args:
        kind: one of `KINDS`.
    """
    shapes, _, prepare = KINDS[kind]
    answers: dict[str, dict[str, Any]] = {}
    current, call = "", None
    for line in sys.stdin:
        name = line.strip()
        try:
            if name not in answers:
                answers[name] = {"digest": digest(prepare(shapes[name])()), "triton": triton.__version__}
            elif "error" not in answers[name]:
                if name != current:
                    call = None  # its tensors go before others come
                    current, call = name, prepare(shapes[name])
                answers[name] = answers[name] | {"ms": common.time_ms(call)[0]}
        except Exception as error:  # whatever a changed kernel may raise belongs into the table
            answers[name] = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
        print(json.dumps(answers[name]), flush=True)


def digest(results: Sequence[Tensor]) -> str:
    """Returns a digest of the bits of tensors, in which zeros have no sign."""
    found = hashlib.sha256()
    for result in results:
        unsigned = torch.where(result == 0, 0, result).contiguous()
        found.update(unsigned.view(torch.int16).cpu().numpy().tobytes())
    return found.hexdigest()


class Place(NamedTuple):
    """The folder of a copy of the package, and the virtual environment that runs it; None for that of this process."""

    folder: Path
    environment: Path | None = None

    @classmethod
    def named(cls, text: str) -> Place:
        folder, _, environment = text.partition("=")
        return cls(Path(folder), Path(environment) if environment else None)

    @property
    def name(self) -> str:
        return self.folder.name + (f"={self.environment.name}" if self.environment else "")

    @property
    def python(self) -> str:
        return str(self.environment.absolute() / "bin" / "python") if self.environment else sys.executable


class Copy:
    """A process that measures one copy of the package."""

    def __init__(self, place: Place, kind: str, patience: float, arguments: Sequence[str] = WORKER) -> None:
        self.name, self.patience = place.name, patience
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(place.folder.resolve()), str(ROOT)]))
        self.cache = tempfile.TemporaryDirectory(prefix=f"trees-{place.name}-")
        environment["TRITON_CACHE_DIR"] = self.cache.name
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # Elsewhere, because the folder in which Python starts would come before the copy's folder.
        command = [place.python, *arguments, kind]
        self.process = subprocess.Popen(command, env=environment, cwd=self.cache.name, **pipes)
        self.answers: queue.Queue[str] = queue.Queue()
        self.over = ""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.answers.put(line)
        self.answers.put("")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.cache.cleanup()

    def ask(self, shape: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(shape + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer is that it has ended

    def answer(self) -> dict[str, Any]:
        if not self.over:
            try:
                line = self.answers.get(timeout=self.patience)
                self.over = "" if line else f"ended with {self.process.wait()}"
            except queue.Empty:
                self.process.kill()
                self.over = f"hangs: no answer within {self.patience:g} s"
        found: dict[str, Any] = {"error": self.over} if self.over else json.loads(line)
        return found


def cell(answers: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]], flops: float) -> str:
    """Formats the table cell of a copy at a shape, from its answers and the first copy's."""
    if error := next((answer["error"] for answer in answers if "error" in answer), ""):
        return str(error)
    ms = statistics.median(answer["ms"] for answer in answers)
    text = f"{flops / ms / 1e9:.1f}"
    if any("error" in answer for answer in first):
        return text
    text += f" ({statistics.median(answer['ms'] for answer in first) / ms:.3f})"
    same = {answer["digest"] for answer in (*answers, *first)}
    return text if len(same) == 1 else f"{text} other bits"


def measure(
    copies: Sequence[Copy], shapes: Sequence[Shape], flops: Callable[[Shape], float], rounds: int
) -> list[dict[str, Any]]:
    """A row for each shape: its name, and by copy its cell of the table, its times in ms, and its digest or error."""
    for copy in copies:
        for shape in shapes:
            copy.ask(shape.name)
    for copy in copies:  # all have been building meanwhile
        for _ in shapes:
            copy.answer()
    rows = []
    for shape in shapes:
        answers: dict[str, list[dict[str, Any]]] = {copy.name: [] for copy in copies}
        for _ in range(rounds):
            for copy in copies:
                copy.ask(shape.name)
                answers[copy.name].append(copy.answer())
        first = answers[copies[0].name]
        table = {name: cell(found, first, flops(shape)) for name, found in answers.items()}
        rows.append({"shape": shape.name, "table": table, "answers": answers})
        print({"shape": shape.name} | table, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "copies", nargs="+", type=Place.named, metavar="FOLDER[=ENVIRONMENT]",
        help="folders with a package dash_inductor each, and the virtual environments that run them",
    )  # fmt: skip
    parser.add_argument("--forward", action="store_true", help="measure the forward, not the backward")
    parser.add_argument(
        "--only", nargs="+", default=["regular"], help="words, one of which a shape's name must contain"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=120, help="seconds that an answer may take")
    parser.add_argument("--name", default="trees", help="name of the results file")
    options = parser.parse_args()
    for place in options.copies:
        if not (place.folder / "dash_inductor" / "kernels").is_dir():
            parser.error(
                f"copies: {place.folder} has no dash_inductor/kernels; install a checkout there (--help says how)"
            )
        if not Path(place.python).exists():
            parser.error(f"copies: {place.environment} has no bin/python; make a virtual environment there")
    if options.rounds < 1:
        parser.error(f"--rounds: {options.rounds} should be at least 1")
    if len({place.name for place in options.copies}) < len(options.copies):
        parser.error(f"copies: {[place.name for place in options.copies]} should be different names")
    kind = "forward" if options.forward else "backward"
    shapes, flops, _ = KINDS[kind]
    chosen = turns.chosen(shapes.values(), options.only)
    copies = [Copy(place, kind, options.patience) for place in options.copies]
    try:
        rows = measure(copies, chosen, flops, options.rounds)
    finally:
        for copy in copies:
            copy.end()
    common.table([{"shape": row["shape"]} | row["table"] for row in rows])
    print(common.write(options.name, {"conditions": common.conditions(), "kind": kind, "rows": rows}))


if __name__ == "__main__":
    main()
