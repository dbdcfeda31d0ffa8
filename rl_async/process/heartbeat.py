"""Heartbeats of trainer ranks, read by ``rl-async doctor`` and by waiting ranks: ``RUN/ranks/RANK.json``.

The run's timeline keeps the earlier ones.
"""

import os
import socket
import time
from pathlib import Path
from typing import Literal, get_args

import msgspec

from rl_async.files import replace_file, undamaged
from rl_async.process.kernel import ENDED, GONE, HALTED, REMOTE, describe, state_of
from rl_async.process.timeline import enter

Phase = Literal[
    "starting", "waiting for a batch", "training", "meeting the ranks", "publishing", "checkpointing", "reporting"
]
PHASES: tuple[str, ...] = get_args(Phase)  # in the order of a step


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank does, and since when (Unix time). ``step`` counts from 0."""

    rank: int
    pid: int
    step: int
    phase: str
    since: float
    host: str = ""  # the machine's name

    @property
    def place(self) -> tuple[int, int]:
        """Step and phase, which compare as the progress of two ranks."""
        return self.step, PHASES.index(self.phase) if self.phase in PHASES else 0


def beat(run: Path, rank: int, step: int, phase: Phase) -> None:
    """Record the phase that this rank enters. Writes a few hundred bytes, twice."""
    folder = run / "ranks"
    folder.mkdir(exist_ok=True)
    now = Beat(rank=rank, pid=os.getpid(), step=step, phase=phase, since=time.time(), host=socket.gethostname())
    replace_file(folder / f"{rank}.json", msgspec.json.encode(now) + b"\n")
    enter(run, f"trainer-{rank}", f"trainer-{rank}", phase, step=step)


def read_beats(run: Path) -> list[Beat]:
    """Read the last heartbeat of each rank, in order of rank. Raises UserError for a damaged file."""
    found = []
    for file in (run / "ranks").glob("*.json"):
        with undamaged(file):
            found.append(msgspec.json.decode(file.read_bytes(), type=Beat))
    return sorted(found, key=lambda beat: beat.rank)


def missing_ranks(beats: list[Beat], mine: int, states: dict[int, str]) -> list[Beat]:
    """Return the ranks that probably did not arrive in the collective in which rank ``mine`` waits.

    ``states`` are process states by rank. These are the ranks that cannot run; else those that are behind; else all
    others, since a phase has several collectives.
    """
    own = next((beat for beat in beats if beat.rank == mine), None)
    others = [beat for beat in beats if beat.rank != mine]
    halted = [beat for beat in others if states.get(beat.rank, GONE) in (*HALTED, *ENDED)]
    behind = [beat for beat in others if own is not None and beat.place < own.place]
    return halted or behind or others


def who_is_missing(run: Path, mine: int, world: int) -> str:
    """Describe which of the ``world`` ranks did not arrive, and why, after a collective of rank ``mine`` failed."""
    beats = [beat for beat in read_beats(run) if beat.rank < world]  # a run may continue with fewer ranks
    states = {beat.rank: state_of(beat.pid) if beat.host == socket.gethostname() else REMOTE for beat in beats}
    return "; ".join(
        f"rank {beat.rank} (pid {beat.pid}) did not arrive: it {describe(states[beat.rank])}, "
        f"{beat.phase} of step {beat.step} for {time.time() - beat.since:.0f} s"
        for beat in missing_ranks(beats, mine, states)
    )
