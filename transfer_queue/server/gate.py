"""What every request passes before a server looks at it: limits, decoding, a hello on each connection, and its key."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rl_async import messages as m
from rl_async.configs.schema.queue import QueueLimits
from rl_async.errors import ProtocolError, UserError
from rl_async.messages.codec import Frame
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.auth.allow_list import AllowList
from rl_async.transfer_queue.auth.keys import public_of
from rl_async.transfer_queue.auth.roles import Role
from rl_async.transfer_queue.server.peers import Peers

log = logging.getLogger("rl_async.queue")


class Response(NamedTuple):
    """A reply with the payload frames that follow it."""

    reply: m.Reply
    payload: Sequence[Frame] = ()


class Outgoing(NamedTuple):
    """A response with the connection and the request that it belongs to."""

    identity: bytes
    request_id: bytes
    response: Response


Handler = Callable[[bytes, wire.RequestMessage], Response | None]  # of who asks, and what


class Gate:
    """Checks limits, decoding, hello and keys before a server handles a request; ``count`` counts what is refused.

    Without ``allowed`` everybody may do everything.
    """

    def __init__(
        self,
        limits: QueueLimits,
        clock: Callable[[], float],
        count: Callable[[str], None],
        run_id: str,
        allowed: AllowList | None = None,
    ) -> None:
        self._limits, self._clock, self._count, self._run_id = limits, clock, count, run_id
        self._allowed = allowed
        self._peers = Peers(limits.clients, limits.requests_per_s)

    def refresh(self) -> None:
        """Read the keys again if their folder has changed."""
        if self._allowed is not None:
            self._allowed.refresh()

    def forget(self, identity: bytes) -> None:
        """Drop what is known about a connection that is gone."""
        self._peers.forget(identity)

    def forbidden(self, identity: bytes, message: wire.RequestMessage, roles: frozenset[Role]) -> Response | None:
        """The refusal of a request that only ``roles`` may make, if this connection's key has another one."""
        if self._allowed is None or self._allowed.roles.get(self._peers.key(identity)) in roles:
            return None
        self._count("forbidden")
        kind, name = type(message.request).__name__, self._peers.name(identity)
        log.warning("%s may not send a %s", name, kind)
        role = self._allowed.roles.get(self._peers.key(identity))
        reason = f"a {kind} needs the key of: {', '.join(sorted(roles))}; {name} has that of: {role}"
        return Response(m.Refused(code=wire.FORBIDDEN, reason=reason))

    def answer(self, parts: Sequence[Any], handle: Handler, user: bytes = b"") -> Outgoing | None:
        """The answer to a message: ``handle``'s, or the gate's own to a hello and to what goes no further.

        ``user`` is the public key that encrypts the connection, if one does. None if ``handle`` has no answer yet. A
        ProtocolError that it raises is answered Malformed, as bytes are that are no message.
        """
        identity = bytes(wire.body(parts[0]))
        try:
            found = self._answer(identity, parts, handle, user)
        except ProtocolError as error:
            self._count("malformed")
            log.warning("malformed message from %s: %s", self._peers.name(identity), error)
            found = Response(m.Malformed(reason=str(error)))
        return None if found is None else Outgoing(identity, _request_id(parts), found)

    def _answer(self, identity: bytes, parts: Sequence[Any], handle: Handler, user: bytes) -> Response | None:
        if refused := self._beyond_limits(identity, parts):
            return Response(refused)
        message = wire.decode_request(parts[1:])
        if isinstance(message.request, m.Hello):
            if message.payload:
                raise ProtocolError("a Hello with payload frames")
            return self._hello(identity, message.request, user)
        if identity not in self._peers or (user and user != self._peers.key(identity)):
            return Response(m.Refused(code=wire.HELLO, reason="say Hello first"))
        if self._allowed is not None and self._peers.key(identity) not in self._allowed.roles:
            return self._denied(self._peers.name(identity))
        return handle(identity, message)

    def _denied(self, name: str) -> Response:
        self._count("denied")
        log.warning("%s has no key that is allowed", name)
        return Response(m.Refused(code=wire.DENIED, reason=f"{name} has no key that is allowed here"))

    def _beyond_limits(self, identity: bytes, parts: Sequence[Any]) -> m.Refused | None:
        """The refusal of a message that exceeds a limit, before it is decoded; None if it does not."""
        limits = self._limits
        if identity in self._peers and not self._peers.spend(identity, self._clock()):
            self._count("too_many_requests")
            return m.Refused(code=wire.BUSY, reason=f"more than {limits.requests_per_s:g} requests a second")
        size, frames = sum(len(part) for part in parts[1:]), len(parts) - 1
        if size > limits.message_bytes or frames > limits.frames:
            self._count("too_large")
            log.warning("%s sent %d bytes in %d frames", self._peers.name(identity), size, frames)
            reason = (
                f"a message of {size} bytes in {frames} frames; the limits are "
                f"queue.limits.message_bytes={limits.message_bytes} and queue.limits.frames={limits.frames}"
            )
            return m.Refused(code="too_large", reason=reason)
        return None

    def _hello(self, identity: bytes, request: m.Hello, user: bytes) -> Response:
        if request.schema != m.SCHEMA:
            reason = f"the queue speaks schema {m.SCHEMA}, {request.role} {request.name} speaks {request.schema}"
            return Response(m.Refused(code="schema", reason=reason))
        key = user or _public(request.key)
        self.refresh()
        if self._allowed is not None and key not in self._allowed.roles:
            return self._denied(request.name)
        if not self._peers.greet(identity, request.name, self._clock(), key):
            self._count("too_many_clients")
            reason = f"{len(self._peers)} clients are connected, and queue.limits.clients={self._limits.clients}"
            return Response(m.Refused(code=wire.BUSY, reason=reason))
        return Response(m.Welcome(schema=m.SCHEMA, run_id=self._run_id))


def _public(secret: str) -> bytes:
    """The public key of a secret one that was shown; empty if none was, or if it is no key."""
    try:
        return public_of(secret.encode(), "the hello") if secret else b""
    except UserError:
        return b""


def _request_id(parts: Sequence[Any]) -> bytes:
    return bytes(wire.body(parts[1])) if len(parts) > 1 else b""
