"""Every advantage estimator and every loss on the calculator task: short runs from one warm start, one seed.

Each row of the table is a run of ``rl-async launch``: engine, agent worker, queue and trainer are separate processes.
Advantage estimators run with the ``ppo`` loss, losses with ``grpo`` advantages. A run learns if the mean reward of its
last five steps exceeds that of its first five by ``--margin``.

    python examples/algorithms.py                                   # all of them, about 35 s each
    python examples/algorithms.py --advantages rloo opo --losses gspo cispo

reward first/last   mean sampled reward of the first and the last five steps
kl                  largest k3 estimate of KL(behaviour || policy) per token over the run
ess                 smallest effective sample size of the token weights, 1 when on-policy
with                the method's further settings
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_async.configs.schema.formulas import ADVANTAGES, LOSSES

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


def run(kind: str, name: str, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Run one method; return its metrics, a dict per step, or [] if the run failed before its first step."""
    run_name = f"algorithms-{kind}-{name}"
    command = [
        *("rl-async", "launch", "--mode", "disaggregated", "--config", "calculator", "--name", run_name),
        f"algorithm.{kind}={name}",
        f"trainer.steps={arguments.steps}",
        f"seed={arguments.seed}",
        "trainer.schedule=constant",
        "eval.every=0",
        *NEEDS.get((kind, name), []),
        *arguments.override,
    ]
    print("$", " ".join(command), flush=True)
    done = subprocess.run(
        [str(Path(sys.executable).with_name("rl-async")), *command[1:]], stdout=subprocess.DEVNULL, check=False
    )
    path = arguments.runs / run_name / "metrics.jsonl"
    if done.returncode != 0 and not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def row(kind: str, name: str, metrics: Sequence[dict[str, float]], steps: int, margin: float) -> str:
    """Format one row of the table."""
    if len(metrics) < steps:
        return f"{kind:<10} {name:<32} ended after {len(metrics)} of {steps} steps"
    rewards = [m["reward/mean"] for m in metrics]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    kl, ess = max(m["correction/k3"] for m in metrics), min(m["correction/ess"] for m in metrics)
    verdict = "learns" if last - first > margin else "does not learn"
    given = " ".join(NEEDS.get((kind, name), []))
    return f"{kind:<10} {name:<32} {first:>7.3f} {last:>7.3f} {kl:>9.4f} {ess:>7.3f}  {verdict:<14} {given}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advantages", nargs="*", choices=ADVANTAGES, default=list(ADVANTAGES))
    parser.add_argument("--losses", nargs="*", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--margin", type=float, default=0.1, help="rise of the reward that counts as learning")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("override", nargs="*", help="more a.b=c overrides")
    arguments = parser.parse_args()
    tried = [("advantage", name) for name in arguments.advantages] + [("loss", name) for name in arguments.losses]
    lines = [row(kind, name, run(kind, name, arguments), arguments.steps, arguments.margin) for kind, name in tried]
    print(f"\n{'':<10} {'':<32} {'first':>7} {'last':>7} {'kl max':>9} {'ess min':>7}  {'':<14} with")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
