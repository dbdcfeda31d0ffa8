"""The trainer on a pretrained model: what shared prefixes save.

    python -m benchmarks.real.trainer MODEL [--dtype bfloat16] [--threads 2] [--rounds 3] [--json FILE]

Groups of random rows with a common prompt and answers of 16 to 32 tokens, each with prefixes shared and apart in turn,
in one process: a pass without gradient, and one optimizer step. Speed is wall time, least of the rounds, and processor
time is printed beside it for machines that are not idle.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.real.setting import Setting
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.messages import Sampling, Trajectory, Version, VersionRun
from rl_async.trainer.backend import Outputs
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import Tensors, collate

SHAPES = {"prefix_sharing_speedup": (8, 8, 40), "prefix_sharing_speedup_long": (2, 16, 400)}  # groups, size, prompt
ANSWERS = 16, 32  # tokens
DEADLINE_S = 1800


def rows_of(groups: int, size: int, prompt: int, vocab: int) -> list[Trajectory]:
    draw = np.random.default_rng(0)
    rows = []
    for group in range(groups):
        asked = draw.integers(3, vocab, prompt)
        for sample in range(size):
            tokens = np.concatenate([asked, draw.integers(3, vocab, draw.integers(*ANSWERS, endpoint=True))])
            mask = np.arange(len(tokens)) >= prompt
            rows.append(
                Trajectory(
                    task_id=str(group),
                    group_id=group,
                    sample=sample,
                    attempt=0,
                    episode_id=f"{group}.{sample}",
                    token_ids=tokens.astype(np.int32),
                    loss_mask=mask,
                    logprobs=np.zeros(len(tokens), np.float32),
                    versions=[VersionRun(Version(0, 0), 0, int(mask.sum()))],
                    sampling=Sampling(),
                    reward=0.0,
                )
            )
    return rows


def timed(backend: Fsdp2Backend, batch: Tensors) -> tuple[float, float]:
    """Return the wall and the processor seconds of a pass without gradient and a step."""

    def loss_fn(_: int, outputs: Outputs) -> Tensor:
        assert outputs.logprobs is not None
        return -torch.where(batch.mask, outputs.logprobs, 0.0).sum() / batch.mask.sum()

    wall, processor = time.perf_counter(), time.process_time()
    backend.forward(batch)
    backend.step([batch], loss_fn)
    return time.perf_counter() - wall, time.process_time() - processor


def speedup(backend: Fsdp2Backend, name: str, rounds: int) -> float:
    together = collate(rows_of(*SHAPES[name], backend.hf_config.vocab_size), device="cpu", share_prefixes=True)
    apart = msgspec.structs.replace(together, tree=None)
    spent: dict[str, list[tuple[float, float]]] = {"apart": [], "together": []}
    for _ in range(rounds):
        for arm, batch in (("apart", apart), ("together", together)):
            spent[arm].append(timed(backend, batch))
    least = {arm: [min(each) for each in zip(*times, strict=True)] for arm, times in spent.items()}
    print(f"{name}: {apart.computed} tokens apart, {together.computed} together")
    for arm, (wall, processor) in least.items():
        print(f"  {arm}: {wall:.1f} s, processor {processor:.1f} s")
    return least["apart"][0] / least["together"][0]


def measured(name: str, setting: Setting) -> float:
    """Measure one key in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.real.trainer", setting.model, "--only", name, "--json", str(out)]
        subprocess.run(command, check=True, timeout=DEADLINE_S)
        found: dict[str, float] = json.loads(out.read_text())
        return found[name]


KEYS = {name: functools.partial(measured, name) for name in SHAPES}


def main() -> None:
    parser = argparse.ArgumentParser(description="Shared prefixes on a pretrained model.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=SHAPES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    training = TrainerConfig(learning_rate=1e-9, minibatches=1)
    backend = Fsdp2Backend(str(arguments.model), arguments.dtype, "cpu", training)
    names = [arguments.only] if arguments.only else list(SHAPES)
    found = {name: speedup(backend, name, arguments.rounds) for name in names}
    for name, value in found.items():
        print(f"{name} {value:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
