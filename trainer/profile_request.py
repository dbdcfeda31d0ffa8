"""How ``rl-async profile`` asks the trainer ranks of a live run for a profile, and where they write it."""

import secrets
from pathlib import Path

import msgspec

from rl_async.files import replace_file, undamaged

FOLDER = "profiles"


class ProfileRequest(msgspec.Struct, frozen=True):
    """The newest request, in ``RUN/profiles/request.json``: the next ``steps`` of every rank."""

    id: str
    steps: int


def write_request(run: Path, steps: int) -> None:
    """Ask all ranks to profile their next ``steps``."""
    (run / FOLDER).mkdir(exist_ok=True)
    request = ProfileRequest(secrets.token_hex(8), steps)
    replace_file(_request_file(run), msgspec.json.encode(request) + b"\n")


def read_request(run: Path) -> ProfileRequest | None:
    """Read the newest request; None if there was none. Raises UserError, naming the file, if it is damaged."""
    file = _request_file(run)
    try:
        with undamaged(file):
            return msgspec.json.decode(file.read_bytes(), type=ProfileRequest)
    except FileNotFoundError:
        return None


def trace_file(run: Path, step: int, rank: int) -> Path:
    """Return where a rank writes the trace of a step, for Perfetto."""
    return run / FOLDER / f"step-{step:06d}-rank{rank}.json.gz"


def traces(run: Path) -> dict[Path, int]:
    """Return the traces that are there, of all steps and ranks, each with the time when it was written, in ns.

    A resumed run that trains a step again replaces its trace.
    """
    return {file: file.stat().st_mtime_ns for file in (run / FOLDER).glob("step-*-rank*.json.gz")}


def _request_file(run: Path) -> Path:
    return run / FOLDER / "request.json"
