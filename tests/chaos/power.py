"""Cuts the power after every change that queues and a trainer make to their files: ``python -m tests.chaos.power``.

The programs run once and are recorded; the disks that a cut could have left are rebuilt from the recording, and what
was acknowledged is looked for in each. ``tests/support/power`` says what a disk may hold.
"""

import argparse
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.contracts.power import queue, redis_queue, trainer
from tests.support.power.cuts import Change, broken, build_recorder, record, states

Check = Callable[[Path, list[str]], None]
PROGRAMS: dict[str, tuple[str, list[str], Callable[[list[Change], Path], Check]]] = {
    "queue": ("tests.contracts.power.queue", ["full"], lambda c, root: queue.sqlite_promise(c, root, "full").check),
    "normal": (
        "tests.contracts.power.queue",
        ["normal"],
        lambda c, root: queue.sqlite_promise(c, root, "normal").check,
    ),
    "redis": ("tests.contracts.power.redis_queue", [], lambda c, root: partial(redis_queue.check, c, root)),
    "trainer": ("tests.contracts.power.trainer", [], lambda c, root: trainer.check),
}


def cut(name: str, folder: Path, library: Path, seed: int, points: int | None, draws: int) -> int:
    """Record a program and check its states; print what was found, and return the number of broken promises."""
    module, arguments, promise = PROGRAMS[name]
    root, began = folder / name, time.monotonic()
    changes = record(library, module, arguments, root, folder / f"{name}.log")
    found = states(changes, root, random.Random(seed), points=points, draws=draws)
    count, problems = broken(found, promise(changes, root), folder / "state", most=1000)
    kinds = Counter(change.kind for change in changes)
    print(
        f"{name}: {len(changes)} changes, {kinds['s']} of them syncs, {kinds['m']} acknowledged; {count} states in "
        f"{time.monotonic() - began:.0f} s, {len(problems)} broken"
    )
    for problem in problems[:10]:
        print(f"  {problem}")
    return len(problems)


def main() -> int:
    parser = argparse.ArgumentParser(description="Cut the power at every point of a run of the queue and the trainer.")
    parser.add_argument("programs", nargs="*", choices=[*PROGRAMS, []], help="default: all")
    parser.add_argument("--points", type=int, help="random points to cut at; default: after every change")
    parser.add_argument("--draws", type=int, default=2, help="of each kind of random state at a point")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    logging.disable(logging.WARNING)  # each state has something to say
    with tempfile.TemporaryDirectory() as folder:
        library = build_recorder(Path(folder))
        programs = arguments.programs or list(PROGRAMS)
        wrong = [
            cut(name, Path(folder), library, arguments.seed, arguments.points, arguments.draws) for name in programs
        ]
    return 1 if any(wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
