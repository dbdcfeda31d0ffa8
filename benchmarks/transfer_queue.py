"""How fast is the transfer queue, and what does it cost? Ratios against other paths for the same bytes, in one run.

One producer and one consumer, separate processes on loopback; groups of 8 rows of 1,024 to 2,048 tokens. Arms are
interleaved and the table has medians, because others may use the machine's cores too.

    memory_vs_raw_broker      groups per second through the queue / through a bare ZMQ proxy            goal >= 0.5
    sqlite_vs_raw_broker      the same with the sqlite journal, synchronous=normal                      goal >= 0.4
    memory_vs_redis_streams   against XADD, XREADGROUP, XACK and XDEL on a Redis server without disk    goal >= 1.2
    memory_vs_..._32k         both with rows of 21,845 to 43,690 tokens                                 goal >= 0.85
    memory_vs_transferqueue   against TransferQueue's put, get and clear; null if it is not installed   goal >= 15
    cpu_us_per_row            processor time per row of server, producer and consumer, by path; other work on the
                              machine disturbs it less than it does the rates
    cost_1e6_vs_1e3_groups    server's time per group of 1 KB after --groups / after 1,000              goal <= 1.3
    cost_1000_vs_1_producers  server's time per group put by 1,000 connected producers / by one         goal <= 1.1
    admission_ms_median       lease, and reserve, round trips at half the largest load, the slower one  goal < 1
    memory_vs_payload         growth of the server's memory / payload bytes that it holds               goal <= 1.3
    memory_after_retire_...   the same after all of it was retired                                      goal 0
    ranks_2_vs_1_bytes_...    two ranks that read their own rows of a batch / one that reads all        goal >= 1.8
    ranks_2_bytes_untouched   share of the batch's bytes that a rank of two never reads or hands on     goal 0.5

    python -m benchmarks.transfer_queue [--repeats 3] [--groups 1000000] [--transferqueue PYTHON] [--json FILE]
    python -m benchmarks.transfer_queue --credentials [--repeats 3]     what keys cost, on a socket file and with CURVE

``--transferqueue`` is the Python of an environment with TransferQueue 0.1.11, which brings Ray.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from benchmarks.queue.arms import BATCH, LONG_TOKENS, ROWS, TOKENS
from benchmarks.queue.costs import admission_ms, cost_of_groups, cost_of_producers, memory_of_payload
from benchmarks.queue.ranks import ranks_figures
from rl_async.transfer_queue.auth import make_keys

HERE = Path(__file__).parent
HELD = "2048"  # groups, for the memory
BROKER, MEMORY, SQLITE = "raw ZMQ, one broker", "this queue, memory", "this queue, sqlite"
REDIS, PEER = "Redis streams", "TransferQueue"
# The queue's consumer starts the clock after its first batch.
FEWEST = 2 * BATCH
LONG_SHARE = 20  # of the groups of ordinary rows, so many fewer of long ones
Way = Literal["tcp", "ipc", "curve"]  # TCP without keys; a socket file with keys; TCP with keys, encrypted


class Speed(NamedTuple):
    """What one run of a path took; ``cpu_us``: processor time per row, by process."""

    rows_per_s: float
    mb_per_s: float
    cpu_us: dict[str, float]


Arm = Callable[[int, int], Speed]  # of groups, and of tokens of a row


def address() -> str:
    """Return a free address on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def role(name: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """One process of ``queue/arms.py``, from when it is ready; killed in the end."""
    with program("arms", name, *arguments) as process:
        line(process)
        yield process


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
    """One process of ``queue/`` inside the block; killed at its end."""
    with started(f"queue.{module}", *arguments) as process:
        yield process


@contextmanager
def started(module: str, *arguments: str, stdin: int | None = None) -> Iterator["subprocess.Popen[str]"]:
    """Run a module of ``benchmarks`` inside the block and kill it at its end."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True)
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


def spent_s(process: "subprocess.Popen[Any]") -> float:
    """Processor seconds of a process so far, all threads together."""
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def result(consumer: "subprocess.Popen[str]", **others: "subprocess.Popen[Any]") -> Speed:
    """What the consumer reports, and what it and the others spend from now on until it does."""
    processes = {"consumer": consumer, **others}
    before = {name: spent_s(process) for name, process in processes.items()}
    found = json.loads(line(consumer))
    rows = found["groups"] * ROWS
    cpu_us = {name: 1e6 * (spent_s(process) - before[name]) / rows for name, process in processes.items()}
    return Speed(rows / found["seconds"], found["bytes"] / found["seconds"] / 1e6, cpu_us)


def direct(groups: int, tokens: int) -> Speed:
    at = address()
    with (
        role("raw_consumer", at, str(groups), "bind") as consumer,
        role("raw_producer", at, str(groups), str(tokens)) as producer,
    ):
        return result(consumer, producer=producer)


def broker(groups: int, tokens: int) -> Speed:
    producers, consumers = address(), address()
    with (
        role("raw_broker", producers, consumers) as server,
        role("raw_consumer", consumers, str(groups), "connect") as consumer,
        role("raw_producer", producers, str(groups), str(tokens)) as producer,
    ):
        return result(consumer, server=server, producer=producer)


def redis_streams(groups: int, tokens: int) -> Speed:
    port = address().rpartition(":")[2]
    with ExitStack() as stack:
        options = ["--port", port, "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
        server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
        stack.callback(lambda: (server.kill(), server.wait()))
        consumer = stack.enter_context(role("redis_consumer", f"redis://127.0.0.1:{port}", str(groups)))
        producer = stack.enter_context(role("redis_producer", f"redis://127.0.0.1:{port}", str(groups), str(tokens)))
        return result(consumer, server=server, producer=producer)


def queue(journal: str, shards: int = 0, way: Way = "tcp") -> Arm:
    def run(groups: int, tokens: int) -> Speed:
        groups = groups // BATCH * BATCH
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            at = f"ipc://{folder}/queue" if way == "ipc" else address()
            keys = "" if way == "tcp" else f"{folder}/keys"
            if keys:
                make_keys(Path(keys))
            others = {"server": stack.enter_context(role("queue_server", at, journal, folder))}
            for number in range(shards):
                shard = role("queue_shard", address(), at, f"shard-{number}")
                others[f"shard {number}"] = stack.enter_context(shard)
            consumer = stack.enter_context(role("queue_consumer", at, str(groups), keys))
            others["producer"] = stack.enter_context(role("queue_producer", at, str(groups), "inf", keys, str(tokens)))
            return result(consumer, **others)

    return run


def credentials(repeats: int, groups: int) -> None:
    """Print rows/s and processor time per row of the memory arm on each way; medians of interleaved repeats."""
    ways: tuple[Way, ...] = ("tcp", "ipc", "curve")
    found: dict[Way, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            speed = queue("memory", way=way)(groups, TOKENS)
            found[way].append((speed.rows_per_s, sum(speed.cpu_us.values())))
            print(f"{way:6}{found[way][-1][0]:10,.0f} rows/s{found[way][-1][1]:8.1f} us/row", flush=True)
    medians = {way: tuple(map(statistics.median, zip(*found[way]))) for way in ways}
    for way in ways:
        rate, cpu = (now / before for now, before in zip(medians[way], medians["tcp"]))
        print(f"median {way:6}{medians[way][0]:10,.0f} rows/s ({rate:.3f}){medians[way][1]:8.1f} us/row ({cpu:.3f})")


def transferqueue(python: str) -> Arm:
    """In a folder of its own and without this one, since both hold something of the same name."""

    def run(groups: int, tokens: int) -> Speed:
        with tempfile.TemporaryDirectory() as folder:
            command = [python, "-P", str(HERE / "queue" / "peer.py"), str(groups // 10)]
            home = os.environ | {"HOME": folder}  # where its Ray leaves a token, which other clusters would be shown
            done = subprocess.run(
                command, cwd=folder, env=home, stdout=subprocess.PIPE, text=True, timeout=900, check=True
            )
        found = json.loads(done.stdout.splitlines()[-1])
        return Speed(found["groups"] * ROWS / found["seconds"], found["bytes"] / found["seconds"] / 1e6, {})

    return run


def throughput(groups: int, tokens: int, repeats: int, arms: dict[str, Arm]) -> dict[str, Speed]:
    """The medians of each path, whose runs take turns; prints the table."""
    runs: dict[str, list[Speed]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            runs[name].append(arm(groups, tokens))
    print(f"{f'rows of {tokens} tokens':24}{'rows/s':>10}{'MB/s':>8}  processor us/row")
    found: dict[str, Speed] = {}
    for name, speeds in runs.items():
        cpu_us = {who: statistics.median(speed.cpu_us[who] for speed in speeds) for who in speeds[0].cpu_us}
        rate = statistics.median(speed.rows_per_s for speed in speeds)
        found[name] = Speed(rate, statistics.median(speed.mb_per_s for speed in speeds), cpu_us)
        parts = f"{sum(cpu_us.values()):8.1f}: " + ", ".join(f"{who} {us:.1f}" for who, us in cpu_us.items())
        print(f"{name:24}{rate:10,.0f}{found[name].mb_per_s:8,.0f}{parts if cpu_us else ''}", flush=True)
    return found


def paths(transferqueue_python: str) -> dict[str, Arm]:
    """All paths; those whose peer is there."""
    arms: dict[str, Arm] = {
        "raw ZMQ, direct": direct,
        BROKER: broker,
        MEMORY: queue("memory"),
        SQLITE: queue("sqlite"),
        "this queue, 1 shard": queue("sharded", 1),
        "this queue, 2 shards": queue("sharded", 2),
    }
    if shutil.which("redis-server"):
        arms[REDIS] = redis_streams
    if transferqueue_python:
        arms[PEER] = transferqueue(transferqueue_python)
    return arms


def long_groups(groups: int) -> int:
    """Return how many groups of long rows are as much work as these of ordinary rows, but enough to be measured."""
    return max(FEWEST, groups // LONG_SHARE)


def speeds(arguments: argparse.Namespace) -> tuple[float, dict[str, Any]]:
    """Rows per second of this queue in memory, and the figures of throughput."""
    arms, groups = paths(arguments.transferqueue), arguments.throughput_groups
    found = throughput(groups, TOKENS, arguments.repeats, arms)
    compared = {name: arm for name, arm in arms.items() if name in (BROKER, MEMORY, REDIS)}
    long = throughput(long_groups(groups), LONG_TOKENS, arguments.repeats, compared)

    def ratio(rows: dict[str, Speed], ours: str, other: str) -> float | None:
        return rows[ours].rows_per_s / rows[other].rows_per_s if other in rows else None

    return found[MEMORY].rows_per_s, {
        "memory_vs_raw_broker": ratio(found, MEMORY, BROKER),
        "memory_vs_raw_broker_32k": ratio(long, MEMORY, BROKER),
        "sqlite_vs_raw_broker": ratio(found, SQLITE, BROKER),
        "memory_vs_redis_streams": ratio(found, MEMORY, REDIS),
        "memory_vs_redis_streams_32k": ratio(long, MEMORY, REDIS),
        "memory_vs_transferqueue": ratio(found, MEMORY, PEER),
        "cpu_us_per_row": {name: speed.cpu_us for name, speed in found.items() if speed.cpu_us},
        "cpu_us_per_row_32k": {name: speed.cpu_us for name, speed in long.items()},
    }


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
    parser.add_argument("--throughput", action="store_true", help="measure only the paths, and end")
    parser.add_argument("--credentials", action="store_true", help="measure only what keys cost, and end")
    arguments = parser.parse_args()
    if arguments.throughput_groups < FEWEST:
        parser.error(f"--throughput-groups: give {FEWEST} or more: the first {BATCH} only start the clock")
    if arguments.repeats < 1 or arguments.groups < 1:
        parser.error("--repeats and --groups: give 1 or more")
    if arguments.credentials:
        credentials(arguments.repeats, arguments.throughput_groups)
        return
    if arguments.throughput:
        speeds(arguments)
        return
    print(f"{psutil.cpu_count()} cores, load {psutil.getloadavg()[0]:.1f}")
    ours, compared = speeds(arguments)
    figures: dict[str, Any] = compared | {
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
        if not isinstance(value, dict):  # those are in the tables above
            print(f"{name:28}{'-' if value is None else f'{value:.3f}':>10}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
