"""Lets the coordinator on rank 0 direct the outlets of other ranks: commands and manifests over TCP, no weights.

A message is its length, 8 bytes, and JSON. A connection begins with the token of the run's ranks; it carries one
command at a time.
"""

import hmac
import logging
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from rl_async.concurrency import in_daemon_thread
from rl_async.errors import RanksLost, WeightSyncError
from rl_async.weight_sync.layout import Box
from rl_async.weight_sync.protocol import Hold, InitInfo, UpdateInfo
from rl_async.weight_sync.ranks.outlet import Outlet
from rl_async.weight_sync.ranks.rounds import Needs

LENGTH = struct.Struct("!Q")
MOST_BYTES = 1 << 30  # of a message
STRANGER_S = 10.0  # within which a connection says the token
LATER_S = 30.0  # that rank 0 waits longer for an offer than the rank itself does, to hear which rank is behind

log = logging.getLogger("rl_async.weight_sync")


class RankEnd(Protocol):
    """What the coordinator needs of a rank's outlet, here or elsewhere. For the methods see ``Outlet``."""

    def begin(self, version: str, offer: int, hold: Hold) -> None: ...
    def seal(self) -> None: ...
    def leave(self) -> None: ...
    def open(self, key: str, members: int, needs: Sequence[Needs | None]) -> list[list[InitInfo]]: ...
    def connect(self, key: str) -> None: ...
    def stage(self, key: str, number: int) -> list[UpdateInfo]: ...
    def send(self, key: str, number: int) -> None: ...
    def close(self, key: str) -> None: ...
    def disconnect(self) -> None: ...


class Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """A method of an outlet, and its arguments."""

    method: str
    key: str = ""
    number: int = 0
    members: int = 0
    needs: list[Mapping[str, tuple[Box, ...]] | None] = []
    version: str = ""
    offer: int = 0
    hold: Hold = "no"


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the method returned; or in words the error that it raised: a failed transfer, or a fault of the rank."""

    error: str = ""
    fault: str = ""
    joins: list[list[InitInfo]] = []
    infos: list[UpdateInfo] = []


class OutletServer:
    """Serves this rank's outlet to rank 0 on a free port of ``host``, in daemon threads, until it is closed."""

    def __init__(self, outlet: Outlet, host: str, token: str) -> None:
        self._outlet, self._token = outlet, token.encode()
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="outlet", daemon=True).start()

    def close(self) -> None:
        """Take no further connections, and leave all groups of engines."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for connections
        self._listener.close()
        self._outlet.disconnect()

    def _accept(self) -> None:
        """Start a thread for each connection, until the listener is closed."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            in_daemon_thread(lambda peer=connection: self._serve(peer), "outlet")  # type: ignore[misc]

    def _serve(self, peer: socket.socket) -> None:
        """Carry out the commands of one connection, until rank 0 ends it."""
        with peer, suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.settimeout(STRANGER_S)
            if not hmac.compare_digest(_read(peer, most=len(self._token)), self._token):
                log.warning("a connection to %s without the ranks' token was refused", self.address)
                return
            peer.settimeout(None)
            while True:
                command = msgspec.json.decode(_read(peer), type=Command)
                _write(peer, msgspec.json.encode(self._carry_out(command)))

    def _carry_out(self, command: Command) -> Answer:
        outlet, key = self._outlet, command.key
        try:
            match command.method:
                case "begin":
                    outlet.begin(command.version, command.offer, command.hold)
                case "open":
                    return Answer(joins=outlet.open(key, command.members, command.needs))
                case "stage":
                    return Answer(infos=outlet.stage(key, command.number))
                case "send":
                    outlet.send(key, command.number)
                case "seal":
                    outlet.seal()
                case "leave":
                    outlet.leave()
                case "connect":
                    outlet.connect(key)
                case "close":
                    outlet.close(key)
                case _:
                    return Answer(error=f"an outlet has no method {command.method!r}")
        except RanksLost as error:
            return Answer(fault=str(error))
        except WeightSyncError as error:
            return Answer(error=str(error))
        except Exception as error:  # of this process: no engine is to blame for it, and rank 0 waits for an answer
            log.exception("%s of a publication failed", command.method)
            return Answer(fault=f"{type(error).__name__}: {error}")
        return Answer()


