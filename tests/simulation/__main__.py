"""Runs many schedules of faults against the real queue on a simulated clock, network and disk.

python -m tests.simulation --schedules 10000 [--processes 2]
python -m tests.simulation --seed N      one schedule again
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.simulation.world import World, simulate_all


def main() -> int:
    """Entry point; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first schedule's seed (default: 0)")
    parser.add_argument("--seed", type=int, metavar="N", help="run this schedule alone, with a traceback")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        with tempfile.TemporaryDirectory(prefix="simulation-") as name:
            World(arguments.seed, Path(name)).run()
        print(f"schedule {arguments.seed}: every rule held")
        return 0
    began = time.monotonic()
    seeds = range(arguments.first, arguments.first + arguments.schedules)
    struck, broken = simulate_all(seeds, arguments.processes)
    for kind, count in sorted(struck.items()):
        print(f"{count:10}  {kind}")
    print(f"{len(seeds)} schedules in {time.monotonic() - began:.0f} s, {struck.total()} faults")
    for seed, rule in sorted(broken.items()):
        print(f"broken: {rule}\n    replay: python -m tests.simulation --seed {seed}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
