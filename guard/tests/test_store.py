"""The way of messages across processes: order, limits, codes, and what becomes of a store that ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from dash_guard.report.coverage import Coverage
from dash_guard.shared.processes import ENDED, STOPPED, Processes, descendants, node, words
from dash_guard.transport import connect, store, wire
from dash_guard.transport.address import parse_address
from dash_guard.transport.messages import SIZE, Message
from dash_guard.transport.store import JOINED, LEFT, Line, Server, listen
from dash_inductor.errors import ArgumentError
from dash_inductor.untrusted import Refused

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
        listener = listen(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.server = Server(listener, SECRET, self.coverage)
        self.came: list[Message] = []

    def line(self, rank: int, secret: str = SECRET, **hello: object) -> Line:
        return Line(lambda: (self.address, secret), {**HELLO, **hello}, rank, self.lost, patience=2.0)

    def client(self) -> dist.TCPStore:  # type: ignore[name-defined]
        """Somebody who can reach the store."""
        return dist.TCPStore(*self.address, is_master=False, wait_for_workers=False)

    def has(self, kind: str, count: int = 1) -> bool:
        self.came += self.server.receive()
        return sum(message.kind == kind for message in self.came) >= count

    def refused(self) -> int:
        """How many messages were, of those that are there."""
        self.came += self.server.receive()
        return sum(self.unseen().values())

    def unseen(self) -> dict[str, int]:
        found: dict[str, int] = self.coverage.to_dict().get("messages", {}).get("unseen", {})
        return found


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends()
    yield found
    if hasattr(found.server, "_store"):
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
    for step in range(3):
        ends.server.order((1, 7), Message("cross_rank_recompute", 0, step))
    got: list[Message] = []
    until(lambda: len(got.extend(lines[1].orders()) or got) == 3)
    assert got == [Message("cross_rank_recompute", 0, step) for step in range(3)]
    assert "not sent" in str(ends.coverage.to_dict()["orders"])
    for line in lines:
        line.close()
    until(lambda: ends.has(LEFT, 2))
    assert ends.unseen() == ends.lost.to_dict() == {}


def test_a_monitor_of_another_job_gets_nothing(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    line = ends.line(0, secret="t" * 32)
    until(lambda: bool(line.cut))
    line.send(Message("bits", 0, 1))
    until(lambda: "training goes on" in caplog.text)
    assert not ends.has(JOINED)
    assert "without the code of this job" in line.cut
    assert list(ends.lost.to_dict()["messages"]["unseen"].values()) == [1]


class Sender:
    """Somebody who writes messages by hand; he may know the secret."""

    def __init__(self, ends: Ends, number: int = 0, secret: str = SECRET) -> None:
        self.store, self.nonce = ends.client(), bytes([number]) * wire.NONCE
        self.key = wire.session_key(secret, bytes.fromhex(self.store.get("begin").decode())[: wire.NONCE], self.nonce)

    def sealed(self, number: int, content: bytes, direction: bytes = b"up") -> bytes:
        return self.nonce + wire.seal(self.key, direction, number, content)


def crafted(kind: str, sender: Sender) -> list[bytes]:
    hello, sealed = sender.sealed(0, Message(JOINED, 0, 0, {}).encode()), sender.sealed
    bits = sealed(1, Message("bits", 0, 1).encode())
    return {
        "nothing": [b""],
        "noise": [os.urandom(4096)],
        "no greeting": [sealed(0, Message("bits", 0, 1).encode())],
        "no JSON": [hello, sealed(1, b"\x80\x04pickle")],
        "deep JSON": [hello, sealed(1, b"[" * 60_000)],
        "megabytes": [hello, sealed(1, b"[" + b" " * (4 << 20) + b"]")],
        "a greeting twice": [hello, hello],
        "a message of before": [hello, bits, bits],
        "a changed message": [hello, bits[:-8] + bytes([bits[-8] ^ 1]) + bits[-7:]],
        "the other direction": [hello, sealed(1, Message("bits", 0, 1).encode(), b"down")],
        "the name of another": [hello, sealed(1, Message("bits", 1, 1).encode())],
        "a second greeting": [hello, sealed(1, Message(JOINED, 0, 0, {}).encode())],
        "a process": [hello, sealed(1, Message("process", 0, 0, {"pid": 1, "state": "ended"}).encode())],
        "a rank beyond all": [sealed(0, b'["joined",99999999,0,{}]')],
        "NaN": [hello, sealed(1, b'["bits",0,1,{"x":NaN}]')],
        "another secret": [hello],
    }[kind]


KINDS = (
    "nothing", "noise", "no greeting", "no JSON", "deep JSON", "megabytes", "a greeting twice", "a message of before",
    "a changed message", "the other direction", "the name of another", "a second greeting", "a process",
    "a rank beyond all", "NaN", "another secret",
)  # fmt: skip


def test_crafted_messages_are_refused_and_others_come(ends: Ends) -> None:
    good = ends.line(1)
    until(lambda: ends.has(JOINED))
    for number, kind in enumerate(KINDS):
        sender = Sender(ends, number, "t" * 32 if kind == "another secret" else SECRET)
        for content in crafted(kind, sender):
            sender.store.queue_push("up", content)
        until(lambda number=number: ends.refused() > number)
        assert ends.refused() == number + 1, kind
    good.send(Message("bits", 1, 1))
    until(lambda: ends.has("bits", 2))
    assert [message.rank for message in ends.came if message.kind == "bits"] == [0, 1]  # one was right, and came again
    good.close()


def test_messages_that_somebody_takes_out_are_missed(ends: Ends) -> None:
    sender = Sender(ends)
    sender.store.queue_push("up", sender.sealed(0, Message(JOINED, 0, 0, {}).encode()))
    for number in (1, 4):
        sender.store.queue_push("up", sender.sealed(number, Message("bits", 0, number).encode()))
    until(lambda: ends.has("bits", 2))
    assert ends.unseen() == {"lost on their way": 2}


def test_an_order_of_somebody_else_ends_the_session(ends: Ends) -> None:
    line = ends.line(0)
    until(lambda: ends.has(JOINED))
    (session,) = ends.server._sessions
    ends.client().queue_push(f"down/{session.hex()}", b"x" * 64)
    until(lambda: bool(line.cut))
    assert line.orders() == []
    assert "without the code of this job" in line.cut


def test_a_helper_tells_of_processes_and_of_nothing_else(ends: Ends) -> None:
    line = ends.line(0, helper=True)
    line.send(Message("process", 0, 0, {"pid": 2}))
    line.send(Message("bits", 0, 1))
    line.close()
    until(lambda: ends.has("process") and bool(ends.unseen()))
    assert [message.kind for message in ends.came] == ["process"]
    assert list(ends.unseen()) == ["refused: a message of kind bits from a process that is no rank"]


def test_a_queue_has_a_bound_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_QUEUE", 10)
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
    assert (
        sum(unseen.values()) == 90 + 10 + 2 + 1
    )  # those that waited, those that could not be sent, and the shutdown notice


def test_a_rank_that_ends_before_it_has_found_the_monitor_comes_and_goes(ends: Ends) -> None:
    looked, there = threading.Event(), threading.Event()

    def find() -> tuple[tuple[str, int], str] | None:
        looked.set()
        return (ends.address, SECRET) if there.is_set() else None

    line = Line(find, HELLO, 0, ends.lost)
    assert looked.wait(20.0)
    there.set()
    line.close()
    until(lambda: ends.has(LEFT))
    assert [message.kind for message in ends.came] == [JOINED, LEFT]


def test_a_monitor_that_ends_costs_a_warning(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    line = ends.line(0)
    until(lambda: ends.has(JOINED))
    ends.server.close()
    until(lambda: bool(line.cut))
    line.send(Message("bits", 0, 1))
    line.close()
    assert caplog.text.count("training goes on, and is not checked from here") == 1
    assert sum(ends.lost.to_dict()["messages"]["unseen"].values()) >= 1


def test_a_rank_that_comes_again_takes_the_place_of_its_former_self(ends: Ends) -> None:
    first = ends.line(0)
    until(lambda: ends.has(JOINED))
    second = ends.line(0)
    until(lambda: ends.has(JOINED, 2))
    second.send(Message("bits", 0, 1))
    until(lambda: ends.has("bits"))
    assert not ends.has(LEFT)
    for line in (first, second):
        line.close()


def test_codes_are_bound_to_direction_number_and_content() -> None:
    key = wire.session_key(SECRET, b"a", b"b")
    sealed = wire.seal(key, b"up", 3, b"content")
    assert wire.unseal(key, b"up", sealed) == (3, b"content")
    for direction, changed in ((b"down", sealed), (b"up", b"\0" + sealed), (b"up", sealed[:7] + b"\4" + sealed[8:])):
        with pytest.raises(Refused):
            wire.unseal(key, direction, changed)
    with pytest.raises(Refused):
        wire.unseal(wire.session_key(SECRET, b"a", b"c"), b"up", sealed)


STOPPED_MONITOR = """
import os, signal, sys, threading, time
from dash_guard.transport import store
from dash_guard.report.coverage import Coverage
from dash_guard.transport.messages import Message

