"""What a disk may hold after a power cut, from a recording: all that POSIX allows, and not what one file system does.

- What was written to a file since its last fsync may be there or not, page by page; a page that is not there holds what
  it held before, or zeros beyond the old end. A truncation is not overtaken by what was written after it.
- A name is created, renamed or deleted for good by an fsync of its folder; before, each of these may have happened or
  not. An fsync of a file does not make its name durable. A rename is atomic.
- What was synced is there.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.power.recording import Change

PAGE = 4096
SECTOR = 512
Tree = dict[str, bytes | None]  # by relative path; None for a folder


class File:
    """Content that is durable, and what was done since."""

    def __init__(self) -> None:
        self.synced = bytearray()
        self.pending: list[tuple[int, bytes | None]] = []  # what was written where; None cuts the file off there

    def now(self) -> bytes:
        """The content as programs see it."""
        return bytes(_applied(self.synced, self.pending))

    def sync(self) -> None:
        """Make everything so far durable."""
        self.synced, self.pending = _applied(self.synced, self.pending), []


def _applied(content: bytearray, changes: Sequence[tuple[int, bytes | None]]) -> bytearray:
    content = bytearray(content)
    for offset, data in changes:
        end = offset + len(data or b"")
        if len(content) < end:
            content.extend(bytes(end - len(content)))
        if data is None:
            del content[offset:]
        else:
            content[offset:end] = data
    return content


class Folder:
    """Names that are durable, and names as programs see them."""

    def __init__(self) -> None:
        self.synced: dict[str, Node] = {}
        self.names: dict[str, Node] = {}


Node = File | Folder


class Naming(NamedTuple):
    """One change of names, which happens as a whole: new entries of folders, None for those that go."""

    entries: list[tuple[Folder, str, Node | None]]


class Disk:
    """A disk, change by change."""

    def __init__(self, root: Path) -> None:
        self._root = Folder()
        self._prefix = str(root.resolve())
        self._nodes: dict[int, Node] = {}  # by inode, the newest of that number
        self._namings: list[Naming] = []  # that are not durable

    def apply(self, change: Change) -> None:
        """Do what a program did. Raises AssertionError for what was not recorded."""
        match change.kind:
            case "m":
                pass
            case "c":
                self._create(change, File())
            case "d":
                self._create(change, Folder())
            case "w":
                self._file(change).pending.append((change.offset, change.data))
            case "t":
                self._file(change).pending.append((change.offset, None))
            case "S":
                self._file(change).pending += [(0, change.data), (len(change.data), None)]
            case "s":
                self._sync(change)
            case "x":
                self._name([(*self._place(change.path), None)])
            case "l":
                folder, name = self._place(change.path)
                self._name([(*self._place(change.other), folder.names[name])])
            case "r":
                folder, name = self._place(change.path)
                self._name([(*self._place(change.other), folder.names[name]), (folder, name, None)])
            case kind:
                raise AssertionError(f"{kind}: the recorder does not know {change.path}: {change.other}")

    def _place(self, path: str) -> tuple[Folder, str]:
        *parents, name = path.removeprefix(self._prefix).strip("/").split("/")
        folder = self._root
        for parent in parents:
            below = folder.names[parent]
            assert isinstance(below, Folder)
            folder = below
        return folder, name

    def _create(self, change: Change, node: Node) -> None:
        self._nodes[change.inode] = node
        self._name([(*self._place(change.path), node)])

    def _name(self, entries: list[tuple[Folder, str, Node | None]]) -> None:
        self._namings.append(Naming(entries))
        for folder, name, child in entries:
            _enter(folder.names, name, child)

    def _file(self, change: Change) -> File:
        file = self._nodes[change.inode]
        assert isinstance(file, File)
        return file

    def _sync(self, change: Change) -> None:
        node = self._root if change.path == self._prefix else self._nodes[change.inode]
        if isinstance(node, File):
            self._notice_rename(node, change.path)
            node.sync()
            return
        for naming in [n for n in self._namings if any(folder is node for folder, _, _ in n.entries)]:
            for folder, name, child in naming.entries:
                _enter(folder.synced, name, child)
            self._namings.remove(naming)

    def _notice_rename(self, file: File, path: str) -> None:
        """Make up for a rename within a folder that was not recorded: safetensors renames by a bare system call."""
        if path.endswith(" (deleted)"):
            return
        folder, name = self._place(path)
        if folder.names.get(name) is not file:
            (old,) = (other for other, node in folder.names.items() if node is file)
            self._name([(folder, name, file), (folder, old, None)])

    # --- states -----------------------------------------------------------------------------------------------------

    def now(self) -> Tree:
        """The folder as programs see it, and as it is after a SIGKILL."""
        return dict(_tree(self._root, lambda folder: folder.names, lambda file: file.now()))

    def after_cut(self, how: "Cut", draw: random.Random) -> Tree:
        """One of the states in which a power cut may leave the folder."""
        names: dict[Folder, dict[str, Node]] = {}
        for naming in _kept(self._namings, how.names, draw):
            for folder, name, node in naming.entries:
                _enter(names.setdefault(folder, dict(folder.synced)), name, node)
        return dict(
            _tree(self._root, lambda folder: names.get(folder, folder.synced), lambda file: _torn(file, how.data, draw))
        )


class Cut(NamedTuple):
    """Which of the changes that are not durable survive: of names ``none``, ``all``, the ``first`` ones, as with a
    journaling file system, or ``some``; of a file's data also ``size``, which is its length without its content."""

    names: str
    data: str


