"""The interfaces of the message channel between ranks and the monitor; `store` implements them across processes."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from .messages import Message


class Channel(Protocol):
    """A rank's end of the message channel between ranks and the monitor; `Mailbox` is the monitor's end."""

    def send(self, message: Message) -> None:
        """Send a message to the monitor; never waits for it and never raises; lost messages count in the coverage."""

    def orders(self) -> list[Message]:
        """The requests of the monitor that have arrived since the last call, such as for a recompute; never waits."""

    def close(self) -> None:
        """Send the remaining messages, within a second, and close this end."""


class Mailbox(Protocol):
    """The monitor's end of the message channel between the ranks and the monitor; `Channel` is a rank's end."""

    def receive(self) -> list[Message]:
        """The messages that have arrived since the last call, in the order of each rank; never waits."""

    def order(self, ranks: tuple[int, ...], message: Message) -> None:
        """Send a request to these ranks."""


class Local:
    """The monitor's end of a channel within one process, for a single rank and for tests; `end` makes a rank's end."""

    def __init__(self) -> None:
        self._sent: deque[Message] = deque()
        self._orders: dict[int, deque[Message]] = {}

    def end(self, rank: int) -> LocalEnd:
        """The end of a rank, which sends to and receives from this mailbox."""
        return LocalEnd(self._sent, self._orders.setdefault(rank, deque()))

    def receive(self) -> list[Message]:
        """The messages that ranks have sent since the last call."""
        return [self._sent.popleft() for _ in range(len(self._sent))]

    def order(self, ranks: tuple[int, ...], message: Message) -> None:
        """Send a request to these ranks."""
        for rank in ranks:
            self._orders.setdefault(rank, deque()).append(message)


class LocalEnd:
    """A rank's end (`Channel`) of a channel within one process; `Local` is the monitor's end."""

    def __init__(self, sent: deque[Message], orders: deque[Message]) -> None:
        self._sent, self._orders = sent, orders

    def send(self, message: Message) -> None:
        """Send a message to the mailbox."""
        self._sent.append(message)

    def orders(self) -> list[Message]:
        """The requests to this rank since the last call."""
        return [self._orders.popleft() for _ in range(len(self._orders))]

    def close(self) -> None:
        """Does nothing, because messages within one process arrive at once."""
