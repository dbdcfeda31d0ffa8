"""The recipe and TRL's GRPOTrainer in turns, with the same prompts in the same order, three seeds each.

    python -m examples.recipes.reasoning_gym.compare --trl .venv-oracles/bin/python

Writes one file of results per run below ``--runs``, makes only those that are missing, prints a table, and draws
``curve.svg``. Processor seconds are those of all processes of a run, per step, from the end of its first step on.
"""

import argparse
import json
import os
import shutil
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.processes.whole_run import launch, run_trl
from rl_async.configs.load import load_config
from rl_async.configs.schema.run import RunConfig
from rl_async.launcher.sources import fetch_sources

HERE = Path(__file__).parent
CONFIG = str(HERE / "config.yaml")
# A finished example shows the model the form of an answer.
START = [
    {"role": "system", "content": "Reply with the number only."},
    {"role": "user", "content": "Calculate 2 + 3."},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Right. The next one:"},
]
COLOURS = {"rl-async": "tab:blue", "TRL": "tab:orange"}
DEADLINE_S = 3600.0


def write_tasks(seed: int, config: RunConfig, folder: Path) -> tuple[Path, Path]:
    """Write the prompts of a seed for ours, whose environment asks the questions, and with the questions for TRL."""
    from reasoning_gym import create_dataset

    rows: list[dict[str, Any]] = []
    asked: list[dict[str, Any]] = []
    for number in range(config.trainer.steps * config.data.train_batch_groups):
        row_seed = 10_000 * seed + number
        entry = create_dataset("basic_arithmetic", size=1, seed=row_seed, **config.agent.environment_options)[0]
        row = {"data_source": "reasoning_gym", "reward_model": {"style": "rule", "ground_truth": entry["answer"]}}
        rows.append(row | {"prompt": START, "extra_info": {"seed": row_seed}})
        asked.append(row | {"prompt": [*START, {"role": "user", "content": entry["question"]}]})
    folder.mkdir(parents=True, exist_ok=True)
    ours, trl = folder / f"seed-{seed}.jsonl", folder / f"trl-{seed}.jsonl"
    for path, lines in ((ours, rows), (trl, asked)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ours, trl


def train_ours(seed: int, tasks: Path, run: Path) -> dict[str, Any]:
    """Train by the recipe; return rewards, seconds until the end of each step, and processor seconds per step."""
    # A run that was interrupted has no results: it begins again.
    shutil.rmtree(run, ignore_errors=True)
    overrides = [f"data.path={tasks}", f"seed={seed}"]
    steps = load_config(CONFIG).trainer.steps
    metrics, used = launch(CONFIG, "colocated", overrides, run, range(1, steps), DEADLINE_S)
    began = metrics[0]["time"] - metrics[0]["time/step_s"]
    return {
        "rewards": [line["reward/mean"] for line in metrics],
        "seconds": [line["time"] - began for line in metrics],
        "processor": sum(used.processor.values()),
    }


def train_trl(seed: int, tasks: Path, config: RunConfig, python: str) -> dict[str, Any]:
    """Train by TRL; return the same as ``train_ours``."""
    run = run_trl(
        python,
        Path(config.model.path),
        tasks,
        config.launcher.threads,
        DEADLINE_S,
        steps=config.trainer.steps,
        groups=config.data.train_batch_groups,
        group_size=config.rollout.group_size,
        tokens=config.rollout.max_tokens,
        dtype="bfloat16",
        learning_rate=config.trainer.learning_rate,
        reward="reasoning_gym",
        seed=seed,
    )
    processor = (run.processor[-1] - run.processor[0]) / (len(run.processor) - 1)
    return {"rewards": run.rewards, "seconds": run.ends, "processor": processor}


def draw(results: dict[tuple[str, int], dict[str, Any]], path: Path) -> None:
    """Draw the rewards of all runs over steps and over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(9, 3), sharey=True)
    for (arm, seed), run in results.items():
        label = arm if seed == min(of for _, of in results) else None
        by_step.plot(range(1, len(run["rewards"]) + 1), run["rewards"], color=COLOURS[arm], label=label, linewidth=1)
        by_time.plot(run["seconds"], run["rewards"], color=COLOURS[arm], linewidth=1)
    by_step.set(xlabel="trainer step", ylabel="mean sampled reward", ylim=(0, 1))
    by_time.set(xlabel="seconds")
    by_step.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", required=True, metavar="PYTHON", help="a Python with TRL 1.16 and reasoning-gym")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=Path("runs/reasoning_gym"))
    arguments = parser.parse_args()
    config = fetch_sources(load_config(CONFIG))
    arguments.runs.mkdir(parents=True, exist_ok=True)
    # Threads that spin while they wait make TRL many times slower on cores that others use; ours never do.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    results: dict[tuple[str, int], dict[str, Any]] = {}
    for seed in arguments.seeds:
        ours, trl = write_tasks(seed, config, Path("artifacts/reasoning_gym"))
        for arm in COLOURS:
            file = arguments.runs / f"{arm}-{seed}.json"
            if not file.exists():
                run = arguments.runs / f"seed-{seed}"
                found = (
                    train_ours(seed, ours, run) if arm == "rl-async" else train_trl(seed, trl, config, arguments.trl)
                )
                file.write_text(json.dumps(found))
            results[arm, seed] = run = json.loads(file.read_text())
            first, last = mean(run["rewards"][:4]), mean(run["rewards"][-4:])
            print(
                f"| {arm} | {seed} | {first:.3f} | {last:.3f} | {run['seconds'][-1]:.0f} | {run['processor']:.1f} |",
                flush=True,
            )
    draw(results, HERE / "curve.svg")


if __name__ == "__main__":
    main()
