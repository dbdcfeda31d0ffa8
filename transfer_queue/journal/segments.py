"""Payload bytes in append-only files, ``RUN/queue-payloads/00000001.segment`` and so on.

A file is written from one end to the other, read in the middle, and deleted whole when nothing in it is wanted. Which
bytes belong to what is said elsewhere (``sqlite.py``), so that bytes which a killed process left behind, whole
or torn, mean nothing.
"""

import errno
import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec
from xxhash import xxh3_64_intdigest

from rl_async.errors import JournalError
from rl_async.files import force_to_disk, make_durable_folder
from rl_async.messages.codec import Frame

SEGMENT_BYTES = 1 << 25  # a new file is begun beyond this
_MOST_BUFFERS = 512  # of one write; Linux takes 1024


class SegmentPlace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the rows of one sample are: in file ``segment`` from ``offset`` on, one after another."""

    segment: int
    offset: int
    lengths: list[int]  # of each row
    checksums: list[int]  # XXH3 of each row, 64 bits

    @property
    def nbytes(self) -> int:
        """Bytes of all rows together."""
        return sum(self.lengths)


class Segments:
    """The files of one folder. All methods raise JournalError naming the file that cannot be read or written."""

    def __init__(self, folder: Path, *, sync: bool = False, segment_bytes: int = SEGMENT_BYTES) -> None:
        """``sync``: what was flushed is on the disk, not only with the operating system."""
        self._folder, self._sync, self._segment_bytes = folder, sync, segment_bytes
        self._unsynced: set[int] = set()  # segments to which something was written since they were forced to the disk
        self._live: Counter[int] = Counter()  # samples by segment
        self._pending: list[Frame] = []
        self._reading: dict[int, int] = {}  # file descriptors by segment
        self._writing = -1  # file descriptor of the newest segment
        self._segment = 0
        self._end = 0  # of the newest segment, with what is pending

    def open(self, places: Iterable[SegmentPlace], kept: Collection[int]) -> None:
        """Check that all of these are there, and delete the files that hold none of them and are not to be ``kept``."""
        try:
            make_durable_folder(self._folder)
            ends: Counter[int] = Counter()
            for place in places:
                self._live[place.segment] += 1
                ends[place.segment] = max(ends[place.segment], place.offset + place.nbytes)
            sizes = {int(path.stem): path.stat().st_size for path in self._folder.glob("*.segment")}
            for segment, end in ends.items():
                if sizes.get(segment, 0) < end:
                    raise JournalError(
                        f"{self._path(segment)} holds {sizes.get(segment, 0)} bytes, and the queue's journal names "
                        f"{end}: bytes were lost, as by a power cut. {START_OVER}"
                    )
            for segment in sizes.keys() - ends.keys():
                if segment in kept:
                    self._live[segment] = 0
                else:
                    self._path(segment).unlink()
        except OSError as error:
            raise failed(self._folder, error) from error
        self._segment = max(sizes, default=0)
        self._unsynced.update(ends)  # by whom it was written, and whether it was forced, is not known
        self._begin()

    def holds(self, place: SegmentPlace) -> bool:
        """Whether the rows of this sample are there as they were written. Call it before ``open``."""
        try:
            with self._path(place.segment).open("rb") as file:
                file.seek(place.offset)
                rows = [file.read(length) for length in place.lengths]
        except FileNotFoundError:
            return False
        except OSError as error:
            raise failed(self._path(place.segment), error) from error
        return list(map(len, rows)) == place.lengths and place.checksums == list(map(xxh3_64_intdigest, rows))

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:08d}.segment"

    def _begin(self) -> None:
        """Close the file being written and begin a new one."""
        if self._writing >= 0:
            os.close(self._writing)
        self._segment += 1
        self._end = 0
        path = self._path(self._segment)
        try:
            self._writing = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            if self._sync:
                force_to_disk(self._folder)  # its name
        except OSError as error:
            raise failed(path, error) from error

    def add(self, rows: Sequence[Frame]) -> SegmentPlace:
        """Take in the rows of one sample; they are written by ``flush`` at the latest."""
        if self._end >= self._segment_bytes:
            self._hand_over()
            self._begin()
        place = SegmentPlace(self._segment, self._end, list(map(len, rows)), list(map(xxh3_64_intdigest, rows)))
        self._pending += rows
        self._end += place.nbytes
        self._live[place.segment] += 1
        return place

    def flush(self) -> None:
        """Hand everything to the operating system, and if asked for to the disk, whatever was written before."""
        self._hand_over()
        if self._sync:
            self._force(self._unsynced)

    def force(self) -> None:
        """Return when all samples that are in use are on the disk, with the names of their files."""
        self._hand_over()
        self._force({segment for segment in self._unsynced if self._live[segment]})
        force_to_disk(self._folder)

    def _hand_over(self) -> None:
        pending, self._pending = self._pending, []
        try:
            for start in range(0, len(pending), _MOST_BUFFERS):
                self._write(pending[start : start + _MOST_BUFFERS])
        except OSError as error:
            raise failed(self._path(self._segment), error) from error
        if pending:
            self._unsynced.add(self._segment)

    def _force(self, segments: set[int]) -> None:
        for segment in sorted(segments):
            try:
                if segment == self._segment:
                    os.fsync(self._writing)
                else:
                    force_to_disk(self._path(segment))
            except OSError as error:
                raise failed(self._path(segment), error) from error
        self._unsynced -= segments

    def _write(self, buffers: list[Frame]) -> None:
        written = os.writev(self._writing, buffers)
        if written == sum(map(len, buffers)):
            return
        rest = memoryview(b"".join(buffers))[written:]
        while rest:
            rest = rest[os.write(self._writing, rest) :]

    def read(self, place: SegmentPlace, row: int) -> Frame:
        """Read one row from its file, and compare it with its checksum."""
        if self._pending:
            self._hand_over()
        offset = place.offset + sum(place.lengths[:row])
        total = place.lengths[row]
        path = self._path(place.segment)
        try:
            if place.segment not in self._reading:
                self._reading[place.segment] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self._reading[place.segment], total, offset)
        except OSError as error:
            raise failed(path, error) from error
        if len(data) != total:
            raise JournalError(
                f"{path} ends before byte {offset + total}, which the queue's journal names. {START_OVER}"
            )
        if xxh3_64_intdigest(data) != place.checksums[row]:
            raise JournalError(f"{path} has other bytes at {offset} than were written there. {START_OVER}")
        return data

    def free(self, places: Iterable[SegmentPlace]) -> None:
        """Count these samples as unused; their files can be deleted once no sample uses them."""
        for place in places:
            self._live[place.segment] -= 1

    @property
    def dead(self) -> list[int]:
        """Files, by number, that no sample uses any more."""
        return [segment for segment, count in self._live.items() if not count and segment != self._segment]

    def delete(self, segments: Iterable[int]) -> None:
        """Delete dead files. Call it when the journal can no longer name them, whatever happens."""
        for segment in segments:
            del self._live[segment]
            self._unsynced.discard(segment)
            descriptor = self._reading.pop(segment, None)
            if descriptor is not None:
                os.close(descriptor)
            try:
                self._path(segment).unlink()
            except OSError as error:
                raise failed(self._path(segment), error) from error

    def close(self) -> None:
        """Close the file descriptors of all segments."""
        for descriptor in [*self._reading.values(), self._writing]:
            if descriptor >= 0:
                os.close(descriptor)
        self._reading, self._writing = {}, -1


START_OVER = "Move queue.sqlite* and queue-payloads/ away and continue from the last checkpoint with --resume"


def failed(path: Path, error: OSError) -> JournalError:
    """The error for a file that cannot be used: what happened to it, and the way out."""
    text = f"the queue's journal {path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return JournalError(f"{text}; free space there and continue with --resume: nothing acknowledged is lost")
    return JournalError(f"{text}; the queue needs to write there (or queue.journal=memory, which keeps nothing)")
