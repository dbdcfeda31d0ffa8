"""Where Prometheus finds a run's processes: ``RUN/prometheus/NAME.json``, in the format of ``file_sd_configs``.

A process that ends takes its file away. One that is killed leaves it, and counts as down until it is back.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from rl_async.files import replace_file

FOLDER = "prometheus"


class Target(msgspec.Struct, frozen=True):
    """One process: ``name`` and ``role`` become labels of everything that it reports."""

    address: str  # HOST:PORT
    role: str
    name: str

    @classmethod
    def at(cls, url: str, role: str, name: str) -> "Target":
        """Return the target of a process that serves HTTP at ``url``."""
        return cls(urlsplit(url).netloc, role, name)


def write_targets(run: Path, file: str, targets: Iterable[Target]) -> None:
    """Replace the targets of ``file``; without any the file is removed."""
    found = [
        {"targets": [target.address], "labels": {"run": run.resolve().name, "role": target.role, "name": target.name}}
        for target in targets
    ]
    path = run / FOLDER / f"{file}.json"
    if not found:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(exist_ok=True)
    replace_file(path, msgspec.json.format(msgspec.json.encode(found)) + b"\n")


@contextmanager
def listed(wanted: bool, run: Path, target: Target) -> Iterator[None]:
    """Let Prometheus find a process while the block runs, if that is ``wanted``."""
    if not wanted:
        yield
        return
    write_targets(run, target.name, [target])
    try:
        yield
    finally:
        write_targets(run, target.name, [])
