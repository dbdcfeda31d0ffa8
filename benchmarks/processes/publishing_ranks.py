"""Trainer ranks that publish as those of a run do: each sends its own shards, which are of float32, in bfloat16.

``python -m benchmarks.processes.publishing_ranks RANK COUNT LAYERS HIDDEN`` is one of them but the first. It prints
where its outlets are, a line for each of ``WAYS``, and offers its shards to that which a line names; it answers with a
line.
"""

import subprocess
import sys
from types import TracebackType

import msgspec
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.weight_sync.layout import Layout, TensorSpec, fsdp2, lengths
from rl_async.weight_sync.protocol import TransportName
from rl_async.weight_sync.reshard import ShardedWeights
from rl_async.weight_sync.sender import Outlet, OutletServer, RankShards, RemoteOutlet

HOST, TOKEN = "127.0.0.1", "benchmark"
TIMEOUT_S = 120.0
SYNC = WeightSyncConfig(way="gloo", timeout_s=TIMEOUT_S)
WAYS: tuple[TransportName, ...] = ("nearest", "gloo")


def shape(layers: int, hidden: int) -> Qwen3Config:
    """A Qwen3 with tied embeddings; ``shape(21, 1024)`` has 512 MB in bfloat16."""
    return Qwen3Config(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )


def layout_of(layers: int, hidden: int, ranks: int) -> Layout:
    """Who holds what of the model that ``shape`` describes, if FSDP2 shards it and bfloat16 travels."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(shape(layers, hidden))
    return fsdp2({name: TensorSpec(tuple(p.shape), "bfloat16") for name, p in model.named_parameters()}, ranks)


def by(way: TransportName) -> WeightSyncConfig:
    """The settings of publications by this transport."""
    return msgspec.structs.replace(SYNC, way=way)


class Rank:
    """One rank's shards, and an outlet for each of ``WAYS``."""

    def __init__(self, rank: int, layout: Layout) -> None:
        held = {key: torch.empty(lengths(key[1])).normal_(std=0.02) for key in layout.held(rank)}
        self._weights = ShardedWeights(layout, held)
        self.outlets = {way: Outlet(rank, by(way), HOST, TIMEOUT_S) for way in WAYS}

    def offer(self, way: TransportName) -> None:
        """Give the shards, as after a step: they are copied and sent again."""
        self.outlets[way].offer(self._weights)


class PublishingRanks:
    """``count`` ranks, the first in this process. To be used in a ``with`` statement."""

    def __init__(self, count: int, layers: int, hidden: int) -> None:
        self.count = count
        self._processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.processes.publishing_ranks",
                    *map(str, (rank, count, layers, hidden)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(1, count)
        ]
        self._first = Rank(0, layout_of(layers, hidden, count))
        self._shards: dict[TransportName, RankShards] = {}
        for way in WAYS:
            others = {
                rank: RemoteOutlet(rank, self._line(process), TOKEN, TIMEOUT_S, TIMEOUT_S)
                for rank, process in enumerate(self._processes, start=1)
            }
            self._shards[way] = RankShards(self._first.outlets[way], others)

    def weights(self, way: TransportName) -> RankShards:
        """Have all ranks offer their shards, and return what the coordinator publishes."""
        for process in self._processes:
            assert process.stdin is not None
            print(way, file=process.stdin, flush=True)
        self._first.offer(way)
        for process in self._processes:
            self._line(process)
        return self._shards[way]

    def __enter__(self) -> "PublishingRanks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for shards in self._shards.values():
            shards.close()
        for process in self._processes:
            process.kill()
            process.wait()

    def _line(self, process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            sys.exit(f"a trainer rank ended with {process.wait()}")
        return line.strip()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, count, layers, hidden = map(int, sys.argv[1:])
    mine = Rank(rank, layout_of(layers, hidden, count))
    servers = [OutletServer(mine.outlets[way], HOST, TOKEN) for way in WAYS]
    print(*(server.address for server in servers), sep="\n", flush=True)
    for line in sys.stdin:
        mine.offer(next(way for way in WAYS if way == line.strip()))
        print(flush=True)