class RemoteOutlet:
    """The outlet of rank ``rank`` at ``address``, as the coordinator uses it.

    Methods raise WeightSyncError if a transfer failed, and RanksLost if the rank did, is gone, or does not answer
    within ``timeout_s``. That is less than engines have for an update: none is to be taken for hung because a rank is.
    ``offer_s`` is for what waits for the rank's main thread, or for a copy of all that it holds.
    """

    def __init__(self, rank: int, address: str, token: str, timeout_s: float, offer_s: float) -> None:
        self._rank, self._token, self._timeout_s = rank, token.encode(), timeout_s
        self._offer_s = offer_s + LATER_S
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._idle: list[socket.socket] | None = []  # connections; None: no longer wanted
        self._lock = threading.Lock()

    def begin(self, version: str, offer: int, hold: Hold) -> None:
        self._call(Command("begin", version=version, offer=offer, hold=hold), self._offer_s)

    def seal(self) -> None:
        self._call(Command("seal"), self._offer_s)

    def leave(self) -> None:
        self._call(Command("leave"), self._offer_s)

    def open(self, key: str, members: int, needs: Sequence[Needs | None]) -> list[list[InitInfo]]:
        return self._call(Command("open", key, members=members, needs=list(needs))).joins

    def connect(self, key: str) -> None:
        self._call(Command("connect", key))

    def stage(self, key: str, number: int) -> list[UpdateInfo]:
        return self._call(Command("stage", key, number)).infos

    def send(self, key: str, number: int) -> None:
        self._call(Command("send", key, number))

    def close(self, key: str) -> None:
        """As of ``Outlet``, but without waiting. A rank that is lost has left the group."""

        def call() -> None:
            with suppress(RanksLost):
                self._call(Command("close", key))

        in_daemon_thread(call, "outlet")

    def disconnect(self) -> None:
        """End the connections, those in use after their call."""
        with self._lock:
            idle, self._idle = self._idle or [], None
        for peer in idle:
            peer.close()

    def _call(self, command: Command, timeout_s: float | None = None) -> Answer:
        """Every call that runs at the same time as another one has a connection of its own."""
        deadline_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            with self._lock:
                peer = self._idle.pop() if self._idle else None
            peer = peer or self._connected()
            peer.settimeout(deadline_s)
            try:
                _write(peer, msgspec.json.encode(command))
                answer = msgspec.json.decode(_read(peer), type=Answer)
            except OSError:
                peer.close()
                raise
        except OSError as error:
            hint = f"{type(error).__name__}: {error}; deadline {deadline_s:g} s"
            raise RanksLost(f"rank 0 lost rank {self._rank} in {command.method} of a publication: {hint}") from error
        with self._lock:
            if self._idle is not None:
                self._idle.append(peer)
            else:
                peer.close()
        if answer.fault:
            raise RanksLost(f"rank {self._rank} failed in {command.method} of a publication: {answer.fault}")
        if answer.error:
            raise WeightSyncError(f"rank {self._rank}: {answer.error}")
        return answer

    def _connected(self) -> socket.socket:
        peer = socket.create_connection(self._address, self._timeout_s)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _write(peer, self._token)
        return peer


def _write(peer: socket.socket, data: bytes) -> None:
    peer.sendall(LENGTH.pack(len(data)) + data)


def _read(peer: socket.socket, most: int = MOST_BYTES) -> bytes:
    (size,) = LENGTH.unpack(_exactly(peer, LENGTH.size))
    if size > most:
        raise ConnectionError(f"a message of {size} bytes")
    return _exactly(peer, size)


def _exactly(peer: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = peer.recv_into(view)
        if count == 0:
            raise ConnectionError("the connection was closed")
        view = view[count:]
    return bytes(data)
