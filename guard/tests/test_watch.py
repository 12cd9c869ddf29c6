"""Jobs of several processes that are watched: faults are named, nobody else is, and no guard changes a bit."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dash_guard.monitor.clock import AWAY
from dash_guard.monitor.wrapper import Wrapper
from dash_guard.report.findings import Finding, read
from dash_guard.report.report import load
from dash_inductor.errors import ArgumentError
from tests.support.distribution import ROOT

from .support.guarded import BAD

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(ranks: int, *program: str, restarts: int = 0) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return [*launcher, "--standalone", "--max-restarts", str(restarts), "-m", *program]


def watch(folder: Path, *words: str, options: Sequence[str] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dash_guard", "watch", "--folder", str(folder), *options, "--", *words]
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)


def named(findings: Sequence[Finding]) -> list[tuple[str, tuple[int, ...]]]:
    return [(finding.kind, finding.ranks) for finding in findings]


def latency(folder: Path, finding: Finding) -> float:
    """Seconds from the fault to the finding."""
    return finding.time - float((folder / finding.kind.replace("stopped", "stop").replace("dead", "kill"))
                                .read_text().split()[0])  # fmt: skip


def test_a_bit_that_flips_at_rest_and_a_hang_are_named(tmp_path: Path) -> None:
    """All checks are on; two of them confirm the fault, because replicas alone cannot decide between two ranks."""
    guard = tmp_path / "guard"
    program = torchrun(2, "guard.tests.support.guarded", str(tmp_path), "cpu", "hang", "flip")
    job = watch(guard, *program, options=("--fail-on", "confirmed"))
    said = job.communicate(timeout=150)[1]
    findings = read(guard)
    assert {(finding.kind, finding.severity, finding.ranks) for finding in findings} >= {
        ("hang", "suspect", (BAD,)), ("at_rest", "suspect", (BAD,)), ("bits", "confirmed", (BAD,))
    }, said  # fmt: skip
    assert all(finding.ranks == (BAD,) or finding.kind == "bits" for finding in findings), said
    step = int((tmp_path / "flip").read_text().split()[1]) + 1
    assert {finding.step for finding in findings if finding.kind == "at_rest"} == {step}
    assert job.returncode == 10
    coverage = load(guard).coverage
    assert coverage["cross_rank_recompute"]["counts"]["calls"] >= 2
    assert coverage["bits"]["counts"]["compared"] > 0


def test_a_rank_that_evaluates_alone_is_busy(tmp_path: Path) -> None:
    guard = tmp_path / "guard"
    job = watch(guard, *torchrun(3, "guard.tests.support.guarded", str(tmp_path), "cpu", "evaluate"))
    said = job.communicate(timeout=150)[1]
    (finding,) = read(guard)
    assert (finding.kind, finding.severity, finding.ranks) == ("hang", "note", (BAD,)), said
    assert "busy in Job.evaluate (guarded.py:" in finding.sentence
    assert "2 ranks wait" in finding.sentence or "1 rank waits" in finding.sentence  # the other one is on its way


@pytest.mark.full
def test_every_fault_is_named_in_time_and_nobody_else(tmp_path: Path) -> None:
    faults = ("foreign", "slow", "data", "hang", "stop", "kill")
    guard = tmp_path / "guard"
    job = watch(guard, *torchrun(4, "guard.tests.support.guarded", str(tmp_path), "cpu", *faults))
    end = time.monotonic() + 150
    continued = False
    while job.poll() is None and time.monotonic() < end:
        time.sleep(0.2)
        if not continued and any(finding.kind == "stopped" for finding in read(guard)):
            os.kill(int((tmp_path / "stop").read_text().split()[2]), signal.SIGCONT)
            continued = True
    job.kill()
    said = job.communicate()[1]
    findings = read(guard)
    expected = [("foreign", (BAD,)), ("slow", (BAD,)), ("data", (0, BAD)), ("hang", (BAD,)), ("stopped", (BAD,))]
    assert named(findings) == [*expected, ("dead", (BAD,))], said
    assert job.returncode not in (0, 10, 11, 12)
    times = {finding.kind: latency(tmp_path, finding) for finding in findings if finding.kind != "foreign"}
    assert max(times.values()) < 10, times
    hang = next(finding for finding in findings if finding.kind == "hang")
    assert "Job.run (guarded.py:" in hang.sentence
    assert "signal SIGKILL" in findings[-1].sentence
    assert all(finding.sentence in said for finding in findings)
    coverage = load(guard).coverage
    assert coverage["slow"]["counts"]["steps"] > 0
    assert coverage["data"]["counts"]["steps"] > 0


@pytest.mark.parametrize(
    "names",
    [
        ("clean", "killed", "settings", "raises", "late", "alone"),
        pytest.param(("no folder", "full", "not live", "held"), marks=pytest.mark.full),
    ],
    ids=["quick", "others"],
)
def test_no_guard_that_breaks_changes_a_bit_or_ends_the_training(tmp_path: Path, names: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "guard.tests.support.guarded_variously", str(tmp_path), *names]
    result = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=150, check=False
    )
    assert result.returncode == 0, result.stderr
    facts: dict[str, Any] = json.loads(result.stdout)
    assert [facts[name]["equal"] for name in names] == [True] * len(names)
    assert all(facts[name]["findings"] == [] for name in names)
    for name, text in (
        ("killed", "closed the connection"),
        ("no folder", "cannot be reached"),
        ("not live", "live=False"),
        ("settings", "ranks cannot agree: the guards of ranks have different settings"),
        ("raises", "switched off in step 7: "),
        ("alone", "ranks cannot agree: not all ranks have a guard"),
        ("late", "before all ranks had a guard"),
    ):
        assert name not in names or text in json.dumps(facts[name]["coverage"])
    if "late" in names:  # the guard of rank 1 begins in step 5, ranks meet in step 8
        sums, recompute = (facts["late"]["coverage"][name] for name in ("collective_checksums", "cross_rank_recompute"))
        assert (
            sums["unseen"]["before all ranks had a guard"] == recompute["unseen"]["before all ranks had a guard"] == 8
        )
        assert sums["counts"]["results"] > 0
        assert recompute["counts"] == facts["clean"]["coverage"]["cross_rank_recompute"]["counts"]
    if "killed" in names:
        assert list(facts["clean"]["coverage"]["data"]["unseen"]) == []
        assert result.stderr.count("training goes on, and is not checked from here") == 2  # ranks of the killed monitor
        assert "closed the connection" in json.dumps(load(tmp_path / "killed").coverage)
        assert "frame #" not in result.stderr, "no stack of C++"


@pytest.mark.full
def test_a_job_that_is_restarted_goes_on_and_is_watched_again(tmp_path: Path) -> None:
    guard = tmp_path / "guard"
    job = watch(guard, *torchrun(2, "guard.tests.support.guarded", str(tmp_path), "cpu", "exit", restarts=1))
    try:
        said = job.communicate(timeout=120)[1]
    except subprocess.TimeoutExpired:
        job.terminate()
        said = job.communicate(timeout=60)[1]
    if "connectFullMesh failed" in said or "failed to connect, willRetry" in said:
        pytest.skip("gloo could not connect the restarted ranks, which happens without a guard too")
    (finding,) = read(guard)
    assert (finding.kind, finding.ranks, finding.cause) == ("dead", (BAD,), "program"), said
    assert "exit status 3" in finding.sentence
    assert finding.severity == "confirmed"
    assert job.returncode == 0  # that of the launcher, which has succeeded
    assert (tmp_path / "bits").exists()


@pytest.mark.parametrize(("strict", "status"), [((), 0), (("--strict",), 12)])
def test_a_job_that_cannot_be_watched_runs(tmp_path: Path, strict: tuple[str, ...], status: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ("--listen", f"127.0.0.1:{taken.getsockname()[1]}", *strict)
        job = watch(tmp_path / "guard", sys.executable, "-c", "print('ran')", options=options)
        said = job.communicate(timeout=60)[1]
    assert job.returncode == status
    assert "the job is not watched" in said


def test_signals_and_exit_statuses_are_passed_on(tmp_path: Path) -> None:
    program = (
        "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print('on', file=sys.stderr); signal.pause()"
    )
    job = watch(tmp_path / "guard", sys.executable, "-u", "-c", program)
    assert job.stderr is not None
    assert job.stderr.readline() == "on\n"
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=30) == 7
    killed = watch(tmp_path / "guard", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert killed.wait(timeout=30) == 128 + 9
    killed.communicate()
    job.communicate()


@pytest.mark.parametrize(
    ("fail_on", "severity", "cause", "status"),
    [
        (None, "confirmed", "machine", 0),
        (None, "confirmed", "program", 0),
        ("confirmed", "confirmed", "machine", 10),
        ("confirmed", "confirmed", "unknown", 10),
        ("confirmed", "confirmed", "program", 11),
        ("confirmed", "suspect", "machine", 0),
        ("suspect", "suspect", "machine", 10),
        ("suspect", "suspect", "program", 11),
        ("suspect", "confirmed", "network", 10),
        ("suspect", "note", "program", 0),
    ],
)
def test_findings_set_the_status_where_they_are_asked_to(
    fail_on: str | None, severity: str, cause: str, status: int, tmp_path: Path
) -> None:
    wrapper = Wrapper(["true"], tmp_path, fail_on=fail_on)
    found = SimpleNamespace(severity=severity, cause=cause)
    wrapper._watching = cast(Any, SimpleNamespace(joined=2, monitor=SimpleNamespace(findings=[found])))
    assert wrapper._status(0) == status
    assert wrapper._status(3) == 3  # the program's own


def test_a_monitor_that_was_stopped_names_nobody(tmp_path: Path) -> None:
    """It has seen no heartbeats while it was stopped, and ranks may have ended meanwhile."""
    guard = tmp_path / "guard"
    job = watch(guard, *torchrun(2, "guard.tests.support.guarded", str(tmp_path), "cpu", "clean"))
    end = time.monotonic() + 60
    while not (guard / "coverage.json").exists() or not json.loads((guard / "coverage.json").read_text())["joined"]:
        assert time.monotonic() < end
        time.sleep(0.1)
    os.kill(job.pid, signal.SIGSTOP)
    time.sleep(3 * AWAY)
    os.kill(job.pid, signal.SIGCONT)
    said = job.communicate(timeout=120)[1]
    assert read(guard) == [], said
    assert job.returncode == 0
    assert "the monitor did not run" in json.dumps(load(guard).coverage)


def test_a_severity_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"fail_on='note'.*suspect.*confirmed"):
        Wrapper(["true"], tmp_path, fail_on="note")


def test_an_address_beyond_this_machine_needs_a_secret(tmp_path: Path) -> None:
    for option in ("--listen", "--join"):
        job = watch(tmp_path / "guard", "true", options=(option, "0.0.0.0:0" if option == "--listen" else "10.0.0.1:1"))
        assert "DASH_GUARD_SECRET" in job.communicate(timeout=60)[1]
        assert job.returncode == 2


@pytest.mark.full
def test_a_rank_that_dies_on_another_node_is_named_by_the_first(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        address, port = f"127.0.0.1:{free.getsockname()[1]}", str(other.getsockname()[1])
    jobs = []
    for node, option in enumerate(("--listen", "--join")):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)]
        launcher += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
        program = [*launcher, "-m", "guard.tests.support.guarded", str(tmp_path), "cpu", "kill"]
        options = ["--folder", str(tmp_path / f"guard{node}"), option, address]
        command = [sys.executable, "-m", "dash_guard", "watch", *options, "--", *program]
        environment = {**ENVIRONMENT, "DASH_GUARD_SECRET": "s" * 32}
        jobs.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    said = [job.communicate(timeout=150)[1] for job in jobs]
    assert named(read(tmp_path / "guard0")) == [("dead", (BAD,))], said
    assert "signal SIGKILL" in read(tmp_path / "guard0")[0].sentence
    assert read(tmp_path / "guard1") == []
    assert all(job.returncode not in (0, 10, 11, 12) for job in jobs)
