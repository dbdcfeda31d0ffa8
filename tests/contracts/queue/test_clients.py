"""Clients of the queue find it late, lose it, and repeat themselves."""

import asyncio
import gc
import signal
import threading

import pytest
import zmq
import zmq.asyncio

from rl_async.errors import QueueLost
from rl_async.messages import SCHEMA, Hello, Lease, Leased, Renew, Renewed, Status, Welcome
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.client import QueueClient, Session, SyncQueueClient
from rl_async.transfer_queue.server import bind
from tests.contracts.queue.peers import SETTINGS, RunningQueue, worker


async def test_a_queue_that_is_gone_is_lost_by_the_deadline(address):
    async with QueueClient(address, role="agent", name="w", timeout_s=0.3) as client:
        with pytest.raises(QueueLost, match="Status"):
            await client.status()
    trainer = SyncQueueClient(address, role="trainer", name="t", timeout_s=0.3)
    with trainer, pytest.raises(QueueLost, match="Reserve"):
        trainer.reserve(0, 0.1)


async def test_clients_started_first_find_the_queue(address):
    async with QueueClient(address, role="agent", name="w", timeout_s=20) as client:
        status = asyncio.create_task(client.status())
        await asyncio.sleep(0)
        queue = RunningQueue(address, SETTINGS)
        try:
            assert (await status).slots == 4
        finally:
            queue.stop()


async def test_a_restarted_queue_has_lost_its_state_and_clients_say_so(address):
    queue = RunningQueue(address, SETTINGS)
    async with worker(queue, timeout_s=30.0) as agent:
        await agent.status()
        waiting = asyncio.create_task(agent.lease(1, 25.0))
        with SyncQueueClient(address, role="trainer", name="t", timeout_s=30.0) as trainer:
            trainer.status()
            queue.stop()
            queue = RunningQueue(address, SETTINGS)
            try:
                with pytest.raises(QueueLost, match="restarted"):
                    await agent.status()
                with pytest.raises(QueueLost, match="restarted"):
                    await waiting
                with pytest.raises(QueueLost, match="restarted"):
                    trainer.status()
            finally:
                queue.stop()


@pytest.mark.parametrize("requests", [1, 3])
async def test_requests_without_answer_are_sent_again_on_one_new_connection(address, requests):
    """A peer that swallows the first connection's messages is overcome, and the hello is repeated."""
    with zmq.asyncio.Context() as context, bind(context, address) as router:
        connections: set[bytes] = set()

        async def answer_later_connections() -> None:
            while True:
                identity, *parts = await router.recv_multipart()
                connections.add(identity)
                if len(connections) > 1:
                    message = wire.decode_request(parts)
                    reply = Welcome(schema=SCHEMA, run_id="r") if isinstance(message.request, Hello) else Renewed()
                    await router.send_multipart([identity, *wire.encode(message.request_id, reply)])

        answering = asyncio.create_task(answer_later_connections())
        async with QueueClient(address, role="agent", name="w", timeout_s=60, patience_s=2) as client:
            assert await asyncio.gather(*(client.renew() for _ in range(requests))) == [Renewed()] * requests
        answering.cancel()
        assert len(connections) == 2


async def test_a_new_connection_sends_all_that_is_unanswered_again(address):
    """A request that may wait for minutes is not silent that long because another one found the queue silent."""
    replies = {Hello: Welcome(schema=SCHEMA, run_id="r"), Renew: Renewed(), Lease: Leased(groups=[])}
    with zmq.asyncio.Context() as context, bind(context, address) as router:

        async def answer_later_connections() -> None:
            first = b""
            while True:
                identity, *parts = await router.recv_multipart()
                first = first or identity
                if identity != first:
                    message = wire.decode_request(parts)
                    answer = wire.encode(message.request_id, replies[type(message.request)])
                    await router.send_multipart([identity, *answer])

        answering = asyncio.create_task(answer_later_connections())
        async with QueueClient(address, role="agent", name="w", timeout_s=600, patience_s=0.5) as client:
            async with asyncio.timeout(60):
                assert await asyncio.gather(client.lease(1, 500.0), client.renew()) == [Leased(groups=[]), Renewed()]
        answering.cancel()


def test_worker_names_are_unique_to_a_client():
    one, two = (Session("tcp://x:1", "agent", "worker-0") for _ in range(2))
    assert one.worker != two.worker and one.worker.startswith("worker-0-")


async def test_closing_a_client_ends_its_requests(queue):
    async with QueueClient(queue.address, role="launcher", name="launcher") as client:
        waiting = asyncio.create_task(client.engines(after=10**6, wait_s=60.0))
        await client.status()  # the other request is on its way
    with pytest.raises(QueueLost, match="closed"):
        await waiting
    with pytest.raises(QueueLost, match="closed"):
        await client.status()


class Rung(Exception):
    """The alarm clock."""


@pytest.mark.parametrize("nested", [False, True])
def test_a_blocking_call_that_is_interrupted_leaves_nothing_behind(address, nested, caplog):
    def ring(*_):
        raise Rung

    def interrupted():
        before = set(threading.enumerate())
        main = threading.main_thread().ident
        alarm = threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGUSR1))
        with SyncQueueClient(address, role="trainer", name="t", timeout_s=30.0) as trainer:
            with pytest.raises(Rung):
                alarm.start()
                trainer.reserve(0, 20.0)
            with pytest.raises(QueueLost) as lost:
                trainer.exchange(Status(), timeout_s=0.1)
        assert lost.value.__context__ is None and set(threading.enumerate()) <= before

    async def inside_a_loop():
        interrupted()

    previous = signal.signal(signal.SIGUSR1, ring)
    try:
        asyncio.run(inside_a_loop()) if nested else interrupted()
    finally:
        signal.signal(signal.SIGUSR1, previous)
    gc.collect()
    assert caplog.records == []
