"""Record the changes of a program to its files, and hold every state that a power cut may leave against its promises.

The program is preloaded with ``recorder.c``. With ``mark`` it says what it has acknowledged, and so promised to keep.
A disk may hold all that POSIX allows after a cut, and not only the result of one file system:

- What was written to a file since its last fsync may be there or not, page by page; a page that is not there holds its
  content from before, or zeros beyond the old end. A truncation is not overtaken by later writes.
- A name is created, renamed or deleted for good by an fsync of its folder; before, each of these may have happened or
  not. An fsync of a file does not make its name durable. A rename is atomic.
- What was synced is there.
"""

import hashlib
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("recorder.c")
REPOSITORY = Path(__file__).parents[3]
WAIT_S = 120.0
_HEADER = struct.Struct("<BQQQII")  # struct record


class Change(NamedTuple):
    """One record. ``kind`` is a letter, which ``Disk`` interprets; a mark is of kind ``m``, its text is the path."""

    kind: str
    inode: int
    offset: int
    path: str
    other: str
    data: bytes


def build_recorder(folder: Path) -> Path:
    """Compile the library. Raises FileNotFoundError without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("cc")
    library = folder / "recorder.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True, timeout=WAIT_S)
    return library


def environment(library: Path, root: Path, log: Path) -> dict[str, str]:
    """The variables with which a program records what it does below ``root``, which exists and is empty."""
    return {
        **os.environ,
        "LD_PRELOAD": str(library),
        "POWER_ROOT": str(root),
        "POWER_LOG": str(log),
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }


def record(library: Path, module: str, arguments: Sequence[str], root: Path, log: Path) -> list[Change]:
    """Run ``module`` with ``root`` as its first argument; return what it changed there and marked, in order."""
    root.mkdir()
    command = [sys.executable, "-m", module, str(root), *arguments]
    subprocess.run(command, cwd=REPOSITORY, env=environment(library, root, log), check=True, timeout=WAIT_S)
    return read_log(log)


def read_log(log: Path) -> list[Change]:
    """Read the records of a log."""
    content, changes, at = memoryview(log.read_bytes()), [], 0
    while at < len(content):
        kind, inode, offset, data, path, other = _HEADER.unpack_from(content, at)
        parts = []
        at += _HEADER.size
        for length in (path, other, data):
            parts.append(bytes(content[at : at + length]))
            at += length
        changes.append(Change(chr(kind), inode, offset, parts[0].decode(), parts[1].decode(), parts[2]))
    return changes


def marks_of(changes: Sequence[Change]) -> list[str]:
    """Return the marks that a program wrote when something was acknowledged to it, in order."""
    return [change.path for change in changes if change.kind == "m"]


def mark(text: str) -> None:
    """Record that ``text`` was acknowledged: what it stands for has to survive a power cut from here on."""
    path = text.encode()
    with open(os.environ["POWER_LOG"], "ab", buffering=0) as log:
        log.write(_HEADER.pack(ord("m"), 0, 0, 0, len(path), 0) + path)


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
    """Replays recorded changes of files, and makes the states in which a loss of power may leave them."""

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


class State(NamedTuple):
    """What a power cut ``at`` that many changes left, and what had been acknowledged before it."""

    at: int
    how: Cut
    tree: Tree
    marks: list[str]

    def write(self, folder: Path) -> None:
        """Make ``folder`` hold this state, and nothing else."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for path, content in self.tree.items():
            if content is None:
                (folder / path).mkdir()
            else:
                (folder / path).write_bytes(content)


def states(
    changes: Sequence[Change], root: Path, draw: random.Random, *, points: int | None = None, draws: int = 1
) -> Iterator[State]:
    """All plain cuts and ``draws`` of each random one, after each change or at so many random ``points``.

    Equal states with equal marks come once. Raises AssertionError if the recording does not lead to what is in ``root``
    now: then the recorder has missed something.
    """
    disk, marks, seen = Disk(root), list[str](), set[bytes]()
    chosen = set(range(len(changes)))
    if points is not None and points < len(changes):
        chosen = {*draw.sample(range(len(changes)), points), len(changes) - 1}
    for at, change in enumerate(changes):
        disk.apply(change)
        if change.kind == "m":
            marks.append(change.path)
        for how in (*PLAIN_CUTS, *RANDOM_CUTS * draws) if at in chosen else ():
            tree = disk.after_cut(how, draw)
            digest = _digest(tree, len(marks))
            if digest not in seen:
                seen.add(digest)
                yield State(at + 1, how, tree, list(marks))
    recorded, there = disk.now(), _read(root)
    different = sorted(
        path for path in recorded.keys() | there.keys() if recorded.get(path, b"-") != there.get(path, b"-")
    )
    assert not different, f"the recording does not lead to what is on the disk: {different}"


def _digest(tree: Tree, marks: int) -> bytes:
    digest = hashlib.sha256(str(marks).encode())
    for path in sorted(tree):
        content = tree[path]
        digest.update(f"\0{path}\0{'folder' if content is None else len(content)}\0".encode() + (content or b""))
    return digest.digest()


def _read(root: Path) -> Tree:
    paths = [path for path in root.rglob("*") if path.is_dir() or path.is_file()]
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in paths
        if not path.name.endswith("-shm")
    }


def broken(
    found: Iterator[State], check: Callable[[Path, list[str]], None], folder: Path, *, most: int = 10
) -> tuple[int, list[str]]:
    """Check each state in ``folder``; the number of states, and what ``check`` said of the first that broke a promise.

    ``check`` gets the folder as the cut left it and what was acknowledged, and raises what it likes.
    """
    count, problems = 0, list[str]()
    for state in found:
        count += 1
        state.write(folder)
        try:
            check(folder, state.marks)
        except Exception as error:
            problems.append(f"cut after change {state.at}, {state.how}: {type(error).__name__}: {error}")
            if len(problems) == most:
                break
    return count, problems
