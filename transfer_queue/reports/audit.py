"""Compares what the trainer fetched and trained with what the queue had admitted (``ledger.jsonl``).

A correct run trained every admitted group exactly once, with all rows of all its samples, on the tokens that its
worker had sampled, in the step that the queue had reserved it for (``trained.jsonl``). Each rank compares the rows that
it fetches with what their producers announced; one that differs is in ``refused.jsonl`` and must have been trained in a
later lineage. After a resume, what an older lineage trained beyond the checkpoint does not count.
``python -m rl_async.transfer_queue.reports.audit RUN`` exits with 1 if the run is not correct.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from rl_async.errors import DataError, UserError
from rl_async.undecodable import UNDECODABLE

SHOWN = 20  # violations printed
TRAINED_ONCE, OR_GIVEN_UP = "ok: every admitted group was trained exactly once", " or given up"
T = TypeVar("T")


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True):
    """Any line of the ledger; which fields count depends on ``event``."""

    event: str
    group: int = -1
    partition: str = ""
    samples: int = 0
    stored: list[tuple[int, int, list[str]]] = []  # (group, sample, hashes of its tokens by segment)
    sample: int = -1  # in ledgers of older versions, which had a line for each sample
    tokens_sha256: list[str] = []  # of that, by segment
    step: int = -1
    groups: list[int] = []
    lineage: int = 0
    fresh: bool = False
    next_group: int = 0
    readmitted: list[int] = []
    left: list[int] = []  # groups that the queue still held when the run ended
    rows: list[tuple[int, int]] = []  # (group, sample), lost with a payload shard


class TrainedLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``trained.jsonl``: a row that was trained."""

    lineage: int
    step: int
    group: int
    sample: int
    segment: int = 0
    tokens_hash: str = ""
    tokens_sha256: str = ""  # in files of older versions, in its place

    @property
    def digest(self) -> str:
        """The hash of the row's tokens, of the kind that the ledger of its time has."""
        return self.tokens_hash or self.tokens_sha256


class RefusedLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``refused.jsonl``: a row that came to a rank with other tokens than were put."""

    lineage: int
    step: int
    group: int
    sample: int
    segment: int
    rank: int


Rows = dict[tuple[int, int, int], list[TrainedLine]]  # by (group, sample, segment)


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the comparison; ``violations`` are sentences for people."""

    admitted: int  # training groups
    given_up: int  # of these, dropped or dead-lettered
    trained: int  # of these, trained at least once
    rows: int  # trained, after the cut
    cut: int  # rows of older lineages beyond their checkpoint
    violations: list[str]
    left: int = 0  # groups for steps that the run no longer had when it ended
    refused: int = 0  # rows that came to the trainer changed, and were trained later as they had been put
    in_flight: int | None = None  # groups still to be trained by a run that has not finished; None: it has

    @property
    def ok(self) -> bool:
        """Whether every admitted group was trained exactly once, on the tokens that were sampled, or given up."""
        return not self.violations

    def text(self) -> str:
        """The report as lines for people to read."""
        lines = [
            f"{self.admitted} groups admitted, {self.given_up} given up, {self.trained} trained with {self.rows} rows"
            + (f" ({self.cut} rows were trained again after a resume and are counted once)" if self.cut else "")
        ]
        if self.refused:
            lines.append(
                f"{self.refused} rows came to the trainer with other tokens than were put, were refused, and were "
                "trained later as they had been put (refused.jsonl)"
            )
        lines += [f"violation: {violation}" for violation in self.violations[:SHOWN]]
        if len(self.violations) > SHOWN:
            lines.append(f"... and {len(self.violations) - SHOWN} more violations")
        once = TRAINED_ONCE + (OR_GIVEN_UP if self.given_up else "")
        if self.violations:
            lines.append("FAILED")
        elif self.in_flight is not None:
            lines.append(
                "ok so far: nothing was trained twice; the run has not finished, and "
                f"{self.in_flight} groups are in flight or wait for --resume"
            )
        elif self.left:
            lines.append(
                f"{once}, but {self.left} that were left over "
                "when the run ended, because it was resumed with fewer trainer.steps; --resume with more trains them"
            )
        else:
            lines.append(once)
        return "\n".join(lines)


class Admissions:
    """What the ledger says in the end, line by line."""

    def __init__(self) -> None:
        self.groups: dict[int, int] = {}  # samples by group
        self.given_up: set[int] = set()
        self.tokens: dict[tuple[int, int], list[str]] = {}  # hash of each row put last, by (group, sample)
        self.lost: dict[tuple[int, int], list[list[str]]] = defaultdict(list)  # of rows that a shard took with it
        self.batches: dict[int, set[int]] = {}  # groups by step
        self.resumes: list[tuple[int, int]] = []  # (lineage, step)
        self._admits = False  # since the last resume; a run with more groups than it needs admits none
        self.finished = False
        self.left: set[int] = set()  # over at the end, because a resume wanted fewer steps

    def read(self, line: LedgerLine) -> None:
        """Apply one line of the ledger."""
        match line.event:
            case "admit" if line.partition == "train":
                self.groups[line.group] = line.samples
                self._admits = True
            case "put":
                for group, sample, hashes in line.stored or [(line.group, line.sample, line.tokens_sha256)]:
                    self.tokens[group, sample] = hashes
            case "lost":
                for group, sample in line.rows:  # the trainer may have read them before
                    self.lost[group, sample].append(self.tokens.pop((group, sample), []))
            case "drop" | "dead_letter":
                self.given_up.add(line.group)
            case "reserve":
                self.batches[line.step] = set(line.groups)
            case "resume":
                self._resume(line)
            case "finish":
                self.finished = True
                self.left = set() if self._admits else set(line.left)

    def _resume(self, line: LedgerLine) -> None:
        self.resumes.append((line.lineage, line.step))
        self.finished, self.left = False, set()
        self._admits = False
        self.batches = {step: groups for step, groups in self.batches.items() if step < line.step}
        if line.fresh:  # another queue took over: what the old one did after the checkpoint is void
            self.groups = {group: n for group, n in self.groups.items() if group < line.next_group}
            self.given_up = {g for g in self.given_up if g < line.next_group and g not in line.readmitted}

    def sampled(self, group: int, sample: int) -> list[list[str]]:
        """The hashes of each row, by segment, of what came last, and before that of what was lost with a shard."""
        last = self.tokens.get((group, sample))
        return self.lost.get((group, sample), []) + ([] if last is None else [last])

    def first_void_step(self, lineage: int) -> float:
        """The first step of ``lineage`` that a later lineage trained again."""
        return min((step for later, step in self.resumes if later > lineage), default=float("inf"))


