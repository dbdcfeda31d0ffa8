"""One recorded trajectory as the page reads it: a line of a file in ``trajectories/``."""

import gzip
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import msgspec

from rl_async.launcher.evaluation.lines import number_of, prompt_of
from rl_async.messages import Activity, Explanation, Sampling, Turn, VersionRun
from rl_async.recording import PARTIAL

MOST_LINE = 1 << 27  # bytes of a row, several times what the longest have


class RecordedRow(msgspec.Struct, dict=True):
    """The part of a line that the page shows; other fields are skipped. Fields with defaults are not in all files."""

    task_id: str
    group_id: int
    sample: int
    reward: float
    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    versions: list[VersionRun]
    sampling: Sampling
    constrained: list[tuple[int, int]] = []
    turns: list[Turn] = []
    segment: int = 0
    role: str = ""
    attempt: int = 0
    episode_id: str = ""
    reward_parts: dict[str, float] = {}
    reward_reasons: dict[str, str] = {}
    scored: bool = True
    baseline: bool = False
    finish_reason: str = ""
    error: str = ""
    timings: dict[str, float] = {}
    ground_truth: str = ""
    data_source: str = ""
    correction: Explanation | None = None
    activities: list[Activity] = []

    @cached_property
    def sampled(self) -> list[int]:
        """The places of the sampled tokens."""
        return [*compress(range(len(self.loss_mask)), self.loss_mask)]

    @cached_property
    def constrained_places(self) -> set[int]:
        """The places of the tokens that were sampled under a grammar's mask."""
        return {place for start, end in self.constrained for place in self.sampled[start:end]}

    @property
    def explained(self) -> list[int]:
        """The places of the tokens to which ``correction`` refers: the first of a row is predicted by none."""
        return self.sampled[1:] if self.sampled[:1] == [0] else self.sampled

    @property
    def turn_reward(self) -> float:
        """The sum of the turns' own rewards."""
        return sum(turn.reward or 0.0 for turn in self.turns)

    @property
    def staleness_base(self) -> int | None:
        """The step of the oldest version that sampled a token; None if nothing was sampled."""
        return min((run.version.step for run in self.versions), default=None)

    def text(self) -> str:
        """Return everything that was said, with errors, calls and results, to be searched."""
        calls = [
            f"{call.name}\n{call.arguments}\n{call.result}\n{call.error}"
            for turn in self.turns
            for call in turn.tool_calls
        ]
        said = [turn.text for turn in self.turns]
        return "\n".join([self.error, *said, *calls, *self.reward_reasons.values(), self.ground_truth])

    def asked(self) -> int:
        """Return a number that rows share whose prompts, all turns before the policy's first, are the same."""
        return number_of(prompt_of(self.turns))

    def said_last(self, role: str) -> str:
        """Return the last turn of a role; empty if there is none."""
        return next((turn.text for turn in reversed(self.turns) if turn.role == role), "")

    def said_first(self, role: str) -> str:
        """Return the first turn of a role; empty if there is none."""
        return next((turn.text for turn in self.turns if turn.role == role), "")


class RecordedFile(NamedTuple):
    """What the name of a file in ``trajectories/`` says, such as ``step-000012-lineage0-rank0.jsonl.gz``."""

    name: str
    partition: str  # train or eval
    step: int  # that trained the rows, or of the version that was evaluated
    lineage: int  # 0 for evaluations, which name none

    @classmethod
    def of(cls, name: str) -> "RecordedFile | None":
        """Parse a name; None for a file of another kind."""
        if not name.endswith(".jsonl.gz"):
            return None
        kind, *parts = name.removesuffix(".jsonl.gz").split("-")
        if kind == "eval" and parts and parts[0].isdigit() and parts[1:] in ([], [PARTIAL]):
            return cls(name, "eval", int(parts[0]), 0)
        if kind == "step" and len(parts) == 3 and parts[0].isdigit() and parts[1].removeprefix("lineage").isdigit():
            return cls(name, "train", int(parts[0]), int(parts[1].removeprefix("lineage")))
        return None


def lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line of a file with its place in the decompressed text.

    Raises ValueError for a line of more than MOST_LINE bytes.
    """
    place = 0
    with gzip.open(file, "rb") as opened:
        while line := opened.readline(MOST_LINE + 1):
            if len(line) > MOST_LINE:
                raise ValueError(f"a line at {place} has more than {MOST_LINE} bytes")
            yield place, line
            place += len(line)


def row_at(file: Path, place: int) -> RecordedRow:
    """Read the row whose line begins at ``place`` of the decompressed text, which is decompressed up to there."""
    (row,) = rows_at(file, [place])
    return row


def rows_at(file: Path, places: Iterable[int]) -> list[RecordedRow]:
    """Read several rows of a file in one pass, in the order of their places. No line is longer than those of
    ``lines``."""
    with gzip.open(file, "rb") as opened:
        rows = []
        for place in sorted(places):
            opened.seek(place)
            rows.append(msgspec.json.decode(opened.readline(MOST_LINE + 1), type=RecordedRow))
        return rows


def rows_in(folder: Path, places: Sequence[tuple[str, int]]) -> list[RecordedRow]:
    """Read rows by file and place, each file once; return them in the order given."""
    found: dict[tuple[str, int], RecordedRow] = {}
    for file in {file for file, _ in places}:
        there = sorted({place for name, place in places if name == file})
        found.update(zip(((file, place) for place in there), rows_at(folder / file, there), strict=True))
    return [found[place] for place in places]
