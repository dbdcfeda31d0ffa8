"""Simulated workers of the queue, many in one process: a connection each, and what a real worker sends.

    python -m benchmarks.scale.workers ADDRESS COUNT play|hold

Each asks for one group at a time, hands its rows over at once (``play``) or never (``hold``), renews its leases and
follows the registry of engines. The process prints ``ready`` when all are known to the queue and hold a group or wait
for one, and then, whenever all have heard of a new revision of the registry, a line of JSON with that revision.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec
import uvloop

from benchmarks.queue.arms import ready, row
from benchmarks.scale.connection import Connection, end
from benchmarks.scale.server import LEASE_S
from rl_async import messages as m
from rl_async.agent_loop.worker import LEASE_WAIT_S, RENEWALS_PER_LEASE
from rl_async.rollout_server.pool import WATCH_S
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.client import refusal

_REFUSED = b"Refused"  # the tag of a refusal, with which it begins
TOKENS = 80  # of a row of about 1 KB
IDS = wire.RequestIds()


class _Revision(msgspec.Struct):
    """All that a simulated worker reads of a list of engines: to build 1,000 records is the pools' business."""

    revision: int


_revision = msgspec.msgpack.Decoder(_Revision)


class Fleet:
    """What the workers of this process have in common."""

    def __init__(self, address: str, count: int, *, holds: bool) -> None:
        self.count, self.holds = count, holds
        place = urlsplit(address)
        self.host, self.port = place.hostname, place.port
        self.asked = 0
        self._known: dict[int, int] = {}  # workers by the revision that they have heard of

    def has_asked(self) -> None:
        """One more worker has said hello and asked for a group."""
        self.asked += 1
        if self.asked == self.count:
            ready()

    def heard(self, before: int, revision: int) -> None:
        """A worker has the list of engines of this revision; report the revision that all have passed."""
        if before in self._known:
            self._known[before] -= 1
            if not self._known[before]:
                del self._known[before]
        self._known[revision] = self._known.get(revision, 0) + 1
        if self._known[revision] == self.count:
            print(json.dumps({"revision": revision}), flush=True)


class Worker:
    """One connection with its requests in flight."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet, self._name = fleet, name

    async def run(self) -> None:
        """Work until cancelled."""
        loop = asyncio.get_running_loop()
        _, self._connection = await loop.create_connection(Connection, self._fleet.host, self._fleet.port)
        await self._connection.ready
        async with asyncio.TaskGroup() as group:
            await self._hello()
            group.create_task(self._renew())
            group.create_task(self._follow())
            await self._work()

    async def _hello(self) -> None:
        reply = wire.decode_reply(await self._ask(m.Hello(schema=m.SCHEMA, role="agent", name=self._name))).reply
        if not isinstance(reply, m.Welcome):
            end(f"the queue refused a worker: {reply}")

    async def _ask(self, request: m.Request, payload: Sequence[m.Frame] = ()) -> Sequence[bytes]:
        while True:
            request_id = IDS.take()
            parts = await self._connection.request(request_id, wire.encode(request_id, request, payload))
            if _REFUSED not in parts[1][:32] or refusal(wire.decode_reply(parts).reply) != wire.HELLO:
                return parts
            await self._hello()  # the queue took the connection for lost

    async def _work(self) -> None:
        first = True
        while True:
            asking = asyncio.ensure_future(self._ask(m.Lease(worker=self._name, max_groups=1, wait_s=LEASE_WAIT_S)))
            if first:
                self._fleet.has_asked()
                first = False
            leased = wire.decode_reply(await asking).reply
            if not isinstance(leased, m.Leased):
                end(f"the queue refused a lease: {leased}")
            if self._fleet.holds and leased.groups:
                await asyncio.Event().wait()
            for group in leased.groups:
                await self._put(group)

    async def _put(self, group: m.LeasedGroup) -> None:
        rows = [row(group, sample, TOKENS) for sample in group.samples]
        encoded = list(map(m.encode, rows))
        request = m.Put(worker=self._name, samples=[[r.header()] for r in rows], lengths=list(map(len, encoded)))
        await self._ask(request, wire.join(encoded))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / RENEWALS_PER_LEASE)
            await self._ask(m.Renew(worker=self._name))

    async def _follow(self) -> None:
        revision = -1
        while True:
            parts = await self._ask(m.ListEngines(after=revision, wait_s=WATCH_S))
            before, revision = revision, _revision.decode(parts[1]).revision
            if revision != before:
                self._fleet.heard(before, revision)


async def main(address: str, count: int, *, holds: bool) -> None:
    """Run all workers until killed."""
    fleet = Fleet(address, count, holds=holds)
    kind = "holding" if holds else "playing"
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(Worker(fleet, f"{kind}-{number}-{IDS.take().hex()}").run())
            if number % 100 == 99:
                await asyncio.sleep(0.05)  # the connections do not come all at once


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), holds=sys.argv[3] == "hold"))
