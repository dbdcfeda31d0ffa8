"""A publication to eight engines of which one is slow: when do the other seven serve the version?

Eight processes with the embedded engine take weights over HTTP and gloo, on loopback. One of them is slow in one of two
ways: it stands still for nine tenths of the time (``stutter``), or what comes and goes does so late (``late``). In
turns the fleet consists of the seven alone, or of all eight. A publication begins while the slow engine still catches
up with the one before, which therefore counts as well. Medians, so that figures can be compared beside other load; the
first publication after the slow engine has joined, when nobody can know that it is slow, is shown apart.

    slow_stutter_vs_without     publication to the seven with the slow engine / without it      goal <= 1.1
    slow_late_vs_without        the same                                                        goal <= 1.1

    python -m benchmarks.slow_engine [--repeats 5] [--json FILE]
"""

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager

import torch
from transformers import Qwen3ForCausalLM

from benchmarks.processes.command_line import parser, save
from benchmarks.processes.engine_process import StandaloneDirectory, serve_in_thread
from benchmarks.processes.publishing_ranks import shape
from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.messages import Version
from rl_async.rollout_server.vllm.client import VllmEngine
from rl_async.weight_sync.buckets import Bucket
from rl_async.weight_sync.coordinator import WeightCoordinator
from tests.chaos.host.proxy import Proxy
from tests.support.weights import make_buckets

# Layers and width: so little work that the cores of this machine hold nobody up.
SIZE = (2, 256)
BUCKET = 1 << 19
ENGINES = 8
SLOW = "engine-7"
# Publications of one fleet before the other's turn, after one that forms the group and measures the engines.
PUBLICATIONS = 4
# Seconds between publications.
GAP_S = 0.5
PERIOD_S, SHARE = 1.0, 0.9
LATE_S = 0.2
TIMEOUT_S = 60.0


class EngineProcess:
    """One engine, and a proxy before it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.slow_engine", "--engine"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._port = 0
        self._proxy = Proxy("127.0.0.1", lambda: ("127.0.0.1", self._port))

    def url(self) -> str:
        """Wait until it serves; return the proxy's URL."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"an engine process ended with {self._process.wait()}")
        self._port = int(line)
        return f"http://127.0.0.1:{self._proxy.port}"

    @contextmanager
    def stutter(self) -> Iterator[None]:
        """Have it stand still most of the time meanwhile."""
        over = threading.Event()

        def stop_and_go() -> None:
            while not over.wait(PERIOD_S * (1 - SHARE)):
                os.kill(self._process.pid, signal.SIGSTOP)
                time.sleep(PERIOD_S * SHARE)
                os.kill(self._process.pid, signal.SIGCONT)

        thread = threading.Thread(target=stop_and_go)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextmanager
    def late(self) -> Iterator[None]:
        """Have each piece of its requests and answers come late meanwhile."""
        self._proxy.late_s = LATE_S
        try:
            yield
        finally:
            self._proxy.late_s = 0.0

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._proxy.close()


def engine_process() -> None:
    """Serve a model until the parent ends this process."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)
    _, port = serve_in_thread(Qwen3ForCausalLM(shape(*SIZE)).eval())
    print(port, flush=True)
    threading.Event().wait()


def timed(coordinator: WeightCoordinator, versions: list[list[Bucket]], step: int) -> float:
    """Publish other weights than at the step before to the seven; return the seconds until they serve them."""
    began = time.perf_counter()
    report = coordinator.publish(Version(0, step), versions[step % 2])
    seconds = time.perf_counter() - began
    assert len(report.engines) >= ENGINES - 1 and not report.failures, report
    return seconds


def measure(kind: Callable[[EngineProcess], AbstractContextManager[None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of publications without the slow engine, of the first with it, and of later ones with it."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(shape(*SIZE))
    named = [(n, torch.empty(p.shape, dtype=torch.bfloat16).normal_(std=0.02)) for n, p in model.named_parameters()]
    versions = [list(make_buckets(((n, t * sign) for n, t in named), BUCKET)) for sign in (1.0, -1.0)]
    found: dict[str, list[float]] = defaultdict(list)
    step = 0

    def publish(arm: str) -> None:
        nonlocal step
        found[arm].append(timed(coordinator, versions, step))
        step += 1
        time.sleep(GAP_S)

    with ExitStack() as stack:
        processes = [stack.enter_context(closing(EngineProcess())) for _ in range(ENGINES)]
        urls = {f"engine-{number}": process.url() for number, process in enumerate(processes)}
        slow, slow_url = processes[-1], urls.pop(SLOW)
        directory = StandaloneDirectory(urls)
        sync = WeightSyncConfig(way="gloo", timeout_s=TIMEOUT_S)
        coordinator = stack.enter_context(
            WeightCoordinator(directory.open, lambda record: VllmEngine(record.url), sync, shares=lambda record: False)
        )
        publish("warming up")
        for _ in range(repeats):
            publish("first without")
            for _ in range(PUBLICATIONS):
                publish("without")
            directory.add(SLOW, slow_url)
            with kind(slow):
                publish("first with")
                for _ in range(PUBLICATIONS):
                    publish("with")
            directory.remove(SLOW)
    return found


def main() -> None:
    arguments = parser(__doc__, "--engine").parse_args()
    if arguments.engine:
        engine_process()
        return
    torch.set_num_threads(1)
    result = {}
    for kind, slow in {"stutter": EngineProcess.stutter, "late": EngineProcess.late}.items():
        medians = {arm: statistics.median(seconds) for arm, seconds in measure(slow, arguments.repeats).items()}
        print(f"{kind}: " + ", ".join(f"{arm} {1000 * seconds:.0f} ms" for arm, seconds in medians.items()), flush=True)
        result[f"slow_{kind}_vs_without"] = medians["with"] / medians["without"]
    for name, value in result.items():
        print(f"{name:<28}{value:>9.3f}")
    save(result, arguments.json)


if __name__ == "__main__":
    main()
