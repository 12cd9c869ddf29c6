"""Network addresses in the form HOST:PORT."""

from __future__ import annotations

from dash_inductor.errors import ArgumentError


def parse_address(text: str, name: str = "address") -> tuple[str, int]:
    """Parse HOST:PORT, with an IPv6 address in brackets; `name` is what gives it, for errors.

    Returns:
        Host and port; an empty host means 127.0.0.1.

    Raises:
        ArgumentError: the text has another form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ArgumentError(name, text, "HOST:PORT")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is one of the loopback interface, which only this machine can reach."""
    return host in ("localhost", "::1") or host.startswith("127.")


def reachable(host: str) -> str:
    """The host by which this machine reaches its own socket that listens at `host`, which may be a wildcard address."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
