"""The connections that said hello, with a rate limit for each: pure, with the caller's clock."""

from collections import OrderedDict

IDLE_S = 120.0  # a connection silent for this long gives its place up; a client waits a minute at most


class _Peer:
    __slots__ = ("heard", "key", "name", "tokens")

    def __init__(self, name: str, key: bytes, tokens: float, heard: float) -> None:
        self.name, self.key, self.tokens, self.heard = name, key, tokens, heard


class Peers:
    """At most ``most`` connections with a token bucket each, the longest silent first.

    A bucket holds one second's worth of ``per_s`` requests, at least one.
    """

    def __init__(self, most: int, per_s: float) -> None:
        self._most, self._per_s, self._burst = most, per_s, max(1.0, per_s)
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._peers

    def __len__(self) -> int:
        return len(self._peers)

    def name(self, identity: bytes) -> str:
        """The name given in the hello; the identity of a connection without one."""
        peer = self._peers.get(identity)
        return identity.hex() if peer is None else peer.name

    def key(self, identity: bytes) -> bytes:
        """The public key that a known connection has shown; empty if it needed none."""
        return self._peers[identity].key

    def greet(self, identity: bytes, name: str, now: float, key: bytes = b"") -> bool:
        """Admit a connection, again or for the first time; False if there are too many."""
        known = self._peers.get(identity)
        if known is not None:
            known.name, known.key = name, key
            return True
        if len(self._peers) >= self._most:
            oldest = next(iter(self._peers))
            if now - self._peers[oldest].heard < IDLE_S:
                return False
            del self._peers[oldest]
        self._peers[identity] = _Peer(name, key, self._burst, now)
        return True

    def spend(self, identity: bytes, now: float) -> bool:
        """Charge a known connection for one request; False if it exceeds its rate."""
        peer = self._peers[identity]
        peer.tokens = min(self._burst, peer.tokens + (now - peer.heard) * self._per_s)
        peer.heard = now
        self._peers.move_to_end(identity)
        if peer.tokens < 1:
            return False
        peer.tokens -= 1
        return True

    def forget(self, identity: bytes) -> None:
        """Drop a connection that is gone."""
        self._peers.pop(identity, None)
