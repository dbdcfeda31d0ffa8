"""The admission ledger ``RUN/ledger.jsonl``, one JSON object per line, and the audit of a run against it.

The ledger lists the groups and their fates, independently of the trainer's ``trained.jsonl``. A line is written after
the journal has its transition, whose number it holds (``seq``), so that a queue which was killed in between, or lost
the end of its journal, can correct it. Lines are forced to disk only before the journal forgets the transitions that
they came from (``compacting``): after a power cut, missing or torn lines can be written again.

A correct run trained every admitted group exactly once, with all rows of all its samples, on the tokens that its
worker had sampled, in the step that the queue had reserved it for. A row that reached a rank with other tokens than
its producer announced is in ``refused.jsonl`` and must have been trained in a later lineage. After a resume, rows that
an older lineage trained beyond the checkpoint do not count. ``python -m rl_async.transfer_queue.ledger RUN`` exits with
1 if the run is not correct.
"""

import argparse
import logging
import mmap
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rl_async.errors import DataError, JournalError, UserError
from rl_async.files import UNDECODABLE, drop_torn_line, force_to_disk
from rl_async.recording import TrainedRow
from rl_async.transfer_queue import transitions as t

log = logging.getLogger("rl_async.queue")

# The event of a line which says that the lines before it are on the disk.
COMPACTED = "compacted"
_encode = msgspec.json.Encoder().encode


class Ledger:
    """Records the fates of groups, and the hashes of each sample's tokens as its producer announced them.

    Whole lines are written. The next queue cuts off a line that a kill or a full disk tore, and all lines from the
    first that a power cut tore.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        drop_torn_line(path)
        self._file = path.open("ab", buffering=0)
        # True at a run's first start, and after the file was lost.
        self.is_empty = self._file.tell() == 0
        self._lines: list[bytes] = []
        # The number of the next transition.
        self._seq = 0
        # Transitions whose lines are in the file, and the same with lines that were cut off.
        self._known = 0
        self._claimed = 0
        # The journal that is followed.
        self._journal = ""

    def follow(self, journal: str, count: int) -> bool:
        """Continue after ``count`` transitions of this journal; return whether it is the one followed so far.

        For another journal, a line is added that names it. Raises JournalError if lines are torn that the journal
        cannot restore.
        """
        self._seq = count
        start, last = _settled(self._path)
        torn, known, self._journal = None, 0, journal
        for offset, line in _numbered(self._path, start):
            if line is None:
                if torn is None:
                    torn, known = offset, self._known if last == journal else -1
            elif line.event == "journal":
                last, self._known = line.id, 0
            elif last == journal:
                self._known = line.seq + 1
        if last != journal:
            self._known = 0
            self._lines.append(msgspec.json.encode({"event": "journal", "id": journal}) + b"\n")
        self._claimed = self._known
        if torn is not None:
            self._cut_torn(torn, known)
        return last == journal

    def _cut_torn(self, offset: int, known: int) -> None:
        """Cut off the line at ``offset`` and the rest, if the journal has all but the first ``known`` transitions."""
        number = 1 + self._path.read_bytes()[:offset].count(b"\n")
        if known < self._seq:
            raise JournalError(
                f"{self._path}:{number} is damaged, and the journal does not have what was there; move the file away, "
                "the audit needs it whole"
            )
        log.warning("%s:%d is torn, as by a power cut; from here on it is written again", self._path, number)
        self._file.truncate(offset)
        self._known = known

    def catch_up(self, transitions: Iterable[t.Transition], *, may_cut: bool = True) -> Iterator[t.Transition]:
        """Yield transitions of the journal, while writing missing lines and cutting off surplus ones.

        Raises JournalError if surplus lines may not be cut: the journal has lost transitions that were acknowledged.
        """
        for transition in transitions:
            self.append(transition)
            yield transition
        if self._claimed > self._seq:
            if not may_cut:
                raise JournalError(
                    f"the queue's journal ends at transition {self._seq}, and {self._path} knows {self._claimed}: what "
                    "was acknowledged is lost, as when a replica of Redis without it is promoted; end the run's other "
                    "processes and continue from the last checkpoint with --resume"
                )
            self._cut(self._seq)
        self.flush()

    def _cut(self, count: int) -> None:
        """Cut off the lines after ``count`` transitions: the journal has no others, so they did not happen."""
        start, end = 0, None
        for offset, line in _numbered(self._path):
            assert line is not None, "torn lines were cut off"
            if line.event == "journal":
                start, end = offset, None
            elif end is None and line.seq >= count:
                end = offset
        if end is not None and end > start:
            self._file.truncate(end)
        self._known = count

    @property
    def count(self) -> int:
        """The number of transitions seen so far."""
        return self._seq

    def append(self, transition: t.Transition) -> None:
        """Add the transition's line, if it has one, to the next flush."""
        seq, self._seq = self._seq, self._seq + 1
        line = _LINES.get(type(transition))
        if line is not None and seq >= self._known:
            self._lines.append(_encode(line(transition) | {"seq": seq}) + b"\n")

    def flush(self) -> None:
        """Write the lines. Raises JournalError naming the file if that fails."""
        if not self._lines:
            return
        data, self._lines = b"".join(self._lines), []
        try:
            written = self._file.write(data)
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError as error:
            raise JournalError(f"{self._path}: {error.strerror}; make room there and continue with --resume") from error

    def force(self) -> None:
        """Write the lines, and force them and the file's name to the disk."""
        self.flush()
        try:
            os.fsync(self._file.fileno())
            force_to_disk(self._path.parent)
        except OSError as error:
            raise JournalError(f"{self._path}: {error.strerror}") from error

    def compacting(self) -> None:
        """Force the lines of transitions to disk that the journal is about to forget."""
        self._lines.append(_encode({"event": COMPACTED, "seq": self._seq - 1, "id": self._journal}) + b"\n")
        self.force()

    def close(self) -> None:
        """Close the file; unflushed lines are lost."""
        self._file.close()


