"""The journal on a Redis server (5 or later), so that the queue can continue on another host.

For a run named RUN: ``rl-async:RUN:transitions``, a stream with one entry per transition, numbered by its id;
``:places``, a hash from "group:sample" to the place of a payload; ``:payload:...``, one key per sample; ``:dump``, the
state that stands for the transitions before the stream; ``:meta``; and ``:owner``, the token of the queue that may
write. Payloads are sent first, under unique names; then one script, which runs whole or not at all,
checks the owner and writes the transitions with the places of the payloads.

Each of them has a checksum of its name and value, which is compared when it is read.
"""

import contextlib
import os
import secrets
import socket as sockets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import redis
from xxhash import xxh3_64_intdigest

from rl_async.errors import JournalError
from rl_async.files import UNDECODABLE
from rl_async.messages import Frame, RowKey
from rl_async.transfer_queue.journal import (
    CHECKED,
    JOURNAL_SCHEMA,
    Recovered,
    consecutive,
    digest,
    freed_by,
    hole,
    new_run_id,
)
from rl_async.transfer_queue.transitions import Transition, TransitionType

# A queue that is silent for this long may be replaced by another.
OWNER_S = 10.0
# A lost connection is tried again for this long.
TRIES_S = 20.0
# A stream is compacted once it is LOG_PER_STATE times as long as the state, in bytes. One with fewer transitions than
# LEAST_LOG is not worth compacting.
LEAST_LOG = 4096
LOG_PER_STATE = 4
_SCHEMA = JOURNAL_SCHEMA | CHECKED
_DIGEST_BYTES = 8
# Entries that are read at a time.
_PAGE = 1000
# For replicas, before the flush is sent again.
_WAIT_MS = 1000

T = TypeVar("T")


class _PayloadPlace(msgspec.Struct, frozen=True, array_like=True):
    """The key that holds one sample's rows, and the length and checksum of each."""

    key: str
    lengths: list[int]
    # XXH3, 64 bits.
    checksums: list[int]


class _Dump(msgspec.Struct, frozen=True):
    """A dump of the store after its first ``count`` transitions."""

    count: int
    state: bytes


class _Meta(msgspec.Struct, frozen=True):
    schema: int
    run_id: str
    # Of the two; journals of earlier versions have none.
    checksum: bytes = b""


_transition: msgspec.msgpack.Decoder[Transition] = msgspec.msgpack.Decoder(TransitionType)
_place = msgspec.msgpack.Decoder(_PayloadPlace)
_dump = msgspec.msgpack.Decoder(_Dump)
_encode = msgspec.msgpack.Encoder().encode


def _sealed(name: str, body: bytes) -> bytes:
    """Return a value with its checksum, which covers the name of the value, too."""
    return digest(name, body) + body


