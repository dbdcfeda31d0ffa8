"""A server without its socket, for tests: clients ask it directly."""

from typing import Any

from rl_async import messages as m
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.delivery import Counted
from rl_async.transfer_queue.journal.journal import MemoryJournal
from rl_async.transfer_queue.server import Outgoing, QueueLimits, QueueServer
from rl_async.transfer_queue.store import Feed, Store
from rl_async.transfer_queue.transitions import Transition

LEASE_S = 10.0
EVAL_TASK = m.Task(task_id="e", data_source="", prompt=[], ground_truth="")

HEADER = m.TrajectoryHeader(
    group_id=0,
    sample=0,
    attempt=0,
    partition="train",
    episode_id="e",
    segment=0,
    tokens=1,
    sampled=1,
    reward=0.0,
    finish_reason="stop",
    versions=[],
    tokens_hash="",
)


class Served:
    """A server at time ``now``; every client's identity is its name."""

    def __init__(self, limits: QueueLimits | None = None, **settings: Any) -> None:
        self.now = 0.0
        self.seen: list[Transition] = []
        self._ids = wire.RequestIds()
        journal = MemoryJournal()
        feed = Feed(self.seen.append, journal.append)
        usual: dict[str, Any] = {"steps": 10, "batch_groups": 2, "group_size": 1, "lease_s": LEASE_S, "max_attempts": 1}
        store = Store(QueueSettings(**(usual | settings)), Counted(), [EVAL_TASK], feed)
        self.server = QueueServer(store, journal, feed, lambda: self.now, limits)

    def ask(self, name: str, request: m.Request, *payload: bytes) -> list[Outgoing]:
        return self.server.handle([name.encode(), *wire.encode(self._ids.take(), request, payload)])

    def hello(self, *names: str) -> None:
        for name in names:
            (welcome,) = self.ask(name, m.Hello(schema=m.SCHEMA, role="test", name=name))
            assert isinstance(welcome.response.reply, m.Welcome)

    def lease(self, name: str, groups: int = 1) -> list[Outgoing]:
        return self.ask(name, m.Lease(worker=name, max_groups=groups, wait_s=60.0))

    def publish(self) -> list[Outgoing]:
        done, *woken = self.ask("t", m.Publish(version=m.Version(0, 0), engines=[]))
        assert done.response.reply == m.Done()
        return woken
