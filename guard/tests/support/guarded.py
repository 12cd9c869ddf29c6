"""Train with DDP on several processes, with faults in one of them.

``torchrun -m guard.tests.support.guarded FOLDER cpu KIND...``: kinds of faults follow each other in one job.  Rank 0
writes a digest of the parameters at the end into FOLDER/bits; FOLDER/KIND has the time at which a fault began.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BAD = 1
"""The rank with the fault."""

PACE = 0.06
"""Seconds that a forward takes at least."""
CALM = 2.5
"""Seconds without a fault after each."""
HANG = 5.5
LATE = 1.6


class Paced(nn.Module):
    """A small model that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.pause = PACE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause)
        found: torch.Tensor = self.layers(x)
        return found


class Job:
    """The training of one rank."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device, self.rank, self.step = folder, device, dist.get_rank(), 0
        torch.manual_seed(0)
        self.model = Paced().to(device)
        ids = [torch.cuda.current_device()] if device == "cuda" else None
        self.parallel = DistributedDataParallel(self.model, device_ids=ids)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)

    def train(self, steps: int, same_data: bool = False) -> None:
        """So many steps."""
        for _ in range(steps):
            self.step += 1
            seed = self.step * 100 + (0 if same_data and self.rank in (0, BAD) else self.rank)
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).to(self.device)
            self.parallel(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.device == "cuda":
                torch.cuda.synchronize()

    def evaluate(self) -> None:
        """What one rank does alone while others wait."""
        end = time.monotonic() + HANG
        with torch.no_grad():
            while time.monotonic() < end:
                self.model(torch.ones(8, 16, device=self.device))

    def tell(self, kind: str) -> None:
        """A fault begins now, on the rank that has it."""
        if self.rank == BAD:
            (self.folder / kind).write_text(f"{time.time()}\n{self.step}\n{os.getpid()}", encoding="utf-8")

    def run(self, kind: str) -> None:
        """A calm time, and then one fault."""
        self.train(int(CALM / PACE / 2) if kind not in ("exit", "leave") else 8)
        self.tell(kind)
        if kind == "hang" and self.rank == BAD:
            time.sleep(HANG)
        elif kind == "evaluate" and self.rank == BAD:
            self.evaluate()
        elif kind == "slow":
            self.model.pause = PACE * (LATE if self.rank == BAD else 1)
            self.train(int(5 / PACE / LATE))
            self.model.pause = PACE
        elif kind == "flip" and self.rank == BAD:
            address = self.model.layers[2].weight.data_ptr()
            ctypes.c_uint8.from_address(address + 1).value ^= 1 << 4
        elif kind == "data":
            self.train(24, same_data=True)
        elif kind == "leave":
            sys.exit(3)
        elif kind == "kill" and self.rank == BAD:
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop" and self.rank == BAD:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.train(8)


def main(folder: str, device: str, *kinds: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if "foreign" in kinds and rank == BAD:
        os.environ["NVIDIA_TF32_OVERRIDE"] = "1"
    if "exit" in kinds and rank == BAD and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        kinds = ("leave",)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    job = Job(Path(folder), device)
    for kind in kinds:
        job.run(kind)
    if job.rank == 0:
        state = b"".join(p.detach().cpu().numpy().tobytes() for p in job.model.parameters())
        (job.folder / "bits").write_text(hashlib.sha256(state).hexdigest(), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
