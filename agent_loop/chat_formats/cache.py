"""A bounded memory of what was tokenised, since the samples of a group share their prompt."""

import threading
from collections import OrderedDict

TOKEN_BYTES = 36  # of an int in a tuple: the object and the pointer to it


class TokenCache:
    """Token ids by what they encode. Beyond ``max_bytes`` the least recently used are forgotten. For any thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.bytes = max_bytes, 0
        self._known: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> tuple[int, ...] | None:
        """Return the tokens kept under ``key``, if there are any."""
        with self._lock:
            if (found := self._known.get(key)) is not None:
                self._known.move_to_end(key)
            return found

    def put(self, key: bytes, token_ids: tuple[int, ...]) -> None:
        """Keep tokens, unless they alone would fill the cache."""
        size = _size(key, token_ids)
        with self._lock:
            if key in self._known or size > self._max_bytes:
                return
            self._known[key] = token_ids
            self.bytes += size
            while self.bytes > self._max_bytes:
                self.bytes -= _size(*self._known.popitem(last=False))


def _size(key: bytes, token_ids: tuple[int, ...]) -> int:
    return len(key) + TOKEN_BYTES * len(token_ids)
