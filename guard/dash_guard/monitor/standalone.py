"""A monitor in a process of its own, which rank 0 starts.

Usage: ``python -m dash_guard.monitor.standalone FOLDER RUN STARTER``, where STARTER is the id of the starting process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from ..report.findings import Finding
from ..transport import connect, wire
from ..transport.store import listen
from .monitor import in_own_process
from .watching import TURN, Watching

_START = 120.0  # seconds in which the first rank must join
_END = 2.0  # seconds without any rank after which the job has ended, or without rank 0 if no rank has come


def tell(finding: Finding) -> None:
    """Print a finding to standard error, in one line."""
    step = f"step {finding.step}: " if finding.step else ""
    advice = f". {finding.advice}" if finding.advice else ""
    print(f"dash-inductor guard: {finding.severity}: {step}{finding.sentence}{advice}", file=sys.stderr, flush=True)


def main(folder: str, run: str, starter: str) -> int:
    """Watch until all ranks have left, or until the process of rank 0 has ended before any rank has joined.

    Args:
        folder: the folder of findings.
        run: the name of the job, see `connect.run_name`.
        starter: the id of the process that started the monitor, in decimal digits.

    Returns:
        The exit status: 0, or 1 if the monitor could not start.
    """
    in_own_process()
    secret = wire.new_secret()
    path: Path | None = None
    try:
        listener = listen(("127.0.0.1", 0))
        address = listener.getsockname()[:2]
        watching = Watching(Path(folder), listener, secret, tell)
        path = connect.publish(Path(folder), run, address, secret)
    except OSError as error:
        print(f"dash-inductor guard: the monitor cannot start: {error}", file=sys.stderr, flush=True)
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends after the job, which the terminal interrupts as well
    there = time.monotonic() + _START - _END
    try:
        while time.monotonic() - there < _END:
            watching.turn(TURN)
            if watching.connected:
                there = time.monotonic()
            elif os.getppid() != int(starter):  # which holds what waits for the end of this process's output
                there = min(there, time.monotonic())
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        watching.close(0.0)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
