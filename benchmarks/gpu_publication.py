"""Seconds of a publication to an engine on the trainer's own accelerator, by size of bucket.

    python -m benchmarks.gpu_publication [--device gpu] [--buckets 64 256 1024] [--repeats 3] [--json FILE]

One trainer rank holds float32 weights in Qwen3-8B's shape, the embedded engine, a process of its own, the same in
bfloat16. The rank's outlet casts on the device and hands over memory (``weight_sync.transport=ipc``). With ``--device
cpu`` a tiny model, so that this file runs anywhere; its numbers mean nothing then.

publication_s, pause_s   medians by bucket size in MiB; requests: the seconds of the engine's requests in the last one
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import uvicorn
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.processes.publishing_ranks import HOST, TIMEOUT_S
from benchmarks.weight_sync import Publication
from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.process.role import bind
from rl_async.rollout_server.embedded.core import EngineCore
from rl_async.rollout_server.embedded.engine_thread import EngineThread
from rl_async.rollout_server.embedded.server import EngineServer
from rl_async.torch_shared import pick_device
from rl_async.trainer.actor_critic import device_name
from rl_async.weight_sync.layout import TensorSpec, fsdp2, lengths
from rl_async.weight_sync.reshard import ShardedWeights
from rl_async.weight_sync.sender import Outlet, RankShards

SHAPES: dict[str, dict[str, int]] = {
    "gpu": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"num_hidden_layers": 36, "vocab_size": 151_936},
    "cpu": {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"num_hidden_layers": 4, "vocab_size": 4096},
}
MIB = 1 << 20


def config_of(kind: str) -> Qwen3Config:
    return Qwen3Config(**SHAPES[kind], head_dim=128, tie_word_embeddings=False, max_position_embeddings=256)


def engine_process(kind: str, device: str) -> None:
    """Serve random weights; print the port, and end with standard input."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.bfloat16).eval()
    engine = EngineThread(EngineCore(model, max_batch=1, max_length=64), on_crash=lambda _: sys.exit(1))
    listener = bind(HOST, 0, "port")
    app = EngineServer(engine, "benchmark").app
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False))
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()


class Peer:
    """The engine's process, as ``Publication`` needs it."""

    def __init__(self, device: str) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu_publication", "--engine", "--device", device]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        if not port:
            sys.exit(f"the engine process ended with {self._process.wait()}")
        self.url = f"http://{HOST}:{port}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--buckets", nargs="+", type=int, default=[64, 256, 1024], metavar="MIB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch_device = pick_device(arguments.device)
    kind, device = ("cpu", "cpu") if torch_device == "cpu" else ("gpu", f"{torch_device}:0")
    if arguments.engine:
        return engine_process(kind, device)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(kind))
    layout = fsdp2({name: TensorSpec(tuple(p.shape), "bfloat16") for name, p in model.named_parameters()}, 1)
    held = {key: torch.empty(lengths(key[1]), device=device).normal_(std=0.02) for key in layout.held(0)}
    weights = ShardedWeights(layout, held)
    nbytes = 2 * sum(tensor.numel() for tensor in held.values())
    found: dict[str, Any] = {"device": device_name(device), "published_bytes": nbytes}
    found |= {"publication_s": {}, "pause_s": {}}
    with closing(Peer("cpu" if kind == "cpu" else "gpu")) as peer:
        for mib in arguments.buckets:
            sync = WeightSyncConfig(transport="ipc", bucket_bytes=mib * MIB, timeout_s=TIMEOUT_S)
            outlet = Outlet(0, sync, HOST, TIMEOUT_S, device)
            shards = RankShards(outlet, {})

            def offered(_: int, outlet: Outlet = outlet, shards: RankShards = shards) -> RankShards:
                outlet.offer(weights)
                return shards

            with closing(shards), closing(Publication(peer, "ipc", sync, offered)) as publication:  # type: ignore[arg-type]
                publication()  # meets the engine
                seconds, pauses = zip(*(publication() for _ in range(arguments.repeats)), strict=True)
                found["publication_s"][mib], found["pause_s"][mib] = map(statistics.median, (seconds, pauses))
                found["requests"] = dict(publication.phases)
            print(f"{mib:5} MiB  publication {found['publication_s'][mib]:.3f} s  pause {found['pause_s'][mib]:.3f} s")
    print(f"{nbytes / 1e9:.1f} GB to {found['device']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
