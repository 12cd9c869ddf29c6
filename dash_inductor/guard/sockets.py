"""The way of messages across processes and machines: a socket of the monitor, a connection of each rank.

It is no store of the training: nothing here waits for what training waits for.  A rank's end has a thread of its own
and a queue with a bound; the monitor's end has neither, and takes what has come when it is asked.  The monitor sees at
once that a connection ends, and tells so by messages of its own: "joined", "left".
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._untrusted import Refused
from ..errors import ArgumentError
from . import wire
from .coverage import Coverage
from .messages import SIZE, Message, decode

log = logging.getLogger("dash_inductor")

JOINED, LEFT, BYE = "joined", "left", "bye"
"""Messages of the connection itself; the body of `LEFT` says whether the rank has said `BYE`."""

_UP, _DOWN = b"up", b"down"
_QUEUE = 4096  # messages that wait
_BYTES = 8 << 20
_INTERVAL = 0.1  # seconds between two looks at the queue
_PATIENCE = 5.0  # seconds for one write, or for the first message of a connection
_STRANGERS = 256  # connections that have not said who they are
_READ = 1 << 16
_ORDERS = 1 << 20  # bytes that wait for a rank which does not read


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


class Line:
    """A rank's end of the way (`channel.Channel`).

    Args:
        find: gives the address of the monitor and the secret, or None as long as there is none; it runs on the thread.
        hello: what the monitor learns of this rank: world, host, node, pid.
        rank: of this process.
        coverage: gets what was lost.
        patience: seconds until the monitor must have been found.
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
        self._connection: socket.socket | None = None
        _lines.add(self)
        self._thread = threading.Thread(target=self._run, name="dash-guard-line", daemon=True)
        self._thread.start()

    @property
    def cut(self) -> str:
        """Why nothing reaches the monitor any more, "" as long as it does."""
        return self._cut

    def send(self, message: Message) -> None:
        """Hand a message over; never waits, never raises."""
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
        """What the monitor has asked of this rank."""
        return [self._orders.popleft() for _ in range(len(self._orders))]

    def close(self) -> None:
        """Send what is left, within a second."""
        if os.getpid() == self._process and not self._closing.is_set():
            self.send(Message(BYE, self._rank))
            self._closing.set()
            self._thread.join(timeout=1.0)

    def forked(self) -> None:
        """This is a process that a rank has forked: the connection must end with the rank."""
        if self._connection is not None:
            self._connection.close()

    def _lost(self, why: str) -> None:
        self._coverage.unseen("messages", why)

    def _run(self) -> None:
        try:
            connection, writer, reader = self._connect()
            self._connection = connection
            with connection:
                while not self._closing.wait(_INTERVAL):
                    self._flush(connection, writer)
                    self._take(connection, reader)
                self._flush(connection, writer)
                connection.shutdown(socket.SHUT_WR)
        except (OSError, Refused, ArgumentError) as error:
            if isinstance(error, (BrokenPipeError, ConnectionResetError)):  # whoever writes first learns it so
                error = OSError(errno.ECONNRESET, "it has closed the connection")
            self._cut = f"the monitor of the guard cannot be reached: {error}"
            for _ in range(len(self._queue)):
                self._lost(self._cut)
            self._queue.clear()
            if not self._closing.is_set():
                log.warning("%s; training goes on, and is not checked from here", self._cut)

    def _connect(self) -> tuple[socket.socket, wire.Writer, wire.Reader]:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                found = self._find()
                if found is not None:
                    return self._shake_hands(*found)
                problem = OSError(errno.ENOENT, "it has told no address")
            except OSError as error:
                problem = error
            if time.monotonic() > deadline or self._closing.wait(_INTERVAL):
                raise problem

    def _shake_hands(self, address: tuple[str, int], secret: str) -> tuple[socket.socket, wire.Writer, wire.Reader]:
        connection = socket.create_connection(address, timeout=_PATIENCE)
        try:
            theirs = b""
            while len(theirs) < wire.NONCE:
                if not (part := connection.recv(wire.NONCE - len(theirs))):
                    raise OSError(errno.ECONNRESET, "it has closed the connection")
                theirs += part
            ours = os.urandom(wire.NONCE)
            key = wire.connection_key(secret, theirs, ours)
            writer = wire.Writer(key, _UP)
            connection.sendall(ours + writer.frame(Message(JOINED, self._rank, 0, self._hello).encode()))
            return connection, writer, wire.Reader(key, _DOWN)
        except BaseException:
            connection.close()
            raise

    def _flush(self, connection: socket.socket, writer: wire.Writer) -> None:
        while self._queue:
            content = self._queue.popleft()
            self._waiting -= len(content)
            connection.settimeout(_PATIENCE)
            connection.sendall(writer.frame(content))

    def _take(self, connection: socket.socket, reader: wire.Reader) -> None:
        connection.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            received = connection.recv(_READ)
            if not received:
                raise OSError(errno.ECONNRESET, "it has closed the connection")
            for content in reader.feed(received):
                if len(self._orders) < _QUEUE:
                    self._orders.append(decode(content))


_lines: weakref.WeakSet[Line] = weakref.WeakSet()


def _forked() -> None:
    for line in tuple(_lines):
        line.forked()


os.register_at_fork(after_in_child=_forked)


@dataclass
class _Peer:
    """A connection, as the monitor sees it; `rank` is None until it has said who it is."""

    connection: socket.socket
    nonce: bytes
    since: float
    rank: int | None = None
    begin: bytes = b""
    reader: wire.Reader | None = None
    writer: wire.Writer | None = None
    to_send: bytearray = field(default_factory=bytearray)
    said_bye: bool = False


