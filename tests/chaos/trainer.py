"""Kills a random rank of a two-rank trainer at random moments, round after round.

Real processes train on recorded trajectories, with a checkpoint after every step, so that most kills strike one that is
being written. After a kill both ranks start again with ``--resume``. In the end the groups that were trained, in their
order, and all weights must be those of a run that nobody disturbed, bit for bit.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

from rl_async.configs.load import dump
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import DebugConfig, RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.recording import write_trajectories
from tests.conftest import make_model, make_rows
from tests.support.forked import Forked, start_ranks

RANKS = 2
STEPS_PER_ROUND = 6
STRIKE_S = 1.5  # at most, from the first step of a trainer to the kill
EARLY = 0.25  # share of kills while a trainer starts
EARLY_S = 3.0
END_S = 300.0


def start(run: Path, *more: str) -> list[Forked]:
    """Both ranks."""
    arguments = ["--run", str(run), "--replay", str(run.parent), *more]
    return start_ranks("rl_async.trainer", *arguments, ranks=RANKS, logs=run)


def lines(path: Path) -> int:
    """How many whole lines there are."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def strike(run: Path, ranks: list[Forked], rng: random.Random) -> bool:
    """Kill one rank at its moment, and end the others as the launcher does; False: the run was over before."""
    before, deadline = lines(run / "metrics.jsonl"), time.monotonic() + END_S
    early = rng.random() < EARLY
    while not early and lines(run / "metrics.jsonl") == before and all(rank.poll() is None for rank in ranks):
        if time.monotonic() > deadline:
            sys.exit(f"no step was trained within {END_S:.0f} s; see {run}")
        time.sleep(0.01)
    time.sleep(rng.random() * (EARLY_S if early else STRIKE_S))
    victim = rng.choice(ranks)
    struck = victim.poll() is None
    victim.kill()
    time.sleep(rng.random())  # in which the others notice, or go on writing
    for rank in ranks:
        rank.kill()
    codes = [rank.wait(END_S) for rank in ranks]
    allowed = {0, -signal.SIGKILL, 1}  # 1: lost the other rank
    if not set(codes) <= allowed:
        sys.exit(f"the ranks ended with {codes}; see {run}")
    return struck


def finish(run: Path, ranks: list[Forked]) -> None:
    """Wait for a good end, for as long as steps are trained."""
    trained_before, since = 0, time.monotonic()
    try:
        while any(rank.poll() is None for rank in ranks):
            time.sleep(0.1)
            if (count := lines(run / "metrics.jsonl")) > trained_before:
                trained_before, since = count, time.monotonic()
            if time.monotonic() - since > END_S:
                sys.exit(f"after {count} steps none was trained within {END_S:.0f} s; see {run}")
    finally:
        for rank in ranks:
            rank.kill()
    codes = [rank.wait(END_S) for rank in ranks]
    if any(codes):
        sys.exit(f"the ranks ended with {codes}; see {run}")


def trained(run: Path) -> dict[int, list[tuple[int, int, str]]]:
    """Groups, samples and hashes of the tokens by step, of the newest lineage that trained the step."""
    steps: dict[int, dict[int, list[tuple[int, int, str]]]] = {}
    for line in (run / "trained.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows = steps.setdefault(row["step"], {}).setdefault(row["lineage"], [])
        rows.append((row["group"], row["sample"], row["tokens_hash"]))
    return {step: sorted(lineages[max(lineages)]) for step, lineages in sorted(steps.items())}


def compare(undisturbed: Path, disturbed: Path, steps: int) -> int:
    """End the program if the two differ; returns how many tensors were compared."""
    if trained(undisturbed) != trained(disturbed):
        sys.exit(f"other groups were trained; see {undisturbed} and {disturbed}")
    last = Path("checkpoints") / f"step-{steps:06d}"
    files = sorted(path.relative_to(undisturbed / last) for path in (undisturbed / last).rglob("*.safetensors"))
    compared = 0
    for file in files:
        one, two = load_file(undisturbed / last / file), load_file(disturbed / last / file)
        unequal = [name for name in one if name not in two or not one[name].equal(two[name])]
        if unequal or one.keys() != two.keys():
            sys.exit(f"{file} differs in {unequal[:3]}; see {undisturbed} and {disturbed}")
        compared += len(one)
    return compared


def main() -> int:
    """Round after round; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.trainer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="kills in all (default: 3)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, began = random.Random(arguments.seed), time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="chaos-trainer-"))
    steps = STEPS_PER_ROUND * (arguments.rounds + 1)
    for step in range(steps):
        write_trajectories(home / "trajectories" / f"step-{step:06d}-lineage0-rank0.jsonl.gz", make_rows(step))
    config = RunConfig(
        model=ModelConfig(path=str(make_model(home / "model")), dtype="float32"),
        data=DataConfig(path="none"),
        trainer=TrainerConfig(ranks=RANKS, steps=steps, checkpoint_every=1, learning_rate=1e-3),
        debug=DebugConfig(min_train_s=0.3),
    )
    undisturbed, disturbed = home / "undisturbed", home / "disturbed"
    for run in (undisturbed, disturbed):
        run.mkdir()
        (run / "config.yaml").write_text(dump(config))
    finish(undisturbed, start(undisturbed))
    ranks = start(disturbed)
    struck = halfway = 0
    try:
        while struck < arguments.rounds and strike(disturbed, ranks, rng):
            struck += 1
            halfway += any((disturbed / "checkpoints").glob(".step-*"))
            ranks = start(disturbed, "--resume")
        finish(disturbed, ranks)
    finally:
        for rank in ranks:
            rank.kill()
    if struck < arguments.rounds:
        sys.exit(f"the run was over after {struck} kills; see {home}")
    compared = compare(undisturbed, disturbed, steps)
    print(
        f"{struck} kills in {time.monotonic() - began:.0f} s, {halfway} of them in the middle of a checkpoint: {steps} "
        f"steps of the same groups, {compared} tensors identical to those of an undisturbed run; files: {home}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
