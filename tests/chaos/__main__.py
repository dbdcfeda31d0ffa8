"""Kills, freezes and slows engines at every phase of a sync and of a request, in real runs: see
``python -m tests.chaos -h``.

A round is one fault in one engine. Runs go on until every round's fault has struck; each must end well, with no group
lost or trained twice (``rl-async audit``) and no sync longer than twice its deadline. The runs are on-policy, so that
the trainer's log-probabilities must be those of the engines on every token, also where one engine went on with what
another had begun.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from rl_async.launcher.cli.__main__ import main as rl_async
from rl_async.launcher.plan import machine
from rl_async.launcher.plan.planning import ProcessSpec
from tests.chaos.faults import FOLDER, KINDS
from tests.support import forked_launcher
from tests.support.forked import Forked

ROOT = Path(__file__).resolve().parents[2]
BUCKETS = 4  # at least, per sync
PHASES = {  # name: (path, the how-manieth in a sync, requests of it per sync, when)
    "probe": ("/weight_info", 1, 2, "before"),
    "init": ("/init_weight_transfer_engine", 1, 1, "before"),
    "init, met": ("/init_weight_transfer_engine", 1, 1, "after"),
    "pause": ("/pause", 1, 1, "before"),
    "paused": ("/pause", 1, 1, "after"),
    "start": ("/start_weight_update", 1, 1, "before"),
    "first bucket": ("/update_weights", 1, BUCKETS, "before"),
    "a bucket, loaded": ("/update_weights", 2, BUCKETS, "after"),
    "last bucket": ("/update_weights", BUCKETS, BUCKETS, "before"),
    "finish": ("/finish_weight_update", 1, 1, "before"),
    "finished": ("/finish_weight_update", 1, 1, "after"),
    "verify": ("/weight_info", 2, 2, "before"),
    "resume": ("/resume", 1, 1, "before"),
    "resumed": ("/resume", 1, 1, "after"),
    "request": ("/inference/v1/generate", 9, 0, "before"),
    "request, half answered": ("/inference/v1/generate", 5, 0, "during"),
    "request, answered": ("/inference/v1/generate", 7, 0, "after"),
}
SYNC_S = 40  # deadline of an update of all engines; those that another kept waiting have it once more
RUN_S = 900
AGREE = 1e-4  # largest difference of a log-probability, float32
KEPT = re.compile(r"request \S+: .* after ([1-9]\d*) tokens")  # a worker's line on a request that lost its engine
ONCE = ("init", "init, met")  # in the life of an engine, unless others die
SMALL = [
    *(
        "data.train_batch_groups=4",
        "rollout.group_size=4",
        "trainer.checkpoint_every=5",
        "eval.every=0",
        "eval.tasks=4",
    ),
    *(
        "queue.lease_s=10",
        "warm_start.min_steps=1",
        "warm_start.max_steps=2",
        "warm_start.check_every=1",
        "warm_start.gate=0",
    ),
    *(
        "launcher.stop_timeout_s=5",
        "launcher.max_restarts=1000",
        "debug.min_train_s=0.3",
        "rollout.request_timeout_s=20",
    ),
    *("weight_sync.bucket_bytes=100000", "queue.max_attempts=1000", "queue.max_staleness=0"),
    f"weight_sync.sync_timeout_s={SYNC_S}",
]
SYNC_TIMEOUT_S = {"embedded": 6, "vllm": 15}  # of each request of a sync


def faults(rounds: int, only: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every phase with every kind, shuffled, in the first, the second or the third sync of an engine."""
    kinds = list(itertools.product(only, PHASES))
    random.Random(0).shuffle(kinds)
    for number in range(rounds):
        kind, name = kinds[number % len(kinds)]
        path, nth, per_sync, when = PHASES[name]
        later = 0 if name in ONCE else number % 3
        yield {"phase": name, "kind": kind, "path": path, "nth": nth + later * per_sync, "when": when}


def chaotic(spec: ProcessSpec, folder: Path) -> ProcessSpec:
    """The same engine with the middleware."""
    env = {**spec.env, FOLDER: str(folder), "PYTHONPATH": str(ROOT)}
    if spec.engine_kind == "vllm":
        argv = (*spec.argv, "--middleware", "tests.chaos.faults.Faulty")
    else:
        module = spec.argv.index("rl_async.rollout_server")
        argv = (*spec.argv[:module], "tests.chaos.engine", *spec.argv[module + 1 :])
    return dataclasses.replace(spec, argv=argv, env=env)


def launch(folder: Path, arguments: list[str]) -> int:
    """``rl-async launch`` with chaotic engines; its roles are forked."""
    planned = machine.plan

    def plan(*args: Any, **named: Any) -> Any:
        made = planned(*args, **named)
        return dataclasses.replace(made, engines=tuple(chaotic(spec, folder) for spec in made.engines))

    with patch.object(machine, "plan", plan), patch.object(asyncio, "create_subprocess_exec", forked_launcher.start):
        return rl_async(["launch", *arguments])


