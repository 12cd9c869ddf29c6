"""A check in the process of a rank: an observer of training that sends what is to be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dash_inductor.observers.observer import Observer

from ..report.coverage import Coverage
from ..transport.channel import Channel
from ..transport.messages import Message

if TYPE_CHECKING:
    from ..process.group import Group


class Host(Protocol):
    """What a check knows of the rank that it runs in: `rank.Rank`."""

    number: int
    world: int
    channel: Channel
    coverage: Coverage
    group: Group

    @property
    def step(self) -> int:
        """The present step of training."""


class Check(Observer):
    """One check; events that it does not take do nothing.

    A check that raises is switched off (`rank.Rank`): coverage says so, and training goes on.

    Attributes:
        name: of the check, of its messages, and of its entry in the coverage.
        together: whether ranks wait for each other in it, by `group.Group`.
    """

    name = ""
    together = False

    def __init__(self, rank: Host, **settings: Any) -> None:
        self.rank = rank

    def step_began(self, step: int) -> None:
        """The first event of a step has come, before any other method is called for it."""

    def step_done(self, step: int) -> None:
        """All optimizers of the step have stepped."""

    def order(self, message: Message) -> None:
        """The monitor asks for something; called between two steps, on the thread that trains."""

    def send(self, step: int, **body: Any) -> None:
        """Send a message of this check."""
        self.rank.channel.send(Message(self.name, self.rank.number, step, body))
