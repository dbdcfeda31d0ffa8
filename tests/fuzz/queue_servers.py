"""Servers for the fuzzer: a queue and a payload shard in process, whose rules are checked at every message, and a queue
on a thread behind a real socket."""

import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import zmq

from rl_async import messages as m
from rl_async.errors import ProtocolError
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.auth.keys import Authenticator, ServerKeys
from rl_async.transfer_queue.auth.roles import ROLES, AllowList, Role
from rl_async.transfer_queue.delivery import Counted, numbered
from rl_async.transfer_queue.journal.journal import MemoryJournal
from rl_async.transfer_queue.server import Outgoing, QueueServer, bind, serve_requests
from rl_async.transfer_queue.shard.__main__ import ShardServer
from rl_async.transfer_queue.store import Feed, Store
from rl_async.transfer_queue.transitions import TransitionType
from rl_async.transfer_queue.verbs import SHARD_VERBS, VERBS

SETTINGS = QueueSettings(steps=1000, batch_groups=2, group_size=2, lease_s=0.2, max_attempts=1000, reward_limit=1e6)
ANSWER_S = 60.0
REFUSING = {wire.DENIED, wire.FORBIDDEN, wire.HELLO, wire.REPLACED, wire.BUSY, "wrong_lineage", "not_here", "schema"}

_ROLES_OF = {verb.request: verb.roles for verb in VERBS}
_encode = msgspec.msgpack.Encoder().encode
_transition = msgspec.msgpack.Decoder(TransitionType)


class Keys:
    """A pair of keys for each role."""

    def __init__(self) -> None:
        self.public: dict[Role, bytes] = {}
        self.secret: dict[Role, bytes] = {}
        for role in ROLES:
            self.public[role], self.secret[role] = zmq.curve_keypair()
        self.role_of = {secret.decode(): role for role, secret in self.secret.items()}

    def allowed(self) -> AllowList:
        """The list of them, without a folder."""
        lines = [f"{key.decode()} {role}" for role, key in self.public.items()]
        return AllowList(Path(tempfile.gettempdir(), "no", "such", "folder"), lines)


def new_store(settings: QueueSettings, feed: Feed) -> Store:
    """A store with tasks without end and one held-out task."""
    return Store(settings, Counted(), [numbered(0)], feed)


def new_server(settings: QueueSettings = SETTINGS, allowed: AllowList | None = None) -> tuple[QueueServer, Store, Feed]:
    """A queue with an empty store."""
    journal = MemoryJournal()
    feed = Feed(journal.append)
    store = new_store(settings, feed)
    return QueueServer(store, journal, feed, allowed=allowed), store, feed


class CheckedQueue:
    """A queue that is asked by a connection of each role and by a stranger; ``handle`` raises AssertionError where a
    message changed what its sender, or a trainer that was replaced, may not change."""

    def __init__(self, keys: Keys | None = None, replicas: int = 0) -> None:
        self.settings = msgspec.structs.replace(SETTINGS, replicas=replicas)
        self.server, self.store, feed = new_server(self.settings, keys.allowed() if keys else None)
        self.seen: list[bytes] = []
        feed.subscribe(lambda transition: self.seen.append(_encode(transition)))
        self._keys = keys
        self._roles: dict[bytes, Role | None] = {}
        for role in ROLES:
            self.handle([role.encode(), *wire.encode(bytes(8), hello(keys, role))])
        publish = m.Publish(version=m.Version(), engines=[])
        self.handle([b"trainer", *wire.encode(bytes(8), publish)])

    def handle(self, parts: Sequence[Any]) -> list[Outgoing]:
        """Pass a message on, and check what it changed."""
        before, lineage = len(self.seen), self.store.book.lineage
        outgoing = self.server.handle(parts)
        try:
            request = wire.decode_request(parts[1:]).request
        except ProtocolError:
            request = None
        if len(self.seen) > before:
            self._may_change(parts[0], request, lineage)
            replies = [out.response.reply for out in outgoing[:1]]
            for reply in replies:
                refused = isinstance(reply, m.Malformed) or (isinstance(reply, m.Refused) and reply.code in REFUSING)
                assert not refused, f"{reply} after {self.seen[before:]}"
        if isinstance(request, m.Hello) and outgoing and isinstance(outgoing[0].response.reply, m.Welcome):
            self._roles[parts[0]] = self._keys.role_of.get(request.key) if self._keys else None
        return outgoing

    def _may_change(self, identity: bytes, request: m.Request[Any] | None, lineage: int) -> None:
        assert request is not None, "bytes that are no message changed the state"
        assert identity in self._roles, "a connection without a hello changed the state"
        kind = type(request)
        if self._keys is not None:
            assert self._roles[identity] in _ROLES_OF[kind], f"{self._roles[identity]} made a {kind.__name__}"
        if isinstance(request, m.Resume):
            assert request.lineage >= lineage, "an older trainer resumed"
        elif (asked := getattr(request, "lineage", None)) is not None:
            assert asked == lineage, f"the trainer of lineage {asked} changed the state of lineage {lineage}"

    def tick(self) -> list[Outgoing]:
        """Let time pass."""
        return self.server.tick()

    def check_replay(self) -> None:
        """A store that applies the journal's transitions is the same store."""
        again = new_store(self.settings, Feed())
        again.recover(b"", map(_transition.decode, self.seen), 0.0)
        assert again.dump() == self.store.dump(), "the journal does not lead to the state"