def tells_samples(path: Path) -> bool:
    """Whether a ledger records a sample that came to the queue; False without a ledger."""
    return path.exists() and any(line is not None and line.event == "put" for _, line in _numbered(path))


def newest_lineage(path: Path) -> int:
    """Return the newest lineage that a ledger records, or -1."""
    with _mapped(path) as lines:
        return max((line.lineage for _, line in _newest(lines, "resume")), default=-1)


def tells_end(path: Path) -> bool:
    """Whether a ledger's run has ended and was not resumed since; False without a ledger. Ignores torn lines."""
    with _mapped(path) as lines:
        finished, resumed = (next(_newest(lines, event), (-1, None))[0] for event in ("finish", "resume"))
    return finished > resumed


def _settled(path: Path) -> tuple[int, str | None]:
    """The offset where reading a ledger must begin, and the journal that is followed there.

    That is the last COMPACTED line but one: the journal forgot nothing before the next one was written. So the ledger
    of a long run is not read whole at each start.
    """
    with _mapped(path) as lines:
        places = _newest(lines, COMPACTED)
        next(places, None)
        offset, line = next(places, (0, None))
    return (offset, line.id) if line is not None and line.id else (0, None)


@contextmanager
def _mapped(path: Path) -> Iterator[bytes | mmap.mmap]:
    """Map a file into memory, so that only the bytes in use are read; a missing file has none."""
    if not path.exists() or not path.stat().st_size:
        yield b""
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
        yield lines


def _newest(lines: bytes | mmap.mmap, event: str) -> "Iterator[tuple[int, _Numbered]]":
    """The whole lines of one event with their offsets, newest first.

    Their beginning occurs nowhere else: a string in JSON has no bare quotes.
    """
    beginning, at = b'{"event":"%b"' % event.encode(), len(lines)
    while (at := lines.rfind(beginning, 0, at)) >= 0:
        end = lines.find(b"\n", at)
        with suppress(*UNDECODABLE):
            yield at, msgspec.json.decode(lines[at : end if end >= 0 else len(lines)], type=_Numbered)


class _Numbered(msgspec.Struct):
    event: str
    seq: int = -1
    id: str = ""
    lineage: int = -1


def _numbered(path: Path, offset: int = 0) -> Iterator[tuple[int, _Numbered | None]]:
    """The lines from ``offset`` on with their offsets, and None in place of an invalid line."""
    decoder = msgspec.json.Decoder(_Numbered)
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            try:
                yield offset, decoder.decode(line)
            except UNDECODABLE:
                yield offset, None
            offset += len(line)


def _admit(event: t.Admitted) -> dict[str, Any]:
    return {
        "event": "admit",
        "group": event.group,
        "task": event.task.task_id,
        "partition": event.partition,
        "samples": event.samples,
    }


def _put(event: t.SamplesStored) -> dict[str, Any]:
    """One line for all samples: (group, sample, the hash of each row's tokens by segment)."""
    stored = [(rows[0].group_id, rows[0].sample, [header.tokens_hash for header in rows]) for rows in event.samples]
    return {"event": "put", "stored": stored}


def _lost(event: t.ShardLost) -> dict[str, Any]:
    return {"event": "lost", "shard": event.shard_id, "rows": event.samples}


def _resume(event: t.RolledBack) -> dict[str, Any]:
    return {
        "event": "resume",
        "step": event.step,
        "lineage": event.lineage,
        "fresh": event.fresh,
        "next_group": event.next_group,
        "readmitted": [group.group for group in event.readmitted],
    }


