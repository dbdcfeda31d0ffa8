"""Every advantage estimator and every loss on two tasks with three seeds: short runs from one warm start per task.

    python examples/algorithms.py                                   # all of them, about 35 s a run
    python examples/algorithms.py --advantages rloo opo --losses gspo cispo --tasks sort --seeds 1
    python examples/algorithms.py --ended                           # the table of the runs that are there

Advantage estimators run with the ``ppo`` loss, losses with ``grpo`` advantages. A run that was interrupted is
continued, and one that has ended is audited and not run again. The table has a row per method; its cells are the mean
sampled reward of the first and of the last five steps, of each seed, and ``learns`` counts the runs that rise by more
than ``--margin``, of those that ended.
"""

import argparse
import subprocess
from collections.abc import Mapping
from pathlib import Path

from seeds import print_table, train

from rl_async.configs.schema.formulas import ADVANTAGES, LOSSES
from rl_async.launcher.run_folder import unfinished

TASKS = ("calculator", "sort")
# The preset's learning rate of 1e-3 suits losses that limit how far one step may go.
SLOWER = "trainer.learning_rate=3e-4"
OF_ROWS = ["algorithm.aggregation=seq-mean-token-sum", "trainer.minibatches=1", "trainer.learning_rate=1e-4"]
# Settings that a method needs besides its name, and why.
NEEDS: dict[tuple[str, str], list[str]] = {
    ("advantage", "gae"): ["critic={learning_rate: 1e-3}"],
    ("advantage", "prime"): ["critic={learning_rate: 1e-4}", SLOWER],
    # The greedy answer beats most samples, so nearly all advantages are negative, and 1e-3 destroys the policy.
    ("advantage", "remax"): ["trainer.learning_rate=1e-4"],
    # Only a group with a single best sample has a signal, and of 16 samples usually several succeed.
    ("advantage", "grpo_passk"): ["rollout.group_size=4", "data.train_batch_groups=96", SLOWER],
    # Gradients of whole rows; pairs need the plain gradient.
    ("advantage", "dpo"): [*OF_ROWS, "algorithm.loss=reinforce"],
    ("loss", "sppo"): OF_ROWS,
    ("loss", "vespo"): [SLOWER],
    ("loss", "decoupled_ppo"): ["algorithm.correction=disabled"],  # it has a weight of its own
    ("loss", "reinforce"): [
        "trainer.minibatches=1",
        SLOWER,
    ],  # no ratio: a second mini-batch would be off-policy
    ("loss", "gpg"): ["trainer.minibatches=1", SLOWER],
    ("loss", "gspo"): ["algorithm.clip_low=3e-2", "algorithm.clip_high=4e-2"],  # length-normalised ratios stay near 1
    # The paper's limits and aggregation.
    ("loss", "gmpo"): [
        "algorithm.clip_low=0.4",
        "algorithm.clip_high=0.4",
        "algorithm.aggregation=seq-mean-token-mean",
        SLOWER,
    ],
    ("loss", "m2po"): [SLOWER],  # no clip of the ratio to pi_old
    ("loss", "kl_cov"): [SLOWER],  # no clip, only a penalty on a few tokens
}


def run(task: str, kind: str, name: str, seed: int, arguments: argparse.Namespace) -> list[float] | None:
    """Train one run, unless it has ended; return the reward of each step, or None if it failed or is left out."""
    run_name = f"algorithms-{task}-{kind}-{name}-{seed}"
    options = [
        f"algorithm.{kind}={name}",
        f"trainer.steps={arguments.steps}",
        f"seed={seed}",
        "trainer.schedule=constant",
        "eval.every=0",
        *NEEDS.get((kind, name), []),
        *arguments.override,
    ]
    placed = [*options, f"launcher.run_dir={arguments.runs}"]
    if arguments.ended and (not (arguments.runs / run_name).exists() or unfinished(task, placed, run_name)):
        return None
    try:
        return train(task, "disaggregated", run_name, arguments.runs, options).rewards
    except subprocess.CalledProcessError as error:
        # A method may diverge, which ends its run; an audit that fails is an error of the program.
        if "audit" in error.cmd:
            raise
        print(error, flush=True)
        return None


def cells(rewards: Mapping[int, list[float] | None], margin: float) -> list[str]:
    """Return the cells of one task, for the runs of one method by seed."""
    ended = [each for each in rewards.values() if each is not None]
    ends = [(sum(each[:5]) / len(each[:5]), sum(each[-5:]) / len(each[-5:])) for each in ended]
    first, last = (", ".join(f"{end[place]:.2f}" for end in ends) for place in (0, 1))
    learns = sum(after - before > margin for before, after in ends)
    return [first, last, f"{learns} of {len(ended)}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advantages", nargs="*", choices=ADVANTAGES, default=list(ADVANTAGES))
    parser.add_argument("--losses", nargs="*", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--margin", type=float, default=0.1, help="rise of the reward that counts as learning")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--ended", action="store_true", help="start nothing, tabulate runs that have ended")
    parser.add_argument("override", nargs="*", help="more a.b=c overrides")
    arguments = parser.parse_intermixed_args()
    tried = [("advantage", name) for name in arguments.advantages] + [("loss", name) for name in arguments.losses]
    rows = []
    for kind, name in tried:
        of_tasks = [
            cells({seed: run(task, kind, name, seed, arguments) for seed in arguments.seeds}, arguments.margin)
            for task in arguments.tasks
        ]
        if arguments.ended and not any(of_task[0] for of_task in of_tasks):
            continue
        given = " ".join(NEEDS.get((kind, name), []))
        rows.append([kind, name, *(cell for of_task in of_tasks for cell in of_task), given])
    columns = [f"{task}: {column}" for task in arguments.tasks for column in ("first", "last", "learns")]
    print_table(["", "", *columns, "with"], rows)


if __name__ == "__main__":
    main()
