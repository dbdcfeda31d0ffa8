"""A queue that is closed to strangers: with the right key all works, without it nothing does, over real sockets."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.queue import QueueConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import QueueLost
from rl_async.messages import Reserved, Status, StatusReport, Version
from rl_async.transfer_queue.auth.keys import ClientKeys, make_keys, read_client_keys, server_keys
from rl_async.transfer_queue.client.async_client import QueueClient
from rl_async.transfer_queue.client.sync_client import SyncQueueClient
from tests.contracts.queue.peers import HELLO, ID, SETTINGS, RunningQueue, put_all

OPEN = RunConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"))


def closed_queue(address: str, folder: Path, clients: tuple[str, ...] = ()) -> RunningQueue:
    queue = QueueConfig(keys=str(folder), clients=clients)
    return RunningQueue(address, SETTINGS, keys=server_keys(msgspec.structs.replace(OPEN, queue=queue), folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def closed(address: str, folder: Path) -> Iterator[RunningQueue]:
    queue = closed_queue(address, folder)
    yield queue
    queue.stop()


@pytest.fixture
def friend(closed: RunningQueue, folder: Path) -> Iterator[SyncQueueClient]:
    """The healthy client beside each stranger."""
    keys = read_client_keys(folder)
    with SyncQueueClient(closed.address, role="trainer", name="friend", timeout_s=10, keys=keys) as client:
        client.publish(Version(0, 0), [])
        yield client


def stranger_s_error(address: str, keys: ClientKeys | None) -> str:
    with (
        SyncQueueClient(address, role="agent", name="stranger", timeout_s=1.0, keys=keys) as stranger,
        pytest.raises(QueueLost) as caught,
    ):
        stranger.status()
    return str(caught.value)


async def async_stranger_s_error(address: str, keys: ClientKeys | None) -> str:
    async with QueueClient(address, role="agent", name="stranger", timeout_s=1.0, keys=keys) as stranger:
        with pytest.raises(QueueLost) as caught:
            await stranger.status()
    return str(caught.value)


async def test_with_keys_one_step_goes_from_lease_to_publication(closed, friend, folder):
    keys = read_client_keys(folder)
    async with QueueClient(closed.address, role="agent", name="w", timeout_s=10, keys=keys) as agent:
        leased = await agent.lease(2, 1.0)
        await put_all(agent, leased.groups, tokens=100_000)
    batch = friend.reserve(0, 1.0)
    assert isinstance(batch, Reserved)
    rows = friend.fetch([header.key for header in batch.headers])
    assert all(np.array_equal(row.token_ids, np.arange(100_000)) for row in rows) and len(rows) == 4
    friend.commit(0)
    friend.publish(Version(0, 1), [])
    assert friend.status().committed == 2
    assert "denied" not in friend.status().counters


async def test_a_key_that_is_not_allowed_gets_nothing_and_is_told_so(closed, friend, folder):
    public, secret = zmq.curve_keypair()
    keys = msgspec.structs.replace(read_client_keys(folder), public=public, secret=secret)
    for error in (stranger_s_error(closed.address, keys), await async_stranger_s_error(closed.address, keys)):
        assert re.search(r"did not answer Status for 1 s: it refused the handshake; is it closed to this key\?", error)
    assert friend.status().counters["denied"] >= 2
    assert friend.status().workers == 0


async def test_a_client_without_a_key_gets_nothing_and_is_told_so(closed, friend):
    for error in (stranger_s_error(closed.address, None), await async_stranger_s_error(closed.address, None)):
        assert "closed to" in error and "key" in error
    assert isinstance(friend.status(), StatusReport)


async def test_a_request_after_the_refusal_ends_at_its_deadline_too(closed, friend):
    with SyncQueueClient(closed.address, role="agent", name="stranger", timeout_s=0.5) as stranger:
        for _ in range(2):  # libzmq does not try again after a refusal: the second finds no connection to send on
            with pytest.raises(QueueLost, match="key"):
                stranger.status()
    async with QueueClient(closed.address, role="agent", name="stranger", timeout_s=0.5) as stranger:
        for _ in range(2):
            with pytest.raises(QueueLost, match="key"):
                await stranger.status()


def test_a_plain_socket_gets_no_byte_of_an_answer(closed, friend):
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(closed.address)
        plain.send_multipart([ID, HELLO])
        plain.send_multipart([ID, msgspec.msgpack.encode(Status())])
        assert plain.poll(1000) == 0
    assert "malformed" not in friend.status().counters


def test_another_queue_s_key_gets_nothing_and_is_told_so(closed, friend, folder, tmp_path):
    make_keys(tmp_path / "other")
    assert "key" in stranger_s_error(closed.address, read_client_keys(tmp_path / "other"))
    of_both = msgspec.structs.replace(read_client_keys(folder), server=read_client_keys(tmp_path / "other").server)
    assert "key" in stranger_s_error(closed.address, of_both)
    assert isinstance(friend.status(), StatusReport)


def test_a_revoked_key_gets_nothing_more_on_an_open_connection_or_a_new_one(closed, friend, folder):
    make_keys(folder, "guest")
    keys = read_client_keys(folder, "guest")
    with SyncQueueClient(closed.address, role="agent", name="guest", timeout_s=1.0, keys=keys) as guest:
        assert isinstance(guest.status(), StatusReport)  # a key that was added while the queue runs
        (folder / "clients" / "guest.pub").unlink()
        for _ in range(3):
            friend.reserve(0, 0.1)  # the queue looks into the folder several times a second
        with pytest.raises(QueueLost):
            guest.status()
    assert "refused the handshake" in stranger_s_error(closed.address, keys)
    assert friend.status().counters["denied"] >= 2


def test_a_client_may_be_allowed_by_the_config_alone(address, folder):
    public, secret = zmq.curve_keypair()
    keys = msgspec.structs.replace(read_client_keys(folder), public=public, secret=secret)
    queue = closed_queue(address, folder, clients=(public.decode(),))
    try:
        with SyncQueueClient(address, role="agent", name="listed", timeout_s=10, keys=keys) as client:
            assert isinstance(client.status(), StatusReport)
    finally:
        queue.stop()


def test_a_client_with_a_key_does_not_talk_to_an_open_queue(queue, trainer, folder):
    assert "key" in stranger_s_error(queue.address, read_client_keys(folder))
    assert isinstance(trainer.status(), StatusReport)