class RedisJournal:
    """See ``Journal``. A flush is as durable as the server makes it, and as ``replicas`` of its replicas make it.

    A server that lost the end of the stream, as a replica may that was promoted, is written no more.
    """

    def __init__(
        self,
        url: str,
        run: str,
        *,
        replicas: int = 0,
        owner_s: float = OWNER_S,
        tries_s: float = TRIES_S,
        least_log: int = LEAST_LOG,
    ) -> None:
        self._url, self._prefix, self._replicas = url, f"rl-async:{run}", replicas
        self._owner_s, self._tries_s, self._least_log = owner_s, tries_s, least_log
        self._redis = redis.Redis.from_url(
            url,
            password=os.environ.get("RL_ASYNC_REDIS_PASSWORD"),
            socket_timeout=5.0,
            socket_connect_timeout=5.0,
            retry=None,
        )
        self._token = f"{sockets.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        # No other queue writes payloads under its name.
        self._nonce = secrets.token_hex(4)
        self._places: dict[int, dict[int, _PayloadPlace]] = {}
        self._pending: list[tuple[str, bytes]] = []
        # Those to be written, by key.
        self._payloads: dict[str, bytes] = {}
        self._placed: dict[str, bytes] = {}
        self._unplaced: list[str] = []
        self._unlinked: list[str] = []
        self._seq = self._log = self._log_bytes = self._dump_bytes = self._next_payload = 0
        self._alive = time.monotonic()
        try:
            self._own()
            self.run_id = self._try(self._meta, run)
        except BaseException:
            self.close()
            raise

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    # --- the server -------------------------------------------------------------------------------------------------

    def _try(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call ``work``, again while the connection is lost, so it may run twice. Raises JournalError after tries_s."""
        deadline, pause = time.monotonic() + self._tries_s, 0.05
        while True:
            try:
                return work(*arguments)
            except redis.AuthenticationError as error:
                raise self._failed(error) from error
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if time.monotonic() + pause > deadline:
                    raise JournalError(
                        f"the Redis server at {self._url} (queue.redis.url) did not take the journal for "
                        f"{self._tries_s:.0f} s: {error}; when it does, continue with --resume: nothing that was "
                        "acknowledged is lost"
                    ) from error
            except redis.RedisError as error:
                raise self._failed(error) from error
            time.sleep(pause)
            pause = min(1.0, 2 * pause)

    def _ask(self, command: Callable[..., Any], *arguments: Any) -> Any:
        """``_try`` for a command that answers in bytes, which its type does not say."""
        return self._try(command, *arguments)

    def _failed(self, error: Exception) -> JournalError:
        return JournalError(f"the Redis server at {self._url} (queue.redis.url) refused the queue's journal: {error}")

    def _own(self) -> None:
        """Become the only writer: wait until a silent owner's time is over, but not for a living owner."""
        deadline = time.monotonic() + 1.5 * self._owner_s
        dead = ""
        while (owner := self._try(self._script, TAKE, [], dead).decode()) != self._token:
            if self._is_dead(owner):
                dead = owner
            elif time.monotonic() > deadline:
                raise JournalError(
                    f"another queue, {owner.rpartition(':')[0]} (host:process), writes {self._key('transitions')} on "
                    f"{self._url}; stop it, or give the run another name"
                )
            else:
                time.sleep(min(0.2, self._owner_s / 10))

    def _is_dead(self, owner: str) -> bool:
        """Whether the owner was a process of this host that has ended."""
        host, _, rest = owner.partition(":")
        pid = rest.partition(":")[0]
        return host == sockets.gethostname() and pid.isdigit() and not os.path.exists(f"/proc/{pid}")

    def _script(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        return self._redis.eval(*self._call(script, keys, *arguments))

    def _call(self, script: str, keys: Sequence[str], *arguments: Any) -> list[Any]:
        names = [self._key(key) for key in ("owner", "writer", *keys)]
        return [script, len(names), *names, self._token, int(1000 * self._owner_s), *arguments]

    def _checked(self, answer: int) -> None:
        if answer == LOST_TAIL:
            raise JournalError(
                f"the Redis server at {self._url} (queue.redis.url) has lost the end of {self._key('transitions')}, as "
                f"when a replica without it is promoted: transition {self._seq} is not its last; continue from the "
                "last checkpoint with --resume"
            )
        if answer != DONE:
            raise JournalError(
                f"another queue took over {self._key('transitions')} on {self._url}, since this one was silent for "
                f"{self._owner_s:.0f} s; this one ends, nothing that was acknowledged is lost"
            )

    def _opened(self, name: str, value: bytes) -> bytes:
        """Return the body of a sealed value. Raises JournalError naming it if it is not what was written."""
        body = value[_DIGEST_BYTES:]
        if digest(name, body) != value[:_DIGEST_BYTES]:
            raise self._damaged(name)
        return body

    def _decoded(self, name: str, value: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """Decode the body of a sealed value. Raises JournalError naming it, also if another version wrote it."""
        try:
            return decoder.decode(self._opened(name, value))
        except UNDECODABLE as error:
            raise self._damaged(name) from error

    def _damaged(self, name: str) -> JournalError:
        return JournalError(
            f"the queue's journal on {self._url} is damaged: {self._prefix}:{name} is not what was written there; "
            f"rename the keys {self._prefix}:* and continue from the last checkpoint with --resume"
        )

    # --- recovery ---------------------------------------------------------------------------------------------------

    def _meta(self, run: str) -> str:
        run_id = new_run_id(run)
        fresh = _encode(_Meta(_SCHEMA, run_id, digest(_SCHEMA, run_id)))
        self._redis.set(self._key("meta"), fresh, nx=True)
        found: Any = self._redis.get(self._key("meta"))
        try:
            meta = msgspec.msgpack.decode(found, type=_Meta)
        except UNDECODABLE as error:
            raise self._damaged("meta") from error
        if meta.schema != _SCHEMA:
            raise JournalError(
                f"{self._key('meta')} on {self._url} was written by another version (journal schema {meta.schema}, "
                f"this one has {_SCHEMA}). Finish the run with that version, or delete the keys "
                f"{self._prefix}:* and continue from the last checkpoint with --resume"
            )
        if meta.checksum != digest(meta.schema, meta.run_id):
            raise self._damaged("meta")
        return meta.run_id

    def recover(self) -> Recovered:
        """Read what was flushed, and delete payloads that a killed queue wrote and never named."""
        places: dict[bytes, bytes] = self._ask(self._redis.hgetall, self._key("places"))
        for key, value in places.items():
            field = key.decode(errors="replace")
            place = self._decoded(f"places {field}", value, _place)
            group, _, sample = field.partition(":")
            self._places.setdefault(int(group), {})[int(sample)] = place
        named = {kept.key.encode() for samples in self._places.values() for kept in samples.values()}
        unnamed = set(self._try(lambda: list(self._redis.scan_iter(match=self._key("payload:*"), count=_PAGE)))) - named
        # One by one, as the owner: a queue that took over meanwhile may have written them.
        for key in unnamed:
            self._checked(self._try(self._script, UNLINK, [], key))
        body: Any = self._try(self._redis.get, self._key("dump"))
        dump = _Dump(0, b"") if body is None else self._decoded("dump", body, _dump)
        self._seq, self._dump_bytes = dump.count, len(dump.state)
        return Recovered(dump.state, dump.count, self._transitions())

    def _transitions(self) -> Iterator[Transition]:
        stream = self._key("transitions")
        for number, body in consecutive(self._entries(), self._seq + 1, f"{stream} on {self._url}"):
            self._seq = number
            self._log += 1
            self._log_bytes += len(body)
            yield _transition.decode(body)
        if self._try(self._script, LAST, ["transitions"]) != self._seq:
            raise JournalError(hole(f"{stream} on {self._url}", self._seq + 1))

    def _entries(self) -> Iterator[tuple[int, bytes]]:
        """The stream, as numbers and bodies."""
        after = "-"
        while True:
            page: Any = self._try(lambda start: self._redis.xrange(self._key("transitions"), start, count=_PAGE), after)
            for entry_id, fields in page:
                number = int(entry_id.rpartition(b"-")[2])
                after = f"0-{number + 1}"
                yield number, self._opened(f"transitions {number}", fields.get(b"body", b""))
            if len(page) < _PAGE:
                return

    # --- recording --------------------------------------------------------------------------------------------------

    def append(self, transition: Transition) -> None:
        self._pending.append((type(transition).__name__, _encode(transition)))
        freed = freed_by(transition)
        if freed is None:
            freed = list(self._places)
        for group in freed:
            for sample, place in self._places.pop(group, {}).items():
                field = f"{group}:{sample}"
                self._placed.pop(field, None)
                self._unplaced.append(field)
                if self._payloads.pop(place.key, None) is None:
                    self._unlinked.append(place.key)

    def put(self, group: int, sample: int, rows: Sequence[Frame]) -> None:
        samples = self._places.setdefault(group, {})
        if sample in samples:
            return
        self._next_payload += 1
        lengths = list(map(len, rows))
        key = self._key(f"payload:{self._nonce}:{self._next_payload}")
        place = samples[sample] = _PayloadPlace(key, lengths, list(map(xxh3_64_intdigest, rows)))
        self._payloads[place.key] = b"".join(rows)
        field = f"{group}:{sample}"
        self._placed[field] = _sealed(f"places {field}", _encode(place))

    def has(self, group: int, sample: int) -> bool:
        return sample in self._places.get(group, {})

    def get(self, key: RowKey) -> Frame | None:
        """One row, read from the server; None if the journal does not hold it."""
        group, sample, segment = key
        place = self._places.get(group, {}).get(sample)
        if place is None or not 0 <= segment < len(place.lengths):
            return None
        start = sum(place.lengths[:segment])
        total = place.lengths[segment]
        pending = self._payloads.get(place.key)
        if pending is not None:
            body = pending[start : start + total]
        else:
            body = self._ask(self._redis.getrange, place.key, start, start + total - 1)
        if len(body) != total:
            raise JournalError(f"{place.key} is not on {self._url} any more (was it evicted? set maxmemory-policy)")
        if xxh3_64_intdigest(body) != place.checksums[segment]:
            raise self._damaged(place.key.removeprefix(f"{self._prefix}:"))
        return body

    def flush(self) -> None:
        """Send payloads, then all transitions in one script; keep the ownership alive."""
        if self._pending or self._placed:
            self._checked(self._try(self._write))
            self._seq += len(self._pending)
            self._log += len(self._pending)
            self._log_bytes += sum(len(body) for _, body in self._pending)
            unlinked = self._unlinked
            self._pending, self._payloads, self._placed, self._unplaced, self._unlinked = [], {}, {}, [], []
            if unlinked:
                self._try(self._redis.unlink, *unlinked)
            self._alive = time.monotonic()
        elif time.monotonic() - self._alive > self._owner_s / 4:
            self._checked(self._try(self._script, KEEP, []))
            self._alive = time.monotonic()

    def _write(self) -> int:
        entries = list[str | bytes]()
        for number, (kind, body) in enumerate(self._pending, self._seq + 1):
            entries += [kind, _sealed(f"transitions {number}", body)]
        placed = [part for pair in self._placed.items() for part in pair]
        with self._redis.pipeline(transaction=False) as pipe:
            for key, body in self._payloads.items():
                pipe.set(key, body)
            counted = [self._seq, len(self._pending), *entries, len(self._unplaced), *self._unplaced, *placed]
            pipe.eval(*self._call(FLUSH, ["transitions", "places"], *counted))
            if self._replicas:
                pipe.execute_command("WAIT", self._replicas, _WAIT_MS)
            answers = pipe.execute()
        if not self._replicas:
            return int(answers[-1])
        written, replicated = answers[-2:]
        if written == DONE and replicated < self._replicas:
            raise redis.TimeoutError(
                f"{replicated} of {self._replicas} replicas (queue.redis.replicas) have the newest transitions"
            )
        return int(written)

    @property
    def outgrown(self) -> bool:
        """Whether the stream is some times as long as the state was."""
        return self._log > self._least_log and self._log_bytes > LOG_PER_STATE * self._dump_bytes

    def compact(self, dump: bytes) -> None:
        """Replace the entries of the stream by the dump."""
        body = _sealed("dump", _encode(_Dump(self._seq, dump)))
        self._checked(self._try(self._script, COMPACT, ["transitions", "dump"], self._seq, body))
        self._log = self._log_bytes = 0
        self._dump_bytes = len(dump)

    def close(self) -> None:
        """Release the ownership if the server can be reached, and close the connection."""
        # The ownership ends by itself.
        with contextlib.suppress(redis.RedisError):
            self._script(RELEASE, [])
        self._redis.close()


DONE, NOT_OWNER, LOST_TAIL = 1, -1, -2

_CHECK = """
local owner = redis.call('GET', KEYS[1])
if not owner and redis.call('GET', KEYS[2]) == ARGV[1] then owner = ARGV[1] end
if owner ~= ARGV[1] then return -1 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
"""
KEEP = _CHECK + "return 1"
UNLINK = _CHECK + "redis.call('UNLINK', ARGV[3]) return 1"

# ARGV 3: a dead owner. Answers who owns it now.
TAKE = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] and owner ~= ARGV[3] then return owner end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[2], ARGV[1])
return ARGV[1]
"""
RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"

# The number of the newest transition, which a stream keeps when it is trimmed; 0 without a stream.
_LAST = """
local last = 0
local info = redis.pcall('XINFO', 'STREAM', KEYS[3])
for i = 1, #info, 2 do
  if info[i] == 'last-generated-id' then last = tonumber(string.match(info[i + 1], '-(%d+)$')) end
end
"""

# KEYS: transitions. Answers the number of the newest one.
LAST = _CHECK + _LAST + "return last"

# KEYS: transitions, places. ARGV: sequence number, n, n kinds and bodies, m, m freed fields, then fields and places.
# A flush that is repeated because its answer was lost changes nothing. One that does not continue the stream, because
# the server lost its end, would leave a hole.
FLUSH = (
    _CHECK
    + _LAST
    + """
local seq, n = tonumber(ARGV[3]), tonumber(ARGV[4])
if n > 0 and last == seq + n then return 1 end
if last ~= seq then return -2 end
local at = 5
for i = 1, n do
  redis.call('XADD', KEYS[3], '0-' .. string.format('%d', seq + i), 'kind', ARGV[at], 'body', ARGV[at + 1])
  at = at + 2
end
local m = tonumber(ARGV[at])
for i = 1, m do redis.call('HDEL', KEYS[4], ARGV[at + i]) end
for i = at + m + 1, #ARGV, 2 do redis.call('HSET', KEYS[4], ARGV[i], ARGV[i + 1]) end
return 1
"""
)

# KEYS: transitions, dump. ARGV: sequence number, the dump.
COMPACT = (
    _CHECK
    + _LAST
    + """
if last ~= tonumber(ARGV[3]) then return -2 end
redis.call('SET', KEYS[4], ARGV[4])
redis.call('XTRIM', KEYS[3], 'MAXLEN', 0)
return 1
"""
)
