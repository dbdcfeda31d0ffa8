"""What does a verified weight update cost, against a raw gloo broadcast of the same bytes? One run, separate processes.

The other process is the embedded engine with a Qwen3 of 512 MB in bfloat16, idle, behind its own HTTP server. Trainer
ranks send it their shards of float32, as in a run: through shared memory (``nearest``, what a run chooses), and over
gloo, as to another machine. The gathered arms send buckets of bfloat16 that are there already, over gloo. Arms are
interleaved, and the table has medians, because others use the machine's cores too.

    gloo_vs_raw_64mb, _512mb     raw broadcast / buckets through the gloo transport (8 of them), seconds    goal >= 0.9
    sync_vs_raw_512mb            raw broadcast / whole publication by one rank: requests over HTTP, copies to bfloat16,
                                 checksums, load                                                            goal >= 0.85
    pause_vs_transfer_and_load   pause of the engine in it / (buckets over gloo + load)                    goal <= 1.05
    two_ranks_...                the same by two ranks, each in a process of its own
    ..._by_gloo_...              the same over gloo
    gathered_...                 the same from finished buckets                                     goals >= 0.5, <= 1.2
    staged_pause_vs_load         pause when staged, from finished buckets / load                            goal <= 1.2
    delta_bytes_fraction         bytes of a delta / bytes of the weights, bfloat16, AdamW at 1e-6           goal <  0.2

    python -m benchmarks.weight_sync [--repeats 5] [--json FILE]
"""

import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import zip_longest
from typing import Any

import msgspec
import torch
from transformers import Qwen3ForCausalLM

from benchmarks.processes.command_line import parser, save
from benchmarks.processes.engine_process import StandaloneDirectory, serve_in_thread
from benchmarks.processes.publishing_ranks import SYNC, TIMEOUT_S, WAYS, PublishingRanks, by, shape
from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.messages import Version
from rl_async.rollout_server.vllm.client import VllmEngine
from rl_async.weight_sync.buckets import Bucket, checksum, deltas, unpack
from rl_async.weight_sync.coordinator import WeightCoordinator, Weights
from rl_async.weight_sync.process_groups import GlooReceiver, GlooSender, broadcast
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from tests.support.weights import make_buckets

MB = 1 << 20
SIZE = (21, 1024)  # layers and width: 512 MB in bfloat16


class Command(msgspec.Struct):
    """One line on the engine process's standard input; it answers with one line when it is done."""

    name: str  # join, raw, buckets, load, checksum
    init: InitInfo | None = None
    nbytes: int = 0
    infos: list[UpdateInfo] = []


