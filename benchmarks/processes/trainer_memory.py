"""The memory of a trainer rank: what ``--dry-run`` says, and the peak resident set of a process that trains.

    python -m benchmarks.processes.trainer_memory [--config calculator ...] [--rows N] [--set KEY=VALUE ...]

For each config processes of their own, trainer.ranks of them, make the model of its warm start, with random weights,
and take two steps of ``trainer/update.py`` on random rows of ``rollout.max_model_len`` tokens: as many as a batch
of the config has, or N. Of several ranks the largest peak counts.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.processes.ranks import run_ranks
from benchmarks.processes.trainer_arms import resident, rows_of
from rl_async.configs.load import load_config
from rl_async.configs.schema.run import RunConfig
from rl_async.launcher.plan.memory import model_size, tiny_shape, trainer_bytes
from rl_async.trainer import rank as trainer_process  # what a rank imports
from rl_async.trainer.actor_critic import build_models
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.batches import Batch, plan_batch
from rl_async.trainer.update import update

DEADLINE_S = 600


def save_model(config: RunConfig, folder: Path) -> None:
    settings = config.warm_start
    assert settings is not None
    model = Qwen3Config(vocab_size=settings.vocab_size, tie_word_embeddings=True, **tiny_shape(settings))
    Qwen3ForCausalLM(model).save_pretrained(folder)


def measure(name: str, folder: str, count: int, overrides: list[str]) -> None:
    """Prints the estimate and the peak in bytes."""
    assert trainer_process
    config = load_config(name, [f"model.path={folder}", "model.dtype=float32", *overrides])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models = build_models(config, "cpu")
    rows = rows_of(
        [config.rollout.max_model_len] * (count or config.data.train_batch_groups * config.rollout.group_size)
    )
    headers = [row.header() for row in rows]
    for step in range(2):
        plan = plan_batch(headers, step, config, models.policy.data_parallel.size, models.row_cost)
        update(models, Batch(step, headers, plan, {row.key: row for row in rows}), build(config), config)
    print(trainer_bytes(config, model_size(config)), resident("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of a trainer rank, estimated and measured.")
    parser.add_argument("--config", nargs="+", default=["calculator", "shop", "sort"])
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, folder = arguments.worker
        measure(name, folder, arguments.rows, arguments.set)
        return
    for name in arguments.config:
        with tempfile.TemporaryDirectory() as folder:
            save_model(load_config(name, arguments.set), Path(folder))
            command = [
                sys.executable,
                "-m",
                "benchmarks.processes.trainer_memory",
                "--worker",
                name,
                folder,
                "--rows",
                str(arguments.rows),
            ]
            command += ["--set", *arguments.set]
            ranks = load_config(name, arguments.set).trainer.ranks
            told = [printed.split()[-2:] for printed in run_ranks(command, ranks, timeout_s=DEADLINE_S)]
        estimate, peak = int(told[0][0]), max(int(peak) for _, peak in told)
        print(f"{name}: estimated {estimate / 2**20:,.0f} MiB, measured {peak / 2**20:,.0f} MiB, {estimate / peak:.2f}")


if __name__ == "__main__":
    main()
