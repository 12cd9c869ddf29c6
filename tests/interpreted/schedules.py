"""Run in Triton's interpreter: compares the functions in a folder of generated modules with their Python form.

Usage: ``TRITON_INTERPRET=1 python tests/interpreted/schedules.py FOLDER``; prints ``compared <number of modules>``.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dash_inductor.model.mask import Band
from dash_inductor.schedule.codegen import SIGNATURES, TILE_SCHEDULE, python_functions

RESULTS = {"dash_launch": 2, "dash_q_range": 4, "dash_kv_range": 4, "dash_seen_rows": 2, "dash_seen_keys": 2}
BLOCKS = {"BLOCK_Q": 4, "BLOCK_KV": 8, "HEAD_CHUNK": 3}
CASES = 128


def runtime_of(function: str) -> list[str]:
    """The values that a call of `function` needs at run time, its tile schedule's included."""
    named = [p for p in SIGNATURES[function] if not p.isupper() and p != "tile_schedule"]
    return [*named, *TILE_SCHEDULE]


def kernel_source(function: str) -> str:
    """A kernel that applies `function` to the columns of an int32 matrix [arguments, CASES]."""
    runtime = runtime_of(function)
    constants = [p for p in SIGNATURES[function] if p.isupper()]
    count = RESULTS.get(function, 1)
    results = [f"r{i}" for i in range(count)]
    lines = [
        "",
        "",
        "@triton.jit",
        f"def run_{function}(args, out, {', '.join(f'{c}: tl.constexpr' for c in constants)}):",
    ]
    lines.append(f"    x = tl.arange(0, {CASES})")
    lines += [f"    {p} = tl.load(args + {i * CASES} + x)" for i, p in enumerate(runtime)]
    lines.append(f"    tile_schedule = ({', '.join(TILE_SCHEDULE)})")
    lines.append(f"    {', '.join(results)} = {function}({', '.join(SIGNATURES[function])})")
    lines += [f"    tl.store(out + {i * CASES} + x, {r} + x * 0)" for i, r in enumerate(results)]
    return "\n".join(lines) + "\n"


def load(path: Path) -> ModuleType:
    path.write_text(path.read_text() + "".join(kernel_source(f) for f in SIGNATURES))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_case(function: str, python: Any, module: ModuleType, rng: random.Random) -> list[int]:
    """Valid run-time arguments of `function`."""
    # half of them long enough for tile schedules of `bent_fold` to be bent
    q_len, kv_len = rng.choice(((rng.randint(1, 60), rng.randint(1, 90)), (rng.randint(256, 300), rng.randint(1, 300))))
    heads = rng.randint(1, 12)
    lo = 0 if module.LO is None else rng.randint(-70, 20)
    hi = 0 if module.HI is None else max(lo, rng.randint(-20, 70))
    tail = ((q_len, kv_len, lo, hi), BLOCKS["BLOCK_Q"], BLOCKS["BLOCK_KV"])
    ctas_per_head = python.dash_ctas_per_head(*tail)
    values = {"q_len": q_len, "kv_len": kv_len, "lo": lo, "hi": hi, "heads": heads}
    values["work_id"], values["cta_index"] = rng.randrange(heads * ctas_per_head), rng.randrange(ctas_per_head)
    values["part"] = rng.randint(0, 1)
    values["kv"], values["q"] = rng.randrange(-(-kv_len // tail[2])), rng.randrange(-(-q_len // tail[1]))
    steps = python.dash_visits(values["kv"], *tail)
    values["step"] = rng.randrange(max(1, steps))
    if function in ("dash_rank", "dash_q_tile"):  # only visible pairs have a rank
        if steps == 0:
            return random_case(function, python, module, rng)
        values["q"] = python.dash_q_tile(values["kv"], values["step"], *tail)
    return [values[name] for name in runtime_of(function)]


def compare(module: ModuleType) -> None:
    rng = random.Random(module.NAME)
    python = python_functions(module.NAME, Band(module.LO, module.HI))
    for function, parameters in SIGNATURES.items():
        constants = {p: BLOCKS[p] for p in parameters if p.isupper()}
        cases = [random_case(function, python, module, rng) for _ in range(CASES)]
        args = torch.tensor(cases, dtype=torch.int32).T.contiguous()
        out = torch.empty(RESULTS.get(function, 1), CASES, dtype=torch.int32)
        getattr(module, f"run_{function}")[(1,)](args, out, **constants)
        for case, got in zip(cases, out.T.tolist(), strict=True):
            values = dict(zip(runtime_of(function), case, strict=True)) | constants
            values["tile_schedule"] = tuple(values[member] for member in TILE_SCHEDULE)
            expected = getattr(python, function)(*(values[p] for p in parameters))
            assert tuple(got) == (expected if isinstance(expected, tuple) else (expected,)), (
                module.NAME,
                function,
                case,
            )


def main() -> None:
    paths = sorted(Path(sys.argv[1]).glob("case*.py"))
    for path in paths:
        compare(load(path))
    print("compared", len(paths))


if __name__ == "__main__":
    main()
