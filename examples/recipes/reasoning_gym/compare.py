"""A config of this folder and TRL's GRPOTrainer in turns, with the same prompts in the same order, three seeds each.

    python -m examples.recipes.reasoning_gym.compare config --trl .venv-oracles/bin/python
    python -m examples.recipes.reasoning_gym.compare tiny --trl .venv-oracles/bin/python

Keeps the results of a run below ``--runs``, makes only those that are missing, prints a row for each, and draws
``CONFIG.svg``. Columns: reward of the first and the last three steps, seconds of all steps, and processor seconds per
step of all processes, from the end of the first step on.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.processes.whole_run import RL_ASYNC, launch, run_trl
from examples.seeds import plot
from rl_async.agent_loop.environments.session import joined
from rl_async.configs.load import load_config
from rl_async.configs.schema.run import RunConfig
from rl_async.launcher.sources import fetch_sources

HERE, DATA = Path(__file__).parent, Path("artifacts/reasoning_gym")
# A finished example shows the model the form of an answer.
START = [
    {"role": "system", "content": "Reply with the number only."},
    {"role": "user", "content": "Calculate 2 + 3."},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Right. The next one:"},
]
ARMS = ("rl-async", "TRL")
DEADLINE_S = 3600.0


def write_puzzles(config: RunConfig, seeds: Sequence[int], name: str) -> tuple[Path, Path, list[dict[str, Any]]]:
    """Write rows for ours, whose environment asks the questions, and rows with the questions for TRL; return these."""
    from reasoning_gym import create_dataset

    DATA.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    asked: list[dict[str, Any]] = []
    for seed in seeds:
        entry = create_dataset("basic_arithmetic", size=1, seed=seed, **config.agent.environment_options)[0]
        row = {"data_source": "reasoning_gym", "reward_model": {"style": "rule", "ground_truth": entry["answer"]}}
        rows.append(row | {"prompt": START, "extra_info": {"seed": seed}})
        asked.append(row | {"prompt": joined(START, [{"role": "user", "content": entry["question"]}])})
    ours, trl = DATA / f"{name}.jsonl", DATA / f"{name}-asked.jsonl"
    for file, lines in ((ours, rows), (trl, asked)):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ours, trl, asked


def warm_start(config: RunConfig, path: Path) -> None:
    """Write demonstrations of which some are wrong, and train the tiny model on them, unless it is there."""
    draw = random.Random(0)
    held_out, _, _ = write_puzzles(config, range(64), "test")
    talks = []
    for row in write_puzzles(config, range(64, 8192), "demos")[2]:
        said = row["reward_model"]["ground_truth"] if draw.random() < 0.85 else str(draw.randint(0, 20))
        talks.append({"messages": [*row["prompt"], {"role": "assistant", "content": said}]})
    pq.write_table(pa.Table.from_pylist(talks), DATA / "demos.parquet")
    subprocess.run([RL_ASYNC, "sft", "--config", str(path), f"data.path={held_out}"], check=True)


def train_ours(path: Path, steps: int, seed: int, tasks: Path, run: Path) -> dict[str, Any]:
    """Train by the config; return rewards and seconds until the end of each step, and processor seconds per step."""
    # A run that was interrupted has no results: it begins again.
    shutil.rmtree(run, ignore_errors=True)
    given = [f"data.path={tasks}", f"seed={seed}"]
    metrics, used = launch(str(path), "colocated", given, run, range(1, steps), DEADLINE_S)
    seconds = [line["time"] - metrics[0]["time"] + metrics[0]["time/step_s"] for line in metrics]
    rewards = [line["reward/mean"] for line in metrics]
    return {"rewards": rewards, "seconds": seconds, "processor": sum(used.processor.values())}


def train_trl(config: RunConfig, seed: int, tasks: Path, python: str) -> dict[str, Any]:
    """Train by TRL; return the same as ``train_ours``."""
    flags = {
        "steps": config.trainer.steps,
        "groups": config.data.train_batch_groups,
        "group_size": config.rollout.group_size,
        "tokens": config.rollout.max_tokens,
        "dtype": config.model.dtype,
        "learning_rate": config.trainer.learning_rate,
        "pass_tokens": config.trainer.max_tokens_per_microbatch,
        "reward": "reasoning_gym",
        "seed": seed,
    }
    assert config.launcher.threads is not None
    run = run_trl(python, Path(config.model.path), tasks, config.launcher.threads, DEADLINE_S, **flags)
    processor = (run.processor[-1] - run.processor[0]) / (len(run.processor) - 1)
    return {"rewards": run.rewards, "seconds": run.ends, "processor": processor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", choices=sorted(file.stem for file in HERE.glob("*.yaml")))
    parser.add_argument("--trl", required=True, metavar="PYTHON", help="a Python with TRL 1.16 and reasoning-gym")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=Path("runs/reasoning_gym"))
    arguments = parser.parse_args()
    # Threads that spin while they wait make TRL many times slower on cores that others use; ours never do.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    name, path, runs = arguments.config, HERE / f"{arguments.config}.yaml", arguments.runs
    config = load_config(str(path))
    if config.warm_start is not None:
        warm_start(config, path)
    config = fetch_sources(config)
    runs.mkdir(parents=True, exist_ok=True)
    curves = []
    steps, count = config.trainer.steps, config.trainer.steps * config.data.train_batch_groups
    for seed in arguments.seeds:
        ours, trl, _ = write_puzzles(config, range(10_000 * seed, 10_000 * seed + count), f"{name}-{seed}")
        for arm in ARMS:
            file = runs / f"{name}-{arm}-{seed}.json"
            if not file.exists() and arm == "TRL":
                file.write_text(json.dumps(train_trl(config, seed, trl, arguments.trl)))
            elif not file.exists():
                file.write_text(json.dumps(train_ours(path, steps, seed, ours, runs / f"{name}-{seed}")))
            run = json.loads(file.read_text())
            curves.append((arm, run["rewards"]))
            ends = f"{mean(run['rewards'][:3]):.3f} | {mean(run['rewards'][-3:]):.3f}"
            print(f"| {arm} | {seed} | {ends} | {run['seconds'][-1]:.0f} | {run['processor']:.2f} |", flush=True)
    plot(curves, HERE / f"{name}.svg")


if __name__ == "__main__":
    main()