class Finished(NamedTuple):
    """A run that ended well."""

    steps: int
    longest_sync_s: float  # without the time in which no engine was alive
    longest_wait_s: float  # for an engine, when all had died
    largest_difference: float  # of a log-probability, trainer against engines
    kept: list[int]  # tokens of each answer that was continued elsewhere


def one_run(home: Path, name: str, arguments: argparse.Namespace) -> Finished:
    """A run in ``home``. Ends the program if anything was wrong with it."""
    kinds = "[vllm, vllm]" if arguments.engine == "vllm" else "embedded"
    engines = 2 if arguments.engine == "vllm" else 3
    words = [
        *("--mode", "disaggregated", "--config", "calculator", "--name", name, *SMALL),
        *(f"rollout.engine={kinds}", f"rollout.engines={engines}"),
        *(f"trainer.steps={arguments.steps}", f"weight_sync.timeout_s={SYNC_TIMEOUT_S[arguments.engine]}"),
    ]
    if arguments.python:
        words.append(f"rollout.python={arguments.python}")
    launcher = Forked("tests.chaos", "--as-launcher", str(home / "faults"), *words, cwd=home, parent=True)
    try:
        output, errors = launcher.communicate(RUN_S)
    finally:
        launcher.kill()
    if launcher.returncode != 0:
        sys.exit(f"{name} ended with {launcher.returncode}:\n{output[-3000:]}\n{errors[-3000:]}\nsee {home}")
    audit = [sys.executable, "-m", "rl_async.launcher.cli", "audit", f"runs/{name}"]
    checked = subprocess.run(audit, cwd=home, capture_output=True, text=True, timeout=RUN_S)
    if checked.returncode != 0 or "ok: every admitted group" not in checked.stdout:  # "ok so far" exits with 0 as well
        sys.exit(f"{name}: {checked.stdout}{checked.stderr}\nsee {home}")
    steps = [json.loads(line) for line in (home / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    longest = max(step["sync/total_s"] - step["sync/without_engines_s"] for step in steps)
    if longest > 2 * SYNC_S:
        sys.exit(f"{name}: a sync took {longest:.1f} s, longer than twice its deadline of {SYNC_S} s; see {home}")
    apart = max(step["correction/logprob_diff_max"] for step in steps)
    if apart > AGREE:
        sys.exit(f"{name}: log-probabilities of trainer and engines differ by up to {apart:.2g}; see {home}")
    log = (home / "runs" / name / "logs" / "worker-0.log").read_text()
    waited = max(step["sync/without_engines_s"] for step in steps)
    return Finished(len(steps), longest, waited, apart, [int(count) for count in KEPT.findall(log)])


def main() -> int:
    """Runs until all rounds have struck; the exit code."""
    if sys.argv[1:2] == ["--as-launcher"]:
        return launch(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="faults in all (default: 5)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help="only these")
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--python", default="", help="for vLLM: its Python, as rollout.python")
    parser.add_argument("--steps", type=int, default=25, metavar="N", help="trainer steps per run (default: 25)")
    arguments = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="chaos-"))
    (home / "faults").mkdir()
    for number, fault in enumerate(faults(arguments.rounds, arguments.kinds)):
        (home / "faults" / f"{number:04d}.queued").write_text(json.dumps(fault))
    runs: list[Finished] = []
    while any((home / "faults").glob("*.queued")):
        if len(runs) > arguments.rounds:
            sys.exit(f"after {len(runs)} runs some faults have not struck; see {home}/faults")
        runs.append(one_run(home, f"run-{len(runs)}", arguments))
        fired = len(list((home / "faults").glob("*.fired")))
        ended = runs[-1]
        print(
            f"run {len(runs)}: ended well, {ended.steps} steps, longest sync {ended.longest_sync_s:.1f} s, "
            f"log-probabilities within {ended.largest_difference:.1e}; {fired} faults so far",
            flush=True,
        )
        for taken in (home / "faults").glob("*.taken"):  # the run was over before its moment came
            taken.rename(taken.with_suffix(".queued"))
    struck: Counter[tuple[str, str]] = Counter()
    for file in (home / "faults").glob("*.fired"):
        fault = json.loads(file.read_text())
        struck[fault["phase"], fault["kind"]] += 1
    print(f"\n{'struck at':24}" + "".join(f"{kind:>8}" for kind in KINDS))
    for phase in PHASES:
        print(f"{phase:24}" + "".join(f"{struck[phase, kind]:8}" for kind in KINDS))
    kept = [count for run in runs for count in run.kept]
    print(
        f"\n{struck.total()} faults in {len(runs)} runs, {sum(run.steps for run in runs)} steps; every run ended well, "
        f"no group was lost or trained twice\n"
        f"longest sync {max(run.longest_sync_s for run in runs):.1f} s of {2 * SYNC_S}, longest wait for an engine "
        f"when none was left {max(run.longest_wait_s for run in runs):.1f} s; log-probabilities of trainer and "
        f"engines within {max(run.largest_difference for run in runs):.1e}\n"
        f"{len(kept)} answers were continued elsewhere with the {sum(kept)} tokens that they had; run folders: {home}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