def engine_process() -> None:
    """The embedded engine's server in a thread, and the receivers of the other arms on standard input."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3ForCausalLM(shape(*SIZE)).eval()
    engine, port = serve_in_thread(model)
    print(port, flush=True)
    receiver: GlooReceiver | None = None
    raw = torch.zeros(512 * MB, dtype=torch.uint8)
    mine = list(make_buckets(((n, p.detach() + 0) for n, p in model.named_parameters()), 64 * MB))
    for line in sys.stdin:
        command = msgspec.json.decode(line, type=Command)
        began = time.perf_counter()
        if command.name == "join":
            assert command.init is not None
            receiver = GlooReceiver(command.init)
        elif command.name == "raw":
            assert receiver is not None
            broadcast(receiver._group, raw[: command.nbytes], TIMEOUT_S)
        elif command.name == "buckets":
            assert receiver is not None
            for info in command.infos:
                receiver.receive(info)
        elif command.name == "load":
            for bucket in mine:
                engine.load_weights(unpack(bucket.data, bucket.info))
        elif command.name == "checksum":
            for bucket in mine:
                checksum(bucket.data)
        print(time.perf_counter() - began, flush=True)


class Peer:
    """The engine process as the sender sees it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.weight_sync", "--engine"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{int(self.answer())}"

    def ask(self, name: str, **fields: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(Command(name=name, **fields)).decode() + "\n")
        self._process.stdin.flush()

    def answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the engine process ended with {self._process.wait()}")
        return float(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Timed:
    """An engine client that adds up how long each of its requests takes."""

    def __init__(self, url: str, seconds: dict[str, float]) -> None:
        self._engine, self._seconds = VllmEngine(url), seconds

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return await getattr(self._engine, name)(*arguments)
            finally:
                self._seconds[name] += time.perf_counter() - began

        return timed


class Gloo:
    """Both arms of the comparison over one gloo group."""

    def __init__(self, peer: Peer) -> None:
        self._peer, self._sender = peer, GlooSender((1,), "benchmark", TIMEOUT_S)
        peer.ask("join", init=self._sender.init_info(0))
        self._sender.connect()
        peer.answer()

    def raw(self, data: torch.Tensor) -> float:
        began = time.perf_counter()
        self._peer.ask("raw", nbytes=data.numel())
        assert self._sender._group is not None
        broadcast(self._sender._group, data, TIMEOUT_S)
        self._peer.answer()
        return time.perf_counter() - began

    def buckets(self, buckets: list[Bucket]) -> float:
        began = time.perf_counter()
        pairs = list(zip_longest(buckets, buckets[1:]))
        infos = [msgspec.structs.replace(one.info, next_bytes=ahead.nbytes if ahead else 0) for one, ahead in pairs]
        self._peer.ask("buckets", infos=infos)
        self._sender.stage(buckets[0])
        for bucket, ahead in pairs:
            if ahead:
                self._sender.stage(ahead)
            self._sender.send(bucket)
            self._sender.unstage()
        self._peer.answer()
        return time.perf_counter() - began


class Publication:
    """Whole publications with one configuration, each of other weights."""

    def __init__(self, peer: Peer, name: str, sync: WeightSyncConfig, weights: Callable[[int], Weights]) -> None:
        """``weights``: those of a step."""
        self.name = name
        self.phases: dict[str, float] = defaultdict(float)
        self._directory, self._weights, self._step = StandaloneDirectory({"engine": peer.url}), weights, 0
        self._coordinator = WeightCoordinator(
            self._directory.open,
            lambda record: Timed(record.url, self.phases),  # type: ignore[arg-type,return-value]
            sync,
        )

    def __call__(self) -> tuple[float, float]:
        """Seconds of the whole, and of the engine's pause."""
        self.phases.clear()
        self._step += 1
        report = self._coordinator.publish(Version(0, self._step), self._weights(self._step))
        return report.seconds, report.pause_seconds

    def close(self) -> None:
        self._coordinator.close()


RANKS = {1: "one rank", 2: "two ranks"}
GATHERED = {
    "gathered": SYNC,
    "gathered, staged": msgspec.structs.replace(SYNC, way=(SYNC.transport, "staged")),
    "gathered, delta": msgspec.structs.replace(SYNC, way=(SYNC.transport, "delta")),
}


def two_versions() -> list[list[Bucket]]:
    """The engine's weights, and the same with one in a hundred elements changed."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(shape(*SIZE))
    named = [(n, torch.empty(p.shape, dtype=torch.bfloat16).normal_(std=0.02)) for n, p in model.named_parameters()]
    one = list(make_buckets(named, 64 * MB))
    for _, tensor in named:
        tensor.view(-1)[::100] += 1.0
    return [one, list(make_buckets(named, 64 * MB))]


def delta_fractions(steps: tuple[int, ...] = (1, 8)) -> dict[int, float]:
    """Bytes of a delta / bytes of the weights for the step with this number (from 1).

    A Qwen3 of 12 M parameters as Transformers initialises it, float32 in the optimizer, bfloat16 on the wire, AdamW
    as ``trainer.*`` has it but for the rate of 1e-6, next-token loss on random tokens.
    """
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(shape(8, 384))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)

    def wire() -> list[Bucket]:
        return list(make_buckets(((n, p.detach().bfloat16()) for n, p in model.named_parameters()), 64 * MB))

    found, before = {}, wire()
    for step in range(1, max(steps) + 1):
        tokens = torch.randint(0, 1024, (8, 64))
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after = wire()
        if step in steps:
            sent = sum(bucket.nbytes for bucket in deltas(after, before, "base"))
            found[step] = sent / sum(bucket.nbytes for bucket in after)
        before = after
    return found


def gloo_arms(gloo: Gloo, raw: torch.Tensor, buckets: list[Bucket], repeats: int) -> dict[str, float]:
    """Median seconds of both arms in turns: a small transfer alone is shorter than what the scheduler does to it."""
    pairs = [(gloo.raw(raw), gloo.buckets(buckets)) for _ in range(repeats)]
    return dict(zip(("raw broadcast", "gloo transport"), map(statistics.median, zip(*pairs)), strict=True))


def publications(peer: Peer, versions: list[list[Bucket]], ranks: Sequence[PublishingRanks]) -> Iterator[Publication]:
    """One of each kind, to be closed before the next."""
    for of in ranks:
        for way in WAYS:
            name = RANKS[of.count] + (", gloo" if way == "gloo" else "")
            yield Publication(peer, name, by(way), lambda _, of=of, way=way: of.weights(way))  # type: ignore[misc]
    for name, sync in GATHERED.items():
        yield Publication(peer, name, sync, lambda step: versions[step % 2])


def measure(repeats: int) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Median seconds by arm, and of each phase by kind of publication."""
    versions = two_versions()
    raw = torch.zeros(512 * MB, dtype=torch.uint8)
    cut = {size: list(make_buckets([("w", raw[: size * MB])], size * MB // 8)) for size in (64, 512)}
    samples: dict[str, list[float]] = defaultdict(list)
    phases: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        peer = stack.enter_context(closing(Peer()))
        ranks = [stack.enter_context(PublishingRanks(count, *SIZE)) for count in RANKS]
        gloo = Gloo(peer)
        for number in range(repeats + 1):  # the first warms up
            found = {}
            for size, buckets in cut.items():
                for name, seconds in gloo_arms(gloo, raw[: size * MB], buckets, 512 // size).items():
                    found[f"{name}, {size} MB"] = seconds
            found["gloo transport, the weights"] = gloo.buckets(versions[0])
            for local in ("load", "checksum"):
                peer.ask(local)
                found[f"{local} in the engine"] = peer.answer()
            for publication in publications(peer, versions, ranks):
                with closing(publication):
                    publication()  # makes the group, and what deltas start from
                    found[f"publication, {publication.name}"], found[f"pause, {publication.name}"] = publication()
                for phase, seconds in publication.phases.items():
                    phases[publication.name][phase].append(seconds)
            for name, seconds in found.items():
                samples[name] += [seconds] if number else []
    return (
        {name: statistics.median(seconds) for name, seconds in samples.items()},
        {kind: {name: statistics.median(s[1:]) for name, s in rows.items()} for kind, rows in phases.items()},
    )


def main() -> None:
    arguments = parser(__doc__, "--engine").parse_args()
    if arguments.engine:
        engine_process()
        return
    torch.set_num_threads(1)
    fractions = delta_fractions()
    seconds, phases = measure(arguments.repeats)
    raw, load = seconds["raw broadcast, 512 MB"], seconds["load in the engine"]
    apart = seconds["gloo transport, the weights"] + load
    result = {
        "gloo_vs_raw_64mb": seconds["raw broadcast, 64 MB"] / seconds["gloo transport, 64 MB"],
        "gloo_vs_raw_512mb": raw / seconds["gloo transport, 512 MB"],
        "sync_vs_raw_512mb": raw / seconds["publication, one rank"],
        "pause_vs_transfer_and_load": seconds["pause, one rank"] / apart,
        "sync_by_gloo_vs_raw_512mb": raw / seconds["publication, one rank, gloo"],
        "pause_by_gloo_vs_transfer_and_load": seconds["pause, one rank, gloo"] / apart,
        "two_ranks_sync_vs_raw_512mb": raw / seconds["publication, two ranks"],
        "two_ranks_sync_by_gloo_vs_raw_512mb": raw / seconds["publication, two ranks, gloo"],
        "gathered_sync_vs_raw_512mb": raw / seconds["publication, gathered"],
        "gathered_pause_vs_transfer_and_load": seconds["pause, gathered"] / apart,
        "staged_pause_vs_load": seconds["pause, gathered, staged"] / load,
        "delta_bytes_fraction": fractions[1],
    }
    for name, value in seconds.items():
        print(f"{name:<38}{1000 * value:>9.0f} ms")
    for kind, rows in phases.items():
        print(f"requests, {kind}: " + ", ".join(f"{name} {1000 * value:.0f}" for name, value in rows.items()) + " ms")
    print("delta bytes by step: " + ", ".join(f"{step}: {value:.3f}" for step, value in fractions.items()))
    for name, value in result.items():
        print(f"{name:<38}{value:>9.3f}")
    save(result, arguments.json)


if __name__ == "__main__":
    main()
