"""Strikes whole runs at random moments, on every role, the launcher and Redis included.

A run has two engines, two agent workers or a gateway with an agent program, two trainer ranks, two payload shards and a
queue that journals to a Redis server; half of the runs have a network namespace for each process. Processes are killed
and frozen, for moments, for as long as others wait for them, for most of each second, and all at once; their wall
clocks jump, their flushes take seconds, packets to and from them are lost or late, the disks of the run folder and of
Redis are full, a judge's answers come byte by byte, proxies before an engine and Redis delay, hold and cut what passes,
Redis is replaced by its replica, and processes get no more memory. Faults strike until a run has trained all its steps;
a launcher that was killed, or ended for want of room on a disk or of memory for the trainer, is started again with
``--resume``. Then the run's history must hold (``history.py``), and ``rl-async audit`` must agree. More runs follow
until all rounds have struck.

With ``--timed`` an undisturbed run of each kind comes first, and one with faults, which must all be slow ones, may last
twice as long and as long as the faults did. What ``rl-async doctor`` says during each long fault is printed.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain, cycle
from pathlib import Path
from typing import NamedTuple

from rl_async.errors import EXIT_USER
from rl_async.transfer_queue.ledger import OR_GIVEN_UP, TRAINED_ONCE
from tests.chaos.history import problems
from tests.chaos.host.isolation import NEEDED, install, is_isolated, run_isolated, why_not_isolated
from tests.chaos.host.whole_run import EXPECTED, KINDS, ROOT, SLOW, Clocks, Fault, Kind, WholeRun

PROGRESS_S = 300.0  # within which a step must be trained, whatever happens, unless told otherwise
BETWEEN_S = 2.0  # at most, from one fault to the next
RUNS_IN_VAIN = 3  # at most, in a row, that end before a fault strikes
STORM = 12  # faults at most between two steps, so that most strike a run that works
NEED_NAMESPACES = ("loss", "delay", "full")
NO_NAMESPACES = tuple(kind for kind in KINDS if kind not in NEED_NAMESPACES)
# Doctor is asked about faults that last as long as this.
LONG_S = 4.0
CLI = (sys.executable, "-m", "rl_async.launcher.cli")
RUN_KINDS = (Kind(True, True), Kind(False, True), Kind(True, False), Kind(False, False))  # in turn


class Struck(NamedTuple):
    """What struck a run that ended well, for how long, and how long the run was."""

    faults: list[Fault]
    faults_s: float
    run_s: float


def one_run(run: WholeRun, faults: list[Fault], rng: random.Random, progress_s: float, *, timed: bool) -> Struck:
    """Run to the end, striking one fault after the other. Ends the program on a problem."""
    struck: list[Fault] = []
    faults_s = 0.0
    before, since, next_fault, in_a_row = 0, (began := time.monotonic()), 0.0, 0
    while (code := run.exit()) != 0:
        if code is not None and (kind := run.lacked(struck)):
            print(f"{run.name} {time.monotonic() - began:6.1f} s: its launcher ended ({kind}); resumed")
            run.resume()
        elif code == EXIT_USER and run.trained_all():
            break  # its launcher was killed after the last checkpoint and before its end, which --resume refuses
        elif code is not None:
            sys.exit(f"{run.name} ended with {code} after {struck[-3:]}; see {run.log}")
        run.tend()
        time.sleep(0.05)
        if (steps := run.steps()) > before:
            before, since, in_a_row = steps, time.monotonic(), 0
        if time.monotonic() - since > progress_s:
            sys.exit(f"{run.name}: no step was trained within {progress_s:.0f} s, after {struck[-3:]}")
        if len(struck) == len(faults) or in_a_row == STORM or time.monotonic() < next_fault or not run.saved():
            continue
        fault = faults[len(struck)]
        at_s = time.monotonic() - began
        doctor = subprocess.Popen([*CLI, "doctor", run.folder], stdout=subprocess.PIPE, text=True) if timed else None
        if run.strike(fault, rng):
            struck.append(fault)
            in_a_row += 1
            faults_s += (lasted := time.monotonic() - began - at_s)
            print(f"{run.name} {at_s:6.1f} s, step {steps}: {fault.kind} {fault.role} {lasted:.1f} s", flush=True)
            if doctor is not None and lasted > LONG_S:
                print(f"  doctor: {doctor.communicate()[0].rpartition('verdict: ')[2].strip()}", flush=True)
        if doctor is not None:
            doctor.kill()
            doctor.wait()
        next_fault = time.monotonic() + rng.random() * BETWEEN_S
    run_s = time.monotonic() - began
    check(run)
    return Struck(struck, faults_s, run_s)


def check(run: WholeRun) -> None:
    """End the program if the history of a run does not hold."""
    found = problems(run.folder, run.expected)
    audited = subprocess.run(
        [*CLI, "audit", str(run.folder)], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    verdicts = [f"{TRAINED_ONCE}{end}\n" for end in ("", OR_GIVEN_UP)]
    if run.exit() != 0:  # its launcher was killed in the last moment, perhaps before the queue heard of the end
        verdicts.append(", and 0 groups are in flight")
    if audited.returncode != 0 or not any(verdict in audited.stdout for verdict in verdicts):
        found.append(f"audit: {audited.stdout}{audited.stderr}")
    if found:
        sys.exit(f"{run.name}: " + "\n".join(found[:20]))


def all_faults(rounds: int, kinds: list[str], rng: random.Random) -> list[Fault]:
    """Return every kind equally often, in turn, and of each kind every role equally often, in random order."""
    faults: list[Fault] = []
    decks: dict[str, list[str]] = {kind: [] for kind in kinds}
    while len(faults) < rounds:
        for kind in kinds:
            decks[kind] = decks[kind] or rng.sample(KINDS[kind], len(KINDS[kind]))
            faults.append(Fault(decks[kind].pop(), kind))
    return faults[:rounds]


def all_runs(
    rounds: int, kinds: list[str], steps: int, rng: random.Random, *, progress_s: float, isolated: bool, timed: bool
) -> int:
    """Runs one after the other until all rounds have struck; return the exit code."""
    began, home = time.monotonic(), Path(tempfile.mkdtemp(prefix="chaos-run-"))
    clocks, expected = Clocks(home / "clocks"), EXPECTED._replace(steps=steps)
    run_kinds: Iterator[Kind] = cycle(kind if isolated else Kind(kind.gateway, False, False) for kind in RUN_KINDS)
    left = all_faults(rounds, kinds, rng)
    struck, runs, in_vain = Counter[Fault](), 0, 0
    # One run has room for one fault of each kind; more rounds strike at least two kinds of runs.
    most = rounds if rounds <= len(kinds) else -(-rounds // 2)
    undisturbed_s: dict[Kind, float] = {}
    while left:
        kind = next(kind for kind in run_kinds if any(map(kind.allows, left)))
        alone = timed and kind not in undisturbed_s
        run = WholeRun(home, f"run-{runs}", kind, expected, clocks)
        try:
            faults = [] if alone else [fault for fault in left if kind.allows(fault)][:most]
            done, faults_s, run_s = one_run(run, faults, rng, progress_s, timed=timed)
        except BaseException:
            run.stop()
            print(f"what it left: {run.keep()}", file=sys.stderr)
            raise
        run.stop()
        run.close()
        runs += 1
        if alone:
            undisturbed_s[kind] = run_s
            run_kinds = chain([kind], run_kinds)
            print(f"run {runs} ({kind}): {run_s:.1f} s undisturbed", flush=True)
            continue
        if timed and run_s > (most_s := 2 * undisturbed_s[kind] + faults_s):
            sys.exit(f"{run.name} took {run_s:.1f} s with {faults_s:.1f} s of faults, more than {most_s:.1f} s")
        in_vain = 0 if done else in_vain + 1
        if in_vain == RUNS_IN_VAIN:
            sys.exit(f"{run.name}, too, ended before any fault struck; see {run.log}")
        struck.update(done)
        for fault in done:
            left.remove(fault)
        print(
            f"run {runs} ({kind}): {run_s:.1f} s, {len(done)} faults of {faults_s:.1f} s; {len(left)} to go", flush=True
        )
    report(struck)
    print(f"{struck.total()} faults in {runs} runs and {time.monotonic() - began:.0f} s: nothing lost, doubled or hung")
    return 0


def main() -> int:
    """Run until all rounds have struck; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="faults in all (default: 20)")
    parser.add_argument("--steps", type=int, default=EXPECTED.steps, metavar="N", help="trainer steps of each run")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help="only these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--progress", type=float, default=PROGRESS_S, metavar="S", help="time for a step (default: %(default)g)"
    )
    parser.add_argument("--timed", action="store_true", help="compare with undisturbed runs, and ask doctor")
    arguments = parser.parse_args()
    if arguments.timed and (fast := [kind for kind in arguments.kinds if kind not in SLOW]):
        parser.error(f"--timed: runs may last as they must after {', '.join(fast)}; give --kinds of {', '.join(SLOW)}")
    if missing := install(NEEDED):
        sys.exit(missing)
    if not (isolated := is_isolated()):
        reason = why_not_isolated()
        if not reason:
            run_isolated("tests.chaos.run", sys.argv[1:])
        print(f"without namespaces, so no lost packets and no full disk: {reason}", flush=True)
    kinds = [kind for kind in arguments.kinds if isolated or kind in NO_NAMESPACES]
    rng, progress_s = random.Random(arguments.seed), arguments.progress
    return all_runs(
        arguments.rounds,
        kinds,
        arguments.steps,
        rng,
        progress_s=progress_s,
        isolated=isolated,
        timed=arguments.timed,
    )


def report(struck: Counter[Fault]) -> None:
    """Print how often what struck whom."""
    for role in sorted({role for roles in KINDS.values() for role in roles}):
        print(f"{role:14}" + "".join(f"{kind:>8} {struck[Fault(role, kind)]:3}" for kind in KINDS))


if __name__ == "__main__":
    sys.exit(main())
