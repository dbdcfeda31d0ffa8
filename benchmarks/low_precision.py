"""What engines with weights in 8 bits cost a run, with the off-policy correction and without: the calculator task.

    python -m benchmarks.low_precision [--staleness STEPS] [--repeats SEEDS] [--json FILE]

Each arm is a run of ``rl-async launch`` per seed, with the embedded engine. On-policy (``--staleness 0``, the default)
engine and trainer have the same weights but for the engine's rounding, so the distance between their policies is that
of the rounding, and of float32 arithmetic, which the arms in float32 show alone.

    kl       mismatch/kl: k3 of a few tokens sampled after every update
    k3       correction/k3, over a batch's tokens, before the correction
    ess      effective share of a batch's tokens, (sum r)^2 / (n sum r^2) with r = pi / mu; seq_ess: of its sequences
    first, last   mean reward of the first and the last EDGE steps
    held_out      mean reward of greedy answers to other tasks after the last step

kl, k3 and the shares are means over steps.
"""

import json
import statistics
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from benchmarks.processes.command_line import parser, save
from benchmarks.processes.whole_run import launch
from rl_async.configs.load import load_config
from rl_async.launcher.runs.prepare import prepare

STEPS, EDGE, DEADLINE_S = 20, 3, 900.0
QUANTIZATIONS = {"none": "float32", "int8": "int8", "fp8": "fp8"}
CORRECTIONS = {"disabled": "no", "decoupled_token_is": "yes"}
OVERRIDES = (
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=0",
    f"eval.every={STEPS}",
    "eval.tasks=256",
    "weight_sync.mismatch.every=1",
)
FORMATS = {"first": ".3f", "last": ".3f", "held_out": ".3f", "kl": ".2g", "k3": ".2g", "ess": ".4f", "seq_ess": ".3f"}


def outcome(metrics: Sequence[dict[str, float]], held_out: float) -> dict[str, float]:
    """Summarise a run, by the keys of FORMATS, from the metrics of its steps and its last evaluation."""

    def mean(key: str, steps: Sequence[dict[str, float]] = metrics) -> float:
        return statistics.mean(step[key] for step in steps if key in step)  # of the first step there is no mismatch

    return {
        "first": mean("reward/mean", metrics[:EDGE]),
        "last": mean("reward/mean", metrics[-EDGE:]),
        "held_out": held_out,
        "kl": mean("mismatch/kl"),
        "k3": mean("correction/k3"),
        "ess": mean("correction/ess"),
        "seq_ess": mean("correction/seq_ess"),
    }


def cell(values: Sequence[float], shown: str) -> str:
    """What an arm's runs found, from the least to the most."""
    least, most = format(min(values), shown), format(max(values), shown)
    return least if least == most else f"{least} to {most}"


def run(quantization: str, correction: str, staleness: int, seed: int, runs: Path) -> dict[str, float]:
    """Train once; what came of it."""
    wanted = [f"rollout.quantization={quantization}", f"algorithm.correction={correction}"]
    wanted += [f"queue.max_staleness={staleness}", f"seed={seed}"]
    folder = runs / f"{quantization}-{correction}-{seed}"
    metrics, _ = launch("calculator", "disaggregated", [*OVERRIDES, *wanted], folder, range(1, STEPS), DEADLINE_S)
    evaluated = (folder / "evaluations.jsonl").read_text().splitlines()[-1]
    return outcome(metrics, json.loads(evaluated)["eval/reward"])


def main() -> None:
    made = parser(__doc__)
    made.set_defaults(repeats=2)
    made.add_argument("--staleness", type=int, default=0, help="queue.max_staleness")
    arguments = made.parse_args()
    prepare(load_config("calculator"), print)
    arms = list(product(QUANTIZATIONS, CORRECTIONS))
    found: dict[tuple[str, str], list[dict[str, float]]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as folder:
        for seed, arm in product(range(1, arguments.repeats + 1), arms):
            found[arm].append(run(*arm, arguments.staleness, seed, Path(folder)))
            print(f"{', '.join(arm)}, seed {seed}: {found[arm][-1]}", flush=True)
    print(f"| engine | corrected | {' | '.join(FORMATS)} |")
    print("|---" * (2 + len(FORMATS)) + "|")
    for (quantization, correction), outcomes in found.items():
        cells = (cell([one[key] for one in outcomes], shown) for key, shown in FORMATS.items())
        print(f"| {QUANTIZATIONS[quantization]} | {CORRECTIONS[correction]} | {' | '.join(cells)} |")
    figures = {
        f"{quantization}, {correction}, seed {seed}, {key}": value
        for (quantization, correction), outcomes in found.items()
        for seed, one in enumerate(outcomes, 1)
        for key, value in one.items()
    }
    save(figures, arguments.json)


if __name__ == "__main__":
    main()
