"""What staleness does to training, with and without off-policy correction.

Trains the calculator task from one warm start with ``queue.max_staleness=4``, once per arm with ``rl-async launch``,
and plots reward over steps. The staleness is real: the queue lets the engine run ahead by its bound, and each step is
stretched until the engine has done so, so that all arms train on data of the same age.

    python examples/staleness.py                 # all arms, one seed
    python examples/staleness.py --seeds 1 2 3 --arms naive corrected

arm         loss        correction            what it shows
naive       reinforce   disabled              -A log p, as if the data were on-policy
recompute   ppo         disabled              clipped around recomputed log-probabilities, which hide the staleness
coupled     ppo         bypass_ppo_clip       clipped around the rollout's own log-probabilities
corrected   ppo         decoupled_token_is    clipped around recomputed ones, weighted by min(pi_old/pi_rollout, 2)
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ARMS = {
    "naive": ("reinforce", "disabled"),
    "recompute": ("ppo", "disabled"),
    "coupled": ("ppo", "bypass_ppo_clip"),
    "corrected": ("ppo", "decoupled_token_is"),
}


def run_arm(arm: str, seed: int, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Run one arm; return its metrics, a dict per step."""
    loss, correction = ARMS[arm]
    name = f"staleness{arguments.staleness}-{arm}-seed{seed}"
    command = [
        *("rl-async", "launch", "--mode", "disaggregated", "--config", "calculator-async", "--name", name),
        f"seed={seed}",
        f"queue.max_staleness={arguments.staleness}",
        f"algorithm.loss={loss}",
        f"algorithm.correction={correction}",
        f"trainer.steps={arguments.steps}",
        f"trainer.minibatches={arguments.minibatches}",
        f"trainer.learning_rate={arguments.learning_rate}",
        f"debug.min_train_s={arguments.min_train_s}",
        "eval.every=0",
        *arguments.override,
    ]
    print("$", " ".join(command), flush=True)
    subprocess.run([str(Path(sys.executable).with_name("rl-async")), *command[1:]], check=True)
    lines = (arguments.runs / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def summary(arm: str, seed: int, metrics: list[dict[str, float]]) -> str:
    """Format one table row: mean reward over the run and over the last five steps, and the realised staleness."""
    rewards = [m["reward/mean"] for m in metrics]
    ages = [m["staleness/mean"] for m in metrics]
    return (
        f"{arm:<10} {seed:>4} {sum(rewards) / len(rewards):>8.3f} {sum(rewards[-5:]) / len(rewards[-5:]):>8.3f} "
        f"{sum(ages) / len(ages):>14.2f} {max(m['staleness/max'] for m in metrics):>13.0f}"
    )


def plot(curves: dict[tuple[str, int], list[dict[str, float]]], path: Path, staleness: int) -> None:
    """Plot reward over trainer steps, one line per run. Needs matplotlib (pip install 'rl-async[plot]')."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    colours = dict(zip(ARMS, pyplot.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    for (arm, seed), metrics in curves.items():
        label = arm if seed == min(s for a, s in curves if a == arm) else None
        axes.plot([m["step"] for m in metrics], [m["reward/mean"] for m in metrics], color=colours[arm], label=label)
    axes.set(xlabel="trainer step", ylabel="mean sampled reward", ylim=(0, 1), title=f"max_staleness={staleness}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument(
        "--min-train-s", type=float, default=2.5, help="minimum length of a step, so that the engine can run ahead"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("staleness.png"))
    parser.add_argument("override", nargs="*", help="more a.b=c overrides")
    arguments = parser.parse_args()
    curves = {(arm, seed): run_arm(arm, seed, arguments) for seed in arguments.seeds for arm in arguments.arms}
    print("arm        seed   reward   last 5  staleness mean staleness max")
    for (arm, seed), metrics in curves.items():
        print(summary(arm, seed, metrics))
    plot(curves, arguments.out, arguments.staleness)


if __name__ == "__main__":
    main()