_LINES: dict[type[t.Transition], Callable[[Any], dict[str, Any]]] = {
    t.Admitted: _admit,
    t.SamplesStored: _put,
    t.GroupReady: lambda event: {"event": "ready", "group": event.group},
    t.BatchReserved: lambda event: {"event": "reserve", "step": event.step, "groups": event.groups},
    t.BatchCommitted: lambda event: {"event": "commit", "step": event.step},
    t.GroupDropped: lambda event: {"event": "drop", "group": event.group, "reason": event.reason},
    t.DeadLettered: lambda event: {"event": "dead_letter", "group": event.group, "error": event.error},
    t.RolledBack: _resume,
    t.ShardLost: _lost,
    t.RunFinished: lambda event: {"event": "finish", "left": event.left},
}


# The violations that are printed.
SHOWN = 20
TRAINED_ONCE, OR_GIVEN_UP = "ok: every admitted group was trained exactly once", " or given up"
T = TypeVar("T")


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True):
    """Any line of the ledger; which fields count depends on ``event``.

    ``stored`` holds (group, sample, hashes of its tokens by segment). Ledgers of older versions have a line for each
    ``sample`` in its place, with ``tokens_sha256`` by segment. The groups ``left`` were still in the queue when the run
    ended. ``rows`` names the samples, (group, sample), that were lost with a payload shard.
    """

    event: str
    group: int = -1
    partition: str = ""
    samples: int = 0
    stored: list[tuple[int, int, list[str]]] = []
    sample: int = -1
    tokens_sha256: list[str] = []
    step: int = -1
    groups: list[int] = []
    lineage: int = 0
    fresh: bool = False
    next_group: int = 0
    readmitted: list[int] = []
    left: list[int] = []
    rows: list[tuple[int, int]] = []


class RefusedLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``refused.jsonl``: a row that came to a rank with other tokens than were put."""

    lineage: int
    step: int
    group: int
    sample: int
    segment: int
    rank: int


# By (group, sample, segment).
Rows = dict[tuple[int, int, int], list[TrainedRow]]


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the comparison; ``violations`` are sentences for people.

    Of the ``admitted`` training groups, some were ``given_up`` (dropped or dead-lettered) or ``trained`` at least once.
    ``rows`` were trained, without the ``cut`` ones of older lineages beyond their checkpoint. Groups were ``left`` if
    the run was resumed with fewer steps. ``refused`` rows came to the trainer changed, and were trained later as they
    had been put. An unfinished run still has ``in_flight`` groups to train.
    """

    admitted: int
    given_up: int
    trained: int
    rows: int
    cut: int
    violations: list[str]
    left: int = 0
    refused: int = 0
    in_flight: int | None = None

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
    """The state that the lines of a ledger lead to."""

    def __init__(self) -> None:
        # The number of samples by group.
        self.groups: dict[int, int] = {}
        self.given_up: set[int] = set()
        # By (group, sample): the row hashes of the latest put, and those of attempts that were lost with a shard.
        self.tokens: dict[tuple[int, int], list[str]] = {}
        self.lost: dict[tuple[int, int], list[list[str]]] = defaultdict(list)
        # Groups by step.
        self.batches: dict[int, set[int]] = {}
        # Pairs of lineage and step.
        self.resumes: list[tuple[int, int]] = []
        # Whether a group was admitted since the last resume. A run with more groups than it needs admits none.
        self._admits = False
        self.finished = False
        # Groups that remain at the end, because the run was resumed with fewer steps.
        self.left: set[int] = set()

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
                # The trainer may have read them before.
                for group, sample in line.rows:
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
        # Another queue has taken over, so that the old one's admissions after the checkpoint are void.
        if line.fresh:
            self.groups = {group: n for group, n in self.groups.items() if group < line.next_group}
            self.given_up = {g for g in self.given_up if g < line.next_group and g not in line.readmitted}

    def sampled(self, group: int, sample: int) -> list[list[str]]:
        """Row hashes of every stored attempt, latest last; attempts lost with a shard come first."""
        last = self.tokens.get((group, sample))
        return self.lost.get((group, sample), []) + ([] if last is None else [last])

    def first_void_step(self, lineage: int) -> float:
        """The first step of ``lineage`` that a later lineage trained again."""
        return min((step for later, step in self.resumes if later > lineage), default=float("inf"))


def audit(run_dir: Path) -> AuditReport:
    """Compare the two files of a run. Raises DataError naming file and line if one cannot be read."""
    admissions = Admissions()
    for line in _lines(run_dir / "ledger.jsonl", LedgerLine):
        admissions.read(line)
    refusals = _lines(run_dir / "refused.jsonl", RefusedLine, optional=True)
    refused = {(line.group, line.sample, line.segment): line for line in refusals}
    rows: Rows = defaultdict(list)
    kept = cut = 0
    for row in _lines(run_dir / "trained.jsonl", TrainedRow, optional=bool(refused)):
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
