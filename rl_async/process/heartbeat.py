"""Where a trainer rank stands, for ``rl-async doctor`` and for the ranks that wait for it: ``RUN/ranks/RANK.json``."""

import os
import socket
import time
from pathlib import Path
from typing import Literal, get_args

import msgspec

from rl_async.files import replace_file
from rl_async.process.kernel import AFAR, ENDED, GONE, HALTED, describe, state_of

Phase = Literal[
    "starting", "waiting for a batch", "training", "meeting the ranks", "publishing", "checkpointing", "reporting"
]
PHASES: tuple[str, ...] = get_args(Phase)  # in the order of a step


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: what it has been doing, and since when (Unix time). ``step`` counts from 0."""

    rank: int
    pid: int
    step: int
    phase: str
    since: float
    host: str = ""  # the machine's name

    @property
    def place(self) -> tuple[int, int]:
        """Grows as a run goes on, so that ranks can be compared."""
        return self.step, PHASES.index(self.phase) if self.phase in PHASES else 0


def beat(run: Path, rank: int, step: int, phase: Phase) -> None:
    """Say where this rank is from now on. A few hundred bytes, replaced in one step."""
    folder = run / "ranks"
    folder.mkdir(exist_ok=True)
    said = Beat(rank=rank, pid=os.getpid(), step=step, phase=phase, since=time.time(), host=socket.gethostname())
    replace_file(folder / f"{rank}.json", msgspec.json.encode(said) + b"\n")


def read_beats(run: Path) -> list[Beat]:
    """What each rank said last, by rank."""
    found = [msgspec.json.decode(file.read_bytes(), type=Beat) for file in (run / "ranks").glob("*.json")]
    return sorted(found, key=lambda said: said.rank)


def missing_ranks(beats: list[Beat], mine: int, states: dict[int, str]) -> list[Beat]:
    """Of the ranks that rank ``mine`` waits for in a collective, those that did not arrive, as far as can be told.

    ``states`` are process states by rank. Those that cannot run are to blame; else those that are behind; else all
    others, since a phase has several collectives.
    """
    own = next((said for said in beats if said.rank == mine), None)
    others = [said for said in beats if said.rank != mine]
    halted = [said for said in others if states.get(said.rank, GONE) in (*HALTED, *ENDED)]
    behind = [said for said in others if own is not None and said.place < own.place]
    return halted or behind or others


def who_is_missing(run: Path, mine: int, world: int) -> str:
    """For the error of a rank whose collective failed: which of the ``world`` ranks did not arrive, and why."""
    beats = [said for said in read_beats(run) if said.rank < world]  # a run may go on with fewer
    states = {said.rank: state_of(said.pid) if said.host == socket.gethostname() else AFAR for said in beats}
    return "; ".join(
        f"rank {said.rank} (pid {said.pid}) did not arrive: it {describe(states[said.rank])}, "
        f"{said.phase} of step {said.step} for {time.time() - said.since:.0f} s"
        for said in missing_ranks(beats, mine, states)
    )
