"""How fast is the transfer queue, and what does it cost? Ratios against other paths for the same bytes, in one run.

One producer and one consumer, separate processes on loopback; groups of 8 rows of 1,024 to 2,048 tokens. Arms are
interleaved and the table has medians, because others may use the machine's cores too.

    memory_vs_raw_broker      groups per second through the queue / through a bare ZMQ proxy            goal >= 0.6
    sqlite_vs_raw_broker      the same with the sqlite journal, synchronous=normal                      goal >= 0.4
    memory_vs_redis_streams   against XADD, XREADGROUP, XACK and XDEL on a Redis server without disk    goal > 1
    memory_vs_transferqueue   against TransferQueue's put, get and clear; null if it is not installed   goal > 1
    cost_1e6_vs_1e3_groups    server's time per group of 1 KB after --groups / after 1,000              goal <= 1.3
    cost_1000_vs_1_producers  server's time per group put by 1,000 connected producers / by one         goal <= 1.3
    admission_ms_median       lease, and reserve, round trips at half the largest load, the slower one  goal < 1
    memory_vs_payload         growth of the server's memory / payload bytes that it holds               goal <= 1.3
    memory_after_retire_...   the same after all of it was retired                                      goal 0
    ranks_2_vs_1_bytes_...    two ranks that read their own rows of a batch / one that reads all        goal >= 1.6
    ranks_2_bytes_untouched   share of the batch's bytes that a rank of two never reads or hands on     goal 0.5

    python -m benchmarks.transfer_queue [--repeats 3] [--groups 1000000] [--transferqueue PYTHON] [--json FILE]
    python -m benchmarks.transfer_queue --credentials [--repeats 3]     what keys cost, on a socket file and with CURVE

``--transferqueue`` is the Python of an environment with TransferQueue 0.1.11, which brings Ray.
"""

import argparse
import json
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import psutil

from benchmarks.queue.arms import BATCH, ROWS
from benchmarks.queue.costs import admission_ms, cost_of_groups, cost_of_producers, memory_of_payload
from benchmarks.queue.ranks import ranks_figures
from rl_async.transfer_queue.auth.keys import make_keys

HERE = Path(__file__).parent
HELD = "2048"  # groups, for the memory
Rate = tuple[float, float]  # rows per second, MB per second
Way = Literal["tcp", "ipc", "curve"]  # TCP without keys; a socket file with keys; TCP with keys, encrypted


