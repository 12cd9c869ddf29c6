"""Programs of `test_gpu_hopper_progress`, each run in a process that may be killed.  Their last line is a JSON object.

python -m tests.support.hopper_progress held SCHEDULE MASK FREE: the backward while all but FREE SMs are held; MASK is
    "band", or "documents" for packed documents of very different lengths.
python -m tests.support.hopper_progress beside FOLDER CASE NAME OTHERS...: a case of `CASES` while others run it too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dash_inductor.kernels.common import mask_tables
from dash_inductor.kernels.common.mask_data import MaskData
from dash_inductor.kernels.hopper.backward.data import BackwardData
from dash_inductor.model import AttentionSpec, Band, Mask, Operand, Segments, Tiles

from . import hopper_calls
from .attention import Attention, Gradients
from .calls import BSHD
from .hopper import Direct, any_forward
from .repeats import differing_runs, digest
from .spinner import sms_held
from .table_words import values_of

Run = Callable[[], Gradients]


def big(schedule: str) -> Direct:
    """A backward of 1024 work ids, far more than there are SMs."""
    mask = Band() if schedule == "ascending" else Band(0)
    p = Attention.random(4096, 4096, 128, mask, batch=2, kv_heads=16)
    return Direct(p, schedule, forward=any_forward(p))


@dataclass(frozen=True)
class Documents:
    """A backward as large as the one of `Direct`, whose mask also hides what belongs to other documents."""

    direct: Direct
    data: BackwardData

    @staticmethod
    def of(direct: Direct) -> Documents:
        p, generator = direct.problem, torch.Generator().manual_seed(0)
        (batch, q_heads, length, _), kv_heads = p.q.shape, p.k.shape[1]
        begins = torch.rand(batch, length, generator=generator) < torch.linspace(0.02, 0.0005, length)
        ids = begins.cumsum(1).cuda()
        mask = MaskData(p.mask, batch, q_heads, kv_heads, length, length, values_of(segments=(ids, ids)))
        found = mask_tables.build(mask, replace(direct.plan, forward_tiles=Tiles(128, 128, 8, 2)))
        tables = found.keys_seen, found.visits, found.steps, found.contributions
        return Documents(direct, BackwardData(found.q_vectors, found.kv_vectors, *tables))

    def __call__(self) -> Gradients:
        p, mask = self.direct.problem, Mask(self.direct.problem.mask, segments=Segments(Operand(0), Operand(0)))
        spec = AttentionSpec(mask, p.scale, (BSHD,) * 3)
        return hopper_calls.backward(p.do, p.q, p.k, p.v, *self.direct.forward, spec, self.direct.plan, self.data)


def held(schedule: str, mask: str, free: int) -> dict[str, object]:
    """Whether the backward ended while the SMs were held, and with the bits of an idle GPU."""
    direct, stream = big(schedule), torch.cuda.Stream()
    run = direct if mask == "band" else Documents.of(direct)
    expected = digest(run())
    with torch.cuda.stream(stream):
        run()  # its memory belongs to this stream now
    torch.cuda.synchronize()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"{sms - free} of {sms} SMs will be held", flush=True)
    with sms_held(sms - free) as spinner:
        print("they are held; the backward starts", flush=True)
        with torch.cuda.stream(stream):
            gradients = run()
        stream.synchronize()
        print("the backward has ended", flush=True)
        still = not spinner.over()
    return {"held until the end": still, "equal": digest(gradients) == expected}


def grouped() -> Direct:
    """Short tile schedules, and members of groups that follow one another closely."""
    p = Attention.random(1023, 1023, 128, Band(0, 255), batch=2, kv_heads=4, group=8)
    return Direct(p, "descending", forward=any_forward(p))


CASES: dict[str, tuple[Callable[[], Run], int, bool]] = {
    "big": (lambda: big("spt"), 500, False),
    "grouped": (grouped, 5000, True),
    "grouped documents": (lambda: Documents.of(grouped()), 5000, True),
}
"""The backward, how often it runs, and whether under load of its own process too."""


def beside(folder: Path, case: str, name: str, *others: str) -> dict[str, object]:
    """Digest and number of differing runs, begun when all processes are ready."""
    make, count, load = CASES[case]
    run = make()
    first = digest(run())
    (folder / name).touch()
    deadline = time.monotonic() + 120
    while not all((folder / other).exists() for other in others):
        assert time.monotonic() < deadline, f"of {others} not all came"
        time.sleep(0.01)
    return {"digest": first, "differing": differing_runs(run, count, load=load)}


def main() -> None:
    program, *arguments = sys.argv[1:]
    if program == "held":
        print(json.dumps(held(arguments[0], arguments[1], int(arguments[2]))), flush=True)
    else:
        print(json.dumps(beside(Path(arguments[0]), *arguments[1:])), flush=True)


if __name__ == "__main__":
    main()
