"""Metrics of a watched job for Prometheus; they need prometheus_client (``pip install dash-inductor[metrics]``)."""

from __future__ import annotations

import time
from typing import Any

from dash_inductor.errors import ArgumentError, MissingPackageError

from ..detectors.liveness import Liveness
from ..detectors.slow import Slow
from .watching import Watching

WORST = 32
"""The largest number of ranks with labels of their own."""

_INTERVAL = 1.0


class Metrics:
    """Serves Prometheus metrics over HTTP until the process ends.

    Args:
        address: host and port.

    Raises:
        MissingPackageError: prometheus_client is not installed.
        ArgumentError: nothing can be served at the address.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        try:
            import prometheus_client as client
        except ImportError as error:
            raise MissingPackageError("prometheus_client", "metrics of watch", "metrics") from error
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
            "heartbeat_age_seconds",
            "seconds since the last heartbeat, of the ranks that have been silent longest",
            ("rank",),
        )
        self._lag = gauge("lag_steps", "steps after the foremost rank, of the ranks that lag most", ("rank",))
        self._excess = gauge("excess_seconds", "seconds of lateness in a step, of the slowest ranks", ("rank",))
        self._cost = gauge("monitor_cpu_seconds", "processor time of the monitor")
        self._shown = 0.0
        try:
            client.start_http_server(address[1], addr=address[0], registry=self._registry)
        except OSError as error:
            raise ArgumentError("metrics", f"{address[0]}:{address[1]}", f"a free address ({error})") from error

    def show(self, watching: Watching) -> None:
        """Update the metrics from the current state of the job; does nothing within a second after the last update."""
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
        for detector in monitor.detectors:
            if isinstance(detector, Liveness):
                states = detector.states()
                foremost = max((state.step for state in states), default=0)
                self._step.set(foremost)
                self._worst(self._silence, {state.rank: now - state.heartbeat for state in states})
                self._worst(self._lag, {state.rank: float(foremost - state.step) for state in states})
            elif isinstance(detector, Slow):
                self._worst(self._excess, detector.excess())

    @staticmethod
    def _worst(gauge: Any, values: dict[int, float]) -> None:
        gauge.clear()
        for rank in sorted(values, key=lambda rank: -values[rank])[:WORST]:
            gauge.labels(str(rank)).set(values[rank])
