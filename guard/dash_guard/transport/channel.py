"""The way of messages between ranks and the monitor.  `store` has the one that crosses processes."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from .messages import Message


class Channel(Protocol):
    """The end of a rank."""

    def send(self, message: Message) -> None:
        """Hand a message over; never waits for the monitor, and never raises: what is lost is counted."""

    def orders(self) -> list[Message]:
        """What the monitor has asked of this rank since the last call, such as leaves or a cross-rank recompute; never
        waits.
        """

    def close(self) -> None:
        """Send what is left, within a second."""


class Mailbox(Protocol):
    """The end of the monitor."""

    def receive(self) -> list[Message]:
        """What has come since the last call, of each rank in its order; never waits."""

    def order(self, ranks: tuple[int, ...], message: Message) -> None:
        """Ask something of ranks."""


class Local:
    """Both ends within one process, for one rank alone and for tests."""

    def __init__(self) -> None:
        self._sent: deque[Message] = deque()
        self._orders: dict[int, deque[Message]] = {}

    def end(self, rank: int) -> LocalEnd:
        """The end of a rank."""
        return LocalEnd(self._sent, self._orders.setdefault(rank, deque()))

    def receive(self) -> list[Message]:
        """What has come."""
        return [self._sent.popleft() for _ in range(len(self._sent))]

    def order(self, ranks: tuple[int, ...], message: Message) -> None:
        """Ask something of ranks."""
        for rank in ranks:
            self._orders.setdefault(rank, deque()).append(message)


class LocalEnd:
    """The end of a rank of `Local`."""

    def __init__(self, sent: deque[Message], orders: deque[Message]) -> None:
        self._sent, self._orders = sent, orders

    def send(self, message: Message) -> None:
        """Hand a message over."""
        self._sent.append(message)

    def orders(self) -> list[Message]:
        """What was asked of this rank."""
        return [self._orders.popleft() for _ in range(len(self._orders))]

    def close(self) -> None:
        """Nothing is left."""
