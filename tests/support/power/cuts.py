"""Cuts the power at many points of a recording and holds each state of the disk against a promise."""

import hashlib
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.power.disk import PLAIN_CUTS, RANDOM_CUTS, Cut, Disk, Tree
from tests.support.power.recording import Change


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
