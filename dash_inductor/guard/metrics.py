"""Metrics of a watched job for Prometheus; needs prometheus_client (``pip install dash-inductor[guard]``)."""

from __future__ import annotations

import time
from typing import Any

from ..errors import ArgumentError, MissingPackageError
from .judges.liveness import Liveness
from .judges.slow import Slow
from .watching import Watching

WORST = 32
"""Ranks that have labels of their own."""

_INTERVAL = 1.0


class Metrics:
    """Serves metrics at an address, from now to the end of the process.

    Raises:
        MissingPackageError: prometheus_client is not installed.
        ArgumentError: nothing can be served there.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        try:
            import prometheus_client as client
        except ImportError as error:
            raise MissingPackageError("prometheus_client", "metrics of watch", "guard") from error
        self._registry = client.CollectorRegistry()

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
            return client.Gauge(f"dash_guard_{name}", text, labels, registry=self._registry)

        self._connected = gauge("ranks_connected", "ranks that are connected")
        self._world = gauge("ranks", "ranks of the job")
        self._findings = gauge("findings", "findings, by kind and severity", ("kind", "severity"))
        self._counts = gauge("coverage", "what was checked, by check and unit", ("check", "unit"))
        self._unseen = gauge("unseen", "what was not checked, by check", ("check",))
        self._step = gauge("step", "the step of the foremost rank")
        self._silence = gauge(
            "beat_age_seconds", "since the last beat, of the ranks that are longest silent", ("rank",)
        )
        self._lag = gauge("lag_steps", "behind the foremost rank, of the ranks that are farthest behind", ("rank",))
        self._excess = gauge("excess_seconds", "lateness in a step, of the slowest ranks", ("rank",))
        self._cost = gauge("monitor_cpu_seconds", "processor time of the monitor")
        self._shown = 0.0
        try:
            client.start_http_server(address[1], addr=address[0], registry=self._registry)
        except OSError as error:
            raise ArgumentError("metrics", f"{address[0]}:{address[1]}", f"a free address ({error})") from error

    def show(self, watching: Watching) -> None:
        """Serve the present state from now on."""
        now = time.monotonic()
        if now - self._shown < _INTERVAL:
            return
        self._shown = now
        monitor = watching.monitor
        self._connected.set(watching.connected)
        self._world.set(watching.job.world)
        self._cost.set(time.process_time())
        self._findings.clear()
        for finding in monitor.findings:
            self._findings.labels(finding.kind, finding.severity).inc()
        for check, entry in monitor.coverage.to_dict().items():
            for unit, number in entry["counts"].items():
                self._counts.labels(check, unit).set(number)
            self._unseen.labels(check).set(sum(entry["unseen"].values()))
        for judge in monitor.judges:
            if isinstance(judge, Liveness):
                states = judge.states()
                foremost = max((state.step for state in states), default=0)
                self._step.set(foremost)
                self._worst(self._silence, {state.rank: now - state.beat for state in states})
                self._worst(self._lag, {state.rank: float(foremost - state.step) for state in states})
            elif isinstance(judge, Slow):
                self._worst(self._excess, judge.excess())

    @staticmethod
    def _worst(gauge: Any, values: dict[int, float]) -> None:
        gauge.clear()
        for rank in sorted(values, key=lambda rank: -values[rank])[:WORST]:
            gauge.labels(str(rank)).set(values[rank])
