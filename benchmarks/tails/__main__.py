"""Answers of which a few are very long: how close the policies come to an ideal schedule, on a simulated clock.

    python -m benchmarks.tails [--steps 30] [--train 1.0] [--json FILE]

One answer in a hundred is 20 times as long as the mean one. The queue's store, the agent worker and its pool of engines
are the real ones; engines, training and weight transfer take simulated time (``run.py``, ``engines.py``), so that the
figures do not depend on the machine's load, and each run ends in seconds. ``of ideal`` is the speed as a share of an
ideal schedule's: engines that are always full, or a trainer that never waits, whichever is slower. The answers' lengths
are the same for all rows.

Rows ``drained`` are for comparison: there engines finish what runs before each weight update, as synchronous systems
do, where ours continue partial answers with the new weights.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.tails.run import Arm, Outcome, simulate

BOUNDS = (1, 2, 4)
POLICIES = ("wait", "drop", "mask")
CONCURRENCY = (64, 128, 160, 192, 256, 512, 1024)
COLUMNS = ("of ideal", "trainer idle", "engines idle", "staleness", "oldest", "masked", "long", "wasted", "in flight")


def name_of(arm: Arm) -> str:
    """What identifies a row."""
    drained = ", drained" if arm.drained else ""
    return f"{arm.on_straggler}{drained}, staleness {arm.max_staleness}, concurrency {arm.concurrency}"


def arms() -> list[Arm]:
    """All rows: policies by bound, and then what concurrency does to the one that loses nothing."""
    policies = [Arm(bound, policy) for bound in BOUNDS for policy in POLICIES]
    drained = [Arm(bound, "wait", drained=True) for bound in BOUNDS]
    return policies + drained + [Arm(bound, "wait", concurrency) for bound in BOUNDS for concurrency in CONCURRENCY]


def figures(outcome: Outcome, ideal_s: float) -> dict[str, float]:
    """A row's numbers by column."""
    return dict(zip(COLUMNS, (ideal_s / outcome.seconds_per_step, *outcome[1:]), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each run (default: 30)")
    parser.add_argument("--train", type=float, default=1.0, help="of a step, in times that full engines need for one")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    print(f"{'':44}" + "".join(f"{column:>14}" for column in COLUMNS))
    with ProcessPoolExecutor() as processes:
        rows = [(arm, processes.submit(simulate, arm, arguments.steps, arguments.train)) for arm in arms()]
        for arm, row in rows:
            found[name_of(arm)] = numbers = figures(*row.result())
            print(f"{name_of(arm):44}" + "".join(f"{number:14.3f}" for number in numbers.values()), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
