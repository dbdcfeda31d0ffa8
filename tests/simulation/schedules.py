"""Many schedules, on one process or on several."""

import logging
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from tests.simulation.rules import Broken
from tests.simulation.world import World

_CHUNK = 50
_SHARED_MEMORY = Path("/dev/shm")  # ledgers are written there where it is


class Outcome(NamedTuple):
    """Of some schedules: how often what struck, and what broke by seed."""

    struck: Counter[str]
    broken: dict[int, str]


def simulate(seeds: Sequence[int]) -> Outcome:
    """Run these schedules."""
    struck: Counter[str] = Counter()
    broken: dict[int, str] = {}
    folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="simulation-", dir=folder) as name:
        for seed in seeds:
            world = World(seed, Path(name))
            try:
                world.run()
            except Broken as error:
                broken[seed] = str(error)
            except Exception as error:  # whatever it is, it is told with its seed, and the program fails
                broken[seed] = f"{type(error).__name__}: {error}"
            struck += world.struck
    return Outcome(struck, broken)


def simulate_all(seeds: Sequence[int], processes: int) -> Outcome:
    """Run these schedules on some processes."""
    chunks = [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]
    if processes == 1:
        outcomes = [simulate(chunk) for chunk in chunks]
    else:
        quiet = (logging.WARNING,)  # what the queue says of its slow disk
        with ProcessPoolExecutor(processes, get_context("spawn"), logging.disable, quiet) as pool:
            outcomes = list(pool.map(simulate, chunks))
    struck: Counter[str] = Counter()
    broken: dict[int, str] = {}
    for outcome in outcomes:
        struck += outcome.struck
        broken |= outcome.broken
    return Outcome(struck, broken)
