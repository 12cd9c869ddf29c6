"""Sends messages across processes and machines through a PyTorch `TCPStore`, which the monitor hosts for the guard.

It is never the store of the training: nothing here waits for what the training waits for. Ranks push their messages
into one queue of the store; requests of the monitor to a rank lie in a queue of that rank. A rank's end has a thread of
its own and a bounded queue; the monitor's end takes messages when it is asked.

The store itself knows no secret. So every message has an authentication code (`wire`); a message without one is refused
and counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dash_inductor.errors import ArgumentError
from dash_inductor.untrusted import Refused

from ..report.coverage import Coverage
from . import wire
from .address import reachable
from .messages import SIZE, Message, decode

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

log = logging.getLogger("dash_guard")

JOINED, LEFT = "joined", "left"
"""The first message of a rank, and the shutdown notice of a rank that ends regularly."""

_QUEUE = 4096  # messages that wait
_BYTES = 8 << 20
_INTERVAL = 0.1  # seconds between two readings of the queues
_RANKS = 1000  # more ranks than these read less often
_PATIENCE = 60.0  # seconds for answers of the store
_LAST = 10.0  # seconds in which a process that ends waits for the thread of its line
_ORDERS = 256  # requests that wait for a rank that does not read
_ROUND = 1 << 16  # messages that are taken before the monitor looks again

_BEGIN, _UP, _DOWN = "begin", "up", "down"
_TO_MONITOR, _TO_RANK, _GREETING = b"up", b"down", b"begin"  # directions


def listen(address: tuple[str, int]) -> socket.socket:
    """Open a listening socket for `Server`; port 0 chooses a free port.

    Raises:
        OSError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family, backlog=1024)


class Line:
    """A rank's end of the message channel (`channel.Channel`), with a thread that sends and receives.

    Args:
        find: returns the address of the monitor and the secret, or None as long as there is none; called on the thread.
        hello: what the monitor learns about this rank: world, host, node, pid.
        rank: the number of this rank.
        coverage: counts messages that were lost.
        patience: seconds in which the monitor must be found.
    """

    def __init__(
        self,
        find: Callable[[], tuple[tuple[str, int], str] | None],
        hello: Mapping[str, Any],
        rank: int,
        coverage: Coverage,
        patience: float = 60.0,
    ) -> None:
        self._find, self._hello, self._rank, self._coverage = find, dict(hello), rank, coverage
        self._patience = patience
        self._queue: deque[bytes] = deque()
        self._waiting = 0  # bytes in the queue
        self._orders: deque[Message] = deque()
        self._process, self._cut, self._closing = os.getpid(), "", threading.Event()
        self._thread = threading.Thread(target=self._run, name="dash-guard-line", daemon=True)
        self._thread.start()

    @property
    def cut(self) -> str:
        """Why messages no longer reach the monitor; "" while they do."""
        return self._cut

    def send(self, message: Message) -> None:
        """Queue a message for the monitor; never waits, never raises."""
        if os.getpid() != self._process:
            return
        try:
            content = message.encode()
        except (ArgumentError, TypeError, ValueError) as error:
            self._lost(f"a message of {message.kind} could not be sent: {error}")
            return
        if self._cut:
            self._lost(self._cut)
        elif len(self._queue) >= _QUEUE or self._waiting + len(content) > _BYTES:
            self._lost("messages came faster than the monitor takes them")
        else:
            self._waiting += len(content)
            self._queue.append(content)

    def orders(self) -> list[Message]:
        """The requests of the monitor to this rank that have arrived since the last call."""
        return [self._orders.popleft() for _ in range(len(self._orders))]

    def close(self) -> None:
        """Send the remaining messages and the shutdown notice: within a second, on a loaded machine within `_LAST`.

        A thread that is inside the store when the interpreter ends would abort the process.
        """
        if os.getpid() == self._process and not self._closing.is_set():
            self.send(Message(LEFT, self._rank))
            self._closing.set()
            self._thread.join(timeout=_LAST)

    def _lost(self, why: str) -> None:
        self._coverage.unseen("messages", why)

    def _run(self) -> None:
        try:
            end = self._connect()
            end.push(Message(JOINED, self._rank, 0, self._hello).encode())
            often, looked = _INTERVAL * max(1.0, self._hello.get("world", 1) / _RANKS), 0.0
            while not self._closing.wait(_INTERVAL):
                self._flush(end)
                if time.monotonic() - looked >= often and len(self._orders) < _QUEUE:
                    looked = time.monotonic()
                    self._orders.extend(decode(content) for content in end.pop())
            self._flush(end)
        except (OSError, RuntimeError, Refused, ArgumentError) as error:
            self._cut = f"the monitor of the guard cannot be reached: {error}"
            for _ in range(len(self._queue)):
                self._lost(self._cut)
            self._queue.clear()
            if not self._closing.is_set():
                log.warning("%s; training goes on, and is not checked from here", self._cut)

    def _connect(self) -> _End:
        deadline = time.monotonic() + self._patience
        while True:
            is_last = self._closing.is_set() or time.monotonic() > deadline
            try:
                found = self._find()
                if found is not None:
                    return _End(*found)
                problem = OSError("it has published no address")
            except OSError as error:
                problem = error
            if is_last:  # a rank that ends early still joins and leaves
                raise problem
            self._closing.wait(_INTERVAL)

    def _flush(self, end: _End) -> None:
        while self._queue:
            content = self._queue.popleft()
            self._waiting -= len(content)
            end.push(content)