listener = store.listen(("127.0.0.1", 0))
address = listener.getsockname()
monitor = os.fork()
if not monitor:
    server = store.Server(listener, "s" * 32, Coverage())
    while True:
        server.receive()
        time.sleep(0.01)
listener.close()
line = store.Line(lambda: (address, "s" * 32), {"world": 1}, 0, Coverage())
time.sleep(1.0)
if not os.fork():  # it ends the stop if this process cannot
    time.sleep(8.0)
    os.kill(monitor, signal.SIGKILL)
    os._exit(0)
os.kill(monitor, signal.SIGSTOP)
longest, last, end = 0.0, time.monotonic(), time.monotonic() + 2.0
while last < end:
    line.send(Message("bits", 0, 1, {"x": "y" * 20_000}))
    time.sleep(0.01)
    longest, last = max(longest, time.monotonic() - last), time.monotonic()
line.close()
os.kill(monitor, signal.SIGKILL)
print(longest)
os._exit(0)
"""


def test_a_monitor_that_is_stopped_holds_nothing_up() -> None:
    found = subprocess.run([sys.executable, "-c", STOPPED_MONITOR], capture_output=True, text=True, timeout=60)
    assert float(found.stdout) < 2.0, found.stderr


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
            parse_address(text)
    assert parse_address("[::1]:80") == ("::1", 80)


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


def test_a_shutdown_notice_is_the_last_message(ends: Ends) -> None:
    line = ends.line(0)
    line.send(Message("coverage", 0, 1, {"bits": {"counts": {"steps": 3}, "unseen": {}}}))
    line.close()
    until(lambda: ends.has(LEFT))
    assert [message.kind for message in ends.came] == [JOINED, "coverage", LEFT]
