"""What real pools of engines cost with many conversations on many fake engines, and when they notice a loss."""

import json
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from typing import NamedTuple

from benchmarks.scale.server import OTHERS
from benchmarks.transfer_queue import address, line, started
from rl_async import messages as m
from rl_async.transfer_queue.client import SyncQueueClient

IN_A_POOL = 1000  # conversations
DELAY_S = 0.5  # of an answer
LOST = 20  # one engine of so many
GO_S, IDLE_S = 10.0, 6.0


class PoolCosts(NamedTuple):
    """One row of the table; see ``__main__``."""

    conversations: int
    engines: int
    pools: int
    cpu_us_per_request: float
    requests_per_s: float
    idle_cpu_share: float
    kb_per_engine: float
    dead_after_s: float
    hung_after_s: float

    def __str__(self) -> str:
        return (
            f"{self.conversations:13,}{self.engines:8,}{self.pools:6}{self.cpu_us_per_request:11.0f}"
            f"{self.requests_per_s:11,.0f}{self.idle_cpu_share:11.1%}{self.kb_per_engine:10.1f}"
            f"{self.dead_after_s:8.1f}{self.hung_after_s:8.1f}"
        )


HEAD = (
    f"{'conversations':>13}{'engines':>8}{'pools':>6}{'us/request':>11}{'requests/s':>11}{'idle share':>11}"
    f"{'KB/engine':>10}{'dead s':>8}{'hung s':>8}"
)


class Engines(NamedTuple):
    """One process of engines."""

    process: "subprocess.Popen[str]"
    ports: list[int]


def told(pools: list["subprocess.Popen[str]"], command: str) -> list[dict[str, float]]:
    """The answers of all pools to a command, which they obey at the same time."""
    for pool in pools:
        assert pool.stdin is not None
        pool.stdin.write(command + "\n")
        pool.stdin.flush()
    return [json.loads(line(pool)) for pool in pools]


def given_up(pools: list["subprocess.Popen[str]"], engines: Engines, how: signal.Signals) -> float:
    """Seconds until every pool has given up these engines, which get that signal."""
    began = time.time()
    engines.process.send_signal(how)
    return max(answer["at"] for answer in told(pools, f"lost {len(engines.ports)}")) - began


def measure(conversations: int, engines: int) -> PoolCosts:
    """One row of the table."""
    at, count = address(), -(-conversations // IN_A_POOL)
    few = max(1, engines // LOST)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        line(stack.enter_context(started("scale.server", at, str(OTHERS), folder)))
        sets = []
        for number in (engines - 2 * few, few, few):
            process = stack.enter_context(started("scale.engines", str(number), str(DELAY_S)))
            sets.append(Engines(process, json.loads(line(process))))
        client = stack.enter_context(SyncQueueClient(at, role="trainer", name="t"))
        share = str(conversations // count)
        pools = [
            stack.enter_context(started("scale.conversations", at, share, str(engines), stdin=subprocess.PIPE))
            for _ in range(count)
        ]
        for number, port in enumerate(port for some in sets for port in some.ports):
            client.register_engine(f"engine-{number}", f"http://127.0.0.1:{port}", "vllm")
            client.confirm(f"engine-{number}", m.Version())
        for pool in pools:
            line(pool)
        before = told(pools, "idle 0.1")
        idle = told(pools, f"idle {IDLE_S}")
        busy = told(pools, f"go {GO_S}")
        dead = given_up(pools, sets[1], signal.SIGKILL)
        hung = given_up(pools, sets[2], signal.SIGSTOP)
    requests = sum(answer["requests"] for answer in busy)
    return PoolCosts(
        conversations=conversations,
        engines=engines,
        pools=count,
        cpu_us_per_request=1e6 * sum(answer["cpu_s"] for answer in busy) / requests,
        requests_per_s=requests / GO_S,
        idle_cpu_share=sum(answer["cpu_s"] for answer in idle) / IDLE_S / count,
        kb_per_engine=sum(answer["bytes"] - answer["empty"] for answer in before) / count / engines / 1e3,
        dead_after_s=dead,
        hung_after_s=hung,
    )