class _End:
    """A session of a rank with the monitor: `push` and `pop` number and authenticate messages.

    Raises:
        OSError: nothing listens at the address; the methods raise it too once nothing does.
        Refused: the monitor belongs to another job.
    """

    def __init__(self, address: tuple[str, int], secret: str) -> None:
        socket.create_connection(address, timeout=_PATIENCE).close()  # TCPStore would retry and log for long
        try:
            self._store, self._connection = _connected(address)
            if self._connection is not None:
                weakref.finalize(self, self._connection.close)
            begin = bytes.fromhex(self._store.get(_BEGIN).decode())
        except (RuntimeError, ValueError) as error:
            raise _closed(error) from error
        theirs, self._nonce = begin[: wire.NONCE], os.urandom(wire.NONCE)
        wire.unseal(wire.session_key(secret, theirs, b""), _GREETING, begin[wire.NONCE :])
        self._key = wire.session_key(secret, theirs, self._nonce)
        self._pushed, self._popped, self._queue = 0, -1, f"{_DOWN}/{self._nonce.hex()}"

    def push(self, content: bytes) -> None:
        """Send an encoded message to the monitor; waits only for space in the connection."""
        self._check()
        sealed = wire.seal(self._key, _TO_MONITOR, self._pushed, content)
        self._pushed += 1
        try:
            self._store.queue_push(_UP, self._nonce + sealed)
        except RuntimeError as error:
            raise _closed(error) from error

    def pop(self) -> list[bytes]:
        """The encoded messages from the monitor that have arrived since the last call.

        Raises:
            Refused: another process has written, changed or taken a message.
        """
        sealed: list[bytes] = []
        self._check()
        try:
            # `queue_len` would hold the interpreter's lock until the monitor answers.
            while len(sealed) < _ORDERS and self._store.check([self._queue]):
                sealed.append(_pop(self._store, self._queue))
        except RuntimeError as error:
            raise _closed(error) from error
        found = []
        for each in sealed:
            number, content = wire.unseal(self._key, _TO_RANK, each)
            if number != self._popped + 1 or len(content) > SIZE:
                raise Refused("an order out of its place")
            self._popped = number
            found.append(content)
        return found

    def _check(self) -> None:
        """Raise an error if the monitor is gone, before the store does: it would log a stack of C++."""
        if self._connection is not None and _is_closed(self._connection):
            raise OSError("it has closed the connection")


@dataclass
class _Session:
    """The session of a process that has joined, in the monitor."""

    rank: int
    nonce: bytes
    key: bytes
    helper: bool  # the wrapper of another node, which reports processes
    number: int = 0
    orders: int = 0


