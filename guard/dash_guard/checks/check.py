"""The base class of all checks: an observer of training that sends digests or times to the monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dash_inductor.observers.observer import Observer

from ..report.coverage import Coverage
from ..transport.channel import Channel
from ..transport.messages import Message

if TYPE_CHECKING:
    from ..process.group import Group


class Host(Protocol):
    """What a check can use of the `process.rank.Rank` that owns it.

    Attributes:
        number: the rank's number in the job.
        world: the number of ranks.
        channel: sends messages to the monitor.
        coverage: counts what checks have compared and what they could not see.
        group: communication among all ranks.
    """

    number: int
    world: int
    channel: Channel
    coverage: Coverage
    group: Group

    @property
    def step(self) -> int:
        """The number of the current training step, from 1."""


class Check(Observer):
    """The base class of a check of a rank; an event whose method a check does not override does nothing.

    A check that raises an exception is switched off (`process.rank.Rank`): coverage records it, and training goes on.

    Attributes:
        name: the name of the check, of its messages, and of its entry in the coverage.
        together: whether ranks wait for each other in this check (`process.group.Group`).
    """

    name = ""
    together = False

    def __init__(self, rank: Host, **settings: Any) -> None:
        self.rank = rank

    def step_began(self, step: int) -> None:
        """Called when a step begins, before any other method in this step."""

    def step_done(self, step: int) -> None:
        """Called when a step has ended: all of its optimizers have stepped."""

    def order(self, message: Message) -> None:
        """Receive a request from the monitor; called between two steps, on the training thread."""

    def send(self, step: int, **body: Any) -> None:
        """Send a message of this check to the monitor, with `body` as its JSON values."""
        self.rank.channel.send(Message(self.name, self.rank.number, step, body))
