"""Does asynchrony hide what it should? Wall time per step against the limit, in one run of each mode.

Generation and training are each stretched to a second a step by sleeping inside the real engine (for what is left of
each decode iteration; the first one samples twice, from the prompt and decoding) and inside the real trainer (for what
is left of the second); queue, weight sync, HTTP and processes are the real ones. The model has random weights, so that
of each batch many responses use up their tokens.

    disaggregated_vs_ideal   one-step-off: seconds per step / max(generation, training)     limit 1.0
    colocated_vs_sum         on-policy, taking turns: seconds per step / (generation + training)   limit 1.0

    python -m benchmarks.overlap [--json FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rl_async.configs.load import load_config

RL_ASYNC = str(Path(sys.executable).with_name("rl-async"))
ITERATIONS = 40  # of decoding per response
SKIPPED = 2  # the first steps fill the pipeline


def random_model(runs: Path) -> Path:
    """The folder of the preset's model with weights that know nothing."""
    folder = runs / "overlap-model"
    if not folder.exists():
        made = load_config("sort").model.path
        subprocess.run([RL_ASYNC, "sft", "--config", "sort"], check=True, stdout=subprocess.DEVNULL)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(made)).save_pretrained(folder)
        AutoTokenizer.from_pretrained(made).save_pretrained(folder)
    return folder


def run(mode: str, staleness: int, runs: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """One run in the folder ``runs``; returns seconds per step from first to last counted step."""
    name = f"overlap-{mode}"
    overrides = [
        f"queue.max_staleness={staleness}",
        f"trainer.steps={arguments.steps}",
        f"debug.min_train_s={arguments.seconds}",
        f"model.path={random_model(runs)}",
        "warm_start=null",
        f"debug.min_iteration_s={arguments.seconds / ITERATIONS}",
        f"rollout.max_tokens={ITERATIONS + 1}",
        "rollout.max_model_len=64",
        "agent.max_tokens=64",
        "agent.loop=single_turn",
        "data.train_batch_groups=8",
        "rollout.group_size=8",
        "eval.every=0",
        "eval.tasks=1",
        "trainer.checkpoint_every=0",
        f"launcher.run_dir={runs}",
    ]
    command = [RL_ASYNC, "launch", "--mode", mode, "--config", "sort"]
    done = subprocess.run([*command, "--name", name, *overrides], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\nthe run ended with {done.returncode}")
    metrics = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    counted = metrics[SKIPPED:]
    wall = (counted[-1]["time"] - metrics[SKIPPED - 1]["time"]) / len(counted)
    return {
        "wall_s": wall,
        "wait_s": statistics.mean(m["time/wait_batch_s"] for m in counted),
        "train_s": statistics.mean(m["time/train_s"] for m in counted),
        "sync_s": statistics.mean(m["time/sync_s"] for m in counted),
        "staleness_max": max(m["staleness/max"] for m in counted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20 + SKIPPED)
    parser.add_argument("--seconds", type=float, default=1.0, help="of generation and of training, per step")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        overlapped = run("disaggregated", 1, Path(runs), arguments)
        in_turns = run("colocated", 0, Path(runs), arguments)
    result = {
        "disaggregated_vs_ideal": overlapped["wall_s"] / arguments.seconds,
        "colocated_vs_sum": in_turns["wall_s"] / (2 * arguments.seconds),
    }
    print(f"{'mode':<15}{'s/step':>8}{'limit':>8}{'ratio':>8}{'waiting':>9}{'training':>10}{'syncing':>9}{'stale':>7}")
    for mode, row, limit, ratio in (
        ("disaggregated", overlapped, arguments.seconds, result["disaggregated_vs_ideal"]),
        ("colocated", in_turns, 2 * arguments.seconds, result["colocated_vs_sum"]),
    ):
        print(
            f"{mode:<15}{row['wall_s']:>8.3f}{limit:>8.2f}{ratio:>8.3f}{row['wait_s']:>9.3f}{row['train_s']:>10.3f}"
            f"{row['sync_s']:>9.3f}{row['staleness_max']:>7.0f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
