"""The answers to requests for leases, so that a request that is repeated gets the same groups."""

from collections import OrderedDict

import msgspec

from rl_async.messages import Version

REMEMBERED = 4096  # newest answers


class Lent(msgspec.Struct, frozen=True, array_like=True):
    """One group of an answer."""

    group: int
    attempt: int
    samples: list[int]
    min_version: Version


class Grant(msgspec.Struct, kw_only=True):
    """What was answered, and to whom."""

    request: bytes
    worker: str
    lent: list[Lent] = []


class Grants:
    """The newest answers by request id, oldest first."""

    def __init__(self) -> None:
        self._grants: OrderedDict[bytes, Grant] = OrderedDict()

    def get(self, request: bytes) -> Grant | None:
        """The answer that a request got."""
        return self._grants.get(request)

    def give(self, request: bytes, worker: str, lent: Lent) -> None:
        """One more group of an answer. Requests without an id are not remembered."""
        if not request:
            return
        self._grants.setdefault(request, Grant(request=request, worker=worker)).lent.append(lent)
        if len(self._grants) > REMEMBERED:
            self._grants.popitem(last=False)

    def void(self, request: bytes) -> None:
        """Forget an answer."""
        self._grants.pop(request, None)

    def dump(self) -> list[Grant]:
        """All of them, oldest first."""
        return list(self._grants.values())

    def load(self, grants: list[Grant]) -> None:
        """Take over what was dumped."""
        self._grants = OrderedDict((grant.request, grant) for grant in grants)
