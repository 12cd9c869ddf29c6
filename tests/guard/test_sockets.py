"""The way of messages across processes: order, limits, secrets, and what becomes of a connection that breaks."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dash_inductor._untrusted import Refused
from dash_inductor.errors import ArgumentError
from dash_inductor.guard import connect, sockets, wire
from dash_inductor.guard.coverage import Coverage
from dash_inductor.guard.messages import SIZE, Message
from dash_inductor.guard.processes import ENDED, STOPPED, Processes, descendants, node, words
from dash_inductor.guard.sockets import BYE, JOINED, LEFT, Line, Server

SECRET = "s" * 32
HELLO = {"world": 2, "host": "here", "node": node(), "pid": os.getpid()}


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


class Ends:
    """A server, and what has come to it."""

    def __init__(self) -> None:
        self.coverage, self.lost = Coverage(), Coverage()
        self.server = Server(("127.0.0.1", 0), SECRET, self.coverage)
        self.came: list[Message] = []

    def line(self, rank: int, secret: str = SECRET) -> Line:
        return Line(lambda: (self.server.address, secret), HELLO, rank, self.lost, patience=2.0)

    def has(self, kind: str, count: int = 1) -> bool:
        self.came += self.server.receive()
        return sum(message.kind == kind for message in self.came) >= count

    def refused(self) -> dict[str, int]:
        found: dict[str, int] = self.coverage.to_dict().get("messages", {}).get("unseen", {})
        return found


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends()
    yield found
    found.server.close()


def test_messages_come_in_order_and_orders_go_back(ends: Ends) -> None:
    lines = [ends.line(rank) for rank in range(2)]
    for number in range(50):
        for rank, line in enumerate(lines):
            line.send(Message("bits", rank, number, {"n": number}))
    until(lambda: ends.has("bits", 100))
    for rank in range(2):
        of = [message for message in ends.came if message.rank == rank]
        assert [of[0].kind, *(message.step for message in of[1:])] == [JOINED, *range(50)]
    ends.server.order((1, 7), Message("roll_call", 0, 3))
    got: list[Message] = []
    until(lambda: bool(ends.server.receive() or got.extend(lines[1].orders()) or got))
    assert got == [Message("roll_call", 0, 3)]
    assert "not sent" in str(ends.coverage.to_dict()["orders"])
    for line in lines:
        line.close()
    until(lambda: ends.has(LEFT, 2))
    assert [message.body for message in ends.came if message.kind == LEFT] == [{"bye": True}] * 2
    assert ends.refused() == ends.lost.to_dict() == {}


def test_who_does_not_know_the_secret_is_cut_off(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    line = ends.line(0, secret="t" * 32)
    until(lambda: bool(ends.server.receive() or line.cut))
    line.send(Message("bits", 0, 1))
    until(lambda: "training goes on" in caplog.text)
    assert ends.server.connected() == 0
    assert ends.refused() == {"refused: a message without the code of this job": 1}
    assert list(ends.lost.to_dict()["messages"]["unseen"].values()) == [1]


def raw(ends: Ends) -> tuple[socket.socket, wire.Writer]:
    """A connection by hand, of somebody who knows the secret."""
    connection = socket.create_connection(ends.server.address)
    until(lambda: bool(ends.server.receive() or True))
    nonce = connection.recv(wire.NONCE, socket.MSG_WAITALL)
    connection.sendall(b"c" * wire.NONCE)
    return connection, wire.Writer(wire.connection_key(SECRET, nonce, b"c" * wire.NONCE), b"up")


def crafted(kind: str, writer: wire.Writer) -> bytes:
    hello = writer.frame(Message(JOINED, 0, 0, {}).encode())
    return {
        "noise": os.urandom(4096),
        "a request of HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
        "a length of gigabytes": (1 << 31).to_bytes(4, "big") + b"x" * 64,
        "a first message that is too long": writer.frame(b"[" + b" " * wire.FIRST + b"]"),
        "no greeting": writer.frame(Message("bits", 0, 1).encode()),
        "no JSON": hello + writer.frame(b"\x80\x04pickle"),
        "deep JSON": hello + writer.frame(b"[" * 60_000),
        "a message twice": hello + hello,
        "a changed message": hello + bytes(byte ^ (n > 30) for n, byte in enumerate(writer.frame(b'["bits",0,1,{}]'))),
        "the name of another": hello + writer.frame(Message("bits", 1, 1).encode()),
        "a second greeting": hello + writer.frame(Message(JOINED, 0, 0, {}).encode()),
        "a rank beyond all": writer.frame(b'["joined",99999999,0,{}]'),
        "NaN": hello + writer.frame(b'["bits",0,1,{"x":NaN}]'),
    }[kind]


KINDS = (
    "noise", "a request of HTTP", "a length of gigabytes", "a first message that is too long", "no greeting", "no JSON",
    "deep JSON", "a message twice", "a changed message", "the name of another", "a second greeting",
    "a rank beyond all", "NaN",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_crafted_messages_cut_only_their_sender_off(ends: Ends, kind: str) -> None:
    good = ends.line(1)
    until(lambda: ends.has(JOINED))
    connection, writer = raw(ends)
    with connection:
        connection.sendall(crafted(kind, writer))
        until(lambda: bool(ends.server.receive() or ends.refused()))
    good.send(Message("bits", 1, 1))
    until(lambda: ends.has("bits"))
    assert [message.rank for message in ends.came if message.kind == "bits"] == [1]
    assert sum(ends.refused().values()) == 1
    good.close()


def test_strangers_are_bounded(ends: Ends) -> None:
    count = sockets._STRANGERS + 20
    connections = [socket.create_connection(ends.server.address) for _ in range(count)]
    until(
        lambda: bool(
            ends.server.receive() or ends.refused().get("refused: too many that did not say who they are") == 20
        )
    )
    good = ends.line(1)
    until(lambda: ends.has(JOINED))
    good.close()
    for connection in connections:
        connection.close()


def test_a_queue_has_a_bound_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_QUEUE", 10)
    lost = Coverage()
    line = Line(lambda: None, HELLO, 0, lost, patience=0.3)
    began = time.monotonic()
    for number in range(100):
        line.send(Message("bits", 0, number, {"x": "y" * 1000}))
    line.send(Message("bits", 0, 1, {"x": "y" * SIZE}))
    line.send(Message("bits", 0, 1, {"x": object()}))
    assert time.monotonic() - began < 1.0
    until(lambda: bool(line.cut))
    line.close()
    unseen = lost.to_dict()["messages"]["unseen"]
    assert unseen["messages came faster than the monitor takes them"] == 90
    assert sum(unseen.values()) == 90 + 10 + 2 + 1  # those that waited, those that could not be sent, and the farewell


def test_a_monitor_that_ends_costs_a_warning(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    line = ends.line(0)
    until(lambda: ends.has(JOINED))
    ends.server.close()
    until(lambda: bool(line.cut))
    line.send(Message("bits", 0, 1))
    line.close()
    assert caplog.text.count("training goes on, and is not checked from here") == 1
    assert sum(ends.lost.to_dict()["messages"]["unseen"].values()) >= 1
    ends.server = Ends().server  # for the fixture


def test_a_forked_process_does_not_hold_a_connection(ends: Ends) -> None:
    line = ends.line(0)
    until(lambda: ends.has(JOINED))
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reading, 1)
        os._exit(0)
    line.close()
    until(lambda: ends.has(LEFT))
    os.write(writing, b"x")
    os.waitpid(pid, 0)
    os.close(reading)
    os.close(writing)


def test_a_rank_that_comes_again_takes_the_place_of_its_former_self(ends: Ends) -> None:
    first = ends.line(0)
    until(lambda: ends.has(JOINED))
    second = ends.line(0)
    until(lambda: ends.has(JOINED, 2))
    second.send(Message("bits", 0, 1))
    until(lambda: ends.has("bits"))
    assert ends.server.connected() == 1
    assert not ends.has(LEFT)
    for line in (first, second):
        line.close()


def test_frames_are_bound_to_their_place() -> None:
    key = wire.connection_key(SECRET, b"a", b"b")
    writer = wire.Writer(key, b"up")
    frames = [writer.frame(bytes([number])) for number in range(3)]
    assert list(wire.Reader(key, b"up").feed(b"".join(frames))) == [b"\0", b"\1", b"\2"]
    for wrong in ([frames[1]], [frames[0], frames[0]], [frames[0], frames[2]]):
        with pytest.raises(Refused):
            list(wire.Reader(key, b"up").feed(b"".join(wrong)))
    with pytest.raises(Refused):
        list(wire.Reader(key, b"down").feed(frames[0]))
    reader = wire.Reader(key, b"up")
    assert [content for byte in frames[0] for content in reader.feed(bytes([byte]))] == [b"\0"]


def test_secrets_come_from_a_variable_or_a_file_that_nobody_else_reads(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    assert wire.secret_of({}) is None
    assert wire.secret_of({wire.SECRET: SECRET}) == wire.secret_of({wire.SECRET_FILE: str(path)}) == SECRET
    path.chmod(0o640)
    for environment in ({wire.SECRET_FILE: str(path)}, {wire.SECRET_FILE: "/nowhere"}, {wire.SECRET: "short"}):
        with pytest.raises(ArgumentError):
            wire.secret_of(environment)


def test_an_address_in_a_folder(tmp_path: Path) -> None:
    assert connect.from_folder(tmp_path) is None
    path = connect.publish(tmp_path / "new", connect.run_name(), ("127.0.0.1", 5), SECRET)
    assert path.stat().st_mode & 0o777 == 0o600
    assert connect.from_folder(tmp_path / "new") == (("127.0.0.1", 5), SECRET)
    connect.publish(tmp_path / "new", "another run", ("127.0.0.1", 5), SECRET)
    assert connect.from_folder(tmp_path / "new") is None
    for content in ("{", "[]", json.dumps({"run": connect.run_name()})):
        path.write_text(content)
        with pytest.raises(OSError, match="monitor"):
            connect.from_folder(tmp_path / "new")
    for text in ("x", "h:x", "h:70000"):
        with pytest.raises(ArgumentError):
            sockets.parse_address(text)
    assert sockets.parse_address("[::1]:80") == ("::1", 80)


def test_processes_that_stop_and_end_are_seen() -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    processes = Processes()
    assert pid in descendants(os.getpid())
    processes.watch([pid, pid])
    assert processes.changed() == []
    os.kill(pid, 19)
    until(lambda: [state.state for state in processes.changed()] == [STOPPED])
    threading.Timer(0.2, os.kill, (pid, 9)).start()
    processes.wait(20.0)
    (state,) = processes.changed()
    assert (state.pid, state.state, state.status) == (pid, ENDED, 9)
    assert words(9) == "signal SIGKILL"
    assert words(3 << 8) == "exit status 3"
    os.waitpid(pid, 0)
    assert processes.changed() == []
    processes.close()


def test_a_farewell_is_the_last_message(ends: Ends) -> None:
    line = ends.line(0)
    line.send(Message("coverage", 0, 1, {"bits": {"counts": {"steps": 3}, "unseen": {}}}))
    line.close()
    until(lambda: ends.has(LEFT))
    assert [message.kind for message in ends.came] == [JOINED, "coverage", LEFT]
    assert BYE not in {message.kind for message in ends.came}
