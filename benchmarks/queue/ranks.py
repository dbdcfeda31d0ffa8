"""Trainer ranks that read a batch in parallel, each its own rows: ``python -m benchmarks.queue.ranks``.

A rank's rows follow from the batch, its number and how many ranks there are, near-equal in tokens; no rank reads or
hands on another's. A rank prints ``ready``, begins when version 0.1 is published, and prints what it read.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from subprocess import Popen

from benchmarks.queue.arms import lengths
from benchmarks.queue.costs import put
from rl_async import messages as m
from rl_async.trainer.batch_layout import karmarkar_karp
from rl_async.transfer_queue.client import SyncQueueClient, expect

GROUPS = 64  # of the batch
ROUNDS = 16  # readings of a batch
Start = Callable[..., AbstractContextManager["Popen[str]"]]


def rank(address: str, number: int, ranks: int, rounds: int) -> None:
    """Act as one trainer rank that reads its share of each batch."""
    with SyncQueueClient(address, role="trainer", name=f"rank-{number}") as client:
        headers = expect(client.reserve(0, wait_s=30.0), m.Reserved).headers
        mine = karmarkar_karp([header.tokens for header in headers], ranks)[number]
        keys = [headers[row].key for row in mine]
        client.fetch(keys)  # for warming up
        print("ready", flush=True)
        while client.status().published.step < 1:
            time.sleep(0.001)
        began = time.perf_counter()
        for _ in range(rounds):
            assert len(client.fetch(keys)) == len(keys)
        seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "bytes": sum(headers[row].nbytes for row in mine)}), flush=True)


def ranks_figures(
    start: Start, serve: Start, line: Callable[["Popen[str]"], str], address: Callable[[], str], repeats: int
) -> dict[str, float]:
    """Bytes per second of two ranks / of one, and the share of a batch's bytes that a rank of two never touches.

    ``serve`` starts a server with this batch at an address, ``start`` a rank; both are killed at the end of the block.
    """

    def read(ranks: int) -> tuple[float, Sequence[int]]:
        at = address()
        with ExitStack() as stack:
            stack.enter_context(serve(at, str(GROUPS)))
            client = stack.enter_context(SyncQueueClient(at, role="trainer", name="t"))
            client.publish(m.Version(), [])
            fill(client)
            started = [stack.enter_context(start(at, str(n), str(ranks), str(ROUNDS))) for n in range(ranks)]
            for process in started:
                line(process)
            client.commit(0)
            client.publish(m.Version(0, 1), [])
            found = [json.loads(line(process)) for process in started]
        return sum(f["bytes"] for f in found) * ROUNDS / max(f["seconds"] for f in found), [f["bytes"] for f in found]

    one, two, untouched = list[float](), list[float](), 0.0
    for _ in range(repeats):
        one.append(read(1)[0])
        rate, nbytes = read(2)
        two.append(rate)
        untouched = 1 - max(nbytes) / sum(nbytes)
    ratio = statistics.median(two) / statistics.median(one)
    return {"ranks_2_vs_1_bytes_per_s": ratio, "ranks_2_bytes_untouched": untouched}


def fill(client: SyncQueueClient) -> None:
    """One batch of rows of 1,024 to 2,048 tokens."""
    sizes = lengths(GROUPS)
    for number in range(GROUPS):
        groups = client.lease(1, wait_s=10.0).groups
        request, payload = put(groups, int(sizes[number, 0]))
        client.exchange(m.Put(worker=client.worker, samples=request.samples, lengths=request.lengths), payload)


if __name__ == "__main__":
    rank(sys.argv[1], *map(int, sys.argv[2:5]))
