"""Addresses that people write: HOST:PORT."""

from __future__ import annotations

from dash_inductor.errors import ArgumentError


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, with an IPv6 address in brackets.

    Raises:
        ArgumentError: it is not that.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ArgumentError("address", text, "HOST:PORT")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    return host in ("localhost", "::1") or host.startswith("127.")


def reachable(host: str) -> str:
    """An address at which this machine itself reaches what listens at `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
