"""The planner against runs on this machine: costs measured on one run, the steps of others predicted from them.

Every process of a run is a process of its own. The run that costs are taken from is on-policy with one engine; the
others change the engines, the bound on staleness, the mode, the batch and the sizes of groups.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl_async.configs.load import load_resolved
from rl_async.launcher.capacity import RunComparison, measure, validate

STEPS = 15
WIDE = "agent.concurrency=512"  # more than a batch, so that the episodes of a step begin together
FIRST = ("queue.max_staleness=0",)
OTHERS: dict[str, tuple[str, Sequence[str]]] = {
    "bound 1": ("disaggregated", ("queue.max_staleness=1",)),
    "bound 2": ("disaggregated", ("queue.max_staleness=2",)),
    "2 engines, bound 0": ("disaggregated", ("queue.max_staleness=0", "rollout.engines=2")),
    "2 engines, bound 1": ("disaggregated", ("queue.max_staleness=1", "rollout.engines=2")),
    "2 workers, bound 0": ("disaggregated", ("queue.max_staleness=0", "agent.workers=2")),
    "half of the batch, bound 0": ("disaggregated", ("queue.max_staleness=0", "data.train_batch_groups=12")),
    "half of the batch, bound 1": ("disaggregated", ("queue.max_staleness=1", "data.train_batch_groups=12")),
    "half of the group, bound 0": ("disaggregated", ("queue.max_staleness=0", "rollout.group_size=8")),
    "in turns, bound 0": ("colocated", ("queue.max_staleness=0",)),
    "in turns, bound 1": ("colocated", ("queue.max_staleness=1",)),
}


def record(runs: Path, name: str, mode: str, overrides: Sequence[str], preset: str) -> Path:
    """The folder of a run, which is made unless it is there. Raises CalledProcessError if it fails."""
    folder = runs / name.replace(",", "").replace(" ", "-")
    if not (folder / "metrics.jsonl").exists():
        command = [sys.executable, "-m", "rl_async.launcher.cli", "launch", "--mode", mode, "--config", preset]
        keys = [f"launcher.run_dir={runs}", f"trainer.steps={STEPS}", WIDE, "eval.every=0", *overrides]
        subprocess.run([*command, "--name", folder.name, *keys], check=True, stdout=subprocess.DEVNULL)
    return folder


def compare(runs: Path, preset: str, names: Sequence[str]) -> Iterator[tuple[str, RunComparison]]:
    """Yield each named run with its prediction, when it is made. Raises UserError if the first run's costs cannot be
    measured."""
    first = record(runs, "measured", "disaggregated", FIRST, preset)
    config = load_resolved(first / "config.yaml")
    costs, episodes, _ = measure(first, config.rollout.engines, config.trainer.ranks)
    for name in names:
        yield name, validate(record(runs, name, *OTHERS[name], preset), costs, episodes)