def audit(run_dir: Path) -> AuditReport:
    """Compare the two files of a run. Raises DataError naming the file and line of what cannot be read."""
    admissions = Admissions()
    for line in _lines(run_dir / "ledger.jsonl", LedgerLine):
        admissions.read(line)
    refusals = _lines(run_dir / "refused.jsonl", RefusedLine, optional=True)
    refused = {(line.group, line.sample, line.segment): line for line in refusals}
    rows: Rows = defaultdict(list)
    kept = cut = 0
    for row in _lines(run_dir / "trained.jsonl", TrainedLine, optional=bool(refused)):
        if row.step >= admissions.first_void_step(row.lineage):
            cut += 1
        else:
            kept += 1
            rows[row.group, row.sample, row.segment].append(row)
    missing = list(_missing(admissions, rows))
    untrained = [
        line
        for key, line in sorted(refused.items())
        if line.group not in admissions.given_up and not any(row.lineage > line.lineage for row in rows.get(key, []))
    ]
    return AuditReport(
        admitted=len(admissions.groups),
        given_up=len(admissions.given_up & admissions.groups.keys()),
        trained=len({group for group, *_ in rows} & admissions.groups.keys()),
        rows=kept,
        cut=cut,
        violations=[
            *_violations_of_rows(admissions, rows),
            *(
                f"{_name(line.group, line.sample, line.segment)} came to trainer rank {line.rank} "
                f"({line.lineage}.{line.step}) with other tokens than were put, and was not trained"
                for line in untrained
            ),
            *(missing if admissions.finished else []),
        ],
        left=len(admissions.left),
        refused=len(refused) - len(untrained),
        in_flight=None if admissions.finished else len(missing),
    )


def _name(group: int, sample: int, segment: int) -> str:
    return f"group {group} sample {sample}" + (f" segment {segment}" if segment else "")


def _violations_of_rows(admissions: Admissions, rows: Rows) -> Iterator[str]:
    for (group, sample, segment), trained in sorted(rows.items()):
        name = _name(group, sample, segment)
        steps = ", ".join(f"{row.lineage}.{row.step}" for row in trained)
        if len(trained) > 1:
            yield f"{name} was trained {len(trained)} times (lineage.step {steps})"
        if group not in admissions.groups:
            yield f"{name} was trained ({steps}) but never admitted"
        elif group in admissions.given_up:
            yield f"{name} was trained ({steps}) although it was dropped or dead-lettered"
        elif not 0 <= sample < admissions.groups[group]:
            yield f"{name} was trained ({steps}), but the group has {admissions.groups[group]} samples"
        elif not admissions.sampled(group, sample):
            yield f"{name} was trained ({steps}), but no trajectory of it came to the queue"
        elif not any(0 <= segment < len(rows) for rows in admissions.sampled(group, sample)):
            came = len(admissions.sampled(group, sample)[-1])
            yield f"{name} was trained ({steps}), but its sample came with {came} rows"
        elif group not in admissions.batches.get(trained[-1].step, set()):
            yield f"{name} was trained ({steps}) but not reserved for that step"
        sampled = {digest for rows in admissions.sampled(group, sample) for digest in rows[segment : segment + 1]}
        if sampled and any(row.digest not in sampled for row in trained):
            yield f"{name} was trained ({steps}) on other tokens than were sampled"


def _missing(admissions: Admissions, rows: Rows) -> Iterator[str]:
    for group, samples in sorted(admissions.groups.items()):
        if group in admissions.given_up or group in admissions.left:
            continue
        missing = [sample for sample in range(samples) if (group, sample, 0) not in rows]
        if missing:
            yield f"group {group} was admitted, but its samples {missing} were not trained"
        for sample in set(range(samples)) - set(missing):
            came = range(1, len(admissions.tokens.get((group, sample), [])))
            if lost := [segment for segment in came if (group, sample, segment) not in rows]:
                yield f"group {group} sample {sample} was trained, but its segments {lost} never were"


def _lines(path: Path, kind: type[T], *, optional: bool = False) -> Iterator[T]:
    """Decode a file line by line; a last line without its end was torn by a crash and does not count."""
    if optional and not path.exists():
        return
    if not path.is_file():
        raise DataError(f"{path} does not exist; is this the folder of a run that trained?")
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except UNDECODABLE as error:
                raise DataError(f"{path}:{number}: {error}") from error


def main(argv: list[str] | None = None) -> int:
    """Print the report; the exit code is 0 for a correct run, 1 for one that is not, 2 if it cannot be read."""
    parser = argparse.ArgumentParser(prog="rl-async audit", description="Was every admitted group trained once?")
    parser.add_argument("run", type=Path, help="run folder")
    try:
        report = audit(parser.parse_args(argv).run)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report.text())
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