PLAIN_CUTS = (Cut("none", "none"), Cut("all", "none"), Cut("all", "size"), Cut("none", "all"), Cut("all", "all"))
RANDOM_CUTS = (Cut("first", "any"), Cut("all", "any"), Cut("some", "any"))


def _enter(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _tree(
    folder: Folder, names: Callable[[Folder], dict[str, Node]], content: Callable[[File], bytes], prefix: str = ""
) -> Iterator[tuple[str, bytes | None]]:
    for name, node in names(folder).items():
        if isinstance(node, File):
            yield prefix + name, content(node)
        else:
            yield prefix + name, None
            yield from _tree(node, names, content, f"{prefix}{name}/")


def _kept(namings: list[Naming], how: str, draw: random.Random) -> list[Naming]:
    match how:
        case "none":
            return []
        case "all":
            return namings
        case "first":
            return namings[: draw.randint(0, len(namings))]
    return [naming for naming in namings if draw.random() < 0.5]


def _torn(file: File, how: str, draw: random.Random) -> bytes:
    """The content of a file after the cut."""
    if how == "any":
        how = draw.choice(["none", "all", "size", "first", "pages"])
    match how:
        case "none":
            return bytes(file.synced)
        case "size":
            content, size = file.synced, len(file.now())
            return bytes(content[:size]) + bytes(max(0, size - len(content)))
        case "first":
            return _first(file, draw)
        case "pages":
            return _pages(file, draw)
    return file.now()


def _first(file: File, draw: random.Random) -> bytes:
    """The first changes, and of the next one whole sectors."""
    count = draw.randint(0, len(file.pending))
    content = _applied(file.synced, file.pending[:count])
    if count < len(file.pending):
        offset, data = file.pending[count]
        if data is not None:
            end = (offset + draw.randint(0, len(data))) // SECTOR * SECTOR
            content = _applied(content, [(offset, data[: max(0, end - offset)])])
    return bytes(content)


def _pages(file: File, draw: random.Random) -> bytes:
    """Some pages of what was written before a truncation that did not happen any more."""
    cuts = [index for index, (_, data) in enumerate(file.pending) if data is None]
    last = draw.choice([*cuts, len(file.pending)])
    kept: list[tuple[int, bytes | None]] = []
    size = len(file.synced)
    for offset, data in file.pending[:last]:
        if data is None:
            kept.append((offset, None))
            size = offset
            continue
        size = max(size, offset + len(data))
        begin = offset
        while begin < offset + len(data):
            end = min(offset + len(data), (begin // PAGE + 1) * PAGE)
            if draw.random() < 0.5:
                kept.append((begin, data[begin - offset : end - offset]))
            begin = end
    content = _applied(file.synced, kept)
    return bytes(content) + (bytes(size - len(content)) if draw.random() < 0.5 else b"")
