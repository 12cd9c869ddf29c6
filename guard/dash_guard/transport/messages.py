"""Messages between ranks and the monitor: small JSON objects without values of tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from dash_inductor.errors import ArgumentError
from dash_inductor.untrusted import Refused, parse_json

SIZE = 64 << 10
"""The largest size of a message in bytes; messages of a step are below 1 KB, leaves that were requested are larger."""
RANKS = 1 << 20
_VALUES = 1 << 14


@dataclass(frozen=True)
class Message:
    """A message from a rank to the monitor, or from the monitor to a rank.

    Attributes:
        kind: what the message is about: the name of a check, "heartbeat", or "facts" about the environment.
        rank: the rank that sends it; 0 if the monitor does.
        step: the number of the training step, from 1; 0 before the first.
        body: values of JSON types; digests are hexadecimal.
    """

    kind: str
    rank: int
    step: int = 0
    body: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Encode the message as JSON.

        Raises:
            ArgumentError: the encoded message is larger than `SIZE`.
        """
        encoded = json.dumps([self.kind, self.rank, self.step, self.body], separators=(",", ":")).encode()
        if len(encoded) > SIZE:
            raise ArgumentError("body", f"{len(encoded)} bytes of {self.kind}", f"a message of at most {SIZE} bytes")
        return encoded


def decode(content: bytes, world: int = RANKS) -> Message:
    """Decode a message from untrusted bytes.

    Raises:
        Refused: the bytes are not a message, or its rank is not below `world`.
    """
    if len(content) > SIZE:
        raise Refused(f"a message of {len(content)} bytes, where {SIZE} are allowed")
    raw = parse_json(content, _VALUES)
    if not isinstance(raw, list) or [type(part) for part in raw] != [str, int, int, dict]:
        raise Refused("this is no message of kind, rank, step and body")
    kind, rank, step, body = raw
    if not (kind.isidentifier() and len(kind) <= 64 and 0 <= rank < world and 0 <= step < 1 << 62):
        raise Refused("kind, rank or step of a message are out of range")
    return Message(kind, rank, step, body)
