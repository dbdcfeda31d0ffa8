"""SmolLM2-135M-Instruct trained over several seeds: plain sums and tools, both modes, the embedded engine and vLLM.

    python examples/real_seeds.py                                    # sums, three seeds, the embedded engine
    python examples/real_seeds.py --tasks sums tools --vllm .venv-vllm/bin/python --out docs/images/real_model.png

Runs one after another by ``rl-async launch``, audits each, prints a row per run and plots the reward over steps. A run
that was interrupted is continued, and one that has ended is not run again: delete its folder to repeat it.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from seeds import COLUMNS, Records, print_table, train

PRESETS = {"sums": "smollm2", "tools": "smollm2-tools"}
ARMS = ("disaggregated", "vllm", "colocated")


class Run(NamedTuple):
    """What was run, and what came of it."""

    task: str
    arm: str
    seed: int
    records: Records


def flags(arm: str, vllm: Path | None) -> list[str]:
    """The mode and the overrides of an arm."""
    if arm == "colocated":
        return ["--mode", "colocated", "queue.max_staleness=0"]
    mode = ["--mode", "disaggregated"]
    return [*mode, "rollout.engine=vllm", f"rollout.python={vllm}"] if arm == "vllm" else mode


def run(task: str, arm: str, seed: int, arguments: argparse.Namespace) -> Run:
    """Train one run, unless it has ended, and read its records."""
    _, mode, *options = flags(arm, arguments.vllm)
    options += [f"seed={seed}", *arguments.override]
    name = f"real-{task}-{arm}-seed{seed}"
    return Run(task, arm, seed, train(PRESETS[task], mode, name, arguments.runs, options))


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
            rewards = each.records.rewards
            axes.plot(range(1, len(rewards) + 1), rewards, color=colours[each.arm], label=label)
        axes.set(xlabel="trainer step", ylabel="mean sampled reward", ylim=(0, 1), title=PRESETS[task])
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=PRESETS, default=["sums"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="Python with vLLM (scripts/install vllm)")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("real_seeds.png"))
    parser.add_argument("override", nargs="*", help="more a.b=c overrides")
    arguments = parser.parse_args()
    arms = [arm for arm in ARMS if arm != "vllm" or arguments.vllm]
    runs = [run(task, arm, seed, arguments) for seed in arguments.seeds for task in arguments.tasks for arm in arms]
    columns = ["task", "arm", "seed", *COLUMNS]
    print_table(columns, [[each.task, each.arm, str(each.seed), *each.records.cells] for each in sorted(runs)])
    plot(runs, arguments.out)


if __name__ == "__main__":
    main()