class CheckedShard:
    """A payload shard; only who may keep rows can make it keep any."""

    def __init__(self, keys: Keys) -> None:
        self.server, self._keys = ShardServer("s", allowed=keys.allowed()), keys
        self._roles: dict[bytes, Role | None] = {}
        for role in ROLES:
            self.handle([role.encode(), *wire.encode(bytes(8), hello(keys, role))])

    def handle(self, parts: Sequence[Any]) -> list[Outgoing]:
        """Pass a message on, and check whether it may have changed the rows."""
        before = set(self.server.groups())
        outgoing = self.server.handle(parts)
        try:
            request = wire.decode_request(parts[1:]).request
        except ProtocolError:
            request = None
        if set(self.server.groups()) != before:
            assert isinstance(request, m.StoreRows) and self._roles[parts[0]] in SHARD_VERBS[m.StoreRows]
        if isinstance(request, m.Hello) and isinstance(outgoing[0].response.reply, m.Welcome):
            self._roles[parts[0]] = self._keys.role_of.get(request.key)
        return outgoing

    def tick(self) -> list[Outgoing]:
        """Let the queue forget some groups, so that rows do not pile up."""
        if len(self.server.groups()) > 100:
            self.server.orders.put(None)
        return self.server.tick()

    def check_replay(self) -> None:
        """Nothing: a shard keeps no journal."""


def hello(keys: Keys | None, role: Role) -> m.Hello:
    """The hello of a connection with the key of this role."""
    return m.Hello(schema=m.SCHEMA, role=role, name=role, key=keys.secret[role].decode() if keys else "")


class LiveQueue:
    """A server on a thread of its own, as ``serve_requests`` runs it; the error that ended it is raised at the end.

    With ``keys`` it is encrypted, and takes those clients.
    """

    def __init__(self, keys: Keys | None = None) -> None:
        self._ready, self._stop = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._keys = keys
        self.public, self._secret = zmq.curve_keypair()
        self.address = ""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        if not self._ready.wait(ANSWER_S):
            raise RuntimeError("the queue did not start")

    def _serve(self) -> None:
        allowed = self._keys.allowed() if self._keys else None
        server, _, _ = new_server(allowed=allowed)
        keys = ServerKeys(self._secret, allowed) if allowed else None
        with ExitStack() as stack:
            context = stack.enter_context(zmq.Context())
            auth = stack.enter_context(Authenticator(context, allowed, lambda: None)) if allowed else None
            socket = stack.enter_context(bind(context, "tcp://127.0.0.1:*", keys=keys))
            self.address = socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
            self._ready.set()
            try:
                serve_requests(socket, server, lambda: None, self._stop.is_set, auth=auth)
            except BaseException as error:
                self._error = error
                raise

    def stop(self) -> None:
        """End it. Raises what it died of."""
        self._stop.set()
        self._thread.join(ANSWER_S)
        if self._thread.is_alive():
            raise RuntimeError("the queue hangs")
        if self._error is not None:
            raise self._error