class Server:
    """The monitor's end of the way (`channel.Mailbox`).

    Whoever does not know the secret of the job is cut off, and counted.

    Args:
        address: host and port to listen at; port 0 takes a free one.
        secret: of the job.
        coverage: gets what was refused.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, address: tuple[str, int], secret: str, coverage: Coverage) -> None:
        self._secret, self._coverage = secret, coverage
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=1024)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: dict[socket.socket, _Peer] = {}
        self._by_rank: dict[int, _Peer] = {}
        self._received: list[Message] = []

    def receive(self) -> list[Message]:
        """What has come since the last call."""
        self._poll()
        received, self._received = self._received, []
        return received

    def fileno(self) -> int:
        """A descriptor that can be read from when something has come."""
        return self._selector.fileno()

    def order(self, ranks: tuple[int, ...], message: Message) -> None:
        """Ask something of ranks; those that are not there are left out."""
        content = message.encode()
        for rank in ranks:
            peer = self._by_rank.get(rank)
            if peer is None or peer.writer is None or len(peer.to_send) > _ORDERS:
                self._coverage.unseen("orders", f"{message.kind}: not sent to ranks that do not read")
                continue
            peer.to_send += peer.writer.frame(content)
            self._write(peer)

    def close(self) -> None:
        """Cut all off."""
        for peer in tuple(self._peers.values()):
            peer.connection.close()
        self._listener.close()
        self._selector.close()

    def connected(self) -> int:
        """Ranks that are connected."""
        return len(self._by_rank)

    def _poll(self) -> None:
        for key, events in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, socket.socket) and (peer := self._peers.get(key.fileobj)) is not None:
                if events & selectors.EVENT_WRITE:
                    self._write(peer)
                if events & selectors.EVENT_READ:
                    self._read(peer)
        now = time.monotonic()
        for peer in tuple(self._strangers()):
            if now - peer.since > _PATIENCE:
                self._refuse(peer, "it did not say who it is in time")

    def _strangers(self) -> list[_Peer]:
        if len(self._peers) == len(self._by_rank):
            return []
        return [peer for peer in self._peers.values() if peer.rank is None]

    def _accept(self) -> None:
        for _ in range(64):
            try:
                connection, _address = self._listener.accept()
            except OSError:  # nobody is left, or there are no descriptors any more: the next call tries again
                return
            connection.setblocking(False)
            peer = _Peer(connection, os.urandom(wire.NONCE), time.monotonic())
            strangers = self._strangers()
            self._peers[connection] = peer
            self._selector.register(connection, selectors.EVENT_READ)
            if len(strangers) >= _STRANGERS:
                self._refuse(strangers[0], "too many that did not say who they are")
            peer.to_send += peer.nonce
            self._write(peer)

    def _read(self, peer: _Peer) -> None:
        try:
            received = peer.connection.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._end(peer)
            return
        try:
            for content in self._contents(peer, received):
                self._take(peer, decode(content))
        except Refused as error:
            self._refuse(peer, str(error))

    def _contents(self, peer: _Peer, received: bytes) -> list[bytes]:
        if peer.reader is None:
            peer.begin += received
            if len(peer.begin) < wire.NONCE:
                return []
            theirs, received, peer.begin = peer.begin[: wire.NONCE], peer.begin[wire.NONCE :], b""
            key = wire.connection_key(self._secret, peer.nonce, theirs)
            peer.reader, peer.writer = wire.Reader(key, _UP, wire.FIRST), wire.Writer(key, _DOWN)
        return list(self._feed(peer.reader, received))

    @staticmethod
    def _feed(reader: wire.Reader, received: bytes) -> list[bytes]:
        contents = []
        for content in reader.feed(received):
            reader.most = SIZE  # the first message has told who it is
            contents.append(content)
        return contents

    def _take(self, peer: _Peer, message: Message) -> None:
        if peer.rank is None:
            if message.kind != JOINED:
                raise Refused("the first message does not say who it is")
            peer.rank = message.rank
            if not message.body.get("helper"):
                before = self._by_rank.get(message.rank)
                self._by_rank[message.rank] = peer
                if before is not None:  # a restarted rank
                    self._drop(before)
                self._received.append(message)
            return
        if message.kind == BYE:
            peer.said_bye = True
        elif message.kind in (JOINED, LEFT):
            raise Refused(f"a second message of kind {message.kind}")
        elif self._by_rank.get(peer.rank) is peer and message.rank != peer.rank:
            raise Refused("a message in the name of another rank")
        elif message.kind != "beat" or self._by_rank.get(peer.rank) is peer:
            self._received.append(message)

    def _end(self, peer: _Peer) -> None:
        self._drop(peer)
        if peer.rank is not None and self._by_rank.get(peer.rank) is peer:
            del self._by_rank[peer.rank]
            self._received.append(Message(LEFT, peer.rank, 0, {"bye": peer.said_bye}))

    def _refuse(self, peer: _Peer, why: str) -> None:
        self._coverage.unseen("messages", f"refused: {why}")
        self._end(peer)

    def _drop(self, peer: _Peer) -> None:
        if self._peers.pop(peer.connection, None) is not None:
            self._selector.unregister(peer.connection)
            peer.connection.close()

    def _write(self, peer: _Peer) -> None:
        try:
            sent = peer.connection.send(peer.to_send) if peer.to_send else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._end(peer)
            return
        del peer.to_send[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.to_send else 0)
        if peer.connection in self._peers:
            self._selector.modify(peer.connection, events)
