"""Trains presets or config files over several seeds, audits each run, and prints a row per run.

    python examples/seeds.py code                                  # three seeds of the preset
    python examples/seeds.py order examples/mcp_shop.yaml --seeds 1 2 --mode colocated queue.max_staleness=0
    python examples/seeds.py examples/recipes/search/config.yaml --plot search.svg

Runs one after another by ``rl-async launch``. A run that was interrupted is continued, and one that has ended is not
run again: delete its folder to repeat it. A run of another mode or other overrides is not taken for this one.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rl_async.configs.load import load_resolved
from rl_async.launcher.run_folder import changes, unfinished

RL_ASYNC = str(Path(sys.executable).with_name("rl-async"))
COLUMNS = ("reward, first 3 steps", "last 3", "held out", "minutes")


class Records(NamedTuple):
    """The mean sampled reward of each step of a run, the held-out reward by step, and how long it took."""

    rewards: list[float]
    held_out: dict[int, float]
    minutes: float

    @property
    def cells(self) -> list[str]:
        """The values of ``COLUMNS``."""
        first, last = (f"{sum(part) / len(part):.2f}" for part in (self.rewards[:3], self.rewards[-3:]))
        held_out = " ".join(f"{reward:.2f}" for _, reward in sorted(self.held_out.items()))
        return [first, last, held_out, f"{self.minutes:.1f}"]


def train(config: str, mode: str, name: str, runs: Path, options: Sequence[str]) -> Records:
    """Launch a run unless it has ended, audit it, and read its records.

    Exits if steps are missing, or if the folder has a run of another config.
    """
    folder = runs / name
    options = [*options, f"launcher.run_dir={runs}"]
    if (folder / "config.yaml").exists() and (found := changes(folder, config, options, mode)):
        sys.exit(f"{folder} has a run with other values of {', '.join(found)}; delete it, or choose another --runs")
    if not folder.exists() or unfinished(config, options, name):
        command = ["launch", "--mode", mode, "--config", config, "--name", name, *options]
        print("$ rl-async", " ".join(command), flush=True)
        subprocess.run([RL_ASYNC, *command], check=True)
    subprocess.run([RL_ASYNC, "audit", str(folder)], check=True)
    lines, evaluations = (
        [json.loads(line) for line in (folder / file).read_text().splitlines()]
        for file in ("metrics.jsonl", "evaluations.jsonl")
    )
    steps = list({line["step"]: line for line in lines}.values())  # of a step that was trained again, the newest
    if len(steps) < (wanted := load_resolved(folder / "config.yaml").trainer.steps):
        sys.exit(f"{folder} has {len(steps)} of {wanted} steps; delete it to repeat the run")
    return Records(
        rewards=[step["reward/mean"] for step in steps],
        held_out={int(line["eval/step"]): line["eval/reward"] for line in evaluations},
        minutes=(steps[-1]["time"] - steps[0]["time"] + steps[0]["time/step_s"]) / 60,
    )


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    for cells in (columns, ["---"] * len(columns), *rows):
        print("|", " | ".join(cells), "|")


def plot(curves: Sequence[tuple[str, Sequence[float]]], path: Path) -> None:
    """Plot labelled rewards over trainer steps; those with the same label have one colour. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3))
    labels = list(dict.fromkeys(label for label, _ in curves))
    for number, (label, rewards) in enumerate(curves):
        first = label not in [before for before, _ in curves[:number]]
        steps = range(1, len(rewards) + 1)
        axes.plot(steps, rewards, color=f"C{labels.index(label)}", label=label if first else None, linewidth=1)
    axes.set(xlabel="trainer step", ylabel="mean sampled reward")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="CONFIG | a.b=c", help="presets, config files, and overrides")
    parser.add_argument("--mode", choices=["disaggregated", "colocated"], default="disaggregated")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rewards over steps, too")
    arguments = parser.parse_intermixed_args()
    configs = [word for word in arguments.words if "=" not in word]
    overrides = [word for word in arguments.words if "=" in word]
    rows, curves = [], []
    for config in configs:
        # The configs of recipes are named after their folders.
        task = Path(config).parent.name if Path(config).name == "config.yaml" else Path(config).stem
        for seed in arguments.seeds:
            name = f"seeds-{task}-{seed}"
            records = train(config, arguments.mode, name, arguments.runs, [f"seed={seed}", *overrides])
            rows.append([task, str(seed), *records.cells])
            curves.append((task, records.rewards))
    print_table(["task", "seed", *COLUMNS], rows)
    if arguments.plot:
        plot(curves, arguments.plot)


if __name__ == "__main__":
    main()
