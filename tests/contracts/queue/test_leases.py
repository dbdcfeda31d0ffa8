"""Workers share the groups, and what one loses another gets, over real sockets."""

import asyncio

import msgspec
import zmq

from rl_async.messages import Done, Lease, LeasedGroup, Refused, Reserved, Status, Version
from rl_async.transfer_queue import wire
from tests.contracts.queue.peers import HELLO, ID, SETTINGS, RunningQueue, ask, put_all, trajectory, worker


async def test_two_workers_share_the_groups(queue, trainer):
    trainer.publish(Version(0, 0), [])
    async with worker(queue, "a") as a, worker(queue, "b") as b:
        first, second = await asyncio.gather(a.lease(2, 1.0), b.lease(2, 1.0))
        groups = [group.group_id for leased in (first, second) for group in leased.groups]
        assert sorted(groups) == [0, 1, 2, 3]
        await asyncio.gather(put_all(a, first.groups), put_all(b, second.groups))
    assert isinstance(trainer.reserve(0, 1.0), Reserved)
    assert isinstance(trainer.reserve(1, 1.0), Reserved)


def test_a_lease_sent_twice_is_granted_once(raw, trainer):
    trainer.publish(Version(0, 0), [])
    ask(raw, ID, HELLO)
    lease = msgspec.msgpack.encode(Lease(worker="w", max_groups=1, wait_s=1.0))
    first, second = ask(raw, ID, lease).reply, ask(raw, ID, lease).reply
    assert first == second and len(first.groups) == 1
    assert ask(raw, b"87654321", lease).reply.groups[0].group_id == 1


async def test_lost_worker_is_replaced_and_fenced(address):
    queue = RunningQueue(address, msgspec.structs.replace(SETTINGS, lease_s=1.0))
    try:
        async with worker(queue, "lost") as lost, worker(queue, "other") as other:
            await lost.publish(Version(0, 0), [])
            (group,) = (await lost.lease(1, 1.0)).groups
            assert await lost.put(trajectory(group, 0)) == Done()
            again: list[LeasedGroup] = []
            while not again:  # the other worker takes what is fresh until the lost group comes back
                leased = (await other.lease(1, 0.1)).groups
                again = [found for found in leased if found.group_id == group.group_id]
            assert (again[0].samples, again[0].attempt) == ([1], 1)
            refused = await lost.put(trajectory(group, 1))
            assert isinstance(refused, Refused) and refused.code == "fenced"
            assert await lost.put(trajectory(group, 0)) == Done()
            assert isinstance(await lost.fail(group.group_id, 1, 0, "late"), Refused)
            assert (await other.status()).counters["redelivered"] >= 1
    finally:
        queue.stop()


async def test_what_a_killed_worker_waited_for_goes_to_another_at_once(queue, trainer):
    with zmq.Context() as context, context.socket(zmq.DEALER) as killed:
        killed.connect(queue.address)
        ask(killed, ID, HELLO)
        parked = Lease(worker="killed", max_groups=4, wait_s=60.0)
        killed.send_multipart(wire.encode(b"87654321", parked))
        ask(killed, ID, msgspec.msgpack.encode(Status()))  # the lease is parked by now
        killed.close(0)
    trainer.status()  # the queue's side of the connection has ended by now
    trainer.publish(Version(0, 0), [])
    async with worker(queue) as agent:
        leased = (await agent.lease(4, 5.0)).groups
    assert sorted(group.group_id for group in leased) == [0, 1, 2, 3]
    assert "redelivered" not in trainer.status().counters
