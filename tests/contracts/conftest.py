"""A queue on a free port, and a trainer's and a bare connection to it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from rl_async.transfer_queue.auth import AllowList, ServerKeys, make_keys
from rl_async.transfer_queue.client import SyncQueueClient
from tests.contracts.queue.peers import FREE_PORT, SETTINGS, RunningQueue
from tests.support.ports import free_port


@pytest.fixture
def make_address() -> Callable[[], str]:
    """Another free one each time it is called."""

    def make() -> str:
        return f"tcp://127.0.0.1:{free_port()}"

    return make


@pytest.fixture
def address(make_address: Callable[[], str]) -> str:
    return make_address()


@pytest.fixture
def queue() -> Iterator[RunningQueue]:
    running = RunningQueue(FREE_PORT, SETTINGS)
    yield running
    running.stop()


@pytest.fixture
def closed_run(tmp_path: Path) -> Iterator[tuple[Path, RunningQueue]]:
    """The folder of a run with its keys, and its queue, which asks for them."""
    run = tmp_path / "run"
    make_keys(run / "keys")
    keys = ServerKeys((run / "keys" / "server.key").read_bytes().strip(), AllowList(run / "keys" / "clients"))
    running = RunningQueue(f"ipc://{run}/sockets/queue", SETTINGS, keys=keys)
    yield run, running
    running.stop()


@pytest.fixture
def trainer(queue: RunningQueue) -> Iterator[SyncQueueClient]:
    with SyncQueueClient(queue.address, role="trainer", name="trainer-0", timeout_s=10) as client:
        yield client


@pytest.fixture
def raw(queue: RunningQueue) -> Iterator[zmq.Socket]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = 5000
        socket.connect(queue.address)
        yield socket
