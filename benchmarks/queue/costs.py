"""What the queue's server spends: time as the run grows and as producers join, latency at half load, memory."""

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import zmq

from benchmarks.queue.arms import BATCH, lengths, row, settings
from rl_async import messages as m
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.client import SyncQueueClient
from rl_async.transfer_queue.delivery import Counted
from rl_async.transfer_queue.journal import MemoryJournal
from rl_async.transfer_queue.ledger import Ledger
from rl_async.transfer_queue.server import JournalRecorder, QueueServer, recover
from rl_async.transfer_queue.store import Feed, Store

TOKENS = 80  # of a row of about 1 KB
MEASURED = 1024  # groups


def put(groups: Sequence[m.LeasedGroup], tokens: int) -> tuple[m.Put, list[m.Frame]]:
    """One request that hands over these groups whole."""
    rows = [row(group, sample, tokens) for group in groups for sample in group.samples]
    encoded = list(map(m.encode, rows))
    request = m.Put(worker="w", samples=[[r.header()] for r in rows], lengths=list(map(len, encoded)))
    return request, wire.join(encoded)


class Driven:
    """A server with its store, ledger and memory journal, driven step by step without sockets."""

    def __init__(self, stack: ExitStack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        journal, ledger = MemoryJournal(), stack.enter_context(closing(Ledger(Path(folder) / "ledger.jsonl")))
        feed = Feed(journal.append, ledger.append)
        store = Store(settings(group_size=1), Counted(), [], feed)
        recover(store, journal, ledger, 0.0)
        self._server, self._flush = QueueServer(store, journal, feed), JournalRecorder(store, journal, ledger).flush
        self._ids, self._step = wire.RequestIds(), 0
        self._ask(m.Hello(schema=m.SCHEMA, role="benchmark", name="client"))
        self._ask(m.Publish(version=m.Version(), engines=[]))

    def _ask(self, request: m.Request, payload: Sequence[bytes] = ()) -> m.Reply:
        answers = self._server.handle([b"client", *wire.encode(self._ids.take(), request, payload)])
        self._flush()
        return answers[0].response.reply

    def handle(self, groups: int) -> float:
        """CPU seconds per group, from lease to retirement; without what making the rows takes."""
        spent = 0.0
        for step in range(self._step, self._step + groups // BATCH):
            began = time.process_time()
            leased = self._ask(m.Lease(worker="w", max_groups=BATCH, wait_s=0.0))
            spent += time.process_time() - began
            assert isinstance(leased, m.Leased)
            request, payload = put(leased.groups, TOKENS)
            began = time.process_time()
            self._ask(request, payload)
            reserved = self._ask(m.Reserve(step=step, wait_s=0.0))
            assert isinstance(reserved, m.Reserved)
            self._ask(m.Fetch(rows=[header.key for header in reserved.headers]))
            self._ask(m.Commit(step=step))
            self._ask(m.Publish(version=m.Version(0, step + 1), engines=[]))
            self._ask(m.Retire(step=step + 1))
            spent += time.process_time() - began
        self._step += groups // BATCH
        return spent / groups


def cost_of_groups(total: int, rounds: int = 7) -> float:
    """Server time per group of one row, of a server that has handled ``total`` / of one that has handled MEASURED.

    Both are measured in turns, in the same process, so that what else happens to the machine happens to both.
    """
    with ExitStack() as stack:
        old = Driven(stack)
        old.handle(total)
        ratios: list[float] = []
        for _ in range(rounds):
            young = Driven(stack)
            young.handle(MEASURED)  # interpreter and allocator warm up
            ratios.append(old.handle(MEASURED) / young.handle(MEASURED))
    return statistics.median(ratios)


def cost_of_producers(run: Callable[..., object], address: str, count: int = 1000, rounds: int = 8) -> float:
    """Server CPU seconds per group when ``count`` connections put a group each / when one puts all of them.

    ``run`` starts a server at ``address``. Groups are one row of 1 KB, all requests of a kind are sent at once.
    """

    def measure(connections: int) -> float:
        with (
            tempfile.TemporaryDirectory() as folder,
            run("queue_server", address, "memory", folder, str(count), "1") as server,
            zmq.Context() as context,
            SyncQueueClient(address, role="trainer", name="t") as trainer,
        ):
            context.set(zmq.MAX_SOCKETS, 4 * count)
            sockets = [context.socket(zmq.DEALER) for _ in range(connections)]
            trainer.publish(m.Version(), [])
            ids = wire.RequestIds()

            def ask(requests: Sequence[tuple[m.Request, Sequence[bytes]]]) -> list[m.Reply]:
                for number, (request, payload) in enumerate(requests):
                    sockets[number % connections].send_multipart(wire.encode(ids.take(), request, payload))
                sources = [sockets[number % connections] for number in range(len(requests))]
                return [wire.decode_reply(source.recv_multipart()).reply for source in sources]

            for one in sockets:
                one.connect(address)
            ask([(m.Hello(schema=m.SCHEMA, role="agent", name="w"), ())] * connections)
            spent = 0.0
            for step in range(rounds + 1):
                before = psutil.Process(server.pid).cpu_times()
                leased = ask([(m.Lease(worker="w", max_groups=1, wait_s=5.0), ())] * count)
                ask([put(answer.groups, TOKENS) for answer in leased if isinstance(answer, m.Leased)])
                after = psutil.Process(server.pid).cpu_times()
                if step:  # the first is for warming up
                    spent += after.user + after.system - before.user - before.system
                trainer.reserve(step, wait_s=5.0)
                trainer.commit(step)
                trainer.publish(m.Version(0, step + 1), [])
                trainer.retire(step + 1)
            for one in sockets:
                one.close(0)
            return spent

    return measure(count) / measure(1)


def admission_ms(address: str, producer: Callable[[int], str], steps: int) -> float:
    """Median milliseconds of a lease and of a reservation, the slower one, while ``producer`` makes so many groups.

    ``producer`` blocks until they are made and returns its report; the trainer runs here, in another thread.
    """
    waits: list[float] = []

    def train() -> None:
        with SyncQueueClient(address, role="trainer", name="t") as trainer:
            trainer.publish(m.Version(), [])
            for step in range(steps):
                while True:
                    began = time.perf_counter()
                    if isinstance(answer := trainer.reserve(step, wait_s=0.0), m.Reserved):
                        break
                    time.sleep(0.002)
                waits.append(1e3 * (time.perf_counter() - began))
                trainer.fetch([header.key for header in answer.headers])
                trainer.commit(step)
                trainer.publish(m.Version(0, step + 1), [])
                trainer.retire(step + 1)

    thread = threading.Thread(target=train)
    thread.start()
    lease_ms = json.loads(producer(steps * BATCH))["lease_ms"]
    thread.join()
    return max(lease_ms, statistics.median(waits))


def memory_of_payload(address: str, server: psutil.Process, groups: int) -> tuple[float, float]:
    """Growth of the server's memory / payload bytes, while it holds ``groups`` and after they are retired.

    The server's batch is ``groups``.
    """
    sizes = lengths()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        ids = wire.RequestIds()

        def ask(request: m.Request, payload: Sequence[bytes] = ()) -> m.Reply:
            socket.send_multipart(wire.encode(ids.take(), request, payload))
            return wire.decode_reply(socket.recv_multipart()).reply

        ask(m.Hello(schema=m.SCHEMA, role="agent", name="w"))
        ask(m.Publish(version=m.Version(), engines=[]))
        before, held = server.memory_info().rss, 0
        for number in range(groups):
            leased = ask(m.Lease(worker="w", max_groups=1, wait_s=5.0))
            assert isinstance(leased, m.Leased)
            request, payload = put(leased.groups, int(sizes[number % 64, 0]))
            held += sum(map(len, payload))
            ask(request, payload)
        full = server.memory_info().rss - before
        ask(m.Reserve(step=0, wait_s=5.0))
        for request in (m.Commit(step=0), m.Publish(version=m.Version(0, 1), engines=[]), m.Retire(step=1)):
            ask(request)
        time.sleep(1.0)
        return full / held, (server.memory_info().rss - before) / held