class Server:
    """The monitor's end of the message channel (`channel.Mailbox`), which hosts the store.

    Args:
        listener: a socket from `listen`; the store takes it over.
        secret: the secret of the job.
        coverage: counts messages that were refused or lost.

    Raises:
        OSError: the store cannot be hosted.
    """

    def __init__(self, listener: socket.socket, secret: str, coverage: Coverage) -> None:
        self._secret, self._coverage = secret, coverage
        self._sessions: dict[bytes, _Session] = {}
        self._by_rank: dict[int, _Session] = {}
        self._nonce = os.urandom(wire.NONCE)
        host, port = listener.getsockname()[:2]
        try:
            self._store = _store((reachable(host), port), listener.detach())
            greeting = wire.seal(wire.session_key(secret, self._nonce, b""), _GREETING, 0, b"")
            self._store.set(_BEGIN, (self._nonce + greeting).hex())
        except RuntimeError as error:
            raise _closed(error) from error

    def receive(self) -> list[Message]:
        """The messages that have arrived since the last call; each rank's are in the order in which it sent them."""
        received: list[Message] = []
        try:
            for _ in range(min(_ROUND, self._store.queue_len(_UP))):
                try:
                    received += self._take(_pop(self._store, _UP))
                except Refused as error:
                    self._coverage.unseen("messages", f"refused: {error}")
        except RuntimeError as error:  # another process takes messages: their numbers will show it
            self._coverage.unseen("messages", f"not read: {_first_line(error)}")
        return received

    def order(self, ranks: tuple[int, ...], message: Message) -> None:
        """Send a request to ranks; ranks that have left or do not read are skipped."""
        content = message.encode()
        for rank in ranks:
            session = self._by_rank.get(rank)
            queue = f"{_DOWN}/{session.nonce.hex()}" if session is not None else ""
            if session is None or self._store.queue_len(queue) >= _ORDERS:
                self._coverage.unseen("orders", f"{message.kind}: not sent to ranks that do not read")
                continue
            self._store.queue_push(queue, wire.seal(session.key, _TO_RANK, session.orders, content))
            session.orders += 1

    def close(self) -> None:
        """Close the store."""
        del self._store

    def _take(self, sealed: bytes) -> list[Message]:
        nonce, sealed = sealed[: wire.NONCE], sealed[wire.NONCE :]
        session = self._sessions.get(nonce)
        key = session.key if session is not None else wire.session_key(self._secret, self._nonce, nonce)
        number, content = wire.unseal(key, _TO_MONITOR, sealed)
        message = decode(content)
        if session is None:
            return self._join(_Session(message.rank, nonce, key, bool(message.body.get("helper"))), number, message)
        if number <= session.number:
            raise Refused("a message that has come before")
        if number > session.number + 1:
            self._coverage.unseen("messages", "lost on their way", number - session.number - 1)
        session.number = number
        return [message] if self._allows(session, message) else []

    def _join(self, session: _Session, number: int, message: Message) -> list[Message]:
        if message.kind != JOINED or number:
            raise Refused("the first message does not say who it is")
        self._sessions[session.nonce] = session
        if session.helper:
            return []
        self._by_rank[session.rank] = session  # a restarted rank replaces its former session
        return [message]

    def _allows(self, session: _Session, message: Message) -> bool:
        """Whether a message counts; messages of a rank from before its restart do not.

        Raises:
            Refused: this sender may not send it.
        """
        if session.helper:
            if message.kind not in ("process", LEFT):
                raise Refused(f"a message of kind {message.kind} from a process that is no rank")
            return message.kind == "process"
        if message.kind in (JOINED, "process"):
            raise Refused(f"a message of kind {message.kind} from a rank that has joined")
        if message.rank != session.rank:
            raise Refused("a message in the name of another rank")
        present = self._by_rank.get(session.rank) is session
        if present and message.kind == LEFT:
            del self._by_rank[session.rank]
        return present or message.kind not in ("heartbeat", LEFT)


def _store(address: tuple[str, int], listener: int | None = None) -> TCPStore:
    """Connect to the store at an address, or host it if `listener` is the descriptor of a socket."""
    import torch.distributed as dist  # here, because a process that only starts a program needs no torch

    store: TCPStore = dist.TCPStore(  # type: ignore[attr-defined]
        address[0],
        address[1],
        is_master=listener is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=_PATIENCE),
        master_listen_fd=listener,
    )
    return store


def _connected(address: tuple[str, int]) -> tuple[TCPStore, socket.socket | None]:
    """A client of the store at an address, and the socket that it uses; None if that is not found."""
    before = _sockets()
    store = _store(address)
    for descriptor in _sockets() - before:
        try:
            found = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue
        try:
            if found.getpeername()[1] == address[1]:
                return store, found
        except OSError:
            pass
        found.close()
    return store, None


def _sockets() -> set[int]:
    """The descriptors of all sockets of this process; none where there is no /proc."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found.add(int(name))
    return found


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end of a connection has closed it; reads nothing."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _pop(store: TCPStore, queue: str) -> bytes:
    """The next message of a queue that has one; RuntimeError if another process has taken it."""
    return bytes(store.queue_pop(queue, False))


def _closed(error: Exception) -> OSError:
    return OSError(f"it has closed the connection ({_first_line(error)})")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