def address() -> str:
    """Return a free address on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def role(name: str, *arguments: str) -> AbstractContextManager["subprocess.Popen[str]"]:
    """One process of ``queue/arms.py``; killed in the end."""
    return program("arms", name, *arguments)


def reader(*arguments: str) -> AbstractContextManager["subprocess.Popen[str]"]:
    """Run one trainer rank inside the block and kill it at its end."""
    return program("ranks", *arguments)


@contextmanager
def ranks_server(at: str, batch: str) -> Iterator["subprocess.Popen[str]"]:
    """A queue with batches of this size; killed in the end."""
    with tempfile.TemporaryDirectory() as folder, role("queue_server", at, "memory", folder, batch) as server:
        yield server


@contextmanager
def program(module: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run one process inside the block and kill it at its end."""
    command = [sys.executable, "-m", f"benchmarks.queue.{module}", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    text = process.stdout.readline()
    if not text:
        sys.exit(f"{process.args} ended with {process.wait()}")
    return text


def result(process: "subprocess.Popen[str]") -> Rate:
    found = json.loads(line(process))
    return found["groups"] * ROWS / found["seconds"], found["bytes"] / found["seconds"] / 1e6


def direct(groups: int) -> Rate:
    at = address()
    with role("raw_consumer", at, str(groups), "bind") as consumer, role("raw_producer", at, str(groups)):
        return result(consumer)


def broker(groups: int) -> Rate:
    producers, consumers = address(), address()
    with (
        role("raw_broker", producers, consumers),
        role("raw_consumer", consumers, str(groups), "connect") as consumer,
        role("raw_producer", producers, str(groups)),
    ):
        return result(consumer)


def redis_streams(groups: int) -> Rate:
    port = address().rpartition(":")[2]
    with ExitStack() as stack:
        options = ["--port", port, "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
        server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
        stack.callback(lambda: (server.kill(), server.wait()))
        consumer = stack.enter_context(role("redis_consumer", f"redis://127.0.0.1:{port}", str(groups)))
        line(consumer)  # ready
        stack.enter_context(role("redis_producer", f"redis://127.0.0.1:{port}", str(groups)))
        return result(consumer)


def queue(journal: str, shards: int = 0, way: Way = "tcp") -> Callable[[int], Rate]:
    def run(groups: int) -> Rate:
        groups = groups // BATCH * BATCH
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            at = f"ipc://{folder}/queue" if way == "ipc" else address()
            keys = "" if way == "tcp" else f"{folder}/keys"
            if keys:
                make_keys(Path(keys))
            stack.enter_context(role("queue_server", at, journal, folder))
            for number in range(shards):
                stack.enter_context(role("queue_shard", address(), at, f"shard-{number}"))
            consumer = stack.enter_context(role("queue_consumer", at, str(groups), keys))
            line(consumer)  # ready
            stack.enter_context(role("queue_producer", at, str(groups), "inf", keys))
            return result(consumer)

    return run


def cpu_s() -> float:
    """CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def credentials(repeats: int, groups: int) -> None:
    """Print rows/s and CPU per row, start included, of the memory arm on each way; medians of interleaved repeats."""
    ways: tuple[Way, ...] = ("tcp", "ipc", "curve")
    found: dict[Way, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            began = cpu_s()
            rate, _ = queue("memory", way=way)(groups)
            found[way].append((rate, 1e6 * (cpu_s() - began) / (groups * ROWS)))
            print(f"{way:6}{found[way][-1][0]:10,.0f} rows/s{found[way][-1][1]:8.1f} us/row", flush=True)
    medians = {way: tuple(map(statistics.median, zip(*found[way]))) for way in ways}
    for way in ways:
        rate, cpu = (now / before for now, before in zip(medians[way], medians["tcp"]))
        print(f"median {way:6}{medians[way][0]:10,.0f} rows/s ({rate:.3f}){medians[way][1]:8.1f} us/row ({cpu:.3f})")


def transferqueue(python: str) -> Callable[[int], Rate]:
    """In a folder of its own and without this one, since both hold something of the same name."""

    def run(groups: int) -> Rate:
        with tempfile.TemporaryDirectory() as folder:
            command = [python, "-P", str(HERE / "queue" / "peer.py"), str(groups // 10)]
            done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        return found["groups"] * ROWS / found["seconds"], found["bytes"] / found["seconds"] / 1e6

    return run


def throughput(arguments: argparse.Namespace) -> dict[str, float]:
    """Rows per second of each path; prints the table."""
    arms: dict[str, Callable[[int], Rate]] = {
        "raw ZMQ, direct": direct,
        "raw ZMQ, one broker": broker,
        "this queue, memory": queue("memory"),
        "this queue, sqlite": queue("sqlite"),
        "this queue, 1 shard": queue("sharded", 1),
        "this queue, 2 shards": queue("sharded", 2),
    }
    if shutil.which("redis-server"):
        arms["Redis streams"] = redis_streams
    found: dict[str, list[Rate]] = {name: [] for name in arms}
    for _ in range(arguments.repeats):
        for name, arm in arms.items():
            found[name].append(arm(arguments.throughput_groups))
    if arguments.transferqueue:
        found["TransferQueue"] = [transferqueue(arguments.transferqueue)(arguments.throughput_groups)]
    rows = {name: statistics.median(rate for rate, _ in rates) for name, rates in found.items()}
    print(f"{'path':24}{'rows/s':>10}{'MB/s':>8}")
    for name, rates in found.items():
        print(f"{name:24}{rows[name]:10,.0f}{statistics.median(mb for _, mb in rates):8,.0f}", flush=True)
    return rows


def half_load(groups_per_s: float) -> float:
    """Milliseconds of a round trip at this rate, over some ten seconds."""
    at = address()

    def producer(groups: int) -> str:
        with role("queue_producer", at, str(groups), str(groups_per_s)) as process:
            return line(process)

    with tempfile.TemporaryDirectory() as folder, role("queue_server", at, "memory", folder):
        return admission_ms(at, producer, max(4, int(10 * groups_per_s / BATCH)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--throughput-groups", type=int, default=4800, help="per arm and repeat (default: 4800)")
    parser.add_argument("--groups", type=int, default=1_000_000, help="handled in all for the cost's growth")
    parser.add_argument("--transferqueue", default="", metavar="PYTHON")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--credentials", action="store_true", help="measure only what keys cost, and end")
    arguments = parser.parse_args()
    if arguments.credentials:
        credentials(arguments.repeats, arguments.throughput_groups)
        return
    print(f"{psutil.cpu_count()} cores, load {psutil.getloadavg()[0]:.1f}")
    rows = throughput(arguments)
    ours, raw = rows["this queue, memory"], rows["raw ZMQ, one broker"]
    figures: dict[str, float | None] = {
        "memory_vs_raw_broker": ours / raw,
        "sqlite_vs_raw_broker": rows["this queue, sqlite"] / raw,
        "memory_vs_redis_streams": ours / rows["Redis streams"] if "Redis streams" in rows else None,
        "memory_vs_transferqueue": ours / rows["TransferQueue"] if "TransferQueue" in rows else None,
        "cost_1e6_vs_1e3_groups": cost_of_groups(arguments.groups),
        "cost_1000_vs_1_producers": cost_of_producers(role, address()),
        "admission_ms_median": half_load(ours / ROWS / 2),
    }
    at = address()
    with tempfile.TemporaryDirectory() as folder, role("queue_server", at, "memory", folder, HELD) as server:
        held = memory_of_payload(at, psutil.Process(server.pid), int(HELD))
    figures["memory_vs_payload"], figures["memory_after_retire_vs_payload"] = held
    figures |= ranks_figures(reader, ranks_server, line, address, arguments.repeats)
    for name, value in figures.items():
        print(f"{name:28}{'-' if value is None else f'{value:.3f}':>10}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
